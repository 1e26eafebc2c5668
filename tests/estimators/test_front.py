"""A harmonizer before the network of a pooler or a baseline."""

import numpy as np
import pytest
from sklearn.base import clone

import equipool as ep
from equipool.estimators import (
    CAIPooler,
    EquivariantPooler,
    ImageHarmonizer,
    MMDPooler,
    NaivePooler,
    RandMatchPooler,
    SiteHarmonizer,
    SubsamplingPooler,
)
from equipool.exceptions import InputError

KINDS = [NaivePooler, MMDPooler, CAIPooler, SubsamplingPooler, RandMatchPooler, EquivariantPooler]
QUICK = {"steps": 4, "n_latent": 6, "hidden": 8}


@pytest.fixture(scope="module")
def given(split):
    pool, _ = split
    return {"site": pool.site_labels, "covariates": pool.C}


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_sees_what_the_harmonizer_makes_of_features_alone(kind, split, given):
    pool, new = split
    behind = kind(front=True, **QUICK).fit(pool.X, pool.y, **given)
    harmonizer = SiteHarmonizer(infer=True).fit(pool.X, pool.y, **given)
    plain = kind(**QUICK, front=None).fit(harmonizer.transform(pool.X), pool.y, **given)
    np.testing.assert_array_equal(behind.transform(new.X), plain.transform(harmonizer.transform(new.X)))
    np.testing.assert_array_equal(behind.reconstruct(new.X), plain.reconstruct(harmonizer.transform(new.X)))
    assert not np.allclose(behind.transform(new.X), plain.transform(new.X))


def test_a_given_harmonizer_is_cloned(split, given):
    pool, new = split
    front = SiteHarmonizer(random_state=7)
    pooler = EquivariantPooler(front=front, **QUICK).fit(pool.X, pool.y, **given)
    assert not hasattr(front, "model_")
    assert pooler.front_.random_state == 7
    assert clone(pooler).front.get_params() == front.get_params()
    change = pooler.transport(new.X, to=70.0) - new.X
    assert change.shape == new.X.shape
    assert np.abs(change).max() > 0


@pytest.mark.parametrize("kind", [NaivePooler, EquivariantPooler])
def test_tables_have_no_front_by_default(kind, split, given):
    pool, _ = split
    assert kind(**QUICK).fit(pool.X, pool.y, **given).front_ is None
    assert kind(front=False, **QUICK).fit(pool.X, pool.y, **given).front_ is None


def test_volumes_have_one_before_the_pooler_alone(brains, brain_folder, tmp_path):
    people = ep.read_bids(brain_folder)
    volumes = ep.Volumes.build(people["path"], mask=brains.anatomy.mask)
    given = {"site": people["site"], "covariates": people[["age"]]}
    for estimator, wanted in (
        (EquivariantPooler(encoder="linear", **QUICK), ImageHarmonizer),
        (EquivariantPooler.from_preset("paper", encoder="linear", **QUICK), type(None)),
        (NaivePooler(encoder="linear", **QUICK), type(None)),
        (NaivePooler(encoder="linear", front="auto", **QUICK), ImageHarmonizer),
    ):
        estimator.fit(volumes, people["dx"], **given)
        assert type(estimator.front_) is wanted
        again = ep.load(estimator.save(tmp_path / f"{type(estimator).__name__}-{wanted.__name__}"))
        np.testing.assert_array_equal(again.transform(volumes), estimator.transform(volumes))
        assert type(again.front_) is wanted
        assert again.front == estimator.front
    with pytest.raises(InputError, match=r"front must be ImageHarmonizer\(\) for volumes"):
        NaivePooler(front=SiteHarmonizer(), **QUICK).fit(volumes, people["dx"], **given)
