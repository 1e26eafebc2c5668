"""The datasets of the benchmark by name."""

from __future__ import annotations

from equipool.data.brainsets import BRAINS, is_brains, load_brains
from equipool.data.uci import LOADERS, DatasetSplit
from equipool.exceptions import InputError

__all__ = ["load_dataset", "require_dataset"]


def load_dataset(name: str, seed: int = 0) -> DatasetSplit:
    """Return a dataset by name; the seed only matters where there is no official split."""
    require_dataset(name)
    return load_brains(name, seed) if is_brains(name) else LOADERS[name](seed)


def require_dataset(name: str) -> None:
    """Raise an error that names the datasets there are, where this is none of them."""
    if name not in LOADERS and not is_brains(name):
        raise InputError(f"There is no dataset {name!r}; there are {', '.join((*LOADERS, *BRAINS))}.")
