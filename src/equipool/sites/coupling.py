"""What sites do to features jointly and in curves: an additive coupling on the latent sphere."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np

from equipool.randomness import seed_for
from equipool.sites.design import MAX_FEATURES, TINY, Design, gram, pieces, winsorised
from equipool.sites.effect import Context, FloatArray, IntArray, SiteEffect, array, choose

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the network, the simplest first
MAX_SCORES = 4  # factors in which participants differ most; fewer than that many + 2 features have no rest
HIDDEN = 48  # units, by memory; with 128, R² with the truth is 0 to 0.004 higher (docs/experiments.md)
RANGE = (0.01, 0.99)  # quantiles of a covariate that make its range, so that one wrong age does not decide
RIDGE = 30.0  # equivalent participants of a site that does nothing; 10 and 100 come less near to the truth


@dataclass(frozen=True, eq=False)
class Coupling(SiteEffect):
    r"""An additive coupling: a site changes features as a function of a few scores, which it leaves alone.

    The scores of a participant along the factors in which participants differ most make, with a plane for
    each covariate, a point :math:`\ell` of a sphere on which the covariates act by rotation,
    :math:`\ell(c + t) = \rho(t)\,\ell(c)`. A network :math:`f_s` on :math:`\ell`, with hidden units that all
    sites share and a last layer :math:`H_s` for each site, predicts what differs between sites in the rest of
    the residual:

    .. math:: T_s(m + e) = m + e + a\,f_s(\ell(e, c)), \qquad
              f_s(\ell) = H_s \left[\tanh(V \ell(e, c) + b) - \tanh(V \ell(0, c) + b)\right], \qquad
              f_s \perp \text{the scores},

    so that :math:`\ell` is the same before and after: where no residual is winsorised, the map has an exact
    inverse and keeps volumes. The mean participant (scores of 0) is not moved at any age. :math:`V` and
    :math:`b` are drawn at random, :math:`H_s` is a ridge regression, and the share :math:`a` is chosen by the
    likelihood of held-out participants.
    """

    name: ClassVar[str] = "coupling"
    acts: ClassVar[tuple[str, ...]] = ("heads",)

    share: float = field(metadata={"least": 0.0, "most": 1.0, "neutral": 0.0})  # a
    middle: FloatArray = array("planes")  # of each covariate's range
    reach: FloatArray = array("planes", positive=True)  # half the range, which is a quarter of a turn
    scores: FloatArray = array("features", "scores")  # residuals @ scores have a variance of 1
    weights: FloatArray = array("latent", "hidden")  # V
    bias: FloatArray = array("hidden")  # b
    heads: FloatArray = array("heads", "hidden", "features")  # a H_s
    head_of: IntArray = array("sites", neutral=-1)  # which head is a site's; −1: none
    deviation: FloatArray = array("features", neutral=1.0)  # of residuals

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, sites with heads that are not there, and weights of another sphere."""
        latent = max(2 * len(self.middle), 1) + self.scores.shape[1]
        if not -1 <= self.head_of.min() <= self.head_of.max() < max(len(self.heads), 1):
            raise ValueError("head_of")
        if not self.is_identity and len(self.weights) != latent:
            raise ValueError("weights")

    @classmethod
    def fit(cls, residuals: FloatArray, design: Design, *, wanted: bool | None = None, seed: int = 0) -> Self:
        """Fit the network to residuals (rows, features); ``None``: if held-out participants confirm it."""
        n_sites, p = design.n_sites, residuals.shape[1]
        rows = design.sample()
        if wanted is False or design.n_folds < 2 or not len(rows) or not MAX_SCORES + 2 <= p <= MAX_FEATURES:
            return cls.identity(n_sites, p)
        design, residuals = design.only(rows), residuals[rows]
        deviation = design.deviation(residuals)
        residuals = winsorised(residuals, deviation)
        gains = np.array(list(cls._held_out_gains(residuals, design, seed))).T
        # A network that is asked for has the most likely share above 0; otherwise the one rule decides.
        share = SHARES[1 + int(gains[1:].sum(axis=1).argmax()) if wanted else choose(gains)]
        if not share:
            return cls.identity(n_sites, p)
        whole, _, _ = cls._trained(residuals, design, np.arange(len(rows)), seed)
        return replace(whole, share=share, heads=share * whole.heads, deviation=deviation)

    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return rows − a f_s(ℓ)."""
        return rows - self._part(rows, at)

    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return rows + a f_s(ℓ)."""
        return rows + self._part(rows, at)

    def latent(self, residuals: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return participants as points ℓ of the sphere, (rows, latent).

        (cos, sin) of each covariate's angle beside half the scores, at length 1. Beyond the range of the
        training participants the angle stays that of the range's end.
        """
        k = covariates.shape[1]
        angle = np.clip((covariates - self.middle) / self.reach, -1, 1) * (np.pi / 2)
        planes = np.hstack([np.cos(angle), np.sin(angle)]) if k else np.ones((len(residuals), 1))
        point = np.hstack([planes / np.sqrt(max(k, 1)), residuals @ self.scores / 2])
        return point / np.linalg.norm(point, axis=1, keepdims=True)

    def _part(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return a f_s(ℓ), (rows, features)."""
        result = np.zeros_like(rows)
        if self.is_identity:
            return result
        residuals = np.nan_to_num(winsorised(rows - at.predicted, self.deviation))  # 0 where not measured
        units = self._units(residuals, at.covariates)
        for s in np.unique(at.site[self.head_of[at.site] >= 0]):
            result[at.site == s] = units[at.site == s] @ self.heads[self.head_of[s]]
        return result

    def _units(self, residuals: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return the hidden units less those of the mean participant of the same age, (rows, hidden)."""
        units = np.empty((len(residuals), len(self.bias)))
        for part in pieces(*units.shape):  # larger than a table of few features
            c, e = covariates[part], residuals[part]
            here, mean = (np.tanh(self.latent(one, c) @ self.weights + self.bias) for one in (e, 0 * e))
            units[part] = here - mean
        return units

    @classmethod
    def _trained(
        cls, residuals: FloatArray, design: Design, train: IntArray, seed: int
    ) -> tuple[Self, FloatArray, FloatArray]:
        """Return the coupling of some rows with a share of 1, and of all rows its units and what it explains.

        These are ridge regressions on the units: of the rest of the residuals beside the scores, in standard
        deviations, and of what that misses at each site. Sites' layers add up to 0 over participants.
        """
        fitted, identity = design.only(train), cls.identity(design.n_sites, residuals.shape[1])
        covariance = gram(residuals[train], fitted.weight) / fitted.weight.sum()
        varies = np.diag(covariance) > TINY
        deviation = np.sqrt(np.where(varies, np.diag(covariance), np.inf))
        values, axes = _factors(covariance / np.outer(deviation, deviation), fitted.weight.sum())
        low, high = np.quantile(fitted.covariates, RANGE, axis=0)
        rng = np.random.default_rng(seed_for(seed, "site network"))
        coupling = replace(
            identity,
            middle=(low + high) / 2,
            reach=np.where(high > low, (high - low) / 2, 1.0),
            scores=axes / np.sqrt(values) / deviation[:, None],
            weights=rng.standard_normal((max(2 * len(low), 1) + len(values), HIDDEN)),
            bias=rng.standard_normal(HIDDEN),
            deviation=deviation,
        )
        units, rest = coupling._units(residuals, design.covariates), residuals / deviation
        rest -= (rest @ axes) @ axes.T
        rest -= units @ _ridge(units, rest, design.weight, train)
        sites = np.unique(fitted.site)
        of_sites = [train[fitted.site == s] for s in sites]
        heads = np.stack([_ridge(units, rest, design.weight, rows) for rows in of_sites])
        heads -= np.average(heads, axis=0, weights=fitted.n_participants[sites])
        identity.head_of[sites] = np.arange(len(sites))
        heads *= np.where(varies, deviation, 0.0)
        return replace(coupling, heads=heads, head_of=identity.head_of), units, rest

    @classmethod
    def _held_out_gains(cls, residuals: FloatArray, design: Design, seed: int) -> Iterator[FloatArray]:
        """Yield by how much the log-likelihood of a site's held-out participants rises, (shares,)."""
        shares = np.array(SHARES)
        for train, held in design.folds():
            coupling, units, rest = cls._trained(residuals, design, train, seed)
            for s in np.unique(design.site[held]):
                rows = held[design.site[held] == s]
                part = units[rows] @ coupling.heads[coupling.head_of[s]] / coupling.deviation
                weight = design.weight[rows]
                across, square = weight @ (rest[rows] * part).sum(axis=1), weight @ (part**2).sum(axis=1)
                yield shares * across - shares**2 / 2 * square
            del units, rest  # before those of the next fold


def _factors(correlation: FloatArray, n: float) -> tuple[FloatArray, FloatArray]:
    """Return the largest eigenvalues (q,) and eigenvectors (p, q): those beyond chance, and at least one."""
    values, vectors = np.linalg.eigh(correlation)
    chance = (1 + np.sqrt(len(values) / n)) ** 2  # the largest of independent features: Marchenko and Pastur
    q = int(np.clip((values > chance).sum(), 1, MAX_SCORES))
    values, vectors = np.maximum(values[: -q - 1 : -1], TINY), vectors[:, : -q - 1 : -1]
    # An eigenvector's sign is arbitrary; without one the order of the features would decide.
    return values, vectors * np.where((vectors**3).sum(axis=0) < 0, -1.0, 1.0)


def _ridge(units: FloatArray, goal: FloatArray, weight: FloatArray, rows: IntArray) -> FloatArray:
    """Return the last layer H, (hidden, features), that minimises Σ w (goal − units H)² + RIDGE |H|²."""
    inner, across = RIDGE * np.eye(HIDDEN), np.zeros((HIDDEN, goal.shape[1]))
    for some in (rows[part] for part in pieces(len(rows), HIDDEN)):
        weighted = units[some].T * weight[some]
        inner += weighted @ units[some]
        across += weighted @ goal[some]
    return np.linalg.solve(inner, across).astype(np.float64)
