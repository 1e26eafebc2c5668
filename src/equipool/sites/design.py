"""Which rows belong to which site, participant and fold, and what a regression allows for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["Design", "find_point_masses"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

POINT_MASS = 0.05  # least share of rows with one value
POINT_MASS_RATIO = 3.0  # times as many rows as the next most common value


@dataclass(frozen=True, eq=False)
class Design:
    """What is known of each row.

    Attributes
    ----------
    site
        (rows,): site index.
    covariates
        (rows, K): what is kept.
    target
        (rows, E): columns of a target to allow for when shifts are estimated; E = 0 without one.
    weight
        (rows,): 1 over the number of rows of the participant.
    fold
        (rows,): folds of participants, for choices on held-out ones.
    n_sites
        Number of sites; some may have no row.
    """

    site: IntArray
    covariates: FloatArray
    target: FloatArray
    weight: FloatArray
    fold: IntArray
    n_sites: int

    @property
    def n_folds(self) -> int:
        """Number of folds."""
        return int(self.fold.max()) + 1

    @property
    def n_participants(self) -> FloatArray:
        """Participants, not rows, of each site."""
        return np.bincount(self.site, weights=self.weight, minlength=self.n_sites)

    def only(self, rows: IntArray) -> Design:
        """Return the design of some rows; sites keep their indices."""
        parts = {
            name: getattr(self, name)[rows] for name in ("site", "covariates", "target", "weight", "fold")
        }
        return replace(self, **parts)

    def folds(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield rows to fit on and held-out rows of sites that were fitted."""
        for fold in range(self.n_folds):
            train = np.flatnonzero(self.fold != fold)
            seen = np.bincount(self.site[train], minlength=self.n_sites) > 0
            yield train, np.flatnonzero((self.fold == fold) & seen[self.site])


def find_point_masses(ordered: FloatArray) -> FloatArray:
    """Return for each sorted feature the value that many rows share, such as a volume of 0, or NaN.

    Such a value is no measurement: shifted by its site, it would become a different number at each site, and
    give the site away. It is kept as it is.
    """
    values_at = np.full(ordered.shape[1], np.nan)
    length = max(int(np.ceil(POINT_MASS * len(ordered))), 5)
    if len(ordered) < length:
        return values_at
    # A value with this share of rows fills a run of the sorted column, whose ends are equal.
    runs = ordered[length - 1 :] == ordered[: len(ordered) - length + 1]
    for k in np.flatnonzero(runs.any(axis=0)):
        values, counts = np.unique(ordered[:, k], return_counts=True)
        largest, second = np.sort(np.append(counts, 0))[[-1, -2]]
        # Rounded numbers repeat too, but their neighbours do so as often.
        if largest >= POINT_MASS_RATIO * second:
            values_at[k] = values[counts.argmax()]
    return values_at
