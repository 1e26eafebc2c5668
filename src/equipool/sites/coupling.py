"""What a site does to people jointly and in curves: a network on the sphere, on top of the closed form.

Stage one. Whoever is freed of shift, spread, bends and mixing has scores along the factors in which people
differ most; with a plane for each covariate they make a point ℓ of a sphere on which covariates act by
rotation: ℓ(c + t) = ρ(t) ℓ(c), within the range of the people learned from. Stage two. A network on ℓ, whose
hidden units all sites share and whose last layer each site has for itself, learns what the rest of a person
is expected to be; what one site's answer differs from all sites' is the site's doing and is taken out, so
that the mean given ℓ depends on the site no more. How much of it is taken out is chosen on held-out people,
and is nothing where they show nothing. (Shifts, spreads and curves have seen these people; the network and
the covariances before it have not.)

The change never touches the scores themselves, so ℓ is the same before and after: an additive coupling, which
can be undone exactly and leaves volumes, and with them likelihoods, as they are. People with scores of 0 are
not changed at any age: the mean person belongs to the closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from equipool.randomness import seed_for
from equipool.sites.design import Design
from equipool.sites.passes import gram, pieces, site_rows

__all__ = ["SiteNetwork", "fit_network", "no_network"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

SCORES = 4  # factors at most
FEATURES = 6  # fewer leave nothing beside the scores
FEW = 25  # people; smaller sites show nothing of this kind
ENOUGH = 10_000  # rows to learn from
WIDEST = 500  # features; beyond, the sites' last layers would outgrow the table
STILL = 1e-6  # deviations of the feature; what varies less beside site and trend is rounding
HIDDEN = 24
STEPS, RATE = 200, 1e-2
RIDGE = 100.0  # people's worth of a site that does nothing
AMOUNTS = np.array([0.1, 0.25, 0.5, 0.75, 1.0])
SURE = 2.0  # standard errors by which held-out people must show it

_LOCK = Lock()  # the number of threads is the whole process's


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
    heads, place
        (L, H, p): what each of L sites differs from all in, the chosen share of it, off the scores; (sites,):
        where a site's stands, −1 for sites with too few people to have one.
    """

    middle: FloatArray
    reach: FloatArray
    scores: FloatArray
    weights: FloatArray
    bias: FloatArray
    heads: FloatArray
    place: IntArray

    @property
    def active(self) -> bool:
        """Whether anything is taken out."""
        return len(self.heads) > 0

    def latent(self, own: FloatArray, c: FloatArray) -> FloatArray:
        """Return people as points of the sphere, (rows, n)."""
        return _on_sphere(own @ self.scores, c, self.middle, self.reach)

    def part(self, own: FloatArray, c: FloatArray, site: int) -> FloatArray:
        """Return what a site does to its people, (rows, p)."""
        head = self.place[site]
        return np.zeros_like(own) if head < 0 else self._hidden(own, c) @ self.heads[head]

    def with_site(self) -> SiteNetwork:
        """Return the same with one more site, which does nothing."""
        return replace(self, place=np.append(self.place, -1))

    def _hidden(self, own: FloatArray, c: FloatArray) -> FloatArray:
        here, mean = (self.latent(rows, c) @ self.weights + self.bias for rows in (own, np.zeros_like(own)))
        result: FloatArray = np.tanh(here) - np.tanh(mean)
        return result


def no_network(n_sites: int, p: int) -> SiteNetwork:
    """Return what does nothing."""
    none, place = np.empty(0), np.full(n_sites, -1, dtype=np.intp)
    return SiteNetwork(none, none, np.empty((p, 0)), np.empty((1, 0)), none, np.empty((0, 0, p)), place)


def learners(design: Design, p: int) -> IntArray:
    """Return the rows to learn from: of sites with enough people, and no more than are enough; or none."""
    if design.n_folds < 2 or not FEATURES <= p <= WIDEST:
        return np.empty(0, dtype=np.intp)
    rows = design.everybody
    if len(rows) > ENOUGH:
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:ENOUGH])
    large = design.people_of(rows) >= FEW
    rows = rows[large[design.site[rows]]]
    return rows if large.sum() > 1 else rows[:0]


def fit_network(
    account: Callable[[IntArray | None], FloatArray],
    design: Design,
    *,
    wanted: bool | None = None,
    seed: int = 0,
) -> tuple[SiteNetwork, float] | None:
    """Fit the network to what is the own of :func:`learners`; return it with the share that is taken out.

    ``account`` gives everybody's own, (rows, p), by what was learned of covariances from some rows, or from
    all. ``wanted=None``: the share that foretells held-out people best, None where that is not sure.
    """
    with _alone():
        amount = _choose(account, design.thirds, wanted, seed)
        if not amount:
            return None
        own = account(None)
        sphere = _Sphere.of(own, design.c, design.weight)
        weights, bias, _, heads = _train(_Data.of(own, design, design.everybody, sphere), seed)
    sites = np.unique(design.site)
    place = np.full(design.n_sites, -1, dtype=np.intp)
    place[sites] = np.arange(len(sites))
    heads = amount * heads * np.where(sphere.alive, sphere.deviation, 0.0)
    return SiteNetwork(sphere.middle, sphere.reach, sphere.scores, weights, bias, heads, place), amount


def _on_sphere(scores: FloatArray, c: FloatArray, middle: FloatArray, reach: FloatArray) -> FloatArray:
    """Return (cos, sin) of each covariate's angle beside half the scores, at length 1.

    Beyond the range of the people learned from, the nearest of them is what there is to go by.
    """
    angle = np.clip((c - middle) / reach, -1, 1) * (np.pi / 2)
    planes = np.hstack([np.cos(angle), np.sin(angle)]) if c.shape[1] else np.ones((len(scores), 1))
    point = np.hstack([planes / np.sqrt(max(c.shape[1], 1)), scores / 2])  # however many covariates
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
    alive: NDArray[np.bool_]  # features of which something is people's own

    @classmethod
    def of(cls, own: FloatArray, c: FloatArray, weight: FloatArray) -> _Sphere:
        covariance = gram(own, own, weight) / weight.sum()
        alive = np.diag(covariance) > STILL**2
        deviation = np.sqrt(np.where(alive, np.diag(covariance), 1.0))
        values, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
        values, vectors = values[::-1], vectors[:, ::-1]
        # Beyond the largest that chance gives (Marchenko and Pastur), and at least one.
        chance = (1 + np.sqrt(len(values) / weight.sum())) ** 2
        q = int(np.clip((values > 1.2 * chance).sum(), 1, SCORES))
        axes = vectors[:, :q]
        # An eigenvector has no sign of its own; without one the order of the features would decide.
        axes = axes * np.where((axes**3).sum(axis=0) < 0, -1.0, 1.0)
        low, high = np.quantile(c, [0.01, 0.99], axis=0)  # one wrong age must not squeeze everybody
        reach = np.where(high > low, (high - low) / 2, 1.0)
        scores = axes / np.sqrt(np.maximum(values[:q], STILL**2)) / deviation[:, None]
        return cls((low + high) / 2, reach, deviation, axes, scores, alive)


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
        goal = np.where(sphere.alive, own[rows] / sphere.deviation, 0.0)
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
    place = dict(zip(np.unique(fit.site).tolist(), heads, strict=True))
    gains = []
    for s, rows in enumerate(site_rows(held.site, held.n_sites)):
        if s not in place:
            continue
        gain = np.zeros(len(AMOUNTS))
        for part in pieces(len(rows), held.goal.shape[1]):
            some = rows[part]
            hidden = np.tanh(held.points[some] @ weights + bias) - np.tanh(held.means[some] @ weights + bias)
            left, own = held.goal[some] - hidden @ shared, hidden @ place[s]
            w = held.weight[some]
            across, square = w @ (left * own).sum(axis=1), w @ (own**2).sum(axis=1)
            gain += 2 * AMOUNTS * across - AMOUNTS**2 * square
        gains += [gain] if len(rows) else []
    return gains


def _train(data: _Data, seed: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return hidden weights and bias, the last layer that all share, and what sites with people add to it.

    The latter two are off the scores. Least squares by Adam over all rows at once; sites' additions cost as
    many people's worth as RIDGE says and add up to nothing over people.
    """
    import torch

    order = np.argsort(data.site, kind="stable")
    sites, sizes = np.unique(data.site, return_counts=True)
    share = np.bincount(data.site, weights=data.weight)[sites] / data.weight.sum()

    def tensor(values: FloatArray) -> torch.Tensor:
        # In float32 the order of rows would show in the fourth digit.
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    points, means, goal, weight = (
        tensor(values[order]) for values in (data.points, data.means, data.goal, data.weight)
    )
    rng = np.random.default_rng(seed_for(seed, "site network"))
    width = goal.shape[1]
    hidden = tensor(rng.standard_normal((points.shape[1], HIDDEN))).requires_grad_()
    bias = tensor(rng.standard_normal(HIDDEN)).requires_grad_()
    shared = tensor(np.zeros((HIDDEN, width))).requires_grad_()
    heads = tensor(np.zeros((len(sites), HIDDEN, width))).requires_grad_()
    people = tensor(share)[:, None, None]
    adam = torch.optim.Adam([hidden, bias, shared, heads], lr=RATE)
    for _ in range(STEPS):
        units = torch.tanh(points @ hidden + bias) - torch.tanh(means @ hidden + bias)
        beside = heads - (people * heads).sum(dim=0)
        told = torch.cat(
            [part @ head for part, head in zip(units.split(sizes.tolist()), beside, strict=True)]
        )
        missed = (weight * (goal - units @ shared - told).square().sum(dim=1)).sum()
        loss = (missed + RIDGE * (heads.square().sum() + 0.1 * shared.square().sum())) / goal.numel()
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
    with torch.no_grad():
        beside = heads - (people * heads).sum(dim=0)
        found = [one.detach().numpy() for one in (hidden, bias, shared, beside)]
    last, own = (layer - (layer @ data.axes) @ data.axes.T for layer in found[2:])
    return found[0], found[1], last, own


@contextmanager
def _alone() -> Iterator[None]:
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
