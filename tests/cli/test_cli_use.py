"""The command line as a newcomer and a script use it: guessed columns, config files, JSON, interruptions."""

import json
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from error_cases import make_world

import equipool as ep
from equipool.cli.app import main
from equipool.data import guess_roles
from equipool.exceptions import InputError

pytestmark = pytest.mark.usefixtures("quick_models")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with people.csv and a BIDS folder, to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOOL_CACHE", str(tmp_path / "cache"))
    make_world()
    return tmp_path


# -- guesses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "roles"),
    [
        ("participant_id site age sex dx x", ("site", ["age", "sex"], "dx", "participant_id")),
        (
            "Subject-ID,SCANNER,Age (years),Gender,Research Group",
            ("SCANNER", ["Age (years)", "Gender"], "Research Group", "Subject-ID"),
        ),
        ("site site_id manufacturer sub_id id", ("site", None, None, "sub_id")),
        ("batch education volume", ("batch", None, None, None)),
        ("website average sexton index", (None, None, None, None)),
    ],
)
def test_roles_are_guessed_by_names(columns, roles):
    names = columns.split("," if "," in columns else " ")
    result = guess_roles(names)
    assert tuple(result.get(role) for role in ("site", "covariates", "target", "id")) == roles


def test_two_of_a_kind_are_too_many():
    with pytest.raises(InputError, match=r"'dx' and 'diagnosis'.*--target"):
        guess_roles(["site", "dx", "diagnosis"])
    assert "target" not in guess_roles(["site", "dx", "diagnosis"], roles=["site"])


def test_guesses_are_reported_and_can_be_said_otherwise(here, capsys):
    assert main(["check", "people.csv"]) == 0
    guessed = capsys.readouterr()
    assert "--site site --covariate age sex --target dx --id id" in guessed.err
    said_flags = ["--site", "site", "--covariate", "age", "sex", "--target", "dx", "--id", "id"]
    assert main(["check", "people.csv", *said_flags]) == 0
    said = capsys.readouterr()
    assert said.out == guessed.out
    assert said.err == ""
    assert main(["check", "people.csv", "--target", "none", "--covariate", "age", "--json"]) == 0
    said = capsys.readouterr()
    assert "dx" not in said.err
    assert "age" not in said.err
    assert "dx" not in json.loads(said.out)["confounding"]
    assert main(["check", "people.csv", "--no-guess"]) == 2
    assert "--site" in capsys.readouterr().err


def test_an_id_that_comes_again_is_a_participant_with_visits(here, capsys):
    people = pd.read_csv("people.csv")
    again = people.assign(thickness=people["thickness"] + 0.01, age=people["age"] + 1)
    visits = pd.concat([people, again], ignore_index=True)
    visits.to_csv("visits.csv", index=False)
    assert main(["harmonize", "visits.csv", "--out", "out", "--no-report"]) == 0
    assert "--subject id" in capsys.readouterr().err
    model = ep.SiteHarmonizer(random_state=0)
    given = {"site": visits["site"], "covariates": visits[["age", "sex"]]}
    features = visits[["thickness", "volume"]]
    expected = model.fit_transform(features, visits["dx"], **given, subject=visits["id"])
    np.testing.assert_allclose(pd.read_csv("out/harmonized.csv")[list(features)], expected)
    assert main(["harmonize", "visits.csv", "--out", "other", "--id", "id"]) == 2  # said to be one a row
    capsys.readouterr()


def test_a_number_that_names_participants_is_no_measurement(here, capsys):
    people = pd.read_csv("people.csv").assign(id=[k // 4 * 2 + k % 2 for k in range(24)])
    people.to_csv("people.csv", index=False)
    assert main(["harmonize", "people.csv", "--out", "out", "--json", "--no-report"]) == 0
    assert json.loads(capsys.readouterr().out)["features"] == ["thickness", "volume"]


def test_numbers_that_each_site_gives_anew_are_not_taken_for_travelling_participants(here, capsys):
    people = pd.read_csv("people.csv").assign(id=[k // 2 + 1 for k in range(24)])  # 1 to 12 at both sites
    people.to_csv("people.csv", index=False)
    call = ["harmonize", "people.csv", "--no-report", "--out"]
    assert main([*call, "out"]) == 2
    said = capsys.readouterr().err
    assert "several sites" in said
    assert not (here / "out").exists()
    values = {}
    for name, flags in {"own": "--id none --ignore id", "travelled": "--subject id"}.items():
        assert flags in said
        assert main([*call, name, *flags.split()]) == 0
        values[name] = pd.read_csv(f"{name}/harmonized.csv")["thickness"].to_numpy()
    assert not np.allclose(values["own"], values["travelled"])
    assert main(["apply", "own", "people.csv", "--out", "new"]) == 0  # fits nothing, so need not know
    capsys.readouterr()


def test_second_ids_sites_ages_and_targets_are_no_measurements(here, capsys):
    people = pd.read_csv("people.csv")
    numbers = {
        "subject_id": range(24),
        "scanner": people["site"].map({"A": 1, "B": 2}),
        "age_years": people["age"] + 0.1,
        "age_months": people["age"] * 12,
        "dx_group": people["dx"].map({"AD": 1, "CN": 0}),
    }
    people.rename(columns={"id": "participant_id"}).assign(**numbers).to_csv("people.csv", index=False)
    call = ["harmonize", "people.csv", "--no-report", "--json", "--out"]
    assert main([*call, "out"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["features"] == ["thickness", "volume"]
    assert all(name in said.err.split("equipool: left out")[1] for name in numbers)
    assert main([*call, "named", "--features", "thickness", "age_months"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["features"] == ["thickness", "age_months"]
    assert "equipool: left out" not in said.err


@pytest.mark.parametrize("first", [0, 1])
def test_row_numbers_written_with_a_table_are_no_measurement(here, capsys, first):
    people = pd.read_csv("people.csv")
    people.set_axis(range(first, first + len(people))).to_csv("people.csv")  # as pandas and R do by default
    assert main(["harmonize", "people.csv", "--no-report", "--json", "--out", "out"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["features"] == ["thickness", "volume"]
    assert "counts the rows" in said.err


def test_harmonize_warns_of_values_that_no_measurement_gives(here, capsys):
    rng = np.random.default_rng(0)
    people = pd.DataFrame({"site": np.repeat(["a", "b"], 60), "age": rng.uniform(20, 80, 120)})
    people["thickness"] = rng.normal(2.5, 0.2, 120)
    people.to_csv("table.csv", index=False)
    assert main(["harmonize", "table.csv", "--out", "out", "--no-report"]) == 0
    assert "Warning" not in capsys.readouterr().err
    people.loc[3, "thickness"], people.loc[5, "age"] = -9999, 999
    people.to_csv("table.csv", index=False)
    assert main(["harmonize", "table.csv", "--out", "other", "--no-report"]) == 0
    said = capsys.readouterr().err
    assert "-9999 in 'thickness'" in said
    assert "'age' is 999" in said


def test_apply_takes_the_site_column_of_the_fit(here, capsys):
    people = pd.read_csv("people.csv")
    people.rename(columns={"site": "scanner"}).to_csv("old.csv", index=False)
    new = people.assign(scanner=people["site"], site=people["site"].to_numpy()[::-1])
    new.to_csv("new.csv", index=False)
    assert main("harmonize old.csv --out fitted --no-report".split()) == 0
    expected = pd.read_csv("fitted/harmonized.csv")["thickness"]
    for model in ("fitted", "fitted/model"):
        capsys.readouterr()
        out = model.replace("/", "-") + "-new"
        assert main(["apply", model, "new.csv", "--out", out]) == 0
        assert "--site scanner" in capsys.readouterr().err
        np.testing.assert_allclose(pd.read_csv(f"{out}/harmonized.csv")["thickness"], expected)
    assert main("apply fitted new.csv --out said --site site".split()) == 0
    assert not np.allclose(pd.read_csv("said/harmonized.csv")["thickness"], expected)
    capsys.readouterr()


# -- nothing made up ---------------------------------------------------------------------------------------


def gappy(effect=0.0):
    """Write a table with empty cells and perhaps an effect of the disease; return it."""
    rng = np.random.default_rng(1)
    people = pd.DataFrame({"id": [f"p{k}" for k in range(120)], "site": np.repeat(["a", "b", "c"], 40)})
    people["age"], people["dx"] = rng.uniform(20, 80, 120), rng.permutation(np.repeat(["AD", "CN"], 60))
    x = rng.normal(100, 10, (120, 4)) + 5 * (people["site"] == "a").to_numpy()[:, None]
    x += effect * (people["dx"] == "AD").to_numpy()[:, None]
    people[[f"x{k}" for k in range(4)]] = np.where(rng.random(x.shape) < 0.1, np.nan, x)
    people.to_csv("table.csv", index=False)
    return people


def test_empty_cells_stay_empty_and_filled_ones_are_marked(here, capsys):
    people = gappy()
    features = [f"x{k}" for k in range(4)]
    empty = people[features].isna()
    assert main("harmonize table.csv --out kept".split()) == 0  # with the report
    said = capsys.readouterr().err
    assert f"{empty.to_numpy().sum()} empty cells of 480" in said
    assert "stay empty" in said
    kept = pd.read_csv("kept/harmonized.csv")
    assert (kept[features].isna() == empty).all(axis=None)
    assert not (here / "kept/harmonized_filled.csv").exists()
    summary = json.loads((here / "kept/summary.json").read_text())
    assert summary["empty_cells"] == empty.sum().to_dict()
    assert summary["filled_cells"] == 0
    assert main("harmonize table.csv --out filled --no-report --missing impute".split()) == 0
    assert "filled in with draws" in capsys.readouterr().err
    filled, marks = pd.read_csv("filled/harmonized.csv"), pd.read_csv("filled/harmonized_filled.csv")
    assert filled[features].notna().all(axis=None)
    assert marks["id"].tolist() == people["id"].tolist()
    assert (marks[features] == empty).all(axis=None)
    np.testing.assert_allclose(filled[features].where(~empty), kept[features])
    assert json.loads((here / "filled/summary.json").read_text())["filled_cells"] == empty.to_numpy().sum()
    for model, holes in {"kept": True, "filled": False}.items():
        assert main(f"apply {model} table.csv --out {model}-new --no-report".split()) == 0
        new = pd.read_csv(f"{model}-new/harmonized.csv")[features]
        assert new.isna().any(axis=None) == holes
        assert (here / f"{model}-new/harmonized_filled.csv").exists() != holes
    capsys.readouterr()


def test_a_target_is_for_judging_and_fits_on_request_alone(here, monkeypatch, capsys):
    given, fit = [], ep.SiteHarmonizer.fit

    def spy(model, X, y=None, **more):
        given.append(model.keep_target and y is not None)
        return fit(model, X, y, **more)

    monkeypatch.setattr(ep.SiteHarmonizer, "fit", spy)
    gappy()
    for target in ("", "--target dx "):  # guessed, and named
        given.clear()
        assert main(f"harmonize table.csv {target}--out out{len(target)}".split()) == 0
        assert set(given) == {False}
    assert "allowed for" not in capsys.readouterr().err
    assert "dx was allowed for" not in (here / "out0/report.html").read_text()
    given.clear()
    assert main("harmonize table.csv --keep-target --out told".split()) == 0
    assert set(given) == {True}  # also where it is refitted for the report
    asked = {"told": ("dx was given, but held-out participants gave no reason to allow for it", False)}
    gappy(effect=20.0)
    assert main("harmonize table.csv --keep-target --out allowed".split()) == 0
    asked["allowed"] = ("dx was allowed for when site effects were estimated", True)
    said = capsys.readouterr().err
    for name, (words, entered) in asked.items():
        summary = json.loads((here / name / "summary.json").read_text())
        assert (summary["keep_target"], summary["target_allowed_for"]) == (True, entered)
        assert words in said
        assert words in (here / name / "report.html").read_text()
        assert ("dx was allowed for" in (here / name / "report.html").read_text()) is entered


def test_apply_estimates_what_is_missing_on_request_alone(here, capsys):
    people = gappy()
    assert main("harmonize table.csv --out fitted --no-report".split()) == 0
    people.drop(columns=["site", "age"]).to_csv("new.csv", index=False)
    capsys.readouterr()
    assert main("apply fitted new.csv --out new".split()) == 2
    said = capsys.readouterr().err
    assert "'age'" in said
    assert "--infer" in said
    assert not (here / "new").exists()
    assert main("apply fitted new.csv --out new --infer".split()) == 0
    assert "estimated from the features (--infer)" in capsys.readouterr().err
    assert (
        "Estimated from the features (--infer), which costs precision: the site, age."
        in (here / "new/report.html").read_text()
    )
    assert main("apply fitted table.csv --out whole --infer".split()) == 0
    assert "stimated from the features" not in capsys.readouterr().err
    assert "stimated from the features" not in (here / "whole/report.html").read_text()


def test_apply_says_which_rows_and_sites_the_fit_has_not_seen(here, capsys):
    people = gappy()
    assert main("harmonize table.csv --out fitted --no-report".split()) == 0
    people.loc[5, "age"], people.loc[7, "x1"] = 99, 10000
    people["site"] = people["site"].replace("c", "new")
    people.to_csv("new.csv", index=False)
    capsys.readouterr()
    assert main("apply fitted new.csv --out new --unseen-site adapt".split()) == 0
    said = capsys.readouterr().err
    assert "'age' is outside of what the fit has seen" in said
    assert "row 6, where the trend is extrapolated" in said
    assert "'x1' is outside" in said
    assert "site 'new' was not seen at fit; its effects are estimated from its 40 rows" in said
    page = (here / "new/report.html").read_text()
    assert "estimated from the rows here" in page
    assert "logistic regression" in page  # by which the site is predicted before and after
    assert main("apply fitted new.csv --out other --unseen-site adapt --no-report".split()) == 0
    assert not (here / "other/report.html").exists()
    capsys.readouterr()


# -- config ------------------------------------------------------------------------------------------------


def test_a_config_gives_what_the_flags_gave(here, capsys):
    flags = ["--covariate", "age", "--target", "none", "--features", "thick*"]
    assert main(["check", "people.csv", *flags, "--write-config", "my.toml"]) == 0
    first = capsys.readouterr().out
    assert main(["check", "people.csv", "--config", "my.toml"]) == 0
    second = capsys.readouterr()
    assert second.out == first
    assert "took" not in second.err
    assert main(["harmonize", "people.csv", "--out", "a", *flags, "--no-report"]) == 0
    assert main(["harmonize", "people.csv", "--out", "b", "--config", "my.toml", "--no-report"]) == 0
    assert (here / "a/harmonized.csv").read_bytes() == (here / "b/harmonized.csv").read_bytes()
    capsys.readouterr()


def test_flags_win_over_the_file(here, capsys):
    (here / "my.toml").write_text('covariate = ["age", "sex"]\nseed = 5\nsteps = 7\n')
    call = ["harmonize", "people.csv", "--out", "out", "--config", "my.toml", "--no-report"]
    assert main([*call, "--covariate", "age", "--seed", "0"]) == 0
    summary = json.loads((here / "out/summary.json").read_text())
    assert (summary["covariates"], summary["seed"], summary["steps"]) == (["age"], 0, 7)
    capsys.readouterr()


def test_every_line_of_a_written_config_can_be_set(here, capsys):
    import tomllib

    assert main(["check", "people.csv", "--write-config", "my.toml"]) == 0
    lines = (here / "my.toml").read_text().splitlines()
    options = [line.removeprefix("# ") for line in lines if line.startswith("# ") and " = " in line]
    assert {"seed = 0", 'missing = "keep"'} <= set(options)
    for option in options:
        assert len(tomllib.loads(option)) == 1
    capsys.readouterr()


# -- for scripts -------------------------------------------------------------------------------------------


def test_json_is_all_that_is_printed(here, capsys):
    calls = {
        "harmonize people.csv --out out --no-report --json": {"harmonized", "model", "people", "sites"},
        "apply out people.csv --out new --json": {"harmonized", "rows"},
        "harmonize people.csv --out dry --dry-run --json": {"people", "sites", "seconds"},
        "datasets --json": {"datasets"},
        "simulate sim --like custom --people 3 3 --resolution 8 --jobs 1 --json": {"people", "truth"},
    }
    for call, keys in calls.items():
        assert main(call.split()) == 0
        result = json.loads(capsys.readouterr().out)
        assert keys <= set(result), call
        for key in {"harmonized", "model", "truth"} & set(result):
            assert (here / result[key]).exists()
    assert not (here / "dry").exists()


def test_nothing_is_said_of_progress_in_a_pipe(here, capsys):
    assert main("simulate sim --like custom --people 3 3 --resolution 8 --jobs 1".split()) == 0
    assert capsys.readouterr().err == ""


def test_dry_runs_write_nothing(here, capsys):
    before = sorted(here.rglob("*"))
    for call in (
        "harmonize people.csv --out out --dry-run",
        "benchmark german --out out --dry-run",
        "benchmark harmonizers simulated-0 --methods raw --out out --dry-run --jobs 1",
    ):
        assert main(call.split()) == 0
        assert "to out" in capsys.readouterr().out.lower()
    assert sorted(here.rglob("*")) == before


def test_datasets_are_listed_with_what_is_in_the_cache(here, capsys):
    assert main(["datasets"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    german = next(row for row in rows if row[0] == "german")
    assert (german[1], german[-1]) == ("1000", "no")


def test_help_fits_a_terminal(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


# -- interruptions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "where"),
    [
        ("harmonize people.csv --out out", "equipool.cli.derivative.write_table"),
        ("harmonize bids --out out --codes --steps 2", "equipool.cli.derivative.write_codes"),
        (
            "simulate out --like custom --people 3 3 --resolution 8 --jobs 1",
            "equipool.simulate.brains.write_table",
        ),
    ],
)
def test_an_interruption_leaves_nothing_and_says_how_to_go_on(call, where, here, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, stop)
    assert main(call.split()) == 130
    said = capsys.readouterr().err
    assert "same command" in said
    assert "Traceback" not in said
    assert not (here / "out").exists()


def test_the_training_of_another_fit_is_refused_with_a_way_out(here, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    call = "harmonize bids --out out --codes --steps 2 --no-report".split()
    with monkeypatch.context() as patch:
        patch.setattr("equipool.cli.derivative.write_codes", stop)
        assert main(call) == 130
    (path,) = here.glob("cache/training/*/checkpoint.json")
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "settings": {"steps": "other"}}))
    capsys.readouterr()
    assert main(call) == 2
    said = capsys.readouterr().err
    assert str(path.parent) in said
    assert "--fresh" in said
    assert main([*call, "--fresh"]) == 0
    capsys.readouterr()


def test_t_maps_of_a_column_that_cannot_name_a_file(here, capsys):
    people = pd.read_csv("bids/participants.tsv", sep="\t").rename(columns={"dx": "AD/CN"})
    people.to_csv("bids/participants.tsv", sep="\t", index=False)
    assert main("harmonize bids --out out --steps 2 --no-report --statmap AD/CN".split()) == 0
    assert (here / "out/statmaps/AD-CN_harmonized_stat-t_statmap.nii.gz").is_file()
    assert (here / "out/statmaps/AD-CN.png").is_file()
    capsys.readouterr()


def test_what_was_in_the_folder_before_stays(here, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    (here / "out").mkdir()
    monkeypatch.setattr("equipool.data.tables.write_whole", fail)
    assert main(["harmonize", "people.csv", "--out", "out", "--no-report"]) == 2
    assert list((here / "out").iterdir()) == []
    capsys.readouterr()


def test_a_real_interruption_is_one_line(here):
    command = [
        sys.executable,
        "-m",
        "equipool",
        "harmonize",
        "bids",
        "--out",
        "out",
        "--steps",
        "100000",
        "--no-report",
    ]
    # Tests run in the background by a shell pass on that Ctrl-C is to be ignored.
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    process.stderr.readline()  # what was guessed: it has begun
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip().splitlines()[0].startswith("equipool: interrupted")
    assert not (here / "out").exists()
