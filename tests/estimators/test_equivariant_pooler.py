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
def pool(split):
    return split[0]


@pytest.fixture(scope="module")
def new(split):
    """Participants whom no estimator here has seen."""
    return split[1]


def brief(pool, X=None, **settings):
    """Return a pooler after a few steps."""
    estimator = EquivariantPooler(**{"steps": 5, **settings})
    return estimator.fit(pool.X if X is None else X, pool.y, site=pool.site_labels, covariates=pool.C)


def test_phi_is_exactly_equivariant_after_training(trained, new):
    assert equivariance_of(trained, new.X) < 1e-12


def test_the_papers_tau_is_not_exact_and_its_error_is_measured(pool, new):
    paper = EquivariantPooler.from_preset("paper", steps=100, random_state=0)
    paper.fit(pool.X, pool.y, site=pool.site_labels, covariates=pool.C)
    assert equivariance_of(paper, new.X) > 1e-4


def test_the_age_of_new_participants_is_predicted(trained, new):
    predicted = trained.read_covariates(new.X)[:, 0]
    assert np.corrcoef(predicted, new.C[:, 0])[0, 1] > 0.8
    assert abs((predicted - new.C[:, 0]).mean()) < 4


def test_transport_moves_new_participants_to_another_age(trained, new):
    young, old = (trained.read_covariates(trained.transport(new.X, to=age)).mean() for age in (30.0, 80.0))
    assert old - young > 15
    here = trained.transport(new.X, to=new.C, covariates=new.C)
    np.testing.assert_allclose(here, new.X, atol=1e-6 * np.abs(new.X).max())


def test_the_code_of_new_participants_hides_the_site_and_keeps_the_class(trained, pool, new):
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def predict_site(fitted, others):
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        return balanced_accuracy_score(new.site, classifier.fit(fitted, pool.site).predict(others))

    assert predict_site(pool.X, new.X) > 0.6
    assert predict_site(trained.transform(pool.X), trained.transform(new.X)) < 0.45  # chance is 0.33
    assert trained.score(new.X, new.y) > 0.75  # always guessing the largest class has 0.65


def test_constant_features_pass_through_unchanged(pool):
    X = np.column_stack([pool.X, np.full(len(pool), 7.0)])
    np.testing.assert_array_equal(brief(pool, X).transport(X, to=50)[:, -1], 7.0)


def test_several_covariates_and_given_frequencies(pool):
    two = np.column_stack([pool.C[:, 0], np.random.default_rng(0).normal(size=len(pool))])
    estimator = EquivariantPooler(steps=5).fit(pool.X, pool.y, site=pool.site_labels, covariates=two)
    assert estimator.read_covariates(pool.X).shape == (len(pool), 2)
    assert equivariance_of(estimator, pool.X) < 1e-12
    given = brief(pool, n_latent=5, generator=[[1.0], [2.0]])
    assert given.transform(pool.X).shape == (len(pool), 5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"generator": "spred"}, "generator must be 'spread', 'all-ones'"),
        ({"tau": "both"}, "tau must be"),
        ({"n_latent": 1}, "need n >= 2"),
        ({"front": "site"}, r"front must be SiteHarmonizer\(\) for tables.* Got 'site'"),
        ({"front": ep.estimators.ImageHarmonizer()}, r"front must be SiteHarmonizer\(\) for tables"),
    ],
)
def test_wrong_settings_are_answered_at_fit(settings, words, pool):
    with pytest.raises(InputError, match=words):
        EquivariantPooler(steps=1, **settings).fit(pool.X, site=pool.site_labels, covariates=pool.C)


def test_wrong_calls_are_answered(trained, new):
    with pytest.raises(InputError, match="There were 1 covariate"):
        trained.transport(new.X, to=50.0, covariates=np.ones((len(new), 2)))
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
    assert estimator.sites_.tolist() == ["0", "1", "2"]
    moved = estimator.transport(pool.X, to=[50.0, "m"], covariates=frame)
    swapped = estimator.transport(pool.X, to=[50.0, "m"], covariates=frame[["sex", "age"]])
    np.testing.assert_array_equal(moved, swapped)
    again = ep.load(estimator.save(tmp_path / "model"))
    np.testing.assert_array_equal(moved, again.transport(pool.X, to=[50.0, "m"], covariates=frame))
    rows = len(pool)
    with pytest.raises(InputError, match="'sex' is 'x' in row 1, which was not seen at fit"):
        estimator.transport(pool.X, to=[50.0, "x"])
    with pytest.raises(InputError, match="no finite value in row 1"):
        estimator.transport(pool.X, to=[np.nan, "m"])
    with pytest.raises(InputError, match=f"one row for each of the {rows} rows"):
        estimator.transport(pool.X, to=[[50.0, "m"], [60.0, "m"]])


def test_a_feature_that_never_varied_does_not_move_the_code(pool):
    X = np.column_stack([pool.X, np.zeros(len(pool))])
    estimator = brief(pool, X)
    other = X.copy()
    other[:, -1] = 10.0
    np.testing.assert_array_equal(estimator.transform(other), estimator.transform(X))
