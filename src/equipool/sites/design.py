"""Who stands where in a table of several sites, and values that many people share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["ATOM_WHOLE", "Design", "find_atoms"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

ATOM_KEPT, ATOM_WHOLE = 0.05, 0.5  # shares of people with one and the same value, see find_atoms
ATOM_STANDS_OUT = 3.0  # times as many people as the next most common value


@dataclass(frozen=True, eq=False)
class Design:
    """Who stands where: site numbers, covariates, what else to allow for, weights and folds of people."""

    site: IntArray
    c: FloatArray
    extra: FloatArray
    weight: FloatArray
    fold: IntArray
    n_sites: int

    @property
    def everybody(self) -> IntArray:
        """All rows."""
        return np.arange(len(self.site))

    @property
    def n_folds(self) -> int:
        """How many parts people were dealt to."""
        return int(self.fold.max()) + 1

    @property
    def people(self) -> FloatArray:
        """How many people, not rows, each site has."""
        return self.people_of(self.everybody)

    def people_of(self, rows: IntArray) -> FloatArray:
        """Return how many people each site has among rows."""
        count = np.bincount(self.site[rows], weights=self.weight[rows], minlength=self.n_sites)
        return count.astype(np.float64)

    def only(self, rows: IntArray) -> Design:
        """Return the same for some rows; sites keep their numbers."""
        parts = {name: getattr(self, name)[rows] for name in ("site", "c", "extra", "weight", "fold")}
        return replace(self, **parts)

    @property
    def thirds(self) -> Design:
        """The same with people dealt to three parts, for choices that need no more."""
        return replace(self, fold=self.fold % 3) if self.n_folds > 3 else self

    def folds(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Give the rows to fit on and the rows to judge by, of sites that were fitted."""
        for fold in range(self.n_folds):
            fit = np.flatnonzero(self.fold != fold)
            seen = np.bincount(self.site[fit], minlength=self.n_sites) > 0
            yield fit, np.flatnonzero((self.fold == fold) & seen[self.site])


def find_atoms(ordered: FloatArray) -> FloatArray:
    """Return for each feature, sorted, the value that many people share, NaN where there is none.

    Such a value (no lesion, volume 0) says "nothing here", not a measurement: moved by its site's shift it
    would become a different number at each site, from which anybody could tell the site. It is kept.
    """
    atoms = np.full(ordered.shape[1], np.nan)
    length = max(int(np.ceil(ATOM_KEPT * len(ordered))), 5)
    if len(ordered) < length:
        return atoms
    # A value with a share of people fills a run of the sorted column, so its ends are equal.
    runs = ordered[length - 1 :] == ordered[: len(ordered) - length + 1]
    for k in np.flatnonzero(runs.any(axis=0)):
        values, counts = np.unique(ordered[:, k], return_counts=True)
        most, next_most = np.sort(np.append(counts, 0))[[-1, -2]]
        # Rounded numbers repeat too, but then their neighbours do so as often.
        if most >= ATOM_STANDS_OUT * next_most:
            atoms[k] = values[counts.argmax()]
    return atoms
