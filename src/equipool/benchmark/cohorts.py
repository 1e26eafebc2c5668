"""The benchmark's cohorts of brains: simulated after ADNI and ADCP, and folders of the real ones.

``adni-sim`` and ``adcp-sim`` are simulated once into the cache. With ``-hard``, the ages of the scanners'
training participants do not overlap. ``adni:FOLDER`` and ``adcp:FOLDER`` are real.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.benchmark.uci import DatasetSplit
from equipool.checks import Roles
from equipool.data.bids import read_bids
from equipool.data.pooled import PooledDataset
from equipool.data.presets import read_adcp, read_adni
from equipool.data.volumes import Volumes
from equipool.exceptions import InputError
from equipool.files import cache_folder
from equipool.progress import say
from equipool.simulate.brains import BRAINS_VERSION, SimulatedBrains, simulate_brains

BRAINS = ("adni-sim", "adni-sim-hard", "adcp-sim", "adcp-sim-hard", "adni:FOLDER", "adcp:FOLDER")
RESOLUTION = 4.0
COHORT_SEED = 2022  # of the benchmark; methods were developed on other cohorts


def is_brains(name: str) -> bool:
    """Whether a dataset is one of images."""
    return name in BRAINS[:4] or name.startswith(("adni:", "adcp:"))


def load_brains(name: str, seed: int = 0) -> DatasetSplit:
    """Return a random split of a cohort, with a fifth of the participants to test on."""
    pool, volumes = whole_cohort(name)
    train, test = pool.split(0.2, stratify=("site", "target", "age"), random_state=seed)
    fitted = train
    if name.endswith("-hard"):
        fitted = train[apart(pool.C[train, 0], pool.site[train], len(pool.sites))]
    return DatasetSplit(name, pool[fitted], pool[test], pool[train], volumes=volumes)


def whole_cohort(name: str) -> tuple[PooledDataset, Volumes]:
    """Return all participants of a cohort, and their volumes."""
    return _cohort(name.removesuffix("-hard"))


def apart(age: NDArray[np.float64], site: NDArray[np.intp], n_sites: int) -> NDArray[np.bool_]:
    """Return which rows lie in their site's range of ages: between quantiles, sites in order of mean age."""
    rank = np.argsort(np.argsort([age[site == k].mean() for k in range(n_sites)]))[site]
    edges = np.quantile(age, np.linspace(0, 1, n_sites + 1))
    edges[-1] = np.inf
    return (age >= edges[rank]) & (age < edges[rank + 1])


def place_of(like: str) -> Path:
    """Return the folder of a simulated cohort in the cache."""
    return cache_folder() / "simulated" / f"{like}-{RESOLUTION:g}mm-{COHORT_SEED}-v{BRAINS_VERSION}"


def simulated_folder(like: str) -> Path:
    """Return the folder of a simulated cohort in the cache; simulate it if it is missing."""
    folder = place_of(like)
    if is_whole(folder):
        return folder
    brains = _simulated(like)
    say(f"simulating {len(brains)} brains into {folder}")
    # Written to a temporary folder, which is renamed: another run may simulate at the same time.
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for _ in brains.write(partial, jobs=os.cpu_count() or 1):
            pass
        if not is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)  # of a killed run
            partial.rename(folder)
    except OSError:
        if not is_whole(folder):  # by the other run
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def is_whole(folder: Path) -> bool:
    """Return whether a simulated cohort is complete."""
    return (folder / "participants.tsv").is_file()


def scanned_by_all(
    name: str, ids: Sequence[str], sites: Sequence[str], mask: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return scans of simulated participants by every scanner, (sites, participants, voxels)."""
    brains = _simulated(name.removesuffix("-hard").removesuffix("-sim"))
    scanners = {scanner.name: scanner for scanner in brains.cohort.scanners}
    scans = np.empty((len(sites), len(ids), int(mask.sum())), dtype=np.float32)
    for column, participant in enumerate(pd.Index(brains.people["participant_id"]).get_indexer(list(ids))):
        tissues = brains.tissues(participant)
        for row, site in enumerate(sites):
            scans[row, column] = brains.image(tissues, scanners[site], participant)[mask]
    return scans


def _simulated(like: str) -> SimulatedBrains:
    return simulate_brains(like, resolution=RESOLUTION, random_state=COHORT_SEED)


@cache
def _cohort(name: str) -> tuple[PooledDataset, Volumes]:
    frame, mask = _participants(name)
    roles: Roles = {"id": "participant_id", "covariates": "age", "target": "dx"}
    pool = PooledDataset.from_frame(frame, site="site", images="path", units={"age": "years"}, **roles)
    return pool, Volumes.build(pool.images or (), mask=mask)


def _participants(name: str) -> tuple[pd.DataFrame, Path | None]:
    kind, _, place = name.partition(":")
    if not place:
        folder = simulated_folder(kind.removesuffix("-sim"))
        return read_bids(folder), folder / "derivatives" / "truth" / "mask.nii.gz"
    if not Path(place).exists():
        raise InputError(f"{place} does not exist; give the folder of {kind.upper()}, as {kind}:FOLDER.")
    return (read_adni if kind == "adni" else read_adcp)(place), None
