"""The trend m(c): how covariates act on features, by translation along natural cubic splines."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

KNOT_QUANTILES = (0.05, 0.275, 0.5, 0.725, 0.95)  # Harrell's, for five knots
MIN_DISTINCT = 10  # values that a variable must have for a curve; with fewer it is ordinal


def _declared(*dimensions: str, positive: bool = False) -> Any:
    """Return what :func:`equipool.sites.effect.array` declares, which this layer cannot import."""
    return {"dimensions": dimensions, "positive": positive}


@dataclass(frozen=True, eq=False)
class SplineBasis:
    """The covariates, and for those with many values a natural cubic spline, linear beyond the outer knots.

    Columns are centred and scaled over participants; curved ones are orthogonal to the linear one.
    """

    # (K, 5), all equal where a covariate has too few values for a spline.
    knots: FloatArray = field(metadata=_declared("covariates", "knots"))
    mean: FloatArray = field(metadata=_declared("columns"))  # (q,), as the scale
    scale: FloatArray = field(metadata=_declared("columns", positive=True))
    # (q − K,): coefficients of the curved columns' regression on their covariate's linear one.
    slope: FloatArray = field(metadata=_declared("curved"))

    @property
    def width(self) -> int:
        """Number of columns q."""
        return len(self.mean)

    @property
    def curved(self) -> NDArray[np.bool_]:
        """Which columns are curved; the first K are the covariates themselves."""
        return np.arange(self.width) >= len(self.knots)

    def __call__(self, c: FloatArray) -> FloatArray:
        """Return the basis at covariates (rows, K), (rows, q)."""
        k = len(self.knots)
        columns = _columns(c, self.knots) - self.mean
        linear = columns[:, :k] / self.scale[:k]
        curved = columns[:, k:] - self.slope * linear[:, _covariate_of_curved(self.knots)]
        return np.hstack([linear, curved / self.scale[k:]])


@dataclass(frozen=True, eq=False)
class Trend:
    r"""The trend that all sites share, for basis functions B of the covariates:

    .. math:: m(c) = m_0 + \sum_k \beta_k B_k(c)
    """

    basis: SplineBasis  # B
    coefficients: FloatArray = field(metadata=_declared("columns", "features"))  # β (q, features)
    centre: FloatArray = field(metadata=_declared("features"))  # m₀ (features,)

    def __call__(self, c: FloatArray) -> FloatArray:
        """Return m at covariates (rows, K), (rows, features)."""
        return self.centre + self.basis(c) @ self.coefficients

    def require_consistent(self) -> None:
        """Raise a ValueError for coefficients of another basis."""
        curved = len(_covariate_of_curved(self.basis.knots))
        if not len(self.basis.slope) == curved == self.basis.width - len(self.basis.knots):
            raise ValueError("basis")
        if len(self.coefficients) != self.basis.width:
            raise ValueError("coefficients")


def fit_basis(c: FloatArray, weight: FloatArray) -> SplineBasis:
    """Place knots at quantiles over participants, and estimate how to centre and scale the columns."""
    k = c.shape[1]
    knots = np.empty((k, len(KNOT_QUANTILES)))
    for j, column in enumerate(c.T):
        order = np.argsort(column)
        share = np.cumsum(weight[order])
        places = column[order][np.searchsorted(share, np.array(KNOT_QUANTILES) * share[-1])]
        apart = (np.diff(places) > 1e-6 * np.ptp(column)).all()
        knots[j] = places if apart and len(np.unique(column)) >= MIN_DISTINCT else places[2]
    columns = _columns(c, knots)
    mean = np.average(columns, axis=0, weights=weight)
    columns = columns - mean
    scale = np.sqrt(np.average(columns**2, axis=0, weights=weight))
    linear = (columns[:, :k] / np.where(scale[:k] > 0, scale[:k], 1))[:, _covariate_of_curved(knots)]
    slope = np.average(columns[:, k:] * linear, axis=0, weights=weight)
    scale[k:] = np.sqrt(np.average((columns[:, k:] - slope * linear) ** 2, axis=0, weights=weight))
    return SplineBasis(knots, mean, np.where(scale > 0, scale, 1.0), slope)


def _covariate_of_curved(knots: FloatArray) -> IntArray:
    """Return the covariate that each curved column belongs to."""
    splined = np.flatnonzero(knots[:, 0] < knots[:, -1])
    return np.repeat(splined, knots.shape[1] - 2)


def _columns(c: FloatArray, knots: FloatArray) -> FloatArray:
    """Return the covariates and their natural cubic splines in truncated-power form."""
    columns = [c]
    for j in np.flatnonzero(knots[:, 0] < knots[:, -1]):
        places = knots[j]
        # In units of the knots' span, or cubes would dwarf everything.
        x, t = ((v - places[0]) / (places[-1] - places[0]) for v in (c[:, j], places))
        cubes = np.maximum(x[:, None] - t, 0) ** 3
        d = (cubes[:, :-1] - cubes[:, -1:]) / (t[-1] - t[:-1])
        columns.append(d[:, :-1] - d[:, -1:])
    return np.hstack(columns)
