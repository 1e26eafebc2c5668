import nibabel
import numpy as np
import pandas as pd
import pytest

from equipool.data.bids import find_images, read_bids
from equipool.data.presets import read_adcp, read_adni
from equipool.exceptions import EquipoolWarning, InputError


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def anat(person, rest, session=None):
    visit = f"ses-{session}/" if session else ""
    middle = f"_ses-{session}" if session else ""
    return f"sub-{person}/{visit}anat/sub-{person}{middle}_{rest}"


def participants(folder, *rows, header="participant_id\tage\tsite"):
    (folder / "participants.tsv").write_text("\n".join([header, *rows]) + "\n")


# -- finding -----------------------------------------------------------------------------------------------


def test_entities_become_columns(tmp_path):
    touch(tmp_path, anat("01", "space-MNI_res-4_desc-brain_T1w.nii.gz"), anat("02", "space-MNI_T1w.nii"))
    touch(tmp_path, anat("01", "T2w.nii.gz"), anat("01", "space-MNI_T1w.json"))
    touch(tmp_path, "derivatives/other/" + anat("03", "T1w.nii.gz"))
    frame = find_images(tmp_path)
    assert frame["participant_id"].tolist() == ["sub-01", "sub-02"]
    assert frame["session"].tolist() == [None, None]
    assert frame["space"].tolist() == ["MNI", "MNI"]
    assert frame["desc"].tolist() == ["brain", None]
    assert frame["path"].iloc[0] == tmp_path / anat("01", "space-MNI_res-4_desc-brain_T1w.nii.gz")


def test_the_derivatives_are_read_where_they_are_the_folder(tmp_path):
    touch(tmp_path, "derivatives/prep/" + anat("01", "T1w.nii.gz"))
    assert len(find_images(tmp_path / "derivatives" / "prep")) == 1
    with pytest.raises(InputError, match=r"one of its derivatives, such as .*prep"):
        find_images(tmp_path)


@pytest.mark.parametrize(
    ("filters", "rest"),
    [
        ({"space": "MNI", "res": 2}, "space-MNI_res-2_T1w.nii.gz"),
        ({"space": "MNI", "res": "res-02"}, "space-MNI_res-2_T1w.nii.gz"),
        ({"space": "MNI", "res": "4", "desc": None}, "space-MNI_res-4_T1w.nii.gz"),
        ({"space": ""}, "T1w.nii.gz"),
    ],
)
def test_filters_narrow(filters, rest, tmp_path):
    rests = ["space-MNI_res-2_T1w.nii.gz", "space-MNI_res-4_T1w.nii.gz", "T1w.nii.gz"]
    touch(tmp_path, *(anat(person, rest) for person in ("01", "02") for rest in rests))
    frame = find_images(tmp_path, **filters)
    assert [path.name for path in frame["path"]] == [f"sub-{person}_{rest}" for person in ("01", "02")]


def test_sessions_are_visits_of_their_own_and_can_be_chosen(tmp_path):
    touch(
        tmp_path, anat("01", "T1w.nii.gz", "a"), anat("01", "T1w.nii.gz", "b"), anat("02", "T1w.nii.gz", "a")
    )
    assert find_images(tmp_path)["session"].tolist() == ["a", "b", "a"]
    assert len(find_images(tmp_path, session="a")) == 2
    assert len(find_images(tmp_path, ses="ses-b")) == 1


def test_several_images_of_one_visit_are_named_with_what_tells_them_apart(tmp_path):
    rests = ["run-1_T1w.nii.gz", "run-2_T1w.nii.gz"]
    touch(tmp_path, *(anat(person, rest) for person in ("01", "02") for rest in rests))
    with pytest.raises(InputError, match=r"sub-01 has 2 images \(1 more .*run-1_T1w.*--run: '1', '2'"):
        find_images(tmp_path)
    touch(tmp_path, anat("01", "run-1_T1w.nii"))
    with pytest.raises(InputError, match="move the others away"):
        find_images(tmp_path, run=1)


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"suffix": "bold"}, r"suffix 'bold'; choose one with --suffix: 'T1w'"),
        ({"space": "MNI"}, "space='MNI'; there are 'T1w'"),
        ({"acq": "x"}, "no name has a part acq-"),
    ],
)
def test_nothing_left_says_what_there_is(filters, words, tmp_path):
    touch(tmp_path, anat("01", "space-T1w_T1w.nii.gz"))
    with pytest.raises(InputError, match=words):
        find_images(tmp_path, **filters)


def test_folders_that_are_no_bids(tmp_path):
    with pytest.raises(InputError, match="give a BIDS folder"):
        find_images(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        find_images(tmp_path / "no")


# -- joining -----------------------------------------------------------------------------------------------


def test_participants_are_joined_with_their_images(tmp_path):
    touch(tmp_path, anat("01", "T1w.nii.gz"), anat("02", "T1w.nii.gz"))
    participants(tmp_path, "sub-02\tn/a\t1", "01\t30.5\t2")
    frame = read_bids(tmp_path)
    assert frame["participant_id"].tolist() == ["sub-01", "sub-02"]
    assert frame["site"].tolist() == [2, 1]
    assert frame["age"].iloc[0] == 30.5
    assert np.isnan(frame["age"].iloc[1])
    assert [path.name[:6] for path in frame["path"]] == ["sub-01", "sub-02"]


def test_a_visit_overrides_the_participant(tmp_path):
    touch(tmp_path, *(anat("01", "T1w.nii.gz", visit) for visit in "ab"), anat("02", "T1w.nii.gz", "a"))
    participants(tmp_path, "sub-01\t30\tX", "sub-02\t40\tY")
    (tmp_path / "sub-01/sub-01_sessions.tsv").write_text(
        "session_id\tage\tmmse\nses-b\t33\t28\nses-a\tn/a\t29\n"
    )
    frame = read_bids(tmp_path)
    assert frame["age"].tolist() == [30, 33, 40]
    assert frame["mmse"].tolist()[:2] == [29, 28]
    assert frame["site"].tolist() == ["X", "X", "Y"]


def test_ids_and_images_without_each_other_are_named(tmp_path):
    touch(tmp_path, anat("01", "T1w.nii.gz"), anat("03", "T1w.nii.gz"))
    participants(tmp_path, "sub-01\t1\tA", *(f"sub-x{k:02}\t1\tA" for k in range(12)))
    with pytest.raises(
        InputError, match=r"12 ids .* without an image: 'sub-x00'.* and 2 more; 1 image .*'sub-03'"
    ):
        read_bids(tmp_path)
    with pytest.warns(EquipoolWarning, match="Left out are 12 ids"):
        frame = read_bids(tmp_path, missing_images="drop")
    assert frame["participant_id"].tolist() == ["sub-01"]
    with pytest.raises(InputError, match="must be 'error' or 'drop'"):
        read_bids(tmp_path, missing_images="keep")


def test_no_image_of_anyone_is_an_error_even_where_some_may_miss(tmp_path):
    touch(tmp_path, anat("01", "T1w.nii.gz"))
    participants(tmp_path, "sub-1\t1\tA")
    with pytest.raises(InputError, match="No image belongs to an id"):
        read_bids(tmp_path, missing_images="drop")


def test_double_ids_are_named(tmp_path):
    touch(tmp_path, anat("01", "T1w.nii.gz"))
    participants(tmp_path, "sub-01\t1\tA", "01\t2\tA")
    with pytest.raises(InputError, match="more than one row for 'sub-01'"):
        read_bids(tmp_path)


def test_another_table_of_participants_can_be_given(tmp_path):
    touch(tmp_path, anat("01", "T1w.nii.gz"))
    with pytest.raises(InputError, match=r"participants\.tsv does not exist"):
        read_bids(tmp_path)
    assert (
        read_bids(tmp_path, participants=pd.DataFrame({"participant_id": ["01"], "age": [5]}))["age"][0] == 5
    )
    with pytest.raises(InputError, match="no column 'participant_id'; add it, or rename one of 'age'"):
        read_bids(tmp_path, participants=pd.DataFrame({"age": [5]}))
    with pytest.raises(InputError, match="rename it"):
        read_bids(tmp_path, participants=pd.DataFrame({"participant_id": ["01"], "session": ["b"]}))


# -- ADNI and ADCP -----------------------------------------------------------------------------------------

ADNI = pd.DataFrame(
    {
        "Subject ID": ["002_S_0295", "002_S_0413", "003_S_0907", "005_S_0221"],
        "Sex": ["M", "F", "Female", "M"],
        "Research Group": ["CN", "AD", "CN", "MCI"],
        "Visit": ["ADNI Baseline"] * 4,
        "Age": [84.8, 76.3, 88.1, 70.0],
        "MMSE Total Score": [28.0, 22.0, 30.0, 27.0],
        "Imaging Protocol": [
            "Field Strength=3.0;Manufacturer=SIEMENS;Weighting=T1",
            "Manufacturer=GE MEDICAL SYSTEMS;Field Strength=1.5",
            "Manufacturer=Philips Medical Systems",
            "",
        ],
        "Image ID": ["40269", "I40657", "52319", "77777"],
    }
)


def adni(folder, table=ADNI, names=("a/I40269/x.nii", "ADNI_002_S_0413_MR_S1_I40657.nii.gz", "I52319.nii")):
    table.to_csv(folder / "idaSearch.csv", index=False)
    touch(folder, *names)
    return folder


def test_adni_by_image_id(tmp_path):
    adni(tmp_path)
    with pytest.warns(EquipoolWarning, match=r"1 row of other groups .*MCI 1"):
        frame = read_adni(tmp_path)
    assert frame["participant_id"].tolist() == ["002_S_0295", "002_S_0413", "003_S_0907"]
    assert frame["site"].tolist() == ["Siemens", "GE", "Philips"]
    assert frame["dx"].tolist() == ["CN", "AD", "CN"]
    assert frame["sex"].tolist() == ["M", "F", "F"]
    assert frame["mmse"].tolist() == [28, 22, 30]
    assert [path.name for path in frame["path"]] == [
        "x.nii",
        "ADNI_002_S_0413_MR_S1_I40657.nii.gz",
        "I52319.nii",
    ]


def test_adni_by_subject_and_with_other_spellings(tmp_path):
    table = ADNI.drop(columns=["Image ID", "MMSE Total Score"]).iloc[:3]
    table = table.rename(
        columns={"Subject ID": "SUBJECT", "Research Group": " group ", "Imaging Protocol": "manufacturer"}
    )
    table["manufacturer"] = ["SIEMENS", "GE", "philips"]
    adni(tmp_path, table, ["002_S_0295/x.nii", "002_S_0413.nii.gz", "m_003_S_0907_T1.nii"])
    frame = read_adni(tmp_path / "idaSearch.csv")
    assert frame["site"].tolist() == ["Siemens", "GE", "Philips"]
    assert "mmse" not in frame


def test_adni_keeps_all_groups_when_asked(tmp_path):
    table = ADNI.assign(**{"Imaging Protocol": "Manufacturer=GE"})
    adni(tmp_path, table, [f"I{number.removeprefix('I')}.nii" for number in table["Image ID"]])
    assert read_adni(tmp_path, groups=None)["dx"].tolist() == ["CN", "AD", "CN", "MCI"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.drop(columns=["Age", "Imaging Protocol"]), r"age \(age\); protocol \(imagingprotocol"),
        (lambda t: t.assign(**{"Imaging Protocol": "Manufacturer=TOSHIBA"}), "no manufacturer GE.*TOSHIBA"),
        (lambda t: pd.concat([t, t.iloc[:1]]), "several rows of idaSearch.csv for 'I40269'"),
        (lambda t: t.iloc[1:], "1 image without a row in idaSearch.csv: 'I40269'"),
        (lambda t: t.assign(**{"Research Group": "SMC"}), "No row is of the groups 'AD', 'CN'"),
    ],
)
def test_what_adni_needs_is_named(change, words, tmp_path):
    adni(tmp_path, change(ADNI.iloc[:3]))
    with pytest.raises(InputError, match=words):
        read_adni(tmp_path)


def test_adni_images_that_are_double_missing_or_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    adni(tmp_path, ADNI.iloc[:3])
    with pytest.raises(InputError, match=r"hold no \.nii"):
        read_adni(tmp_path, images=tmp_path / "empty")
    touch(tmp_path, "again/I40269.nii")
    with pytest.raises(InputError, match="several images for 'I40269'"):
        read_adni(tmp_path)
    touch(tmp_path, "again.csv")
    with pytest.raises(InputError, match=r"should hold one \.csv"):
        read_adni(tmp_path)


def adcp(folder, table, names):
    table.to_csv(folder / "people.csv", index=False)
    touch(folder, *names)
    return folder


ADCP = pd.DataFrame(
    {"Subject": ["007", "010"], "Age": [60, 70], "Gender": ["f", "m"], "Diagnosis": ["ad", "Control"]}
)


def test_adcp_with_sites_from_the_table_or_from_folders(tmp_path):
    adcp(tmp_path, ADCP, ["site1/s-007_T1.nii.gz", "Site2/010/T1.nii"])
    frame = read_adcp(tmp_path)
    assert frame["participant_id"].tolist() == ["007", "010"]
    assert frame["site"].tolist() == ["site1", "Site2"]
    assert frame["dx"].tolist() == ["AD", "CN"]
    adcp(tmp_path, ADCP.assign(scanner=["A", "B"]), [])
    assert read_adcp(tmp_path)["site"].tolist() == ["A", "B"]


def test_adcp_without_sites_or_with_ambiguous_names(tmp_path):
    adcp(tmp_path, ADCP, ["007.nii", "010.nii"])
    with pytest.raises(InputError, match="no column for the site"):
        read_adcp(tmp_path)
    touch(tmp_path, "007_010.nii")
    with pytest.raises(InputError, match="could belong to '007', '010'"):
        read_adcp(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        read_adcp(tmp_path / "people.csv")


def test_a_real_derivative(arc4mm):
    frame = read_bids(arc4mm, space="MNI152NLin2009cAsym", res=4, desc="brain")
    assert len(frame) == 203
    assert frame["scanner"].nunique() == 2
    assert nibabel.load(frame["path"].iloc[0]).shape == (40, 48, 40)
