"""Every bad input that a table can have, as a user meets it: one clear sentence, and the right verdict."""

import json

import numpy as np
import pandas as pd
import pytest

import equipool as ep
from equipool.cli.app import main
from equipool.exceptions import InputError


def good(rows_per_site=20, sites=("A", "B", "C"), seed=0):
    """A table with nothing wrong in it: overlapping ages, both classes at every site."""
    rng = np.random.default_rng(seed)
    rows = rows_per_site * len(sites)
    return pd.DataFrame(
        {
            "id": [f"sub-{k:03d}" for k in range(rows)],
            "site": np.repeat(sites, rows_per_site),
            "age": np.tile(np.linspace(20, 80, rows_per_site), len(sites)).round(1),
            "dx": np.tile(["AD", "CN"], rows // 2 + 1)[:rows],
            "thickness": rng.normal(2.5, 0.2, rows),
            "volume": rng.normal(9, 1, rows),
            "area": rng.normal(30, 2, rows),
        }
    )


def changed(**columns):
    return good().assign(**columns)


def with_cell(column, row, value):
    table = good()
    table[column] = table[column].astype(object)
    table.loc[row, column] = value
    return table


def sparse():
    table = good()
    rng = np.random.default_rng(1)
    for name in ("thickness", "volume", "area"):
        table.loc[rng.random(len(table)) < 0.05, name] = np.nan
    table.loc[4, "volume"] = np.nan
    return table


def constants():
    return good().assign(**{f"flat{k}": float(k) for k in range(5)})


def many_sites():
    return good(rows_per_site=12, sites=[f"centre {k:03d}" for k in range(200)])


def disjoint():
    table = good()
    return table.assign(age=table.age / 4 + table.site.map({"A": 0, "B": 30, "C": 60}))


# name: (table, code of the finding, level, words that the sentence must have)
BAD = {
    "empty table": (good().iloc[:0], "empty-table", "error", ["no rows"]),
    "one site": (changed(site="A"), "one-site", "error", ["'A'", "nothing to harmonize", "another site"]),
    "one class": (changed(dx="CN"), "one-class", "error", ["'dx'", "'CN'", "leave the target out"]),
    "covariate never varies": (
        changed(age=60.0),
        "constant-covariate",
        "error",
        ["'age'", "60", "leave it out"],
    ),
    "site collinear with diagnosis": (
        good().assign(dx=lambda t: np.where(t.site == "A", "AD", "CN")),
        "target-tied-to-site",
        "error",
        ["'dx'", "never varies within a site", "can still be learned"],
    ),
    "covariate tied to the site": (
        good().assign(age=lambda t: t.site.map({"A": 20.0, "B": 50.0, "C": 70.0})),
        "covariate-tied-to-site",
        "error",
        ["'age'", "never varies within a site", "leave it out"],
    ),
    "5 % NaN": (sparse(), "missing-values", "error", ["'volume'", "sub-004", "impute"]),
    "missing site": (with_cell("site", 3, np.nan), "missing-site", "error", ["'site'", "row 4 (sub-003)"]),
    "missing age": (with_cell("age", 3, np.nan), "missing-covariate", "error", ["'age'", "row 4", "drop"]),
    "missing class": (with_cell("dx", 3, None), "missing-target", "error", ["'dx'", "row 4"]),
    "infinite value": (with_cell("volume", 7, np.inf), "infinite-values", "error", ["'volume'", "row 8"]),
    "infinite age": (with_cell("age", 7, -np.inf), "infinite-values", "error", ["'age'", "row 8"]),
    "text in numbers": (with_cell("volume", 7, "n.d."), "text-in-numbers", "error", ["'n.d.'", "row 8"]),
    "text in age": (with_cell("age", 7, "89+"), "text-in-numbers", "error", ["'89+'", "row 8", "'age'"]),
    "covariate of three words": (
        changed(age=["young", "old", "very old"] * 20),
        "text-in-numbers",
        "error",
        ["'age'", "meaningful order", "0/1 column"],
    ),
    "infinite whole age": (
        changed(age=[20.0, 30.0, 40.0, np.inf] * 15),
        "infinite-values",
        "error",
        ["'age'", "rows 4"],
    ),
    "target differs in every row": (changed(dx=good().id), "target-per-row", "error", ["as an id would"]),
    "numeric target tied to the site": (
        good().assign(dx=lambda t: t.site.map({"A": 1.5, "B": 20.25, "C": 33.125})),
        "target-tied-to-site",
        "error",
        ["'dx'", "never varies within a site"],
    ),
    "one text level": (changed(age="F"), "constant-covariate", "error", ["'F' in every row"]),
    "a blank site": (with_cell("site", 3, " "), "missing-site", "error", ["row 4"]),
    "duplicate ids": (with_cell("id", 7, "sub-000"), "duplicate-ids", "error", ["'sub-000'", "rows 1, 8"]),
    "id column as site": (changed(site=good().id), "site-per-row", "error", ["different value in every row"]),
    "the same covariate twice": (
        changed(months=lambda t: t.age * 12),
        "covariates-collinear",
        "error",
        ["'age'", "'months'", "leave one"],
    ),
    "one-subject site": (
        with_cell("site", 0, "Z"),
        "single-person-site",
        "warning",
        ["'Z'", "pooled estimate"],
    ),
    "small site": (
        changed(site=["Z"] * 4 + ["A"] * 26 + ["B"] * 30),
        "small-site",
        "warning",
        ["'Z'", "fewer than 10"],
    ),
    "disjoint ages": (disjoint(), "disjoint-support", "warning", ["'age'", "transports"]),
    "60 % constant features": (
        constants(),
        "constant-columns",
        "warning",
        ["5 of 8", "'flat0'", "unchanged"],
    ),
    "near-constant feature": (
        changed(lesion=[3.0] + [0.0] * 59),
        "near-constant-columns",
        "warning",
        ["'lesion'", "95%"],
    ),
    "scanner number among the features": (
        changed(coil=lambda t: t.site.map({"A": 1, "B": 2, "C": 3})),
        "site-in-disguise",
        "warning",
        ["'coil'", "leave them out"],
    ),
    "age 999": (with_cell("age", 5, 999.0), "covariate-outlier", "warning", ["999", "row 6 (sub-005)"]),
    "a class absent at a site": (
        good().assign(dx=lambda t: t.dx.where(t.site != "B", "CN")),
        "class-absent",
        "warning",
        ["'B'; 'B' lacks 'AD'"],
    ),
    "one site spelled twice": (
        good().assign(site=lambda t: t.site.where(t.index != 0, "a ")),
        "similar-site-names",
        "warning",
        ["'A'", "'a '", "one name"],
    ),
}


def covariates_of(name):
    return ["age", "months"] if "twice" in name and "covariate" in name else ["age"]


def no_json(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_get_one_clear_sentence(name, tmp_path, capsys):
    table, code, level, words = BAD[name]
    path = tmp_path / "table.csv"
    table.to_csv(path, index=False)
    call = ["check", str(path), "--site", "site", "--target", "dx", "--id", "id"]
    call += [
        "--covariate",
        *covariates_of(name),
        "--json",
        "--missing",
        "error",
    ]  # by default holes stay holes
    status = main(call)
    report = json.loads(capsys.readouterr().out, parse_constant=no_json)
    findings_of_code = [finding for finding in report["findings"] if finding["code"] == code]
    assert len(findings_of_code) == 1, [finding["code"] for finding in report["findings"]]
    assert findings_of_code[0]["level"] == level
    for word in words:
        assert word in findings_of_code[0]["text"]
    assert status == (1 if level == "error" else 0)
    assert report["ok"] is (level != "error")


@pytest.mark.parametrize("name", BAD)
def test_the_same_sentence_stops_a_pool_from_being_built(name, monkeypatch):
    monkeypatch.setattr("equipool.checks.overlap.TREES", 1)  # what they predict stops nothing
    table, code, level, words = BAD[name]
    report = ep.check(table, site="site", covariates=covariates_of(name), target="dx", id="id")
    assert str(report).endswith(report.verdict)
    if level != "error":
        return
    with pytest.raises(InputError) as caught:
        ep.PooledDataset.from_frame(table, site="site", covariates=covariates_of(name), target="dx", id="id")
    assert str(caught.value).startswith(report.errors[0].text)
    if report.errors[0].code == code:
        assert all(word in str(caught.value) for word in words)


def test_a_good_table_has_nothing_to_worry_about():
    report = ep.check(good(), site="site", covariates="age", target="dx", id="id")
    assert report.ok
    assert [f for f in report.findings if f.level != "note"] == []
    assert report.verdict == "Can be pooled: 60 rows from 3 sites, nothing to worry about."
    assert report.sites["rows"].tolist() == [20, 20, 20]
    assert report.sites["dx=AD"].sum() == 30
    np.testing.assert_array_equal(report.overlap["age"], np.ones((3, 3)))


def test_200_sites_stay_readable(tmp_path, capsys):
    path = tmp_path / "t.csv"
    many_sites().to_csv(path, index=False)
    assert (
        main(["check", str(path), "--site", "site", "--covariate", "age", "--target", "dx", "--id", "id"])
        == 0
    )
    text = capsys.readouterr().out
    assert "and 176 smaller sites" in text
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) <= 110


def test_imputing_turns_missing_values_into_a_warning():
    report = ep.check(sparse(), site="site", covariates="age", missing="impute")
    assert report.ok
    assert [f.code for f in report.warnings] == ["missing-values"]


def test_overlap_counts_participants_in_the_common_range():
    table = pd.DataFrame(
        {"site": ["A"] * 4 + ["B"] * 4, "age": [20, 30, 40, 50, 40, 50, 60, 70], "v": np.arange(8.0)}
    )
    report = ep.check(table, site="site", covariates="age")
    # Common range 40 to 50: two of A's participants and two of B's, of eight.
    assert report.overlap["age"].loc["A", "B"] == pytest.approx(0.5)
    assert report.common["age"] == pytest.approx(0.5)


def test_overlap_agrees_with_a_naive_count():
    rng = np.random.default_rng()
    table = pd.DataFrame(
        {
            "site": rng.integers(0, 6, 90).astype(str),
            "age": rng.normal(50, 9, 90).round(),
            "v": rng.normal(size=90),
        }
    )
    overlap = ep.check(table, site="site", covariates="age").overlap["age"]
    ages = {site: group.to_numpy() for site, group in table.groupby("site").age}
    for a, first in ages.items():
        for b, second in ages.items():
            low, high = max(first.min(), second.min()), min(first.max(), second.max())
            inside = [low <= age <= high for age in (*first, *second)]
            assert overlap.loc[a, b] == pytest.approx(np.mean(inside))


def test_confounding_is_measured_from_none_to_full():
    rng = np.random.default_rng()
    site = np.repeat(["A", "B"], 150)
    free = pd.DataFrame({"site": site, "age": rng.normal(50, 10, 300), "v": rng.normal(size=300)})
    tied = free.assign(age=free.age + 60 * (site == "B"))
    loose, strong = (ep.check(table, site="site", covariates="age") for table in (free, tied))
    assert loose.confounding["age"] < 0.1
    assert strong.confounding["age"] > 0.8
    assert loose.site_prediction.balanced_accuracy < 0.65
    assert strong.site_prediction.balanced_accuracy > 0.95
    assert strong.site_prediction.chance == 0.5
    assert "confounded" in [f.code for f in strong.warnings]
    assert "strongly confounded with" in strong.warnings[-1].text


@pytest.mark.slow
def test_chance_is_not_called_confounding():
    """Sites that differ by chance alone: the warning is rare over many draws, the measures stay small."""
    warned, strengths = 0, []
    for _ in range(15):
        rng = np.random.default_rng()
        table = pd.DataFrame({"site": np.repeat(list("ABCDEFGHIJ"), 6), "age": rng.normal(50, 10, 60)})
        table = table.assign(dx=rng.choice(["a", "b"], 60), v=rng.normal(size=60))
        report = ep.check(table, site="site", covariates="age", target="dx")
        warned += "confounded" in [f.code for f in report.warnings]
        strengths += [report.confounding["age"], report.confounding["dx"]]
    assert warned <= 3
    assert np.mean(strengths) < 0.15


def test_the_target_is_not_recommended_as_a_covariate():
    table = good(rows_per_site=60).assign(
        dx=lambda t: np.where((t.site == "A") ^ (t.index % 10 == 0), "AD", "CN")
    )
    report = ep.check(table, site="site", covariates="age", target="dx", id="id")
    text = next(f.text for f in report.warnings if f.code == "confounded")
    assert "keep the covariates" in text
    assert "'dx' and of the site cannot be fully separated" in text


def test_dates_are_no_numbers():
    dated = changed(day=pd.Timestamp("2020-01-01"), age=pd.Timestamp("2020-01-01"))
    with pytest.raises(InputError, match="'age' holds dates"):
        ep.check(dated, site="site", covariates="age")
    report = ep.check(dated.drop(columns="age"), site="site", target="dx", id="id")
    assert any("(dates): 'day'" in f.text for f in report.findings)


def test_columns_of_text_are_left_out_and_named():
    report = ep.check(
        changed(comment="ok", empty=np.nan), site="site", covariates="age", target="dx", id="id"
    )
    notes = [f.text for f in report.findings if f.level == "note"]
    assert any("(text): 'comment'" in note for note in notes)
    assert any("(empty): 'empty'" in note for note in notes)


def test_two_text_levels_become_a_number_and_are_named():
    table = changed(sex=["M", "F"] * 30)
    report = ep.check(table, site="site", covariates=["age", "sex"], ignore=["dx", "id"])
    assert any("'F' is 0, 'M' is 1" in f.text for f in report.findings)
    one_sided = table.assign(sex=table.sex.where(table.site != "A", "M"))
    report = ep.check(one_sided, site="site", covariates=["age", "sex"], ignore=["dx", "id"])
    assert "level-absent" in [f.code for f in report.warnings]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--site", "Site"], "did you mean 'site'?"),
        (["--site", "centre"], "name one of 'id', 'site'"),
        (["--site", "site", "--covariate", "aeg"], "did you mean 'age'?"),
        (["--site", "site", "--covariate", "site"], "two roles"),
        (["--site", "site", "--features", "site"], "cannot be a feature"),
        (["--site", "site", "--features", "x*"], "no column 'x*'"),
    ],
)
def test_wrong_names_are_answered_with_the_right_ones(arguments, words, tmp_path, capsys):
    path = tmp_path / "table.tsv"
    good().to_csv(path, index=False, sep="\t")
    assert main(["check", str(path), *arguments]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert len(message.splitlines()) <= 3  # what was guessed, what was left out, and what is wrong


def test_a_real_table(fcon1000):
    report = ep.check(fcon1000, site="site", covariates=["age", "sex"], id="sub_id")
    assert report.ok
    assert len(report.sites) == 23
    assert {"constant-columns", "disjoint-support"} <= {f.code for f in report.warnings}


def test_classes_that_are_numbers_stay_classes_as_text():
    rng = np.random.default_rng(0)
    y = np.resize([0, 1], 40)
    pool = ep.PooledDataset.from_arrays(rng.normal(size=(40, 3)), site=np.resize(["a", "a", "b"], 40), y=y)
    again = ep.PooledDataset.from_arrays(pool.X, site=pool.site_labels, y=pool.y)
    assert pool.task == again.task == "class"


@pytest.mark.parametrize("value", [-9999.0, 1e9, 1e300])
def test_failed_values_are_named(value):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(5, 1, (60, 4)), columns=list("abcd"))
    table = table.assign(site=np.repeat(["A", "B"], 30), age=rng.uniform(20, 80, 60))
    table["id"] = [f"sub-{k:02}" for k in range(60)]
    assert "feature-outlier" not in [f.code for f in ep.check(table, site="site", covariates="age").findings]
    table.loc[41, "c"] = value
    report = ep.check(table, site="site", covariates="age", id="id")
    (findings_of_code,) = [finding for finding in report.warnings if finding.code == "feature-outlier"]
    assert findings_of_code.rows == (42,)
    assert findings_of_code.columns == ("c",)
    assert "sub-41" in findings_of_code.text
    assert f"{value:g}" in findings_of_code.text


def test_copied_rows_are_named_and_constant_or_missing_ones_are_not():
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(40, 4)), columns=list("abcd"))
    table["site"] = np.repeat(["x", "y"], 20)
    assert "copied-rows" not in {finding.code for finding in ep.check(table, site="site").findings}
    copied = pd.concat([table, table.iloc[[3]].assign(site="y")], ignore_index=True)
    findings_of_code = {finding.code: finding for finding in ep.check(copied, site="site").findings}[
        "copied-rows"
    ]
    assert findings_of_code.rows == (4, 41)
    empty = table.copy()
    empty.loc[[1, 2], list("abcd")] = np.nan
    codes = {finding.code for finding in ep.check(empty, site="site", missing="impute").findings}
    assert "copied-rows" not in codes
    coarse = table[["site"]].assign(a=rng.integers(0, 3, 40), b=rng.integers(0, 3, 40), c=1.0)
    assert "copied-rows" not in {finding.code for finding in ep.check(coarse, site="site").findings}


def test_sites_of_other_units_and_lesions_are_no_failures():
    """Sites that differ a lot, and features that are 0 in most participants, are not called failures."""
    rng = np.random.default_rng(0)
    site = np.repeat(["A", "B"], 40)
    table = pd.DataFrame({"volume": rng.normal(5, 1, 80) * np.where(site == "A", 1, 1000)})
    table["lesion"] = np.where(rng.random(80) < 0.1, rng.lognormal(5, 1, 80), 0.0)
    table["skewed"] = rng.lognormal(0, 1, 80)
    report = ep.check(table.assign(site=site, age=rng.uniform(20, 80, 80)), site="site", covariates="age")
    assert "feature-outlier" not in [finding.code for finding in report.findings]
