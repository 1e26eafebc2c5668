r"""Rising curves by maximum likelihood, for each site and feature.

.. math:: g_s(v) = m(c) + e, \qquad e \sim N(0, 1), \qquad
          g_s(v) = h_s + \sum_k a_{sk} \int_{t_0}^v \lambda_k, \qquad a_{sk} > 0,

with hat functions :math:`\lambda_k` at knots :math:`t_k`: a curve is its height at the first knot and its
slopes at all, linear between them. The log-likelihood

.. math:: \sum_i w_i \left[\log g_s'(v_i) - \tfrac{1}{2} (g_s(v_i) - m(c_i))^2\right]

is concave in heights, slopes and the trend's coefficients together, and made of sums over participants:
Newton's method finds the one optimum in a few steps, whatever the number of rows.
"""

from dataclasses import dataclass

import numpy as np

from equipool.sites.design import MAX_ITERATIONS, TINY, Design, pieces, site_rows
from equipool.sites.effect import FloatArray, IntArray

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
