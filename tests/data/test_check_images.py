"""`equipool check` on folders and tables of images."""

import json
import warnings

import nibabel
import numpy as np
import pandas as pd
import pytest

import equipool as ep
from equipool.cli.app import main

SHAPE = (5, 6, 4)


def save(path, seed, *, shape=SHAPE, scale=1.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = scale * np.random.default_rng(seed).uniform(50, 900, shape).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(data, np.diag([4.0, 4, 4, 1])), path)
    return path


PEOPLE = pd.DataFrame(
    {
        "participant_id": [f"sub-{k:02}" for k in range(12)],
        "scanner": ["GE", "Siemens"] * 6,
        "age": np.linspace(50, 90, 12).round(1),
        "dx": ["AD", "AD", "CN", "CN"] * 3,
    }
)


@pytest.fixture
def folder(tmp_path):
    for k, person in enumerate(PEOPLE["participant_id"]):
        for res, shape in ((4, SHAPE), (2, (10, 12, 8))):
            save(tmp_path / person / "anat" / f"{person}_space-MNI_res-{res}_T1w.nii.gz", k, shape=shape)
    PEOPLE.to_csv(tmp_path / "participants.tsv", sep="\t", index=False)
    return tmp_path


ROLES = ["--site", "scanner", "--covariate", "age", "--target", "dx"]


def test_a_bids_folder(folder, capsys):
    assert main(["check", str(folder), *ROLES, "--res", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 12
    assert report["sites"]["GE"]["rows"] == 6
    assert report["findings"][-1]["text"] == "12 images of 5 × 6 × 4 voxels of 4 × 4 × 4 mm, RAS."
    assert main(["check", str(folder), *ROLES]) == 2
    assert "choose by res (--res: '2', '4')" in capsys.readouterr().err


def test_a_bad_image_is_named_with_exit_code_2(folder, capsys):
    bad = folder / "sub-03/anat/sub-03_space-MNI_res-4_T1w.nii.gz"
    bad.write_bytes(bad.read_bytes()[:-40])
    assert main(["check", str(folder), *ROLES, "--res", "4"]) == 2
    error = capsys.readouterr().err
    assert str(bad) in error
    assert "Traceback" not in error


def test_a_table_with_a_column_of_images(folder, capsys, tmp_path, monkeypatch):
    names = [f"{person}/anat/{person}_space-MNI_res-4_T1w.nii.gz" for person in PEOPLE["participant_id"]]
    PEOPLE.assign(image=names).to_csv(folder / "table.csv", index=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    command = ["check", str(folder / "table.csv"), *ROLES, "--id", "participant_id", "--images"]
    assert main([*command, "image"]) == 0
    assert "12 images of 5 × 6 × 4 voxels" in capsys.readouterr().out
    assert main([*command, "images"]) == 2
    assert "did you mean 'image'?" in capsys.readouterr().err
    assert main(["check", str(folder), *ROLES, "--images", "image"]) == 2
    assert "is a folder of images" in capsys.readouterr().err


def test_other_intensities_become_a_warning_of_the_report(folder):
    paths = [*folder.rglob("*_res-4_T1w.nii.gz")][:11]
    people = PEOPLE.assign(path=[*paths, save(folder / "odd.nii", 1, scale=1e-5)])
    report = ep.check(people, site="scanner", covariates="age", images="path")
    assert [finding.code for finding in report.warnings if finding.code.startswith("image")] == [
        "image-intensities"
    ]
    assert "odd.nii" in str(report)


def test_presets_know_their_columns(tmp_path, capsys):
    table = pd.DataFrame(
        {
            "Subject": [f"{k:03}_S_{1000 + k}" for k in range(12)],
            "Group": ["AD", "CN", "CN", "MCI"] * 3,
            "Sex": "F",
            "Age": np.linspace(60, 80, 12),
            "Imaging Protocol": ["Manufacturer=SIEMENS"] * 6 + ["Manufacturer=GE MEDICAL SYSTEMS"] * 6,
        }
    )
    table.to_csv(tmp_path / "search.csv", index=False)
    for k, subject in enumerate(table["Subject"]):
        save(tmp_path / "ADNI" / subject / "brain.nii.gz", k)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["check", str(tmp_path), "--preset", "adni"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("equipool: 3 rows of other groups than AD, CN left out (MCI 3)")
    assert "9 rows" in captured.out
    assert "Siemens" in captured.out
    assert "dx=AD" in captured.out


def test_a_mask_lets_nan_outside_pass(folder, capsys):
    paths = sorted(folder.rglob("*_res-4_T1w.nii.gz"))
    data = nibabel.load(paths[0]).get_fdata(dtype=np.float32)
    data[0] = np.nan
    nibabel.save(nibabel.Nifti1Image(data, np.diag([4.0, 4, 4, 1])), paths[0])
    mask = folder / "mask.nii"
    nibabel.save(nibabel.Nifti1Image(np.isfinite(data).astype(np.uint8), np.diag([4.0, 4, 4, 1])), mask)
    assert main(["check", str(folder), *ROLES, "--res", "4"]) == 2
    assert "give a mask" in capsys.readouterr().err
    assert main(["check", str(folder), *ROLES, "--res", "4", "--mask", str(mask)]) == 0


def test_a_change_of_the_scanner_is_seen_in_images(tmp_path):
    """From the 16th person on a corner of the brain is dark, as after a change of the coil."""
    rng = np.random.default_rng(0)
    people = []
    for k in range(60):
        data = rng.uniform(400, 600, (20, 20, 20)).astype(np.float32)
        site = "Trio" if k < 40 else "Prisma"
        data[:6, :6] *= 0.85 if k < 15 else 1.0
        path = tmp_path / f"sub-{k:02}.nii.gz"
        nibabel.save(nibabel.Nifti1Image(data * rng.uniform(0.5, 2), np.diag([4.0, 4, 4, 1])), path)
        people.append({"id": path.stem[:6], "scanner": site, "age": rng.uniform(50, 90), "path": str(path)})
    report = ep.check(pd.DataFrame(people), site="scanner", covariates="age", images="path", id="id")
    breaks = [finding for finding in report.warnings if finding.code == "break-within-site"]
    assert [finding.rows for finding in breaks] == [(15, 16)]
    assert "'Trio'" in breaks[0].text
    assert "sub-15" in breaks[0].text
    mask = np.zeros((20, 20, 20))
    mask[8:] = 1
    elsewhere = ep.check(
        pd.DataFrame(people), site="scanner", covariates="age", images="path", id="id", mask=mask
    )
    assert "break-within-site" not in [finding.code for finding in elsewhere.warnings]
