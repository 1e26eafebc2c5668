"""The datasets of the benchmark by name: UCI's tables, and cohorts of brains.

``adni-sim`` and ``adcp-sim`` are simulated once into the cache, after ADNI and ADCP. With ``-hard``, the ages
of the scanners' training participants do not overlap. ``adni:FOLDER`` and ``adcp:FOLDER`` are real.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.benchmark.uci import FILES, LOADERS, DatasetSplit
from equipool.data.bids import read_bids
from equipool.data.pooled import PooledDataset
from equipool.data.presets import read_adcp, read_adni
from equipool.data.volumes import Volumes
from equipool.exceptions import InputError
from equipool.files import cache_folder
from equipool.progress import say
from equipool.simulate.brains import BRAINS_VERSION, COHORTS, SimulatedBrains, simulate_brains

BRAINS = ("adni-sim", "adni-sim-hard", "adcp-sim", "adcp-sim-hard", "adni:FOLDER", "adcp:FOLDER")
RESOLUTION = 4.0
COHORT_SEED = 2022  # of the benchmark; methods were developed on other cohorts


def load_dataset(name: str, seed: int = 0) -> DatasetSplit:
    """Return a dataset by name; the seed is that of the split, where there is no official one."""
    require_dataset(name)
    if name in LOADERS:
        return LOADERS[name](seed)
    pool, volumes = whole_cohort(name)
    train, test = split_cohort(pool, seed)
    fitted = train
    if name.endswith("-hard"):
        fitted = train[apart(pool.C[train, 0], pool.site[train], len(pool.sites))]
    return DatasetSplit(pool[fitted], pool[test], pool[train], volumes)


def require_dataset(name: str) -> None:
    """Raise an error that lists the datasets if this is none of them."""
    if name not in LOADERS and not is_brains(name):
        raise InputError(f"There is no dataset {name!r}; there are {', '.join((*LOADERS, *BRAINS))}.")


def list_datasets() -> list[tuple[str, int | str, int | str, str, bool]]:
    """Return name, participants, sites, source, and whether it is in the cache, of every dataset."""
    rows: list[tuple[str, int | str, int | str, str, bool]] = []
    for name in (*LOADERS, *BRAINS):
        like = name.partition("-")[0]
        cut = ", cut by age" if "overlap" in name or name.endswith("-hard") else ""
        if name in LOADERS:
            cached = all((cache_folder() / file).is_file() for file in FILES if file.startswith(f"{like}."))
            rows.append((name, 1_000 if name == "german" else 45_222, 2, f"UCI{cut}", cached))
        elif ":" in name:
            rows.append((name, "yours", "yours", "your folder", False))
        else:
            cohort, cached = COHORTS[like], is_whole(place_of(like))
            participants = sum(cohort.patients) + sum(cohort.controls)
            rows.append((name, participants, len(cohort.scanners), f"simulated{cut}", cached))
    return rows


def is_brains(name: str) -> bool:
    """Whether a dataset is one of images."""
    return name in BRAINS[:4] or name.startswith(("adni:", "adcp:"))


def whole_cohort(name: str) -> tuple[PooledDataset, Volumes]:
    """Return all participants of a cohort, and their volumes."""
    return _cohort(name.removesuffix("-hard"))


@cache
def _cohort(name: str) -> tuple[PooledDataset, Volumes]:
    kind, _, place = name.partition(":")
    if not place:
        folder = simulated_folder(name)
        frame, mask = read_bids(folder), folder / "derivatives" / "truth" / "mask.nii.gz"
    elif Path(place).exists():
        frame, mask = (read_adni if kind == "adni" else read_adcp)(place), None
    else:
        raise InputError(f"{place} does not exist; give the folder of {kind.upper()}, as {kind}:FOLDER.")
    pool = PooledDataset.from_frame(
        frame,
        site="site",
        images="path",
        units={"age": "years"},
        id="participant_id",
        covariates="age",
        target="dx",
    )
    return pool, Volumes.build(pool.images or (), mask=mask)


def split_cohort(pool: PooledDataset, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return training rows and test rows, a fifth of the participants."""
    return pool.split(0.2, stratify=("site", "target", "age"), random_state=seed)


def apart(age: NDArray[np.float64], site: NDArray[np.intp], n_sites: int) -> NDArray[np.bool_]:
    """Return which rows lie in their site's range of ages: between quantiles, sites in order of mean age."""
    rank = np.argsort(np.argsort([age[site == k].mean() for k in range(n_sites)]))[site]
    edges = np.quantile(age, np.linspace(0, 1, n_sites + 1))
    edges[-1] = np.inf
    return (age >= edges[rank]) & (age < edges[rank + 1])


def place_of(name: str) -> Path:
    """Return the folder of a simulated cohort in the cache."""
    like = name.partition("-")[0]
    return cache_folder() / "simulated" / f"{like}-{RESOLUTION:g}mm-{COHORT_SEED}-v{BRAINS_VERSION}"


def is_whole(folder: Path) -> bool:
    """Return whether a simulated cohort is complete."""
    return (folder / "participants.tsv").is_file()


def simulated_folder(name: str) -> Path:
    """Return the folder of a simulated cohort in the cache; simulate it if it is missing."""
    folder = place_of(name)
    if is_whole(folder):
        return folder
    brains = _simulated(name)
    say(f"simulating {len(brains)} brains into {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder, which is renamed: another run may simulate at the same time.
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent, ignore_cleanup_errors=True) as work:
        for _ in brains.write(Path(work) / "new", jobs=os.cpu_count() or 1):
            pass
        try:
            if not is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)  # of a killed run
                (Path(work) / "new").rename(folder)
        except OSError:
            if not is_whole(folder):  # by the other run
                raise
    return folder


def scanned_by_all(
    name: str, ids: Sequence[str], sites: Sequence[str], mask: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return scans of simulated participants by every scanner, (sites, participants, voxels)."""
    brains = _simulated(name)
    scanners = {scanner.name: scanner for scanner in brains.cohort.scanners}
    scans = np.empty((len(sites), len(ids), int(mask.sum())), dtype=np.float32)
    for column, participant in enumerate(pd.Index(brains.people["participant_id"]).get_indexer(list(ids))):
        tissues = brains.tissues(participant)
        for row, site in enumerate(sites):
            scans[row, column] = brains.image(tissues, scanners[site], participant)[mask]
    return scans


def _simulated(name: str) -> SimulatedBrains:
    return simulate_brains(name.partition("-")[0], resolution=RESOLUTION, random_state=COHORT_SEED)
