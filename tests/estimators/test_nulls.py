"""What means nothing means nothing after harmonizing: a target that only follows each site's share of it."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

import equipool as ep
from equipool.data.volumes import Volumes
from equipool.exceptions import InputError
from equipool.judge.statmaps import stat_map
from forging import forged_facts

SHUFFLES = 8
N = 240
SITE = np.repeat(["a", "b", "c"], [120, 70, 50])
SHARE = {"a": 0.3, "b": 0.5, "c": 0.7}  # of the target's first class, so that it is confounded with the site


def table(rng):
    """Features of three sites that shift, scale and mix them, and ages; nothing for a target to explain."""
    age = rng.uniform(20, 80, N)
    e = rng.normal(size=(N, 20)) @ rng.normal(size=(20, 20))
    x = e + np.outer(age - 50, rng.normal(size=20)) / 20
    for name in SHARE:
        rows = name == SITE
        mixing = np.eye(20) + 0.15 * rng.normal(size=(20, 20))
        x[rows] = x[rows] @ mixing * rng.uniform(0.7, 1.4, 20) + rng.normal(0, 3, 20)
    return x, age


def shuffled(rng):
    return np.where(rng.random(N) < np.vectorize(SHARE.get)(SITE), "AD", "CN")


def squares(values, target, age):
    """Return mean t² and the share of p < .05, the age and the sites in the model."""
    one = stat_map(values, target, covariates=age, sites=SITE)
    return (one.t[one.tested] ** 2).mean(), (one.p[one.tested] < 0.05).mean()


def require_like_raw(harmonized, raw, tolerances):
    """Compare means over shuffles, within three standard errors of their differences or a tolerance."""
    differences = np.array(harmonized) - np.array(raw)
    mean, error = differences.mean(axis=0), differences.std(axis=0, ddof=1) / np.sqrt(len(differences))
    assert (np.abs(mean) < np.maximum(3 * error, tolerances)).all(), mean


@pytest.mark.parametrize("keep_target", [False, True])
@pytest.mark.parametrize("settings", [{}, {"mixing": 30.0}])
def test_a_target_that_means_nothing_has_no_effect_in_tables(settings, keep_target):
    rng = np.random.default_rng(0)
    x, age = table(rng)
    given, raw, harmonized = {"site": SITE, "covariates": age[:, None]}, [], []
    for _ in range(SHUFFLES):
        target = shuffled(rng)
        model = ep.SiteHarmonizer(keep_target=keep_target, network=False, **settings).fit(x, target, **given)
        raw.append(squares(x, target, age))
        harmonized.append(squares(model.transform(x, **given), target, age))
    require_like_raw(harmonized, raw, (0.03, 0.01))


def test_ages_that_mean_nothing_have_no_effect():
    """Sites are small for so many features, and their covariances hardly differ."""
    rng = np.random.default_rng(2)
    site, p = np.repeat(np.arange(8), 60), 60
    mixing = np.eye(p) + 0.15 * rng.normal(size=(8, p, p)) / np.sqrt(p)
    x = rng.normal(size=(len(site), p)) @ (np.eye(p) + rng.normal(size=(p, p)) / np.sqrt(p))
    x = np.einsum("ip,ipq->iq", x, mixing[site]) + rng.normal(0, 2, (8, p))[site]
    raw, harmonized = [], []
    for _ in range(SHUFFLES):
        given = {"site": site, "covariates": rng.uniform(20, 80, (len(site), 1))}
        model = ep.SiteHarmonizer(network=False).fit(x, **given)
        for values, result in ((x, raw), (model.transform(x, **given), harmonized)):
            one = stat_map(values, given["covariates"][:, 0], sites=site)
            result.append(((one.t**2).mean(), (one.p < 0.05).mean()))
    require_like_raw(harmonized, raw, (0.03, 0.01))


@pytest.mark.parametrize("keep_target", [False, True])
def test_a_target_that_means_nothing_has_no_effect_in_volumes(keep_target):
    rng = np.random.default_rng(1)
    mask = np.ones((6, 7, 5), dtype=bool)

    def fields(count):
        values = np.stack([gaussian_filter(rng.normal(size=mask.shape), 1.5)[mask] for _ in range(count)])
        return values / values.std()

    age = rng.uniform(50, 80, N)
    people = 3 * rng.normal(size=(N, 12)) @ fields(12)
    scans = 100 + 10 * fields(1) + np.outer((age - 65) / 10, 3 * fields(1)) + people
    scans += 6 * fields(3)[np.searchsorted([*SHARE], SITE)] + rng.normal(size=scans.shape)
    volumes = Volumes(mask, np.eye(4), (), scans.astype(np.float32), np.arange(N), None)
    given, raw, harmonized = {"site": SITE, "covariates": age[:, None]}, [], []
    model = ep.ImageHarmonizer(keep_target=keep_target).fit(volumes, shuffled(rng), **given)
    for _ in range(SHUFFLES):
        target = shuffled(rng)
        model = model.fit(volumes, target, **given) if keep_target else model
        raw.append(squares(volumes, target, age))
        harmonized.append(squares(model.transform(volumes, **given), target, age))
    require_like_raw(harmonized, raw, (0.03, 0.01))


def test_a_target_is_allowed_for_only_if_that_is_asked_for():
    rng = np.random.default_rng(2)
    x, age = table(rng)
    target = shuffled(rng)
    x[target == "AD"] += 6.0
    given = {"site": SITE, "covariates": age[:, None]}
    blind = ep.SiteHarmonizer().fit(x, **given).transform(x, **given)
    assert (ep.SiteHarmonizer().fit(x, target, **given).transform(x, **given) == blind).all()
    model = ep.SiteHarmonizer(keep_target=True).fit(x, target, **given)
    told = model.transform(x, **given)
    assert not np.allclose(told, blind)
    assert model.choices_["target"] is True
    assert ep.SiteHarmonizer().fit(x, target, **given).choices_["target"] is False
    # Sites differ in their share of patients: allowed for, this is not taken for what the sites do.
    apart = [np.mean([v[s == SITE].mean() for s in "c"]) - v[SITE == "a"].mean() for v in (told, blind)]
    assert abs(apart[0]) > abs(apart[1])


@pytest.mark.parametrize("effect", [0.0, 12.0])
def test_whether_a_target_was_allowed_for_is_said_and_saved(effect, tmp_path):
    """A target that is given and means nothing does not enter."""
    rng = np.random.default_rng(2)
    x, age = table(rng)
    target = shuffled(rng)
    x[target == "AD", :10] += effect  # of all voxels, it would be taken for the gain
    cube = Volumes(np.ones((4, 5, 1), dtype=bool), np.eye(4), (), 100 + x, np.arange(N), None)
    for kind, values in ((ep.SiteHarmonizer, x), (ep.ImageHarmonizer, cube)):
        model = kind(keep_target=True).fit(values, target, site=SITE, covariates=age[:, None])
        folder = model.save(tmp_path / kind.__name__)
        assert model.choices_["target"] is bool(effect)
        assert ep.load(folder).choices_ == model.choices_
        forged_facts(folder, _with_another_answer)
        with pytest.raises(InputError, match=r"is damaged: .*allowed_for_target"):
            ep.load(folder)


def _with_another_answer(facts):
    facts["learned"]["model_"]["allowed_for_target"] = "yes"
    return facts
