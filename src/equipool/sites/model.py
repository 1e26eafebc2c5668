"""The model of :class:`SiteHarmonizer`: a trend that all sites share, and what each site does to it.

A feature is trend(covariates) + shift of the site + what is the person's own, stretched and mixed by the
site, and bent. The trend and the shifts come from one penalised regression, the stretch from the residuals'
spread, the mixing from their covariance, the bending, where held-out people show any, from curves by maximum
likelihood; each is shrunk towards the pool as far as few people demand. That much is deterministic, and made
of sums over people. On top, where held-out people show that sites act on features jointly and in curves,
stands a network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from equipool.groups.trend import Trend, fit_trend
from equipool.sites.composition import Composition, fit_composition, no_composition
from equipool.sites.coupling import ENOUGH, SiteNetwork, fit_network, learners, no_network
from equipool.sites.covariance import WIDEST_MIXING, choose_mixing, directions, roots, squared_length
from equipool.sites.design import Design
from equipool.sites.passes import pieces, site_rows
from equipool.sites.shift_scale import (
    FAR,
    TAMING,
    Regression,
    beside,
    choose_curvature,
    choose_gain,
    count_far,
    farthest,
    fit_regression,
    residuals,
    tamed,
)
from equipool.sites.warp import Affine, Bend, fit_bend

__all__ = ["SiteModel", "fit_site_model"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


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
    far
        (sites, p): people who were so far from the others that they were learned from as if nearer.
    between, spread_people
        (p,): variance of the true shifts between sites; people's worth of the pool's spread that a site's own
        is mixed with.
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
        What sites do to features that is not affine; everything above is of features without it.
    composition, kept
        Whom sites scanned; (sites, p): the part of their differences that is their people's and stays.
    network, amount
        What sites do to people jointly and in curves, after everything else, and the share of it that is
        taken out; 0 for none.
    """

    trend: Trend
    coefficients: FloatArray
    centre: FloatArray
    shift: FloatArray
    error: FloatArray
    spread: FloatArray
    people: FloatArray
    far: FloatArray
    between: FloatArray
    spread_people: FloatArray
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
    composition: Composition
    kept: FloatArray
    network: SiteNetwork
    amount: float

    def expected(self, c: FloatArray) -> FloatArray:
        """Return the trend at covariates (rows, K)."""
        return self.centre + self.trend(c) @ self.coefficients

    def own(self, z: FloatArray, c: FloatArray, site: int, expected: FloatArray | None = None) -> FloatArray:
        """Return what is the person's own in rows of one site: residuals as the pool has them.

        ``expected`` is the trend at c, where it is known already.
        """
        expected = self.expected(c) if expected is None else expected
        r = self._residual(self.bend.straighten(z, site), expected, site)
        near = self._near(r)
        return self._alone(self._turn(near, site, -0.5), c, site, -1.0) + (r - near)

    def measured(
        self, own: FloatArray, c: FloatArray, site: int, expected: FloatArray | None = None
    ) -> FloatArray:
        """Return what a site would have measured of people: the inverse of :meth:`own`."""
        expected = self.expected(c) if expected is None else expected
        near = self._near(own)
        own = self._turn(self._alone(near, c, site, 1.0), site, 0.5) + (own - near)
        level = expected + self.shift[site]
        straight = (level + own) * self.spread[site] if self.gain else level + own * self.spread[site]
        return self.bend.bend(straight, site)

    @property
    def usual(self) -> FloatArray:
        """What is the own of a site's mean person, (sites, p): not 0 where a site scans other people."""
        return self.kept if self.gain else self.kept / self.spread

    @cached_property
    def effects(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return what each site does around people of mean covariates, each (sites, p).

        Its shift beside the mean of all sites, the shift's standard error and its spread, all in features as
        the site shows them. The error is that before shrinkage: an interval that leans on a prior of three
        sites would be too narrow.
        """
        centre, nobody = self.centre[None], np.zeros((1, self.trend.knots.shape[0]))
        level = np.vstack([self.measured(0 * centre, nobody, s, centre) for s in range(len(self.shift))])
        slope = np.vstack([self.bend.slope(level[[s]], s) for s in range(len(self.shift))])
        spread = self.spread / slope
        error = self.error * (spread if self.gain else 1 / slope)
        return level - self.people @ level / self.people.sum(), error, spread

    def log_likelihood(self, z: FloatArray, c: FloatArray) -> FloatArray:
        """Return how likely each site would have measured each row, (rows, sites), up to a constant."""
        result, expected = np.empty((len(z), len(self.shift))), self.expected(c)
        for s in range(len(self.shift)):
            r = self._residual(self.bend.straighten(z, s), expected, s)
            if self.network.active:
                # What the network takes out, as the site's covariance has it; volumes stay as they are.
                own = self._turn(self._near(r), s, -0.5)
                r = r - self._turn(self.network.part(own, c, s), s, 0.5)
            white = r @ self.unroot if self.root.size else r / np.sqrt(self.residual)
            squares, determinant = squared_length(white, *self._directions(s), rest=self._rest(s))
            result[:, s] = -0.5 * (squares + determinant) - np.log(self.spread[s]).sum()
            if self.bend.active:
                result[:, s] += np.log(self.bend.slope(z, s)).sum(axis=1)
        return result

    def with_site(self, z: FloatArray, expected: FloatArray) -> SiteModel:
        """Return a model with one more site, estimated from its own rows with everything else as it is.

        Cells that are NaN were not measured and tell nothing.
        """
        seen = ~np.isnan(z)
        n, count, spread = float(len(z)), seen.sum(axis=0).astype(np.float64), np.ones(z.shape[1])

        def mean(r: FloatArray) -> FloatArray:
            return np.where(seen, r, 0.0).sum(axis=0) / np.maximum(count, 1)

        near, far = _near(z - expected, self.residual)
        z = expected + near

        for _ in range(3 if self.gain else 1):
            r = z / spread - expected if self.gain else z - expected
            left = np.where(seen, r - mean(r), 0.0) * (spread if self.gain else 1.0)
            weight = np.maximum(count - 1, 0) + self.spread_people
            own = ((left**2).sum(axis=0) + self.spread_people * self.residual) / weight
            spread = np.sqrt(own / np.maximum(self.residual, 1e-300))
        r = z / spread - expected if self.gain else z - expected
        error2 = self.residual / np.maximum(count, 1e-9)
        kept = self.composition.kept(mean(r)[None], np.sqrt(error2)[None], np.array([1 / max(n, 1.0)]))[0]
        shift = (mean(r) - kept) * self.between / np.maximum(self.between + error2, 1e-300)
        vectors, values = np.empty((0, z.shape[1])), np.empty(0)
        if self.root.size and n > 2:
            white = (np.where(seen, r - mean(r), 0.0) / (1.0 if self.gain else spread)) @ self.unroot
            vectors, values = directions(white, np.ones(len(r)), n, self.mixing)
        return replace(
            self,
            shift=np.vstack([self.shift, shift]),
            error=np.vstack([self.error, np.sqrt(error2)]),
            spread=np.vstack([self.spread, spread]),
            people=np.append(self.people, n if len(values) else 0.0),
            far=np.vstack([self.far, far]),
            vectors=np.vstack([self.vectors, vectors]),
            values=np.append(self.values, values),
            start=np.append(self.start, self.start[-1] + len(values)),
            bend=self.bend.with_site(),
            kept=np.vstack([self.kept, kept]),
            network=self.network.with_site(),
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

    def _near(self, r: FloatArray) -> FloatArray:
        """Return residuals without how far they are: a failure tells nothing of the person's other features.

        Where features meet, these are taken instead, and what is beyond them is added again.
        """
        limit = FAR * np.sqrt(self.residual)
        return np.clip(r, -limit, limit)

    def _alone(self, r: FloatArray, c: FloatArray, site: int, sign: float) -> FloatArray:
        """Take what the network finds a site to do out of what is people's own (−1), or put it in (1)."""
        return r + sign * self.network.part(r, c, site) if self.network.active else r

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
    network: bool | None = None,
    keep_people: bool = True,
    seed: int = 0,
) -> SiteModel:
    """Fit the model to standardised features; ``None``: shrinkage chosen on held-out people.

    The trend is the straightest whose held-out squared error is hardly above the best; whether sites stretch
    it is what foretells held-out people better; sites bend where that makes held-out people likelier; the
    mixing is the strongest that they can bear; of the network as much as foretells them best.
    """
    trend = fit_trend(design.c, design.weight)
    basis, bends = trend(design.c), trend.bends
    extra = beside(design.extra, basis, design.weight)
    basis, bends = np.hstack([basis, extra]), np.append(bends, np.zeros(extra.shape[1], dtype=bool))

    whole, z = z, tamed(z, design, basis, bends)
    far = count_far(whole, z, design)

    def regression(z: FloatArray, gain: bool | None) -> tuple[Regression, float]:
        k = choose_curvature(z, design, basis, bends) if curvature is None else curvature
        gain = choose_gain(z, design, basis, bends, k) if gain is None else gain
        return fit_regression(z, design, basis, bends, k, design.everybody, gain=gain), k

    fitted, stiff = regression(z, gain)
    bend = _fit_bend(z, design, basis, bends, stiff, gain=fitted.gain, wanted=bending)
    left = residuals(z, design, basis, fitted)
    composition, kept = no_composition(z.shape[1]), np.zeros_like(fitted.shift)
    if keep_people:
        composition, kept = fit_composition(fitted, left, design)
    # A new site has no curves: what its shift is to be shrunk by is known before straightening.
    between, shift = fitted.shifts(kept)
    if bend.active:
        z = _straight(z, design, bend)
        fitted, stiff = regression(z, gain)
        left = residuals(z, design, basis, fitted)
        bent = np.isin(np.arange(z.shape[1]), bend.columns)
        # Straightening takes all of the shift out, and with it what is to stay.
        shift = fitted.shifts(np.where(bent, 0.0, kept))[1] - np.where(bent, kept, 0.0)
    model = SiteModel(
        trend=trend,
        coefficients=fitted.slopes[: len(trend.mean)],
        centre=fitted.centre,
        shift=shift,
        error=fitted.error,
        spread=fitted.spread,
        people=fitted.people,
        far=far,
        between=between,
        spread_people=fitted.spread_people,
        residual=fitted.variance,
        root=np.empty((0, 0)),
        unroot=np.empty((0, 0)),
        vectors=np.empty((0, z.shape[1])),
        values=np.empty(0),
        start=np.zeros(design.n_sites + 1, dtype=np.intp),
        mixing=np.inf,
        curvature=stiff,
        gain=fitted.gain,
        bend=bend,
        composition=composition,
        kept=kept,
        network=no_network(design.n_sites, z.shape[1]),
        amount=0.0,
    )
    model = _with_mixing(model, left, design, mixing)
    return _with_network(model, left, design, network, seed)


def _near(own: FloatArray, variance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return a new site's values, those far from its median brought nearer, and how many these are.

    NaN stays.
    """
    seen = ~np.isnan(own)
    middle = np.nanmedian(np.where(seen.any(axis=0), own, 0.0), axis=0)
    limit = np.full(own.shape[1], np.inf)
    for _ in range(TAMING):
        length = np.where(seen, np.minimum(np.abs(own - middle), limit), 0.0).sum(axis=0)
        limit = farthest(length, seen.sum(axis=0), np.sqrt(variance * 2 / np.pi))
    far = seen & (np.abs(own - middle) > limit)
    return middle + np.clip(own - middle, -limit, limit), far.sum(axis=0).astype(np.float64)


def _fit_bend(
    z: FloatArray,
    design: Design,
    basis: FloatArray,
    bends: NDArray[np.bool_],
    curvature: float,
    *,
    gain: bool,
    wanted: bool | None,
) -> Bend:
    """Fit what sites bend on top of a gain; where none was chosen, curves must surpass its absence too."""
    penalty = np.where(bends, curvature, 1e-9)

    def account(rows: IntArray) -> list[Affine]:
        fits = [fit_regression(z, design, basis, bends, curvature, rows, gain=gain) for gain in gains]
        return [
            Affine(fit.spread, fit.shifts()[1], *(() if fit.gain else (fit.slopes, fit.centre)))
            for fit in fits
        ]

    gains = (True,) if gain else (True, False)
    return fit_bend(z, design, basis, penalty, account, wanted=wanted)


def _straight(z: FloatArray, design: Design, bend: Bend) -> FloatArray:
    result = np.empty_like(z)
    for s, rows in enumerate(site_rows(design.site, design.n_sites)):
        for part in pieces(len(rows), z.shape[1]):
            result[rows[part]] = bend.straighten(z[rows[part]], s)
    return result


def _with_network(
    model: SiteModel, residuals: FloatArray, design: Design, wanted: bool | None, seed: int
) -> SiteModel:
    """Add what sites do to people jointly and in curves, beside everything else."""
    rows = learners(design, residuals.shape[1])
    if wanted is False or not len(rows):
        return model
    sampled, design, residuals = len(residuals) > ENOUGH, design.only(rows), residuals[rows]

    def own(fit: IntArray | None = None) -> FloatArray:
        learned = model
        if fit is not None and model.root.size and not sampled:
            # Mixing learned from everybody has seen those held out, and hides from them what it leaves.
            learned = _mixed(model, residuals @ model.unroot, design, fit)
        result = np.empty_like(residuals)
        for s, some in enumerate(site_rows(design.site, design.n_sites)):
            for part in pieces(len(some), result.shape[1]):
                near = learned._near(residuals[some[part]] + model.usual[s])
                result[some[part]] = learned._turn(near, s, -0.5)
        return result

    found = fit_network(own, design, wanted=wanted, seed=seed)
    return model if found is None else replace(model, network=found[0], amount=found[1])


def _with_mixing(model: SiteModel, residuals: FloatArray, design: Design, mixing: float | None) -> SiteModel:
    """Add the sites' covariances, relative to the pooled one."""
    n_sites, p = model.shift.shape
    if n_sites < 2 or p < 2 or p > WIDEST_MIXING or mixing == np.inf:
        return model
    root, unroot = roots(residuals, design.weight)
    white = residuals @ unroot
    if mixing is None:
        mixing = choose_mixing(white, design)
    if not np.isfinite(mixing):
        return model
    return _mixed(replace(model, root=root, unroot=unroot, mixing=float(mixing)), white, design)


def _mixed(model: SiteModel, white: FloatArray, design: Design, rows: IntArray | None = None) -> SiteModel:
    """Learn the sites' covariances from whitened residuals of some rows, with the mixing that there is."""
    rows, white = (design.everybody, white) if rows is None else (rows, white[rows])
    site, weight, people = design.site[rows], design.weight[rows], design.people_of(rows)
    found = [
        directions(white[own], weight[own], people[s], model.mixing)
        for s, own in enumerate(site_rows(site, design.n_sites))
    ]
    return replace(
        model,
        people=people,
        vectors=np.vstack([vectors for vectors, _ in found]),
        values=np.concatenate([values for _, values in found]),
        start=np.concatenate([[0], np.cumsum([len(values) for _, values in found])]).astype(np.intp),
    )
