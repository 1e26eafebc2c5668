"""How sites differ in who was scanned: support overlap, and how far covariates and target tell the site."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NINE_TENTHS",
    "Readability",
    "common_support",
    "cramers_v",
    "nine_tenths",
    "nine_tenths_of_sorted",
    "omega_squared",
    "site_readability",
    "support_overlap",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

ROWS_READ = 4_000  # the site reader looks at most at this many people; more change its figure little
FOLDS = 5
NINE_TENTHS = 3.29  # deviations that the middle nine tenths of a Gaussian span


def nine_tenths(values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return where the middle nine tenths of each column begin, their middle and their end.

    NaN counts nothing; a column of nothing else gives zeros. What is far does not move them.
    """
    shares, empty = (0.05, 0.5, 0.95), np.isnan(values)
    if not empty.any():
        low, middle, high = np.quantile(values, shares, axis=0)
    else:  # looked at column by column, which is slow
        low, middle, high = np.nanquantile(np.where(empty.all(axis=0), 0.0, values), shares, axis=0)
    return low, middle, high


def nine_tenths_of_sorted(ordered: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the same of columns that are sorted already, NaN last: quantiles are then read off."""
    count = (~np.isnan(ordered)).sum(axis=0)
    last = np.maximum(count - 1, 0)

    def quantile(share: float) -> FloatArray:
        place = share * last
        below = np.floor(place).astype(np.intp)
        ends = (
            np.take_along_axis(ordered, at[None], axis=0)[0] for at in (below, np.minimum(below + 1, last))
        )
        low, high = ends
        with np.errstate(invalid="ignore", over="ignore"):
            between = low + (high - low) * (place - below)
        return np.where(count > 0, np.where(low == high, low, between), 0.0)

    return quantile(0.05), quantile(0.5), quantile(0.95)


def support_overlap(values: FloatArray, codes: IntArray) -> FloatArray:
    """Return for each pair of sites the share of their people who lie in the range common to both.

    It is what a method that needs common support could keep: 1 when both sites cover the same range, 0 when
    their ranges do not touch. O(S² log N) for S sites.

    Examples
    --------
    >>> support_overlap(np.array([20.0, 40, 30, 50]), np.array([0, 0, 1, 1]))
    array([[1. , 0.5],
           [0.5, 1. ]])
    """
    by_site = [np.sort(values[codes == s]) for s in range(codes.max() + 1)]
    low = np.array([v[0] for v in by_site])
    high = np.array([v[-1] for v in by_site])
    from_, to = np.maximum.outer(low, low), np.minimum.outer(high, high)
    inside = np.stack(
        [
            np.searchsorted(v, to[s], side="right") - np.searchsorted(v, from_[s], side="left")
            for s, v in enumerate(by_site)
        ]
    )
    inside = np.where(to >= from_, inside, 0)
    sizes = np.array([len(v) for v in by_site])
    overlap: FloatArray = (inside + inside.T) / np.add.outer(sizes, sizes)
    return overlap


def common_support(values: FloatArray, codes: IntArray) -> float:
    """Return the share of all people who lie in the range that every site covers."""
    sites = range(codes.max() + 1)
    low = max(values[codes == s].min() for s in sites)
    high = min(values[codes == s].max() for s in sites)
    return float(((values >= low) & (values <= high)).mean())


def omega_squared(values: FloatArray, codes: IntArray) -> float:
    """Return the share of a number's variance that lies between sites, 0 to 1.

    ω², which allows for the share that sites would explain by chance; η² of 100 sites with 3 people each is
    0.35 where there is nothing.
    """
    count = np.bincount(codes)
    means = np.bincount(codes, weights=values) / count
    total = ((values - values.mean()) ** 2).sum()
    between = (count * (means - values.mean()) ** 2).sum()
    free = len(values) - len(count)
    if total <= 0 or free <= 0:
        return 0.0
    within = (total - between) / free
    return float(max((between - (len(count) - 1) * within) / (total + within), 0.0))


def cramers_v(classes: IntArray, codes: IntArray) -> float:
    """Return how strongly classes and sites go together, 0 to 1: Cramér's V with Bergsma's correction."""
    table = np.zeros((classes.max() + 1, codes.max() + 1))
    np.add.at(table, (classes, codes), 1)
    table = table[table.sum(axis=1) > 0]
    total = table.sum()
    expected = np.outer(table.sum(1), table.sum(0)) / total
    phi2 = ((table - expected) ** 2 / np.where(expected > 0, expected, 1)).sum() / total
    rows, columns = table.shape
    phi2 = max(phi2 - (rows - 1) * (columns - 1) / (total - 1), 0.0)
    size = min(rows - (rows - 1) ** 2 / (total - 1), columns - (columns - 1) ** 2 / (total - 1))
    return float(min(np.sqrt(phi2 / max(size - 1, 1e-12)), 1.0))


@dataclass(frozen=True)
class Readability:
    """How well the site is read, beside what guessing gives and how far guessing may stray."""

    balanced_accuracy: float
    chance: float
    chance_error: float

    @property
    def excess(self) -> float:
        """From 0, no better than guessing, to 1, always right."""
        return (self.balanced_accuracy - self.chance) / (1 - self.chance)

    @property
    def beyond_chance(self) -> bool:
        """Whether it is three standard errors of guessing above chance."""
        return self.balanced_accuracy > self.chance + 3 * self.chance_error


def site_readability(variables: FloatArray, codes: IntArray, *, seed: int = 0) -> Readability | None:
    """Return how well the site is read from the variables, with the chance level.

    Balanced accuracy of a random forest, the best of one on all variables and one on each, on people it
    was not fitted on (5 folds, sites with at least 5
    people, at most 4 000 people). ``None`` where fewer than two sites are large enough.
    """
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(codes))[:ROWS_READ]
    large = np.bincount(codes[rows], minlength=codes.max() + 1) >= FOLDS
    rows = rows[large[codes[rows]]]
    n_sites = len(np.unique(codes[rows]))
    if n_sites < 2:
        return None
    # Trees only use the order of a variable; ranks keep huge numbers out of their single precision.
    ranks = np.column_stack([np.unique(v, return_inverse=True)[1] for v in variables[rows].T])
    forest = RandomForestClassifier(25, min_samples_leaf=5, class_weight="balanced", random_state=seed)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    # All variables together and each alone: in a small pool one that says nothing can drown one that does.
    choices = [ranks, *(ranks[:, [k]] for k in range(ranks.shape[1]))] if ranks.shape[1] > 1 else [ranks]
    best = max(
        balanced_accuracy_score(codes[rows], cross_val_predict(forest, columns, codes[rows], cv=folds))
        for columns in choices
    )
    chance = 1 / n_sites
    sizes = np.bincount(codes[rows])
    error = np.sqrt((chance * (1 - chance) / sizes[sizes > 0]).sum()) / n_sites
    return Readability(float(best), chance, float(error))
