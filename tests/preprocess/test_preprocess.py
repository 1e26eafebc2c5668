"""Preprocessing on heads made from the MNI template, whose truth is known."""

import json
import pickle
import re
import sys
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
import pytest
from scipy import ndimage
from scipy.spatial.transform import Rotation

import equipool as ep
from equipool.cli.app import main
from equipool.data.nifti import mni_grid
from equipool.exceptions import InputError, MissingExtraError
from equipool.preprocess import folder as folders
from equipool.preprocess.folder import find_heads, preprocess_folder, preprocess_one
from equipool.preprocess.heads import (
    SPACE,
    Steps,
    brain_mask,
    extracted_mask,
    preprocess_head,
    read_head,
    register,
    remove_bias,
    resample,
    resample_brain,
    template,
    white_matter_peak,
)
from equipool.report.page import quality_page, quality_table

COARSE = Steps(resolution=8, skip=("n4", "register"), brain_extracted=True)
FLAGS = ["--resolution", "8", "--skip", "n4", "register", "--brain-extracted", "--jobs", "1"]


@pytest.fixture
def bids(tmp_path):
    """Three brains in MNI space on an 8 mm grid, in three brightnesses."""
    folder = tmp_path / "bids"
    for k in range(3):
        put(folder, f"sub-{k}", brain8() * 100 * (k + 1))
    (folder / "participants.tsv").write_text("participant_id\tage\nsub-0\t60\nsub-1\t61\nsub-2\t62\n")
    return folder


def brain8():
    return template(8).t1 * template(8).mask


def put(folder, name, values):
    path = folder / name / "anat" / f"{name}_T1w.nii.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(values.astype(np.float32), mni_grid(8)[1]).to_filename(path)
    return path


def motion(angle, scales, shift):
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", angle, degrees=True).as_matrix() @ np.diag(scales)
    affine[:3, 3] = shift
    return affine


def smooth(rng, shape, sigma):
    field = ndimage.gaussian_filter(rng.normal(size=shape), sigma)
    return field / field.std()


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# The grid and resampling


@pytest.mark.parametrize(
    ("resolution", "shape"), [(1, (181, 217, 181)), (2, (91, 109, 91)), (4, (46, 55, 46))]
)
def test_the_grid_is_the_standard_box(resolution, shape):
    result, affine = mni_grid(resolution)
    assert result == shape
    assert nibabel.aff2axcodes(affine) == ("R", "A", "S")
    np.testing.assert_allclose(affine @ [0, 0, 0, 1], [-90, -126, -72, 1])
    np.testing.assert_allclose(affine @ [*(n - 1 for n in shape), 1], [90, 90, 108, 1])


def test_resampling_to_the_same_grid_changes_nothing():
    values = np.random.default_rng(0).normal(size=(12, 14, 13))
    affine = motion([10, 5, 3], [2, 3, 1.5], [7, -3, 2])
    np.testing.assert_allclose(resample(values, affine, values.shape, affine), values, atol=1e-5)


def test_resampling_follows_the_mapping():
    x, y, z = np.indices((40, 40, 40), dtype=float) - 20.0  # mm, with the affine below
    affine = np.eye(4)
    affine[:3, 3] = -20
    mapping = motion([8, -5, 4], [1.05, 0.95, 1.1], [1, 2, -1])
    grid = np.diag([2.0, 2.0, 2.0, 1.0])
    grid[:3, 3] = -6
    result = resample(x + 2 * y - z, affine, (7, 7, 7), grid, mapping)
    places = mapping @ grid @ np.c_[np.argwhere(np.ones((7, 7, 7))), np.ones(343)].T
    np.testing.assert_allclose(result.ravel(), [1, 2, -1] @ places[:3], atol=1e-3)


def test_stripes_finer_than_the_new_voxels_average_out():
    stripes = np.where(np.arange(64) % 2, 1.0, -1.0)[:, None, None] * np.ones((64, 24, 24))
    coarse = resample(stripes, np.eye(4), (16, 6, 6), np.diag([4.0, 4.0, 4.0, 1.0]))
    assert np.abs(coarse[2:-2, 2:-2, 2:-2]).max() < 0.02


def test_neither_skull_nor_background_reaches_the_brain():
    affine = np.eye(4)
    mask = np.zeros((40, 40, 40), dtype=bool)
    mask[8:31, 9:30, 10:29] = True
    values = np.where(mask, 1.0, 20.0)
    values[:, :, :5] = 0
    brain, inside = resample_brain(values, mask, affine, (10, 10, 10), np.diag([4.0, 4.0, 4.0, 1.0]))
    assert inside.sum() > 50
    np.testing.assert_allclose(brain[inside], 1, atol=1e-4)
    assert (brain[~inside] == 0).all()


# The steps


def test_a_known_affine_is_found():
    truth = motion([9, -6, 5], [1.08, 0.93, 1.05], [10, -12, 8])
    shape, grid = mni_grid(4)
    wide = grid.copy()
    wide[:3, 3] -= 32
    head = resample(template(4).t1, grid, tuple(n + 16 for n in shape), wide, np.linalg.inv(truth))
    result = register(head.clip(0), wide, working_mm=4)
    places = np.c_[np.argwhere(template(4).mask), np.ones(template(4).mask.sum())] @ grid.T
    assert np.linalg.norm(places @ (result - truth).T, axis=1).mean() < 0.5


def test_registration_is_silent_and_repeats_itself(capfd):
    grid = mni_grid(8)[1]
    first, second = (register(brain8(), grid, working_mm=8) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("seed", range(2))
def test_the_bias_field_goes_and_the_scale_stays(seed):
    mni, rng = template(4), np.random.default_rng(seed)
    biased = mni.t1 * np.exp(0.3 * smooth(rng, mni.t1.shape, 12)) * 500
    fixed = remove_bias(biased, mni.mask, np.full(3, 4.0), working_mm=8)

    def likeness(values):
        return np.corrcoef(values[mni.mask], mni.t1[mni.mask])[0, 1]

    assert 1 - likeness(fixed) < (1 - likeness(biased)) / 2
    assert np.median(fixed[mni.mask]) == pytest.approx(np.median(biased[mni.mask]), rel=0.15)


def test_the_white_matter_peak_does_not_move_with_atrophy():
    mni = template(4)
    peak = white_matter_peak(mni.t1, mni.mask, mni.white_matter)
    shrunk = np.where(mni.white_matter < 0.5, 0.4 * mni.t1, mni.t1)  # fluid in the place of grey matter
    assert white_matter_peak(shrunk, mni.mask, mni.white_matter) == pytest.approx(peak, rel=0.01)
    assert white_matter_peak(7 * mni.t1, mni.mask, mni.white_matter) == pytest.approx(7 * peak, rel=1e-3)
    assert np.median(shrunk[mni.mask]) < 0.9 * np.median(mni.t1[mni.mask])


def test_a_brain_beside_the_template_is_refused():
    mni = template(8)
    with pytest.raises(InputError, match="white matter"):
        white_matter_peak(mni.t1, np.zeros_like(mni.mask), mni.white_matter)


@pytest.mark.slow
def test_deepbet_finds_the_brain_in_a_head():
    mni = template(4)
    grown = [ndimage.binary_dilation(mni.mask, iterations=n) for n in (2, 3)]
    head = np.where(mni.mask, mni.t1, 0.05)
    head[grown[1] & ~grown[0]] = 0.9  # the scalp; the skull is dark
    result = brain_mask((300 * head).astype(np.float32), mni_grid(4)[1])
    assert 2 * (result & mni.mask).sum() / (result.sum() + mni.mask.sum()) > 0.93


def test_dark_ventricles_belong_to_an_extracted_brain():
    mask = template(4).mask
    values = np.where(mask, 1.0, 0.0)
    values[20:26, 25:33, 20:26] = 0  # fluid as dark as the background, open to it below
    values[22:24, 28:30, :20] = 0
    values += np.where(values, 0, 0.01)  # a faint background
    result = extracted_mask(values, np.full(3, 4.0))
    assert 2 * (result & mask).sum() / (result.sum() + mask.sum()) > 0.98
    assert result[20:26, 25:33, 20:26].all()


def test_an_empty_head_has_no_brain():
    with pytest.raises(InputError, match="No brain"):
        preprocess_head(np.zeros((20, 20, 20), np.float32), np.eye(4), COARSE)


def test_scanners_with_other_units_give_the_same_brain():
    grid = mni_grid(8)[1]
    one, other = (preprocess_head(gain * brain8(), grid, COARSE) for gain in (1, 2400))
    np.testing.assert_allclose(one.image, other.image, rtol=1e-3, atol=1e-4)
    assert one.quality["dice"] > 0.95
    assert one.quality["correlation"] > 0.99


def test_wrong_steps_are_answered():
    with pytest.raises(InputError, match="'smooth' is no step"):
        Steps(skip=("smooth",))
    with pytest.raises(InputError, match="The resolution must be"):
        Steps(resolution=0)
    assert repr(Steps(resolution=4, skip=("n4",)).resolution) == "4.0"


# Reading


def test_orientation_and_a_time_axis_of_one_are_taken_care_of(tmp_path):
    values = np.random.default_rng(0).normal(size=(10, 12, 14)).astype(np.float32)
    values[0, 0, 0] = np.nan
    path = tmp_path / "head.nii.gz"
    nibabel.Nifti1Image(values[::-1, :, :, None], np.diag([-2.0, 2, 2, 1])).to_filename(path)
    result, affine = read_head(path)
    assert nibabel.aff2axcodes(affine) == ("R", "A", "S")
    np.testing.assert_array_equal(result, np.nan_to_num(values))


@pytest.mark.parametrize(
    ("values", "says"),
    [(np.ones((12, 12, 12)), "same value"), (np.zeros((12, 12, 12, 3)), "one 3-D volume"),
     (np.zeros((12, 12, 1)), "one 3-D volume")],
)  # fmt: skip
def test_what_is_no_head_is_named(tmp_path, values, says):
    path = tmp_path / "sub-1_T1w.nii"
    nibabel.Nifti1Image(values, np.eye(4)).to_filename(path)
    with pytest.raises(InputError, match=f"sub-1_T1w.nii.*{says}"):
        read_head(path)


# A folder


@pytest.mark.slow
def test_heads_are_shared_out_over_processes(bids, tmp_path):
    facts, _, failed = preprocess_folder(bids, tmp_path / "out", COARSE, jobs=2)
    assert list(facts) == ["sub-0", "sub-1", "sub-2"]
    assert failed == {}


def test_a_head_can_be_sent_to_a_process(bids, tmp_path):
    (head, *_) = find_heads(bids, tmp_path / "out", COARSE)
    sent, facts = preprocess_one(pickle.loads(pickle.dumps(head)))
    assert sent.files == head.files
    assert head.read_facts() == json.loads(json.dumps(facts))


def test_the_result_is_a_bids_derivative(bids, tmp_path):
    facts, _, _ = preprocess_folder(bids, tmp_path / "out", COARSE, jobs=1)
    assert list(facts) == ["sub-0", "sub-1", "sub-2"]
    anat = tmp_path / "out" / "sub-1" / "anat"
    stem = f"sub-1_space-{SPACE}_res-8_desc-brain"
    image, mask = (nibabel.load(anat / f"{stem}_{end}.nii.gz") for end in ("T1w", "mask"))
    assert image.get_data_dtype() == np.float32
    np.testing.assert_array_equal(image.affine, mni_grid(8)[1])
    assert (image.get_fdata()[mask.get_fdata() == 0] == 0).all()
    assert 0.95 < np.percentile(image.get_fdata()[template(8).white_matter > 0.9], 50) < 1.05  # the peak is 1
    np.testing.assert_array_equal(
        np.loadtxt(anat / f"sub-1_from-T1w_to-{SPACE}_mode-image_xfm.txt"), np.eye(4)
    )
    facts = json.loads((anat / f"{stem}_T1w.json").read_text())
    assert facts["quality"]["dice"] > 0.95
    assert {"settings_hash", "input_hash", "versions", "seconds"} <= set(facts)
    described = json.loads((tmp_path / "out" / "dataset_description.json").read_text())
    assert described["DatasetType"] == "derivative"
    assert (tmp_path / "out" / "participants.tsv").read_text() == (bids / "participants.tsv").read_text()


def test_sessions_and_runs_stay_apart(tmp_path):
    for session in ("a", "b"):
        path = put(tmp_path / "bids", "sub-1", brain8())
        target = (
            tmp_path / "bids" / "sub-1" / f"ses-{session}" / "anat" / f"sub-1_ses-{session}_run-1_T1w.nii.gz"
        )
        target.parent.mkdir(parents=True)
        path.rename(target)
    facts, _, _ = preprocess_folder(tmp_path / "bids", tmp_path / "out", COARSE, jobs=1)
    assert list(facts) == ["sub-1_ses-a_run-1", "sub-1_ses-b_run-1"]
    assert len(list((tmp_path / "out" / "sub-1" / "ses-b" / "anat").glob("*_T1w.nii.gz"))) == 1


def test_an_export_of_adni_becomes_a_bids_derivative(tmp_path, capsys):
    folder, out = tmp_path / "ADNI", tmp_path / "out"
    rows = ["Subject ID,Sex,Age,Research Group,Imaging Protocol,Image ID,Visit"]
    for k, (who, group, vendor) in enumerate(
        [("002_S_0295", "AD", "GE"), ("002_S_0413", "CN", "SIEMENS"), ("005_S_0553", "CN", "Philips")]
    ):
        path = put(tmp_path / "heads", f"sub-{k}", brain8())
        target = folder / who / f"I{100 + k}" / f"ADNI_{who}_I{100 + k}.nii.gz"
        target.parent.mkdir(parents=True)
        path.rename(target)
        rows.append(f"{who},M,{70 + k},{group},Manufacturer={vendor} MEDICAL,I{100 + k},m0{k}")
    (folder / "export.csv").write_text("\n".join(rows) + "\n")
    call = ["preprocess", str(folder), str(out), "--preset", "adni", *FLAGS]
    assert main([*call, "--dry-run"]) == 0
    assert "sub-002S0413" in capsys.readouterr().out
    assert main(call) == 0
    people = ep.read_bids(out)
    assert people["participant_id"].tolist() == ["sub-002S0295", "sub-002S0413", "sub-005S0553"]
    assert people["site"].tolist() == ["GE", "Siemens", "Philips"]
    assert people["age"].tolist() == [70, 71, 72]

    # Visits of one person are told in a table of paths.
    rows[2] = rows[2].replace("002_S_0413", "002_S_0295").replace(",CN,", ",AD,").replace("SIEMENS", "GE")
    (folder / "export.csv").write_text("\n".join(rows) + "\n")
    again = tmp_path / "again"
    assert main(["preprocess", str(folder), str(again), "--preset", "adni", *FLAGS]) == 0
    assert "people.tsv" in capsys.readouterr().out
    table = pd.read_csv(again / "people.tsv", sep="\t")
    assert table["participant_id"].tolist() == ["sub-002S0295", "sub-002S0295", "sub-005S0553"]
    assert all((again / path).is_file() for path in table["path"])
    assert "ses-m01" in table["path"][1]
    assert main(["check", str(again / "people.tsv"), "--images", "path"]) in (0, 1)


def test_only_what_changed_is_done_again(bids, tmp_path):
    out = tmp_path / "out"

    def changed_by(*flags):
        before = files_of(out / "sub-0") | files_of(out / "sub-1") | files_of(out / "sub-2")
        assert main(["preprocess", str(bids), str(out), *FLAGS, *flags]) == 0
        return {path.relative_to(out).parts[0] for path, when in files_of(out).items()
                if before.get(path) != when and path.parent != out}  # fmt: skip

    assert changed_by() == {"sub-0", "sub-1", "sub-2"}
    assert changed_by() == set()
    put(bids, "sub-1", brain8() * 55)
    assert changed_by() == {"sub-1"}
    next((out / "sub-2" / "anat").glob("*mask.nii.gz")).unlink()
    assert changed_by() == {"sub-2"}
    assert changed_by("--skip", "normalize") == {"sub-0", "sub-1", "sub-2"}
    assert changed_by("--skip", "normalize", "--fresh") == {"sub-0", "sub-1", "sub-2"}


def test_a_bad_head_is_named_and_the_others_go_on(bids, tmp_path, capsys):
    path = bids / "sub-1" / "anat" / "sub-1_T1w.nii.gz"
    path.write_bytes(path.read_bytes()[:2000])
    put(bids, "sub-2", np.full((23, 28, 23), 3.0))
    out = tmp_path / "out"
    assert main(["preprocess", str(bids), str(out), *FLAGS]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"failed sub-1: sub-1_T1w.nii.gz cannot be read", printed)
    assert re.search(r"failed sub-2: .*same value everywhere", printed)
    assert not (out / "sub-1").exists()
    assert pd.read_csv(out / "qc.tsv", sep="\t")["head"].tolist() == ["sub-0"]
    assert "sub-1_T1w.nii.gz cannot be read" in (out / "qc.html").read_text()


def test_an_interrupted_run_leaves_nothing_half_written(bids, tmp_path, monkeypatch):
    def write_and_stop(path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f".{path.name}.1").write_bytes(content[:10])
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(folders, "_write", lambda head, brain: write_and_stop(head.files["brain"], b"x" * 20))
        assert main(["preprocess", str(bids), str(out), *FLAGS]) == 130
    assert list(out.rglob("sub-*.*")) + list(out.rglob(".*")) == []
    assert main(["preprocess", str(bids), str(out), *FLAGS]) == 0


def test_a_dry_run_lists_and_writes_nothing(bids, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["preprocess", str(bids), str(out), *FLAGS, "--dry-run"]) == 0
    assert "0 done, 3 to do" in capsys.readouterr().out
    assert not out.exists()
    main(["preprocess", str(bids), str(out), *FLAGS])
    put(bids, "sub-9", brain8())
    capsys.readouterr()
    main(["preprocess", str(bids), str(out), *FLAGS, "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["done", "sub-0"],
        ["done", "sub-1"],
        ["done", "sub-2"],
    ]
    assert lines[3].startswith("to do  sub-9")
    assert "3 done, 1 to do" in lines[4]


def test_the_folder_that_is_read_is_not_written(bids, capsys):
    before = files_of(bids)
    assert main(["preprocess", str(bids), str(bids), *FLAGS]) == 2
    assert "write to another" in capsys.readouterr().err
    assert files_of(bids) == before


@pytest.mark.parametrize(
    ("package", "flags"), [("deepbet", []), ("SimpleITK", []), ("picsl_greedy", ["--brain-extracted"])]
)
def test_a_missing_library_is_asked_for_before_anything_is_done(
    bids, tmp_path, monkeypatch, capsys, package, flags
):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["preprocess", str(bids), str(tmp_path / "out"), *flags]) == 2
    said = capsys.readouterr().err
    assert package in said
    assert "pip install 'equipool[preprocess]'" in said
    assert not (tmp_path / "out").exists()


def test_skipped_steps_need_no_library(monkeypatch):
    for package in ("deepbet", "SimpleITK", "picsl_greedy"):
        monkeypatch.setitem(sys.modules, package, None)
    assert preprocess_head(brain8(), mni_grid(8)[1], COARSE).image.shape == (23, 28, 23)
    with pytest.raises(MissingExtraError):
        preprocess_head(brain8(), mni_grid(8)[1])


# Quality control


def usual(rng):
    return {
        "correlation": 0.8 + 0.01 * rng.normal(),
        "dice": 0.95 + 0.005 * rng.normal(),
        "scale": 1 + 0.03 * rng.normal(),
        "stretch": 1.08 + 0.02 * rng.normal(),
        "volume_ml": 1450 + 120 * rng.normal(),
    }


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("correlation", 0.5, "correlation"), ("dice", 0.86, "Dice"), ("scale", 1.35, "scale"),
     ("stretch", 1.45, "stretch"), ("volume_ml", 650, "volume")],
)  # fmt: skip
def test_the_odd_head_comes_first_with_its_reason(name, value, says):
    rng = np.random.default_rng(3)
    heads = {f"sub-{k}": usual(rng) for k in range(30)}
    heads["sub-17"][name] = value
    table = quality_table(heads)
    assert table.index[0] == "sub-17"
    assert table["flags"].iloc[0].startswith(says)
    assert (table["flags"] != "").sum() == 1


def test_better_than_usual_is_not_odd_and_few_heads_have_limits_alone():
    rng = np.random.default_rng(4)
    heads = {f"sub-{k}": usual(rng) for k in range(30)}
    heads["sub-0"] |= {"correlation": 0.99, "dice": 0.999}
    assert quality_table(heads).loc["sub-0", "flags"] == ""
    two = {"sub-1": usual(rng), "sub-2": usual(rng) | {"dice": 0.5}}
    assert quality_table(two)["flags"].tolist() == ["Dice 0.500 (low)", ""]


def test_names_cannot_write_into_the_page(tmp_path):
    evil = "sub-\"><script>alert('1')</script>"
    picture = tmp_path / "picture.jpg"
    picture.write_bytes(b"\xff\xd8")
    page = quality_page(quality_table({evil: usual(np.random.default_rng(0))}), {evil: picture}, {evil: evil})
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page


def test_a_hostile_file_name_goes_through_the_whole_command(tmp_path):
    put(tmp_path / "bids", "sub-<b onclick=x>$rows{0}", brain8())
    assert main(["preprocess", str(tmp_path / "bids"), str(tmp_path / "out"), *FLAGS]) == 0
    page = Path(tmp_path / "out" / "qc.html").read_text()
    assert "<b onclick" not in page
    assert "sub-&lt;b onclick=x&gt;$rows{0}" in page
