r"""Cells that were not measured: completed by draws, so that they tell nothing of a site.

With the correlations of residuals in the pool, a missing residual :math:`e_m` is drawn given the measured
ones :math:`e_o` of the same row. With the precision :math:`P = \Sigma^{-1}`,

.. math:: e_m \mid e_o \sim N\left(-P_{mm}^{-1} P_{mo}\, e_o,\; P_{mm}^{-1}\right).

Neither site, covariates nor a target enter, so that none of them can be predicted better from completed
cells than from those that were measured.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from equipool.sites.design import MAX_FEATURES, TINY
from equipool.sites.effect import FloatArray, IntArray

LEAST_EIGENVALUE = 0.01  # of a correlation matrix whose pairs were measured in different rows


def pooled_precision(residuals: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the precision of residuals (rows, p) around 0, from the rows in which each pair was measured.

    Correlations are shrunk to 0 by Schäfer and Strimmer's share, their sampling variance as a part of their
    squares. Beyond MAX_FEATURES features they are taken as 0, and the diagonal is returned, (p,).
    """
    measured = (~np.isnan(residuals)).astype(np.float64)
    e = np.where(measured, residuals, 0.0)
    deviation = np.sqrt(np.maximum(weight @ e**2 / np.maximum(weight @ measured, 1.0), TINY))
    p = len(deviation)
    if p > MAX_FEATURES:
        return np.asarray(deviation**-2.0)
    e /= deviation
    pairs = measured.T @ (measured * weight[:, None])
    r = np.clip(e.T @ (e * weight[:, None]) / np.maximum(pairs, 1.0), -1, 1)
    apart, freedom = ~np.eye(p, dtype=bool), np.maximum(pairs - 1, 1.0)
    sampling, squares = ((1 - r**2) ** 2 / freedom)[apart].sum(), (r[apart] ** 2).sum()
    share = min(sampling / max(squares, TINY), 1.0)
    values, vectors = np.linalg.eigh((1 - share) * r * apart + np.eye(p))
    inverse = (vectors / np.maximum(values, LEAST_EIGENVALUE)) @ vectors.T
    return np.asarray(inverse / np.outer(deviation, deviation))


def completed(residuals: FloatArray, precision: FloatArray, noise: FloatArray | None = None) -> FloatArray:
    """Return residuals (rows, p) with missing ones at their mean given the measured ones of the row.

    ``noise`` is standard normal, (rows, p): with it they are drawn around that mean.
    """
    if precision.ndim == 1:
        drawn = 0.0 if noise is None else noise / np.sqrt(precision)
        return np.where(np.isnan(residuals), drawn, residuals)
    result = residuals.copy()
    for rows, missing in _patterns(residuals):
        inner = precision[np.ix_(missing, missing)]
        across = precision[np.ix_(missing, ~missing)] @ residuals[np.ix_(rows, ~missing)].T
        values = -np.linalg.solve(inner, across)
        if noise is not None:
            root = np.linalg.cholesky(inner)
            values += solve_triangular(root.T, noise[np.ix_(rows, missing)].T)
        result[np.ix_(rows, missing)] = values.T
    return result


def _patterns(values: FloatArray) -> Iterator[tuple[IntArray, NDArray[np.bool_]]]:
    """Yield the rows that miss the same cells, and which these are, (p,)."""
    empty = np.isnan(values)
    rows = np.flatnonzero(empty.any(axis=1))
    if not len(rows):
        return
    patterns, index = np.unique(empty[rows], axis=0, return_inverse=True)
    order, counts = np.argsort(index, kind="stable"), np.bincount(index, minlength=len(patterns))
    for pattern, some in zip(patterns, np.split(rows[order], np.cumsum(counts)[:-1]), strict=True):
        yield some, pattern
