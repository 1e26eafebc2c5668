"""The network on top of the closed form: its sphere, that it can be undone, and when it is taken."""

import numpy as np
import pytest
import torch

import equipool as ep
from equipool.exceptions import InputError
from equipool.groups import CovariateAction
from equipool.sites.coupling import SiteNetwork, no_network

JOINT = {"sites": list("abcd"), "overlap": 1.0, "features": 60, "noise": 0.06, "joint": 0.3, "mixing": 0.3}


def some_network(rng, sites=3, p=9, q=2, covariates=2, hidden=5):
    axes = np.linalg.qr(rng.normal(size=(p, q)))[0]
    heads = rng.normal(size=(sites, hidden, p))
    return SiteNetwork(
        middle=rng.normal(size=covariates),
        reach=rng.uniform(1, 3, covariates),
        scores=axes,
        weights=rng.normal(size=(max(2 * covariates, 1) + q, hidden)),
        bias=rng.normal(size=hidden),
        heads=heads - heads @ axes @ axes.T,
        place=np.arange(sites),
    )


def near_truth(truth, **settings):
    pool = truth.pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    harmonizer = ep.SiteHarmonizer(**settings).fit(pool.X, **given)
    apart = harmonizer.transform(pool.X, **given) - truth.clean
    apart -= apart.mean(axis=0)
    return 1 - (apart**2).sum() / ((truth.clean - truth.clean.mean(axis=0)) ** 2).sum(), harmonizer


@pytest.mark.parametrize("covariates", [1, 2])
def test_covariates_turn_the_sphere(covariates):
    rng = np.random.default_rng(covariates)
    network = some_network(rng, covariates=covariates)
    own = rng.normal(size=(20, 9))
    c = network.middle + network.reach * rng.uniform(-0.5, 0.5, (20, covariates))
    step = network.reach * rng.uniform(-0.5, 0.5, covariates)
    here, there = network.latent(own, c), network.latent(own, c + step)
    np.testing.assert_allclose(np.linalg.norm(here, axis=1), 1.0)
    # A plane for each covariate, (cos, sin) side by side; a quarter of a turn is half of its range.
    order = [k + covariates * half for k in range(covariates) for half in (0, 1)]
    order += list(range(2 * covariates, here.shape[1]))
    still = np.zeros(((here.shape[1] - 2 * covariates) // 2, covariates))
    omega = np.vstack([np.diag(np.pi / 2 / network.reach), still])
    rho = CovariateAction(omega, n=here.shape[1])
    turned = rho(torch.as_tensor(step)).apply(torch.as_tensor(here[:, order]))
    np.testing.assert_allclose(turned.numpy(), there[:, order], atol=1e-12)


@pytest.mark.parametrize("covariates", [0, 1])
def test_a_sites_part_is_what_the_formula_says(covariates):
    rng = np.random.default_rng(3)
    network = some_network(rng, covariates=covariates)
    own, c = rng.normal(size=(6, 9)), rng.normal(size=(6, covariates))

    def point(scores, ages):
        angles = [
            np.clip((a - m) / r, -1, 1) * np.pi / 2
            for a, m, r in zip(ages, network.middle, network.reach, strict=True)
        ]
        planes = [np.cos(a) for a in angles] + [np.sin(a) for a in angles] or [1.0]
        vector = np.array([*(p / np.sqrt(max(len(angles), 1)) for p in planes), *(scores / 2)])
        return vector / np.sqrt((vector**2).sum())

    for i in range(6):
        for s in range(3):
            wanted = np.zeros(9)
            for h in range(5):
                here, mean = (
                    np.tanh(point(scores, c[i]) @ network.weights[:, h] + network.bias[h])
                    for scores in (own[i] @ network.scores, np.zeros(2))
                )
                wanted += (here - mean) * network.heads[s, h]
            np.testing.assert_allclose(network.part(own[[i]], c[[i]], s)[0], wanted, atol=1e-12)


def test_scores_stay_and_the_mean_person_is_not_touched():
    rng = np.random.default_rng(4)
    network = some_network(rng)
    own, c = rng.normal(size=(30, 9)), rng.normal(size=(30, 2))
    part = network.part(own, c, 1)
    assert np.abs(part).max() > 0.1
    np.testing.assert_allclose(part @ network.scores, 0.0, atol=1e-12)
    np.testing.assert_allclose(network.part(own - part, c, 1), part, atol=1e-12)  # so it can be undone
    np.testing.assert_allclose(network.part(np.zeros_like(own), c, 1), 0.0, atol=1e-12)
    assert not network.with_site().part(own, c, 3).any()
    assert not no_network(3, 9).active


@pytest.fixture(scope="module")
def forced():
    truth = ep.simulate_table(people=60, random_state=1, **JOINT)
    pool = truth.pool
    harmonizer = ep.SiteHarmonizer(network=True).fit(pool.X, site=pool.site_labels, covariates=pool.C)
    return truth, harmonizer


def test_what_a_site_measured_comes_back(forced):
    truth, harmonizer = forced
    pool, model = truth.pool, harmonizer.model_
    assert model.network.active
    z = (pool.X - harmonizer.feature_mean_) / harmonizer.feature_scale_
    for s in range(4):
        rows = pool.site == s
        own = model.own(z[rows], pool.C[rows], s)
        near = (np.abs(own) < 3 * np.sqrt(model.residual)).all(axis=1)  # failures are kept apart
        assert near.mean() > 0.5
        back = model.measured(own, pool.C[rows], s)
        np.testing.assert_allclose(back[near], z[rows][near], atol=1e-9)


def test_sites_parts_add_up_to_nothing_over_people_and_small_sites_have_none():
    truth = ep.simulate_table(people=60, random_state=2, **JOINT)
    pool = truth.pool
    # The first site's people come three times, and of the last two thirds are left out.
    kept = (pool.site != 3) | (np.arange(len(pool.site)) % 3 == 0)
    rows = np.concatenate([np.flatnonzero(kept), *2 * [np.flatnonzero(pool.site == 0)]])
    harmonizer = ep.SiteHarmonizer(network=True).fit(
        pool.X[rows], site=pool.site_labels[rows], covariates=pool.C[rows], subject=rows
    )
    model = harmonizer.model_
    np.testing.assert_allclose(model.people, [60, 60, 60, 20])
    assert model.network.place.tolist() == [0, 1, 2, -1]
    total = np.tensordot(model.people[:3], model.network.heads, axes=1)
    assert np.abs(total).max() < 1e-9 * np.abs(model.network.heads).max() * model.people.sum()


def test_the_order_of_features_does_not_matter(forced):
    truth, harmonizer = forced
    pool = truth.pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    order = np.random.default_rng(1).permutation(pool.X.shape[1])
    found = ep.SiteHarmonizer(network=True).fit_transform(pool.X[:, order], **given)
    wanted = harmonizer.transform(pool.X, **given)[:, order]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_it_trains_whatever_torch_is_set_to(forced):
    truth, harmonizer = forced
    pool = truth.pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    torch.set_default_dtype(torch.float16)
    try:
        with torch.inference_mode():
            found = ep.SiteHarmonizer(network=True).fit(pool.X, **given)
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(found.model_.network.heads, harmonizer.model_.network.heads)


def test_it_is_saved_adapts_and_brings_to_a_reference(forced, tmp_path):
    truth, harmonizer = forced
    pool = truth.pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    again = ep.load(harmonizer.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.transform(pool.X, **given), harmonizer.transform(pool.X, **given))
    assert again.model_.amount == harmonizer.model_.amount
    told = harmonizer.infer_site(pool.X, covariates=pool.C).to_numpy().argmax(axis=1)
    assert (told == pool.site).mean() > 0.9
    harmonizer.set_params(unseen_site="adapt")
    new = harmonizer.transform(pool.X[:30], site=["new"] * 30, covariates=pool.C[:30])
    assert np.isfinite(new).all()
    harmonizer.set_params(unseen_site="error", reference_site="b")
    brought = harmonizer.transform(pool.X, **given)
    harmonizer.set_params(reference_site=None)
    np.testing.assert_array_equal(brought[pool.site == 1], pool.X[pool.site == 1])


def test_the_same_seed_gives_the_same_bits_and_torch_is_left_alone(forced):
    truth, harmonizer = forced
    pool = truth.pool
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    again = ep.SiteHarmonizer(network=True).fit(pool.X, site=pool.site_labels, covariates=pool.C)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    np.testing.assert_array_equal(again.model_.network.heads, harmonizer.model_.network.heads)


def test_it_is_taken_where_sites_act_by_peoples_factors_and_helps_there():
    gains = []
    for seed in range(4):
        truth = ep.simulate_table(people=100, random_state=seed, **JOINT)
        alone, _ = near_truth(truth, network=False)
        chosen, harmonizer = near_truth(truth)
        gains.append(chosen - alone)
        assert harmonizer.model_.amount > 0
    assert np.mean(gains) > 0.01


def test_it_is_not_taken_where_sites_shift_and_stretch():
    for seed in range(6):
        truth = ep.simulate_table(
            sites=list("abcd"), people=80, overlap=1.0, features=40, noise=0.1, random_state=seed
        )
        assert near_truth(truth)[1].model_.amount == 0


def test_forty_people_fall_back_to_the_closed_form():
    for seed in range(3):
        truth = ep.simulate_table(people=10, random_state=seed, **JOINT)
        pool = truth.pool
        given = {"site": pool.site_labels, "covariates": pool.C}
        found = [ep.SiteHarmonizer(network=n).fit_transform(pool.X, **given) for n in (None, False)]
        np.testing.assert_array_equal(*found)


def test_a_failed_value_does_not_reach_the_persons_other_features(forced):
    truth, harmonizer = forced
    pool = truth.pool
    given = {"site": pool.site_labels[:1], "covariates": pool.C[:1]}
    rows = np.repeat(pool.X[:1], 3, axis=0)
    rows[1:, 0] = pool.X[:, 0].mean() + pool.X[:, 0].std() * np.array([50.0, 5000.0])
    usual, one, other = (harmonizer.transform(row[None], **given)[0] for row in rows)
    np.testing.assert_allclose(one[1:], other[1:])  # however far
    assert np.abs((one - usual)[1:] / pool.X.std(axis=0)[1:]).max() < 0.5


def test_it_says_what_was_chosen(forced, tmp_path):
    harmonizer = forced[1]
    said = harmonizer.choices_
    assert said["network"] == harmonizer.model_.amount > 0
    assert said["kept"] == 0
    assert set(said["bent"]) <= set(harmonizer.get_feature_names_out())
    assert ep.load(harmonizer.save(tmp_path / "model")).choices_ == said


def test_what_is_neither_yes_no_nor_none_is_refused(forced):
    pool = forced[0].pool
    with pytest.raises(InputError, match="network must be True, False or None"):
        ep.SiteHarmonizer(network="auto").fit(pool.X, site=pool.site_labels, covariates=pool.C)
