"""The design of a table; sums over its rows by site, in pieces that fit into a cache; outlying values."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from equipool.sites.effect import FloatArray, IntArray

TINY = 1e-12  # share of a standardised feature's variance that may be rounding; divisors stay above it
FEW = 5  # rows or participants; of fewer, neither shared values nor a variance or mean say anything
WINSORISE_AT = 4.0  # standard deviations; of a Gaussian feature, 6 values in 100 000 are farther out
MIN_PARTICIPANTS = 25  # of a site, for its warp or coupling; below, held-out gains are noise
MAX_ROWS = 10_000  # drawn at random to choose a warp and to fit a coupling; more hardly change either
MAX_FEATURES = 2000  # that are changed jointly, for the time of a covariance; and voxels to choose a trend on
MAX_SLOPE_RATIO = 5.0  # of a site's curve and the pool's, so that maps stay invertible
MAX_ITERATIONS = 100  # of loops that stop when nothing changes, most after fewer than twenty
POINT_MASS = 0.05  # least share of rows with one value
POINT_MASS_RATIO = 3.0  # times as many rows as the next most common value; rounded values repeat as often
PIECE = 2**17  # numbers of a pass at a time: a megabyte, which fits into a cache


@dataclass(frozen=True, eq=False)
class Design:
    """What is known of each row."""

    site: IntArray  # (rows,), index
    covariates: FloatArray  # (rows, K), whose effects are kept
    target: FloatArray  # (rows, E), columns to allow for when shifts are estimated; E = 0 without a target
    weight: FloatArray  # (rows,), 1 over the number of rows of the participant
    fold: IntArray  # (rows,), folds of participants, for choices on held-out ones
    n_sites: int  # some may have no row

    @property
    def n_folds(self) -> int:
        """Number of folds; with one, nothing can be held out."""
        return int(self.fold.max()) + 1

    @property
    def n_participants(self) -> FloatArray:
        """Participants, not rows, of each site, (sites,)."""
        return np.bincount(self.site, self.weight, self.n_sites).astype(np.float64)

    def only(self, rows: IntArray) -> Self:
        """Return the design of some rows; sites keep their indices."""
        names = ("site", "covariates", "target", "weight", "fold")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def folds(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield rows to fit on and held-out rows of sites that were fitted; nothing for one fold."""
        for fold in range(self.n_folds if self.n_folds > 1 else 0):
            train = np.flatnonzero(self.fold != fold)
            fitted = np.bincount(self.site[train], minlength=self.n_sites) > 0
            yield train, np.flatnonzero((self.fold == fold) & fitted[self.site])

    def sample(self) -> IntArray:
        """Return at most MAX_ROWS rows of sites with enough participants; none where fewer than two have."""
        rows = np.arange(len(self.site))
        if len(rows) > MAX_ROWS:
            rows = np.sort(np.random.default_rng(0).permutation(rows)[:MAX_ROWS])
        large = self.only(rows).n_participants >= MIN_PARTICIPANTS
        return rows[large[self.site[rows]]] if large.sum() > 1 else rows[:0]

    def site_means(self, values: FloatArray) -> FloatArray:
        """Return the weighted mean of values (rows, columns) at each site, (sites, columns)."""
        sums = site_sums(values, self.site, self.n_sites, self.weight)
        return sums / np.maximum(self.n_participants, TINY)[:, None]

    def deviation(self, residuals: FloatArray) -> FloatArray:
        """Return the standard deviation of residuals (rows, features) around 0, (features,), never 0."""
        return np.sqrt(np.maximum(self.weight @ residuals**2 / self.weight.sum(), TINY))


def pieces(rows: int, width: int) -> Iterator[slice]:
    """Cut so many rows of so many numbers into parts of about ``PIECE`` numbers."""
    step = max(PIECE // max(width, 1), 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def site_rows(site: IntArray, n_sites: int) -> list[IntArray]:
    """Return the rows of each site, by one sort."""
    ends = np.cumsum(np.bincount(site, minlength=n_sites))[:-1]
    return np.split(np.argsort(site, kind="stable"), ends)


def site_sums(values: FloatArray, site: IntArray, n_sites: int, weight: FloatArray) -> FloatArray:
    """Return Σ_i w_i x_i over the rows of each site, (sites, columns), by a sparse matrix (sites, rows)."""
    from scipy.sparse import csc_array

    members: Any = csc_array((weight, site, np.arange(len(site) + 1)), shape=(n_sites, len(site)))
    return members @ values


def gram(a: FloatArray, weight: FloatArray) -> FloatArray:
    """Return Σ_i w_i a_i a_iᵀ, (columns, columns)."""
    total = np.zeros((a.shape[1], a.shape[1]))
    for part in pieces(len(a), 2 * a.shape[1]):
        total += (a[part] * weight[part, None]).T @ a[part]
    return total


def winsorised(residuals: FloatArray, deviation: FloatArray | float) -> FloatArray:
    """Return residuals winsorised, so that a failed value does not change a participant's other features."""
    return np.clip(residuals, -WINSORISE_AT * deviation, WINSORISE_AT * deviation)


def find_point_masses(ordered: FloatArray) -> FloatArray:
    """Return for each sorted feature, NaN last, the value that many rows share, or NaN.

    Such a value, like a volume of 0, is no measurement: shifted by its site, it would become a different
    number at each site, and give the site away. It is kept as it is.
    """
    result = np.full(ordered.shape[1], np.nan)
    length = max(int(np.ceil(POINT_MASS * len(ordered))), FEW)
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
