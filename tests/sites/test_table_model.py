"""The model of a table: which effects are chosen, and what a site does in measured units."""

import numpy as np
import pytest
import random_effects as draw

import equipool as ep
from equipool.sites.effect import Composition
from equipool.sites.table_model import fit_site_model

TABLES = {
    "three sites": {"people": 120},
    "four sites": {"sites": list("abcd"), "people": 80, "features": 20, "noise": 0.1},
    "many sites": {"sites": list("abcdefghijkl"), "people": 25, "features": 30, "noise": 0.1},
}


def choices(table, seeds=5, **planted):
    """Return what is chosen on tables with planted effects; the coupling has tests of its own."""
    result = []
    for seed in range(seeds):
        pool = ep.simulate_table(overlap=1.0, random_state=seed, **TABLES[table], **planted).pool
        harmonizer = ep.SiteHarmonizer(network=False)
        result.append(harmonizer.fit(pool.X, site=pool.site_labels, covariates=pool.C).choices_)
    return result


@pytest.mark.parametrize("table", TABLES)
def test_effects_that_are_not_there_are_not_chosen(table):
    chosen = choices(table, seeds=8)
    assert np.mean([one["covariance"] for one in chosen]) <= 0.2
    assert np.mean([bool(one["warped"]) for one in chosen]) <= 0.2


@pytest.mark.parametrize("table", TABLES)
def test_planted_covariances_are_chosen_and_shrunk_less_the_more_they_differ(table):
    less, more = (0.6, 1.5) if table == "many sites" else (0.3, 0.6)  # 25 participants say little
    some, many = ([one["shrinkage"] for one in choices(table, mixing=mixing)] for mixing in (less, more))
    assert np.isfinite(some + many).all()
    assert np.mean(np.log(many)) < np.mean(np.log(some))


@pytest.mark.parametrize("table", ["three sites", "four sites"])
def test_planted_warps_are_chosen(table):
    chosen = choices(table, bending=0.2)
    assert np.mean([len(one["warped"]) >= TABLES[table].get("features", 12) / 2 for one in chosen]) >= 0.8


def fitted(seed=0, n=60, sites=3, p=5, **settings):
    rng = np.random.default_rng(seed)
    site = np.repeat(np.arange(sites), n)
    c = rng.normal(size=(len(site), 1))
    z = c + rng.normal(size=(len(site), p)) + rng.normal(size=(sites, p))[site]
    design = draw.design_of(site, c)
    return z, design, fit_site_model(z, design, **settings)


@pytest.mark.parametrize("settings", [{}, {"warp": True, "shrinkage": 30.0}])
def test_the_likelihood_of_each_site_is_that_of_its_density(settings):
    """Densities of z at each site: those of the residual in the pool, times the Jacobian of the map."""
    z, design, model = fitted(**settings)
    likelihood = model.log_likelihood(z[:8], design.covariates[:8])
    variance = model.composition["shift and scale"].variance
    covariance = model.composition["covariance"]
    whiten = np.diag(variance**-0.5) if covariance.is_identity else covariance.whiten
    outer = Composition((model.composition["warp"], model.composition["shift and scale"]))
    for i in range(8):
        for s in range(3):
            at = model.at(design.covariates[[i]], s)
            if (np.abs(outer.undo(z[[i]], at) - at.predicted) > 3.5 * variance**0.5).any():
                continue  # winsorised, where the density is no longer that of the map
            jacobian = np.empty((5, 5))
            for k in range(5):
                step = 1e-5 * np.eye(5)[k]
                ends = (model.undo(z[[i]] + sign * step, at)[0] for sign in (1, -1))
                jacobian[:, k] = np.subtract(*ends) / 2e-5
            residual = (model.undo(z[[i]], at) - at.predicted)[0] @ whiten
            expected = np.linalg.slogdet(jacobian)[1] - 0.5 * residual @ residual
            assert likelihood[i, s] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("warp", [False, True])
def test_the_reported_effect_is_what_the_site_does_at_the_mean_covariates(warp):
    _, design, model = fitted(warp=warp, shrinkage=np.inf)
    shift, error, scale = model.effects
    # Around zeros of the basis, not of the covariate.
    centre, step = np.repeat(model.trend.centre[None], 3, axis=0), 1e-6
    at = model.at(np.zeros((3, 1)), np.arange(3), centre)
    level = model.redo(centre, at)
    np.testing.assert_allclose(shift, level - np.average(level, axis=0, weights=design.n_participants))
    np.testing.assert_allclose(scale, (model.redo(centre + step, at) - level) / step, rtol=1e-4)
    assert (error > 0).all()


def test_rows_of_unseen_sites_stay():
    z, design, model = fitted()
    site = np.where(np.arange(len(z)) % 2 == 0, -1, design.site)
    undone = model.undo(z, model.at(design.covariates, site))
    np.testing.assert_array_equal(undone[::2], z[::2])
    assert np.abs(undone[1::2] - z[1::2]).max() > 0.1


def test_a_model_of_as_many_features_as_a_surface_has_is_fitted_and_told_apart():
    z, design, model = fitted(p=6000, n=10)
    assert model.composition["covariance"].is_identity
    likelihood = model.log_likelihood(z, design.covariates)
    assert (likelihood.argmax(axis=1) == design.site).mean() > 0.9
