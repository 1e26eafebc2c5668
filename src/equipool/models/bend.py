"""What sites bend: each site's features brought to the pool's shape by rising curves that likelihood chooses.

A scanner that compresses large values, as a gamma does, acts on the value, trend included. So the model is
g_s(v) = trend(covariates) + what is the person's own, a standard Gaussian: g_s is a rising curve for each
site and feature, straight beyond its outer knots, and v is the feature after a shift and a gain. A person of
site s is moved to ḡ⁻¹(g_s(v)), ḡ the mean curve of all sites, so that what all sites share stays as it is.

The likelihood is concave in the slopes at the knots and in the trend's coefficients together, and is made of
sums over people: Newton's method finds the one optimum in a few steps, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipool.models.design import Design
from equipool.models.pieces import pieces, site_rows

__all__ = ["CURVE", "Affine", "Bend", "fit_bend", "no_bend"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

KNOTS = np.linspace(-2.5, 2.5, 6)  # in deviations of the feature over people
STEP = float(KNOTS[1] - KNOTS[0])
CURVE = 1 + len(KNOTS)  # numbers of a curve: its height at the first knot and its slopes
STIFFNESS = (
    100.0,
    30.0,
    10.0,
    3.0,
    1.0,
)  # in people: how much of the pool's curve a site's own is mixed with
SURE = 2.0  # standard errors by which held-out people must show that sites bend
SMOOTH = 3.0  # how much more slopes at neighbouring knots go together than apart
CELLS = 6  # between two knots: logarithms of slopes are summed over cells, not over people
AT_ONCE = 2**20  # numbers of a block of features
ROUNDS = 30
ENOUGH = 20_000  # people by whom to choose


@dataclass(frozen=True, eq=False)
class Affine:
    """An account of sites without bending: features in the pool's units are z / spread − shift, (sites, p).

    With ``slopes`` (q, p) and ``centre`` (p,) of the trend, spreads are of what is left beside it.
    """

    spread: FloatArray
    shift: FloatArray
    slopes: FloatArray | None = None
    centre: FloatArray | None = None

    def pooled(
        self, z: FloatArray, design: Design, basis: FloatArray, rows: IntArray, block: slice
    ) -> FloatArray:
        """Return some features of some rows in the pool's units."""
        site = design.site[rows]
        seen, spread, shift = z[rows, block], self.spread[site, block], self.shift[site, block]
        if self.slopes is None or self.centre is None:
            return seen / spread - shift
        told = basis[rows] @ self.slopes[:, block] + self.centre[block]
        return told + (seen - told - shift) / spread


@dataclass(frozen=True, eq=False)
class Bend:
    """The curves of sites and features.

    Attributes
    ----------
    scale, offset
        (sites, p): v = z · scale + offset.
    curves, pool
        (sites, p, 1 + knots) and (p, 1 + knots): a curve's height at the first knot, and its slopes at all;
        nothing in the last dimension where sites do not bend.
    centre, width
        (p,): the pool's z = centre + width · v.
    """

    scale: FloatArray
    offset: FloatArray
    curves: FloatArray
    pool: FloatArray
    centre: FloatArray
    width: FloatArray

    @property
    def active(self) -> bool:
        """Whether any site bends anything."""
        return self.curves.shape[2] > 0

    def straighten(self, z: FloatArray, site: int) -> FloatArray:
        """Return features of one site as the pool would show them."""
        if not self.active:
            return z
        v = z * self.scale[site] + self.offset[site]
        return self.centre + self.width * _fall(_rise(v, self.curves[site]), self.pool)

    def bend(self, z: FloatArray, site: int) -> FloatArray:
        """Return features as the site shows them: the inverse of :meth:`straighten`."""
        if not self.active:
            return z
        v = _fall(_rise((z - self.centre) / self.width, self.pool), self.curves[site])
        return (v - self.offset[site]) / self.scale[site]

    def slope(self, z: FloatArray, site: int) -> FloatArray:
        """Return how much straightening stretches each feature around each row."""
        if not self.active:
            return np.ones_like(z)
        v = z * self.scale[site] + self.offset[site]
        pooled = (self.straighten(z, site) - self.centre) / self.width
        return self.scale[site] * _slope(v, self.curves[site]) * self.width / _slope(pooled, self.pool)

    def with_site(self) -> Bend:
        """Return the same with one more site, which bends nothing."""
        return Bend(
            np.vstack([self.scale, 1 / self.width]),
            np.vstack([self.offset, -self.centre / self.width]),
            np.concatenate([self.curves, self.pool[None]]),
            self.pool,
            self.centre,
            self.width,
        )


def no_bend(n_sites: int, p: int) -> Bend:
    """Return what leaves everything as it is."""
    ones, zeros = np.ones((n_sites, p)), np.zeros((n_sites, p))
    return Bend(ones, zeros, np.empty((n_sites, p, 0)), np.empty((p, 0)), np.zeros(p), np.ones(p))


def fit_bend(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    penalty: FloatArray,
    account: Callable[[IntArray], Sequence[Affine]],
    *,
    wanted: bool | None = None,
) -> Bend:
    """Fit the curves; ``wanted=None``: only where they make held-out people likelier.

    ``penalty`` is that on the trend's coefficients, (columns of the basis,). ``account`` gives what there is
    to say of sites without bending, learned from some rows: first what curves are put on, then, if any, a
    rival, which they have to surpass too.
    """
    n_sites, p = design.n_sites, z.shape[1]
    if wanted is False or n_sites < 2 or not p or (wanted is None and design.n_folds < 2):
        return no_bend(n_sites, p)
    stiffness = _choose(_held_out_gains(z, design, basis, penalty, account), wanted)
    if stiffness is None:
        return no_bend(n_sites, p)
    affine = account(design.everybody)[0]
    curves, centre, width = np.empty((n_sites, p, CURVE)), np.empty(p), np.empty(p)
    everybody = design.everybody
    for block, v, centre[block], width[block] in _blocks(z, design, basis, affine, everybody):
        sums = _sums(v, design, basis, everybody)
        start = _pool_curve(sums, penalty)[0]
        curves[:, block] = _newton(sums, start, stiffness, penalty)[0]
    people = design.people
    pool = np.tensordot(people / people.sum(), curves, axes=1)
    return Bend(1 / (affine.spread * width), -(affine.shift + centre) / width, curves, pool, centre, width)


def _choose(gains: FloatArray, wanted: bool | None) -> float | None:
    """Return the stiffness that held-out people like best, None where they do not clearly like any.

    ``gains`` are of (stiffness, sites, folds). Features go together, so the held-out part of a site counts as
    one observation.
    """
    parts = gains[:, gains.any(axis=0)]  # a site without people in a fold says nothing
    if wanted is None and parts.shape[1] < 3:
        return None
    total = parts.sum(axis=1)
    if wanted is None:
        error = parts.std(axis=1, ddof=1) * np.sqrt(parts.shape[1])
        total = np.where(total > SURE * error, total, -np.inf)
    return None if np.isinf(total).all() else STIFFNESS[int(total.argmax())]


def _held_out_gains(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    penalty: FloatArray,
    account: Callable[[IntArray], Sequence[Affine]],
) -> FloatArray:
    """Return how much likelier curves make each site's held-out people, (stiffness, sites, folds)."""
    straight, bent = [], []
    step = max(len(z) // ENOUGH, 1)
    for everybody in design.folds():
        # So many people tell whether sites bend as well as all would: every site's in proportion.
        fit, held = (rows[np.argsort(design.site[rows], kind="stable")][::step] for rows in everybody)
        affine, *rivals = account(fit)
        costs = _costs(z, design, basis, penalty, affine, STIFFNESS, fit, held)
        others = [_costs(z, design, basis, penalty, rival, (), fit, held)[0] for rival in rivals]
        straight.append([costs[0], *others])
        bent.append(costs[1:])
    unbent = np.array(straight)  # (folds, accounts, sites)
    best = unbent[:, unbent.sum(axis=(0, 2)).argmin()]
    return np.array((best[:, None] - np.array(bent)).transpose(1, 2, 0))


def _costs(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    penalty: FloatArray,
    affine: Affine,
    stiffness: Sequence[float],
    fit: IntArray,
    held: IntArray,
) -> FloatArray:
    """Return how unlikely each site's held-out people are, (1 + stiffness, sites): first unbent."""
    costs = np.zeros((1 + len(stiffness), design.n_sites))
    for block, v, _, width in _blocks(z, design, basis, affine, np.concatenate([fit, held])):
        learned = _sums(v[: len(fit)], design, basis, fit)
        judges = _sums(v[len(fit) :], design, basis, held)
        # v is the feature divided by these; a Gaussian counts the logarithm.
        costs += judges.people * np.log(affine.spread[:, block] * width).sum(axis=1)
        pool, trend = _pool_curve(learned, penalty)
        found = [_cost(judges, np.broadcast_to(pool, (design.n_sites, *pool.shape)), trend)]
        curves: FloatArray | None = None
        for people in stiffness:
            curves, trend = _newton(learned, pool, people, penalty, start=curves, trend=trend)
            found.append(_cost(judges, curves, trend))
            if found[-1].sum() > found[-2].sum():
                break  # softer curves would only be worse
        costs += [found[min(k, len(found) - 1)] for k in range(len(costs))]
    return costs


# -- sums over people --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sums:
    """What the likelihood needs of people, by site.

    With J the integrals of the hats at the knots beside a 1, so that a curve is J @ (height, slopes), and B
    the trend's basis: ``jj`` (sites, p, m, m), ``jb`` (sites, p, m, q), ``bb`` (sites, q, q), ``cells``
    (sites, p, cells), how many people lie in each, and ``people`` (sites,).
    """

    jj: FloatArray
    jb: FloatArray
    bb: FloatArray
    cells: FloatArray
    people: FloatArray

    def sum_of_sites(self) -> _Sums:
        """Return the same with one site, the pool."""
        return _Sums(*(part.sum(axis=0, keepdims=True) for part in vars(self).values()))


def _blocks(
    z: FloatArray, design: Design, basis: FloatArray, affine: Affine, rows: IntArray
) -> Iterator[tuple[slice, FloatArray, FloatArray, FloatArray]]:
    """Give features, their values in deviations of the pool of these rows, its mean and deviation.

    So many features at a time that their sums fit into memory.
    """
    m = CURVE
    numbers = 2 * design.n_sites * (m * (m + basis.shape[1]) + len(HATS))
    step = max(AT_ONCE // (numbers + len(rows)), 1)
    weight = design.weight[rows] / design.weight[rows].sum()
    for start in range(0, z.shape[1], step):
        block = slice(start, start + step)
        v = affine.pooled(z, design, basis, rows, block)
        centre = weight @ v
        v -= centre
        width = np.sqrt(np.maximum(weight @ v**2, 1e-300))
        v /= width
        yield block, v, centre, width


def _sums(v: FloatArray, design: Design, basis: FloatArray, rows: IntArray) -> _Sums:
    """Add people up by site; v is of these rows."""
    n_sites, p, q, m = design.n_sites, v.shape[1], basis.shape[1], CURVE
    jj, jb = np.zeros((n_sites, p, m, m)), np.zeros((n_sites, p, m, q))
    bb, cells = np.zeros((n_sites, q, q)), np.zeros((n_sites, p, len(HATS)))
    for s, own in enumerate(site_rows(design.site[rows], n_sites)):
        for some in (own[piece] for piece in pieces(len(own), p * m)):
            w, b = design.weight[rows[some]], basis[rows[some]]
            j = _integrals(v[some])  # (p, m, rows)
            weighted = j * w
            jj[s] += weighted @ j.transpose(0, 2, 1)
            jb[s] += weighted @ b
            bb[s] += (b * w[:, None]).T @ b
            cells[s] += _counts(v[some], w)
    return _Sums(jj, jb, bb, cells, design.people_of(rows))


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
    """Return the hats at the middle of each cell, (cells, knots); beyond the outer knots is one cell."""
    middles = KNOTS[0] + (np.arange(CELLS * (len(KNOTS) - 1)) + 0.5) * STEP / CELLS
    places = np.concatenate([KNOTS[:1], middles, KNOTS[-1:]])
    return np.stack([np.interp(places, KNOTS, row) for row in np.eye(len(KNOTS))], axis=1)


HATS = _hats()
PAIRS = np.einsum("ck,cl->ckl", HATS, HATS).reshape(len(HATS), -1)


def _counts(v: FloatArray, weight: FloatArray) -> FloatArray:
    """Return how many people lie in each cell, (p, cells)."""
    p = v.shape[1]
    cell = np.clip(np.floor((v - KNOTS[0]) * (CELLS / STEP)), -1, len(HATS) - 2).astype(np.intp) + 1
    flat = (cell + np.arange(p) * len(HATS)).ravel()
    counts: FloatArray = np.bincount(flat, np.repeat(weight, p), p * len(HATS)).astype(np.float64)
    return counts.reshape(p, len(HATS))


# -- the likelihood and its optimum ------------------------------------------------------------------------


def _parts(sums: _Sums, curves: FloatArray, trend: FloatArray) -> FloatArray:
    """Return how unlikely people are, (sites, p), but for a constant; the trend is (p, q)."""
    told = sums.jb @ trend[None, :, :, None]
    quadratic = (curves[..., None, :] @ (sums.jj @ curves[..., None] - 2 * told))[..., 0, 0]
    quadratic += np.einsum("pq,sqr,pr->sp", trend, sums.bb, trend)
    rising: FloatArray = (sums.cells * np.log(curves[..., 1:] @ HATS.T)).sum(axis=-1)
    return 0.5 * quadratic - rising


def _cost(sums: _Sums, curves: FloatArray, trend: FloatArray) -> FloatArray:
    """Return how unlikely each site's people are, all features together, (sites,)."""
    return _parts(sums, curves, trend).sum(axis=1)


def _pool_curve(sums: _Sums, penalty: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the one curve of each feature that suits all sites, (p, m), and the trend, (p, q)."""
    all_sites = sums.sum_of_sites()
    p = all_sites.jj.shape[1]
    line = np.ones((p, CURVE))
    line[:, 0] = KNOTS[0]
    curves, trend = _newton(all_sites, line, 1.0, penalty)
    return curves[0], trend


def _pull(prior: FloatArray) -> FloatArray:
    """Return the precision of curves around the prior, (p, m, m): apart in proportion, and smoothly so."""
    m = prior.shape[1]
    steps = np.diff(np.eye(m)[1:], axis=0)
    precision = np.eye(m) + SMOOTH * steps.T @ steps
    scale = np.concatenate([np.ones((len(prior), 1)), 1 / prior[:, 1:]], axis=1)
    result: FloatArray = precision * scale[:, :, None] * scale[:, None, :]
    return result


def _newton(
    sums: _Sums,
    prior: FloatArray,
    stiffness: float,
    penalty: FloatArray,
    *,
    start: FloatArray | None = None,
    trend: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return the likeliest curves (sites, p, m) and trend (p, q).

    Slopes are drawn to those of the prior, (p, m), in proportion, and heights to its height.
    """
    n_sites, p, m, q = sums.jb.shape
    pull = stiffness * _pull(prior)
    curves = np.broadcast_to(prior, (n_sites, p, m)).copy() if start is None else start
    trend = np.zeros((p, q)) if trend is None else trend
    inner = sums.bb.sum(axis=0) + np.diag(penalty)

    def objective(curves: FloatArray, trend: FloatArray) -> FloatArray:
        apart = curves - prior
        drawn = 0.5 * np.einsum("spm,pmn,spn->p", apart, pull, apart)
        result: FloatArray = _parts(sums, curves, trend).sum(axis=0) + drawn + 0.5 * trend**2 @ penalty
        return result

    value = objective(curves, trend)
    for _ in range(ROUNDS):
        step, turn, decrement = _newton_step(sums, curves, trend, pull, prior, inner)
        if not (decrement > 1e-6 * sums.people.sum()).any():
            break
        # Slopes stay above 0, features are apart from one another: each goes as far as it can.
        shrinks = np.where(step[..., 1:] < 0, -step[..., 1:] / curves[..., 1:], 0.0).max(axis=(0, 2))
        length = np.minimum(1.0, 0.9 / np.maximum(shrinks, 1e-12))
        for _ in range(8):
            tried = curves + length[:, None] * step, trend + length[:, None] * turn
            new = objective(*tried)
            worse = new > value + 1e-9 * np.abs(value)
            if not worse.any():
                break
            length = np.where(worse, length / 2, length)
        curves = np.where(worse[:, None], curves, tried[0])
        trend, value = np.where(worse[:, None], trend, tried[1]), np.where(worse, value, new)
    return curves, trend


def _newton_step(
    sums: _Sums,
    curves: FloatArray,
    trend: FloatArray,
    pull: FloatArray,
    prior: FloatArray,
    inner: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the steps of curves and trend, and by how much each feature's cost would fall, (p,).

    Sites meet in the trend alone, so they are eliminated one by one.
    """
    q, k = sums.jb.shape[3], len(KNOTS)
    slopes = curves[..., 1:] @ HATS.T
    share = sums.cells / slopes
    gradient = (sums.jj @ curves[..., None] - sums.jb @ trend[None, :, :, None])[..., 0]
    gradient += np.einsum("pmn,spn->spm", pull, curves - prior)
    gradient[..., 1:] -= share @ HATS
    hessian = sums.jj + pull
    hessian[..., 1:, 1:] += ((share / slopes) @ PAIRS).reshape(*share.shape[:2], k, k)
    slope = trend @ inner - np.einsum("spmq,spm->pq", sums.jb, curves)
    solved = np.linalg.solve(hessian, np.concatenate([sums.jb, gradient[..., None]], axis=3))
    across = np.einsum("spmq,spmr->pqr", sums.jb, solved)
    turn = np.linalg.solve(inner - across[..., :q], -(slope + across[..., q])[..., None])[..., 0]
    step = (solved[..., :q] @ turn[None, :, :, None])[..., 0] - solved[..., q]
    return step, turn, -(gradient * step).sum(axis=(0, 2)) - (slope * turn).sum(axis=1)


# -- curves ------------------------------------------------------------------------------------------------


def _heights(curve: FloatArray) -> FloatArray:
    """Return the curves' heights at the knots, (p, knots)."""
    between = np.cumsum((curve[:, 1:-1] + curve[:, 2:]) * (STEP / 2), axis=1)
    return curve[:, :1] + np.concatenate([np.zeros((len(curve), 1)), between], axis=1)


def _slope(v: FloatArray, curve: FloatArray) -> FloatArray:
    """Return the curves' slopes at v (rows, p)."""
    return np.stack(
        [np.interp(x, KNOTS, slopes) for x, slopes in zip(v.T, curve[:, 1:], strict=True)], axis=1
    )


def _rise(v: FloatArray, curve: FloatArray) -> FloatArray:
    """Return the curves' heights at v (rows, p)."""
    each = np.arange(v.shape[1])
    k = np.clip(np.floor((v - KNOTS[0]) / STEP), 0, len(KNOTS) - 2).astype(np.intp)
    low, high = curve[each, 1 + k], curve[each, 2 + k]
    d = np.clip(v - KNOTS[k], 0.0, STEP)
    inside = _heights(curve)[each, k] + d * (low + (high - low) * d / (2 * STEP))
    return inside + np.minimum(v - KNOTS[0], 0.0) * low + np.maximum(v - KNOTS[-1], 0.0) * high


def _fall(y: FloatArray, curve: FloatArray) -> FloatArray:
    """Return where the curves have the heights y (rows, p)."""
    each, heights = np.arange(y.shape[1]), _heights(curve)
    k = sum((y >= height).astype(np.intp) for height in heights.T[1:-1])
    low, high = curve[each, 1 + k], curve[each, 2 + k]
    within = np.clip(y, heights[:, 0], heights[:, -1])
    up = within - heights[each, k]
    # The root of low · d + (high − low) d² / 2 step = up that stays finite where both slopes are equal.
    root = np.sqrt(np.maximum(low**2 + 2 * (high - low) * up / STEP, 0.0))
    d = 2 * up / np.maximum(low + root, 1e-300)
    return KNOTS[k] + d + np.minimum(y - within, 0.0) / low + np.maximum(y - within, 0.0) / high
