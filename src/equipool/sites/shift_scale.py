"""Shift and scale of each site, beside the trend that all sites share, by penalised least squares.

Trend and levels are fitted together, with a penalty on the trend's curvature. All of it is made of moments by
site and fold of participants, so choices on held-out participants need no further pass over the rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipool.groups.trend import SplineBasis, fit_basis
from equipool.sites.design import FEW, MAX_ITERATIONS, TINY, WINSORISE_AT, Design, pieces, site_sums
from equipool.sites.effect import Context, FloatArray, IntArray, SiteEffect, array, simplest

CURVATURES = (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4)  # penalties on the trend's curved part, the straightest first
TURNS = 3  # of what is estimated in turns, such as the trend given scales, and scales given the trend
PRIOR_SITES = 4.0  # equivalent sites of the mean over features in each feature's variance between sites
PRIOR_SCALE = 10.0  # equivalent participants of the pooled scale, where sites cannot tell how scales differ
ABSURD = 50.0  # standard deviations of the feature; values beyond would take many rounds of winsorising


@dataclass(frozen=True, eq=False)
class ShiftScale(SiteEffect):
    r"""A shift and a scale of each feature: for the value :math:`v = m(c) + e`, a site measures

    .. math:: T_s(v) = m(c) + \gamma_s^* + \delta_s^* e \qquad\text{or}\qquad
              T_s(v) = \delta_s^* (v + \gamma_s^*),

    the second where sites also scale the trend :math:`m`, as the gain of a scanner does. Shifts and scales
    are shrunk by empirical Bayes, as in ComBat: with the standard error :math:`\sigma_s` of :math:`\gamma_s`,
    the variance :math:`\tau^2` of true shifts between sites, the variance :math:`\sigma^2` of the pool's
    residuals and the equivalent participants :math:`k`,

    .. math:: \gamma_s^* = \frac{\tau^2}{\tau^2 + \sigma_s^2}\,\gamma_s, \qquad
              \delta_s^{*2} \propto \frac{\sum_i w_i e_i^2 + k \sigma^2}{(n_s + k)\,\sigma^2}.
    """

    name: ClassVar[str] = "shift and scale"
    acts: ClassVar[tuple[str, ...]] = ("shift", "scale")

    scales_trend: bool = field(metadata={"neutral": False})  # which of the two forms holds
    shift: FloatArray = array("sites", "features")  # γ*
    error: FloatArray = array("sites", "features")  # standard error of γ
    scale: FloatArray = array("sites", "features", positive=True)  # δ*
    between: FloatArray = array("features")  # τ²
    scale_weight: FloatArray = array("features", positive=True, neutral=PRIOR_SCALE)  # k
    variance: FloatArray = array("features", neutral=1.0)  # σ²

    @property
    def trend_scale(self) -> FloatArray:
        """The factor of each site's trend, (sites, features)."""
        return self.scale if self.scales_trend else np.ones_like(self.scale)

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
        return -np.log(self.scale).sum(axis=1)[at.site]

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Estimate a site from its rows, outlying values winsorised, shrunk as the others are."""
        away, measured = rows - at.predicted, ~np.isnan(rows)
        n, limit = measured.sum(axis=0), np.full(rows.shape[1], np.inf)
        median = np.nanmedian(np.where(measured.any(axis=0), away, 0.0), axis=0)
        for _ in range(MAX_ITERATIONS):
            before, lengths = limit, np.where(measured, np.minimum(np.abs(away - median), limit), 0.0)
            limit = _limit(lengths.sum(axis=0), n, np.sqrt(self.variance * 2 / np.pi))
            if (limit == before).all():
                break
        z = at.predicted + median + np.clip(away - median, -limit, limit)
        varies, scale = self.variance > TINY, np.ones(rows.shape[1])
        for _ in range(TURNS):
            factor = scale if self.scales_trend else 1.0
            residuals = z / factor - at.predicted
            shift = np.where(measured, residuals, 0.0).sum(axis=0) / np.maximum(n, 1)
            squares = (np.where(measured, residuals - shift, 0.0) * factor) ** 2
            shrunk = squares.sum(axis=0) + self.scale_weight * self.variance
            variance = shrunk / (np.maximum(n - 1, 0) + self.scale_weight)
            scale = np.where(varies, np.sqrt(variance / np.where(varies, self.variance, 1.0)), 1.0)
        error2 = self.variance / np.maximum(n, TINY)
        shift *= self.between / np.maximum(self.between + error2, TINY)
        return self._with_site(shift=shift, error=np.sqrt(error2), scale=scale)


@dataclass(frozen=True, eq=False)
class Moments:
    """Weighted count, means and centred products of the columns b (q) and the features z (p) at each site.

    Over the rows in which a feature was measured: where all were, k is 1, otherwise p.
    """

    n: FloatArray  # (sites, k)
    b: FloatArray  # (sites, q, k)
    z: FloatArray  # (sites, p)
    bb: FloatArray  # (sites, q, q, k)
    bz: FloatArray  # (sites, q, p)
    zz: FloatArray  # (sites, p), of each feature with itself

    @classmethod
    def of(cls, sums: tuple[FloatArray, ...], folds: NDArray[np.bool_]) -> Self:
        """Return the moments over some of the folds of :func:`sums_of`."""
        some = np.asarray(folds, dtype=np.float64)
        n, b, z, bb, bz, zz = (np.einsum("sf...,f->s...", each, some) for each in sums)
        share = np.divide(1.0, n, out=np.zeros_like(n), where=n > 0)
        mean_b, mean_z = b * share[:, None], z * share
        bb, bz = bb - b[:, :, None] * mean_b[:, None], bz - b * mean_z[:, None]
        return cls(n, mean_b, mean_z, bb, bz, np.maximum(zz - z * mean_z, 0.0))

    def squares(self, level: FloatArray, slopes: FloatArray, factor: FloatArray) -> FloatArray:
        """Return Σ w (z − level − factor · b @ slopes)² at each site, (sites, p)."""
        across = np.einsum("sqp,qp->sp", self.bz, slopes)
        inner = np.einsum("qp,sqrp,rp->sp", slopes, self.bb, slopes, optimize=True)
        offset = self.z - level - factor * np.einsum("sqp,qp->sp", self.b, slopes)
        total = self.zz - 2 * factor * across + factor**2 * inner + self.n * offset**2
        return np.maximum(total, 0.0)


def sums_of(z: FloatArray, columns: FloatArray, design: Design, n_folds: int = 1) -> tuple[FloatArray, ...]:
    """Return Σw, Σwb, Σwz, Σwbbᵀ, Σwbzᵀ and Σwz² of each site and fold, (sites, folds, ...); see Moments.

    Cells of z that are NaN were not measured; their rows are left out of the sums of that feature.
    """
    q, p, n_cells = columns.shape[1], z.shape[1], design.n_sites * n_folds
    k = p if np.isnan(z).any() else 1
    cell = design.site * n_folds + (design.fold if n_folds > 1 else 0)
    shapes = ((k,), (q, k), (p,), (q, q, k), (q, p), (p,))
    sums = n, b_sum, z_sum, bb, bz, zz = tuple(np.zeros((n_cells, *shape)) for shape in shapes)
    for part in pieces(len(z), p * (q if k > 1 else 1)):
        b, y, add = columns[part], z[part], (cell[part], n_cells, design.weight[part])
        measured = np.ones((len(b), 1)) if k == 1 else (~np.isnan(y)).astype(np.float64)
        y = y if k == 1 else np.where(measured, y, 0.0)
        each = (b[:, :, None] * measured[:, None]).reshape(len(b), q * k)
        n += site_sums(measured, *add)
        b_sum += site_sums(each, *add).reshape(b_sum.shape)
        z_sum += site_sums(y, *add)
        zz += site_sums(y**2, *add)
        for j in range(q):
            bb[:, j] += site_sums(b[:, [j]] * each, *add).reshape(bb[:, j].shape)
            bz[:, j] += site_sums(y * b[:, [j]], *add)
    return tuple(each.reshape(design.n_sites, n_folds, *each.shape[1:]) for each in sums)


@dataclass(frozen=True, eq=False)
class Regression:
    """The regression of one set of rows."""

    slopes: FloatArray  # (q, p), of the columns
    level: FloatArray  # (sites, p), what each site measures where all columns are 0, their mean
    centre: FloatArray  # (p,), mean of the levels over participants, in the pool's units
    n_participants: FloatArray  # (sites, k), as in Moments
    effect: ShiftScale  # its shifts shrunk by empirical Bayes

    def predicted(self, columns: FloatArray, site: IntArray) -> Iterator[tuple[slice, FloatArray]]:
        """Yield some rows at a time: which, and what their site is expected to measure."""
        factor = self.effect.trend_scale
        for part in pieces(len(site), factor.shape[1]):
            yield part, self.level[site[part]] + factor[site[part]] * (columns[part] @ self.slopes)


def regress(sites: Moments, penalty: FloatArray, *, scales_trend: bool = False) -> Regression:
    """Fit trend, levels and scales; ``penalty`` (q,) is that on the slopes for each participant."""
    n, (q, p) = sites.n, sites.bz.shape[1:]
    total, factor, present = np.maximum(n.sum(axis=0), 1.0), np.ones((len(n), p)), n > 0
    inner = np.moveaxis(sites.bb.sum(axis=0), -1, 0)
    inverse = np.linalg.inv(inner + np.diag(penalty) * total[:, None, None])
    for _ in range(TURNS if scales_trend else 1):
        # Where sites scale the trend, z / scale follows a plain regression.
        across = np.einsum("sqp,sp->qp", sites.bz, 1 / factor)
        slopes = inverse[0] @ across if len(inverse) == 1 else np.einsum("pqr,rp->qp", inverse, across)
        level = sites.z - factor * np.einsum("sqp,qp->sp", sites.b, slopes)
        squares = sites.squares(level, slopes, factor)
        scale, scale_weight = shrunken_scales(squares, n)
        factor = scale if scales_trend else factor
    pool_level = level / factor
    centre = (n * pool_level).sum(axis=0) / total
    shift = np.where(present, pool_level - centre, 0.0)
    variance = (squares / scale**2).sum(axis=0) / total
    degrees = np.maximum(total - np.count_nonzero(present, axis=0) - q, 1.0)
    away = sites.b - (n[:, None] * sites.b).sum(axis=0) / total
    trend_error = np.einsum("sqp,pqr,srp->sp", away, inverse, away)
    sampling = (1.0 if scales_trend else scale**2) / np.where(present, n, 1.0)
    error = np.sqrt(variance * total / degrees * (sampling + trend_error))
    between = variance_between(shift, np.where(present, error, np.inf))
    shift *= between / np.maximum(between + error**2, TINY)
    effect = ShiftScale(scales_trend, shift, error, scale, between, scale_weight, variance)
    return Regression(slopes, level, centre, n, effect)


def shrunken_scales(squares: FloatArray, n: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return each site's scale relative to the pool, (sites, p), and the weight k of its shrinkage, (p,).

    From sums of squared residuals (sites, p). Shrunk towards 1, with a geometric mean of 1.
    """
    scale_weight, total = _scale_weight(squares, n), np.maximum(n.sum(axis=0), 1.0)
    pooled = squares.sum(axis=0) / total
    shrunk = (squares + scale_weight * pooled) / (n + scale_weight)
    varies = pooled > TINY
    scale = np.where(varies, np.sqrt(shrunk / np.where(varies, pooled, 1.0)), 1.0)
    return scale / np.exp((n * np.log(scale)).sum(axis=0) / total), scale_weight


def _scale_weight(squares: FloatArray, n: FloatArray) -> FloatArray:
    """Return how many equivalent participants of the pooled scale each site's is to be mixed with, (p,).

    As many as make the logarithm of a site's variance, of error 2 / (n − 1), as uncertain as sites differ.
    """
    weight, n = np.full(squares.shape[1], PRIOR_SCALE), np.broadcast_to(n, squares.shape)
    enough, variance = n >= FEW, squares / np.maximum(n, 1.0)
    varies = (enough.sum(axis=0) > 1) & ((variance > TINY) | ~enough).all(axis=0)
    if varies.any():
        n, enough, variance = n[:, varies], enough[:, varies], variance[:, varies]
        freedom = np.where(enough, n - 1, 1.0)
        # Logarithms of few participants' variances are too small on average.
        logs = np.log(np.where(enough, variance, 1.0)) + 1 / freedom
        error = np.where(enough, np.sqrt(2 / freedom), np.inf)
        weight[varies] = 2 / np.maximum(variance_between(logs, error), TINY)
    return weight


def variance_between(values: FloatArray, error: FloatArray) -> FloatArray:
    """Return the variance of sites' true values, (p,): DerSimonian and Laird's estimate.

    Few sites say little about one feature; it is shrunk to the mean over features. A site with an infinite
    error says nothing.
    """
    weight = 1 / np.maximum(error**2, TINY)
    count, total = (weight > 0).sum(axis=0), np.maximum(weight.sum(axis=0), TINY)
    apart = (weight * (values - (weight * values).sum(axis=0) / total) ** 2).sum(axis=0)
    degrees = np.maximum(total - (weight**2).sum(axis=0) / total, TINY)
    between = np.where(count > 1, np.maximum(apart - (count - 1), 0) / degrees, 0.0)
    typical = between.sum() / max(between.size, 1)
    return (count * between + PRIOR_SITES * typical) / (count + PRIOR_SITES)


@dataclass(frozen=True, eq=False)
class SharedTrend:
    """The regression on all rows, or on the training rows of a fold."""

    basis: SplineBasis
    columns: FloatArray  # (rows, q): those of the basis, and after them those of a target
    sums: tuple[FloatArray, ...]  # of sums_of, by site and fold
    curvature: float  # the penalty on curved columns for each participant, 0 where there are none
    scales_trend: bool = False  # whether sites scale the trend

    @property
    def penalty(self) -> FloatArray:
        """The penalty on each column, (q,): a trace on all, so that collinear ones can be solved for."""
        penalty = np.full(self.columns.shape[1], TINY)
        penalty[: self.basis.width][self.basis.curved] = self.curvature
        return penalty

    @cached_property
    def whole(self) -> Regression:
        """The regression on all rows."""
        return self.without(-1)

    def without(self, fold: int) -> Regression:
        """Return the regression on all rows but those of a fold."""
        moments = Moments.of(self.sums, np.arange(self.sums[0].shape[1]) != fold)
        return regress(moments, self.penalty, scales_trend=self.scales_trend)

    @classmethod
    def of(cls, z: FloatArray, design: Design) -> Self:
        """Sum what the regressions of all folds need; nothing is chosen."""
        basis, columns = regression_columns(design)
        return cls(basis, columns, sums_of(z, columns, design, design.n_folds), 0.0)

    @classmethod
    def fit(cls, z: FloatArray, design: Design, *, curvature: float | None = None) -> Self:
        """Fit the trend; ``None``: its curvature is chosen on held-out participants.

        By the one rule, with one standard error (Breiman's): the straightest trend, and whether sites scale
        it. The trend is kept, so it needs less proof than what is removed.
        """
        shared = cls.of(z, design)
        basis, curved = shared.basis, bool(shared.basis.curved.any())
        shared = replace(shared, curvature=(curvature or CURVATURES[0]) if curved else 0.0)
        if curved and curvature is None and design.n_folds > 1:
            tried = np.array([replace(shared, curvature=value).held_out() for value in CURVATURES])
            shared = replace(shared, curvature=CURVATURES[simplest(tried)])
        if design.n_sites > 1 and basis.width and design.n_folds > 1:
            scaled = replace(shared, scales_trend=True)
            forms = np.array([shared.held_out(), scaled.held_out()])
            shared = scaled if simplest(forms) else shared
        return shared

    def held_out(self) -> FloatArray:
        """Return the Gaussian log-likelihood of each held-out part up to a constant, (parts,).

        Parts are one site's participants of one fold. Each feature has one variance: sites of small variance
        would outweigh all others otherwise.
        """
        fold, parts = np.arange(self.sums[0].shape[1]), []
        whole = Moments.of(self.sums, fold >= 0)
        variance = whole.zz.sum(axis=0) / np.maximum(whole.n.sum(axis=0), 1.0)
        for k in fold:
            fit, held = self.without(int(k)), Moments.of(self.sums, fold == k)
            squares = held.squares(fit.level, fit.slopes, fit.effect.trend_scale)
            both = (held.n > 0) & (fit.n_participants > 0)
            squares = np.where(both, squares, 0.0) / np.where(variance > TINY, variance, np.inf)
            parts.append(-0.5 * squares[both.any(axis=1)].sum(axis=1))
        return np.concatenate(parts)

    def at(self, rows: IntArray | slice, design: Design, fit: Regression) -> Context:
        """Return the context of rows under the whole regression, or under that of a fold."""
        q = self.basis.width
        predicted = fit.centre + self.columns[rows, :q] @ fit.slopes[:q]
        return Context(design.site[rows], design.covariates[rows], predicted)


def regression_columns(design: Design) -> tuple[SplineBasis, FloatArray]:
    """Return the spline basis, and its columns at each row beside those of a target free of the trend."""
    basis = fit_basis(design.covariates, design.weight)
    columns, target = basis(design.covariates), design.target
    if target.shape[1] and columns.shape[1]:
        w = np.sqrt(design.weight)[:, None]
        # What the trend explains of the target belongs to the trend.
        free = target - columns @ np.linalg.lstsq(columns * w, target * w, rcond=None)[0]
        target = free[:, free.var(axis=0) > TINY * target.var(axis=0)]
    return basis, np.hstack([columns, target])


def winsorise(z: FloatArray, design: Design) -> tuple[FloatArray, FloatArray]:
    """Winsorise values far from what site and trend predict, so that one failed segmentation decides nothing.

    The limit is in mean absolute deviations of the site, which a few outliers hardly move; outliers widen it
    all the same, so limits are found anew until nothing changes. Returns the features to estimate from, those
    without outliers as they were, and how many participants of each site were winsorised, (sites, p).
    """
    basis, columns = regression_columns(design)
    site = design.site
    result, limit = np.clip(z, -ABSURD, ABSURD), np.full((design.n_sites, z.shape[1]), np.inf)
    for _ in range(MAX_ITERATIONS):
        fit = SharedTrend(basis, columns, sums_of(result, columns, design), CURVATURES[-1]).whole
        before, lengths = limit, np.zeros_like(limit)
        for part, predicted in fit.predicted(columns, site):
            away = np.nan_to_num(np.abs(result[part] - predicted))
            lengths += site_sums(away, site[part], design.n_sites, design.weight[part])
        n = fit.n_participants
        limit = _limit(lengths, n, lengths.sum(axis=0) / np.maximum(n.sum(axis=0), 1.0))
        for part, predicted in fit.predicted(columns, site):
            bound = limit[site[part]]
            result[part] = np.clip(z[part], predicted - bound, predicted + bound)
        if (limit >= 0.99 * before).all():  # settled to 1 %
            break
    count = np.zeros((design.n_sites, z.shape[1]))
    for part in pieces(*z.shape):
        changed = (np.abs(result[part] - z[part]) > 0).astype(np.float64)  # not where NaN
        count += site_sums(changed, site[part], design.n_sites, design.weight[part])
    return result, count


def _limit(lengths: FloatArray, n: FloatArray, pooled: FloatArray) -> FloatArray:
    """Return how far a site's values may lie, from its mean absolute deviation shrunk to the pool's."""
    deviation = (lengths + PRIOR_SCALE * pooled) / (n + PRIOR_SCALE)
    return WINSORISE_AT * np.sqrt(np.pi / 2) * deviation
