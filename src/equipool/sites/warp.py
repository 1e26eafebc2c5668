"""What sites bend: features brought to the pool's shape by rising curves, where held-out people show any.

A scanner that compresses large values, as a gamma does, acts on the value, trend included. So the model is
g_s(v) = trend(covariates) + what is the person's own, a standard Gaussian: g_s is a rising curve for each
site and feature (`sites.rising_curves`), and v is the feature after a shift and a gain. A person of
site s is moved to ḡ⁻¹(g_s(v)), ḡ the mean curve of all sites, so that what all sites share stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipool.checks.overlap import NINE_TENTHS, nine_tenths
from equipool.sites.design import Design
from equipool.sites.rising_curves import (
    CURVE,
    HATS,
    cost,
    fall,
    newton,
    pool_curve,
    rise,
    slope,
    sums_of,
)

__all__ = ["Affine", "Bend", "fit_bend", "no_bend"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

STIFFNESS = (30.0, 10.0, 3.0, 1.0)  # in people: how much of the pool's curve a site's own is mixed with
RIGID = 1e4  # smoothness of curves that are the pool's, stretched and moved: a gain and a shift
STRETCHED = (30.0, 3.0, 0.3)  # their stiffness, which holds at all six knots
SURE = 2.0  # standard errors by which held-out people must show that sites bend
ALONE = 4.5  # the same, of one feature among many that do not
NEAR = 2.0  # the same, within which softer curves count as no worse, and a feature as not losing by them
MOST = 0.05  # of log likelihood, for each person, that one feature may add to all features' choice
STEEPEST = 5.0  # a site's slope relative to the pool's, and its inverse
FEW = 25  # people; smaller sites show no curve of their own
ENOUGH = 20_000  # rows by which to choose
VALUES, SAMPLE = 20, 2000  # different values, in so many rows, that a curve needs more than
AT_ONCE = 2**20  # numbers of a block of features


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
        self, z: FloatArray, design: Design, basis: FloatArray, rows: IntArray, block: slice | IntArray
    ) -> FloatArray:
        """Return some features of some rows in the pool's units."""
        site = design.site[rows]
        # Two steps of indices: a block may be a list of features.
        seen, spread, shift = z[:, block][rows], self.spread[:, block][site], self.shift[:, block][site]
        if self.slopes is None or self.centre is None:
            return seen / spread - shift
        told = basis[rows] @ self.slopes[:, block] + self.centre[block]
        return told + (seen - told - shift) / spread


@dataclass(frozen=True, eq=False)
class Bend:
    """The curves of sites and features; b of the features are bent, the others stay as they are.

    Attributes
    ----------
    columns
        (b,): which features.
    scale, offset
        (sites, b): v = z · scale + offset.
    curves, pool
        (sites, b, m) and (b, m): a curve's height at the first knot, and its slopes at all.
    centre, width
        (b,): the pool's z = centre + width · v.
    """

    columns: IntArray
    scale: FloatArray
    offset: FloatArray
    curves: FloatArray
    pool: FloatArray
    centre: FloatArray
    width: FloatArray

    @property
    def active(self) -> bool:
        """Whether any site bends anything."""
        return len(self.columns) > 0

    def straighten(self, z: FloatArray, site: int) -> FloatArray:
        """Return features of one site as the pool would show them."""
        if not self.active:
            return z
        result = z.copy()
        result[:, self.columns] = self.centre + self.width * self._pooled(self._local(z, site), site)
        return result

    def bend(self, z: FloatArray, site: int) -> FloatArray:
        """Return features as the site shows them: the inverse of :meth:`straighten`."""
        if not self.active:
            return z
        result = z.copy()
        pooled = (z[:, self.columns] - self.centre) / self.width
        local = fall(rise(pooled, self.pool), self.curves[site])
        result[:, self.columns] = (local - self.offset[site]) / self.scale[site]
        return result

    def slope(self, z: FloatArray, site: int) -> FloatArray:
        """Return how much straightening stretches each feature around each row."""
        result = np.ones_like(z)
        if self.active:
            v = self._local(z, site)
            ratio = slope(v, self.curves[site]) / slope(self._pooled(v, site), self.pool)
            result[:, self.columns] = self.scale[site] * ratio * self.width
        return result

    def with_site(self) -> Bend:
        """Return the same with one more site, which bends nothing."""
        return Bend(
            self.columns,
            np.vstack([self.scale, 1 / self.width]),
            np.vstack([self.offset, -self.centre / self.width]),
            np.concatenate([self.curves, self.pool[None]]),
            self.pool,
            self.centre,
            self.width,
        )

    def _local(self, z: FloatArray, site: int) -> FloatArray:
        return z[:, self.columns] * self.scale[site] + self.offset[site]

    def _pooled(self, v: FloatArray, site: int) -> FloatArray:
        return fall(rise(v, self.curves[site]), self.pool)


def no_bend(n_sites: int) -> Bend:
    """Return what leaves everything as it is."""
    none = np.empty((n_sites, 0))
    empty = np.empty((n_sites, 0, CURVE))
    return Bend(np.empty(0, dtype=np.intp), none, none, empty, empty[0], np.empty(0), np.empty(0))


def fit_bend(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    penalty: FloatArray,
    account: Callable[[IntArray], Sequence[Affine]],
    *,
    wanted: bool | None = None,
) -> Bend:
    """Fit the curves; ``wanted=None``: only of features that they make likelier in held-out people.

    ``penalty`` is that on the trend's coefficients for each person, (columns of the basis,). ``account``
    gives what there is to say of sites without bending, learned from some rows: first what curves are put on,
    then, if any, a rival, which they have to surpass too.
    """
    n_sites, p = design.n_sites, z.shape[1]
    large = design.people >= FEW
    if wanted is False or large.sum() < 2 or design.n_folds < 2 or not p:
        return no_bend(n_sites)
    gains, people = _held_out_gains(z, design, basis, penalty, account, large)
    counts = _few_values(z)
    gains[:, counts] = 0.0
    stiffness = _choose(gains, people, wanted)
    columns = np.flatnonzero(np.isfinite(stiffness) & ~counts)
    if not len(columns):
        return no_bend(n_sites)
    affine, everybody = account(design.everybody)[0], np.flatnonzero(large[design.site])
    curves = np.empty((n_sites, len(columns), CURVE))
    centre, width = np.empty(len(columns)), np.empty(len(columns))
    for some in _blocks(design, basis, len(everybody), len(columns)):
        own = columns[some]
        v = affine.pooled(z, design, basis, everybody, own)
        v, centre[some], width[some] = _standardised(v, design.weight[everybody])
        sums = sums_of(v, design, basis, everybody)
        start = pool_curve(sums, penalty)[0]
        curves[:, some] = newton(sums, start, stiffness[own], penalty)[0]
    people = np.where(large, design.people, 0.0)
    pool = np.tensordot(people / people.sum(), curves, axes=1)
    curves[~large] = pool
    curves[..., 1:] = np.clip(curves[..., 1:], pool[:, 1:] / STEEPEST, pool[:, 1:] * STEEPEST)
    scale = 1 / (affine.spread[:, columns] * width)
    offset = -(affine.shift[:, columns] + centre) / width
    return Bend(columns, scale, offset, curves, pool, centre, width)


def _few_values(z: FloatArray) -> NDArray[np.bool_]:
    """Say which features count or grade something: between their steps there is nothing to bend."""
    some = np.sort(z[:: max(len(z) // SAMPLE, 1)], axis=0)
    result: NDArray[np.bool_] = 1 + (np.diff(some, axis=0) != 0).sum(axis=0) <= VALUES
    return result


def _choose(gains: FloatArray, people: FloatArray, wanted: bool | None) -> FloatArray:
    """Return the stiffness of each feature's curves, NaN for those that stay straight.

    ``gains`` are of (stiffness, p, sites, folds), ``people`` were held out of (sites, folds). Features that
    go together cannot be counted as so many observations, so it is the held-out parts of sites that are
    counted, all features together, none of which may outweigh the others. Where that shows bending, all
    features are bent but those that lose by it, with the softest curves that are no worse than the best
    (fitted on everybody they are known better); where it does not, those which do show it by themselves.
    """
    seen = people > 0
    parts, most = gains[:, :, seen], MOST * people[seen]
    every = np.arange(parts.shape[1])
    together = np.clip(parts, -most, most).sum(axis=1)
    total = together.sum(axis=1)
    if wanted:
        return np.full(len(every), STIFFNESS[int(total.argmax())])
    if parts.shape[2] < 3:
        return np.full(len(every), np.nan)
    best = parts.sum(axis=2).argmax(axis=0)
    alone = np.array(STIFFNESS)[best]
    alone[~_sure(parts[best, every], ALONE)] = np.nan
    sure = _sure(together, SURE)
    if not sure.any():
        return alone
    worse = _sure(together[total.argmax()] - together, NEAR)
    chosen = int(np.flatnonzero(~worse & (total > 0)).max())
    lost = np.isnan(alone) & _sure(-parts[chosen], NEAR)
    return np.where(lost, np.nan, STIFFNESS[chosen])


def _sure(parts: FloatArray, errors: float) -> NDArray[np.bool_]:
    """Say whether sums over the last dimension are so many standard errors above 0."""
    error = parts.std(axis=-1, ddof=1) * np.sqrt(parts.shape[-1])
    return np.asarray(parts.sum(axis=-1) > errors * error)


def _held_out_gains(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    penalty: FloatArray,
    account: Callable[[IntArray], Sequence[Affine]],
    large: NDArray[np.bool_],
) -> tuple[FloatArray, FloatArray]:
    """Return how much likelier curves make each site's held-out people, (stiffness, p, sites, folds).

    And how many these are, (sites, folds). Likelier than any account without bending, among them the pool's
    curve moved and stretched: what curves gain by undoing the shrinkage of shifts and spreads is no bending.
    """
    rng = np.random.default_rng(0)
    share = min(ENOUGH / len(z), 1.0)
    bent, straight, people = [], [], []
    for fold in design.folds():
        fit, held = (np.sort(rng.permutation(rows)[: int(np.ceil(share * len(rows)))]) for rows in fold)
        affine, *rivals = account(fit)
        fit, held = fit[large[design.site[fit]]], held[large[design.site[held]]]
        unbent, curved = _costs(z, design, basis, penalty, affine, fit, held, curves=True)
        others = [_costs(z, design, basis, penalty, one, fit, held, curves=False)[0] for one in rivals]
        bent.append(curved)
        straight.append(np.concatenate([unbent, *others]))
        people.append(design.people_of(held))
    costs = np.stack(straight, axis=-1)  # (accounts, p, sites, folds)
    best = costs.sum(axis=(2, 3)).argmin(axis=0)
    least = np.take_along_axis(costs, best[None, :, None, None], axis=0)
    return np.nan_to_num(least - np.stack(bent, axis=-1)), np.stack(people, axis=-1)


def _costs(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    penalty: FloatArray,
    affine: Affine,
    fit: IntArray,
    held: IntArray,
    *,
    curves: bool,
) -> tuple[FloatArray, FloatArray]:
    """Return how unlikely held-out people are, (…, p, sites): without bending, and by stiffness."""
    p, both = z.shape[1], np.concatenate([fit, held])
    straight = np.zeros((1 + len(STRETCHED) if curves else 1, p, design.n_sites))
    bent = np.zeros((len(STIFFNESS) if curves else 0, p, design.n_sites))
    for block in _blocks(design, basis, len(both), p):
        v = affine.pooled(z, design, basis, both, block)
        v, _, width = _standardised(v, design.weight[fit], len(fit))
        learned = sums_of(v[: len(fit)], design, basis, fit)
        judges = sums_of(v[len(fit) :], design, basis, held)
        # v is the feature divided by these; a Gaussian counts the logarithm.
        stretched = (judges.people[:, None] * np.log(affine.spread[:, block] * width)).T
        pool, trend = pool_curve(learned, penalty)
        everywhere = np.broadcast_to(pool, (design.n_sites, *pool.shape))
        straight[0, block] = cost(judges, everywhere, trend).T + stretched
        for k, people in enumerate(STRETCHED if curves else ()):
            found = newton(learned, pool, people, penalty, smooth=RIGID, trend=trend)
            straight[1 + k, block] = cost(judges, *found).T + stretched
        found = (everywhere.copy(), trend)
        for k, people in enumerate(STIFFNESS if curves else ()):
            found = newton(learned, pool, people, penalty, start=found[0], trend=found[1])
            bent[k, block] = cost(judges, *found).T + stretched
    return straight, bent


def _blocks(design: Design, basis: FloatArray, rows: int, p: int) -> Iterator[slice]:
    """Give so many features at a time that their sums fit into memory."""
    numbers = 2 * design.n_sites * (CURVE * (CURVE + basis.shape[1]) + len(HATS)) + rows
    step = max(AT_ONCE // numbers, 1)
    return (slice(start, min(start + step, p)) for start in range(0, p, step))


def _standardised(
    v: FloatArray, weight: FloatArray, first: int | None = None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (v − centre) / width, centre and width; these by the first rows.

    They are the median and the deviation of the middle nine tenths, so that outliers do not push everybody
    between two knots.
    """
    mean = weight @ v[:first] / weight.sum()
    deviation = np.sqrt(weight @ (v[:first] - mean) ** 2 / weight.sum())
    low, middle, high = nine_tenths(v[:first])
    robust = (high - low) / NINE_TENTHS
    few = robust < 0.1 * deviation  # most people share one value
    width = np.maximum(np.where(few, deviation, np.minimum(robust, deviation)), 1e-150)
    centre = np.where(few, mean, middle)
    return (v - centre) / width, centre, width
