"""The regression of features on sites and a trend that they share, with the sites' spreads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipool.sites.design import Design
from equipool.sites.passes import members, pieces, site_sums

__all__ = [
    "SPREAD_PEOPLE",
    "Regression",
    "beside",
    "choose_curvature",
    "choose_gain",
    "count_far",
    "farthest",
    "fit_regression",
    "residuals",
    "tamed",
    "variance_between",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

SPREAD_PEOPLE = 10.0  # people's worth of the pooled spread that a site's own is mixed with, before data
SPREAD_BOUNDS = (1.0, 1000.0)  # and what data may make of it
SPREAD_SEEN = 5  # people; smaller sites do not tell how far spreads differ
FAR = 4.0  # deviations; whoever is farther from what site and trend let expect counts as that far
ABSURD = 50.0  # deviations of the feature over people: no measurement
TAMING = 30  # rounds at most
PRIOR_SITES = 4.0  # sites' worth of all features' mean variance of shifts that a feature's own is mixed with
CURVATURES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
PARSIMONY = 1.002  # the straightest trend whose held-out error is within this factor of the best


def beside(extra: FloatArray, basis: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the target's columns without what the trend explains: that belongs to the trend."""
    if not extra.shape[1] or not basis.shape[1]:
        return extra
    w = np.sqrt(weight)[:, None]
    left = extra - basis @ np.linalg.lstsq(basis * w, extra * w, rcond=None)[0]
    result: FloatArray = left[:, left.std(axis=0) > 1e-6 * extra.std(axis=0)]
    return result


@dataclass(frozen=True, eq=False)
class Regression:
    """A regression on sites and trend, with the sites' spreads.

    ``stretch`` is what sites were taken to stretch the trend by, ``None`` for nothing; ``squares`` are sums
    of the squares of what is left, (sites, p); ``spread_people`` is the weight of the pool in spreads, (p,).
    """

    solution: FloatArray
    inverse: FloatArray  # its diagonal, (sites,)
    stretch: FloatArray | None
    spread: FloatArray
    spread_people: FloatArray
    squares: FloatArray
    people: FloatArray

    @property
    def variance(self) -> FloatArray:
        """Of residuals in the pool's spread, (p,)."""
        return self._mean_square(self.spread)

    @property
    def noise(self) -> FloatArray:
        """Of what the regression leaves of the features that it was given, (p,)."""
        return self._mean_square(np.ones_like(self.squares) if self.stretch is None else self.stretch)

    @property
    def gain(self) -> bool:
        """Whether sites stretch the trend too."""
        return self.stretch is not None

    @property
    def slopes(self) -> FloatArray:
        """Coefficients of the basis, (q, p)."""
        return self.solution[len(self.people) :]

    @property
    def centre(self) -> FloatArray:
        """What people of mean covariates show at the mean site, (p,)."""
        centre: FloatArray = self.people @ self.solution[: len(self.people)] / self.people.sum()
        return centre

    @property
    def error(self) -> FloatArray:
        """Standard errors of shifts, (sites, p)."""
        free = max(self.people.sum() - len(self.solution), 1.0)
        return np.sqrt(np.outer(self.inverse, self.noise * self.people.sum() / free))

    @property
    def shift(self) -> FloatArray:
        """Of the sites beside their mean, before shrinkage, (sites, p)."""
        return self.solution[: len(self.people)] - self.centre

    def shifts(self, kept: FloatArray | float = 0.0) -> tuple[FloatArray, FloatArray]:
        """Return the variance of true shifts, (p,), and the shifts shrunk by how uncertain they are.

        ``kept``, (sites, p), is the part of them that is not the sites'.
        """
        return _shrink_shifts(self.shift - kept, self.error)

    def _mean_square(self, spread: FloatArray) -> FloatArray:
        mean: FloatArray = (self.squares / spread**2).sum(axis=0) / self.people.sum()
        return mean


def fit_regression(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    bends: NDArray[np.bool_],
    curvature: float,
    rows: IntArray,
    *,
    gain: bool,
    plain: Regression | None = None,
) -> Regression:
    """Fit shifts, trend and spreads; with a gain in turns, since a spread then stretches the trend too.

    ``plain`` is the same without a gain, the first turn, where it is known already.
    """
    people = design.people_of(rows)
    for turn in range(4 if gain else 1):
        if turn == 0 and plain is not None:
            spread = plain.spread
            continue
        stretch = spread if turn else None
        solution, inverse = _normal(z, design, basis, bends, rows, stretch).solve(curvature)
        squares, fourths = (np.zeros((design.n_sites, z.shape[1])) for _ in range(2))
        for some, missed in _missed(z, design, basis, solution, stretch, rows):
            add_up = members(design.site[some], design.n_sites, design.weight[some])
            missed *= missed
            squares += add_up @ missed
            missed *= missed
            fourths += add_up @ missed
        weight = _spread_people(squares, fourths, people)
        spread = _spreads(squares, people, weight)
    return Regression(solution, inverse, stretch, spread, weight, squares, people)


def tamed(z: FloatArray, design: Design, basis: FloatArray, bends: NDArray[np.bool_]) -> FloatArray:
    """Return features with values that are far from what site and trend let expect brought nearer.

    To learn from, not to harmonize: one failed segmentation must not decide what a site's shift and spread
    are. In rounds until nothing changes, for the far ones themselves widen what counts as near; features
    without any are as they were.
    """
    if max(z.max(initial=0.0), -z.min(initial=0.0)) > ABSURD:
        z = np.clip(z, -ABSURD, ABSURD)  # or it would take many rounds
    result, columns, everybody = z, np.arange(z.shape[1]), design.everybody
    before = np.full((design.n_sites, len(columns)), np.inf)
    for _ in range(TAMING):
        near = result if len(columns) == z.shape[1] else result[:, columns]
        solution, _ = _normal(near, design, basis, bends, everybody).solve(CURVATURES[0])
        lengths, far = np.zeros((design.n_sites, len(columns))), np.zeros(len(columns), dtype=bool)
        for some, missed in _missed(near, design, basis, solution, None, everybody):
            lengths += site_sums(np.abs(missed), design.site[some], design.n_sites, design.weight[some])
        limit = farthest(lengths, design.people[:, None], lengths.sum(axis=0) / design.people.sum())
        for some, missed in _missed(near, design, basis, solution, None, everybody):
            far |= (np.abs(missed) > limit[design.site[some]]).any(axis=0)
        far &= (limit < 0.99 * before).any(axis=0)
        if not far.any():
            break
        columns, result = columns[far], z.copy() if result is z else result
        own = z[:, columns]
        before = limit = limit[:, far]
        for some, missed in _missed(own, design, basis, solution[:, far], None, everybody):
            most = limit[design.site[some]]
            own[some] -= missed - np.clip(missed, -most, most)
        result[:, columns] = own
    return result


def count_far(z: FloatArray, near: FloatArray, design: Design) -> FloatArray:
    """Return how many people of each site were brought nearer, (sites, p)."""
    total = np.zeros((design.n_sites, z.shape[1]))
    for part in pieces(*z.shape) if near is not z else ():
        moved = (near[part] != z[part]).astype(np.float64)
        total += site_sums(moved, design.site[part], design.n_sites, design.weight[part])
    return total


def farthest(lengths: FloatArray, people: FloatArray, pooled: FloatArray) -> FloatArray:
    """Return how far people of a site may be: so many times the mean length, which few cannot move.

    ``lengths`` are sums over so many ``people``; ``pooled`` is the mean length over the pool.
    """
    own = (lengths + SPREAD_PEOPLE * pooled) / (people + SPREAD_PEOPLE)
    limit: FloatArray = FAR * np.sqrt(np.pi / 2) * own
    return limit


def _missed(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    solution: FloatArray,
    stretch: FloatArray | None,
    rows: IntArray,
) -> Iterator[tuple[IntArray | slice, FloatArray]]:
    """Give rows and what sites and trend do not foretell of them, some rows at a time."""
    for part in pieces(len(rows), z.shape[1]):
        some = part if len(rows) == len(z) else rows[part]  # of everybody in their order: no copies
        site = design.site[some]
        told = basis[some] @ solution[design.n_sites :]
        told += solution[site]
        if stretch is not None:
            told *= stretch[site]
        yield some, z[some] - told


def residuals(z: FloatArray, design: Design, basis: FloatArray, fit: Regression) -> FloatArray:
    """Return what is left of all rows, in the pool's spread."""
    result = np.empty_like(z)
    for some, missed in _missed(z, design, basis, fit.solution, fit.stretch, design.everybody):
        result[some] = missed / fit.spread[design.site[some]]
    return result


@dataclass(frozen=True, eq=False)
class _Normal:
    """The normal equations of sites and basis before any penalty: sums over people.

    People (sites,), sums of the basis (sites, q) and of the features (sites, p) by site; products of the
    basis with itself (q, q) and with the features (q, p).
    """

    people: FloatArray
    across: FloatArray
    sums: FloatArray
    inner: FloatArray
    products: FloatArray
    bends: NDArray[np.bool_]

    def solve(self, curvature: float) -> tuple[FloatArray, FloatArray]:
        """Return the coefficients, sites first, by penalised least squares, and the sites' part of the error.

        That is the diagonal of the inverse matrix. Everybody is at one site, so that block is diagonal and is
        eliminated first: linear in sites.
        """
        penalty = np.where(self.bends, curvature, 1e-9) * self.people.sum()
        # A site without people, as may happen in a fold, has no shift.
        people = np.where(self.people > 0, self.people, 1e-9)[:, None]
        means = self.across / people
        left = np.linalg.inv(self.inner + np.diag(penalty) - self.across.T @ means)
        slopes = left @ (self.products - means.T @ self.sums)
        shifts = self.sums / people - means @ slopes
        return np.vstack([shifts, slopes]), 1 / people[:, 0] + ((means @ left) * means).sum(axis=1)


def _normal(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    bends: NDArray[np.bool_],
    rows: IntArray,
    stretch: FloatArray | None = None,
) -> _Normal:
    """Add up what the regression of z, or of z without what sites stretch, needs of these rows."""
    n_sites, q, p = design.n_sites, basis.shape[1], z.shape[1]
    across, sums, inner, products = (
        np.zeros(shape) for shape in ((n_sites, q), (n_sites, p), (q, q), (q, p))
    )
    for part in pieces(len(rows), p):
        some = part if len(rows) == len(z) else rows[part]
        site, w, columns = design.site[some], design.weight[some], basis[some]
        y = z[some] if stretch is None else z[some] / stretch[site]
        weighted = columns * w[:, None]
        add_up = members(site, n_sites, w)
        across += add_up @ columns
        sums += add_up @ y
        inner += weighted.T @ columns
        products += weighted.T @ y
    return _Normal(design.people_of(rows), across, sums, inner, products, bends)


def choose_curvature(z: FloatArray, design: Design, basis: FloatArray, bends: NDArray[np.bool_]) -> float:
    """Return the largest penalty whose held-out squared error is hardly above the best."""
    design = design.thirds
    if not bends.any() or design.n_folds < 2:
        return CURVATURES[-1]
    total = np.zeros(len(CURVATURES))
    for fit, held in design.folds():
        normal = _normal(z, design, basis, bends, fit)
        for k, curvature in enumerate(CURVATURES):
            solution, _ = normal.solve(curvature)
            for some, missed in _missed(z, design, basis, solution, None, held):
                total[k] += float(design.weight[some] @ (missed**2).sum(axis=1))
    return max(c for c, cost in zip(CURVATURES, total, strict=True) if cost <= PARSIMONY * total.min())


def choose_gain(
    z: FloatArray, design: Design, basis: FloatArray, bends: NDArray[np.bool_], curvature: float
) -> bool:
    """Say whether held-out people are foretold better if sites stretch the trend with the people.

    By squared error: a likelihood prefers the gain wherever sites differ in spread, as the regression then
    weighs them well, and on fcon1000 paid with the age (docs/experiments.md).
    """
    design = design.thirds
    if design.n_sites < 2 or not basis.shape[1] or design.n_folds < 2:
        return False
    cost = {False: 0.0, True: 0.0}
    for fit, held in design.folds():
        mean, known, own = None, design.only(fit), (z[fit], basis[fit])  # once, for all turns
        for gain in cost:
            mean = fit_regression(
                own[0], known, own[1], bends, curvature, known.everybody, gain=gain, plain=mean
            )
            stretch = mean.spread if gain else None
            for some, missed in _missed(z, design, basis, mean.solution, stretch, held):
                cost[gain] += float(design.weight[some] @ (missed**2).sum(axis=1))
    return cost[True] < cost[False]


def _shrink_shifts(shift: FloatArray, error: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the variance of true shifts and the shifts shrunk by how uncertain they are."""
    if len(shift) < 2:
        return np.zeros(shift.shape[1]), np.zeros_like(shift)
    between = variance_between(shift, error)
    # Few sites tell little about one feature; all features together tell more.
    between = (len(shift) * between + PRIOR_SITES * between.mean()) / (len(shift) + PRIOR_SITES)
    return between, shift * between / np.maximum(between + error**2, 1e-12)


def variance_between(values: FloatArray, error: FloatArray) -> FloatArray:
    """Return how far sites truly differ, (p,): DerSimonian and Laird's estimate for a meta-analysis."""
    weight = 1 / np.maximum(error**2, 1e-12)
    total = weight.sum(axis=0)
    apart = (weight * (values - (weight * values).sum(axis=0) / total) ** 2).sum(axis=0)
    between: FloatArray = np.maximum(apart - (len(values) - 1), 0)
    return between / (total - (weight**2).sum(axis=0) / total)


def _spread_people(squares: FloatArray, fourths: FloatArray, people: FloatArray) -> FloatArray:
    """Return how many people's worth of the pooled spread a site's own is to be mixed with, (p,).

    As many as it takes to know a logarithm of a variance as well as it is foretold by those of other sites;
    heavy tails take more. ``squares`` and ``fourths`` are sums of powers of residuals, (sites, p).
    """
    seen = people >= SPREAD_SEEN
    if seen.sum() < 2:
        return np.full(squares.shape[1], SPREAD_PEOPLE)
    n = people[seen, None]
    variance = squares[seen] / n
    told = (variance > 1e-18).all(axis=0)
    variance = np.where(told, variance, 1.0)
    kurtosis = np.clip((fourths[seen] / variance**2).sum(axis=0) / n.sum(), 2.0, 20.0)
    # Logarithms of few people's variances are too small on average.
    logs, error = np.log(variance) + 1 / (n - 1), np.sqrt((kurtosis - 1) / (n - 1))
    between = variance_between(logs, error)
    # Two features that differ as SPREAD_PEOPLE has it, lest a table of one feature and two sites decides.
    mean = (between[told].sum() + 2 * 2 / SPREAD_PEOPLE) / (told.sum() + 2)
    between = (len(n) * between + PRIOR_SITES * mean) / (len(n) + PRIOR_SITES)
    return np.where(told, np.clip((kurtosis - 1) / between, *SPREAD_BOUNDS), SPREAD_PEOPLE)


def _spreads(squares: FloatArray, people: FloatArray, weight: FloatArray) -> FloatArray:
    """Return each site's spread relative to the pool, shrunk towards 1; their geometric mean is 1.

    Over people, and geometric because a spread of 2 and one of 1/2 are equally far from 1.

    ``squares`` are each site's sums of squared residuals, (sites, p); ``weight`` is the pool's, in people.
    """
    variance = squares.sum(axis=0) / people.sum()
    own = (squares + weight * variance) / (people[:, None] + weight)
    still = variance <= 1e-18
    spread = np.where(still, 1.0, np.sqrt(own / np.where(still, 1.0, variance)))
    result: FloatArray = spread / np.exp(people @ np.log(spread) / people.sum())
    return result
