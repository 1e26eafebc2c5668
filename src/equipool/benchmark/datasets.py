"""The datasets of the benchmark by name."""

from __future__ import annotations

from equipool.benchmark.cohorts import BRAINS, is_brains, is_whole, load_brains, place_of
from equipool.benchmark.uci import FILES, LOADERS, DatasetSplit
from equipool.exceptions import InputError
from equipool.files import cache_folder
from equipool.simulate.brains import COHORTS


def load_dataset(name: str, seed: int = 0) -> DatasetSplit:
    """Return a dataset by name; the seed is that of the split, where there is no official one."""
    require_dataset(name)
    return load_brains(name, seed) if is_brains(name) else LOADERS[name](seed)


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
            cohort = COHORTS[like]
            participants = sum(cohort.patients) + sum(cohort.controls)
            source, cached = f"simulated{cut}", is_whole(place_of(like))
            rows.append((name, participants, len(cohort.scanners), source, cached))
    return rows
