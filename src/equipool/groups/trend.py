"""The smooth trend that all sites share: natural cubic splines of the covariates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trend", "fit_trend"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Trend:
    """Natural cubic splines of numbers, straight beyond the outer knots; 0/1 columns as they are.

    Attributes
    ----------
    knots
        (K, 5), equal where a covariate has too few values to bend.
    mean, scale, slope
        Of all basis columns, (q,): centred at the training people; bends are freed of their straight part,
        slope · line, and scaled.
    """

    knots: FloatArray
    mean: FloatArray
    scale: FloatArray
    slope: FloatArray

    @property
    def bends(self) -> NDArray[np.bool_]:
        """Which basis columns bend; the first K are the covariates themselves."""
        return np.arange(len(self.mean)) >= len(self.knots)

    def __call__(self, c: FloatArray) -> FloatArray:
        """Return the basis at covariates (rows, K)."""
        raw = _spline_columns(c, self.knots)
        lines = (raw[:, : len(self.knots)] - self.mean[: len(self.knots)]) / self.scale[: len(self.knots)]
        bends = raw[:, len(self.knots) :] - self.mean[len(self.knots) :]
        owner = _owners(self.knots)
        bends = bends - self.slope * lines[:, owner] if bends.shape[1] else bends
        return np.hstack([lines, bends / self.scale[len(self.knots) :]])


def fit_trend(c: FloatArray, weight: FloatArray) -> Trend:
    """Place knots and learn how to centre and scale the basis."""
    knots = np.empty((c.shape[1], 5))
    for k, column in enumerate(c.T):
        places = _quantiles(column, weight)
        bends = len(np.unique(column)) >= 10 and (np.diff(places) > 1e-6 * np.ptp(column)).all()
        knots[k] = places if bends else places[2]
    raw = _spline_columns(c, knots)
    n_lines = c.shape[1]
    mean = np.average(raw, axis=0, weights=weight) if raw.shape[1] else np.empty(0)
    centred = raw - mean
    scale = np.sqrt(np.average(centred**2, axis=0, weights=weight)) if raw.shape[1] else np.empty(0)
    lines = centred[:, :n_lines] / np.where(scale[:n_lines] > 0, scale[:n_lines], 1)
    owner = _owners(knots)
    bends_ = centred[:, n_lines:]
    slope = (weight @ (bends_ * lines[:, owner])) / weight.sum() if bends_.shape[1] else np.empty(0)
    left = bends_ - slope * lines[:, owner] if bends_.shape[1] else bends_
    if left.shape[1]:
        scale[n_lines:] = np.sqrt(np.average(left**2, axis=0, weights=weight))
    return Trend(knots, mean, np.where(scale > 0, scale, 1.0), slope)


def _quantiles(column: FloatArray, weight: FloatArray) -> FloatArray:
    """Return where the knots stand: among people, not rows."""
    shares = [0.05, 0.275, 0.5, 0.725, 0.95]
    if np.ptp(weight) == 0:
        return np.quantile(column, shares)
    order = np.argsort(column)
    total = np.cumsum(weight[order])
    places: FloatArray = column[order][np.searchsorted(total, np.array(shares) * total[-1])]
    return places


def _owners(knots: FloatArray) -> IntArray:
    """Return the covariate that each bending column belongs to."""
    bending = [k for k, places in enumerate(knots) if places[0] < places[-1]]
    return np.repeat(np.array(bending, dtype=np.intp), knots.shape[1] - 2)


def _spline_columns(c: FloatArray, knots: Sequence[FloatArray] | FloatArray) -> FloatArray:
    """Return the covariates and their natural cubic splines, straight beyond the outer knots."""
    columns = [c]
    for k, places in enumerate(knots):
        if places[0] == places[-1]:
            continue
        # In units of the knots' span, or cubes would dwarf everything.
        x = (c[:, k] - places[0]) / (places[-1] - places[0])
        t = (places - places[0]) / (places[-1] - places[0])
        cubes = [np.maximum(x - knot, 0) ** 3 for knot in t]
        d = [(cube - cubes[-1]) / (t[-1] - knot) for cube, knot in zip(cubes[:-1], t[:-1], strict=True)]
        columns += [(dk - d[-1])[:, None] for dk in d[:-1]]
    return np.hstack(columns)
