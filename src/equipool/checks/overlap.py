"""How the participants of sites differ: overlap of ranges, confounding, a classifier of the site."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks.inputs import FloatArray

IntArray = NDArray[np.intp]

TREES = 25  # of the classifier of the site
MAX_ROWS = 4_000  # for the classifier of the site; more change its accuracy little
FOLDS = 5
NINE_TENTHS = 3.29  # standard deviations that the middle nine tenths of a Gaussian span


def two_valued(values: FloatArray) -> bool:
    """Whether a covariate has two values, such as sex: it has levels rather than a range."""
    return len(np.unique(values[np.isfinite(values)])) <= 2


def nine_tenths(values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the 5 %, 50 % and 95 % quantiles of each column, without NaN; zeros for a column of NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        low, middle, high = pd.DataFrame(values).quantile([0.05, 0.5, 0.95]).fillna(0.0).to_numpy()
    return low, middle, high


def support_overlap(values: FloatArray, site_index: IntArray) -> FloatArray:
    """Return for each pair of sites the share of their participants within the range common to both.

    A method that needs common support could keep this share: 1 when both sites cover the same range, 0 when
    their ranges do not touch. O(S² log N) for S sites.
    """
    by_site = [np.sort(values[site_index == s]) for s in range(site_index.max() + 1)]
    low, high, size = np.array([(v[0], v[-1], len(v)) for v in by_site]).T
    start, stop = np.maximum.outer(low, low), np.minimum.outer(high, high)
    ranges = zip(by_site, start, stop, strict=True)
    inside = np.array([np.searchsorted(v, b, side="right") - np.searchsorted(v, a) for v, a, b in ranges])
    inside = np.where(stop >= start, inside, 0)
    overlap: FloatArray = (inside + inside.T) / np.add.outer(size, size)
    return overlap


def common_support(values: FloatArray, site_index: IntArray) -> float:
    """Return the share of all participants within the range that every site covers."""
    ranges = pd.Series(values).groupby(site_index).agg(["min", "max"])
    return float(np.mean((values >= ranges["min"].max()) & (values <= ranges["max"].min())))


def omega_squared(values: FloatArray, site_index: IntArray) -> FloatArray:
    """Return the share of the variance of each number that lies between sites, 0 to 1, for values (rows, …).

    ω² = (SS_between − (S − 1) MS_error) / (SS_total + MS_error) for S sites. It allows for the share that
    sites would explain by chance; η² of 100 sites of 3 participants each is 0.35 even if they do not differ.
    """
    values = values - values.mean(axis=0)
    groups = [values[site_index == site] for site in np.unique(site_index)]
    total = (values**2).sum(axis=0)
    between = sum(len(group) * group.mean(axis=0) ** 2 for group in groups)
    free = len(values) - len(groups)
    error = (total - between) / max(free, 1)
    varies = (total > 0) & (free > 0)
    share = (between - (len(groups) - 1) * error) / np.where(varies, total + error, 1.0)
    return np.where(varies, np.clip(share, 0.0, 1.0), 0.0)


def cramers_v(classes: FloatArray, site_index: IntArray) -> float:
    """Return how strongly classes and sites go together, 0 to 1: Cramér's V with Bergsma's correction."""
    from scipy.stats import chi2_contingency

    table = pd.crosstab(classes, site_index).to_numpy()
    total, (rows, columns) = table.sum(), table.shape
    phi2 = chi2_contingency(table, correction=False).statistic / total
    phi2 = max(phi2 - (rows - 1) * (columns - 1) / (total - 1), 0.0)
    size = min(rows - (rows - 1) ** 2 / (total - 1), columns - (columns - 1) ** 2 / (total - 1))
    return float(min(np.sqrt(phi2 / max(size - 1, 1e-12)), 1.0))


@dataclass(frozen=True)
class SitePrediction:
    """The balanced accuracy of a classifier that predicts the site, chance, and chance's standard error."""

    balanced_accuracy: float
    chance: float
    chance_error: float


def predict_site(variables: FloatArray, site_index: IntArray, *, seed: int = 0) -> SitePrediction | None:
    """Return how well a classifier predicts the site of held-out rows from the variables.

    Balanced accuracy of a random forest in 5 folds: the best of one on all variables and one on each alone.
    Sites have at least 5 rows, and no more than 4 000 rows are used. ``None`` with fewer than two such sites.
    """
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    rows = np.random.default_rng(seed).permutation(len(site_index))[:MAX_ROWS]
    large = np.bincount(site_index[rows], minlength=site_index.max() + 1) >= FOLDS
    rows = rows[large[site_index[rows]]]
    site = site_index[rows]
    sizes = np.unique(site, return_counts=True)[1]
    if len(sizes) < 2:
        return None
    # Trees only use the order of a variable; ranks keep huge numbers out of their single precision.
    ranks = np.column_stack([np.unique(v, return_inverse=True)[1] for v in variables[rows].T])
    forest = RandomForestClassifier(TREES, min_samples_leaf=5, class_weight="balanced", random_state=seed)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    # In a small pool a variable without information can drown one with it, hence each alone too.
    choices = [ranks, *(ranks[:, [k]] for k in range(ranks.shape[1]))] if ranks.shape[1] > 1 else [ranks]
    predicted = (cross_val_predict(forest, columns, site, cv=folds) for columns in choices)
    best, chance = max(balanced_accuracy_score(site, each) for each in predicted), 1 / len(sizes)
    error = np.sqrt((chance * (1 - chance) / sizes).sum()) / len(sizes)
    return SitePrediction(float(best), chance, float(error))
