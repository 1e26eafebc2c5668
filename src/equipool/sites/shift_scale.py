r"""Shift and scale of each site beside the trend that all sites share, by penalised least squares.

For feature values z of a participant of site s with covariates c,

.. math:: z = m(c) + \gamma_s + \delta_s e \qquad\text{or}\qquad z = \delta_s\,(m(c) + \gamma_s + e),

the second where sites also scale the trend, as the gain of a scanner does. Trend and shifts are fitted
together, with a penalty on the trend's curvature; shifts :math:`\gamma` and scales :math:`\delta` are shrunk by
empirical Bayes, as in ComBat. All of it is made of moments by site and fold of participants, so that choices on
held-out participants need no further pass over the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipool.groups.trend import SplineBasis, Trend, fit_basis
from equipool.sites.design import Design
from equipool.sites.effect import Context, SiteEffect, array, choose
from equipool.sites.passes import pieces, site_sums

__all__ = ["Regression", "SharedTrend", "ShiftScale", "Winsorised", "variance_between", "winsorise"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

CURVATURES = (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4)  # penalties on the trend's curved part, the straightest first
TURNS = 3  # of estimating the trend given scales, and scales given the trend
PRIOR_SITES = 4.0  # equivalent sites of the mean over features in each feature's variance between sites
PRIOR_SCALE = (
    10.0  # equivalent participants of the pooled scale, where sites cannot tell how far scales differ
)
MAX_PRIOR_SCALE = 1000.0
WINSORISE_AT = 4.0  # standard deviations from the prediction
WINSORISE_TURNS = 30
ABSURD = 50.0  # standard deviations of the feature: no measurement


# -- moments -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Moments:
    """Weighted count, means and centred products of the basis b (q) and the features z (p), of each cell.

    Cells are sites, or sites × folds: ``n`` (...,), ``b`` (..., q), ``z`` (..., p), ``bb`` (..., q, q), ``bz``
    (..., q, p), ``zz`` (..., p).
    """

    n: FloatArray
    b: FloatArray
    z: FloatArray
    bb: FloatArray
    bz: FloatArray
    zz: FloatArray

    def merged(self, folds: NDArray[np.bool_]) -> Moments:
        """Return the moments of sites over some of their folds."""
        n, b, z, bb, bz, zz = (getattr(self, name)[:, folds] for name in ("n", "b", "z", "bb", "bz", "zz"))
        total = n.sum(axis=1)
        share = n / np.where(total > 0, total, 1.0)[:, None]
        mean_b, mean_z = np.einsum("sf,sfq->sq", share, b), np.einsum("sf,sfp->sp", share, z)
        db, dz = b - mean_b[:, None], z - mean_z[:, None]
        return Moments(
            total,
            mean_b,
            mean_z,
            bb.sum(axis=1) + np.einsum("sf,sfq,sfr->sqr", n, db, db),
            bz.sum(axis=1) + np.einsum("sf,sfq,sfp->sqp", n, db, dz),
            zz.sum(axis=1) + np.einsum("sf,sfp->sp", n, dz**2),
        )


def moments(z: FloatArray, basis: FloatArray, design: Design, fold: IntArray | None = None) -> Moments:
    """Return the moments by site (sites, 1, ...), or by site and fold (sites, folds, ...), in one pass."""
    n_folds = 1 if fold is None else int(fold.max()) + 1
    cell = design.site * n_folds + (0 if fold is None else fold)
    shape, (q, p) = (design.n_sites, n_folds), (basis.shape[1], z.shape[1])
    cells = design.n_sites * n_folds
    sums = [np.zeros((cells, *size)) for size in ((), (q,), (p,), (q, q), (q, p), (p,))]
    for part in pieces(len(z), p):
        b, y, add = basis[part], z[part], (cell[part], cells, design.weight[part])
        sums[0] += np.bincount(cell[part], design.weight[part], cells)
        sums[1] += site_sums(b, *add)
        sums[2] += site_sums(y, *add)
        sums[5] += site_sums(y**2, *add)
        for k in range(q):
            sums[3][:, k] += site_sums(b * b[:, [k]], *add)
            sums[4][:, k] += site_sums(y * b[:, [k]], *add)
    n = np.where(sums[0] > 0, sums[0], 1.0)
    mean_b, mean_z = sums[1] / n[:, None], sums[2] / n[:, None]
    sums[3] -= np.einsum("c,cq,cr->cqr", sums[0], mean_b, mean_b)
    sums[4] -= np.einsum("c,cq,cp->cqp", sums[0], mean_b, mean_z)
    sums[5] = np.maximum(sums[5] - sums[0][:, None] * mean_z**2, 0.0)
    found = (sums[0], mean_b, mean_z, *sums[3:])
    return Moments(*(values.reshape(*shape, *values.shape[1:]) for values in found))


# -- the regression ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Regression:
    """The regression of one set of rows, before shrinkage of the shifts.

    Attributes
    ----------
    slopes
        (q, p): coefficients of the basis.
    level
        (sites, p): what each site measures at the mean of the basis.
    error
        (sites, p): standard errors of the shifts.
    scale
        (sites, p), shrunk; geometric mean 1 over participants.
    scale_weight
        (p,): equivalent participants of the pooled scale in each site's.
    variance
        (p,): of residuals in the pool's scale.
    n_participants
        (sites,).
    scales_trend
        Whether sites scale the trend too.
    """

    slopes: FloatArray
    level: FloatArray
    error: FloatArray
    scale: FloatArray
    scale_weight: FloatArray
    variance: FloatArray
    n_participants: FloatArray
    scales_trend: bool

    @property
    def trend_scale(self) -> FloatArray:
        """The factor of each site's trend, (sites, p)."""
        return self.scale if self.scales_trend else np.ones_like(self.scale)

    @property
    def centre(self) -> FloatArray:
        """Mean of the sites' levels over participants, in the pool's units, (p,)."""
        mean: FloatArray = self.n_participants @ (self.level / self.trend_scale) / self.n_participants.sum()
        return mean

    @property
    def raw_shift(self) -> FloatArray:
        """The sites' shifts before shrinkage, (sites, p)."""
        return np.where(self.n_participants[:, None] > 0, self.level / self.trend_scale - self.centre, 0.0)

    def predicted(self, basis: FloatArray, site: IntArray) -> FloatArray:
        """Return what each row's site is expected to measure."""
        values: FloatArray = self.level[site] + self.trend_scale[site] * (basis @ self.slopes)
        return values

    def effect(self) -> ShiftScale:
        """Return the site effect, its shifts shrunk by empirical Bayes."""
        shift, error = self.raw_shift, self.error
        if np.count_nonzero(self.n_participants) < 2:
            between = np.zeros(shift.shape[1])
        else:
            # Few sites say little about one feature; all features together say more.
            between, count = variance_between(shift, error), len(shift)
            between = (count * between + PRIOR_SITES * between.mean()) / (count + PRIOR_SITES)
        return ShiftScale(
            shift=shift * between / np.maximum(between + error**2, 1e-12),
            error=error,
            scale=self.scale,
            between=between,
            scale_weight=self.scale_weight,
            variance=self.variance,
            scales_trend=self.scales_trend,
        )


def _squares(cells: Moments, level: FloatArray, slopes: FloatArray, factor: FloatArray) -> FloatArray:
    """Return Σ w (z − level − factor · b @ slopes)² of each cell, (sites, p)."""
    across = np.einsum("sqp,qp->sp", cells.bz, slopes)
    inner = np.einsum("qp,sqr,rp->sp", slopes, cells.bb, slopes, optimize=True)
    missed = cells.z - level - factor * (cells.b @ slopes)
    squares: FloatArray = cells.zz - 2 * factor * across + factor**2 * inner + cells.n[:, None] * missed**2
    return np.maximum(squares, 0.0)


def regress(
    sites: Moments, penalty: FloatArray, kurtosis: FloatArray, *, scales_trend: bool, turns: int = TURNS
) -> Regression:
    """Fit trend, levels and scales in turns; ``penalty`` (q,) is that on the slopes for each participant."""
    n, (q, p) = sites.n, sites.bz.shape[1:]
    total, weight = n.sum(), np.where(n > 0, n, 1.0)[:, None]
    scale = np.ones((len(n), p))
    inverse = np.linalg.inv(sites.bb.sum(axis=0) + np.diag(penalty) * total)
    for _ in range(turns):
        # Where sites scale the trend, z / scale follows a plain regression.
        factor = scale if scales_trend else np.ones_like(scale)
        slopes = inverse @ np.einsum("sqp,sp->qp", sites.bz, 1 / factor)
        level = sites.z - factor * (sites.b @ slopes)
        squares = _squares(sites, level, slopes, factor)
        scale_weight = _scale_weight(squares, n, kurtosis)
        scale = _scales(squares, n, scale_weight)
    variance = (squares / scale**2).sum(axis=0) / total
    free = total / max(total - np.count_nonzero(n) - q, 1.0)
    away = sites.b - n @ sites.b / total
    trend_error = ((away @ inverse) * away).sum(axis=1, keepdims=True)
    sampling = (1.0 if scales_trend else scale**2) / weight
    error = np.sqrt(variance * free * (sampling + trend_error))
    return Regression(slopes, level, error, scale, scale_weight, variance, n, scales_trend)


def _scale_weight(squares: FloatArray, n: FloatArray, kurtosis: FloatArray) -> FloatArray:
    """Return how many equivalent participants of the pooled scale each site's is to be mixed with, (p,).

    As many as make the logarithm of a site's variance as uncertain as sites differ in it (DerSimonian and
    Laird); heavy tails take more.
    """
    seen = n >= 5
    if seen.sum() < 2:
        return np.full(squares.shape[1], PRIOR_SCALE)
    n = n[seen, None]
    variance = squares[seen] / n
    alive = (variance > 1e-18).all(axis=0)
    # Logarithms of few participants' variances are too small on average.
    logs = np.log(np.where(alive, variance, 1.0)) + 1 / (n - 1)
    between = variance_between(logs, np.sqrt((kurtosis - 1) / (n - 1)))
    # Two features as PRIOR_SCALE has it, or a table of one feature and two sites would decide by chance.
    mean = (between[alive].sum() + 2 * 2 / PRIOR_SCALE) / (alive.sum() + 2)
    between = (len(n) * between + PRIOR_SITES * mean) / (len(n) + PRIOR_SITES)
    return np.where(alive, np.clip((kurtosis - 1) / between, 1.0, MAX_PRIOR_SCALE), PRIOR_SCALE)


def _scales(squares: FloatArray, n: FloatArray, weight: FloatArray) -> FloatArray:
    """Return each site's scale relative to the pool, shrunk towards 1, with a geometric mean of 1."""
    variance = squares.sum(axis=0) / n.sum()
    alive = variance > 1e-18
    shrunk = (squares + weight * variance) / (n[:, None] + weight)
    scale = np.where(alive, np.sqrt(shrunk / np.where(alive, variance, 1.0)), 1.0)
    result: FloatArray = scale / np.exp(n @ np.log(scale) / n.sum())
    return result


def variance_between(values: FloatArray, error: FloatArray) -> FloatArray:
    """Return the variance of sites' true values, (p,): DerSimonian and Laird's estimate of a meta-analysis."""
    weight = 1 / np.maximum(error**2, 1e-12)
    total = weight.sum(axis=0)
    apart = (weight * (values - (weight * values).sum(axis=0) / total) ** 2).sum(axis=0)
    between: FloatArray = np.maximum(apart - (len(values) - 1), 0)
    return between / (total - (weight**2).sum(axis=0) / total)


# -- choices -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SharedTrend:
    """The regression on all rows and on the training rows of each fold, with what was chosen for them.

    Attributes
    ----------
    basis
        The spline basis; its columns come first among those of the regression, a target's after them.
    columns
        (rows, q): the columns of the regression.
    penalty
        (q,): the penalty on each column, for each participant.
    whole, folds
        The regressions.
    """

    basis: SplineBasis
    columns: FloatArray
    penalty: FloatArray
    whole: Regression
    folds: tuple[Regression, ...]
    cells: Moments
    kurtosis: FloatArray

    @property
    def curvature(self) -> float:
        """The penalty on curved columns, 0 where there are none."""
        return float(self.penalty[: len(self.basis.mean)][self.basis.curved].max(initial=0.0))

    @property
    def trend(self) -> Trend:
        """The trend of the covariates, without a target's part."""
        return Trend(self.basis, self.whole.slopes[: len(self.basis.mean)], self.whole.centre)

    @classmethod
    def fit(
        cls,
        z: FloatArray,
        design: Design,
        *,
        curvature: float | None = None,
        scales_trend: bool | None = None,
    ) -> SharedTrend:
        """Fit; ``None``: chosen on held-out participants.

        The trend is kept, so it needs less proof than what is removed: the straightest one within one standard
        error of the best (Breiman's rule), and of the two forms, neither simpler than the other, the likelier.
        """
        basis, columns = regression_columns(design)
        curved = np.append(basis.curved, np.zeros(columns.shape[1] - len(basis.mean), dtype=bool))
        cells = moments(z, columns, design, design.fold)
        sites = cells.merged(np.ones(design.n_folds, dtype=bool))
        kurtosis = _kurtosis(z, columns, design, sites, np.where(curved, CURVATURES[0], 1e-9))

        def fits(curvature: float, scales_trend: bool) -> tuple[Regression, ...]:
            penalty = np.where(curved, curvature, 1e-9)
            return tuple(
                regress(
                    cells.merged(np.arange(design.n_folds) != fold),
                    penalty,
                    kurtosis,
                    scales_trend=scales_trend,
                )
                for fold in range(design.n_folds)
            )

        def likelihoods(candidates: list[tuple[float, bool]]) -> FloatArray:
            return np.array([held_out(fits(*each), cells, variance) for each in candidates])

        variance = sites.zz.sum(axis=0) / max(sites.n.sum(), 1e-12)
        if curvature is None:
            grid = CURVATURES if curved.any() and design.n_folds > 1 else CURVATURES[:1]
            tried = likelihoods([(value, bool(scales_trend)) for value in grid])
            curvature = grid[choose(tried, standard_errors=1.0)]
        if scales_trend is None:
            scales_trend = False
            if design.n_sites > 1 and len(basis.mean) and design.n_folds > 1:
                plain, scaled = likelihoods([(curvature, False), (curvature, True)])
                scales_trend = bool(scaled.sum() > plain.sum())
        penalty = np.where(curved, curvature, 1e-9)
        whole = regress(sites, penalty, kurtosis, scales_trend=scales_trend)
        folds = fits(curvature, scales_trend) if design.n_folds > 1 else ()
        return cls(basis, columns, penalty, whole, folds, cells, kurtosis)

    def refitted(self, *, scales_trend: bool) -> SharedTrend:
        """Return the same with or without scaling of the trend."""
        if scales_trend == self.whole.scales_trend:
            return self
        every = np.arange(self.cells.n.shape[1])

        def fit(folds: NDArray[np.bool_]) -> Regression:
            return regress(self.cells.merged(folds), self.penalty, self.kurtosis, scales_trend=scales_trend)

        folds = tuple(fit(every != fold) for fold in every) if self.folds else ()
        return replace(self, whole=fit(every >= 0), folds=folds)

    def at(self, rows: IntArray | slice, design: Design, regression: Regression | None = None) -> Context:
        """Return the context of rows under the whole regression, or under that of a fold."""
        fit, q = self.whole if regression is None else regression, len(self.basis.mean)
        predicted = fit.centre + self.columns[rows, :q] @ fit.slopes[:q]
        return Context(design.site[rows], design.covariates[rows], predicted)


def held_out(fits: tuple[Regression, ...], cells: Moments, variance: FloatArray) -> FloatArray:
    """Return the Gaussian log-likelihood of each held-out part up to a constant, (parts,).

    Parts are one site's participants of one fold. Each feature has one variance, (p,): sites of small variance
    would outweigh all others otherwise.
    """
    parts = []
    for fold, fit in enumerate(fits):
        held = Moments(*(getattr(cells, name)[:, fold] for name in ("n", "b", "z", "bb", "bz", "zz")))
        squares = _squares(held, fit.level, fit.slopes, fit.trend_scale)
        likelihood = -0.5 * (squares / np.where(variance > 1e-18, variance, np.inf)).sum(axis=1)
        parts.append(likelihood[(held.n > 0) & (fit.n_participants > 0)])
    return np.concatenate(parts) if parts else np.empty(0)


def regression_columns(design: Design) -> tuple[SplineBasis, FloatArray]:
    """Return the spline basis, and its columns at each row beside those of a target free of the trend."""
    basis = fit_basis(design.covariates, design.weight)
    columns, target = basis(design.covariates), design.target
    if target.shape[1] and columns.shape[1]:
        w = np.sqrt(design.weight)[:, None]
        # What the trend explains of the target belongs to the trend.
        free = target - columns @ np.linalg.lstsq(columns * w, target * w, rcond=None)[0]
        target = free[:, free.std(axis=0) > 1e-6 * target.std(axis=0)]
    return basis, np.hstack([columns, target])


def _kurtosis(
    z: FloatArray, columns: FloatArray, design: Design, sites: Moments, penalty: FloatArray
) -> FloatArray:
    """Return the kurtosis of residuals around sites and trend, (p,), within sensible bounds."""
    gaussian = np.full(z.shape[1], 3.0)
    fit = regress(sites, penalty, gaussian, scales_trend=False, turns=1)
    fourths = np.zeros_like(fit.level)
    for part, residuals in _residuals(z, columns, design, fit):
        fourths += site_sums(residuals**4, design.site[part], design.n_sites, design.weight[part])
    n = np.where(sites.n > 0, sites.n, 1.0)[:, None]
    variance = _squares(sites, fit.level, fit.slopes, np.ones_like(fit.level)) / n
    ratio = np.divide(fourths, variance**2, out=np.zeros_like(fourths), where=variance > 1e-18)
    total = (n * (variance > 1e-18)).sum(axis=0)
    return np.clip(np.where(total > 0, ratio.sum(axis=0) / np.maximum(total, 1.0), 3.0), 2.0, 20.0)


def _residuals(
    z: FloatArray, columns: FloatArray, design: Design, fit: Regression
) -> Iterator[tuple[slice, FloatArray]]:
    for part in pieces(len(z), z.shape[1]):
        yield part, z[part] - fit.predicted(columns[part], design.site[part])


# -- the effect --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ShiftScale(SiteEffect):
    r"""A shift and a scale of each feature: :math:`T_s(v) = m + \gamma_s + \delta_s (v - m)`.

    Where sites scale the trend too, :math:`T_s(v) = \delta_s (v + \gamma_s)`.

    Attributes
    ----------
    shift, error, scale
        γ after shrinkage, its standard error before, and δ, (sites, features).
    between, scale_weight, variance
        (features,): variance of true shifts between sites; equivalent participants of the pooled scale; variance
        of residuals.
    scales_trend
        Which of the two forms holds.
    """

    name: ClassVar[str] = "shift and scale"

    shift: FloatArray = array("sites", "features")
    error: FloatArray = array("sites", "features")
    scale: FloatArray = array("sites", "features", positive=True)
    between: FloatArray = array("features")
    scale_weight: FloatArray = array("features", positive=True)
    variance: FloatArray = array("features")
    scales_trend: bool

    @classmethod
    def identity(cls, n_sites: int, n_features: int) -> Self:
        """Return sites that neither shift nor scale."""
        zeros, ones = np.zeros((n_sites, n_features)), np.ones((n_sites, n_features))
        return cls(zeros, zeros, ones, zeros[0], np.full(n_features, PRIOR_SCALE), ones[0], False)

    @property
    def is_identity(self) -> bool:
        """Whether no site shifts or scales."""
        return not self.shift.any() and bool((self.scale == 1).all())

    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values without shift and scale."""
        shift, scale = self.shift[at.site], self.scale[at.site]
        if self.scales_trend:
            return rows / scale - shift
        return at.predicted + (rows - at.predicted - shift) / scale

    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values with shift and scale."""
        shift, scale = self.shift[at.site], self.scale[at.site]
        if self.scales_trend:
            return (rows + shift) * scale
        return at.predicted + shift + (rows - at.predicted) * scale

    def log_det(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return − Σ log δ."""
        total: FloatArray = -np.log(self.scale).sum(axis=1)[at.site]
        return total

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Estimate a site from its rows, outlying values winsorised, shrunk as the others are."""
        seen = ~np.isnan(rows)
        n = seen.sum(axis=0).astype(np.float64)
        z = at.predicted + _winsorised_around_median(rows - at.predicted, self.variance)
        scale = np.ones(rows.shape[1])

        def mean(values: FloatArray) -> FloatArray:
            return np.where(seen, values, 0.0).sum(axis=0) / np.maximum(n, 1)

        for _ in range(TURNS):
            residuals = z / scale - at.predicted if self.scales_trend else z - at.predicted
            shift = mean(residuals)
            factor = scale if self.scales_trend else 1.0
            squares = (np.where(seen, residuals - shift, 0.0) * factor) ** 2
            weight = np.maximum(n - 1, 0) + self.scale_weight
            variance = (squares.sum(axis=0) + self.scale_weight * self.variance) / weight
            scale = np.where(self.variance > 1e-18, np.sqrt(variance / np.maximum(self.variance, 1e-18)), 1.0)
        error2 = self.variance / np.maximum(n, 1e-9)
        shrunk = shift * self.between / np.maximum(self.between + error2, 1e-300)
        return replace(
            self,
            shift=np.vstack([self.shift, shrunk]),
            error=np.vstack([self.error, np.sqrt(error2)]),
            scale=np.vstack([self.scale, scale]),
        )


# -- winsorising -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Winsorised:
    """Features to estimate from, and how many participants of each site were winsorised, (sites, p)."""

    z: FloatArray
    count: FloatArray


def winsorise(z: FloatArray, design: Design) -> Winsorised:
    """Winsorise values far from what site and trend predict, so that one failed segmentation decides nothing.

    The limit is in mean absolute deviations of the site, which a few outliers hardly move; outliers widen it
    all the same, so limits are found anew until nothing changes. Features without outliers stay as they are.
    """
    _, columns = regression_columns(design)
    penalty = np.full(columns.shape[1], CURVATURES[-1])
    if np.abs(z).max(initial=0.0) > ABSURD:
        z = np.clip(z, -ABSURD, ABSURD)  # or it would take many rounds
    result, features = z, np.arange(z.shape[1])
    with_outliers = np.zeros(z.shape[1], dtype=bool)
    gaussian, n = np.full(z.shape[1], 3.0), design.n_participants
    limit = np.full((design.n_sites, z.shape[1]), np.inf)
    for _ in range(WINSORISE_TURNS):
        near = result if len(features) == z.shape[1] else result[:, features]
        sites = moments(near, columns, design).merged(np.ones(1, dtype=bool))
        fit = regress(sites, penalty, gaussian[features], scales_trend=False, turns=1)
        lengths = np.zeros((design.n_sites, len(features)))
        for part, residuals in _residuals(near, columns, design, fit):
            lengths += site_sums(np.abs(residuals), design.site[part], design.n_sites, design.weight[part])
        new_limit = _limit(lengths, n[:, None], lengths.sum(axis=0) / n.sum())
        outlying = np.zeros(len(features), dtype=bool)
        for part, residuals in _residuals(near, columns, design, fit):
            outlying |= (np.abs(residuals) > new_limit[design.site[part]]).any(axis=0)
        outlying &= (new_limit < 0.99 * limit[:, features]).any(axis=0)
        if not outlying.any():
            break
        features, result = features[outlying], z.copy() if result is z else result
        with_outliers[features] = True
        limit[:, features] = new_limit[:, outlying]
        fit = replace(
            fit, level=fit.level[:, outlying], slopes=fit.slopes[:, outlying], scale=limit[:, features]
        )
        for part, residuals in _residuals(z[:, features], columns, design, fit):
            bound = limit[np.ix_(design.site[part], features)]
            result[part, features] = z[part][:, features] - residuals + np.clip(residuals, -bound, bound)
    count = np.zeros((design.n_sites, z.shape[1]))
    if with_outliers.any():
        changed = (result[:, with_outliers] != z[:, with_outliers]).astype(np.float64)
        count[:, with_outliers] = site_sums(changed, design.site, design.n_sites, design.weight)
    return Winsorised(result, count)


def _winsorised_around_median(residuals: FloatArray, variance: FloatArray) -> FloatArray:
    """Winsorise the residuals of one new site, (rows, p); NaN stays."""
    seen = ~np.isnan(residuals)
    median = np.nanmedian(np.where(seen.any(axis=0), residuals, 0.0), axis=0)
    limit = np.full(residuals.shape[1], np.inf)
    for _ in range(WINSORISE_TURNS):
        lengths = np.where(seen, np.minimum(np.abs(residuals - median), limit), 0.0).sum(axis=0)
        limit = _limit(lengths, seen.sum(axis=0), np.sqrt(variance * 2 / np.pi))
    return median + np.clip(residuals - median, -limit, limit)


def _limit(lengths: FloatArray, n: FloatArray, pooled: FloatArray) -> FloatArray:
    """Return how far a site's values may lie, from its mean absolute deviation shrunk to the pool's."""
    deviation = (lengths + PRIOR_SCALE * pooled) / (n + PRIOR_SCALE)
    limit: FloatArray = WINSORISE_AT * np.sqrt(np.pi / 2) * deviation
    return limit
