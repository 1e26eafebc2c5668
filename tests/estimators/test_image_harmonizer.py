"""ImageHarmonizer: new scanners, what it is fitted on, and saving."""

import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.ndimage import gaussian_filter

import equipool as ep
from equipool.data.volumes import Volumes
from equipool.exceptions import EquipoolWarning, InputError

MASK = np.zeros((10, 11, 9), dtype=bool)
MASK[1:-1, 1:-1, 1:-1] = True
N = 90


def smooth_field(rng):
    field = gaussian_filter(rng.normal(size=MASK.shape), 1.5)[MASK]
    return field / field.std()


def volumes_of(rows):
    return Volumes(MASK, np.eye(4), (), rows.astype(np.float32), np.arange(len(rows)), None)


@pytest.fixture(scope="module")
def pool():
    """Volumes of three scanners, the clean ones, and their table."""
    rng = np.random.default_rng(4)
    brain, slope = 100 + 15 * smooth_field(rng), 3 * smooth_field(rng)
    patterns, shifts = [smooth_field(rng) for _ in range(8)], [8 * smooth_field(rng) for _ in range(3)]
    age, site = rng.uniform(50, 80, N), np.resize(["A", "B", "C"], N)
    clean = brain + np.outer((age - 65) / 10, slope) + 2 * rng.normal(size=(N, 8)) @ patterns
    clean += rng.normal(size=clean.shape)
    index = np.searchsorted(["A", "B", "C"], site)
    scans = clean + np.array(shifts)[index] - np.mean(shifts[:2], axis=0)
    return volumes_of(scans), clean, pd.DataFrame({"site": site, "age": age, "sex": np.resize(["f", "m"], N)})


def about(table, rows=slice(None)):
    return {"site": table["site"][rows], "covariates": table[["age", "sex"]][rows]}


@pytest.fixture(scope="module")
def harmonizer(pool):
    """Fitted without scanner C."""
    volumes, _, table = pool
    rows = (table["site"] != "C").to_numpy()
    return ep.ImageHarmonizer().fit(volumes, fit_on=rows, **about(table))


def error(clean, truth, rows):
    """Root mean square error at the same mean brightness."""
    values = clean.read()[rows].astype(float)
    values *= np.median(truth[rows]) / np.median(values)
    return np.sqrt(((values - truth[rows]) ** 2).mean())


def test_a_new_scanner_is_estimated_from_its_volumes(pool, harmonizer):
    volumes, truth, table = pool
    new = (table["site"] == "C").to_numpy()
    with pytest.raises(InputError, match=r"Site 'C' was not seen at fit.*unseen_site=\"adapt\""):
        harmonizer.transform(volumes, **about(table))
    pooled, adapted = (
        ep.ImageHarmonizer(unseen_site=policy)
        .fit(volumes, fit_on=~new, **about(table))
        .transform(volumes, **about(table))
        for policy in ("pooled", "adapt")
    )
    np.testing.assert_array_equal(pooled.read()[new], volumes.read()[new])
    np.testing.assert_array_equal(adapted.read()[~new], pooled.read()[~new])
    assert error(adapted, truth, new) < 0.6 * error(pooled, truth, new)
    assert error(adapted, truth, new) < 1.3 * error(adapted, truth, ~new)


def test_few_volumes_of_a_new_scanner_are_warned_of(pool, harmonizer):
    volumes, _, table = pool
    adapting = ep.ImageHarmonizer(unseen_site="adapt").fit(
        volumes, fit_on=(table["site"] != "C").to_numpy(), **about(table)
    )
    rows = np.flatnonzero(table["site"] == "C")
    with pytest.warns(EquipoolWarning, match=r"1 new site with fewer than 10 rows \('C'\)"):
        few = adapting.transform(volumes[rows[:4]], **about(table.iloc[rows[:4]]))
    assert np.isfinite(few.read()).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapting.transform(volumes[rows[:12]], **about(table.iloc[rows[:12]]))


def test_the_volumes_it_is_fitted_on_decide(pool, harmonizer):
    volumes, _, table = pool
    rows = np.flatnonzero(table["site"] != "C")
    alone = ep.ImageHarmonizer().fit(volumes[rows], **about(table.iloc[rows]))
    given = about(table.iloc[rows])
    np.testing.assert_array_equal(
        alone.transform(volumes[rows], **given).read(), harmonizer.transform(volumes[rows], **given).read()
    )
    assert set(harmonizer.choices_) == {"curvature", "intensity", "target"}
    assert harmonizer.sites_.tolist() == ["A", "B"]


@pytest.mark.parametrize("gamma", [1.0, 0.6])
def test_a_saved_harmonizer_gives_the_same_numbers(pool, gamma, tmp_path, monkeypatch):
    """With intensities and without."""
    monkeypatch.setattr("equipool.sites.volume_model._intensity_enters", lambda scans: gamma != 1)
    volumes, _, table = pool
    rows = volumes.read()
    second = (table["site"] == "B").to_numpy()[:, None]
    volumes = volumes_of(np.where(second, 100 * (rows / 100) ** gamma, rows))
    model = ep.ImageHarmonizer(unseen_site="adapt", random_state=3).fit(volumes, **about(table))
    assert model.choices_["intensity"] is (gamma != 1)
    again = ep.load(model.save(tmp_path / "model"))
    assert again.get_params() == model.get_params()
    assert again.choices_ == model.choices_
    for given in (about(table), {**about(table), "site": ["new"] * N}):
        first, second = (each.transform(volumes, **given).read() for each in (model, again))
        np.testing.assert_array_equal(first, second)


def test_settings_that_mean_nothing_are_refused(pool):
    volumes, _, table = pool
    with pytest.raises(InputError, match=r"unseen_site must be one of error, pooled, adapt\. Got 'skip'"):
        ep.ImageHarmonizer(unseen_site="skip").fit(volumes, **about(table))
