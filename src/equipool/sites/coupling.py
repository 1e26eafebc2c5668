"""What sites do to features jointly and in curves: an additive coupling on the latent sphere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipool.randomness import seed_for
from equipool.sites.design import MAX_ROWS, MIN_PARTICIPANTS, Design, standard_deviation, winsorised
from equipool.sites.effect import Context, SiteEffect, array, choose
from equipool.sites.passes import gram

__all__ = ["Coupling"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the network, the simplest first
MAX_SCORES = 4  # factors in which participants differ most; fewer than that many + 2 features leave no rest
MAX_FEATURES = 500  # beyond, training would take minutes
HIDDEN, STEPS, RATE = 24, 200, 1e-2  # units; steps and rate of Adam, after which the loss hardly falls
RIDGE = 100.0  # equivalent participants of a site that does nothing

_LOCK = Lock()  # the number of threads belongs to the whole process


@dataclass(frozen=True, eq=False)
class Coupling(SiteEffect):
    r"""An additive coupling: a site changes features as a function of a few scores, which it leaves alone.

    The scores of a participant along the factors in which participants differ most make, with a plane for
    each covariate, a point :math:`\ell` of a sphere on which the covariates act by rotation,
    :math:`\ell(c + t) = \rho(t)\,\ell(c)`. A network :math:`f_s` on :math:`\ell`, with hidden units that all
    sites share and a last layer for each site, predicts what differs between sites in the rest of the
    residual:

    .. math:: T_s(m + e) = m + e + a\,f_s(\ell(e, c)), \qquad f_s \perp \text{the scores},

    so that :math:`\ell` is the same before and after: where no residual is winsorised, the map has an exact
    inverse and keeps volumes. The mean participant (scores of 0) is not moved at any age. The share
    :math:`a` is chosen by the likelihood of held-out participants.
    """

    name: ClassVar[str] = "coupling"

    share: float = field(metadata={"least": 0.0, "most": 1.0})  # a
    middle: FloatArray = array("planes")  # of each covariate's range
    reach: FloatArray = array("planes", positive=True)  # half the range, which is a quarter of a turn
    scores: FloatArray = array("features", "scores")  # residuals @ scores have a variance of 1
    weights: FloatArray = array("latent", "hidden")  # of the hidden units
    bias: FloatArray = array("hidden")
    heads: FloatArray = array("heads", "hidden", "features")  # a f_s of the hidden units
    head_of: IntArray = array("sites", integer=True)  # which head is a site's; −1: none
    deviation: FloatArray = array("features")  # of residuals

    @classmethod
    def identity(cls, n_sites: int, n_features: int) -> Self:
        """Return sites that do nothing."""
        none, head_of = np.empty(0), np.full(n_sites, -1, dtype=np.intp)
        scores, weights = np.empty((n_features, 0)), np.empty((1, 0))
        heads = np.empty((0, 0, n_features))
        return cls(0.0, none, none, scores, weights, none, heads, head_of, np.ones(n_features))

    @property
    def is_identity(self) -> bool:
        """Whether no site does anything."""
        return not len(self.heads)

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, sites with heads that are not there, and weights of another sphere."""
        latent = max(2 * len(self.middle), 1) + self.scores.shape[1]
        if not -1 <= self.head_of.min() <= self.head_of.max() < max(len(self.heads), 1):
            raise ValueError("head_of")
        if not self.is_identity and len(self.weights) != latent:
            raise ValueError("weights")

    @classmethod
    def fit(cls, residuals: FloatArray, design: Design, *, wanted: bool | None = None, seed: int = 0) -> Self:
        """Train the network on residuals (rows, features); ``None``: if held-out ones confirm it."""
        identity = cls.identity(design.n_sites, residuals.shape[1])
        rows = _training_rows(design, residuals.shape[1])
        if wanted is False or not len(rows):
            return identity
        design, residuals = design.only(rows), residuals[rows]
        deviation = standard_deviation(residuals, design.weight)
        residuals = winsorised(residuals, deviation)
        with _one_thread():
            share = _chosen_share(residuals, design, wanted, seed)
            if not share:
                return identity
            sphere = _Sphere.of(residuals, design)
            weights, bias, _, heads = _train(sphere, residuals, design, seed)
        sites = np.unique(design.site)
        head_of = identity.head_of.copy()
        head_of[sites] = np.arange(len(sites))
        heads *= share * np.where(sphere.alive, sphere.deviation, 0.0)
        ranges = sphere.middle, sphere.reach
        return cls(share, *ranges, sphere.scores, weights, bias, heads, head_of, deviation)

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
        """Return a f_s(ℓ), (rows, features)."""
        result = np.zeros_like(rows)
        if self.is_identity:
            return result
        residuals = winsorised(rows - at.predicted, self.deviation)
        points, means = (self.latent(each, at.covariates) for each in (residuals, np.zeros_like(residuals)))
        units = _units(points, means, self.weights, self.bias)
        for s in np.unique(at.site[self.head_of[at.site] >= 0]):
            result[at.site == s] = units[at.site == s] @ self.heads[self.head_of[s]]
        return result


def _training_rows(design: Design, p: int) -> IntArray:
    """Return the rows of sites with enough participants, at most MAX_ROWS; none where that makes no sense."""
    if design.n_folds < 2 or not MAX_SCORES + 2 <= p <= MAX_FEATURES:
        return np.empty(0, dtype=np.intp)
    rows = np.arange(len(design.site))
    if len(rows) > MAX_ROWS:
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:MAX_ROWS])
    large = design.only(rows).n_participants >= MIN_PARTICIPANTS
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


def _units(points: FloatArray, means: FloatArray, weights: FloatArray, bias: FloatArray) -> FloatArray:
    """Return the hidden units less those of the mean participant of the same age, (rows, hidden)."""
    units: FloatArray = np.tanh(points @ weights + bias) - np.tanh(means @ weights + bias)
    return units


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
    def of(cls, residuals: FloatArray, design: Design) -> _Sphere:
        covariance = gram(residuals, residuals, design.weight) / design.weight.sum()
        alive = np.diag(covariance) > 1e-12
        deviation = np.sqrt(np.where(alive, np.diag(covariance), 1.0))
        values, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
        values, vectors = values[::-1], vectors[:, ::-1]
        # Beyond the largest eigenvalue that chance makes (Marchenko and Pastur), and at least one.
        chance = (1 + np.sqrt(len(values) / design.weight.sum())) ** 2
        q = int(np.clip((values > 1.2 * chance).sum(), 1, MAX_SCORES))
        # An eigenvector's sign is arbitrary; without one the order of the features would decide.
        axes = vectors[:, :q] * np.where((vectors[:, :q] ** 3).sum(axis=0) < 0, -1.0, 1.0)
        low, high = np.quantile(design.covariates, [0.01, 0.99], axis=0)  # one wrong age must not decide
        reach = np.where(high > low, (high - low) / 2, 1.0)
        scores = axes / np.sqrt(np.maximum(values[:q], 1e-12)) / deviation[:, None]
        return cls((low + high) / 2, reach, deviation, axes, scores, alive)

    def data(self, residuals: FloatArray, c: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return points of participants and of mean ones of their age, and the rest beside the scores."""
        scores = residuals @ self.scores
        points, means = (_on_sphere(each, c, self.middle, self.reach) for each in (scores, 0 * scores))
        rest = np.where(self.alive, residuals / self.deviation, 0.0)
        return points, means, self.off_scores(rest)

    def off_scores(self, values: FloatArray) -> FloatArray:
        """Return values (..., p) in units of the features' deviation without their part along the scores."""
        return values - (values @ self.axes) @ self.axes.T


def _chosen_share(residuals: FloatArray, design: Design, wanted: bool | None, seed: int) -> float:
    """Return the share by the Gaussian log-likelihood of held-out participants of each site."""
    parts: list[FloatArray] = []
    for train, held in design.folds():
        parts += _held_out_gains(residuals, design, train, held, seed)
        if wanted is None and np.sum(parts, axis=0).max(initial=0.0) <= 0:
            return 0.0
    gains = np.array(parts).T
    return SHARES[1 + int(gains[1:].sum(axis=1).argmax()) if wanted else choose(gains)]


def _held_out_gains(
    residuals: FloatArray, design: Design, train: IntArray, held: IntArray, seed: int
) -> list[FloatArray]:
    """Return for each site by how much the log-likelihood of its held-out participants rises, by share."""
    fitted, judged = design.only(train), design.only(held)
    sphere = _Sphere.of(residuals[train], fitted)
    weights, bias, shared, heads = _train(sphere, residuals[train], fitted, seed)
    points, means, goal = sphere.data(residuals[held], judged.covariates)
    units = _units(points, means, weights, bias)
    missed, shares, gains = goal - units @ shared, np.array(SHARES), []
    for head, s in zip(heads, np.unique(fitted.site), strict=True):
        rows = np.flatnonzero(judged.site == s)
        part, w = units[rows] @ head, judged.weight[rows]
        across, square = w @ (missed[rows] * part).sum(axis=1), w @ (part**2).sum(axis=1)
        gains += [shares * across - shares**2 / 2 * square] if len(rows) else []
    return gains


def _train(
    sphere: _Sphere, residuals: FloatArray, design: Design, seed: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return hidden weights and bias, the last layer that sites share, and what each site adds to it.

    The latter two are off the scores. Least squares by Adam over all rows at once; sites' additions are
    penalised by RIDGE and add up to nothing over participants.
    """
    import torch

    def tensor(values: Any) -> torch.Tensor:
        # In float32 the order of rows would show in the fourth digit.
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    order = np.argsort(design.site, kind="stable")
    sizes = np.bincount(design.site)
    sites, sizes = np.flatnonzero(sizes), sizes[sizes > 0].tolist()
    data = sphere.data(residuals[order], design.covariates[order])
    points, means, goal, weight = (tensor(values) for values in (*data, design.weight[order]))
    share = tensor(design.n_participants[sites] / design.weight.sum())[:, None, None]
    rng, width = np.random.default_rng(seed_for(seed, "site network")), goal.shape[1]
    hidden = tensor(rng.standard_normal((points.shape[1], HIDDEN))).requires_grad_()
    bias = tensor(rng.standard_normal(HIDDEN)).requires_grad_()
    shared = tensor(np.zeros((HIDDEN, width))).requires_grad_()
    heads = tensor(np.zeros((len(sites), HIDDEN, width))).requires_grad_()
    adam = torch.optim.Adam([hidden, bias, shared, heads], lr=RATE)
    for _ in range(STEPS):
        units = torch.tanh(points @ hidden + bias) - torch.tanh(means @ hidden + bias)
        differences = heads - (share * heads).sum(dim=0)
        parts = zip(units.split(sizes), differences, strict=True)
        missed = goal - units @ shared - torch.cat([part @ head for part, head in parts])
        loss = (weight * missed.square().sum(dim=1)).sum()
        loss = (loss + RIDGE * (heads.square().sum() + 0.1 * shared.square().sum())) / goal.numel()
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
    with torch.no_grad():
        differences = heads - (share * heads).sum(dim=0)
    weights, offset, last, added = (one.detach().numpy() for one in (hidden, bias, shared, differences))
    return weights, offset, sphere.off_scores(last), sphere.off_scores(added)


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
