"""The closed form of :class:`SiteHarmonizer`: a trend that all sites share, and what each site does to it.

A feature is trend(covariates) + shift of the site + what is the person's own, stretched and mixed by the
site. The trend and the shifts come from one penalised regression, the stretch from the residuals' spread, the
mixing from their covariance, each shrunk towards the pool as far as few people demand. It is linear
algebra: exact, deterministic, and made of sums over people.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equipool.models.bend import Bend, fit_bend
from equipool.models.pieces import gram, pieces, site_rows, site_sums
from equipool.models.trend import Trend, fit_trend

__all__ = ["Design", "SiteModel", "find_atoms", "fit_site_model"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

SPREAD_PEOPLE = 10.0  # people's worth of the pooled spread that a site's own is mixed with
PRIOR_SITES = 4.0  # sites' worth of all features' mean variance of shifts that a feature's own is mixed with
ATOM_KEPT, ATOM_WHOLE = 0.05, 0.5  # shares of people with one and the same value, see find_atoms
ATOM_STANDS_OUT = 3.0  # times as many people as the next most common value
CURVATURES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
PARSIMONY = 1.002  # the straightest trend whose held-out error is within this factor of the best
MIXINGS = (10.0, 30.0, 100.0, 200.0, 400.0, 1000.0, 3000.0, 10000.0)
MARGIN = 0.015  # of the best held-out cost, for the mixing
WIDEST_MIXING = 2000  # features; beyond, covariances are left as they are


@dataclass(frozen=True, eq=False)
class Design:
    """Who stands where: site numbers, covariates, what else to allow for, weights and folds of people."""

    site: IntArray
    c: FloatArray
    extra: FloatArray
    weight: FloatArray
    fold: IntArray
    n_sites: int

    @property
    def everybody(self) -> IntArray:
        """All rows."""
        return np.arange(len(self.site))

    def folds(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Give the rows to fit on and the rows to judge by, of sites that were fitted."""
        for fold in range(int(self.fold.max()) + 1):
            fit = np.flatnonzero(self.fold != fold)
            seen = np.bincount(self.site[fit], minlength=self.n_sites) > 0
            yield fit, np.flatnonzero((self.fold == fold) & seen[self.site])


@dataclass(frozen=True, eq=False)
class SiteModel:
    """What was learned of the sites, in standardised features.

    Attributes
    ----------
    trend, coefficients, centre
        The part that all sites share, trend(c) @ coefficients + centre.
    shift, error, spread, people
        (sites, p): each site's shift, its standard error before shrinkage, its spread relative to the pool;
        (sites,): its people.
    between
        (p,): variance of the true shifts between sites.
    root
        (p, p) and its inverse: square roots of the pooled residual covariance; empty without mixing.
    vectors, values, start
        Each site's directions of other variance in whitened residuals, (r, p), their variances (r,), and
        where a site's begin (sites + 1,).
    mixing
        People's worth of the pooled covariance that a site's own is mixed with; infinite: no mixing.
    curvature
        The penalty on bends of the trend.
    gain
        Whether sites stretch the trend with the people, as a scanner's gain does: feature = spread · (trend +
        shift + own); otherwise feature = trend + shift + spread · own, as in ComBat.
    bend
        What sites do to the own part that is not affine.
    """

    trend: Trend
    coefficients: FloatArray
    centre: FloatArray
    shift: FloatArray
    error: FloatArray
    spread: FloatArray
    people: FloatArray
    between: FloatArray
    residual: FloatArray
    root: FloatArray
    unroot: FloatArray
    vectors: FloatArray
    values: FloatArray
    start: IntArray
    mixing: float
    curvature: float
    gain: bool
    bend: Bend

    def expected(self, c: FloatArray) -> FloatArray:
        """Return the trend at covariates (rows, K)."""
        return self.centre + self.trend(c) @ self.coefficients

    def own(self, z: FloatArray, expected: FloatArray, site: int) -> FloatArray:
        """Return what is the person's own in rows of one site: residuals as the pool has them."""
        straight = self.bend.straighten(self._residual(z, expected, site), site)
        return self._turn(straight, site, -0.5)

    def measured(self, own: FloatArray, expected: FloatArray, site: int) -> FloatArray:
        """Return what a site would have measured of people: the inverse of :meth:`own`."""
        own = self.bend.bend(self._turn(own, site, 0.5), site)
        if self.gain:
            return (expected + self.shift[site] + own) * self.spread[site]
        return expected + self.shift[site] + own * self.spread[site]

    def log_likelihood(self, z: FloatArray, expected: FloatArray) -> FloatArray:
        """Return how likely each site would have measured each row, (rows, sites), up to a constant."""
        result = np.empty((len(z), len(self.shift)))
        for s in range(len(self.shift)):
            seen = self._residual(z, expected, s)
            r = self.bend.straighten(seen, s)
            white = r @ self.unroot if self.root.size else r / np.sqrt(self.residual)
            squares, determinant = _gaussian(white, *self._directions(s), rest=self._rest(s))
            result[:, s] = -0.5 * (squares + determinant) - np.log(self.spread[s]).sum()
            result[:, s] += self.bend.log_slope(seen, s)
        return result

    def with_site(self, z: FloatArray, expected: FloatArray) -> SiteModel:
        """Return a model with one more site, estimated from its own rows with everything else as it is.

        Cells that are NaN were not measured and tell nothing.
        """
        seen = ~np.isnan(z)
        n, count, spread = float(len(z)), seen.sum(axis=0).astype(np.float64), np.ones(z.shape[1])

        def mean(r: FloatArray) -> FloatArray:
            return np.where(seen, r, 0.0).sum(axis=0) / np.maximum(count, 1)

        for _ in range(3 if self.gain else 1):
            r = z / spread - expected if self.gain else z - expected
            left = np.where(seen, r - mean(r), 0.0) * (spread if self.gain else 1.0)
            weight = np.maximum(count - 1, 0) + SPREAD_PEOPLE
            own = ((left**2).sum(axis=0) + SPREAD_PEOPLE * self.residual) / weight
            spread = np.sqrt(own / np.maximum(self.residual, 1e-300))
        r = z / spread - expected if self.gain else z - expected
        error2 = self.residual / np.maximum(count, 1e-9)
        shift = mean(r) * self.between / np.maximum(self.between + error2, 1e-300)
        vectors, values = np.empty((0, z.shape[1])), np.empty(0)
        if self.root.size and n > 2:
            white = (np.where(seen, r - mean(r), 0.0) / (1.0 if self.gain else spread)) @ self.unroot
            vectors, values = _directions(white, np.ones(len(r)), n, self.mixing)
        return replace(
            self,
            shift=np.vstack([self.shift, shift]),
            error=np.vstack([self.error, np.sqrt(error2)]),
            spread=np.vstack([self.spread, spread]),
            people=np.append(self.people, n if len(values) else 0.0),
            vectors=np.vstack([self.vectors, vectors]),
            values=np.append(self.values, values),
            start=np.append(self.start, self.start[-1] + len(values)),
            bend=self.bend.with_site(),
        )

    def _residual(self, z: FloatArray, expected: FloatArray, site: int) -> FloatArray:
        """Return what is left of a row beside trend and shift, in the pool's spread."""
        if self.gain:
            return z / self.spread[site] - expected - self.shift[site]
        return (z - expected - self.shift[site]) / self.spread[site]

    def _directions(self, site: int) -> tuple[FloatArray, FloatArray]:
        part = slice(self.start[site], self.start[site + 1])
        return self.vectors[part], self.values[part]

    def _rest(self, site: int) -> float:
        """Variance in the directions in which a site has nobody."""
        n = self.people[site] if self.start[site + 1] > self.start[site] else 0.0
        return float(self.mixing / (n + self.mixing)) if np.isfinite(self.mixing) else 1.0

    def _turn(self, r: FloatArray, site: int, power: float) -> FloatArray:
        """Multiply residuals by a power of the site's covariance relative to the pool's."""
        vectors, values = self._directions(site)
        rest = self._rest(site)
        if not len(values):
            return r
        white = r @ self.unroot
        turned = rest**power * white + ((white @ vectors.T) * (values**power - rest**power)) @ vectors
        return turned @ self.root


def fit_site_model(
    z: FloatArray,
    design: Design,
    *,
    mixing: float | None = None,
    curvature: float | None = None,
    gain: bool | None = None,
    bending: bool | None = None,
) -> SiteModel:
    """Fit the closed form to standardised features; ``None``: shrinkage chosen on held-out people.

    The trend is the straightest whose held-out squared error is hardly above the best; whether sites stretch
    it is what foretells held-out people better; sites bend where held-out people show the same skewness; the
    mixing is the strongest that they can bear.
    """
    trend = fit_trend(design.c, design.weight)
    basis, bends = trend(design.c), trend.bends
    extra = _beside(design.extra, basis, design.weight)
    basis, bends = np.hstack([basis, extra]), np.append(bends, np.zeros(extra.shape[1], dtype=bool))
    if curvature is None:
        curvature = _choose_curvature(z, design, basis, bends)
    if gain is None:
        gain = _choose_gain(z, design, basis, bends, curvature)
    fitted = _fit_mean(z, design, basis, bends, curvature, design.everybody, gain=gain)
    people = _people(design)
    shift = fitted.solution[: design.n_sites]
    free = max(people.sum() - len(fitted.solution), 1.0)
    error = np.sqrt(np.outer(fitted.inverse, fitted.noise * people.sum() / free))
    centre = people @ shift / people.sum()
    between, shift = _shrink_shifts(shift - centre, error)
    residuals = _residuals(z, design, basis, fitted)
    bend = fit_bend(residuals, design.site, design.weight, design.fold, design.n_sites, bending)
    residuals = _straight(residuals, design, bend)
    model = SiteModel(
        trend=trend,
        coefficients=fitted.solution[design.n_sites :][: len(trend.mean)],
        centre=centre,
        shift=shift,
        error=error,
        spread=fitted.spread,
        people=people,
        between=between,
        residual=fitted.variance,
        root=np.empty((0, 0)),
        unroot=np.empty((0, 0)),
        vectors=np.empty((0, z.shape[1])),
        values=np.empty(0),
        start=np.zeros(design.n_sites + 1, dtype=np.intp),
        mixing=np.inf,
        curvature=curvature,
        gain=gain,
        bend=bend,
    )
    return _with_mixing(model, residuals, design, mixing)


def _straight(residuals: FloatArray, design: Design, bend: Bend) -> FloatArray:
    if not bend.amount.any():
        return residuals
    result = residuals.copy()
    for s, rows in enumerate(site_rows(design.site, design.n_sites)):
        result[rows] = bend.straighten(residuals[rows], s)
    return result


def _beside(extra: FloatArray, basis: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the target's columns without what the trend explains: that belongs to the trend."""
    if not extra.shape[1] or not basis.shape[1]:
        return extra
    w = np.sqrt(weight)[:, None]
    left = extra - basis @ np.linalg.lstsq(basis * w, extra * w, rcond=None)[0]
    result: FloatArray = left[:, left.std(axis=0) > 1e-6 * extra.std(axis=0)]
    return result


@dataclass(frozen=True, eq=False)
class _Mean:
    """A regression on sites and trend, with the sites' spreads.

    ``stretch`` is what sites were taken to stretch the trend by, ``None`` for nothing; ``squares`` are sums
    of the squares of what is left, (sites, p).
    """

    solution: FloatArray
    inverse: FloatArray  # its diagonal, (sites,)
    stretch: FloatArray | None
    spread: FloatArray
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

    def _mean_square(self, spread: FloatArray) -> FloatArray:
        mean: FloatArray = (self.squares / spread**2).sum(axis=0) / self.people.sum()
        return mean


def _fit_mean(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    bends: NDArray[np.bool_],
    curvature: float,
    rows: IntArray,
    *,
    gain: bool,
) -> _Mean:
    """Fit shifts, trend and spreads; with a gain in turns, since a spread then stretches the trend too."""
    people, spread = _people(design, rows), np.ones((design.n_sites, z.shape[1]))
    for turn in range(4 if gain else 1):
        stretch = spread if turn else None
        solution, inverse = _normal(z, design, basis, bends, rows, stretch).solve(curvature)
        squares = np.zeros((design.n_sites, z.shape[1]))
        for some, missed in _missed(z, design, basis, solution, stretch, rows):
            squares += site_sums(missed**2, design.site[some], design.n_sites, design.weight[some])
        spread = _spreads(squares, people)
    return _Mean(solution, inverse, stretch, spread, squares, people)


def _missed(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    solution: FloatArray,
    stretch: FloatArray | None,
    rows: IntArray,
) -> Iterator[tuple[IntArray, FloatArray]]:
    """Give rows and what sites and trend do not foretell of them, some rows at a time."""
    for part in pieces(len(rows), z.shape[1]):
        some = rows[part]
        site = design.site[some]
        told = basis[some] @ solution[design.n_sites :]
        told += solution[site]
        if stretch is not None:
            told *= stretch[site]
        yield some, z[some] - told


def _residuals(z: FloatArray, design: Design, basis: FloatArray, mean: _Mean) -> FloatArray:
    """Return what is left of all rows, in the pool's spread."""
    result = np.empty_like(z)
    for some, missed in _missed(z, design, basis, mean.solution, mean.stretch, design.everybody):
        result[some] = missed / mean.spread[design.site[some]]
    return result


def _choose_gain(
    z: FloatArray, design: Design, basis: FloatArray, bends: NDArray[np.bool_], curvature: float
) -> bool:
    """Say whether held-out people are foretold better if sites stretch the trend with the people.

    By squared error: a likelihood prefers the gain wherever sites differ in spread, as the regression then
    weighs them well, and on fcon1000 paid with the age (docs/experiments.md).
    """
    if design.n_sites < 2 or not basis.shape[1] or int(design.fold.max()) < 1:
        return False
    cost = {True: 0.0, False: 0.0}
    for fit, held in design.folds():
        for gain in cost:
            mean = _fit_mean(z, design, basis, bends, curvature, fit, gain=gain)
            stretch = mean.spread if gain else None
            for some, missed in _missed(z, design, basis, mean.solution, stretch, held):
                cost[gain] += float(design.weight[some] @ (missed**2).sum(axis=1))
    return cost[True] < cost[False]


def find_atoms(x: FloatArray) -> FloatArray:
    """Return for each feature the value that many people share, NaN where there is none.

    Such a value (no lesion, volume 0) says "nothing here", not a measurement: moved by its site's shift it
    would become a different number at each site, from which anybody could tell the site. It is kept.
    """
    atoms = np.full(x.shape[1], np.nan)
    ordered = np.sort(x, axis=0)
    length = max(int(np.ceil(ATOM_KEPT * len(x))), 5)
    if len(x) < length:
        return atoms
    # A value with a share of people fills a run of the sorted column, so its ends are equal.
    runs = ordered[length - 1 :] == ordered[: len(ordered) - length + 1]
    for k in np.flatnonzero(runs.any(axis=0)):
        values, counts = np.unique(ordered[:, k], return_counts=True)
        most, next_most = np.sort(np.append(counts, 0))[[-1, -2]]
        # Rounded numbers repeat too, but then their neighbours do so as often.
        if most >= ATOM_STANDS_OUT * next_most:
            atoms[k] = values[counts.argmax()]
    return atoms


def _with_mixing(model: SiteModel, residuals: FloatArray, design: Design, mixing: float | None) -> SiteModel:
    """Add the sites' covariances, relative to the pooled one."""
    n_sites, p = model.shift.shape
    if n_sites < 2 or p < 2 or p > WIDEST_MIXING or mixing == np.inf:
        return model
    root, unroot = _roots(residuals, design.weight)
    white = residuals @ unroot
    if mixing is None:
        mixing = _choose_mixing(white, design)
    if not np.isfinite(mixing):
        return model
    vectors, values = [], []
    for s, rows in enumerate(site_rows(design.site, n_sites)):
        v, d = _directions(white[rows], design.weight[rows], model.people[s], mixing)
        vectors.append(v)
        values.append(d)
    return replace(
        model,
        root=root,
        unroot=unroot,
        vectors=np.vstack(vectors),
        values=np.concatenate(values),
        start=np.concatenate([[0], np.cumsum([len(d) for d in values])]).astype(np.intp),
        mixing=float(mixing),
    )


def _roots(residuals: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the square root and its inverse of the residuals' covariance, shrunk to its diagonal."""
    from sklearn.covariance import ledoit_wolf_shrinkage

    covariance = gram(residuals, residuals, weight) / weight.sum()
    spread = np.sqrt(np.maximum(np.diag(covariance), 1e-12))
    alpha = max(float(ledoit_wolf_shrinkage(residuals / spread, assume_centered=True)), 0.02)
    correlation = covariance / np.outer(spread, spread)
    correlation = (1 - alpha) * correlation + alpha * np.eye(len(spread))
    values, vectors = np.linalg.eigh(correlation)
    values = np.maximum(values, 1e-6)
    # Not symmetric in the features' own units, but each is the other's inverse, which is all that is needed.
    root = (vectors * np.sqrt(values)) @ vectors.T * spread
    unroot = ((vectors / np.sqrt(values)) @ vectors.T) / spread[:, None]
    return root, unroot


def _directions(
    white: FloatArray, weight: FloatArray, people: float, mixing: float
) -> tuple[FloatArray, FloatArray]:
    """Return a site's principal directions in whitened residuals and their shrunk variances."""
    rows = white * np.sqrt(weight)[:, None]
    # The smaller of the two Gram matrices: people by people, or features by features.
    if len(rows) < rows.shape[1]:
        own, left = np.linalg.eigh(rows @ rows.T)
        kept = own > 1e-12 * max(own.max(initial=0.0), 1e-300)
        vectors = (rows.T @ left[:, kept] / np.sqrt(own[kept])).T
    else:
        own, right = np.linalg.eigh(rows.T @ rows)
        kept = own > 1e-12 * max(own.max(initial=0.0), 1e-300)
        vectors = right.T[kept]
    share = people / (people + mixing)
    return vectors, share * own[kept] / max(people, 1e-12) + (1 - share)


def _choose_mixing(white: FloatArray, design: Design) -> float:
    """Return the least weight of the pool that costs held-out people next to nothing.

    The cost is ‖Σ_s(k) − Σ_held‖², up to a constant, summed over sites: the least k within a margin of the
    best removes as much of the site as the people at hand can bear (docs/experiments.md).
    """
    candidates = np.array([*MIXINGS, np.inf])
    total = np.zeros(len(candidates))
    width = white.shape[1]
    for own in site_rows(design.site, design.n_sites):
        rows, weight, fold = white[own], design.weight[own], design.fold[own]
        rows *= np.sqrt(weight)[:, None]
        for k in range(int(design.fold.max()) + 1):
            fit, held = rows[fold != k], rows[fold == k]
            people, judges = weight[fold != k].sum(), weight[fold == k].sum()
            if people < 2 or not judges:
                continue
            size, square, across = _traces(fit, held)
            share = people / (people + candidates)
            rest = 1 - share
            length = share**2 * square / people**2 + 2 * share * rest * size / people + rest**2 * width
            total += judges * length - 2 * (share * across / people + rest * (held**2).sum())
    best = total.min()
    if not total.any():
        return float(np.inf)  # nobody to judge by
    return next(
        k for k, cost in zip(candidates.tolist(), total, strict=True) if cost <= best + MARGIN * abs(best)
    )


def _traces(a: FloatArray, b: FloatArray) -> tuple[float, float, float]:
    """Return tr(AᵀA), tr((AᵀA)²) and tr(AᵀA BᵀB), by whichever Gram matrices are smaller."""
    if len(a) < a.shape[1]:
        return float((a**2).sum()), float(((a @ a.T) ** 2).sum()), float(((a @ b.T) ** 2).sum())
    gram = a.T @ a
    return float(np.trace(gram)), float((gram**2).sum()), float((gram * (b.T @ b)).sum())


def _gaussian(
    white: FloatArray, vectors: FloatArray, values: FloatArray, *, rest: float
) -> tuple[FloatArray, float]:
    """Return squared lengths under a covariance of few directions, and its log determinant."""
    along = (white @ vectors.T) ** 2
    apart = np.maximum((white**2).sum(axis=1) - along.sum(axis=1), 0.0)
    determinant = np.log(values).sum() + (white.shape[1] - len(values)) * np.log(rest)
    return along @ (1 / values) + apart / rest, float(determinant)


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
        some = rows[part]
        site, w, columns = design.site[some], design.weight[some], basis[some]
        y = z[some] if stretch is None else z[some] / stretch[site]
        weighted = columns * w[:, None]
        across += site_sums(columns, site, n_sites, w)
        sums += site_sums(y, site, n_sites, w)
        inner += weighted.T @ columns
        products += weighted.T @ y
    return _Normal(_people(design, rows), across, sums, inner, products, bends)


def _choose_curvature(z: FloatArray, design: Design, basis: FloatArray, bends: NDArray[np.bool_]) -> float:
    """Return the largest penalty whose held-out squared error is hardly above the best."""
    if not bends.any() or int(design.fold.max()) < 1:
        return CURVATURES[-1]
    total = np.zeros(len(CURVATURES))
    for fit, held in design.folds():
        normal = _normal(z, design, basis, bends, fit)
        for k, curvature in enumerate(CURVATURES):
            solution, _ = normal.solve(curvature)
            for some, missed in _missed(z, design, basis, solution, None, held):
                total[k] += float(design.weight[some] @ (missed**2).sum(axis=1))
    return max(c for c, cost in zip(CURVATURES, total, strict=True) if cost <= PARSIMONY * total.min())


def _shrink_shifts(shift: FloatArray, error: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the variance of true shifts and the shifts shrunk by how uncertain they are."""
    if len(shift) < 2:
        return np.zeros(shift.shape[1]), np.zeros_like(shift)
    # DerSimonian and Laird's estimate, as for a meta-analysis of sites.
    weight = 1 / np.maximum(error**2, 1e-12)
    total = weight.sum(axis=0)
    spread = (weight * (shift - (weight * shift).sum(axis=0) / total) ** 2).sum(axis=0)
    between = np.maximum(spread - (len(shift) - 1), 0) / (total - (weight**2).sum(axis=0) / total)
    # Few sites tell little about one feature; all features together tell more.
    between = (len(shift) * between + PRIOR_SITES * between.mean()) / (len(shift) + PRIOR_SITES)
    return between, shift * between / np.maximum(between + error**2, 1e-12)


def _spreads(squares: FloatArray, people: FloatArray) -> FloatArray:
    """Return each site's spread relative to the pool, shrunk towards 1; their mean over people is 1.

    ``squares`` are each site's sums of squared residuals, (sites, p).
    """
    variance = squares.sum(axis=0) / people.sum()
    own = (squares + SPREAD_PEOPLE * variance) / (people[:, None] + SPREAD_PEOPLE)
    still = variance <= 1e-18
    spread = np.where(still, 1.0, np.sqrt(own / np.where(still, 1.0, variance)))
    result: FloatArray = spread / (people @ spread / people.sum())
    return result


def _people(design: Design, rows: IntArray | None = None) -> FloatArray:
    """Return how many people, not rows, each site has."""
    site, weight = (design.site, design.weight) if rows is None else (design.site[rows], design.weight[rows])
    return np.bincount(site, weights=weight, minlength=design.n_sites).astype(np.float64)
