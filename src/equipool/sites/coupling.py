r"""What sites do to features jointly and in curves: an additive coupling on the latent sphere.

The scores of a participant along the factors in which participants differ most make, with a plane for each
covariate, a point :math:`\ell` of a sphere on which the covariates act by rotation, :math:`\ell(c + t) =
\rho(t)\,\ell(c)`. A network :math:`f_s` on :math:`\ell`, with hidden units that all sites share and a last layer
for each site, predicts what differs between sites of the rest of the residual:

.. math:: T_s(m + e) = m + e + a\,f_s(\ell(e, c)), \qquad f_s \perp \text{the scores},

so that :math:`\ell` is the same before and after: the map can be undone exactly and keeps volumes. The mean
participant (scores of 0) is not moved at any age. The share a is chosen on held-out participants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipool.randomness import seed_for
from equipool.sites.design import Design
from equipool.sites.effect import Context, SiteEffect, array, choose
from equipool.sites.passes import gram, site_rows

__all__ = ["Coupling"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the network, the simplest first
MAX_SCORES = 4
FEATURES = (6, 500)  # fewer leave nothing beside the scores; of more the last layers would outgrow the table
MIN_PARTICIPANTS = 25  # of a site
MAX_ROWS = 10_000  # to train on
CLIP_AT = 4.0  # standard deviations, as for the covariance
HIDDEN, STEPS, RATE = 24, 200, 1e-2
RIDGE = 100.0  # equivalent participants of a site that does nothing

_LOCK = Lock()  # the number of threads belongs to the whole process


@dataclass(frozen=True, eq=False)
class Coupling(SiteEffect):
    """The map above.

    Attributes
    ----------
    middle, reach
        (covariates,): mid-range and half-range of each covariate, which is a quarter of a turn.
    scores
        (features, scores): residuals @ scores have a variance of 1.
    weights, bias
        (latent, hidden) and (hidden,) of the hidden units.
    heads
        (heads, hidden, features): what sites differ in from their mean, times the share, off the scores.
    head_of
        (sites,): which head is a site's; −1 for sites without one.
    deviation
        (features,): standard deviation of residuals.
    share
        a.
    """

    name: ClassVar[str] = "coupling"

    middle: FloatArray = array("covariates")
    reach: FloatArray = array("covariates", positive=True)
    scores: FloatArray = array("features", "scores")
    weights: FloatArray = array("latent", "hidden")
    bias: FloatArray = array("hidden")
    heads: FloatArray = array("heads", "hidden", "features")
    head_of: IntArray = array("sites", integer=True)
    deviation: FloatArray = array("features")
    share: float

    @classmethod
    def identity(cls, n_sites: int, n_features: int) -> Self:
        """Return sites that do nothing."""
        none, head_of = np.empty(0), np.full(n_sites, -1, dtype=np.intp)
        scores, weights = np.empty((n_features, 0)), np.empty((1, 0))
        heads = np.empty((0, 0, n_features))
        return cls(none, none, scores, weights, none, heads, head_of, np.ones(n_features), 0.0)

    @property
    def is_identity(self) -> bool:
        """Whether no site does anything."""
        return not len(self.heads)

    @classmethod
    def fit(cls, residuals: FloatArray, design: Design, *, wanted: bool | None = None, seed: int = 0) -> Self:
        """Train the network on residuals (rows, features); ``wanted=None``: if it helps held-out participants."""
        identity = cls.identity(design.n_sites, residuals.shape[1])
        rows = _training_rows(design, residuals.shape[1])
        if wanted is False or not len(rows):
            return identity
        design, residuals = design.only(rows), residuals[rows]
        deviation = np.sqrt(np.maximum(design.weight @ residuals**2 / design.weight.sum(), 1e-12))
        residuals = np.clip(residuals, -CLIP_AT * deviation, CLIP_AT * deviation)
        with _one_thread():
            share = _chosen_share(residuals, design, wanted, seed)
            if not share:
                return identity
            sphere = _Sphere.of(residuals, design.covariates, design.weight)
            weights, bias, _, heads = _train(_Data.of(residuals, design, sphere), seed)
        sites = np.unique(design.site)
        head_of = identity.head_of.copy()
        head_of[sites] = np.arange(len(sites))
        heads = share * heads * np.where(sphere.alive, sphere.deviation, 0.0)
        ranges = sphere.middle, sphere.reach
        return cls(*ranges, sphere.scores, weights, bias, heads, head_of, deviation, share)

    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return rows − a f_s(ℓ)."""
        return rows - self._part(rows, at)

    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return rows + a f_s(ℓ)."""
        return rows + self._part(rows, at)

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Return the coupling with one more site, which does nothing."""
        return replace(self, head_of=np.append(self.head_of, -1))

    def latent(self, residuals: FloatArray, covariates: FloatArray) -> FloatArray:
        """Return participants as points ℓ of the sphere, (rows, latent)."""
        return _on_sphere(residuals @ self.scores, covariates, self.middle, self.reach)

    def _part(self, rows: FloatArray, at: Context) -> FloatArray:
        result = np.zeros_like(rows)
        if self.is_identity:
            return result
        residuals = np.clip(rows - at.predicted, -CLIP_AT * self.deviation, CLIP_AT * self.deviation)
        units = np.tanh(self.latent(residuals, at.covariates) @ self.weights + self.bias)
        units -= np.tanh(self.latent(np.zeros_like(residuals), at.covariates) @ self.weights + self.bias)
        for s in np.unique(at.site):
            if self.head_of[s] >= 0:
                some = at.site == s
                result[some] = units[some] @ self.heads[self.head_of[s]]
        return result


def _training_rows(design: Design, p: int) -> IntArray:
    """Return the rows of sites with enough participants, at most MAX_ROWS; none where that makes no sense."""
    if design.n_folds < 2 or not FEATURES[0] <= p <= FEATURES[1]:
        return np.empty(0, dtype=np.intp)
    rows = np.arange(len(design.site))
    if len(rows) > MAX_ROWS:
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:MAX_ROWS])
    large = np.bincount(design.site[rows], design.weight[rows], design.n_sites) >= MIN_PARTICIPANTS
    return rows[large[design.site[rows]]] if large.sum() > 1 else rows[:0]


def _on_sphere(scores: FloatArray, c: FloatArray, middle: FloatArray, reach: FloatArray) -> FloatArray:
    """Return (cos, sin) of each covariate's angle beside half the scores, at length 1.

    Beyond the range of the training participants the angle stays that of the range's end.
    """
    angle = np.clip((c - middle) / reach, -1, 1) * (np.pi / 2)
    planes = np.hstack([np.cos(angle), np.sin(angle)]) if c.shape[1] else np.ones((len(scores), 1))
    point = np.hstack([planes / np.sqrt(max(c.shape[1], 1)), scores / 2])
    result: FloatArray = point / np.linalg.norm(point, axis=1, keepdims=True)
    return result


@dataclass(frozen=True, eq=False)
class _Sphere:
    """The factors in which participants differ most, and the covariates' range."""

    middle: FloatArray
    reach: FloatArray
    deviation: FloatArray
    axes: FloatArray  # (p, q), orthonormal, in units of the features' deviation
    scores: FloatArray
    alive: NDArray[np.bool_]  # features that vary beside site and trend

    @classmethod
    def of(cls, residuals: FloatArray, c: FloatArray, weight: FloatArray) -> _Sphere:
        covariance = gram(residuals, residuals, weight) / weight.sum()
        alive = np.diag(covariance) > 1e-12
        deviation = np.sqrt(np.where(alive, np.diag(covariance), 1.0))
        values, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
        values, vectors = values[::-1], vectors[:, ::-1]
        # Beyond the largest eigenvalue that chance makes (Marchenko and Pastur), and at least one.
        chance = (1 + np.sqrt(len(values) / weight.sum())) ** 2
        q = int(np.clip((values > 1.2 * chance).sum(), 1, MAX_SCORES))
        # An eigenvector's sign is arbitrary; without one the order of the features would decide.
        axes = vectors[:, :q] * np.where((vectors[:, :q] ** 3).sum(axis=0) < 0, -1.0, 1.0)
        low, high = np.quantile(c, [0.01, 0.99], axis=0)  # one wrong age must not decide the range
        reach = np.where(high > low, (high - low) / 2, 1.0)
        scores = axes / np.sqrt(np.maximum(values[:q], 1e-12)) / deviation[:, None]
        return cls((low + high) / 2, reach, deviation, axes, scores, alive)


@dataclass(frozen=True, eq=False)
class _Data:
    """Points of the sphere, and what is beside the scores: the goal of the network."""

    points: FloatArray
    means: FloatArray  # the points of scores of 0
    goal: FloatArray
    design: Design
    axes: FloatArray

    @classmethod
    def of(cls, residuals: FloatArray, design: Design, sphere: _Sphere) -> _Data:
        scores = residuals @ sphere.scores
        points, means = (
            _on_sphere(each, design.covariates, sphere.middle, sphere.reach)
            for each in (scores, np.zeros_like(scores))
        )
        goal = np.where(sphere.alive, residuals / sphere.deviation, 0.0)
        goal -= (goal @ sphere.axes) @ sphere.axes.T
        return cls(points, means, goal, design, sphere.axes)


def _chosen_share(residuals: FloatArray, design: Design, wanted: bool | None, seed: int) -> float:
    """Return the share by the Gaussian log-likelihood of held-out participants of each site."""
    parts: list[FloatArray] = []
    for train, held in design.folds():
        sphere = _Sphere.of(residuals[train], design.covariates[train], design.weight[train])
        fitted, judged = (_Data.of(residuals[rows], design.only(rows), sphere) for rows in (train, held))
        parts += _held_out_gains(fitted, judged, seed)
        if wanted is None and np.sum(parts, axis=0).max(initial=0.0) <= 0:
            return 0.0
    gains = np.array(parts).T
    return SHARES[1 + int(gains[1:].sum(axis=1).argmax()) if wanted else choose(gains)]


def _held_out_gains(fitted: _Data, judged: _Data, seed: int) -> list[FloatArray]:
    """Return for each site how much more likely its held-out participants are, by share."""
    weights, bias, shared, heads = _train(fitted, seed)
    head_of = {int(s): k for k, s in enumerate(np.unique(fitted.design.site))}
    shares, gains = np.array(SHARES), []
    for s, rows in enumerate(site_rows(judged.design.site, judged.design.n_sites)):
        if s not in head_of or not len(rows):
            continue
        units = np.tanh(judged.points[rows] @ weights + bias) - np.tanh(judged.means[rows] @ weights + bias)
        missed, part = judged.goal[rows] - units @ shared, units @ heads[head_of[s]]
        w = judged.design.weight[rows]
        gains.append(shares * (w @ (missed * part).sum(axis=1)) - shares**2 / 2 * (w @ (part**2).sum(axis=1)))
    return gains


def _train(data: _Data, seed: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return hidden weights and bias, the last layer that sites share, and what each site adds to it.

    The latter two are off the scores. Least squares by Adam over all rows at once; sites' additions cost as many
    equivalent participants as RIDGE says and add up to nothing over participants.
    """
    import torch

    site, weights = data.design.site, data.design.weight
    order = np.argsort(site, kind="stable")
    sites, sizes = np.unique(site, return_counts=True)

    def tensor(values: Any) -> torch.Tensor:
        # In float32 the order of rows would show in the fourth digit.
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    points, means, goal, weight = (tensor(v[order]) for v in (data.points, data.means, data.goal, weights))
    share = tensor(np.bincount(site, weights=weights)[sites] / weights.sum())[:, None, None]
    rng, width = np.random.default_rng(seed_for(seed, "site network")), goal.shape[1]
    hidden = tensor(rng.standard_normal((points.shape[1], HIDDEN))).requires_grad_()
    bias = tensor(rng.standard_normal(HIDDEN)).requires_grad_()
    shared = tensor(np.zeros((HIDDEN, width))).requires_grad_()
    heads = tensor(np.zeros((len(sites), HIDDEN, width))).requires_grad_()
    adam = torch.optim.Adam([hidden, bias, shared, heads], lr=RATE)
    for _ in range(STEPS):
        units = torch.tanh(points @ hidden + bias) - torch.tanh(means @ hidden + bias)
        differences = heads - (share * heads).sum(dim=0)
        parts = zip(units.split(sizes.tolist()), differences, strict=True)
        missed = goal - units @ shared - torch.cat([part @ head for part, head in parts])
        loss = (weight * missed.square().sum(dim=1)).sum()
        loss = (loss + RIDGE * (heads.square().sum() + 0.1 * shared.square().sum())) / goal.numel()
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
    with torch.no_grad():
        differences = heads - (share * heads).sum(dim=0)
    hidden_, bias_, *layers = (one.detach().numpy() for one in (hidden, bias, shared, differences))
    last, added = (layer - (layer @ data.axes) @ data.axes.T for layer in layers)
    return hidden_, bias_, last, added


@contextmanager
def _one_thread() -> Iterator[None]:
    """Train on one thread, for these matrices are too small for more, whatever torch is set to outside."""
    import torch

    with _LOCK:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            torch.set_num_threads(threads)
