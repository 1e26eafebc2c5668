"""Scores, each once: predictions, equivariance (ΔEq), difference between sites (M), similarity with truth.

ΔEq and M are the paper's, on rows normalised to [0, 1] (the paper's z̃), with one kernel for all methods. ΔEq
of one covariate is exact in linear time. M, and ΔEq of several covariates, compare all pairs: they are exact
up to ``MOST`` rows, and of more take as many, drawn with a fixed seed in proportion of the sites.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import spearmanr
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from equipool.checks.overlap import omega_squared
from equipool.data import PooledDataset, Volumes
from equipool.exceptions import InputError
from equipool.randomness import seed_for

SCORES_VERSION = 2  # raise it when a score or a classifier changes: kept results are then recomputed

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
Columns = dict[str, list[Any]]

CURVATURE = 0.05  # ridge on squared covariates, so that their trend is straight between sites' ranges
ROUNDING = 1e-9  # a standard deviation that is a smaller share of the mean is none
BLOCK = 2048  # rows at a time: a block of 2048 × 2048 numbers is 32 MiB
MOST = 20_000  # rows whose pairs are compared; beyond, a sample of as many


# -- predictions of a covariate or the target --------------------------------------------------------------


def standardised(estimator: Any) -> Any:
    """Return the estimator behind a standardisation of its features."""
    return make_pipeline(StandardScaler(), estimator)


def ridge() -> Any:
    """Return a ridge regression of standardised features with a cross-validated penalty."""
    return standardised(RidgeCV(np.logspace(0, 4, 9)))


def r2(true: FloatArray, predicted: FloatArray) -> float:
    """R² = 1 − Σ(y − ŷ)² / Σ(y − ȳ)²; NaN where y does not vary."""
    return float(r2_score(true, predicted)) if len(true) > 1 and np.ptp(true) > 0 else float("nan")


def within_sites(x: FloatArray, site: IntArray, *, scaled: bool = True) -> FloatArray:
    """Return x (rows, features) minus its site's mean, over its site's standard deviation; empty cells 0."""
    by_site = pd.DataFrame(x).groupby(site)
    centre, spread = by_site.transform("mean").to_numpy(), by_site.transform("std", ddof=0).to_numpy()
    varies = ~np.isnan(x) & (spread > ROUNDING * np.maximum(np.abs(centre), 1e-300))
    return np.divide(x - centre, spread if scaled else 1.0, out=np.zeros(x.shape), where=varies)


def within_site_r2(
    x: FloatArray, values: FloatArray, site: IntArray, train: IntArray, test: IntArray
) -> float:
    """R² of differences between rows of one site, so that predicting the site is of no use.

    The regression is fitted on such differences too: fitted on all differences, it would attribute to a
    predictable site what differs between sites, and so overrate raw features.
    """
    train_x, test_x, train_y, test_y = (
        within_sites(v[rows], site[rows], scaled=False)
        for v in (x, values[:, None])
        for rows in (train, test)
    )
    return r2(test_y, ridge().fit(train_x, train_y).predict(test_x))


def left_out_site_r2(
    x: FloatArray, values: FloatArray, site: IntArray, train: IntArray, test: IntArray
) -> float:
    """R² where each site in turn is left out of the regression (never of the harmonizer)."""
    predicted = np.empty(len(test))
    for k in np.unique(site[test]):
        others, rows = train[site[train] != k], site[test] == k
        predicted[rows] = ridge().fit(x[others], values[others]).predict(x[test[rows]])
    return r2(values[test], predicted)


def auc(
    true: NDArray[Any], probability: FloatArray, classes: NDArray[Any], site: NDArray[Any] | None = None
) -> float:
    """Area under the ROC curve, averaged over classes where there are more than two; NaN without two classes.

    ``probability`` is (rows, classes). With ``site``, pairs of rows of one site count alone: the mean of the
    sites' areas, weighted by their numbers of pairs.
    """
    groups = [np.arange(len(true))] if site is None else [np.flatnonzero(site == s) for s in np.unique(site)]
    areas = []
    for k in [1] if len(classes) == 2 else range(len(classes)):
        positive = true == classes[k]
        some = [rows for rows in groups if 0 < positive[rows].sum() < len(rows)]
        pairs = [positive[rows].sum() * (~positive[rows]).sum() for rows in some]
        if some:
            each = [roc_auc_score(positive[rows], probability[rows, k]) for rows in some]
            areas.append(np.average(each, weights=pairs))
    return float(np.mean(areas)) if areas else float("nan")


def age_from_tau(tau: Any, age: Any, tau_test: Any, age_test: Any) -> tuple[float, float]:
    """Return R² and rank correlation of the age that a ridge regression predicts from τ."""
    predicted = RidgeCV(np.logspace(-3, 3, 7)).fit(tau, age).predict(tau_test)
    return float(r2_score(age_test, predicted)), float(spearmanr(age_test, predicted).statistic)


def equivariance_of(estimator: Any, X: Any) -> float:
    """Return the largest relative error of Φ(ρ(t)ℓ) = ρ(t)Φ(ℓ) at the latents of X; NaN without a Φ."""
    from equipool.estimators.pooling_estimator import through
    from equipool.groups.testing import equivariance_error

    network = estimator.network_
    if not hasattr(network, "one"):
        return float("nan")
    one, two = network.one, network.two
    with torch.no_grad():
        some = X[:512] if isinstance(X, Volumes) else np.asarray(X)[:512]
        latents = through(one.latent, estimator._scaled(some))
    return equivariance_error(
        lambda z: two.phi(*one.tau.at_reference(z)), one.tau.action, out=two.out, inputs=latents, span=0.25
    )


# -- similarity with features that no site touched ---------------------------------------------------------


def r2_with_clean(x: FloatArray, clean: FloatArray) -> float:
    """Return the mean over features of R² with the clean ones, both centred."""
    return float(r2_score(clean - clean.mean(axis=0), x - x.mean(axis=0)))


# -- ΔEq and M ---------------------------------------------------------------------------------------------


def normalise_rows(z: ArrayLike) -> NDArray[np.float64]:
    """Return z̃ = (z − min z) / (max z − min z), row by row; a row that never varies becomes 0."""
    z = np.asarray(z, dtype=np.float64)
    low = z.min(axis=1, keepdims=True)
    spread = z.max(axis=1, keepdims=True) - low
    return np.divide(z - low, spread, out=np.zeros_like(z), where=spread > 0)


def delta_eq(tau: ArrayLike, covariate: ArrayLike) -> float:
    """ΔEq: the mean over all pairs of ``|c_i − c_j|`` ‖τ̃_i − τ̃_j‖².

    The paper sums over pairs; the mean does not grow with their number. Covariates are scaled to a range of
    1, so that the unit does not matter either. With several, ``|·|`` is the Euclidean length.
    """
    vectors = torch.from_numpy(normalise_rows(tau))
    if len(vectors) < 2:
        raise InputError(f"ΔEq compares pairs; give at least 2 rows. Got {len(vectors)}.")
    c = np.asarray(covariate, dtype=np.float64).reshape(len(vectors), -1)
    ages = torch.from_numpy((c - c.min(axis=0)) / np.where(np.ptp(c, axis=0) > 0, np.ptp(c, axis=0), 1))
    if c.shape[1] == 1:
        total = _one_by_one(vectors, ages[:, 0])
    else:
        some = _sample(np.zeros(len(vectors), dtype=np.intp))
        vectors, ages, total = vectors[some], ages[some], 0.0
        for a, b, times in _blocks(len(vectors)):
            distance = torch.cdist(vectors[a], vectors[b]).square()
            total += times * (torch.cdist(ages[a], ages[b]) * distance).sum().item()
    return total / (len(vectors) * (len(vectors) - 1))


def _one_by_one(vectors: Tensor, age: Tensor) -> float:
    """Return Σ_{i≠j} ``|c_i − c_j|`` ‖v_i − v_j‖² in one pass from the youngest to the oldest.

    There c_j − c_i ≥ 0 for all that came before, and the product of that with s_i + s_j − 2 v_i·v_j, where s
    are squared lengths, needs only sums over these: of 1, c, s, c·s, v and c·v.
    """
    centre = vectors.mean(dim=0)
    before, total = torch.zeros(2, 2 + vectors.shape[1], dtype=vectors.dtype), 0.0
    for rows in torch.argsort(age).split(BLOCK):
        c, v = age[rows].unsqueeze(1), vectors[rows] - centre
        terms = torch.cat([torch.ones_like(c), v.square().sum(dim=1, keepdim=True), v], dim=1)
        sums = torch.stack([terms, c * terms]).cumsum(dim=1) + before.unsqueeze(1)
        moved = c * sums[0] - sums[1]  # Σ_i (c_j − c_i)(1, s_i, v_i)
        total += (terms[:, 1] @ moved[:, 0] + moved[:, 1].sum() - 2 * (v * moved[:, 2:]).sum()).item()
        before = sums[:, -1]
    return 2 * total


def mmd_measure(z: ArrayLike, site: ArrayLike) -> float:
    """M: the squared MMD of equation (7) between sites, averaged over pairs of sites.

    The kernel is exp(−6‖z̃ − z̃'‖²/n): n/6 is the expected squared distance of two points of the unit cube, so
    the width needs no choice. Each row's distance to itself is left out: M is 0 on average where sites do not
    differ, and may come out slightly negative. The V-statistic (:attr:`Discrepancy.biased`) adds about one
    over the rows of the smallest site, more for codes that spread.
    """
    return discrepancy(z, site, draws=0).unbiased


class Discrepancy(NamedTuple):
    """M (:func:`mmd_measure`), its V-statistic, and M where the sites were shuffled: by chance, (draws,)."""

    unbiased: float
    biased: float
    shuffled: FloatArray


def discrepancy(z: ArrayLike, site: ArrayLike, *, draws: int = 50, seed: int = 0) -> Discrepancy:
    """Return M and what it is by chance; the kernel is computed once."""
    names, codes = np.unique(np.asarray(site).astype(str), return_inverse=True)
    if len(names) < 2:
        raise InputError(f"M compares sites; give at least 2. Got {len(names)}.")
    some = _sample(codes)
    rows, member = torch.from_numpy(normalise_rows(np.asarray(z)[some])), codes[some]
    rng = np.random.default_rng(seed_for(seed, "shuffled"))
    members = np.stack([member, *(rng.permutation(member) for _ in range(draws))], axis=1)
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(members)).to(rows.dtype)  # (rows, draws, sites)
    sums = rows.new_zeros(1 + draws, len(names), len(names))  # of the kernel, by the sites of both rows
    for a, b, times in _blocks(len(rows)):
        kernel = torch.exp(-6 / rows.shape[1] * torch.cdist(rows[a], rows[b]).square())
        half = (kernel @ one_hot[b].flatten(1)).unflatten(1, one_hot.shape[1:])
        block = torch.einsum("rds,rdt->dst", one_hot[a], half)
        sums += block if times == 1 else block + block.mT
    sizes = one_hot[:, 0].sum(dim=0)
    diagonal = sums.diagonal(dim1=1, dim2=2)
    # k(z, z) = 1; a site of one row has no pairs.
    within = torch.where(sizes > 1, (diagonal - sizes) / (sizes * (sizes - 1)).clamp(min=1), 1.0)
    between = (sums / torch.outer(sizes, sizes)).sum(dim=(1, 2)) - (diagonal / sizes**2).sum(dim=1)
    pairs = len(names) * (len(names) - 1) / 2
    unbiased, biased = (
        (((len(names) - 1) * same.sum(dim=1) - between) / pairs).numpy()
        for same in (within, diagonal / sizes**2)
    )
    return Discrepancy(float(unbiased[0]), float(biased[0]), unbiased[1:])


def _blocks(rows: int) -> list[tuple[slice, slice, int]]:
    """Return blocks of pairs and how often each counts: pairs (i, j) and (j, i) are the same."""
    parts = [slice(start, start + BLOCK) for start in range(0, rows, BLOCK)]
    return [(a, b, 1 if a is b else 2) for k, a in enumerate(parts) for b in parts[k:]]


def _sample(codes: IntArray) -> IntArray:
    """Return the rows whose pairs are compared: all, or ``MOST``, of each site its share and at least 2."""
    if len(codes) <= MOST:
        return np.arange(len(codes))
    shuffled = np.random.default_rng(0).permutation(len(codes))
    place = pd.Series(shuffled).groupby(codes[shuffled]).cumcount().to_numpy()  # within the site
    share = np.maximum(np.bincount(codes) * MOST // len(codes), 2)
    return np.sort(shuffled[place < share[codes[shuffled]]])


# -- the site's share of each feature's variance -----------------------------------------------------------


def site_shares(pool: PooledDataset, x: FloatArray, rows: Any = slice(None)) -> FloatArray:
    """Return ω² of the site for each feature, (features,): its share of the variance, covariates adjusted.

    With ``rows``, in these rows; the trend of the covariates is still that of all.
    """
    residuals = adjusted(pool, x)[rows]
    varies = residuals.var(axis=0) > 1e-12 * (x[rows] ** 2).mean(axis=0)
    return np.where(varies, omega_squared(residuals, pool.site[rows]), 0.0)


def adjusted(pool: PooledDataset, x: FloatArray) -> FloatArray:
    """Return features at the mean covariates: minus a quadratic trend that all sites share."""
    if not pool.C.shape[1]:
        return x
    c = pool.scaled
    trend = np.hstack([c, c**2])
    trend = trend - trend.mean(axis=0)
    present = np.unique(pool.site)
    design = np.hstack([(pool.site[:, None] == present).astype(np.float64), trend])
    penalty = np.diag(np.repeat([1e-9, CURVATURE], [len(present) + c.shape[1], c.shape[1]]) * len(c))
    coefficients = np.linalg.solve(design.T @ design + penalty, design.T @ x)
    result: FloatArray = x - trend @ coefficients[len(present) :]
    return result
