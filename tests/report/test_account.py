"""The account tells the truth: of a harmonizer that works, of one that does nothing, of one that lies."""

import json

import numpy as np
import pytest

import equipool as ep
from equipool.data import PooledDataset, check
from equipool.exceptions import InputError
from equipool.judge.heldout import MIN_PARTICIPANTS, held_out, make_folds
from equipool.judge.scores import site_shares
from equipool.report.account import Account, account_of, best, refit_table, tau_of, verdict
from equipool.report.figure_tables import boxes, effects, worst
from equipool.report.page import report_page


@pytest.fixture(scope="module")
def truth():
    return ep.simulate_table(people=50, overlap=0.6, noise=0.06)


@pytest.fixture(scope="module")
def pool(truth):
    return truth.pool


@pytest.fixture(scope="module")
def preflight(pool):
    return check(pool.to_frame(), site="site", covariates="age", target="dx", id="id")


@pytest.fixture(scope="module")
def account(pool, preflight):
    model = ep.SiteHarmonizer(random_state=0)
    clean = model.fit_transform(pool.X, pool.y, site=pool.site_labels, covariates=pool.C)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equipool.judge.classifiers.EXTRA_TREES", 10)
        return account_of(pool, clean, refit_table(pool, ep.SiteHarmonizer), preflight)


@pytest.fixture
def quick(monkeypatch):
    """Leave out what takes long: t-SNE and many trees."""
    monkeypatch.setattr("equipool.report.figure_tables.embedding", lambda x, seed: x[:, :2])
    monkeypatch.setattr("equipool.judge.classifiers.EXTRA_TREES", 3)


def reading(found, stage, who="training participants"):
    return best(found["site_scores"], stage, who)["mean"]


def test_readers_find_the_site_before_and_hardly_after(account):
    found = account.held_out
    assert reading(found, "before") > 0.9
    assert reading(found, "after") < 0.7
    assert 0.15 < reading(found, "shuffled") < 0.55
    assert np.mean(account.shares["after"]) < np.mean(account.shares["before"]) / 2


def test_signals_are_read_before_and_after(account):
    signals = account.held_out["signals"]
    rows = list(zip(signals["what"], signals["where"], signals["after"], strict=True))
    assert {(what, where) for what, where, _ in rows} == {
        ("age", "all"),
        ("age", "within sites"),
        ("age", "left-out sites"),
        ("dx", "all"),
        ("dx", "within sites"),
    }
    assert all(after > 0.3 for _, _, after in rows)


def test_the_account_survives_its_file(account):
    again = Account.from_json(account.to_json())
    assert again == account
    assert "NaN" not in account.to_json()


@pytest.mark.parametrize("text", ["{}", "no json", "[]", '{"version": 0}'])
def test_a_foreign_account_is_refused(text):
    with pytest.raises(InputError, match="account"):
        Account.from_json(text)


def test_no_ids_are_told(account, pool):
    assert str(pool.ids[0]) not in account.to_json()


def test_a_report_of_a_table_shows_nothing_of_another_model(account, monkeypatch):
    assert account.equivariance is None
    assert set(account.maps) == {"before", "after"}
    page = report_page(account)
    assert "τ" not in page
    assert "quivarianc" not in page.replace("<cite>Equivariance", "")


def test_tau_is_of_the_pooler_that_was_fitted(pool):
    pooler = ep.EquivariantPooler(steps=20, finetune=False, random_state=0)
    pooler.fit(pool.X, None, site=pool.site_labels, covariates=pool.C)
    about, rows, tau = tau_of(pooler, pool.features, pool)
    assert about["error"] < 1e-6
    assert about["covariate"] == "age"
    np.testing.assert_allclose(tau, pooler.tau_vector(pool.features[rows]))


def test_a_harmonizer_that_does_nothing_is_bad_news(pool, preflight, quick):
    account = account_of(pool, pool.features, None, preflight)
    assert account.kind == "given"
    assert account.verdict[0]["level"] == "bad"
    assert "Bad news" in account.verdict[0]["text"]
    assert "not cross-validated" in report_page(account)


def test_a_harmonizer_that_destroys_people_is_bad_news(pool):
    noise = np.random.default_rng(0).normal(size=pool.features.shape)
    judged = held_out(pool, pool.features, lambda train: noise)
    levels = {one["text"].split("(")[0]: one["level"] for one in verdict(judged, "age")}
    assert levels["Bad news: part of the signal of age was lost "] == "bad"


def test_a_shared_value_that_each_site_moves_elsewhere_is_found(pool):
    """What ComBat does to a volume of 0: no mean or spread tells, but the number itself does."""
    rng = np.random.default_rng(0)
    before = rng.normal(size=pool.features.shape)
    after = before.copy()
    zero = rng.random(len(pool)) < 0.9
    after[zero, 0] = np.array([0.01, 0.02, 0.03])[pool.site[zero]]
    found = held_out(pool, before, lambda train: after)
    for who in ("training participants", "held-out participants"):
        readings = [best(found["site_scores"], stage, who)["mean"] for stage in ("before", "after")]
        assert readings[1] > readings[0] + 0.1


def test_the_harmonizer_never_sees_held_out_people(pool, preflight, quick):
    seen = []

    class Spy(ep.SiteHarmonizer):
        def fit(self, X, y=None, **given):
            seen.append(len(X))
            return super().fit(X, y, **given)

    account_of(pool, pool.features, refit_table(pool, lambda: Spy(random_state=0)), preflight)
    assert len(seen) == 5
    assert max(seen) <= 0.85 * len(pool)


def test_a_person_is_never_split_and_a_small_site_never_held_out():
    site = np.array(["A"] * 40 + ["B"] * 40 + ["C"] * (MIN_PARTICIPANTS - 1))
    pool = PooledDataset.from_arrays(np.arange(len(site), dtype=float)[:, None], site=site)
    subject = np.repeat(np.arange(len(site) // 5 + 1), 5)[: len(site)]
    subject[-MIN_PARTICIPANTS:] = 100 + np.arange(MIN_PARTICIPANTS)
    folds = make_folds(pool, subject, 3, 0)
    for train, test in ((fold.train, fold.test) for fold in folds):
        assert not set(subject[train]) & set(subject[test])
        assert "C" not in pool.site_labels[test]
        assert set(pool.site_labels[train]) == {"A", "B", "C"}


def test_who_was_at_a_small_site_too_is_not_trained_on_when_held_out():
    """Everybody comes first to A, then to B or, three of them, to C, which nobody is judged at."""
    subject = np.tile(np.arange(30), 2)
    site = np.array(["A"] * 30 + ["B"] * 27 + ["C"] * 3)
    pool = PooledDataset.from_arrays(np.arange(60.0)[:, None], site=site)
    folds = make_folds(pool, subject, 3, 0)
    assert len(folds) == 3
    for train, test in ((fold.train, fold.test) for fold in folds):
        assert not set(subject[train]) & set(subject[test])
        assert set(pool.site_labels[test]) == {"A", "B"}


@pytest.fixture(scope="module")
def visits():
    """Sixty people, five visits each, at sites that do nothing: who somebody is tells the site."""
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(60), 5)
    x = rng.normal(size=(60, 8))[person] + 0.05 * rng.normal(size=(300, 8))
    age = rng.uniform(20, 80, 60)[person] + np.tile(np.arange(5) / 10, 60)
    site = np.array(["A", "B", "C"])[person % 3]
    y = 0.1 * rng.normal(size=60)[person] + age
    pool = PooledDataset.from_arrays(x, site=site, covariates=age, covariate_names=["age"], y=y)
    return pool, person


def test_visits_of_one_person_do_not_tell_the_site_of_another(visits, monkeypatch):
    pool, person = visits
    monkeypatch.setattr("equipool.judge.classifiers.EXTRA_TREES", 3)
    found = held_out(pool, pool.features, lambda train: pool.features, subject=person)
    assert found["participants"] == 60
    for stage in ("before", "covariates"):
        assert best(found["site_scores"], stage, "held-out participants")["mean"] < 0.65


def test_the_harmonizer_is_told_who_is_who_and_a_site_may_be_unknown_in_a_fold(visits, quick):
    pool, person = visits
    site = pool.site_labels.astype(object)
    site[4] = "D"  # somebody's last visit
    pool = PooledDataset.from_arrays(pool.X, site=site, covariates=pool.C, covariate_names=["age"], y=pool.y)
    told = []

    class Spy(ep.SiteHarmonizer):
        def fit(self, X, y=None, **given):
            told.append(len(given["subject"]) == len(X))
            return super().fit(X, y, **given)

    preflight = check(pool.to_frame(), site="site", covariates="age")
    account = account_of(pool, pool.features, refit_table(pool, Spy, person), preflight, subject=person)
    assert told == [True] * account.held_out["folds"]
    assert account.effects["about"]["participants"] == 60
    assert "first row" in account.effects["about"]["note"]
    page = report_page(account)
    assert f"60 participants in {len(pool)} rows of 4 sites" in page
    assert "Rows by site" in page


def test_sites_too_small_to_judge_are_said_to_be(quick):
    truth = ep.simulate_table(people=4).pool
    preflight = check(truth.to_frame(), site="site", covariates="age", id="id", target="dx")
    account = account_of(truth, truth.features, None, preflight)
    assert account.held_out is None
    assert "cannot be judged" in account.verdict[0]["text"]
    json.loads(account.to_json())


SIGNALS = ("what", "measure", "where", "before", "before_sd", "after", "after_sd", "change", "change_sd")


def judged_of(
    before=0.9, after=0.34, after_held_out=0.34, signals=(), covariates=0.33, shuffled=0.33, after_sd=0.01
):
    """Return predictions of the site and of others, with chance at 0.33."""
    columns = ("stage", "classifier", "fitted_on", "mean", "sd")
    rows = [
        (stage, "logistic", who, value, after_sd if stage == "after" else 0.01)
        for who, own in (("training participants", after), ("held-out participants", after_held_out))
        for stage, value in (
            ("before", before),
            ("after", own),
            ("covariates", covariates),
            ("shuffled", shuffled),
        )
    ]
    readings = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
    table = {name: [row[k] for row in signals] for k, name in enumerate(SIGNALS)}
    return {"site_scores": readings, "signals": table, "folds": 5, "participants": 300}


def test_the_worse_reading_decides():
    assert verdict(judged_of(after_held_out=0.34))[0]["level"] == "good"
    assert verdict(judged_of(after_held_out=0.60))[0]["level"] == "fair"
    assert verdict(judged_of(after_held_out=0.88))[0]["level"] == "bad"


def test_the_truth_itself_is_no_bad_news_where_ages_are_disjoint():
    truth = ep.simulate_table(overlap=0.0)
    judged = held_out(truth.pool, truth.pool.features, lambda train: truth.clean)
    assert [one for one in verdict(judged, "age") if one["level"] == "bad"] == []
    assert "cannot be assessed" in verdict(judged, "age")[0]["text"]


def test_nothing_is_told_of_a_site_that_age_alone_tells():
    said = verdict(judged_of(before=1.0, after=0.99, after_held_out=0.99, covariates=0.99), "age")[0]
    assert said["level"] == "fair"
    assert "cannot be assessed" in said["text"]
    assert "can be predicted from age alone" in said["text"]
    # Where age tells a part, what is beyond it can be judged.
    assert verdict(judged_of(after_held_out=0.6, covariates=0.6), "age")[0]["level"] == "good"


def test_the_verdict_says_whether_age_or_chance_gives_the_floor():
    few = judged_of(after=0.34, after_held_out=0.40, covariates=0.28, shuffled=0.39)
    said = verdict(few, "age")[0]["text"]
    assert "no longer be predicted better than by chance" in said
    assert "balanced accuracy of 0.40 (as measured: 0.90); given age alone: 0.28; chance: 0.39." in said
    told = judged_of(after=0.34, after_held_out=0.40, covariates=0.39, shuffled=0.34)
    said = verdict(told, "age")[0]["text"]
    assert "no longer be predicted better than from age alone" in said
    assert "balanced accuracy of 0.40 (as measured: 0.90); given age alone: 0.39; chance: 0.34." in said


@pytest.mark.parametrize(
    ("after", "words"), [(0.81, "too few participants to say"), (0.45, "may be removed")]
)
def test_rough_readings_afterwards_do_not_say_that_there_was_no_site(after, words):
    said = verdict(judged_of(before=0.84, after=after, after_held_out=after, after_sd=0.6))[0]
    assert said["level"] == "fair"
    assert words in said["text"]


@pytest.mark.parametrize("before", [0.35, 0.6])
def test_a_site_that_is_easier_to_read_is_bad_news(before):
    said = verdict(judged_of(before=before, after=0.8))[0]
    assert said["level"] == "bad"
    assert "easier to predict than before" in said["text"]


@pytest.mark.parametrize(
    ("measure", "before", "after", "sd", "level", "words"),
    [
        ("R²", 0.50, 0.15, 0.40, "fair", "may be reduced; the change is within its sampling error"),
        ("R²", 0.50, 0.15, 0.01, "bad", "was lost"),
        ("R²", 0.50, 0.49, 0.01, "good", "was preserved"),
        ("AUC", 0.50, 0.49, 0.01, "fair", "could hardly be predicted before"),
        ("R²", -0.20, -0.20, 0.01, "fair", "could hardly be predicted before"),
        ("R²", -0.90, -0.20, 0.01, "fair", "could hardly be predicted before"),
        (
            "AUC",
            0.50,
            0.80,
            0.01,
            "fair",
            "predicted better than before, which harmonization does not explain",
        ),
    ],
)
def test_a_signal_is_kept_only_if_there_was_one_and_it_is_there_still(
    measure, before, after, sd, level, words
):
    row = ("age", measure, "within sites", before, 0.1, after, 0.1, after - before, sd)
    said = verdict(judged_of(signals=[row]))[1]
    assert said["level"] == level
    assert words in said["text"]


def test_better_than_before_is_good_where_equal_means_and_spreads_explain_it():
    """It was a tick whatever the reason, so that a harmonizer that was told the age was praised for it."""
    row = ("age", "R²", "within sites", 0.50, 0.1, 0.60, 0.1, 0.10, 0.01)
    judged = judged_of(signals=[row])
    found = {"what": "age", "before": 0.60, "after": 0.60, "gain": 0.0, "error": 0.01}
    explained, written = ({**judged, "written": [found | {"gain": gain}]} for gain in (0.0, 0.2))
    assert [one["level"] for one in verdict(explained)[1:]] == ["good"]
    assert [one["level"] for one in verdict(written)[1:]] == ["fair", "bad"]


def test_cells_that_were_filled_in_are_counted_and_not_judged(pool, preflight, quick):
    before = pool.features.copy()
    before[::3, 1] = np.nan
    after = np.where(np.isnan(before), 1e6, before)
    account = account_of(pool, after, None, preflight, before=before, method=["dx was allowed for."])
    assert account.shares["filled-in cells"][1] == len(before[::3])
    assert sum(account.shares["filled-in cells"]) == len(before[::3])
    assert account.shares["before"] == account.shares["after"]
    assert any("filled in, not measured" in one["text"] for one in account.verdict)
    page = report_page(account)
    assert f"{len(before[::3])} filled-in cells" in page
    assert "dx was allowed for." in page


def test_empty_cells_are_counted_and_not_judged(pool, preflight, quick):
    before = pool.features.copy()
    before[::3, 1] = np.nan
    account = account_of(pool, before, None, preflight, before=before)
    assert account.shares["empty cells"][1] == len(before[::3])
    assert "filled-in cells" not in account.shares
    json.loads(account.to_json())


def test_a_share_of_variance_is_none_where_the_site_does_nothing():
    rng = np.random.default_rng(0)
    site = np.repeat(["A", "B", "C"], 60)
    age = rng.uniform(20, 80, 180) + 30 * (site == "C")
    own = 0.5 * age + rng.normal(size=180)  # differs between sites by age alone
    x = np.column_stack([own, own + 40 * (site == "B"), np.ones(180)])
    pool = PooledDataset.from_arrays(x, site=site, covariates=age, covariate_names=["age"])
    share = site_shares(pool, x)
    assert share[0] < 0.05
    assert share[1] > 0.9
    assert share[2] == 0
    assert worst(share, share)[0] == 1


def test_boxes_hold_quartiles_of_each_site(pool):
    table = boxes(pool, pool.features, pool.features, list(pool.feature_names))
    for low, q1, median, q3, high in zip(
        *(table[name] for name in ("low", "q1", "median", "q3", "high")), strict=True
    ):
        assert low <= q1 <= median <= q3 <= high
    assert sum(table["rows"]) == 2 * len(pool) * len(pool.feature_names)


def test_effects_meet_the_truth(truth):
    pool = truth.pool
    found = effects(pool, pool.features, truth.clean, list(pool.feature_names))
    about, table = found["about"], found["table"]
    t = np.abs(table["harmonized_t"])
    assert about["of"] == "dx"
    assert t[truth.affected].min() > np.median(t[~truth.affected])
    assert about["significant"]["harmonized"] >= truth.affected.sum()


def test_without_a_target_the_first_covariate_is_looked_at(truth):
    frame = truth.pool.to_frame().drop(columns="dx")
    pool = PooledDataset.from_frame(frame, site="site", covariates="age", id="id")
    about = effects(pool, pool.features, pool.features, list(pool.feature_names))["about"]
    assert about["of"] == "age"
    assert "No target" in about["note"]


def test_of_three_classes_the_largest_two_are_compared(truth):
    frame = truth.pool.to_frame()
    frame.loc[:20, "dx"] = "MCI"
    pool = PooledDataset.from_frame(frame, site="site", covariates="age", target="dx", id="id")
    about = effects(pool, pool.features, pool.features, list(pool.feature_names))["about"]
    assert "two largest" in about["note"]
    assert "MCI" not in about["contrast"]


def test_column_names_of_ours_may_be_the_user_s(truth, preflight, quick):
    frame = truth.pool.to_frame().rename(columns={"site": "scanner", "age": "site", "dx": "x"})
    roles = {"site": "scanner", "covariates": "site", "target": "x", "id": "id"}
    pool = PooledDataset.from_frame(frame, **roles)
    account = account_of(pool, pool.features, None, check(frame, **roles))
    assert set(account.maps["before"]["site"]) == set(pool.sites)
    assert account.maps["before"]["site (covariate)"][0] > 1
