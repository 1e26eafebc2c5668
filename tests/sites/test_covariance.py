"""Each site's covariance against explicit matrices, and when it is chosen."""

import numpy as np
import pytest
import random_effects as draw
from scipy.linalg import sqrtm
from scipy.stats import multivariate_normal

from equipool.sites import covariance as module
from equipool.sites.covariance import Covariance
from equipool.sites.shift_scale import shrunken_scales


def residuals_of(rng, sites=3, n=40, p=4, mixing=0.4):
    """Return the residuals of sites that mix features, and their design."""
    site = np.repeat(np.arange(sites), n)
    mixed = np.eye(p) + mixing * rng.normal(size=(sites, p, p))
    residuals = np.einsum("ip,ipq->iq", rng.normal(size=(len(site), p)), mixed[site])
    residuals -= np.array([residuals[site == s].mean(axis=0) for s in range(sites)])[site]
    return residuals, draw.design_of(site)


@pytest.mark.parametrize(("n", "p"), [(40, 4), (5, 12)])
def test_the_map_is_that_of_explicit_matrices(n, p):
    rng = np.random.default_rng(0)
    residuals, design = residuals_of(rng, n=n, p=p)
    k = 7.0
    effect = Covariance.fit(residuals, design, shrinkage=k)
    deviation = np.sqrt((residuals**2).mean(axis=0))
    near = np.clip(residuals, -4 * deviation, 4 * deviation)
    share = module.POOLED_SHRINKAGES[module._chosen_shrinkages(near, design, k)[0]]
    pooled = near.T @ near / (3 * (n - 1))
    pooled = (1 - share) * pooled + share * np.diag(np.diag(pooled))
    sd = np.sqrt(np.diag(pooled))
    values, axes = np.linalg.eigh(pooled / np.outer(sd, sd))
    whiten, colour = axes / np.sqrt(values) / sd[:, None], (axes * np.sqrt(values)).T * sd
    scores = near @ whiten
    squares = np.array([(scores[design.site == s] ** 2).sum(axis=0) for s in range(3)])
    scale, _ = shrunken_scales(squares, np.full((3, 1), n - 1.0))
    scale *= np.sqrt((squares / scale**2).sum(axis=0) / squares.sum(axis=0))
    roots = []
    for s in range(3):
        white = scores[design.site == s] / scale[s]
        weight = (n - 1) / (n - 1 + k)
        b = weight * white.T @ white / (n - 1) + (1 - weight) * np.eye(p)
        roots.append(np.diag(scale[s]) @ sqrtm(b))
    for s in range(3):
        e = rng.uniform(-1, 1, (6, p)) * deviation
        at = draw.context(s, e)
        np.testing.assert_allclose(effect.redo(e, at), e @ whiten @ roots[s].T @ colour, atol=1e-8)
        np.testing.assert_allclose(effect.undo(effect.redo(e, at), at), e, atol=1e-8)
        np.testing.assert_allclose(effect.log_det(e, at), -np.linalg.slogdet(roots[s])[1])


@pytest.mark.parametrize(("n", "p"), [(40, 4), (5, 12)])
def test_the_pools_shrinkage_is_that_with_which_held_out_participants_are_likeliest(n, p):
    residuals, design = residuals_of(np.random.default_rng(0), n=n, p=p)
    total = np.zeros(len(module.POOLED_SHRINKAGES))
    for fold in range(3):
        train, held = (residuals[rows].copy() for rows in (design.fold != fold, design.fold == fold))
        site, held_site = (design.site[rows] for rows in (design.fold != fold, design.fold == fold))
        for s in range(3):
            n_train, mean = (site == s).sum(), train[site == s].mean(axis=0)
            train[site == s] -= mean
            held[held_site == s] = (held[held_site == s] - mean) * np.sqrt(n_train / (n_train + 1))
        pooled = train.T @ train / (len(train) - 3)
        for k, share in enumerate(module.POOLED_SHRINKAGES):
            shrunk = (1 - share) * pooled + share * np.diag(np.diag(pooled))
            total[k] += multivariate_normal(cov=shrunk, allow_singular=True).logpdf(held).sum()
    chosen, _ = module._chosen_shrinkages(residuals, design, 7.0)
    assert chosen == total.argmax()


@pytest.mark.parametrize("k", [10.0, np.inf])
def test_what_is_undone_has_the_likelihood_of_the_sites_normal(k):
    residuals, design = residuals_of(np.random.default_rng(0))
    white, n = residuals, np.full((3, 1), 39.0)
    given = {"whiten": np.eye(4), "colour": np.eye(4), "deviation": np.ones(4)}
    [effect] = Covariance._of_scores(white, design, (k,), **given)
    squares = np.array([(white[design.site == s] ** 2).sum(axis=0) for s in range(3)])
    scale, _ = shrunken_scales(squares, n)
    scale *= np.sqrt((squares / scale**2).sum(axis=0) / squares.sum(axis=0))
    for s in range(3):
        rows = white[design.site == s] / scale[s]
        share = 39 / (39 + k)
        b = share * rows.T @ rows / 39 + (1 - share) * np.eye(4)
        site_scale = np.diag(scale[s])
        site_normal = multivariate_normal(cov=site_scale @ b @ site_scale)
        at = draw.context(s, white[:5])
        undone = multivariate_normal(cov=np.eye(4)).logpdf(effect.undo(white[:5], at))
        np.testing.assert_allclose(undone + effect.log_det(white[:5], at), site_normal.logpdf(white[:5]))


def test_principal_directions_are_the_same_by_either_gram_matrix():
    rng = np.random.default_rng(0)
    rows, weight = rng.normal(size=(5, 8)), rng.uniform(0.5, 1, 5)
    for x in (rows, np.vstack([rows, rows[:4]])):  # wide, and tall of rank 5
        w = np.append(weight, weight[: len(x) - 5])
        vectors, squares = module._principal(x, w)
        assert vectors.shape == (5, 8)
        np.testing.assert_allclose(vectors @ vectors.T, np.eye(5), atol=1e-9)
        np.testing.assert_allclose((vectors.T * squares) @ vectors, (x.T * w) @ x, atol=1e-9)


def test_the_pool_keeps_the_variance_of_each_score():
    residuals, design = residuals_of(np.random.default_rng(0), n=30, p=20)
    given = {"whiten": np.eye(20), "colour": np.eye(20), "deviation": np.full(20, np.inf)}
    [effect] = Covariance._of_scores(residuals, design, (np.inf,), **given)
    undone = effect.undo(residuals, draw.context(design.site, residuals))
    np.testing.assert_allclose((undone**2).sum(axis=0), (residuals**2).sum(axis=0))


def test_a_site_of_one_participant_has_the_covariance_of_the_pool():
    rng = np.random.default_rng(0)
    residuals, design = residuals_of(rng)
    site = np.append(design.site, 3)
    effect = Covariance.fit(np.vstack([residuals, np.zeros(4)]), draw.design_of(site), shrinkage=30.0)
    z = rng.normal(size=(5, 4))
    undone = effect.undo(z, draw.context(3, z))
    # But for the factors by which the pool keeps its variance, the same for a site that is like the pool.
    np.testing.assert_allclose(undone @ effect.whiten * effect.scale[3], z @ effect.whiten)
    np.testing.assert_allclose(effect.scale[3], 1.0, atol=0.2)


@pytest.mark.parametrize(("sites", "n", "p"), [(3, 80, 10), (20, 15, 10), (30, 2, 12), (4, 30, 60)])
def test_covariances_that_do_not_differ_are_left_alone(sites, n, p):
    """Also where sites are so small that a site's mean gives its held-out participants away, and where
    features are so many and so correlated that the pool's covariance is not known well.
    """
    values = []
    for seed in range(12):
        residuals, design = residuals_of(np.random.default_rng(seed), sites, n, p, mixing=0.0)
        residuals = residuals @ (np.eye(p) + 0.3 * np.random.default_rng(seed).normal(size=(p, p)))
        values.append(not Covariance.fit(residuals, design).is_identity)
    assert np.mean(values) <= 0.2


@pytest.mark.parametrize(("sites", "n", "p"), [(3, 80, 10), (20, 30, 10)])
def test_covariances_that_differ_are_brought_to_the_pools(sites, n, p):
    for seed in range(4):
        residuals, design = residuals_of(np.random.default_rng(seed), sites, n, p)
        effect = Covariance.fit(residuals, design)
        assert np.isfinite(effect.shrinkage)
        undone = effect.undo(residuals, draw.context(design.site, residuals))
        pooled = effect.colour.T @ effect.colour
        before, after = (
            np.mean([np.abs(np.cov(x[design.site == s].T) - pooled).mean() for s in range(sites)])
            for x in (residuals, undone)
        )
        assert after < 0.6 * before


def test_without_held_out_participants_nothing_is_chosen():
    residuals, design = residuals_of(np.random.default_rng(0))
    one_fold = draw.design_of(design.site, folds=1)
    assert Covariance.fit(residuals, one_fold).is_identity
    assert Covariance.fit(residuals[:, :1], design).is_identity
    alone = draw.design_of(np.arange(6))  # the site of a held-out participant has nobody else
    assert Covariance.fit(residuals[:6], alone).is_identity
