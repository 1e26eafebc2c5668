"""The additive coupling: its sphere, its inverse, and when it is chosen."""

import numpy as np
import pytest
import torch

import equipool as ep
from equipool.exceptions import InputError
from equipool.groups import CovariateAction
from equipool.sites.coupling import Coupling
from equipool.sites.effect import Context

JOINT = {"sites": list("abcd"), "overlap": 1.0, "features": 60, "noise": 0.06, "joint": 0.3, "mixing": 0.3}


def some_coupling(rng, sites=3, p=9, q=2, covariates=2, hidden=5):
    axes = np.linalg.qr(rng.normal(size=(p, q)))[0]
    heads = rng.normal(size=(sites, hidden, p))
    return Coupling(
        share=0.5,
        middle=rng.normal(size=covariates),
        reach=rng.uniform(1, 3, covariates),
        scores=axes,
        weights=rng.normal(size=(max(2 * covariates, 1) + q, hidden)),
        bias=rng.normal(size=hidden),
        heads=heads - heads @ axes @ axes.T,
        head_of=np.arange(sites),
        deviation=np.full(p, 10.0),
    )


def at(site, c, predicted):
    return Context(np.broadcast_to(site, len(c)), c, predicted)


def near_truth(truth, **settings):
    """Return the R² of harmonized and clean features, and the harmonizer."""
    pool = truth.pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    harmonizer = ep.SiteHarmonizer(**settings).fit(pool.X, **given)
    apart = harmonizer.transform(pool.X, **given) - truth.clean
    apart -= apart.mean(axis=0)
    return 1 - (apart**2).sum() / ((truth.clean - truth.clean.mean(axis=0)) ** 2).sum(), harmonizer


def coupling_of(harmonizer):
    return harmonizer.model_.composition["coupling"]


@pytest.mark.parametrize("covariates", [1, 2])
def test_covariates_turn_the_sphere(covariates):
    rng = np.random.default_rng(covariates)
    coupling = some_coupling(rng, covariates=covariates)
    residuals = rng.normal(size=(20, 9))
    c = coupling.middle + coupling.reach * rng.uniform(-0.5, 0.5, (20, covariates))
    step = coupling.reach * rng.uniform(-0.5, 0.5, covariates)
    here, there = coupling.latent(residuals, c), coupling.latent(residuals, c + step)
    np.testing.assert_allclose(np.linalg.norm(here, axis=1), 1.0)
    # A plane for each covariate, (cos, sin) side by side; a quarter of a turn is half of its range.
    order = [k + covariates * half for k in range(covariates) for half in (0, 1)]
    order += list(range(2 * covariates, here.shape[1]))
    still = np.zeros(((here.shape[1] - 2 * covariates) // 2, covariates))
    omega = np.vstack([np.diag(np.pi / 2 / coupling.reach), still])
    rho = CovariateAction(omega, n=here.shape[1])
    turned = rho(torch.as_tensor(step)).apply(torch.as_tensor(here[:, order]))
    np.testing.assert_allclose(turned.numpy(), there[:, order], atol=1e-12)


@pytest.mark.parametrize("covariates", [0, 1])
def test_what_a_site_adds_is_what_the_formula_says(covariates):
    rng = np.random.default_rng(3)
    coupling = some_coupling(rng, covariates=covariates)
    residuals, c, predicted = (rng.normal(size=(6, k)) for k in (9, covariates, 9))

    def point(scores, ages):
        angles = [
            np.clip((a - m) / r, -1, 1) * np.pi / 2
            for a, m, r in zip(ages, coupling.middle, coupling.reach, strict=True)
        ]
        planes = [np.cos(a) for a in angles] + [np.sin(a) for a in angles] or [1.0]
        vector = np.array([*(p / np.sqrt(max(len(angles), 1)) for p in planes), *(scores / 2)])
        return vector / np.sqrt((vector**2).sum())

    for i in range(6):
        for s in range(3):
            wanted = predicted[i] + residuals[i]
            for h in range(5):
                here, mean = (
                    np.tanh(point(scores, c[i]) @ coupling.weights[:, h] + coupling.bias[h])
                    for scores in (residuals[i] @ coupling.scores, np.zeros(2))
                )
                wanted = wanted + (here - mean) * coupling.heads[s, h]
            where = at(s, c[[i]], predicted[[i]])
            np.testing.assert_allclose(coupling.redo(predicted[[i]] + residuals[[i]], where)[0], wanted)


def test_scores_stay_and_the_mean_participant_is_not_moved():
    rng = np.random.default_rng(4)
    coupling = some_coupling(rng)
    residuals, c, predicted = rng.normal(size=(30, 9)), rng.normal(size=(30, 2)), rng.normal(size=(30, 9))
    where = at(1, c, predicted)
    undone = coupling.undo(predicted + residuals, where) - predicted
    assert np.abs(undone - residuals).max() > 0.1
    np.testing.assert_allclose(undone @ coupling.scores, residuals @ coupling.scores, atol=1e-12)
    np.testing.assert_allclose(coupling.undo(predicted, where), predicted, atol=1e-12)


@pytest.fixture(scope="module")
def forced():
    truth = ep.simulate_table(people=60, random_state=1, **JOINT)
    pool = truth.pool
    harmonizer = ep.SiteHarmonizer(network=True).fit(pool.X, site=pool.site_labels, covariates=pool.C)
    return truth, harmonizer


def test_what_a_site_measured_comes_back(forced):
    truth, harmonizer = forced
    pool, model = truth.pool, harmonizer.model_
    assert not coupling_of(harmonizer).is_identity
    z = (pool.X - harmonizer.feature_mean_) / harmonizer.feature_scale_
    where = model.at(pool.C, pool.site)
    undone = model.undo(z, where)
    deviation = np.sqrt(model.composition["shift and scale"].variance)
    near = (np.abs(undone - where.predicted) < 3 * deviation).all(axis=1)  # outliers are set apart
    assert near.mean() > 0.5
    np.testing.assert_allclose(model.redo(undone, where)[near], z[near], atol=1e-9)


def test_sites_parts_add_up_to_nothing_over_participants_and_small_sites_have_none():
    truth = ep.simulate_table(people=60, random_state=2, **JOINT)
    pool = truth.pool
    # The first site's participants come three times, and of the last two thirds are left out.
    kept = (pool.site != 3) | (np.arange(len(pool.site)) % 3 == 0)
    rows = np.concatenate([np.flatnonzero(kept), *2 * [np.flatnonzero(pool.site == 0)]])
    harmonizer = ep.SiteHarmonizer(network=True).fit(
        pool.X[rows], site=pool.site_labels[rows], covariates=pool.C[rows], subject=rows
    )
    model, coupling = harmonizer.model_, coupling_of(harmonizer)
    np.testing.assert_allclose(model.n_participants, [60, 60, 60, 20])
    assert coupling.head_of.tolist() == [0, 1, 2, -1]
    total = np.tensordot(model.n_participants[:3], coupling.heads, axes=1)
    assert np.abs(total).max() < 1e-9 * np.abs(coupling.heads).max() * model.n_participants.sum()


def test_the_order_of_features_does_not_matter(forced):
    truth, harmonizer = forced
    pool = truth.pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    order = np.random.default_rng(1).permutation(pool.X.shape[1])
    harmonized = ep.SiteHarmonizer(network=True).fit_transform(pool.X[:, order], **given)
    np.testing.assert_allclose(harmonized, harmonizer.transform(pool.X, **given)[:, order], rtol=1e-6)


def test_it_trains_whatever_torch_is_set_to(forced):
    truth, harmonizer = forced
    pool = truth.pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.inference_mode():
            again = ep.SiteHarmonizer(network=True).fit(pool.X, **given)
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(coupling_of(again).heads, coupling_of(harmonizer).heads)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_it_is_saved_adapts_and_brings_to_a_reference(forced, tmp_path):
    truth, harmonizer = forced
    pool = truth.pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    again = ep.load(harmonizer.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.transform(pool.X, **given), harmonizer.transform(pool.X, **given))
    assert again.choices_ == harmonizer.choices_
    assert again.choices_["coupling"] == coupling_of(harmonizer).share > 0
    inferred = harmonizer.infer_site(pool.X, covariates=pool.C).to_numpy().argmax(axis=1)
    assert (inferred == pool.site).mean() > 0.9
    harmonizer.set_params(unseen_site="adapt")
    new = harmonizer.transform(pool.X[:30], site=["new"] * 30, covariates=pool.C[:30])
    assert np.isfinite(new).all()
    harmonizer.set_params(unseen_site="error", reference_site="b")
    brought = harmonizer.transform(pool.X, **given)
    harmonizer.set_params(reference_site=None)
    np.testing.assert_array_equal(brought[pool.site == 1], pool.X[pool.site == 1])


def test_it_is_chosen_where_sites_act_by_the_participants_factors_and_helps_there():
    gains = []
    for seed in range(3):
        truth = ep.simulate_table(people=100, random_state=seed, **JOINT)
        alone, _ = near_truth(truth, network=False)
        chosen, harmonizer = near_truth(truth)
        gains.append(chosen - alone)
        assert harmonizer.choices_["coupling"] > 0
    assert np.mean(gains) > 0.01


def test_it_is_not_chosen_where_sites_shift_and_scale():
    chosen = []
    for seed in range(6):
        truth = ep.simulate_table(
            sites=list("abcd"), people=80, overlap=1.0, features=40, noise=0.1, random_state=seed
        )
        chosen.append(near_truth(truth)[1].choices_["coupling"] > 0)
    assert np.mean(chosen) <= 0.2


def test_forty_participants_fall_back_to_the_other_effects():
    for seed in range(3):
        truth = ep.simulate_table(people=10, random_state=seed, **JOINT)
        pool = truth.pool
        given = {"site": pool.site_labels, "covariates": pool.C}
        harmonized = [ep.SiteHarmonizer(network=n).fit_transform(pool.X, **given) for n in (None, False)]
        np.testing.assert_array_equal(*harmonized)


def test_a_failed_value_does_not_reach_the_participants_other_features(forced):
    truth, harmonizer = forced
    pool = truth.pool
    given = {"site": pool.site_labels[:1], "covariates": pool.C[:1]}
    rows = np.repeat(pool.X[:1], 3, axis=0)
    rows[1:, 0] = pool.X[:, 0].mean() + pool.X[:, 0].std() * np.array([50.0, 5000.0])
    usual, one, other = (harmonizer.transform(row[None], **given)[0] for row in rows)
    np.testing.assert_allclose(one[1:], other[1:])  # however far
    assert np.abs((one - usual)[1:] / pool.X.std(axis=0)[1:]).max() < 0.5


def test_what_is_neither_yes_no_nor_none_is_refused(forced):
    pool = forced[0].pool
    with pytest.raises(InputError, match="network must be True, False or None"):
        ep.SiteHarmonizer(network="auto").fit(pool.X, site=pool.site_labels, covariates=pool.C)
