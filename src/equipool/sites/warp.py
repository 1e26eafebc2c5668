r"""Monotone warps of features: what sites do that is neither a shift nor a scale.

A scanner that compresses large values, as a gamma does, acts on the measured value, trend included. For feature
values v in the pool's units by :mod:`~equipool.sites.shift_scale`,

.. math:: g_s(v) = m(c) + e, \qquad e \sim N(0, 1), \qquad T_s(v) = g_s^{-1}(\bar g(v)),

with a rising curve :math:`g_s` for each site and feature (:mod:`~equipool.sites.rising_curves`) and their mean
:math:`\bar g`: what all sites share stays. Curves are mixed with the pool's, and enter where they make held-out
participants more likely than any shift and scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipool.checks.overlap import NINE_TENTHS, nine_tenths
from equipool.sites.design import Design
from equipool.sites.effect import Context, SiteEffect, array, choose, exceeds
from equipool.sites.rising_curves import (
    CURVE,
    curve_at,
    curve_slope,
    inverse_curve,
    log_loss,
    newton,
    pool_curve,
    sums_of,
)
from equipool.sites.shift_scale import Regression, SharedTrend

__all__ = ["Warp"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

STIFFNESS = (30.0, 10.0, 3.0, 1.0)  # equivalent participants of the pool's curve, the stiffest first
RIGID = 1e4  # smoothness of curves that can only shift and scale
RIGID_STIFFNESS = (30.0, 3.0, 0.3)
MAX_SLOPE_RATIO = 5.0  # of a site's slope and the pool's
MIN_PARTICIPANTS = 25  # of a site, for a curve of its own
MIN_DISTINCT = 20  # values of a feature; fewer are counts or grades, with nothing between their steps
MAX_ROWS = 20_000  # to choose by
BLOCK = 2**20  # numbers of the sums of a block of features


@dataclass(frozen=True, eq=False)
class Warp(SiteEffect):
    """The map above for some of the features; the others stay as they are.

    Attributes
    ----------
    columns
        (b,): which features.
    scale, offset
        (sites, b): v = z · scale + offset, the values that curves are put on.
    curves, pool
        (sites, b, m) and (b, m): a curve's height at the first knot, and its slopes at all knots.
    centre, width
        (b,): the pool's value is centre + width · v.
    """

    name: ClassVar[str] = "warp"

    columns: IntArray = array("warped", integer=True)
    scale: FloatArray = array("sites", "warped", positive=True)
    offset: FloatArray = array("sites", "warped")
    curves: FloatArray = array("sites", "warped", "curve")
    pool: FloatArray = array("warped", "curve")
    centre: FloatArray = array("warped")
    width: FloatArray = array("warped", positive=True)

    @classmethod
    def identity(cls, n_sites: int, n_features: int) -> Self:
        """Return sites that warp nothing."""
        none, curves = np.empty((n_sites, 0)), np.empty((n_sites, 0, CURVE))
        return cls(np.empty(0, dtype=np.intp), none, none, curves, np.empty((0, CURVE)), none[0], none[0])

    @property
    def is_identity(self) -> bool:
        """Whether no feature is warped."""
        return not len(self.columns)

    @classmethod
    def fit(cls, z: FloatArray, design: Design, shared: SharedTrend, *, wanted: bool | None = None) -> Self:
        """Fit the curves; ``wanted=None``: of features where they make held-out participants more likely."""
        identity = cls.identity(design.n_sites, z.shape[1])
        large = design.n_participants >= MIN_PARTICIPANTS
        graded = _is_graded(z)
        if wanted is False or large.sum() < 2 or not shared.folds or graded.all():
            return identity
        # A compression acts on the trend too: curves are put on a scale that does so.
        scaled = shared.refitted(scales_trend=True)
        stiffness = np.where(graded, np.nan, _choose(z, design, shared, scaled, large, graded, wanted))
        columns = np.flatnonzero(np.isfinite(stiffness))
        if not len(columns):
            return identity
        effect, rows = scaled.whole.effect(), np.flatnonzero(large[design.site])
        curves = np.empty((design.n_sites, len(columns), CURVE))
        centre, width = np.empty(len(columns)), np.empty(len(columns))
        for block in _blocks(design, scaled, len(rows), len(columns)):
            some = columns[block]
            v = z[np.ix_(rows, some)] / effect.scale[:, some][design.site[rows]]
            v -= effect.shift[:, some][design.site[rows]]
            v, centre[block], width[block] = _standardised(v, design.weight[rows])
            sums = sums_of(v, design, scaled.columns, rows)
            start = pool_curve(sums, scaled.penalty)[0]
            curves[:, block] = newton(sums, start, stiffness[some], scaled.penalty)[0]
        n = np.where(large, design.n_participants, 0.0)
        pool = np.tensordot(n / n.sum(), curves, axes=1)
        curves[~large] = pool
        bounds = pool[:, 1:] / MAX_SLOPE_RATIO, pool[:, 1:] * MAX_SLOPE_RATIO
        curves[..., 1:] = np.clip(curves[..., 1:], *bounds)
        scale = 1 / (effect.scale[:, columns] * width)
        offset = -(effect.shift[:, columns] + centre) / width
        return cls(columns, scale, offset, curves, pool, centre, width)

    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values as the pool would show them."""
        return self._mapped(rows, at, self._undone)

    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values as the site shows them."""
        return self._mapped(rows, at, self._redone)

    def log_det(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the log of the slopes, summed over features."""
        total = np.zeros(len(rows))
        for s in np.unique(at.site) if not self.is_identity else ():
            some = at.site == s
            total[some] = np.log(self.slope(rows[some], int(s))).sum(axis=1)
        return total

    def slope(self, rows: FloatArray, site: int) -> FloatArray:
        """Return the derivative of :meth:`undo` for rows of one site, (rows, features)."""
        result = np.ones_like(rows)
        if not self.is_identity:
            v = rows[:, self.columns] * self.scale[site] + self.offset[site]
            pooled = inverse_curve(curve_at(v, self.curves[site]), self.pool)
            ratio = curve_slope(v, self.curves[site]) / curve_slope(pooled, self.pool)
            result[:, self.columns] = self.scale[site] * ratio * self.width
        return result

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Return the warp with one more site, which warps nothing."""
        return replace(
            self,
            scale=np.vstack([self.scale, 1 / self.width]),
            offset=np.vstack([self.offset, -self.centre / self.width]),
            curves=np.concatenate([self.curves, self.pool[None]]),
        )

    def _undone(self, values: FloatArray, site: int) -> FloatArray:
        height = curve_at(values * self.scale[site] + self.offset[site], self.curves[site])
        return self.centre + self.width * inverse_curve(height, self.pool)

    def _redone(self, values: FloatArray, site: int) -> FloatArray:
        height = curve_at((values - self.centre) / self.width, self.pool)
        return (inverse_curve(height, self.curves[site]) - self.offset[site]) / self.scale[site]

    def _mapped(self, rows: FloatArray, at: Context, function: object) -> FloatArray:
        if self.is_identity:
            return rows
        result = rows.copy()
        for s in np.unique(at.site):
            some = np.ix_(at.site == s, self.columns)
            result[some] = function(rows[some], int(s))  # type: ignore[operator]
        return result


def _is_graded(z: FloatArray) -> NDArray[np.bool_]:
    """Say which features have few values."""
    some = np.sort(z[:: max(len(z) // 2000, 1)], axis=0)
    graded: NDArray[np.bool_] = 1 + (np.diff(some, axis=0) != 0).sum(axis=0) <= MIN_DISTINCT
    return graded


def _choose(
    z: FloatArray,
    design: Design,
    shared: SharedTrend,
    scaled: SharedTrend,
    large: NDArray[np.bool_],
    graded: NDArray[np.bool_],
    wanted: bool | None,
) -> FloatArray:
    """Return the stiffness of each feature's curves, (p,), NaN for features that stay as they are.

    Where all features together show warps, every feature gets them that does not lose by it; where they do not,
    single features can show them, by a threshold for so many tests.
    """
    gains = _held_out_gains(z, design, shared, scaled, large)  # (1 + stiffness, p, parts), the first 0
    gains[:, graded] = 0.0
    p = gains.shape[1]
    together = gains.sum(axis=1)
    if wanted:
        return np.full(p, STIFFNESS[int(together[1:].sum(axis=1).argmax())])
    stiffness = np.array([np.nan, *STIFFNESS])
    chosen = choose(together)
    if chosen:
        return np.where(exceeds(-gains[chosen]), np.nan, stiffness[chosen])
    best = gains.sum(axis=2).argmax(axis=0)
    alone = exceeds(gains[best, np.arange(p)], tests=p)
    return np.where(alone, stiffness[best], np.nan)


def _held_out_gains(
    z: FloatArray, design: Design, shared: SharedTrend, scaled: SharedTrend, large: NDArray[np.bool_]
) -> FloatArray:
    """Return how much more likely curves make held-out participants, (1 + stiffness, p, parts).

    More likely than any map without them: shift and scale as fitted, with and without scaling of the trend, and
    the pool's curve shifted and scaled with several strengths of shrinkage, lest curves undo shrinkage.
    """
    rng, share = np.random.default_rng(0), min(MAX_ROWS / len(z), 1.0)
    plain, curved = [], []
    for fold, rows in enumerate(design.folds()):
        train, held = (np.sort(rng.permutation(part)[: int(np.ceil(share * len(part)))]) for part in rows)
        train, held = train[large[design.site[train]]], held[large[design.site[held]]]
        judged = np.unique(design.site[held])
        rigid, warped = _losses(z, design, scaled, scaled.folds[fold], train, held, curves=True)
        rivals = [rigid]
        if not shared.whole.scales_trend:
            rivals.append(_losses(z, design, shared, shared.folds[fold], train, held, curves=False)[0])
        plain.append(np.concatenate(rivals)[..., judged])
        curved.append(warped[..., judged])
    losses = np.concatenate(plain, axis=-1)
    best = losses.sum(axis=2).argmin(axis=0)
    least = losses[best, np.arange(z.shape[1])]
    gains = np.nan_to_num(least - np.concatenate(curved, axis=-1))
    return np.concatenate([np.zeros((1, *least.shape)), gains])


def _losses(
    z: FloatArray,
    design: Design,
    shared: SharedTrend,
    fit: Regression,
    train: IntArray,
    held: IntArray,
    *,
    curves: bool,
) -> tuple[FloatArray, FloatArray]:
    """Return minus the log-likelihood of held-out rows, (maps, p, sites): without curves, and by stiffness."""
    p, rows, effect = z.shape[1], np.concatenate([train, held]), fit.effect()
    rigid = np.zeros((1 + len(RIGID_STIFFNESS) * curves, p, design.n_sites))
    warped = np.zeros((len(STIFFNESS) * curves, p, design.n_sites))
    values = effect.undo(z[rows], shared.at(rows, design, fit))
    for block in _blocks(design, shared, len(rows), p):
        v, _, width = _standardised(values[:, block], design.weight[train], len(train))
        fitted = sums_of(v[: len(train)], design, shared.columns, train)
        judged = sums_of(v[len(train) :], design, shared.columns, held)
        log_scale = (judged.n[:, None] * np.log(effect.scale[:, block] * width)).T
        pool, trend = pool_curve(fitted, shared.penalty)
        everywhere = np.broadcast_to(pool, (design.n_sites, *pool.shape))
        rigid[0, block] = log_loss(judged, everywhere, trend).T + log_scale
        if not curves:
            continue
        for k, stiffness in enumerate(RIGID_STIFFNESS):
            found = newton(fitted, pool, stiffness, shared.penalty, smooth=RIGID, trend=trend)
            rigid[1 + k, block] = log_loss(judged, *found).T + log_scale
        found = (everywhere.copy(), trend)
        for k, stiffness in enumerate(STIFFNESS):
            found = newton(fitted, pool, stiffness, shared.penalty, start=found[0], trend=found[1])
            warped[k, block] = log_loss(judged, *found).T + log_scale
    return rigid, warped


def _blocks(design: Design, shared: SharedTrend, rows: int, p: int) -> Iterator[slice]:
    """Yield so many features at a time that their sums fit into memory."""
    numbers = 2 * design.n_sites * CURVE * (CURVE + shared.columns.shape[1] + 6) + rows
    step = max(BLOCK // numbers, 1)
    return (slice(start, min(start + step, p)) for start in range(0, p, step))


def _standardised(
    v: FloatArray, weight: FloatArray, n: int | None = None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (v − centre) / width, centre and width; these by the first n rows.

    They are the median and the deviation of the middle nine tenths, so that outliers do not push all others
    between two knots.
    """
    mean = weight @ v[:n] / weight.sum()
    deviation = np.sqrt(weight @ (v[:n] - mean) ** 2 / weight.sum())
    low, middle, high = nine_tenths(v[:n])
    robust = (high - low) / NINE_TENTHS
    shared = robust < 0.1 * deviation  # most rows have one value
    width = np.maximum(np.where(shared, deviation, np.minimum(robust, deviation)), 1e-150)
    centre = np.where(shared, mean, middle)
    return (v - centre) / width, centre, width
