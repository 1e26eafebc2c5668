r"""Rising curves by maximum likelihood, for each site and feature.

.. math:: g_s(v) = m(c) + e, \qquad e \sim N(0, 1),

where :math:`g_s` is given by its height at the first knot and its slopes at all, linear between them. The
likelihood is concave in heights, slopes and the trend's coefficients together, and made of sums over
participants: Newton's method finds the one optimum in a few steps, whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from equipool.sites.design import MAX_ITERATIONS, Design
from equipool.sites.passes import pieces, site_rows

__all__ = [
    "CURVE",
    "KNOTS",
    "Sums",
    "curve_at",
    "curve_slope",
    "inverse_curve",
    "log_loss",
    "newton",
    "pool_curve",
    "sums_of",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

KNOTS = np.linspace(-2.5, 2.5, 6)  # in standard deviations of the feature
STEP = float(KNOTS[1] - KNOTS[0])
CURVE = 1 + len(KNOTS)  # numbers of a curve
SMOOTH = 3.0  # how much more slopes at neighbouring knots go together than apart
CELLS = 6  # between two knots: logarithms of slopes are summed over cells, not over rows


# -- sums over participants --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sums:
    """What the likelihood needs of each site's participants.

    With J the integrals of the hats at the knots beside a 1, so that a curve is J @ (height, slopes), and B
    the trend's basis: ``jj`` (sites, p, m, m), ``jb`` (sites, p, m, q), ``bb`` (sites, q, q), ``cells``
    (sites, p, cells), how many participants lie in each, and ``n`` (sites,).
    """

    jj: FloatArray
    jb: FloatArray
    bb: FloatArray
    cells: FloatArray
    n: FloatArray

    def with_prior_counts(self) -> Sums:
        """Return the same with half a participant spread over the knots, so that slopes stay above 0."""
        cells = self.cells.copy()
        cells[..., -len(KNOTS) :] += 0.5 / len(KNOTS)
        return replace(self, cells=cells)

    def sum_of_sites(self) -> Sums:
        """Return the same with one site, the pool."""
        return Sums(*(part.sum(axis=0, keepdims=True) for part in vars(self).values()))


def sums_of(v: FloatArray, design: Design, basis: FloatArray, rows: IntArray) -> Sums:
    """Return the sums of each site; v is of these rows."""
    n_sites, p, q, m = design.n_sites, v.shape[1], basis.shape[1], CURVE
    jj, jb = np.zeros((n_sites, p, m, m)), np.zeros((n_sites, p, m, q))
    bb, cells = np.zeros((n_sites, q, q)), np.zeros((n_sites, p, len(HATS)))
    for s, of_site in enumerate(site_rows(design.site[rows], n_sites)):
        for some in (of_site[piece] for piece in pieces(len(of_site), p * m)):
            w, b = design.weight[rows[some]], basis[rows[some]]
            j = _integrals(v[some])  # (p, m, rows)
            weighted = j * w
            jj[s] += weighted @ j.transpose(0, 2, 1)
            jb[s] += weighted @ b
            bb[s] += (b * w[:, None]).T @ b
            cells[s] += _counts(v[some], w)
    return Sums(jj, jb, bb, cells, design.only(rows).n_participants)


def _integrals(v: FloatArray) -> FloatArray:
    """Return a 1 and the integrals of the hats from the first knot to v, (p, 1 + knots, rows)."""
    v = v.T
    result = np.zeros((len(v), CURVE, v.shape[1]))
    result[:, 0] = 1.0
    result[:, 1] = np.minimum(v - KNOTS[0], 0.0)
    result[:, -1] = np.maximum(v - KNOTS[-1], 0.0)
    for k, knot in enumerate(KNOTS[:-1]):
        d = np.clip(v - knot, 0.0, STEP)
        late = d * d / (2 * STEP)
        result[:, 1 + k] += d - late
        result[:, 2 + k] += late
    return result


def _hats() -> FloatArray:
    """Return the hats mid-cell, beyond both ends and at each knot, (cells + knots, knots)."""
    middles = KNOTS[0] + (np.arange(CELLS * (len(KNOTS) - 1)) + 0.5) * STEP / CELLS
    places = np.concatenate([KNOTS[:1], middles, KNOTS[-1:], KNOTS])
    return np.stack([np.interp(places, KNOTS, row) for row in np.eye(len(KNOTS))], axis=1)


HATS = _hats()
PAIRS = np.einsum("ck,cl->ckl", HATS, HATS).reshape(len(HATS), -1)


def _counts(v: FloatArray, weight: FloatArray) -> FloatArray:
    """Return how many participants lie in each cell, (p, cells)."""
    p = v.shape[1]
    last = CELLS * (len(KNOTS) - 1)
    cell = np.clip(np.floor((v - KNOTS[0]) * (CELLS / STEP)), -1, last).astype(np.intp) + 1
    flat = (cell + np.arange(p) * len(HATS)).ravel()
    return np.bincount(flat, np.repeat(weight, p), p * len(HATS)).reshape(p, len(HATS)).astype(np.float64)


# -- the likelihood and its optimum ------------------------------------------------------------------------


def log_loss(sums: Sums, curves: FloatArray, trend: FloatArray) -> FloatArray:
    """Return minus the log-likelihood up to a constant, (sites, p); the trend is (p, q)."""
    predicted = sums.jb @ trend[None, :, :, None]
    quadratic = (curves[..., None, :] @ (sums.jj @ curves[..., None] - 2 * predicted))[..., 0, 0]
    quadratic += np.einsum("pq,sqr,pr->sp", trend, sums.bb, trend)
    rising: FloatArray = (sums.cells * np.log(curves[..., 1:] @ HATS.T)).sum(axis=-1)
    return 0.5 * quadratic - rising


def pool_curve(sums: Sums, penalty: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the one curve of each feature that suits all sites, (p, m), and the trend, (p, q)."""
    all_sites = sums.sum_of_sites()
    line = np.ones((all_sites.jj.shape[1], CURVE))
    line[:, 0] = KNOTS[0]
    curves, trend = newton(all_sites, line, 1.0, penalty)
    return curves[0], trend


def _pull(prior: FloatArray, smooth: float) -> FloatArray:
    """Return the precision of curves around the prior, (p, m, m): apart in proportion, and smoothly so."""
    m = prior.shape[1]
    steps = np.diff(np.eye(m)[1:], axis=0)
    precision = np.eye(m) + smooth * steps.T @ steps
    slopes = np.maximum(prior[:, 1:], 0.05 * prior[:, 1:].mean(axis=1, keepdims=True))
    scale = np.concatenate([np.ones((len(prior), 1)), 1 / slopes], axis=1)
    result: FloatArray = precision * scale[:, :, None] * scale[:, None, :]
    return result


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
    pull = np.reshape(stiffness, (-1, 1, 1)) * _pull(prior, smooth)
    problem = _Problem(sums.with_prior_counts(), prior, pull, penalty * sums.n.sum())
    n_sites, p, m, q = sums.jb.shape
    curves, trend = (np.broadcast_to(prior, (n_sites, p, m)), np.zeros((p, q))) if start is None else start
    value = problem.objective(curves, trend)
    for _ in range(MAX_ITERATIONS):
        step, turn, decrement = problem.newton_step(curves, trend)
        moving = decrement > 1e-6 * sums.n.sum()
        if not moving.any():
            break
        # Slopes stay above 0, features are apart from one another: each goes as far as it can.
        shrinks = np.where(step[..., 1:] < 0, -step[..., 1:] / curves[..., 1:], 0.0).max(axis=(0, 2))
        length = np.where(moving, np.minimum(1.0, 0.9 / np.maximum(shrinks, 1e-12)), 0.0)
        for _ in range(8):
            tried = curves + length[:, None] * step, trend + length[:, None] * turn
            new = problem.objective(*tried)
            worse = new > value + 1e-9 * np.abs(value)
            if not worse.any():
                break
            length = np.where(worse, length / 2, length)
        curves = np.where(worse[:, None], curves, tried[0])
        trend, value = np.where(worse[:, None], trend, tried[1]), np.where(worse, value, new)
    return curves, trend


@dataclass(frozen=True, eq=False)
class _Problem:
    """The penalised likelihood."""

    sums: Sums
    prior: FloatArray  # (p, m)
    pull: FloatArray  # (p, m, m), precision of curves around the prior
    penalty: FloatArray  # (q,), on the trend

    @cached_property
    def inner(self) -> FloatArray:
        """The trend's part of the Hessian, (q, q)."""
        return self.sums.bb.sum(axis=0) + np.diag(self.penalty)

    def objective(self, curves: FloatArray, trend: FloatArray) -> FloatArray:
        """Return what is minimised, (p,)."""
        apart = curves - self.prior
        drawn = np.einsum("spm,pmn,spn->p", apart, self.pull, apart) + trend**2 @ self.penalty
        result: FloatArray = log_loss(self.sums, curves, trend).sum(axis=0) + 0.5 * drawn
        return result

    def newton_step(self, curves: FloatArray, trend: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the steps of curves and trend, and by how much each feature's objective would fall, (p,).

        Sites meet in the trend alone, so they are eliminated one by one.
        """
        sums, (q, k) = self.sums, (len(self.penalty), len(KNOTS))
        slopes = curves[..., 1:] @ HATS.T
        share = sums.cells / slopes
        gradient = (sums.jj @ curves[..., None] - sums.jb @ trend[None, :, :, None])[..., 0]
        gradient += np.einsum("pmn,spn->spm", self.pull, curves - self.prior)
        gradient[..., 1:] -= share @ HATS
        hessian = sums.jj + self.pull
        hessian[..., 1:, 1:] += ((share / slopes) @ PAIRS).reshape(*share.shape[:2], k, k)
        downhill = trend @ self.inner - np.einsum("spmq,spm->pq", sums.jb, curves)
        solved = np.linalg.solve(hessian, np.concatenate([sums.jb, gradient[..., None]], axis=3))
        across = np.einsum("spmq,spmr->pqr", sums.jb, solved)
        turn = np.linalg.solve(self.inner - across[..., :q], -(downhill + across[..., q])[..., None])[..., 0]
        step = (solved[..., :q] @ turn[None, :, :, None])[..., 0] - solved[..., q]
        return step, turn, -(gradient * step).sum(axis=(0, 2)) - (downhill * turn).sum(axis=1)


# -- curves ------------------------------------------------------------------------------------------------


def curve_at(v: FloatArray, curve: FloatArray) -> FloatArray:
    """Return the curves' heights at v (rows, p)."""
    k = _interval(v)
    low, high = _ends(k, curve)
    d = np.clip(v - KNOTS[k], 0.0, STEP)
    inside = _heights(curve)[np.arange(v.shape[1]), k] + d * (low + (high - low) * d / (2 * STEP))
    return inside + np.minimum(v - KNOTS[0], 0.0) * low + np.maximum(v - KNOTS[-1], 0.0) * high


def curve_slope(v: FloatArray, curve: FloatArray) -> FloatArray:
    """Return the curves' slopes at v (rows, p)."""
    k = _interval(v)
    low, high = _ends(k, curve)
    result: FloatArray = low + (high - low) * np.clip(v - KNOTS[k], 0.0, STEP) / STEP
    return result


def inverse_curve(y: FloatArray, curve: FloatArray) -> FloatArray:
    """Return where the curves have the heights y (rows, p)."""
    heights = _heights(curve)
    k = sum((y >= height).astype(np.intp) for height in heights.T[1:-1])
    low, high = _ends(k, curve)
    within = np.clip(y, heights[:, 0], heights[:, -1])
    up = within - heights[np.arange(y.shape[1]), k]
    # The root of low · d + (high − low) d² / 2 step = up that stays finite where both slopes are equal.
    root = np.sqrt(np.maximum(low**2 + 2 * (high - low) * up / STEP, 0.0))
    d = 2 * up / np.maximum(low + root, 1e-300)
    return KNOTS[k] + d + np.minimum(y - within, 0.0) / low + np.maximum(y - within, 0.0) / high


def _heights(curve: FloatArray) -> FloatArray:
    """Return the curves' heights at the knots, (p, knots)."""
    between = np.cumsum((curve[:, 1:-1] + curve[:, 2:]) * (STEP / 2), axis=1)
    return curve[:, :1] + np.concatenate([np.zeros((len(curve), 1)), between], axis=1)


def _interval(v: FloatArray) -> IntArray:
    """Return between which knots v lies, the outer intervals for what is beyond."""
    return np.clip(np.floor((v - KNOTS[0]) / STEP), 0, len(KNOTS) - 2).astype(np.intp)


def _ends(k: IntArray, curve: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the slopes at both ends of intervals k (rows, p)."""
    each = np.arange(k.shape[1])
    return curve[each, 1 + k], curve[each, 2 + k]
