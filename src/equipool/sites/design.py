"""The design of a table: site, participant, covariates and fold of each row; outlying and shared values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["Design", "find_point_masses", "standard_deviation", "winsorised"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

WINSORISE_AT = 4.0  # standard deviations; of a Gaussian feature, 6 values in 100 000 are farther out
MIN_PARTICIPANTS = 25  # of a site, for a warp or a coupling of its own; below, held-out gains are noise
MAX_ROWS = 10_000  # drawn at random to choose a warp and to train a coupling; more hardly change either
MAX_ITERATIONS = 30  # of loops that stop when nothing changes, most after fewer than ten
POINT_MASS = 0.05  # least share of rows with one value
POINT_MASS_RATIO = 3.0  # times as many rows as the next most common value; rounded values repeat as often


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
        """Participants, not rows, of each site, (sites,)."""
        return np.bincount(self.site, self.weight, self.n_sites).astype(np.float64)

    def only(self, rows: IntArray) -> Design:
        """Return the design of some rows; sites keep their indices."""
        names = ("site", "covariates", "target", "weight", "fold")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def folds(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield rows to fit on and held-out rows of sites that were fitted; nothing for one fold."""
        for fold in range(self.n_folds if self.n_folds > 1 else 0):
            train = np.flatnonzero(self.fold != fold)
            seen = np.bincount(self.site[train], minlength=self.n_sites) > 0
            yield train, np.flatnonzero((self.fold == fold) & seen[self.site])


def standard_deviation(residuals: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the standard deviation of residuals (rows, features) around 0, (features,), never 0."""
    return np.sqrt(np.maximum(weight @ residuals**2 / weight.sum(), 1e-12))


def winsorised(residuals: FloatArray, deviation: FloatArray | float) -> FloatArray:
    """Return residuals winsorised, so that a failed value does not change a participant's other features."""
    return np.clip(residuals, -WINSORISE_AT * deviation, WINSORISE_AT * deviation)


def find_point_masses(ordered: FloatArray) -> FloatArray:
    """Return for each sorted feature, NaN last, the value that many rows share, or NaN.

    Such a value, like a volume of 0, is no measurement: shifted by its site, it would become a different
    number at each site, and give the site away. It is kept as it is.
    """
    result = np.full(ordered.shape[1], np.nan)
    length = max(int(np.ceil(POINT_MASS * len(ordered))), 5)
    if len(ordered) < length:
        return result
    # A value with this share of rows fills a run of the sorted column, whose ends are equal.
    runs = ordered[length - 1 :] == ordered[: len(ordered) - length + 1]
    for k in np.flatnonzero(runs.any(axis=0)):
        values, counts = np.unique(ordered[~np.isnan(ordered[:, k]), k], return_counts=True)
        largest, second = np.sort(np.append(counts, 0))[[-1, -2]]
        if largest >= POINT_MASS_RATIO * second:
            result[k] = values[counts.argmax()]
    return result
