"""What was written into features, or lost from them: planted cheats are named, honest harmonizers are not."""

from dataclasses import replace

import numpy as np
import pytest

import equipool as ep
import oracles
import planted
from equipool.data import check
from equipool.judge import written
from equipool.judge.heldout import held_out
from equipool.report.account import account_of, again_table, refit_table, verdict

SEEDS = range(2)
FORMS = pytest.mark.parametrize(("seed", "refitted"), [(0, False), (1, True), (2, False)])


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Classifiers of the site are not the question here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equipool.judge.heldout.REPORTED", {"tree": "decision tree"})
        patch.setattr("equipool.judge.heldout.AMONG_TEST", ("tree",))
        yield


def said(pool, make, *, refitted):
    """Return the verdict on a harmonizer, by its table alone or refitted."""
    given = {"site": pool.site_labels, "covariates": pool.C}
    final = make().fit(pool.features, pool.y, **given).transform(pool.features, **given)
    refit = refit_table(pool, make) if refitted else lambda train: final
    again = again_table(pool, make) if refitted else None
    judged = held_out(pool, pool.features, refit, final=final, again=again, folds=2)
    return verdict(judged, "age", {"feature": list(pool.feature_names), **judged["features"]})


def levels(sentences, words):
    return {one["level"] for one in sentences if words in one["text"]}


@FORMS
@pytest.mark.parametrize("make", [planted.Honest, ep.SiteHarmonizer])
def test_an_honest_harmonizer_is_not_accused(make, seed, refitted):
    sentences = said(planted.table(seed), make, refitted=refitted)
    assert levels(sentences, "written into") == set()
    assert levels(sentences, "keep") == set()
    assert levels(sentences, "signal of age was preserved") == {"good"}


@FORMS
@pytest.mark.parametrize("make", planted.AGE)
def test_age_written_into_features_is_named(make, seed, refitted):
    sentences = said(planted.table(seed), make, refitted=refitted)
    assert levels(sentences, "age was written into features") == {"bad"}
    assert "good" not in levels(sentences, "age is predicted") | levels(sentences, "signal of age")


@FORMS
@pytest.mark.parametrize("make", [planted.MovesClasses, planted.ExaggeratesChance])
def test_a_target_written_into_features_is_named(make, seed, refitted):
    sentences = said(planted.table(seed), make, refitted=refitted)
    assert levels(sentences, "dx was written into features") == {"bad"}
    assert "good" not in levels(sentences, "dx is predicted") | levels(sentences, "signal of dx")


@pytest.mark.parametrize("seed", SEEDS)
def test_chance_effects_that_grow_with_a_covariance_without_the_target_are_named(seed):
    """Nothing in the table shows it: residuals that lose the target have too small a covariance along it."""
    sentences = said(planted.table(seed, people=40, features=24), planted.DividesByCovariance, refitted=True)
    assert "chance effect" in " ".join(one["text"] for one in sentences if one["level"] == "bad")


def reported(seed, make):
    """Return which cells were emptied, the accounts without and with that, and the sentence about it.

    Of a table that was given, with a target that has nothing to do with it.
    """
    pool = planted.table(seed, people=80)
    pool = replace(pool, y=np.random.default_rng(seed).permutation(pool.y))
    given = {"site": pool.site_labels, "covariates": pool.C}
    after = make().fit(pool.features, pool.y, **given).transform(pool.features, **given)
    checked = check(pool.to_frame(), site="site", covariates="age", target="dx", id="id")
    untouched, account = (account_of(pool, x, None, checked, folds=2) for x in (pool.features, after))
    [sentence] = [one for one in account.verdict if "were emptied" in one["text"]]
    assert f"{np.isnan(after).sum()} cells of" in sentence["text"]
    return np.isnan(after), untouched, account, sentence


@pytest.mark.parametrize("seed", range(3))
def test_cells_emptied_by_the_target_are_named_and_leave_the_table_as_measured_alone(seed):
    """What was empty in one table was emptied in the other: an effect stood there "as measured", ticked."""
    emptied, untouched, account, sentence = reported(seed, planted.EmptiesCells)
    assert sentence["level"] == "bad"
    assert f"{emptied.sum()} cells of 12 features" in sentence["text"]
    assert "'dx': this can make up an effect" in sentence["text"]
    assert levels(account.verdict[1:], "dx") <= {"fair", "bad"}
    assert account.shares["emptied cells"] == emptied.sum(axis=0).tolist()
    assert account.shares["before"] == untouched.shares["before"]
    measured = {"measured_t", "with_site_t", "measured_q", "with_site_q"}
    for name in measured & set(untouched.effects["table"]):
        assert account.effects["table"][name] == untouched.effects["table"][name]
    assert account.held_out["signals"]["before"] == untouched.held_out["signals"]["before"]


@pytest.mark.parametrize("seed", range(3))
def test_outliers_that_were_emptied_are_counted_and_accuse_nobody(seed):
    _, _, account, sentence = reported(seed, planted.EmptiesOutliers)
    assert sentence["level"] == "fair"
    assert "'dx'" not in sentence["text"]
    assert "good" not in levels(account.verdict[1:], "signal of")


@FORMS
@pytest.mark.parametrize("make", planted.NOTHING_KEPT)
def test_features_that_keep_nothing_of_participants_are_named(make, seed, refitted):
    sentences = said(planted.table(seed), make, refitted=refitted)
    assert levels(sentences, "keep little") == {"bad"}
    assert levels(sentences, "12 features") == {"bad"}


def test_the_feature_that_age_was_added_to_is_named():
    pool = planted.table(0)
    [text] = [one["text"] for one in said(pool, planted.AddsAge, refitted=False) if one["level"] == "bad"]
    assert f"'{pool.feature_names[2]}'" in text


def test_a_moved_point_mass_is_said_to_be_one():
    """As ComBat does: participants with a volume of 0 get one that depends on age."""
    pool = planted.table(0)
    x = pool.features.copy()
    x[: len(x) // 2, 4] = 0.0
    final = x.copy()
    final[: len(x) // 2, 4] = 20 * pool.C[: len(x) // 2, 0]
    judged = held_out(pool, x, lambda train: final, final=final, folds=2)
    features = {"feature": list(pool.feature_names), **judged["features"]}
    sentences = verdict(judged, "age", features)
    assert levels(sentences, "a value that many share was moved") == {"fair"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("drawn", [False, True])
def test_cells_filled_in_from_site_and_age_are_no_evidence(seed, drawn):
    pool = planted.noise_with_holes(seed)
    final = planted.filled_in(pool, seed, drawn=drawn)
    filled = np.isnan(pool.features)
    judged = held_out(pool, pool.features, lambda train: final, final=final, filled=filled, folds=3)
    sentences = verdict(judged, "age", {"feature": list(pool.feature_names), **judged["features"]})
    assert all(one["level"] != "good" for one in sentences[1:])
    assert levels(sentences, "Filled-in cells predict it") == {"bad"}


@pytest.mark.parametrize("seed", SEEDS)
def test_our_own_imputation_tells_nothing(seed):
    pool = planted.noise_with_holes(seed)
    given = {"site": pool.site_labels, "covariates": pool.C}
    final = ep.SiteHarmonizer(missing="impute").fit_transform(pool.features, **given)
    judged = held_out(
        pool, pool.features, lambda train: final, final=final, filled=np.isnan(pool.features), folds=3
    )
    sentences = verdict(judged, "age", {"feature": list(pool.feature_names), **judged["features"]})
    assert levels(sentences, "written into") == set()
    assert all(one["level"] != "good" for one in sentences[1:])


def test_what_is_in_empty_cells_changes_no_number():
    pool = planted.noise_with_holes(1, rows=120, features=5)
    judged = []
    for value in (np.nan, 0.0, 1e6):
        final = np.where(np.isnan(pool.features), value, pool.features)
        empty = np.isnan(pool.features)
        judged.append(
            held_out(pool, pool.features, lambda train, x=final: x, final=final, filled=empty, folds=2)
        )
    for one in judged[1:]:
        assert one["site_scores"] == judged[0]["site_scores"]
        assert one["signals"] == judged[0]["signals"]
        assert one["features"] == judged[0]["features"]


def test_coefficients_are_those_of_a_regression_within_sites():
    rng = np.random.default_rng()
    site, v = np.arange(90) % 3, rng.normal(size=(90, 2))
    x = rng.normal(size=(90, 2)) + site[:, None]
    z = x**3 / 20 + x + 0.3 * v[:, [0]] + rng.normal(size=x.shape) / 10
    x[:7, 0] = z[:7, 0] = np.nan
    np.testing.assert_allclose(
        written.coefficients(x, z, v, site), oracles.added_to_features(x, z, v, site), rtol=1e-6
    )


def test_equal_means_and_spreads_of_sites_are_no_gain():
    rng = np.random.default_rng()
    site = np.arange(120) % 3
    x = rng.normal(size=(120, 4))
    moved = x * (1 + site[:, None]) + 7 * site[:, None]
    np.testing.assert_allclose(written.within_sites(x, site), written.within_sites(moved, site), atol=1e-12)
    np.testing.assert_allclose(written.kept(moved, x, x[:, :0], site), _kept(moved, x, site), atol=1e-12)


def _kept(before, after, site):
    centred = [
        np.stack([x[i] - x[site == site[i]].mean(axis=0) for i in range(len(x))]) for x in (before, after)
    ]
    return [np.corrcoef(a, b)[0, 1] for a, b in zip(centred[0].T, centred[1].T, strict=True)]
