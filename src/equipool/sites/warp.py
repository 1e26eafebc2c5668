"""Monotone warps of features: what sites do that is neither a shift nor a scale."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipool.groups.trend import MIN_DISTINCT
from equipool.sites import rising_curves as rising
from equipool.sites.design import MAX_SLOPE_RATIO, MIN_PARTICIPANTS, TINY, Design, pieces
from equipool.sites.effect import Context, FloatArray, IntArray, SiteEffect, array, choose, exceeds
from equipool.sites.shift_scale import SharedTrend

STIFFNESS = (30.0, 10.0, 3.0, 1.0)  # equivalent participants of the pool's curve, the stiffest first


@dataclass(frozen=True, eq=False)
class Warp(SiteEffect):
    r"""A monotone warp of some of the features; the others stay as they are.

    A scanner that compresses large values, as a gamma does, acts on the measured value, trend included. With
    a rising curve :math:`g_s` of each site and feature (:mod:`~equipool.sites.rising_curves`) and their mean
    :math:`\bar g`, for values in units in which shift and scale are undone,

    .. math:: T_s(v) = g_s^{-1}(\bar g(v)), \qquad g_s(T_s(v)) = m(c) + e, \qquad e \sim N(0, 1),

    so that what all sites share stays. Curves are shrunk to the pool's, and enter where held-out participants
    have a higher likelihood with them than with any shift and scale. A curve is stored as its height at the
    first knot, and its slopes at all knots.
    """

    name: ClassVar[str] = "warp"
    acts: ClassVar[tuple[str, ...]] = ("curves",)

    columns: IntArray = array("warped", neutral=0)  # which features
    scale: FloatArray = array("sites", "warped", positive=True)  # v = scale · z + offset
    offset: FloatArray = array("sites", "warped")
    curves: FloatArray = array("sites", "warped", str(rising.WIDTH))  # g_s
    pool: FloatArray = array("warped", str(rising.WIDTH))  # ḡ
    centre: FloatArray = array("warped")  # the pool's value is centre + width · v
    width: FloatArray = array("warped", positive=True)

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, columns that are not in order, and curves that cannot be inverted."""
        factors = np.concatenate([self.width, *(a.ravel() for a in (self.curves[..., 1:], self.pool[:, 1:]))])
        if not ((factors > TINY) & (factors < 1 / TINY)).all():
            raise ValueError("curves")
        if (np.diff(self.columns, prepend=-1) < 1).any():
            raise ValueError("columns")

    @classmethod
    def fit(cls, z: FloatArray, design: Design, shared: SharedTrend, *, wanted: bool | None = None) -> Self:
        """Fit the curves; ``wanted=None``: where they raise the likelihood of held-out participants."""
        identity = cls.identity(design.n_sites, z.shape[1])
        large, sample = design.n_participants >= MIN_PARTICIPANTS, design.sample()
        # With few values, there is nothing between them that a curve could describe.
        graded = (np.diff(np.sort(z[sample], axis=0), axis=0) != 0).sum(axis=0) + 1 < MIN_DISTINCT
        if wanted is False or not len(sample) or design.n_folds < 2 or graded.all():
            return identity
        stiffness = _choose(_held_out_gains(z, design, shared, sample), graded, wanted)
        columns = np.flatnonzero(np.isfinite(stiffness))
        if not len(columns):
            return identity
        # A compression acts on the trend too: curves are put on a scale that does so.
        shared = replace(shared, scales_trend=True)
        effect, rows = shared.whole.effect, np.flatnonzero(large[design.site])
        curves = np.empty((design.n_sites, len(columns), rising.WIDTH))
        centre, width = np.empty((2, len(columns)))
        for block in pieces(len(columns), design.n_sites * rising.WIDTH**2):
            some, site = columns[block], design.site[rows]
            v = z[np.ix_(rows, some)] / effect.scale[:, some][site] - effect.shift[:, some][site]
            centre[block], width[block] = _mean_and_deviation(v, design.weight[rows])
            sums = rising.sums_of((v - centre[block]) / width[block], design, shared.columns, rows)
            start = rising.pool_curve(sums, shared.penalty)[0]
            curves[:, block] = rising.newton(sums, start, stiffness[some], shared.penalty)[0]
        pool = np.average(curves, axis=0, weights=np.where(large, design.n_participants, 0.0))
        curves[~large] = pool
        bounds = pool[:, 1:] / MAX_SLOPE_RATIO, pool[:, 1:] * MAX_SLOPE_RATIO
        curves[..., 1:] = np.clip(curves[..., 1:], *bounds)
        scale = 1 / (effect.scale[:, columns] * width)
        offset = -(effect.shift[:, columns] + centre) / width
        return cls(columns, scale, offset, curves, pool, centre, width)

    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return ḡ⁻¹(g_s(rows))."""
        return self._mapped(rows, at, to_pool=True)

    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return g_s⁻¹(ḡ(rows))."""
        return self._mapped(rows, at, to_pool=False)

    def log_det(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the log of the slopes, summed over features."""
        total = np.zeros(len(rows))
        for s in np.unique(at.site):
            some = at.site == s
            total[some] = np.log(self.slope(rows[some], int(s))).sum(axis=1)
        return total

    def slope(self, rows: FloatArray, site: int) -> FloatArray:
        """Return the derivative of :meth:`undo` for rows of one site, (rows, features)."""
        result = np.ones_like(rows)
        v = rows[:, self.columns] * self.scale[site] + self.offset[site]
        pooled = rising.inverse_curve(rising.curve_at(v, self.curves[site]), self.pool)
        ratio = rising.curve_slope(v, self.curves[site]) / rising.curve_slope(pooled, self.pool)
        result[:, self.columns] = self.scale[site] * ratio * self.width
        return result

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Return the warp with one more site, which warps nothing."""
        return self._with_site(scale=1 / self.width, offset=-self.centre / self.width, curves=self.pool)

    def _mapped(self, rows: FloatArray, at: Context, *, to_pool: bool) -> FloatArray:
        """Return the values at which the pool's curve has the height of the site's, or the reverse."""
        result = rows.copy()
        pool = 1 / self.width, -self.centre / self.width, self.pool
        for s in np.unique(at.site) if len(self.columns) else ():
            some, site = np.ix_(at.site == s, self.columns), (self.scale[s], self.offset[s], self.curves[s])
            before, after = (site, pool) if to_pool else (pool, site)
            height = rising.curve_at(rows[some] * before[0] + before[1], before[2])
            result[some] = (rising.inverse_curve(height, after[2]) - after[1]) / after[0]
        return result


def _choose(gains: FloatArray, graded: NDArray[np.bool_], wanted: bool | None) -> FloatArray:
    """Return the stiffness of each feature's curves, (p,), NaN for features that stay as they are.

    Where all features together show warps, every feature gets them that does not lose by it; where they do
    not, single features can show them, by a threshold for so many tests.
    """
    gains, p = np.where(graded[:, None], 0.0, gains), len(graded)
    together, stiffness = gains.sum(axis=1), np.array([np.nan, *STIFFNESS])
    if wanted:  # asked for, so that no selection is left but that of the strength
        return np.where(graded, np.nan, STIFFNESS[int(together[1:].sum(axis=1).argmax())])
    chosen = choose(together)
    if chosen:
        return np.where(graded | exceeds(-gains[chosen]), np.nan, stiffness[chosen])
    best = gains.sum(axis=2).argmax(axis=0)
    return np.where(exceeds(gains[best, np.arange(p)], tests=p), stiffness[best], np.nan)


def _held_out_gains(z: FloatArray, design: Design, shared: SharedTrend, sample: IntArray) -> FloatArray:
    """Return by how much curves raise the log-likelihood of held-out participants, (1 + stiffness, p, parts).

    Beyond the best map without them: shift and scale as fitted, with and without scaling of the trend, and
    the pool's curve shifted and scaled with several strengths of shrinkage, lest curves undo shrinkage.
    """
    forms = (shared,) if shared.scales_trend else (shared, replace(shared, scales_trend=True))
    parts = []
    for fold, rows in enumerate(design.folds()):
        train, held = (np.intersect1d(part, sample, assume_unique=True) for part in rows)
        losses = np.concatenate([_losses(z, design, form, fold, train, held) for form in forms])
        parts.append(losses[..., np.unique(design.site[held])])
    losses = np.concatenate(parts, axis=-1)
    without, curved = losses[: -len(STIFFNESS)], losses[-len(STIFFNESS) :]
    least = without[without.sum(axis=2).argmin(axis=0), np.arange(z.shape[1])]
    return np.concatenate([np.zeros((1, *least.shape)), np.nan_to_num(least - curved)])


def _losses(
    z: FloatArray, design: Design, shared: SharedTrend, fold: int, train: IntArray, held: IntArray
) -> FloatArray:
    """Return minus the log-likelihood of held-out rows, (maps, p, sites): without curves, then with them.

    Curves are tried on values whose trend is scaled by the sites, for they act on the measured value.
    """
    rows, fit = np.concatenate([train, held]), shared.without(fold)
    effect, stiffnesses = fit.effect, STIFFNESS if shared.scales_trend else ()
    losses = np.empty((1 + 2 * len(stiffnesses), z.shape[1], design.n_sites))
    values = effect.undo(z[rows], shared.at(rows, design, fit))
    # So many features at a time that the sums of their curves fit into a cache.
    for block in pieces(z.shape[1], design.n_sites * rising.WIDTH**2):
        mean, width = _mean_and_deviation(values[: len(train), block], design.weight[train])
        v = (values[:, block] - mean) / width
        fitted = rising.sums_of(v[: len(train)], design, shared.columns, train)
        judged = rising.sums_of(v[len(train) :], design, shared.columns, held)
        pool, trend = rising.pool_curve(fitted, shared.penalty)
        pooled = curves = np.broadcast_to(pool, (design.n_sites, *pool.shape)), trend
        losses[:, block] = (judged.n[:, None] * np.log(effect.scale[:, block] * width)).T
        losses[0, block] += rising.log_loss(judged, *pooled).T
        for k, stiffness in enumerate(stiffnesses, 1):
            # Rigid, and less shrunk than the curve, for each of its knots counts.
            line = rising.newton(fitted, pool, stiffness / 3, shared.penalty, smooth=TINY**-0.5, start=pooled)
            curves = rising.newton(fitted, pool, stiffness, shared.penalty, start=curves)
            losses[k, block] += rising.log_loss(judged, *line).T
            losses[k + len(stiffnesses), block] += rising.log_loss(judged, *curves).T
    return losses


def _mean_and_deviation(v: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    mean = weight @ v / weight.sum()
    return mean, np.sqrt(np.maximum(weight @ (v - mean) ** 2 / weight.sum(), TINY))
