"""Sites that bend features: straightened where held-out people show it, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

import equipool as ep
from equipool.models.bend import Bend, fit_bend, no_bend


def _bent(rng, people, sites=4, features=6, amount=0.12):
    site = np.repeat(np.arange(sites), people)
    own = rng.standard_normal((len(site), features))
    a = amount * np.where(np.arange(sites)[:, None] % 2 == 0, 1.0, -1.0) * np.ones(features)
    bend = Bend(np.ones(features), -a, np.ones_like(a))
    seen = np.vstack([bend.straighten(own[site == s], s) for s in range(sites)])
    return own, seen, site


def _fit(seen, site, wanted=None, seed=0):
    fold = np.random.default_rng(seed).integers(0, 3, len(site))
    return fit_bend(seen, site, np.ones(len(site)), fold, int(site.max()) + 1, wanted)


@pytest.mark.parametrize("amount", [-0.18, -0.05, 0.0, 1e-9, 0.05, 0.18])
def test_bending_undoes_straightening(amount):
    rng = np.random.default_rng(0)
    r = np.concatenate([rng.standard_normal(50), [-9.0, -2.5, 0.0, 2.5, 9.0]])[:, None] * 3.0
    bend = Bend(np.array([3.0]), np.array([[amount]]), np.array([[1.1]]))
    assert bend.bend(bend.straighten(r, 0), 0) == pytest.approx(r, abs=1e-9)
    ordered = bend.straighten(np.sort(r, axis=0), 0)
    assert (np.diff(ordered[:, 0]) >= 0).all()


def test_the_slope_is_that_of_the_map():
    bend = Bend(np.array([2.0, 1.0]), np.array([[0.1, -0.15]]), np.array([[1.05, 1.0]]))
    r, step = np.array([[0.7, -1.2], [4.0, 2.0], [8.0, 0.1]]), 1e-6
    moved = (bend.straighten(r + step, 0) - bend.straighten(r - step, 0)) / (2 * step)
    assert bend.log_slope(r, 0) == pytest.approx(np.log(moved).sum(axis=1), abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_bent_sites_are_straightened(seed):
    own, seen, site = _bent(np.random.default_rng(seed), 300)
    bend = _fit(seen, site, seed=seed)
    back = np.vstack([bend.straighten(seen[site == s], s) for s in range(4)])
    assert ((back - own) ** 2).mean() < 0.25 * ((seen - own) ** 2).mean()
    spreads = np.array([back[site == s].std(axis=0).mean() for s in range(4)])
    assert np.ptp(spreads) < 0.06, "straightening must not make the spread tell the site"


def test_straight_sites_are_left_alone():
    chosen = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        own, _, site = _bent(rng, 60)
        chosen.append(_fit(own, site, seed=seed).amount.any())
    assert np.mean(chosen) <= 0.2


def test_few_people_fall_back_to_the_affine_form():
    chosen = []
    for seed in range(20):
        _, seen, site = _bent(np.random.default_rng(seed), 10)
        chosen.append(_fit(seen, site, seed=seed).amount.any())
    assert np.mean(chosen) <= 0.2


def test_one_heavy_tailed_pool_is_not_taken_for_bending():
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(4), 80)
    chosen = [_fit(rng.standard_t(3, (320, 6)), site, seed=k).amount.any() for k in range(20)]
    assert np.mean(chosen) <= 0.2


def test_the_same_skewness_everywhere_is_the_peoples_own():
    rng = np.random.default_rng(1)
    site = np.repeat(np.arange(4), 200)
    r = rng.gamma(4.0, size=(800, 5))
    r = (r - r.mean(axis=0)) / r.std(axis=0)
    bend = _fit(r, site, wanted=True)
    assert np.abs(bend.amount).max() < 0.06


@pytest.mark.parametrize("bending", [None, False, True])
def test_the_harmonizer_gets_nearer_to_the_truth(bending):
    raw, found = [], []
    for seed in range(3):
        truth = ep.simulate_table(people=200, overlap=0.5, noise=0.12, bending=0.2, random_state=seed)
        pool = truth.pool
        given = {"site": pool.site_labels, "covariates": pool.C}
        for kept, setting in ((raw, False), (found, bending)):
            clean = ep.SiteHarmonizer(bending=setting).fit_transform(pool.X, **given)
            left = np.asarray(clean) - truth.clean
            kept.append(((left - left.mean(axis=0)) ** 2 / truth.clean.var(axis=0)).mean())
    if bending is False:
        assert found == raw
    else:
        assert np.mean(found) < 0.9 * np.mean(raw)


def test_a_bent_model_is_saved_whole_and_a_reference_stays_as_it_is(tmp_path):
    pool = ep.simulate_table(people=100, bending=0.2, overlap=1.0).pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    model = ep.SiteHarmonizer(bending=True, reference_site="GE").fit(pool.X, **given)
    assert model.model_.bend.amount.any()
    clean = model.transform(pool.X, **given)
    own = pool.site_labels == "GE"
    assert np.array_equal(np.asarray(clean)[own], np.asarray(pool.X)[own])
    model.save(tmp_path / "model")
    assert np.array_equal(ep.load(tmp_path / "model").transform(pool.X, **given), clean)


def test_a_new_site_is_not_bent():
    pool = ep.simulate_table(people=100, bending=0.2, overlap=1.0).pool
    known = pool.site_labels != "GE"
    model = ep.SiteHarmonizer(bending=True, unseen_site="adapt")
    model.fit(pool.X[known], site=pool.site_labels[known], covariates=pool.C[known])
    clean = model.transform(pool.X[~known], site=pool.site_labels[~known], covariates=pool.C[~known])
    assert np.isfinite(np.asarray(clean)).all()
    assert no_bend(2, 3).with_site().amount.shape == (3, 3)
