"""The datasets of the benchmark by name."""

from __future__ import annotations

from equipool.benchmark.cohorts import BRAINS, is_brains, is_whole, load_brains, place_of
from equipool.benchmark.uci import FILES, LOADERS, DatasetSplit
from equipool.exceptions import InputError
from equipool.files import cache_folder
from equipool.simulate.brains import COHORTS

__all__ = ["list_datasets", "load_dataset", "require_dataset"]

Row = tuple[str, int | str, int | str, str, bool]


def load_dataset(name: str, seed: int = 0) -> DatasetSplit:
    """Return a dataset by name; the seed only matters where there is no official split."""
    require_dataset(name)
    return load_brains(name, seed) if is_brains(name) else LOADERS[name](seed)


def require_dataset(name: str) -> None:
    """Raise an error that names the datasets there are, where this is none of them."""
    if name not in LOADERS and not is_brains(name):
        raise InputError(f"There is no dataset {name!r}; there are {', '.join((*LOADERS, *BRAINS))}.")


def list_datasets() -> list[Row]:
    """Return name, participants, sites, source, and whether it is in the cache, of every dataset."""
    rows: list[Row] = []
    for name in LOADERS:
        participants = 1_000 if name == "german" else 45_222
        source = "UCI" if "overlap" not in name else "UCI, cut by age"
        raw = [file for file in FILES if file.startswith(f"{name.partition('-')[0]}.")]
        rows.append((name, participants, 2, source, all((cache_folder() / file).is_file() for file in raw)))
    for name in BRAINS:
        like = name.partition("-")[0]
        if ":" in name:
            rows.append((name, "yours", "yours", "your folder", False))
            continue
        cohort, source = COHORTS[like], "simulated" + (", cut by age" if name.endswith("-hard") else "")
        participants = sum(cohort.patients) + sum(cohort.controls)
        rows.append((name, participants, len(cohort.scanners), source, is_whole(place_of(like))))
    return rows
