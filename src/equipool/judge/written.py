r"""What a harmonizer wrote into features, or lost from them, seen from the features before and after.

Undoing what sites did gives equal means and spreads to sites. Standardised within sites, features then tell
of a covariate or a target what they told before. These numbers say where they tell more, or nothing:

- ``gain``: by how much R² of a variable within sites rises, of ridge regressions on features that are
  standardised within sites before and after;
- ``coefficients``: :math:`b` in :math:`z = f(x) + b v` within sites, all standardised: what a variable v adds
  to the harmonized value z beyond the value as measured x, by a cubic f;
- ``kept``: the correlation of x and z within sites, covariates adjusted: 0 for a site's mean;
- ``choice``: whether a variable says which measured cells were emptied, beyond what their values say;
- ``r2_within`` and ``chance_ratio``: after harmonizing again with shuffled values, how well these are
  predicted, and how much larger their effects are than on the features as measured.

Cells that were not measured are NaN, and become the mean of their site here.
"""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.judge.scores import FloatArray, IntArray, ridge, within_sites

AT_ONCE = 100  # features in memory several times
REACH = 4.0  # standard deviations beyond which a cubic in the measured value is not followed
DRAWS = 399  # permutations of a variable
RIDGE = 0.1  # of the mean eigenvalue of a covariance: features may outnumber rows


def as_numbers(values: NDArray[Any]) -> FloatArray:
    """Return a variable as columns of numbers, (rows, k): classes but the first as 0 and 1."""
    if values.dtype.kind != "U":
        return values.astype(np.float64).reshape(len(values), -1)
    return (values[:, None] == np.unique(values)[None, 1:]).astype(np.float64)


def gain(
    before: FloatArray, after: FloatArray, values: FloatArray, site: IntArray, folds: list[Any]
) -> dict[str, float]:
    """Return R² of values (rows, k) before and after, its gain and the standard error of that.

    ``folds`` have train, test and participant, whose rows count as one in the standard error.
    """
    errors = [_error_shares(x, values, site, folds) for x in (before, after)]
    r2 = [1 - float(error.sum()) for error in errors]
    participant, tested = folds[0].participant, np.concatenate([fold.test for fold in folds])
    better = np.bincount(participant, weights=errors[0] - errors[1])[np.unique(participant[tested])]
    error = float(np.sqrt(((better - better.mean()) ** 2).sum()))
    return {"before": r2[0], "after": r2[1], "gain": r2[1] - r2[0], "error": error}


def r2_within(x: FloatArray, values: FloatArray, site: IntArray, folds: list[Any]) -> float:
    """Return the cross-validated R² of values (rows, k) within sites, from x standardised within sites."""
    return 1 - float(_error_shares(x, values, site, folds).sum())


def _error_shares(x: FloatArray, values: FloatArray, site: IntArray, folds: list[Any]) -> FloatArray:
    """Return each row's squared error as a share of all tested rows' squares, (rows,); 0 if not tested."""
    x, v = within_sites(x, site), within_sites(values, site, scaled=False)
    errors, total = np.zeros(len(x)), 1e-300
    for fold in folds:
        predicted = ridge().fit(x[fold.train], v[fold.train]).predict(x[fold.test])
        errors[fold.test] = ((v[fold.test] - predicted.reshape(len(fold.test), -1)) ** 2).sum(axis=1)
        total += float((v[fold.test] ** 2).sum())
    return errors / total


def coefficients(before: FloatArray, after: FloatArray, values: FloatArray, site: IntArray) -> FloatArray:
    """Return what values (rows, k) add to each harmonized feature beyond its measured value, (features, k).

    In standard deviations within sites, of the feature and of the value.
    """
    parts = []
    for start in range(0, before.shape[1], AT_ONCE):
        x, z = (within_sites(each[:, start : start + AT_ONCE], site) for each in (before, after))
        there = ~np.isnan(before[:, start : start + AT_ONCE])
        x = np.clip(x, -REACH, REACH)
        cubic = [within_sites(np.where(there, x**k, np.nan), site, scaled=False) for k in (1, 2, 3)]
        v = [within_sites(np.where(there, one[:, None], np.nan), site) for one in values.T]
        design = np.stack([*cubic, *v]).transpose(2, 1, 0)  # (features, rows, 3 + k)
        gram = np.linalg.pinv(design.mT @ design, hermitian=True)
        parts.append((gram @ (design.mT @ z.T[:, :, None]))[:, 3:, 0])
    return np.vstack(parts)


def kept(before: FloatArray, after: FloatArray, covariates: FloatArray, site: IntArray) -> FloatArray:
    """Return the correlation of each feature before and after within sites, a cubic of covariates adjusted.

    A feature that did not vary before has 1, (features,).
    """
    q = _basis_within(covariates, site, degree=3)
    one, two = (x - q @ (q.T @ x) for x in (within_sites(z, site, scaled=False) for z in (before, after)))
    spread = [np.sqrt((x**2).sum(axis=0)) for x in (one, two)]
    moved = [np.sqrt(np.nansum((z - np.nanmean(z, axis=0)) ** 2, axis=0)) for z in (before, after)]
    varied, varies = (s > 1e-6 * np.maximum(m, 1e-300) for s, m in zip(spread, moved, strict=True))
    r = (one * two).sum(axis=0) / np.where(varied & varies, spread[0] * spread[1], 1.0)
    return np.where(varied, np.where(varies, r, 0.0), 1.0)


def chance_ratio(
    before: FloatArray, after: FloatArray, values: FloatArray, covariates: FloatArray, site: IntArray
) -> float:
    r"""Return by what factor the joint effect of shuffled values is larger after harmonization than before.

    It is :math:`d^\top (C + \lambda I)^{-1} d` with d the covariances of the values with features and C the
    covariance of features, within sites, covariates and their squares adjusted: nearly Hotelling's T².
    """
    q = _basis_within(covariates, site, degree=2)
    effects = []
    for x in (before, after):
        x, v = (z - q @ (q.T @ z) for z in (within_sites(x, site), within_sites(values, site)))
        spread, axes = np.linalg.eigh(x.T @ x)
        spread += RIDGE * spread.mean() + 1e-300
        effects.append(float(((axes.T @ (x.T @ v)) ** 2 / spread[:, None]).sum()))
    return effects[1] / max(effects[0], 1e-300)


def choice(
    gone: NDArray[np.bool_], before: FloatArray, values: FloatArray, group: IntArray, participant: IntArray
) -> float:
    """Return the p-value, by permutation within groups, of values (rows, k) saying which cells are gone.

    What counts is the covariance with a cell's being gone, and with its measured value if it is, both
    adjusted for measured values: who empties everybody's outliers chooses nobody.
    """
    some = gone.any(axis=0)
    before, gone = before[:, some], gone[:, some]
    r, there = within_sites(before, group), ~np.isnan(before)
    marks = []
    for x in (gone.astype(np.float64), gone * r):
        centred = within_sites(np.where(there, x, np.nan), group, scaled=False)
        sums = [pd.DataFrame(each * r).groupby(group).transform("sum").to_numpy() for each in (centred, r)]
        adjusted = centred - r * sums[0] / np.maximum(sums[1], 1e-300)
        marks.append(adjusted.round(9))  # whole columns that are gone choose nobody either
    table = np.hstack([*marks, marks[0].sum(axis=1, keepdims=True), within_sites(values, group)])
    people = pd.DataFrame(table).groupby([group, participant]).mean()  # who may have several rows
    m, v = np.split(people.to_numpy(), [-values.shape[1]], axis=1)
    group = people.index.get_level_values(0).to_numpy()
    rng = np.random.default_rng(0)
    drawn = [v, *(shuffled_within(v, group, rng) for _ in range(DRAWS))]
    effect = np.array([((m.T @ each) ** 2).sum() for each in drawn])
    return float((effect >= effect[0] * (1 - 1e-9)).mean())


def _basis_within(covariates: FloatArray, site: IntArray, *, degree: int) -> FloatArray:
    """Return an orthonormal basis of the covariates' powers within sites, (rows, at most K degree)."""
    c = within_sites(covariates, site)
    powers = np.hstack([c**k for k in range(1, degree + 1)])
    return np.linalg.qr(within_sites(powers, site, scaled=False))[0]


def shuffled_within(values: NDArray[Any], site: IntArray, rng: np.random.Generator) -> NDArray[Any]:
    """Return rows of values in another order within each site."""
    result = values.copy()
    for s in np.unique(site):
        rows = np.flatnonzero(site == s)
        result[rows] = values[rng.permutation(rows)]
    return result
