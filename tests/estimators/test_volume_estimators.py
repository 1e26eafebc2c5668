"""The pooler and the baselines on volumes: alone or in a batch, lazily or not, saved or not."""

import numpy as np
import pytest
import torch
from torch import nn

import equipool as ep
from equipool.data import PooledDataset, Volumes
from equipool.estimators import (
    CAIPooler,
    EquivariantPooler,
    MMDPooler,
    NaivePooler,
    RandMatchPooler,
    SubsamplingPooler,
)
from equipool.estimators.pooling_estimator import without_site
from equipool.exceptions import InputError

ALL = [EquivariantPooler, NaivePooler, MMDPooler, CAIPooler, SubsamplingPooler, RandMatchPooler]


@pytest.fixture(scope="module")
def people(brain_folder):
    return ep.read_bids(brain_folder)


@pytest.fixture(scope="module")
def volumes(people, brains):
    return Volumes.build(people["path"], mask=brains.anatomy.mask)


def fitted(kind, volumes, people, **settings):
    settings = {"steps": 8, "n_latent": 8, "hidden": 16, **settings}
    return kind(**settings).fit(volumes, people["dx"], site=people["site"], covariates=people[["age"]])


@pytest.fixture(scope="module", params=ALL, ids=lambda kind: kind.__name__)
def estimator(request, volumes, people):
    return fitted(request.param, volumes, people)


@pytest.fixture(scope="module")
def pooler(volumes, people):
    return fitted(EquivariantPooler, volumes, people, encoder="components")


def test_a_code_does_not_depend_on_the_other_scans(estimator, volumes):
    codes = estimator.transform(volumes)
    assert codes.shape == (24, 8)
    assert (estimator.transform(volumes[[5]]) == codes[[5]]).all()
    alone, among = (estimator.predict_proba(v) for v in (volumes[[7, 5]], volumes))
    np.testing.assert_allclose(alone, among[[7, 5]], rtol=1e-12)


def test_a_saved_estimator_gives_the_same_bits(estimator, volumes, people, tmp_path):
    again = ep.load(estimator.save(tmp_path / "model"))
    assert (again.transform(volumes) == estimator.transform(volumes)).all()
    assert (again.predict(volumes) == estimator.predict(volumes)).all()
    assert (again.reconstruct(volumes).read() == estimator.reconstruct(volumes).read()).all()
    if not isinstance(estimator, EquivariantPooler):
        return
    given = {"site": people["site"], "covariates": people[["age"]]}
    for function in (
        lambda model: model.front_.transform(volumes, **given),
        lambda model: model.transport(volumes, 70.0),
    ):
        assert (function(again).read() == function(estimator).read()).all()


def test_paths_volumes_and_pools_are_the_same(pooler, volumes, people):
    paths = people["path"].tolist()
    pool = PooledDataset.from_frame(people, site="site", images="path", covariates=["age"])
    codes = pooler.transform(volumes)
    for given in (paths, [str(path) for path in paths], people["path"], pool, Volumes.build(paths)):
        assert (pooler.transform(given) == codes).all()
    assert (pooler.transform(paths[2]) == codes[[2]]).all()


def test_fitting_on_paths_is_fitting_on_their_volumes(people):
    paths = people["path"].tolist()
    first, second = (
        fitted(EquivariantPooler, given, people, encoder="linear") for given in (paths, Volumes.build(paths))
    )
    assert (first.transform(paths) == second.transform(paths)).all()


@pytest.mark.parametrize("kind", [EquivariantPooler, NaivePooler])
def test_lazy_reading_changes_no_bit(kind, volumes, people, monkeypatch):
    settings = {"encoder": "components", "steps": 4}
    in_memory = fitted(kind, volumes, people, **settings).transform(volumes)
    monkeypatch.setattr("equipool.estimators.pooling_estimator.IN_MEMORY", 0)
    assert (fitted(kind, volumes, people, **settings).transform(volumes) == in_memory).all()


def test_harmonized_volumes_are_volumes_of_the_same_people(pooler, volumes, people):
    given = {"site": people["site"], "covariates": people[["age"]]}
    clean = pooler.front_.transform(volumes, **given)
    assert clean.shape == volumes.shape
    assert clean.paths == volumes.paths
    assert np.isfinite(clean.read()).all()
    part = pooler.front_.transform(
        volumes[[3, 9]], site=people["site"][[3, 9]], covariates=people[["age"]].loc[[3, 9]]
    )
    assert (part.read() == clean.read()[[3, 9]]).all()
    # Sites' mean scans are closer together, at the same gain.
    means = []
    for rows in (without_site(None, volumes.read()), without_site(None, clean.read())):
        sites = np.array(
            [rows[(people["site"] == site).to_numpy()].mean(axis=0) for site in ("site1", "site2")]
        )
        means.append(np.linalg.norm(sites[0] - sites[1]))
    assert means[1] < 0.7 * means[0]


def test_a_scan_with_another_gain_is_harmonized_to_the_same(pooler, volumes, people):
    given = {"site": people["site"][:4], "covariates": people[["age"]][:4]}
    brighter = volumes[:4].with_values(3 * volumes[:4].read())
    once, thrice = (pooler.front_.transform(v, **given).read() for v in (volumes[:4], brighter))
    np.testing.assert_allclose(thrice, once, rtol=1e-5)
    np.testing.assert_allclose(
        pooler.read_covariates(brighter), pooler.read_covariates(volumes[:4]), rtol=1e-4
    )


def test_transport_to_the_present_covariates_changes_nothing(pooler, volumes, people):
    here = pooler.transport(volumes, people[["age"]], covariates=people[["age"]]).read()
    np.testing.assert_allclose(here, volumes.read(), rtol=1e-4, atol=1e-3)
    there = pooler.transport(volumes, 90.0, covariates=people[["age"]]).read()
    assert np.abs(there - volumes.read()).max() > 1e-2


def test_another_grid_is_refused_with_both_named(pooler, volumes, tmp_path, brains):
    coarse = Volumes.from_array(np.ones((2, 5, 6, 7)), np.diag([9.0, 9, 9, 1]), np.ones((5, 6, 7)))
    with pytest.raises(
        InputError, match=r"grid of 23 × 28 × 23 voxels of 8 × 8 × 8 mm.*5 × 6 × 7 voxels of 9"
    ):
        pooler.transform(coarse)
    path = coarse.write(coarse.read()[0], 0, tmp_path / "coarse.nii.gz")
    with pytest.raises(InputError, match=r"23 × 28 × 23 voxels.*5 × 6 × 7 voxels"):
        pooler.transform([path])
    moved = brains.anatomy.affine.copy()
    moved[0, 3] += 4
    shifted = Volumes.from_array(brains.scan(0)[None], moved, brains.anatomy.mask)
    with pytest.raises(InputError, match=r"from \(-90, .*from \(-86, "):
        pooler.transform(shifted)
    smaller = Volumes.from_array(brains.scan(0)[None], brains.anatomy.affine, brains.scan(0) > 100)
    with pytest.raises(InputError, match="another mask"):
        pooler.transform(smaller)


def test_values_changed_in_memory_are_never_read_from_the_files_instead(pooler, people, volumes):
    derived = Volumes.build(people["path"])  # has a mask of its own
    changed = derived.with_values(derived.read() + 1)
    with pytest.raises(InputError, match="another mask"):
        pooler.transform(changed)


def test_tables_and_volumes_are_not_confused(pooler, volumes, people):
    with pytest.raises(InputError, match="fitted on volumes"):
        pooler.transform(np.zeros((2, volumes.shape[1])))
    table = np.random.default_rng(0).normal(size=(24, 3))
    on_table = EquivariantPooler(steps=2).fit(table, site=people["site"], covariates=people["age"])
    with pytest.raises(InputError, match="fitted on a table"):
        on_table.transform(volumes)
    assert on_table.fit(volumes, site=people["site"], covariates=people["age"]).transform(volumes).shape == (
        24,
        30,
    )


def network():
    return nn.Sequential(nn.AvgPool3d(5), nn.Flatten(), nn.Linear(4 * 5 * 4, 8))


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (
            {"encoder": nn.Sequential(nn.Flatten(), nn.LazyLinear(7))},
            r"encoder must give 8 .*n_latent=8.*\(2, 7\)",
        ),
        ({"encoder": nn.Linear(3, 8)}, "encoder cannot take"),
        ({"decoder": nn.Linear(8, 5)}, r"decoder must give .*n_latent=8.*\(2, 5\)"),
        ({"encoder": "resnett"}, "'resnet', or a torch module. Got 'resnett'"),
    ],
)
def test_networks_that_do_not_fit_are_refused_before_training(volumes, people, modules, words):
    with pytest.raises(InputError, match=words):
        fitted(EquivariantPooler, volumes, people, **modules)


def test_an_estimator_with_modules_of_the_user_is_saved_without_their_code(volumes, people, tmp_path):
    own = network()
    before = own[2].weight.clone()
    pooler = fitted(EquivariantPooler, volumes, people, encoder=own)
    assert torch.equal(own[2].weight, before)
    folder = pooler.save(tmp_path / "model")
    again = ep.load(folder, encoder=network())
    assert (again.transform(volumes) == pooler.transform(volumes)).all()
    with pytest.raises(InputError, match=r"load\(folder, encoder=\.\.\.\)"):
        ep.load(folder)
    with pytest.raises(InputError, match="same architecture"):
        ep.load(folder, encoder=nn.Linear(2, 3))
    with pytest.raises(InputError, match="no decoder of yours"):
        ep.load(folder, encoder=network(), decoder=nn.Linear(8, 4))
