import inspect

import numpy as np
import pandas as pd
import pytest
import torch

import equipool as ep
from equipool.estimators import EquivariantPooler
from equipool.exceptions import InputError
from equipool.judge.scores import equivariance_of
from equipool.randomness import row_noise, seed_for


@pytest.fixture(scope="module")
def pool():
    return ep.simulate_table(overlap=1.0, people=150, features=16).pool


@pytest.fixture(scope="module")
def trained(pool):
    return EquivariantPooler(random_state=0, steps=600).fit(
        pool.X, pool.y, site=pool.site_labels, covariates=pool.C
    )


def test_phi_is_exactly_equivariant_after_training(trained, pool):
    assert equivariance_of(trained, pool.X) < 1e-12


def test_the_papers_tau_is_not_exact_and_its_error_is_measured(pool):
    paper = EquivariantPooler.from_preset("paper", steps=100, random_state=0)
    paper.fit(pool.X, pool.y, site=pool.site_labels, covariates=pool.C)
    assert equivariance_of(paper, pool.X) > 1e-4


def test_age_is_read_from_people_not_seen(pool, trained):
    new = ep.simulate_table(overlap=1.0, people=150, features=16).pool
    read = trained.read_covariates(new.X)[:, 0]
    assert np.corrcoef(read, new.C[:, 0])[0, 1] > 0.6
    assert abs((read - new.C[:, 0]).mean()) < 8


def test_transport_moves_people_to_another_age(trained, pool):
    young, old = (trained.read_covariates(trained.transport(pool.X, to=age)).mean() for age in (30.0, 80.0))
    assert old - young > 15
    own = trained.transport(pool.X, to=pool.C, covariates=pool.C)
    np.testing.assert_allclose(own, pool.X, atol=1e-6 * np.abs(pool.X).max())


def test_harmonized_features_are_in_their_units_with_less_of_the_site(trained, pool):
    harmonized = trained.harmonize(pool.X, site=pool.site_labels, covariates=pool.C)
    assert harmonized.shape == pool.X.shape

    def site_spread(X):
        means = np.array([X[pool.site == s].mean(axis=0) for s in range(3)])
        return (means.std(axis=0) / X.std(axis=0)).mean()

    assert site_spread(harmonized) < 0.6 * site_spread(pool.X)
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in zip(harmonized.T, pool.X.T, strict=True)]
    assert np.mean(correlation) > 0.6


def test_constant_features_pass_through_unchanged(pool):
    X = np.column_stack([pool.X, np.full(len(pool), 7.0)])
    estimator = EquivariantPooler(steps=5).fit(X, pool.y, site=pool.site_labels, covariates=pool.C)
    for changed in (
        estimator.harmonize(X, site=pool.site_labels, covariates=pool.C),
        estimator.transport(X, to=50),
    ):
        np.testing.assert_array_equal(changed[:, -1], 7.0)


def test_the_code_hides_the_site_and_keeps_the_class(pool, trained):
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score

    def read(X, y):
        return cross_val_score(
            LogisticRegression(max_iter=2000), X, y, cv=5, scoring="balanced_accuracy"
        ).mean()

    scaled = (pool.X - pool.X.mean(axis=0)) / pool.X.std(axis=0)
    code = trained.transform(pool.X)
    assert read(scaled, pool.site) > 0.6
    assert read(code, pool.site) < 0.45  # chance is 0.33
    assert trained.score(pool.X, pool.y) > 0.7


def test_several_covariates_and_own_frequencies(pool):
    two = np.column_stack([pool.C[:, 0], np.random.default_rng(0).normal(size=len(pool))])
    estimator = EquivariantPooler(steps=5).fit(pool.X, pool.y, site=pool.site_labels, covariates=two)
    assert estimator.read_covariates(pool.X).shape == (len(pool), 2)
    assert equivariance_of(estimator, pool.X) < 1e-12
    own = EquivariantPooler(steps=5, n_latent=5, generator=[[1.0], [2.0]])
    own.fit(pool.X, pool.y, site=pool.site_labels, covariates=pool.C)
    assert own.transform(pool.X).shape == (len(pool), 5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"generator": "spred"}, "generator must be 'spread', 'all-ones'"),
        ({"tau": "both"}, "tau must be"),
        ({"class_weight": "heavy"}, "class_weight must be"),
        ({"n_latent": 1}, "need n >= 2"),
    ],
)
def test_wrong_settings_are_answered_at_fit(settings, words, pool):
    with pytest.raises(InputError, match=words):
        EquivariantPooler(steps=1, **settings).fit(pool.X, site=pool.site_labels, covariates=pool.C)


def test_wrong_calls_after_fit_are_answered(trained, pool):
    with pytest.raises(
        InputError, match="'Hitachi' was not seen at fit; known are 'GE', 'Philips', 'Siemens'"
    ):
        trained.harmonize(pool.X, site=["Hitachi"] * len(pool), covariates=pool.C)
    with pytest.raises(InputError, match="one value for each of the 450 rows"):
        trained.harmonize(pool.X, site=["GE"], covariates=pool.C)
    with pytest.raises(InputError, match="There were 1 covariate"):
        trained.harmonize(pool.X, site=pool.site_labels, covariates=np.ones((len(pool), 2)))
    with pytest.raises(InputError, match="no preset 'papre'; choose one of default, paper"):
        EquivariantPooler.from_preset("papre")


def test_documented_parameters_are_the_real_ones():
    documented = inspect.getdoc(EquivariantPooler).split("Parameters")[1].split("Attributes")[0]
    for name in inspect.signature(EquivariantPooler.__init__).parameters:
        if name != "self":
            assert name in documented, name


def test_release_noise_is_normal_and_belongs_to_the_row():
    rows = np.random.default_rng().normal(size=(4000, 5)).astype(np.float32)
    noise = row_noise(rows, 7, seed=1)
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03
    assert np.abs(np.corrcoef(noise.T) - np.eye(7)).max() < 0.1
    np.testing.assert_array_equal(row_noise(rows[::-1], 7, seed=1), noise[::-1])
    assert not np.allclose(row_noise(rows, 7, seed=2), noise)
    nudged = rows.copy()
    nudged[:, 0] = np.nextafter(nudged[:, 0], 9)
    assert abs(np.corrcoef(row_noise(nudged, 7, seed=1).ravel(), noise.ravel())[0, 1]) < 0.05


def test_one_seed_is_hashed_for_each_purpose():
    seeds = {seed_for(seed, purpose) for seed in range(20) for purpose in ("a", "b")}
    assert len(seeds) == 40
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))


def test_what_was_given_at_fit_is_understood_the_same_way_afterwards(pool, tmp_path):
    """Text levels, column order, numbers as sites, two covariates saved and loaded."""
    frame = pd.DataFrame({"age": pool.C[:, 0], "sex": np.where(np.arange(len(pool)) % 2, "m", "f")})
    site = pool.site.astype(float)
    estimator = EquivariantPooler(steps=5).fit(pool.X, pool.y, site=site, covariates=frame)
    harmonized = estimator.harmonize(pool.X, site=site, covariates=frame)
    swapped = estimator.harmonize(pool.X, site=pool.site, covariates=frame[["sex", "age"]])
    np.testing.assert_array_equal(harmonized, swapped)
    again = ep.load(estimator.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.harmonize(pool.X, site=site, covariates=frame), harmonized)
    moved = estimator.transport(pool.X, to=[50.0, "m"])
    np.testing.assert_array_equal(moved, again.transport(pool.X, to=[50.0, "m"]))
    with pytest.raises(InputError, match="'sex' is 'x' in row 1, which was not seen at fit"):
        estimator.transport(pool.X, to=[50.0, "x"])
    with pytest.raises(InputError, match="no finite value in row 1"):
        estimator.transport(pool.X, to=[np.nan, "m"])
    with pytest.raises(InputError, match="one row for each of the 450 rows"):
        estimator.transport(pool.X, to=[[50.0, "m"], [60.0, "m"]])


def test_a_feature_that_never_varied_does_not_move_the_code(pool):
    X = np.column_stack([pool.X, np.zeros(len(pool))])
    estimator = EquivariantPooler(steps=5).fit(X, pool.y, site=pool.site_labels, covariates=pool.C)
    other = X.copy()
    other[:, -1] = 10.0
    np.testing.assert_array_equal(estimator.transform(other), estimator.transform(X))
