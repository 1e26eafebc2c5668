"""Breaks within a site: the row from which on its measurements differ, as after a change of the scanner.

One name of a site often covers two: a coil, a protocol or a version changed. Where rows are in the order of
measurement, as ids mostly are, such a change is a step in the residuals given covariates and target. The
largest step along a site's first principal components is compared with that of permuted rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.linalg import eigh

from equipool.checks.findings import Finding, warning
from equipool.checks.inputs import FloatArray, Inputs

MIN_ROWS = 8  # before and after
MAX_GROUPS = 1000  # of neighbouring rows of a site; larger sites are averaged into this many
MAX_CLASSES = 40  # of the target that are regressed out one by one
COMPONENTS = 5
PERMUTATIONS = 999
WINSOR = 4.0  # standard deviations: one outlying row is no break


@dataclass(frozen=True)
class Break:
    """A step: the position of the first row after it, its size, and what chance gives.

    ``size`` is the squared distance of the means in standard errors, summed over components, divided by the
    variance inflation of neighbours that are alike, as visits of one participant are. ``chance`` is the 95 %
    quantile of the largest step in permuted rows, ``p`` the share of permutations with a larger one.
    """

    start: int
    size: float
    chance: float
    p: float


def break_cautions(inputs: Inputs, measured: FloatArray | None = None) -> Iterator[Finding]:
    """Warn of sites whose rows change at some point; ``measured`` replaces the features, if given."""
    values, regressors = inputs.X if measured is None else measured, inputs.covariates
    if inputs.target is not None and inputs.task == "number":
        regressors = np.column_stack([regressors, inputs.target])
    elif inputs.target is not None:
        labels = pd.Series(inputs.target.astype(str))
        # The rarest of very many classes are taken together.
        common = labels.value_counts().index[: min(MAX_CLASSES, labels.nunique() - 1)].to_numpy()
        regressors = np.column_stack([regressors, labels.to_numpy()[:, None] == common])
    for k, site in enumerate(inputs.sites):
        rows = inputs.rows_with_site[inputs.site_index == k]
        step = find_break(values[rows], regressors[rows])
        if step is None or step.p > 1 / (PERMUTATIONS + 1):
            continue
        last, first = rows[step.start - 1], rows[step.start]
        words: dict[str, Any] = {"before": step.start, "size": step.size, "chance": step.chance}
        words |= {"site": site, "where": inputs.rows_text([first])}
        yield warning("break-within-site", inputs.site_name, rows=(last, first), **words)


def find_break(values: FloatArray, regressors: FloatArray, *, seed: int = 0) -> Break | None:
    """Return the largest step in the values (rows, features) of one site, ``None`` with too few rows.

    Rows are in their order; regressors are covariates and target, (rows, k).
    """
    starts = np.unique(np.linspace(0, len(values), min(len(values), MAX_GROUPS), endpoint=False).astype(int))
    values, regressors = (_group_means(part, starts) for part in (values, regressors))
    n = len(values)
    if n < 3 * MIN_ROWS or not values.shape[1]:
        return None
    scores = _components(values, _with_hinges(regressors))
    if scores is None:
        return None
    before = np.arange(MIN_ROWS, n - MIN_ROWS + 1)
    scale = n / (before * (n - before))

    def steps(orders: NDArray[np.intp]) -> FloatArray:
        sums: FloatArray = np.cumsum(scores[orders], axis=1)[:, before - 1]
        return (sums**2).sum(axis=2) * scale

    sizes = steps(np.arange(n)[None])[0]
    best = int(sizes.argmax())
    # The variance inflation (1 + ρ)/(1 − ρ) by the correlation ρ of neighbouring rows.
    parts = scores[: before[best]], scores[before[best] :]
    residuals = np.concatenate([part - part.mean(axis=0) for part in parts])
    rho = float((residuals[1:] * residuals[:-1]).sum() / max((residuals**2).sum(), 1e-300))
    correlated = rho >= 2 / np.sqrt(residuals.size)
    size = float(sizes[best]) * ((1 - min(rho, 0.99)) / (1 + rho) if correlated else 1.0)
    rng = np.random.default_rng(seed)
    permuted: FloatArray = np.empty(0)
    while len(permuted) < PERMUTATIONS and not (permuted >= size).any():
        # A few at a time: one that is larger is enough to stay silent.
        count = (PERMUTATIONS + 1) // 10 - (not len(permuted))
        orders = rng.permuted(np.tile(np.arange(n), (count, 1)), axis=1)
        permuted = np.append(permuted, steps(orders).max(axis=1))
    p = (1 + int((permuted >= size).sum())) / (1 + len(permuted))
    return Break(int(starts[before[best]]), size, float(np.quantile(permuted, 0.95)), p)


def _with_hinges(regressors: FloatArray) -> FloatArray:
    """Return the columns standardised, and a hinge at each quartile of those with many values."""
    largest = np.maximum(np.abs(regressors).max(axis=0), 1e-300)
    centred = regressors / largest - (regressors / largest).mean(axis=0)
    deviation = centred.std(axis=0)
    standard = centred / np.where(deviation > 1e-12, deviation, np.inf)
    hinges = [
        np.maximum(column - place, 0)
        for column in standard.T
        if len(np.unique(column)) >= 10 and len(column) >= 6 * MIN_ROWS
        for place in np.quantile(column, (0.25, 0.5, 0.75))
    ]
    return np.column_stack([standard, *hinges])


def _components(values: FloatArray, regressors: FloatArray) -> FloatArray | None:
    """Return the first principal components of the residuals, each of variance 1; ``None`` if they are 0."""
    values = values / np.maximum(np.abs(values).max(axis=0), 1e-300)  # squares of huge numbers overflow
    design = np.column_stack([np.ones(len(regressors)), regressors])
    residuals = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    deviation = residuals.std(axis=0)
    varies = deviation > 1e-9
    if not varies.any():
        return None
    residuals = np.clip(residuals[:, varies] / deviation[varies], -WINSOR, WINSOR)
    residuals -= residuals.mean(axis=0)
    n = len(residuals)
    # From the Gram matrix of at most MAX_GROUPS rows, however many features there are.
    first = max(n - min(COMPONENTS, n // MIN_ROWS), 0)
    eigenvalues, vectors = eigh(residuals @ residuals.T, subset_by_index=(first, n - 1))
    standard: FloatArray = vectors[:, eigenvalues > 1e-9 * eigenvalues[-1]] * np.sqrt(n)
    return standard


def _group_means(values: FloatArray, starts: NDArray[np.intp]) -> FloatArray:
    """Return the means of neighbouring rows; cells without a finite value have the mean of their column."""
    finite = np.isfinite(values)
    count = np.maximum(finite.sum(axis=0), 1)
    values = np.where(finite, values, np.where(finite, values, 0.0).sum(axis=0) / count)
    rows = np.diff(np.append(starts, len(values)))
    return np.asarray(np.add.reduceat(values, starts, axis=0) / rows[:, None])
