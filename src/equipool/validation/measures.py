"""How sites differ in who was scanned: support overlap, and how far covariates and target tell the site."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["common_support", "cramers_v", "eta_squared", "site_readability", "support_overlap"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

ROWS_READ = 4_000  # the site reader looks at most at this many people; more change its figure little
FOLDS = 5


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


def eta_squared(values: FloatArray, codes: IntArray) -> float:
    """Return the share of a number's variance that lies between sites (η², 0 to 1)."""
    count = np.bincount(codes)
    means = np.bincount(codes, weights=values) / count
    total = ((values - values.mean()) ** 2).sum()
    between = (count * (means - values.mean()) ** 2).sum()
    return float(between / total) if total > 0 else 0.0


def cramers_v(classes: IntArray, codes: IntArray) -> float:
    """Return how strongly classes and sites go together (Cramér's V, 0 to 1)."""
    table = np.zeros((classes.max() + 1, codes.max() + 1))
    np.add.at(table, (classes, codes), 1)
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    chi2 = ((table - expected) ** 2 / np.where(expected > 0, expected, 1)).sum()
    return float(np.sqrt(chi2 / (table.sum() * max(min(table.shape) - 1, 1))))


def site_readability(variables: FloatArray, codes: IntArray, *, seed: int = 0) -> tuple[float, float] | None:
    """Return how well the site is read from the variables, and the chance level.

    Balanced accuracy of a random forest on people it was not fitted on (5 folds, sites with at least 5
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
    forest = RandomForestClassifier(50, min_samples_leaf=5, class_weight="balanced", random_state=seed)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    read = cross_val_predict(forest, variables[rows], codes[rows], cv=folds)
    return float(balanced_accuracy_score(codes[rows], read)), 1 / n_sites
