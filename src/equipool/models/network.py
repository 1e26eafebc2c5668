"""What a site does to people jointly and in curves: a network on the sphere, on top of the closed form.

Stage one. Whoever is freed of shift, spread, bends and mixing has scores along the factors in which people
differ most; with a plane for each covariate they make a point ℓ of a sphere on which covariates act by
rotation: ℓ(c + t) = ρ(t) ℓ(c), exactly. Stage two. A network on ℓ, whose hidden units all sites share and
whose last layer each site has for itself, learns what the rest of a person is expected to be; what one site's
answer differs from all sites' is the site's doing and is taken out, so that given ℓ nothing depends on the
site. How much of it is taken out is chosen on held-out people, and is nothing where they show nothing.

The change never touches the scores themselves, so ℓ is the same before and after: an additive coupling, which
can be undone exactly and leaves volumes, and with them likelihoods, as they are. People with scores of 0 are
not changed at any age: the mean person belongs to the closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equipool.models.design import Design
from equipool.models.mixing import WIDEST_MIXING
from equipool.models.pieces import gram, pieces, site_rows
from equipool.models.seeding import seed_for

__all__ = ["SiteNetwork", "fit_network", "no_network"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

SCORES = 4  # factors at most
FEATURES = 6  # fewer leave nothing beside the scores
FEW = 25  # people; smaller sites show nothing of this kind
ENOUGH = 10_000  # rows to learn from
HIDDEN = 24
STEPS, RATE = 200, 1e-2
RIDGE = 100.0  # people's worth of a site that does nothing
AMOUNTS = np.array([0.1, 0.25, 0.5, 0.75, 1.0])
SURE = 2.0  # standard errors by which held-out people must show it


@dataclass(frozen=True, eq=False)
class SiteNetwork:
    """The sphere, the hidden units and the sites' last layers.

    Attributes
    ----------
    middle, reach
        (K,): the covariates' mid-range and half of their range, which is a quarter of a turn.
    scores
        (p, q): own @ scores are a person's scores, at a variance of 1.
    weights, bias
        (n, H) and (H,): of the hidden units on the sphere of R^n.
    heads
        (sites, H, p): what each site differs from all in, the chosen share of it; off the scores.
    """

    middle: FloatArray
    reach: FloatArray
    scores: FloatArray
    weights: FloatArray
    bias: FloatArray
    heads: FloatArray

    @property
    def active(self) -> bool:
        """Whether anything is taken out."""
        return self.heads.shape[1] > 0

    def latent(self, own: FloatArray, c: FloatArray) -> FloatArray:
        """Return people as points of the sphere, (rows, n)."""
        return _on_sphere(own @ self.scores, c, self.middle, self.reach)

    def part(self, own: FloatArray, c: FloatArray, site: int) -> FloatArray:
        """Return what a site does to its people, (rows, p)."""
        return self._hidden(own, c) @ self.heads[site]

    def with_site(self) -> SiteNetwork:
        """Return the same with one more site, which does nothing."""
        nothing = np.zeros((1, *self.heads.shape[1:]))
        return replace(self, heads=np.concatenate([self.heads, nothing]))

    def _hidden(self, own: FloatArray, c: FloatArray) -> FloatArray:
        here, mean = (self.latent(rows, c) @ self.weights + self.bias for rows in (own, np.zeros_like(own)))
        result: FloatArray = np.tanh(here) - np.tanh(mean)
        return result


def no_network(n_sites: int, p: int) -> SiteNetwork:
    """Return what does nothing."""
    none = np.empty(0)
    return SiteNetwork(none, none, np.empty((p, 0)), np.empty((1, 0)), none, np.empty((n_sites, 0, p)))


def learners(design: Design, p: int) -> IntArray:
    """Return the rows to learn from: of sites with enough people, and no more than are enough; or none."""
    large = design.people >= FEW
    if large.sum() < 2 or design.n_folds < 2 or not FEATURES <= p <= WIDEST_MIXING:
        return np.empty(0, dtype=np.intp)
    rows = np.flatnonzero(large[design.site])
    return rows if len(rows) <= ENOUGH else np.sort(np.random.default_rng(0).permutation(rows)[:ENOUGH])


def fit_network(
    account: Callable[[IntArray | None], FloatArray],
    design: Design,
    *,
    wanted: bool | None = None,
    seed: int = 0,
) -> tuple[SiteNetwork, float]:
    """Fit the network to what is the own of :func:`learners`; return it with the share that is taken out.

    ``account`` gives everybody's own, (rows, p), by what was learned of covariances from some rows, or from
    all. ``wanted=None``: the share that foretells held-out people best, nothing where that is not sure.
    """
    own = account(None)
    p = own.shape[1]
    with _one_thread():
        amount = _choose(account, design.thirds, wanted, seed)
        if not amount:
            return no_network(design.n_sites, p), 0.0
        sphere = _Sphere.of(own, design.c, design.weight)
        weights, bias, _, heads = _train(_Data.of(own, design, design.everybody, sphere), seed)
    heads = amount * heads * sphere.deviation
    return SiteNetwork(sphere.middle, sphere.reach, sphere.scores, weights, bias, heads), amount


def _on_sphere(scores: FloatArray, c: FloatArray, middle: FloatArray, reach: FloatArray) -> FloatArray:
    """Return (cos, sin) of each covariate's angle beside half the scores, at length 1.

    Beyond the range of the people learned from, the nearest of them is what there is to go by.
    """
    angle = np.clip((c - middle) / reach, -1, 1) * (np.pi / 2)
    planes = [np.cos(angle), np.sin(angle)] if c.shape[1] else [np.ones((len(scores), 1))]
    point = np.hstack([*planes, scores / 2])
    result: FloatArray = point / np.linalg.norm(point, axis=1, keepdims=True)
    return result


@dataclass(frozen=True, eq=False)
class _Sphere:
    """Stage one: the factors in which people differ most, and the covariates' range."""

    middle: FloatArray
    reach: FloatArray
    deviation: FloatArray
    axes: FloatArray  # (p, q), orthonormal, in units of the features' deviation
    scores: FloatArray

    @classmethod
    def of(cls, own: FloatArray, c: FloatArray, weight: FloatArray) -> _Sphere:
        covariance = gram(own, own, weight) / weight.sum()
        deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-12))
        values, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
        values, vectors = values[::-1], vectors[:, ::-1]
        # Beyond the largest that chance gives (Marchenko and Pastur), and at least one.
        chance = (1 + np.sqrt(len(values) / weight.sum())) ** 2
        q = int(np.clip((values > 1.2 * chance).sum(), 1, SCORES))
        axes = vectors[:, :q]
        low, high = c.min(axis=0), c.max(axis=0)
        reach = np.where(high > low, (high - low) / 2, 1.0)
        scores = axes / np.sqrt(values[:q]) / deviation[:, None]
        return cls((low + high) / 2, reach, deviation, axes, scores)


@dataclass(frozen=True, eq=False)
class _Data:
    """What stage two learns from: points of the sphere, what is beside the scores, sites and weights."""

    points: FloatArray
    means: FloatArray  # the points of people with scores of 0
    goal: FloatArray
    site: IntArray
    weight: FloatArray
    axes: FloatArray
    n_sites: int

    @classmethod
    def of(cls, own: FloatArray, design: Design, rows: IntArray, sphere: _Sphere) -> _Data:
        c, scores = design.c[rows], own[rows] @ sphere.scores
        points, means = (
            _on_sphere(one, c, sphere.middle, sphere.reach) for one in (scores, np.zeros_like(scores))
        )
        goal = own[rows] / sphere.deviation
        goal -= (goal @ sphere.axes) @ sphere.axes.T
        return cls(points, means, goal, design.site[rows], design.weight[rows], sphere.axes, design.n_sites)


def _choose(
    account: Callable[[IntArray | None], FloatArray],
    design: Design,
    wanted: bool | None,
    seed: int,
) -> float:
    """Return the share of the network whose removal leaves least of held-out people unexplained.

    Counted by held-out parts of sites, as features that go together are not so many observations.
    """
    gains: list[FloatArray] = []
    for fit, held in design.folds():
        own = account(fit)
        sphere = _Sphere.of(own[fit], design.c[fit], design.weight[fit])
        learned, judges = (_Data.of(own, design, some, sphere) for some in (fit, held))
        gains += _held_out_gains(learned, judges, seed)
        if wanted is None and np.sum(gains, axis=0).max(initial=0.0) <= 0:
            return 0.0
    parts = np.array(gains)
    best = int(parts.sum(axis=0).argmax())
    error = parts[:, best].std(ddof=1) * np.sqrt(len(parts))
    sure = parts[:, best].sum() > SURE * error
    return float(AMOUNTS[best]) if wanted or sure else 0.0


def _held_out_gains(fit: _Data, held: _Data, seed: int) -> list[FloatArray]:
    """Return for each site how much less of its held-out people is unexplained, by amount."""
    weights, bias, shared, heads = _train(fit, seed)
    gains = []
    for s, rows in enumerate(site_rows(held.site, held.n_sites)):
        gain = np.zeros(len(AMOUNTS))
        for part in pieces(len(rows), held.goal.shape[1]):
            some = rows[part]
            hidden = np.tanh(held.points[some] @ weights + bias) - np.tanh(held.means[some] @ weights + bias)
            left, own = held.goal[some] - hidden @ shared, hidden @ heads[s]
            w = held.weight[some]
            across, square = w @ (left * own).sum(axis=1), w @ (own**2).sum(axis=1)
            gain += 2 * AMOUNTS * across - AMOUNTS**2 * square
        gains += [gain] if len(rows) else []
    return gains


def _train(data: _Data, seed: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return hidden weights and bias, the last layer that all share, and what each site adds, off the scores.

    Least squares by Adam over all rows at once; sites' additions cost as many people's worth as RIDGE says
    and add up to nothing over people.
    """
    import torch

    rows = np.argsort(data.site, kind="stable")
    sizes = np.bincount(data.site, minlength=data.n_sites).tolist()

    def tensor(values: FloatArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[rows], dtype=np.float32))

    points, means, goal, weight = (tensor(v) for v in (data.points, data.means, data.goal, data.weight))
    share = torch.tensor(sizes, dtype=torch.float32)
    share = (share / share.sum())[:, None, None]
    generator = torch.Generator().manual_seed(seed_for(seed, "site network") % 2**63)
    hidden = torch.randn(points.shape[1], HIDDEN, generator=generator).requires_grad_()
    bias = torch.randn(HIDDEN, generator=generator).requires_grad_()
    shared = torch.zeros(HIDDEN, goal.shape[1], requires_grad=True)
    heads = torch.zeros(data.n_sites, HIDDEN, goal.shape[1], requires_grad=True)
    adam = torch.optim.Adam([hidden, bias, shared, heads], lr=RATE)
    for _ in range(STEPS):
        units = torch.tanh(points @ hidden + bias) - torch.tanh(means @ hidden + bias)
        beside = heads - (share * heads).sum(dim=0)
        told = torch.cat([part @ head for part, head in zip(units.split(sizes), beside, strict=True)])
        missed = (weight * (goal - units @ shared - told).square().sum(dim=1)).sum()
        loss = (missed + RIDGE * (heads.square().sum() + 0.1 * shared.square().sum())) / goal.numel()
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
    with torch.no_grad():
        beside = heads - (share * heads).sum(dim=0)
        found = [one.double().numpy() for one in (hidden, bias, shared, beside)]
    off = np.eye(len(data.axes)) - data.axes @ data.axes.T
    return found[0], found[1], found[2] @ off, found[3] @ off


@contextmanager
def _one_thread() -> Iterator[None]:
    """Train on one thread: these matrices are too small for more, and the same bits come out anywhere."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
