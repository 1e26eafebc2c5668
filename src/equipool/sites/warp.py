r"""Monotone warps of features: what sites do that is neither a shift nor a scale.

Rising curves are fitted by maximum likelihood, for each site and feature:

.. math:: g_s(v) = m(c) + e, \qquad e \sim N(0, 1), \qquad
          g_s(v) = h_s + \sum_k a_{sk} \int_{t_0}^v \lambda_k, \qquad a_{sk} > 0,

with hat functions :math:`\lambda_k` at knots :math:`t_k`: a curve is its height at the first knot and its
slopes at all, linear between them. The log-likelihood

.. math:: \sum_i w_i \left[\log g_s'(v_i) - \tfrac{1}{2} (g_s(v_i) - m(c_i))^2\right]

is concave in heights, slopes and the trend's coefficients together, and made of sums over participants:
Newton's method finds the one optimum in a few steps, whatever the number of rows.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipool.groups.trend import MIN_DISTINCT
from equipool.sites.design import (
    MAX_ITERATIONS,
    MAX_SLOPE_RATIO,
    MIN_PARTICIPANTS,
    TINY,
    Design,
    pieces,
    site_rows,
)
from equipool.sites.effect import Context, FloatArray, IntArray, SiteEffect, array, choose, exceeds
from equipool.sites.shift_scale import SharedTrend

STIFFNESS = (30.0, 10.0, 3.0, 1.0)  # equivalent participants of the pool's curve, the stiffest first
SMOOTH = 3.0  # how much more slopes at neighbouring knots go together than apart
KNOTS = np.linspace(-2.5, 2.5, 6)  # standard deviations of the feature; few participants are farther out
STEP = float(KNOTS[1] - KNOTS[0])
WIDTH = 1 + len(KNOTS)  # numbers of a curve: its height at the first knot, and its slopes at all
CELLS = 6  # between two knots: logarithms of slopes are summed over cells, not over rows, to 1 %

# The hats mid-cell, beyond both ends, and at each knot, (cells + knots, knots), and products of two of them.
_MIDDLES = KNOTS[0] + (np.arange(CELLS * (len(KNOTS) - 1)) + 0.5) * STEP / CELLS
_PLACES = np.concatenate([KNOTS[:1], _MIDDLES, KNOTS[-1:], KNOTS])
HATS: FloatArray = np.stack([np.interp(_PLACES, KNOTS, row) for row in np.eye(len(KNOTS))], axis=1)
PRODUCTS: FloatArray = np.einsum("ck,cl->ckl", HATS, HATS).reshape(len(HATS), -1)


@dataclass(frozen=True, eq=False)
class Warp(SiteEffect):
    r"""A monotone warp of some of the features; the others stay as they are.

    A scanner that compresses large values, as a gamma does, acts on the measured value, trend included. With
    a rising curve :math:`g_s` of each site and feature and their mean
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
    curves: FloatArray = array("sites", "warped", str(WIDTH))  # g_s
    pool: FloatArray = array("warped", str(WIDTH))  # ḡ
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
        curves = np.empty((design.n_sites, len(columns), WIDTH))
        centre, width = np.empty((2, len(columns)))
        for block in pieces(len(columns), design.n_sites * WIDTH**2):
            some, site = columns[block], design.site[rows]
            v = z[np.ix_(rows, some)] / effect.scale[:, some][site] - effect.shift[:, some][site]
            centre[block], width[block] = _mean_and_deviation(v, design.weight[rows])
            sums = sums_of((v - centre[block]) / width[block], design, shared.columns, rows)
            start = pool_curve(sums, shared.penalty)[0]
            curves[:, block] = newton(sums, start, stiffness[some], shared.penalty)[0]
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
        pooled = inverse_curve(curve_at(v, self.curves[site]), self.pool)
        ratio = curve_slope(v, self.curves[site]) / curve_slope(pooled, self.pool)
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
            height = curve_at(rows[some] * before[0] + before[1], before[2])
            result[some] = (inverse_curve(height, after[2]) - after[1]) / after[0]
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
    for block in pieces(z.shape[1], design.n_sites * WIDTH**2):
        mean, width = _mean_and_deviation(values[: len(train), block], design.weight[train])
        v = (values[:, block] - mean) / width
        fitted = sums_of(v[: len(train)], design, shared.columns, train)
        judged = sums_of(v[len(train) :], design, shared.columns, held)
        pool, trend = pool_curve(fitted, shared.penalty)
        pooled = curves = np.broadcast_to(pool, (design.n_sites, *pool.shape)), trend
        losses[:, block] = (judged.n[:, None] * np.log(effect.scale[:, block] * width)).T
        losses[0, block] += log_loss(judged, *pooled).T
        for k, stiffness in enumerate(stiffnesses, 1):
            # Rigid, and less shrunk than the curve, for each of its knots counts.
            line = newton(fitted, pool, stiffness / 3, shared.penalty, smooth=TINY**-0.5, start=pooled)
            curves = newton(fitted, pool, stiffness, shared.penalty, start=curves)
            losses[k, block] += log_loss(judged, *line).T
            losses[k + len(stiffnesses), block] += log_loss(judged, *curves).T
    return losses


def _mean_and_deviation(v: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    mean = weight @ v / weight.sum()
    return mean, np.sqrt(np.maximum(weight @ (v - mean) ** 2 / weight.sum(), TINY))


@dataclass(frozen=True, eq=False)
class Sums:
    """What the likelihood needs of each site's participants.

    With J the integrals of the hats beside a 1, so that curves are J @ (height, slopes), and B the basis of
    the trend.
    """

    jj: FloatArray  # (sites, p, m, m), Σ w J Jᵀ
    jb: FloatArray  # (sites, p, m, q), Σ w J Bᵀ
    bb: FloatArray  # (sites, q, q), Σ w B Bᵀ
    cells: FloatArray  # (sites, p, cells + knots), how many participants lie in each
    n: FloatArray  # (sites,), participants


def sums_of(v: FloatArray, design: Design, basis: FloatArray, rows: IntArray) -> Sums:
    """Return the sums of each site; v is of these rows."""
    n_sites, p, q, m, places = design.n_sites, v.shape[1], basis.shape[1], WIDTH, len(HATS)
    jj, jb = np.zeros((n_sites, p, m, m)), np.zeros((n_sites, p, m, q))
    bb, cells = np.zeros((n_sites, q, q)), np.zeros((n_sites, p, places))
    for s, of_site in enumerate(site_rows(design.site[rows], n_sites)):
        for some in (of_site[piece] for piece in pieces(len(of_site), p * m)):
            w, b = design.weight[rows[some]], basis[rows[some]]
            j = _integrals(v[some])
            weighted = j * w
            jj[s] += weighted @ j.transpose(0, 2, 1)
            jb[s] += weighted @ b
            bb[s] += (b * w[:, None]).T @ b
            flat = (_cell(v[some]) + np.arange(p) * places).ravel()  # none at the knots
            cells[s] += np.bincount(flat, np.repeat(w, p), p * places).reshape(p, -1)
    return Sums(jj, jb, bb, cells, design.only(rows).n_participants)


def _cell(v: FloatArray) -> IntArray:
    """Return the cell in which each value lies."""
    place = np.floor((v - KNOTS[0]) * (CELLS / STEP))
    return np.asarray(np.clip(place, -1, CELLS * (len(KNOTS) - 1)) + 1, dtype=np.intp)


def _integrals(v: FloatArray) -> FloatArray:
    """Return a 1 and the integrals of the hats from the first knot to v, (p, 1 + knots, rows)."""
    result = np.ones((v.shape[1], WIDTH, len(v)))
    ends = (KNOTS[[0, -1]] - KNOTS[:, None]) / STEP  # the outer hats have one side
    near = np.clip((v.T[:, None] - KNOTS[:, None]) / STEP, *np.clip(ends, -1, 1).T[..., None])
    result[:, 1:] = STEP * (near - near * np.abs(near) / 2)
    result[:, 2:] += STEP / 2
    result[:, 1] += np.minimum(v.T - KNOTS[0], 0.0)
    result[:, -1] += np.maximum(v.T - KNOTS[-1], 0.0)
    return result


def log_loss(sums: Sums, curves: FloatArray, trend: FloatArray) -> FloatArray:
    """Return minus the log-likelihood up to a constant, (sites, p); the trend is (p, q)."""
    predicted = sums.jb @ trend[None, :, :, None]
    quadratic = (curves[..., None, :] @ (sums.jj @ curves[..., None] - 2 * predicted))[..., 0, 0]
    quadratic += np.einsum("pq,sqr,pr->sp", trend, sums.bb, trend)
    rising: FloatArray = (sums.cells * np.log(curves[..., 1:] @ HATS.T)).sum(axis=-1)
    return 0.5 * quadratic - rising


def pool_curve(sums: Sums, penalty: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the one curve of each feature that suits all sites, (p, m), and the trend, (p, q)."""
    line = np.tile(np.append(KNOTS[0], np.ones(len(KNOTS))), (sums.jj.shape[1], 1))
    whole = Sums(*(part.sum(axis=0, keepdims=True) for part in vars(sums).values()))
    curves, trend = newton(whole, line, 1.0, penalty)
    return curves[0], trend


def newton(
    sums: Sums,
    prior: FloatArray,
    stiffness: float | FloatArray,
    penalty: FloatArray,
    *,
    smooth: float = SMOOTH,
    start: tuple[FloatArray, FloatArray] | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return the curves (sites, p, m) and trend (p, q) of the largest penalised likelihood.

    Slopes are drawn to those of the prior, (p, m), in proportion, and heights to its height, by so many
    equivalent participants (stiffness, one or one for each feature). ``penalty`` is that on the trend's
    coefficients, for each participant.
    """
    n_sites, p, m, q = sums.jb.shape
    total, k, steps = sums.n.sum(), len(KNOTS), np.diff(np.eye(m)[1:], axis=0)
    scale = np.concatenate([np.ones((p, 1)), 1 / prior[:, 1:]], axis=1)
    precision = (np.eye(m) + smooth * steps.T @ steps) * scale[:, :, None] * scale[:, None, :]
    pull = np.reshape(stiffness, (-1, 1, 1)) * precision
    inner = sums.bb.sum(axis=0) + np.diag(penalty * total)
    # Half a participant is spread over the knots, so that slopes stay above 0.
    counts = sums.cells + 0.5 / k * (np.arange(len(HATS)) >= len(HATS) - k)
    curves, trend = (np.broadcast_to(prior, (n_sites, p, m)), np.zeros((p, q))) if start is None else start
    for _ in range(MAX_ITERATIONS):
        slopes = curves[..., 1:] @ HATS.T
        share = counts / slopes
        gradient = (sums.jj @ curves[..., None] - sums.jb @ trend[None, :, :, None])[..., 0]
        gradient += np.einsum("pmn,spn->spm", pull, curves - prior)
        gradient[..., 1:] -= share @ HATS
        hessian = sums.jj + pull
        hessian[..., 1:, 1:] += ((share / slopes) @ PRODUCTS).reshape(n_sites, p, k, k)
        downhill = trend @ inner - np.einsum("spmq,spm->pq", sums.jb, curves)
        # Sites meet in the trend alone, so they are eliminated one by one.
        solved = np.linalg.solve(hessian, np.concatenate([sums.jb, gradient[..., None]], axis=3))
        across = np.einsum("spmq,spmr->pqr", sums.jb, solved)
        turn = np.linalg.solve(inner - across[..., :q], -(downhill + across[..., q])[..., None])[..., 0]
        step = (solved[..., :q] @ turn[None, :, :, None])[..., 0] - solved[..., q]
        # By how much each feature's objective would fall, (p,).
        decrement = -(gradient * step).sum(axis=(0, 2)) - (downhill * turn).sum(axis=1)
        moving = decrement > TINY**0.5 * total
        if not moving.any():
            break
        # Slopes stay above 0, features are apart from one another: each goes as far as it can.
        shrinks = np.where(step[..., 1:] < 0, -step[..., 1:] / curves[..., 1:], 0.0).max(axis=(0, 2))
        length = np.where(moving, np.minimum(1.0, 0.9 / np.maximum(shrinks, TINY)), 0.0)
        curves, trend = curves + length[:, None] * step, trend + length[:, None] * turn
    return curves, trend


def curve_at(v: FloatArray, curve: FloatArray) -> FloatArray:
    """Return the heights at v (rows, p) of curves (p, m)."""
    return (curve[:, None] @ _integrals(v))[:, 0].T


def curve_slope(v: FloatArray, curve: FloatArray) -> FloatArray:
    """Return the curves' slopes at v (rows, p)."""
    slopes = [np.interp(x, KNOTS, one[1:]) for x, one in zip(v.T, curve, strict=True)]
    return np.reshape(slopes, v.shape[::-1]).T


def inverse_curve(y: FloatArray, curve: FloatArray) -> FloatArray:
    """Return where the curves have the heights y (rows, p)."""
    each, knots = np.arange(len(curve)), KNOTS
    heights = curve_at(np.tile(knots[:, None], len(curve)), curve)
    k = sum((y >= height).astype(np.intp) for height in heights[1:-1])
    low, high = curve[each, 1 + k], curve[each, 2 + k]
    within = np.clip(y, heights[0], heights[-1])
    up = within - heights[k, each]
    # The root of low · d + (high − low) d² / 2 step = up that stays finite where both slopes are equal.
    root = np.sqrt(np.maximum(low**2 + 2 * (high - low) * up / STEP, 0.0))
    d = 2 * up / (low + root)
    return knots[k] + d + np.minimum(y - within, 0.0) / low + np.maximum(y - within, 0.0) / high
