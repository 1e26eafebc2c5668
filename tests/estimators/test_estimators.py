"""What holds for the pooler and for every baseline alike."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import equipool as ep
from equipool.estimators import (
    CAIPooler,
    EquivariantPooler,
    MMDPooler,
    NaivePooler,
    RandMatchPooler,
    SubsamplingPooler,
)
from equipool.exceptions import EquipoolWarning, InputError

KINDS = [NaivePooler, MMDPooler, CAIPooler, SubsamplingPooler, RandMatchPooler, EquivariantPooler]


@pytest.fixture(scope="module")
def pool():
    return ep.simulate_table(overlap=0.5, people=80).pool


def fitted(kind, pool, **settings):
    estimator = kind(**{"steps": 10, "random_state": 0, **settings})
    return estimator.fit(pool.X, pool.y, site=pool.site_labels, covariates=pool.C)


@pytest.mark.filterwarnings("ignore:No site was given")
@parametrize_with_checks([kind(steps=3) for kind in KINDS])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def test_without_a_site_there_is_one_and_a_warning(pool):
    with pytest.warns(EquipoolWarning, match="not made to forget sites. Pass site="):
        estimator = NaivePooler(steps=2).fit(pool.X, pool.y)
    assert len(estimator.sites_) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_transform_and_predict_need_x_alone(kind, pool):
    estimator = fitted(kind, pool)
    assert estimator.transform(pool.X).shape == (len(pool), 30)
    assert set(estimator.predict(pool.X)) <= {"AD", "CN"}
    probability = estimator.predict_proba(pool.X)
    np.testing.assert_allclose(probability.sum(axis=1), 1)
    assert estimator.classes_[probability.argmax(axis=1)].tolist() == estimator.predict(pool.X).tolist()
    assert estimator.tau_vector(pool.X).shape == (len(pool), 30)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bits_and_leaves_torch_alone(kind, pool):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (fitted(kind, pool).transform(pool.X) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert torch.equal(torch.rand(3), expected)
    other = kind(steps=10, random_state=1).fit(pool.X, pool.y, site=pool.site_labels, covariates=pool.C)
    assert not np.allclose(other.transform(pool.X), first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_does_not_depend_on_the_other_rows(kind, pool):
    estimator = fitted(kind, pool)
    codes = estimator.transform(pool.X)
    np.testing.assert_allclose(estimator.transform(pool.X[7:8])[0], codes[7], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(estimator.transform(pool.X[::-1]), codes[::-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_no_target_at_all(kind, pool):
    train, new = (pool[rows] for rows in pool.split(0.3, random_state=0))
    number = kind(steps=200, random_state=0, task="number").fit(
        train.X, 100 * train.X[:, 0], site=train.site_labels, covariates=train.C
    )
    assert number.task_ == "number"
    if kind is not EquivariantPooler:  # the channel's noise limits numbers
        assert number.score(new.X, 100 * new.X[:, 0]) > 0.5
    with pytest.raises(InputError, match="use predict"):
        number.predict_proba(new.X)
    free = kind(steps=5, random_state=0).fit(pool.X, site=pool.site_labels, covariates=pool.C)
    assert free.transform(pool.X).shape == (len(pool), 30)
    with pytest.raises(InputError, match="fit it with y"):
        free.predict(pool.X)


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_is_routed_through_pipelines_and_searches(kind, pool):
    with config_context(enable_metadata_routing=True):
        estimator = kind(steps=3).set_fit_request(site=True, covariates=True)
        chain = make_pipeline(StandardScaler(), estimator)
        metadata = {"site": pool.site_labels, "covariates": pool.C}
        scores = cross_validate(chain, pool.X, pool.y, params=metadata, cv=pool.folds(3), error_score="raise")
        assert len(scores["test_score"]) == 3
        name = f"{kind.__name__.lower()}__steps"
        search = GridSearchCV(chain, {name: [2, 4]}, cv=pool.folds(2), error_score="raise")
        search.fit(pool.X, pool.y, **metadata)
        assert search.best_params_[name] in (2, 4)
        assert clone(chain).get_params()[name] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_constant_features_and_small_sites_do_no_harm(kind, pool):
    X = np.column_stack([pool.X, np.full(len(pool), 7.0), np.zeros(len(pool))])
    site = pool.site_labels.copy()
    site[0] = "alone"
    estimator = kind(steps=5).fit(X, pool.y, site=site, covariates=pool.C)
    assert np.isfinite(estimator.transform(X)).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"site": ["A"] * 240}, "nothing to harmonize"),
        ({"site": ["A"] * 3}, "site has 3 values but X has 240 rows"),
        ({"covariates": np.full(240, 60.0)}, "'c0' is 60 in every row"),
        ({"y": ["AD"] * 240}, "'target' is 'AD' in every row"),
    ],
)
def test_bad_pools_are_refused_with_the_validators_sentence(change, words, pool):
    call = {"y": pool.y, "site": pool.site_labels, "covariates": pool.C} | change
    with pytest.raises(InputError, match=words):
        NaivePooler(steps=2).fit(pool.X, call["y"], site=call["site"], covariates=call["covariates"])


def test_missing_values_are_named(pool):
    frame = pd.DataFrame(pool.X, columns=list(pool.feature_names))
    frame.loc[4, "insula"] = np.nan
    with pytest.raises(InputError, match=r"'insula'\), row 5"):
        NaivePooler(steps=2).fit(frame, pool.y, site=pool.site_labels, covariates=pool.C)


@pytest.mark.parametrize(
    ("kind", "drops"), [(SubsamplingPooler, True), (RandMatchPooler, True), (MMDPooler, False)]
)
def test_methods_that_need_common_support_say_whom_they_drop(kind, drops):
    shares = []
    for overlap in (1.0, 0.0):
        pool = ep.simulate_table(overlap=overlap, people=60).pool
        shares.append(fitted(kind, pool, steps=2).dropped_)
    assert shares[0] < 0.1
    assert (shares[1] > 0.4) is drops


def test_codes_may_come_as_a_data_frame(pool):
    with config_context(enable_metadata_routing=True):
        estimator = NaivePooler(steps=2).set_fit_request(site=True)
        chain = make_pipeline(StandardScaler(), estimator).set_output(transform="pandas")
        codes = chain.fit(pool.X, pool.y, site=pool.site_labels).transform(pool.X)
    assert list(codes.columns)[:2] == ["naivepooler0", "naivepooler1"]


@pytest.mark.parametrize("name", ["n_latent", "hidden"])
def test_a_network_without_units_is_refused(name, pool):
    with pytest.raises(InputError, match=f"{name} must be at least 1. Got 0"):
        NaivePooler(**{name: 0}).fit(pool.X, pool.y, site=pool.site_labels)
