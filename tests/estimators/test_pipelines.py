"""The documented recipe: site and covariates as columns of X, in a pipeline, with any scorer."""

import warnings

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import LeaveOneGroupOut, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import equipool as ep
from equipool.exceptions import InputError


@pytest.fixture(scope="module")
def pool():
    return ep.simulate_table(overlap=0.5, people=40, random_state=3).pool


def model(**settings):
    harmonizer = ep.SiteHarmonizer(site_column="site", covariate_columns=["age"], **settings)
    return make_pipeline(harmonizer, StandardScaler(), LogisticRegression())


def columns(pool):
    return pool.to_frame().drop(columns=[pool.id_name, pool.target_name])


def test_any_scorer_sees_test_participants_with_their_own_site_and_age(pool, monkeypatch):
    X, y = columns(pool), (pool.y == "AD").astype(int)
    received, transform = [], ep.SiteHarmonizer.transform

    def spy(harmonizer, X, **given):
        received.append(X)
        return transform(harmonizer, X, **given)

    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    with monkeypatch.context() as patch:
        patch.setattr(ep.SiteHarmonizer, "transform", spy)
        scores = cross_val_score(model(), X, y, cv=folds, scoring="roc_auc", error_score="raise")
    by_hand = []
    for train, test in folds.split(X, y):
        assert any(each[["site", "age"]].equals(X[["site", "age"]].iloc[test]) for each in received)
        harmonizer, x = ep.SiteHarmonizer(), X.drop(columns=["site", "age"])
        fitted = {"site": X["site"].iloc[train], "covariates": X[["age"]].iloc[train]}
        given = {"site": X["site"].iloc[test], "covariates": X[["age"]].iloc[test]}
        clean = harmonizer.fit_transform(x.iloc[train], **fitted)
        rest = make_pipeline(StandardScaler(), LogisticRegression()).fit(clean, y[train])
        new = harmonizer.transform(x.iloc[test], **given)
        by_hand.append(roc_auc_score(y[test], rest.predict_proba(new)[:, 1]))
    np.testing.assert_allclose(scores, by_hand)


def test_nothing_is_inferred_where_a_column_is_missing(pool):
    X, y = columns(pool), pool.y
    for name in ("site", "age"):
        fitted = model().fit(X, y)
        with pytest.raises(InputError, match=name):
            fitted.predict(X.drop(columns=name))
    asked = model(infer=True).fit(X, y)
    assert len(asked.predict(X.drop(columns=["site", "age"]))) == len(X)


def test_a_left_out_site_is_an_error_and_not_a_score(pool):
    call = {"cv": LeaveOneGroupOut(), "groups": pool.site, "scoring": "roc_auc"}
    X, y = columns(pool), (pool.y == "AD").astype(int)
    with pytest.raises(InputError, match="was not seen at fit"):
        cross_val_score(model(), X, y, error_score="raise", **call)
    # scikit-learn's default turns errors of scoring into NaN, and quotes them in a warning.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert np.isnan(cross_val_score(model(), X, y, **call)).all()
    assert any("was not seen at fit" in str(one.message) for one in said)
    scores = cross_val_score(model(unseen_site="adapt"), X, y, error_score="raise", **call)
    assert np.isfinite(scores).all()


def test_images_need_site_and_covariates_too(brain_folder):
    people = ep.read_bids(brain_folder)
    given = {"site": people["site"], "covariates": people[["age"]]}
    harmonizer = ep.ImageHarmonizer().fit(people["path"], **given)
    with pytest.raises(InputError, match="site of each row is needed"):
        harmonizer.transform(people["path"], covariates=people[["age"]])
    with pytest.raises(InputError, match="'age'"):
        harmonizer.transform(people["path"], site=people["site"])
    with pytest.raises(InputError, match="keep_target must be True or False"):
        ep.ImageHarmonizer(keep_target="dx").fit(people["path"], people["dx"], **given)
