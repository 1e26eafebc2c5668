"""The commands for images, as a user calls them: simulate, check, harmonize, apply."""

import json
import shutil

import nibabel
import numpy as np
import pandas as pd
import pytest

import equipool as ep
from equipool.cli.app import main
from equipool.simulate import simulate_table

pytestmark = pytest.mark.usefixtures("quick_models")

ROLES = ["--site", "site", "--covariate", "age", "--target", "dx"]
QUICK = ["--steps", "3", "--no-report"]


@pytest.fixture(scope="module")
def harmonized(brain_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("harmonized") / "out"
    call = ["harmonize", str(brain_folder), "--out", str(out), *ROLES, "--statmap", "dx", "--codes"]
    call += ["--steps", "3"]
    assert main(call) == 0
    return out, call


@pytest.fixture
def copy(brain_folder, tmp_path):
    """The folder, to be spoilt."""
    folder = tmp_path / "copy"
    shutil.copytree(brain_folder, folder, ignore=shutil.ignore_patterns("derivatives"))
    return folder


def change_people(folder, change):
    people = pd.read_csv(folder / "participants.tsv", sep="\t")
    change(people).to_csv(folder / "participants.tsv", sep="\t", index=False)


# -- simulate ----------------------------------------------------------------------------------------------


def test_simulate_and_check(tmp_path, capsys):
    out = tmp_path / "sim"
    call = ["simulate", str(out), "--like", "custom", "--people", "4", "5", "--patients", "2", "2"]
    call += ["--resolution", "8", "--seed", "3", "--jobs", "1"]
    assert main(call) == 0
    said = capsys.readouterr()
    assert "site1 4, site2 5" in said.out
    assert said.err == ""  # progress is for terminals
    tip = said.out.strip().splitlines()[-1].split("equipool ", 1)[1]
    assert main(tip.split()) in (0, 1)
    assert "9 rows" in capsys.readouterr().out

    assert main(call) == 2
    assert "--force" in capsys.readouterr().err
    (out / "notes.txt").write_text("mine")
    assert main([*call[:5], "3", "5", *call[7:], "--force"]) == 0
    assert len(ep.read_bids(out)) == 8
    assert (out / "notes.txt").read_text() == "mine"
    assert not list(out.glob("sub-0009/anat/*"))


def test_simulating_one_site_says_how_to_get_two(tmp_path, capsys):
    call = "--like custom --people 4 --resolution 8 --jobs 1".split()
    assert main(["simulate", str(tmp_path / "sim"), *call]) == 0
    assert "--people 2 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--people", "3"], "--like custom"),
        (["--like", "custom"], "--people"),
        (["--like", "custom", "--people", "3", "--patients", "4"], "site1 cannot have 4 patients"),
        (["--overlap", "2"], "between 0 and 1"),
        (["--resolution", "0.1"], "between 1 and 8 mm"),
        (["--jobs", "0"], "--jobs"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_a_wrong_simulation_writes_nothing(arguments, message, tmp_path, capsys):
    out = tmp_path / "sim"
    assert main(["simulate", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_simulation_never_overwrites_other_files(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["simulate", str(tmp_path), "--force"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# -- harmonize ---------------------------------------------------------------------------------------------


def test_harmonized_images_are_a_bids_derivative(harmonized, brain_folder):
    out, _ = harmonized
    before, after = ep.read_bids(brain_folder), ep.read_bids(out)
    assert after[["participant_id", "site", "age", "dx"]].equals(
        before[["participant_id", "site", "age", "dx"]]
    )
    assert after["path"][0].name == before["path"][0].name.replace("desc-brain", "desc-harmonized")
    first, source = nibabel.load(after["path"][0]), nibabel.load(before["path"][0])
    assert first.get_data_dtype() == np.float32
    assert (first.affine == source.affine).all()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["people"] == 24
    assert summary["sites"] == {"site1": 8, "site2": 8, "site3": 8}


def test_the_files_are_what_the_model_gives(harmonized, brain_folder):
    out, _ = harmonized
    people = ep.read_bids(brain_folder)
    model = ep.load(out / "model")
    codes = pd.read_csv(out / "codes.tsv", sep="\t", index_col="participant_id")
    np.testing.assert_allclose(codes, ep.load(out / "pooler").transform(people["path"]))
    clean = model.transform(people["path"], site=people["site"], covariates=people[["age"]])
    written = nibabel.load(ep.read_bids(out)["path"][5]).get_fdata(dtype=np.float32)
    assert (written[model.mask_] == clean.read()[5]).all()
    assert (written[~model.mask_] == 0).all()


def test_the_maps_are_of_the_files(harmonized, brain_folder):
    from equipool.judge.statmaps import stat_map

    out, _ = harmonized
    people, mask = ep.read_bids(brain_folder), ep.load(out / "model").mask_
    volumes = ep.Volumes.build(ep.read_bids(out)["path"], mask=mask)
    expected = stat_map(volumes, people["dx"], covariates=people[["age"]], sites=people["site"])
    tmap = nibabel.load(out / "statmaps" / "dx_harmonized_stat-t_statmap.nii.gz").get_fdata()[mask]
    np.testing.assert_allclose(tmap, expected.t, atol=1e-3)
    assert (out / "statmaps" / "dx.png").read_bytes().startswith(b"\x89PNG")
    fdr = expected.significant(alpha=0.05, correction="fdr")
    table = pd.read_csv(out / "statmaps" / "dx_harmonized_clusters-fdr.tsv", sep="\t")
    assert table["voxels"].sum() == fdr.sum()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["significant_fdr"]["harmonized"] == fdr.sum()
    about = json.loads((out / "statmaps" / "dx_harmonized_statmap.json").read_text())
    assert about["SiteIntercepts"]
    assert about["Covariates"] == ["age"]
    assert about["TargetAllowedForInHarmonizing"] is None
    for name, sites in {"as-measured": None, "as-measured-site-intercepts": people["site"]}.items():
        raw = ep.Volumes.build(people["path"], mask=mask)
        before = stat_map(raw, people["dx"], covariates=people[["age"]], sites=sites)
        file = out / "statmaps" / f"dx_{name}_stat-t_statmap.nii.gz"
        np.testing.assert_allclose(nibabel.load(file).get_fdata()[mask], before.t, atol=1e-3)


def test_where_the_truth_is_known_false_positives_stand_beside_true_ones(brain_folder, tmp_path, capsys):
    from equipool.judge.statmaps import detection, stat_map

    out, truth = tmp_path / "out", brain_folder / "derivatives" / "truth"
    call = ["harmonize", str(brain_folder), "--out", str(out), *ROLES, *QUICK, "--statmap"]
    assert main([*call, "dx"]) == 0
    said = capsys.readouterr().err
    people, mask = ep.read_bids(out), ep.load(out / "model").mask_
    volumes = ep.Volumes.build(people["path"], mask=mask)
    one = stat_map(volumes, people["dx"], covariates=people[["age"]], sites=people["site"])
    masks = [
        nibabel.load(truth / f"{name}.nii.gz").get_fdata()[mask] > 0 for name in ("affected", "unaffected")
    ]
    shares = json.loads((out / "summary.json").read_text())["truth"]["harmonized"]
    found, false, _ = detection(one, *masks, alpha=0.05, correction="fdr")
    assert (shares["found"], shares["false"]) == (pytest.approx(found), pytest.approx(false))
    line = next(line for line in said.splitlines() if line.startswith("t-map harmonized"))
    assert f"{round(found * masks[0].sum())} of {masks[0].sum()} that the disease changes" in line
    assert f"{round(false * masks[1].sum())} of {masks[1].sum()} that it does not" in line
    assert main([*call, "age", "--out", str(tmp_path / "age")]) == 0  # the truth is that of the disease
    assert "truth" not in json.loads((tmp_path / "age" / "summary.json").read_text())


def test_a_target_is_allowed_for_on_request_alone_and_that_is_said(
    brain_folder, tmp_path, monkeypatch, capsys
):
    given, fit = [], ep.ImageHarmonizer.fit

    def spy(model, X, y=None, **more):
        given.append((y is not None, model.keep_target))
        return fit(model, X, y, **more)

    monkeypatch.setattr(ep.ImageHarmonizer, "fit", spy)
    call = ["harmonize", str(brain_folder), *ROLES, *QUICK, "--statmap", "dx", "--out"]
    assert main([*call, str(tmp_path / "blind")]) == 0
    assert "allowed for" not in capsys.readouterr().err
    assert main([*call, str(tmp_path / "told"), "--keep-target"]) == 0
    assert "dx was given, but held-out participants gave no reason to allow" in capsys.readouterr().err
    monkeypatch.setattr("equipool.sites.volume_model.with_target_if_likely", lambda z, design: design)
    assert main([*call, str(tmp_path / "allowed"), "--keep-target"]) == 0
    assert "dx was allowed for when" in capsys.readouterr().err
    assert given == [(False, False), (True, True), (True, True)]
    for name, entered in {"blind": (None, None), "told": ("dx", None), "allowed": ("dx", "dx")}.items():
        about = json.loads((tmp_path / name / "statmaps" / "dx_harmonized_statmap.json").read_text())
        assert (about["TargetGivenToHarmonizing"], about["TargetAllowedForInHarmonizing"]) == entered
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["keep_target"] is (entered[0] == "dx")
        assert summary["target_allowed_for"] is (entered[1] == "dx")


def test_the_report_refits_with_the_seed_and_says_whether_the_target_entered(
    brain_folder, tmp_path, monkeypatch
):
    seeds, fit = [], ep.ImageHarmonizer.fit

    def spy(model, *given, **more):
        seeds.append(model.random_state)
        return fit(model, *given, **more)

    monkeypatch.setattr(ep.ImageHarmonizer, "fit", spy)
    out = tmp_path / "out"
    call = ["harmonize", str(brain_folder), *ROLES, "--keep-target", "--seed", "3", "--out", str(out)]
    assert main(call) == 0
    assert len(seeds) > 1
    assert set(seeds) == {3}
    assert "dx was given, but held-out participants" in (out / "report.html").read_text()


def test_the_report_holds_readings_and_maps(harmonized):
    out, _ = harmonized
    account = json.loads((out / "account.json").read_text())
    assert account["kind"] == "images"
    assert account["held_out"]["folds"] == 3
    assert account["equivariance"]["error"] < 1e-6
    assert account["shares"]["feature"][0].startswith("block at ")
    page = (out / "report.html").read_text()
    assert 'id="viewer"' in page
    assert page.count("data:image/png") == 6  # two maps of two layers, the colour bar, the viewer's slices


def test_harmonizing_again_replaces_the_same_and_nothing_else(harmonized, brain_folder, capsys):
    out, call = harmonized
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(call) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert main([*call, "--seed", "1"]) == 2
    assert "other data or options" in capsys.readouterr().err
    assert main(["harmonize", str(brain_folder), "--out", str(brain_folder), *ROLES, *QUICK]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_mask_of_the_users_is_used_and_saved(brain_folder, tmp_path):
    mask = brain_folder / "derivatives" / "truth" / "mask.nii.gz"
    out = tmp_path / "out"
    call = ["harmonize", str(brain_folder), "--out", str(out), *ROLES, *QUICK, "--no-report"]
    assert main([*call, "--mask", str(mask)]) == 0
    assert (ep.load(out / "model").mask_ == (nibabel.load(mask).get_fdata() > 0)).all()


def test_a_dry_run_tells_and_writes_nothing(brain_folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["harmonize", str(brain_folder), "--out", str(out), *ROLES, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "24 rows (site1 8, site2 8, site3 8)" in said
    assert "23 × 28 × 23 voxels of 8 × 8 × 8 mm" in said
    assert not out.exists()


def only_site1(people):
    return people.assign(site="site1")


def only_controls(people):
    return people.assign(dx="CN")


def without_an_age(people):
    people.loc[4, "age"] = np.nan
    return people


@pytest.mark.parametrize(
    ("change", "message"),
    [(only_site1, "site"), (only_controls, "dx"), (without_an_age, "age"), (lambda p: p[:-1], "sub-0024")],
)
def test_participants_that_cannot_be_pooled(change, message, copy, tmp_path, capsys):
    change_people(copy, change)
    out = tmp_path / "out"
    assert main(["harmonize", str(copy), "--out", str(out), *ROLES, "--statmap", "dx", *QUICK]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_images_that_cannot_be_used(copy, tmp_path, capsys):
    out = tmp_path / "out"
    call = ["harmonize", str(copy), "--out", str(out), *ROLES, *QUICK]
    image = next(copy.glob("sub-0007/anat/*"))
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    assert main(call) == 2
    assert image.name in capsys.readouterr().err
    image.unlink()
    assert main(call) == 2
    assert "sub-0007" in capsys.readouterr().err
    assert not out.exists()


def test_visits_of_one_participant_stay_apart(brain_folder, tmp_path):
    people, raw = ep.read_bids(brain_folder), tmp_path / "raw"
    for k, (path, age) in enumerate(zip(people["path"], people["age"], strict=True)):
        who, visit = f"sub-{k // 2:02}", f"ses-{k % 2 + 1}"
        scan = raw / who / visit / "anat" / f"{who}_{visit}_acq-x_T1w.nii.gz"
        scan.parent.mkdir(parents=True)
        shutil.copy(path, scan)
        with (raw / who / f"{who}_sessions.tsv").open("a") as table:
            table.write(("" if k % 2 else "session_id\tage\n") + f"{visit}\t{age}\n")
    every_second = people[::2].assign(participant_id=[f"sub-{k:02}" for k in range(12)])
    every_second[["participant_id", "site", "dx"]].to_csv(raw / "participants.tsv", sep="\t", index=False)
    out = tmp_path / "out"
    assert main(["harmonize", str(raw), "--out", str(out), *ROLES, "--codes", *QUICK]) == 0
    before, after = ep.read_bids(raw), ep.read_bids(out)
    columns = ["participant_id", "session", "site", "age", "dx"]
    assert after[columns].equals(before[columns])
    assert after["path"][1] == out / "sub-00/ses-2/anat/sub-00_ses-2_acq-x_desc-harmonized_T1w.nii.gz"
    codes = pd.read_csv(out / "codes.tsv", sep="\t", dtype={"session": str})
    for name in ("participant_id", "session"):
        assert codes[name].tolist() == before[name].tolist()


@pytest.mark.parametrize(("more", "name"), [([], "sub-0003"), (["--id", "who"], "sub-P2")])
def test_a_table_of_images(more, name, brain_folder, tmp_path):
    people = ep.read_bids(brain_folder)
    for k, path in enumerate(people["path"]):
        shutil.copy(path, tmp_path / f"scan{k}.nii.gz")
    table = people.assign(who=[f"P_{k}" for k in range(24)], scan=[f"scan{k}.nii.gz" for k in range(24)])
    table[["who", "scan", "site", "age"]].to_csv(tmp_path / "scans.csv", index=False)
    out = tmp_path / "out"
    call = ["harmonize", str(tmp_path / "scans.csv"), "--images", "scan", "--out", str(out), "--site", "site"]
    assert main([*call, "--covariate", "age", *more, *QUICK]) == 0
    assert (out / name / "anat" / f"{name}_desc-harmonized_T1w.nii.gz").is_file()
    assert sorted(ep.read_bids(out)["age"]) == sorted(people["age"])
    assert sorted(path.name for path in tmp_path.glob("scan*")) == sorted([*table["scan"], "scans.csv"])


# -- apply -------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_with_the_training(harmonized, brain_folder, tmp_path, monkeypatch, capsys):
    from equipool.files import cache_folder
    from equipool.nn import training

    out, call = harmonized
    call = [*call[:3], str(tmp_path / "again"), *call[4:], "--no-report"]
    monkeypatch.setattr(training, "SECONDS", 0.0)
    count, steps = training.History.count, []

    def counted(history, terms):
        count(history, terms)
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.History, "count", counted)
    assert main(call) == 130
    assert "goes on with the training" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    assert main(call) == 0
    assert len(steps) < 8  # three of each stage, and not all over again
    for name in ("model/model.safetensors", "pooler/model.safetensors", "codes.tsv"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    assert list((cache_folder() / "training").iterdir()) == []


def test_a_model_on_the_same_scans_gives_the_same_files(harmonized, brain_folder, tmp_path):
    fitted, _ = harmonized
    out = tmp_path / "out"
    call = ["apply", str(fitted), str(brain_folder), "--out", str(out), "--site", "site", "--codes"]
    assert main(call) == 0
    assert (out / "codes.tsv").read_bytes() == (fitted / "codes.tsv").read_bytes()
    for path in out.glob("sub-*/anat/*"):
        assert path.read_bytes() == (fitted / path.relative_to(out)).read_bytes()
    predictions = pd.read_csv(out / "predictions.tsv", sep="\t")
    assert set(predictions["predicted"]) <= {"AD", "CN"}
    np.testing.assert_allclose(predictions["p_AD"] + predictions["p_CN"], 1)


def test_scans_without_site_and_age_get_the_same_codes(harmonized, copy, tmp_path, capsys):
    change_people(copy, lambda people: people[["participant_id"]])
    fitted, _ = harmonized
    out = tmp_path / "out"
    assert main(["apply", str(fitted), str(copy), "--out", str(out)]) == 2
    assert "--codes" in capsys.readouterr().err
    assert main(["apply", str(fitted), str(copy), "--out", str(out), "--codes"]) == 0
    assert (out / "codes.tsv").read_bytes() == (fitted / "codes.tsv").read_bytes()
    assert not list(out.glob("sub-*"))


def test_codes_are_trained_on_request_alone(brain_folder, tmp_path, capsys):
    out, new = tmp_path / "out", tmp_path / "new"
    assert main(["harmonize", str(brain_folder), "--out", str(out), *ROLES, "--no-report"]) == 0
    assert not (out / "codes.tsv").exists()
    assert main(["apply", str(out), str(brain_folder), "--site", "site", "--out", str(new), "--codes"]) == 2
    assert "has no model of codes" in capsys.readouterr().err
    assert not new.exists()


def test_scans_that_the_model_cannot_take(harmonized, copy, tmp_path, capsys):
    fitted, _ = harmonized
    out = tmp_path / "out"
    call = ["apply", str(fitted), str(copy), "--out", str(out), "--site", "site"]
    change_people(copy, lambda people: people.assign(site=["site4", *people["site"][1:]]))
    assert main(call) == 2
    assert "Site 'site4' was not seen at fit" in capsys.readouterr().err
    change_people(copy, lambda people: people.assign(site="site1", age=[*people["age"][:-1], None]))
    assert main(call) == 2
    assert "'age'" in capsys.readouterr().err
    for image in copy.glob("sub-*/anat/*"):
        small = nibabel.Nifti1Image(np.ones((5, 6, 7), dtype=np.float32), np.eye(4))
        nibabel.save(small, image)
    assert main(call) == 2
    error = capsys.readouterr().err
    assert "23 × 28 × 23" in error
    assert "5 × 6 × 7" in error
    assert main(["apply", str(tmp_path), *call[2:]]) == 2
    assert "no equipool model" in capsys.readouterr().err
    assert not out.exists()


# -- tables ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_a_table_is_harmonized_in_its_own_format(ending, tmp_path, capsys):
    frame = simulate_table().pool.to_frame().assign(note="kept")
    table = tmp_path / f"table.{ending}"
    if ending == "parquet":
        frame.to_parquet(table)
    else:
        frame.to_csv(table, sep="," if ending == "csv" else "\t", index=False)
    out, again = tmp_path / "out", tmp_path / "again"
    call = ["--site", "site", "--covariate", "age", "--target", "dx", "--id", "id"]
    assert main(["harmonize", str(table), "--out", str(out), *call, "--no-report"]) == 0
    clean = ep.read_table(out / f"harmonized.{ending}")
    assert list(clean.columns) == list(frame.columns)
    assert (clean["note"] == "kept").all()
    features = list(ep.load(out / "model").feature_names_in_)
    assert not np.allclose(clean[features], frame[features])
    assert main(["apply", str(out), str(table), "--out", str(again), "--site", "site"]) == 0
    applied = ep.read_table(again / f"harmonized.{ending}")
    np.testing.assert_allclose(applied[features], clean[features])
    assert main(["harmonize", str(table), "--out", str(tmp_path / "no"), *call, "--statmap", "dx"]) == 2
    assert not (tmp_path / "no").exists()
    capsys.readouterr()


def test_a_model_of_images_is_not_taken_to_a_table(harmonized, tmp_path, capsys):
    table = tmp_path / "table.csv"
    simulate_table().pool.to_frame().to_csv(table, index=False)
    assert main(["apply", str(harmonized[0]), str(table), "--out", str(tmp_path / "out")]) == 2
    assert "is of images" in capsys.readouterr().err


def test_a_baseline_gives_codes_alone(brain_folder, tmp_path):
    from equipool.estimators import NaivePooler

    people = ep.read_bids(brain_folder)
    naive = NaivePooler(encoder="components", steps=2).fit(
        people["path"], people["dx"], site=people["site"], covariates=people[["age"]]
    )
    naive.save(tmp_path / "naive")
    call = ["apply", str(tmp_path / "naive"), str(brain_folder), "--site", "site", "--out"]
    assert main([*call, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "codes.tsv").is_file()
    assert not list((tmp_path / "out").glob("sub-*"))


def test_a_new_scanner_is_estimated_from_all_its_images(harmonized, copy, tmp_path, recwarn):
    """Also from those of later blocks than the one that is written."""
    change_people(copy, lambda people: people.assign(site=people["site"].replace("site1", "site4")))
    change_people(copy, lambda people: people.assign(site=people["site"].replace("site2", "site4")))
    fitted, out = harmonized[0], tmp_path / "new"
    call = ["apply", str(fitted), str(copy), "--site", "site", "--out", str(out), "--unseen-site", "adapt"]
    assert main(call) == 0
    assert not [each for each in recwarn if "new site" in str(each.message)]
    people, model = ep.read_bids(copy), ep.load(fitted / "model").set_params(unseen_site="adapt")
    clean = model.transform(people["path"], site=people["site"], covariates=people[["age"]])
    for k in (0, 15, 16, 23):
        path = next((out / people["participant_id"].iloc[k] / "anat").glob("*.nii.gz"))
        written = nibabel.load(path).get_fdata()[model.mask_]
        np.testing.assert_allclose(written, clean.read()[k], rtol=1e-5)


def test_participants_without_a_value_are_left_out_of_the_map(brain_folder, tmp_path, capsys):
    people = pd.read_csv(brain_folder / "participants.tsv", sep="\t")
    people["score"] = np.where(np.arange(len(people)) < 3, np.nan, np.arange(len(people)) % 7)
    table, out = tmp_path / "people.tsv", tmp_path / "out"
    people.to_csv(table, sep="\t", index=False, na_rep="n/a")
    call = ["harmonize", str(brain_folder), "--participants", str(table), "--out", str(out), *ROLES, *QUICK]
    assert main([*call, "--statmap", "score"]) == 0
    said = capsys.readouterr().err
    assert "3 rows without a value left out" in said
    assert "t-map harmonized: 21 participants" in said


def test_a_table_of_paths_is_pointed_to_the_images(tmp_path, capsys):
    table = tmp_path / "people.csv"
    table.write_text("participant_id,site,path\na,x,a.nii\nb,y,b.nii\n")
    assert main(["check", str(table), "--site", "site"]) == 1
    said = capsys.readouterr()
    assert "--images path" in said.out + said.err


def test_visits_are_distinguished_from_participants(tmp_path, capsys):
    table = tmp_path / "visits.csv"
    rows = [f"p{k // 2},{'ab'[k % 4 // 2]},{60 + k},{k * 7 % 11}" for k in range(24)]
    table.write_text("\n".join(["participant_id,site,age,thickness", *rows]) + "\n")
    assert main(["check", str(table)]) == 0
    assert "24 rows are visits of 12 participants" in capsys.readouterr().err
