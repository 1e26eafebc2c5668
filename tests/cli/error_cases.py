"""Every error that a call of the command line can be made to end in: what is spoilt, and the call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd

Change = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A call in a folder with people.csv, a BIDS folder bids, and models of both in fitted and brains."""

    what: str
    call: str
    words: str
    change: Change | None = None
    code: int = 2


def make_world() -> None:
    """Write what the calls need into the working directory."""
    rng = np.random.default_rng(0)
    n = 24
    people = pd.DataFrame(
        {
            "id": [f"p{k:02}" for k in range(n)],
            "site": np.tile(["A", "B"], n // 2),
            "age": rng.integers(20, 80, n).astype(float),
            "sex": np.tile(["F", "F", "M"], n // 3),
            "dx": np.tile(["CN", "AD", "AD", "CN"], n // 4),
            "thickness": rng.normal(2.5, 0.2, n).round(3),
            "volume": rng.normal(4, 0.5, n).round(3),
        }
    )
    people.to_csv("people.csv", index=False)
    folder = Path("bids")
    for k in range(12):
        image = rng.normal(100, 5, (5, 6, 7)) + people["age"][k]
        save(folder / f"sub-{k:02}" / "anat" / f"sub-{k:02}_T1w.nii.gz", image)
    table = people[:12].assign(participant_id=[f"sub-{k:02}" for k in range(12)])
    table[["participant_id", "site", "age", "dx"]].to_csv(folder / "participants.tsv", sep="\t", index=False)
    table = table.assign(scan=[f"bids/sub-{k:02}/anat/sub-{k:02}_T1w.nii.gz" for k in range(12)])
    table[["id", "scan", "site", "age"]].to_csv("scans.csv", index=False)


def save(path: Path | str, values: np.ndarray, affine: np.ndarray | None = None) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.diag([8.0, 8, 8, 1]) if affine is None else affine
    nibabel.save(nibabel.Nifti1Image(np.asarray(values, dtype=np.float32), affine), path)


def table(change: Callable[[pd.DataFrame], pd.DataFrame | None], path: str = "people.csv") -> Change:
    """Spoil a table."""

    def spoil() -> None:
        separator = "\t" if path.endswith("tsv") else ","
        frame = pd.read_csv(path, sep=separator)
        changed = change(frame)
        (frame if changed is None else changed).to_csv(path, sep=separator, index=False)

    return spoil


def cell(row: int, column: str, value: object, path: str = "people.csv") -> Change:
    def spoil(frame: pd.DataFrame) -> pd.DataFrame:
        frame[column] = frame[column].astype(object)
        frame.loc[row, column] = value
        return frame

    return table(spoil, path)


def column(name: str, values: object) -> Change:
    return table(lambda frame: frame.assign(**{name: values}))


def write(path: str, content: str | bytes) -> Change:
    return lambda: write_now(path, content)


def write_now(path: str, content: str | bytes) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content.encode() if isinstance(content, str) else content)


def scan(
    change: Callable[[np.ndarray], np.ndarray], affine: np.ndarray | None = None, every: bool = False
) -> Change:
    """Spoil one image of the folder, or all."""

    def spoil() -> None:
        for path in sorted(Path("bids").rglob("*.nii.gz"))[: None if every else 1]:
            save(path, change(nibabel.load(path).get_fdata()), affine)

    return spoil


def cut(path: str) -> Change:
    return lambda: Path(path).write_bytes(Path(path).read_bytes()[:300])


def json_change(path: str, **values: object) -> Change:
    return lambda: write_now(path, json.dumps({**json.loads(Path(path).read_text()), **values}))


def rename(old: str, new: str) -> Change:
    def move() -> None:
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        Path(old).rename(new)

    return move


def away(path: str) -> Change:
    return lambda: Path(path).unlink()


def mask(values: np.ndarray, affine: np.ndarray | None = None) -> Change:
    return lambda: save("mask.nii", values, affine)


def adni(table_text: str, image: str | None = "002_S_0001_I1001.nii") -> Change:
    def make() -> None:
        write_now("adni/table.csv", table_text)
        if image:
            save(f"adni/{image}", np.ones((3, 3, 3)))

    return make


ADNI = "Image ID,Subject,Group,Sex,Age,Imaging Protocol\n"
SHIFTED = np.diag([4.0, 4, 4, 1])
CHECK, HARMONIZE = "check people.csv", "harmonize people.csv --out out"
CHECK_IMAGES, HARMONIZE_IMAGES = "check bids", "harmonize bids --out out --steps 2"
SIMULATE = "simulate sim --like custom --people 4 4 --resolution 8"

CALLS = [
    Case("no command", "", "COMMAND"),
    Case("a command that is not there", "chek people.csv", "did you mean 'check'?"),
    Case("an option that is not there", f"{CHECK} --sight site", "did you mean '--site'?"),
    Case("an option without its value", f"{CHECK} --site", "--site"),
    Case("a value that is none of the choices", f"{CHECK} --task both", "--task"),
    Case("no number where one is needed", "demo --seed two", "--seed"),
    Case("no table", "check --covariate age people.csv", "SOURCE is missing"),
    Case("no output folder", "harmonize people.csv", "--out is missing"),
]

TABLES = [
    Case("no such file", "check nobody.csv", "nobody.csv does not exist"),
    Case("no such file to harmonize", "harmonize nobody.csv --out out", "nobody.csv does not exist"),
    Case("a kind of file that is not read", "check people.xlsx", "people.xlsx", write("people.xlsx", "x")),
    Case("an empty file", CHECK, "people.csv is empty", write("people.csv", "")),
    Case("a header without rows", HARMONIZE, "no rows", table(lambda frame: frame[:0])),
    Case("not UTF-8", CHECK, "UTF-8", write("people.csv", b"site,\xe9t\xe9\nA,1\n")),
    Case("a row longer than the header", CHECK, "more cells", write("people.csv", "site,x\nA,1,2\nB,1,2\n")),
    Case(
        "a row much longer than others", CHECK, "people.csv", write("people.csv", "site,x\nA,1\nB,1,2,3,4\n")
    ),
    Case(
        "a damaged compressed file",
        "check people.csv.gz",
        "people.csv.gz",
        write("people.csv.gz", b"\x1f\x8bno"),
    ),
    Case(
        "a damaged Parquet file", "check people.parquet", "people.parquet", write("people.parquet", b"PAR1")
    ),
    Case(
        "a column that comes twice",
        CHECK,
        "'x' more than once",
        write("people.csv", "site,x,x\nA,1,2\nB,3,4\n"),
    ),
    Case(
        "no column that could be the site",
        CHECK,
        "--site",
        table(lambda frame: frame.rename(columns={"site": "where"})),
    ),
    Case(
        "two columns that could be the site",
        CHECK,
        "'centre' and 'scanner'",
        table(lambda frame: frame.rename(columns={"site": "centre", "sex": "scanner"})),
    ),
    Case("a column that is not there", f"{CHECK} --site Site", "did you mean 'site'?"),
    Case("a covariate that is not there", f"{HARMONIZE} --covariate bmi", "'bmi'"),
    Case("two roles of one column", f"{CHECK} --covariate site", "'site' was given two roles"),
    Case("the site as a feature", f"{CHECK} --features site", "'site' cannot be a feature"),
    Case("features that are not there", f"{CHECK} --features '*_area'", "'*_area'"),
    Case(
        "text in a column of numbers",
        HARMONIZE,
        "'thickness' must hold numbers but has text, such as '2,5'",
        cell(3, "thickness", "2,5"),
    ),
    Case("text in a covariate", HARMONIZE, "'age'", cell(3, "age", "old")),
    Case("a covariate of words", f"{HARMONIZE} --covariate sex", "'sex'", column("sex", ["F", "M", "X"] * 8)),
    Case(
        "dates as a covariate",
        "harmonize dates.parquet --out out",
        "'age' holds dates",
        lambda: pd.read_csv("people.csv").assign(age=pd.Timestamp("2001-01-01")).to_parquet("dates.parquet"),
    ),
    Case("missing features", f"{HARMONIZE} --missing error", "--missing impute", cell(3, "thickness", None)),
    Case(
        "a target to allow for that is not there",
        f"{HARMONIZE} --keep-target --target none",
        "--keep-target needs a target",
    ),
    Case("an infinite value", HARMONIZE, "'thickness' is infinite in row 4", cell(3, "thickness", "inf")),
    Case("a missing site", HARMONIZE, "'site' (site) is empty in row 4", cell(3, "site", None)),
    Case("a missing age", HARMONIZE, "'age' (covariate) is empty in row 4", cell(3, "age", None)),
    Case("a missing diagnosis", HARMONIZE, "'dx' (target) is empty in row 4", cell(3, "dx", None)),
    Case("a missing id", f"{HARMONIZE} --id id", "'id' (id) is empty in row 4", cell(3, "id", None)),
    Case(
        "a missing participant of a visit",
        f"{HARMONIZE} --subject id",
        "'id' names no participant in row 4",
        cell(3, "id", None),
    ),
    Case("an id that comes twice", f"{HARMONIZE} --id id", "'p00'", cell(3, "id", "p00")),
    Case("ids that each site uses anew", HARMONIZE, "--ignore id", column("id", np.arange(24) // 2)),
    Case("one site only", HARMONIZE, "the single site 'A'", column("site", "A")),
    Case("a site for every row", f"{HARMONIZE} --site id", "different value in every row"),
    Case("one class only", HARMONIZE, "'dx' is 'CN' in every row", column("dx", "CN")),
    Case(
        "a target that never varies",
        f"{HARMONIZE} --target age --covariate none --task number",
        "'age' is 50",
        column("age", 50),
    ),
    Case(
        "a class for every row",
        f"{HARMONIZE} --target id --id none",
        "'id' has a different value in every row",
    ),
    Case(
        "diagnosis tied to the site",
        HARMONIZE,
        "'dx' never varies within a site",
        table(lambda frame: frame.assign(dx=frame["site"])),
    ),
    Case(
        "age tied to the site",
        HARMONIZE,
        "'age' never varies within a site",
        table(lambda frame: frame.assign(age=frame["site"].map({"A": 30, "B": 60}))),
    ),
    Case("a covariate that never varies", HARMONIZE, "'age' is 50 in every row", column("age", 50)),
    Case(
        "two covariates that are one",
        f"{HARMONIZE} --covariate age months",
        "'age' and 'months'",
        table(lambda frame: frame.assign(months=12 * frame["age"])),
    ),
    Case(
        "no features",
        HARMONIZE,
        "--features",
        table(lambda frame: frame.drop(columns=["thickness", "volume"])),
    ),
    Case(
        "a feature that is too large",
        HARMONIZE,
        "'thickness' is too large",
        column("thickness", [1e200, -1e200] * 12),
    ),
    Case(
        "a feature without any value",
        f"{HARMONIZE} --missing impute --features thickness volume",
        "'thickness'",
        column("thickness", None),
    ),
    Case("the verdict of check", CHECK, "", column("site", "A"), 1),
]

OUTPUTS = [
    Case("a figure of an unknown kind", f"{CHECK} --figure figure.docx", "figure.docx"),
    Case("a figure in no folder", f"{CHECK} --figure no/figure.png", "the folder no does not exist"),
    Case("output to a file", HARMONIZE, "out is a file", write("out", "x")),
    Case("output to a folder of others", HARMONIZE, "out is not empty", write("out/thesis.txt", "x")),
    Case(
        "a report below a file",
        "report people.csv --after people.csv --out file/page.html",
        "file/page.html",
        write("file", "x"),
    ),
    Case("output below a file", "harmonize people.csv --out file/out", "file/out", write("file", "x")),
    Case(
        "output to a result of other options",
        "harmonize people.csv --out fitted --seed 1",
        "fitted holds an earlier",
    ),
    Case("a demo in a folder of others", "demo --out out", "out is not empty", write("out/thesis.txt", "x")),
    Case("an earlier demo", "demo --out out", "--force", write("out/.equipool-demo", "")),
    Case("a demo with an odd overlap", "demo --out out --overlap 2", "overlap"),
    Case("a demo with an odd seed", "demo --out out --seed -1", "seed"),
]

CONFIGS = [
    Case("a config that is not there", f"{CHECK} --config no.toml", "no.toml"),
    Case("a config that is no TOML", f"{CHECK} --config my.toml", "line 1", write("my.toml", "site: A")),
    Case(
        "a key that is not there",
        f"{CHECK} --config my.toml",
        "did you mean 'site'?",
        write("my.toml", "sight = 'A'"),
    ),
    Case("a key that is like no other", f"{CHECK} --config my.toml", "'zzz'", write("my.toml", "zzz = 1")),
    Case(
        "a number for a name", f"{CHECK} --config my.toml", "site must be text", write("my.toml", "site = 1")
    ),
    Case(
        "a word for a number",
        f"{HARMONIZE} --config my.toml",
        "steps must be a whole number",
        write("my.toml", "steps = 'many'"),
    ),
    Case(
        "a choice that is not there",
        f"{CHECK} --config my.toml",
        "task must be one of",
        write("my.toml", "task = 'both'"),
    ),
    Case(
        "a config over a file",
        f"{CHECK} --write-config my.toml",
        "my.toml exists already",
        write("my.toml", ""),
    ),
    Case("a config in no folder", f"{CHECK} --write-config no/my.toml", "folder no does not exist"),
    Case("a config of another kind", f"{CHECK} --write-config my.yaml", "my.yaml"),
]

IMAGES = [
    Case("a folder without images", "check empty", "empty", lambda: Path("empty").mkdir()),
    Case("a folder of another suffix", f"{CHECK_IMAGES} --suffix bold", "'T1w'"),
    Case(
        "a folder whose images are in a derivative",
        "check raw",
        "raw/derivatives/fs",
        lambda: save("raw/derivatives/fs/sub-1/anat/sub-1_T1w.nii.gz", np.ones((3, 3, 3))),
    ),
    Case("no images with this session", f"{CHECK_IMAGES} --session 2", "session"),
    Case("a preset's folder that is a file", "check people.csv --preset adcp", "people.csv is not a folder"),
    Case("a column and a folder of images", f"{CHECK_IMAGES} --images scan", "--images"),
    Case("no participants.tsv", CHECK_IMAGES, "--participants", away("bids/participants.tsv")),
    Case(
        "participants without ids",
        CHECK_IMAGES,
        "'participant_id'",
        table(lambda frame: frame.rename(columns={"participant_id": "who"}), "bids/participants.tsv"),
    ),
    Case(
        "a participant without an id",
        CHECK_IMAGES,
        "without participant_id",
        cell(2, "participant_id", None, "bids/participants.tsv"),
    ),
    Case(
        "a participant that comes twice",
        CHECK_IMAGES,
        "'sub-01'",
        cell(2, "participant_id", "sub-01", "bids/participants.tsv"),
    ),
    Case(
        "a column of the images in the table",
        CHECK_IMAGES,
        "'path'",
        table(lambda frame: frame.assign(path=1), "bids/participants.tsv"),
    ),
    Case("an id without an image", HARMONIZE_IMAGES, "'sub-03'", away("bids/sub-03/anat/sub-03_T1w.nii.gz")),
    Case(
        "an image without an id",
        HARMONIZE_IMAGES,
        "'sub-11'",
        table(lambda frame: frame[:-1], "bids/participants.tsv"),
    ),
    Case(
        "ids of others",
        CHECK_IMAGES,
        "the same ids",
        table(
            lambda frame: frame.assign(participant_id=[f"sub-x{k}" for k in range(12)]),
            "bids/participants.tsv",
        ),
    ),
    Case(
        "two images of a person",
        CHECK_IMAGES,
        "sub-00",
        lambda: save("bids/sub-00/anat/sub-00_acq-b_T1w.nii.gz", np.ones((5, 6, 7))),
    ),
    Case(
        "a truncated image", HARMONIZE_IMAGES, "sub-00_T1w.nii.gz", cut("bids/sub-00/anat/sub-00_T1w.nii.gz")
    ),
    Case("an image of another shape", HARMONIZE_IMAGES, "sub-00_T1w.nii.gz", scan(lambda image: image[1:])),
    Case(
        "an image of another affine",
        HARMONIZE_IMAGES,
        "sub-00_T1w.nii.gz",
        scan(lambda image: image, SHIFTED),
    ),
    Case(
        "an image with NaN",
        HARMONIZE_IMAGES,
        "sub-00_T1w.nii.gz",
        scan(lambda image: np.where(image > image.mean(), np.nan, image)),
    ),
    Case(
        "images of nothing in common",
        HARMONIZE_IMAGES,
        "No voxel",
        lambda: (
            [
                save(
                    f"bids/sub-{k:02}/anat/sub-{k:02}_T1w.nii.gz",
                    np.eye(12)[k][:, None, None] * np.ones((1, 2, 2)),
                )
                for k in range(12)
            ]
            and None
        ),
    ),
    Case(
        "images of less than nothing",
        HARMONIZE_IMAGES,
        "no gain can be estimated: 12 of 12 images ('sub-00_T1w.nii.gz'",
        scan(lambda image: -image, every=True),
    ),
    Case(
        "a row without an image",
        "check scans.csv --images scan",
        "'scan' names no image in row 2",
        cell(1, "scan", None, "scans.csv"),
    ),
    Case(
        "a path that leads nowhere",
        "check scans.csv --images scan",
        "no.nii.gz",
        cell(1, "scan", "no.nii.gz", "scans.csv"),
    ),
    Case(
        "two images under one name",
        "harmonize scans.csv --images scan --id id --out out --steps 2",
        "sub-00",
        lambda: twice(),
    ),
    Case(
        "an id without letters",
        "harmonize scans.csv --images scan --id id --out out --steps 2",
        "'id'",
        lambda: named("x1", "??"),
    ),
    Case("a mask that is not there", f"{CHECK_IMAGES} --mask no.nii", "no.nii"),
    Case("a constant mask", f"{CHECK_IMAGES} --mask mask.nii", "mask", mask(np.zeros((5, 6, 7)))),
    Case(
        "a mask of another shape",
        f"{CHECK_IMAGES} --mask mask.nii",
        "3 × 3 × 3",
        mask(np.eye(3)[None].repeat(3, 0)),
    ),
    Case(
        "a mask elsewhere",
        f"{CHECK_IMAGES} --mask mask.nii",
        "affine of the mask",
        mask(np.arange(210).reshape(5, 6, 7) > 9, SHIFTED),
    ),
    Case("t-maps of a table", f"{HARMONIZE} --statmap dx", "--statmap"),
    Case("t-maps of a column that is not there", f"{HARMONIZE_IMAGES} --statmap dy", "'dy'"),
    Case(
        "t-maps of one class",
        f"{HARMONIZE_IMAGES} --target none --statmap dx",
        "--statmap dx",
        table(lambda frame: frame.assign(dx="CN"), "bids/participants.tsv"),
    ),
    Case(
        "t-maps of three classes",
        f"{HARMONIZE_IMAGES} --target none --statmap dx",
        "3 classes",
        table(lambda frame: frame.assign(dx=["a", "b", "c"] * 4), "bids/participants.tsv"),
    ),
    Case(
        "t-maps of an empty column",
        f"{HARMONIZE_IMAGES} --target none --statmap dx",
        "no row has a value",
        table(lambda frame: frame.assign(dx=None), "bids/participants.tsv"),
    ),
    Case(
        "t-maps of participants who change between visits",
        f"{HARMONIZE_IMAGES} --target none --subject family --statmap dx",
        "of one class of the target at one visit",
        table(lambda frame: frame.assign(family="f"), "bids/participants.tsv"),
    ),
    Case(
        "t-maps of what a covariate fixes",
        f"{HARMONIZE_IMAGES} --target none --statmap months",
        "--statmap months",
        table(lambda frame: frame.assign(months=12 * frame["age"]), "bids/participants.tsv"),
    ),
    Case("no steps", f"{HARMONIZE} --steps 0", "--steps"),
    Case(
        "a cache that cannot be written",
        HARMONIZE_IMAGES,
        "EQUIPOOL_CACHE",
        lambda: Path("cache").write_text("") and None,
    ),
]

PRESETS = [
    Case(
        "ADNI without a table",
        "check adni --preset adni",
        "one .csv or .tsv file",
        lambda: Path("adni").mkdir(),
    ),
    Case("ADNI without a column", "check adni --preset adni", "dx", adni("Subject,Sex\n002_S_0001,F\n")),
    Case(
        "ADNI with a gap",
        "check adni --preset adni",
        "'sex'",
        adni(f"{ADNI}I1001,002_S_0001,AD,,70,Manufacturer=GE\n"),
    ),
    Case(
        "ADNI without a manufacturer",
        "check adni --preset adni",
        "Manufacturer",
        adni(f"{ADNI}I1001,002_S_0001,AD,F,70,x\n"),
    ),
    Case(
        "ADNI without patients",
        "check adni --preset adni",
        "'MCI'",
        adni(f"{ADNI}I1001,002_S_0001,MCI,F,70,Manufacturer=GE\n"),
    ),
    Case(
        "ADNI with an image of two participants",
        "check adni --preset adni",
        "could belong to",
        adni(f"{ADNI}I1001,002_S_0001,AD,F,70,Manufacturer=GE\n", "I1001_I1002.nii"),
    ),
    Case(
        "ADNI with two rows of an image",
        "check adni --preset adni",
        "several rows of table.csv",
        adni(ADNI + 2 * "I1001,002_S_0001,AD,F,70,Manufacturer=GE\n"),
    ),
    Case("ADCP without sites", "check adcp --preset adcp", "no column for the site", lambda: adcp()),
    Case(
        "ADNI without images",
        "check adni --preset adni",
        "adni",
        adni(f"{ADNI}I1001,002_S_0001,AD,F,70,Manufacturer=GE\n", None),
    ),
]

APPLY = [
    Case("no model", "apply nothing people.csv --out out", "nothing holds no equipool model"),
    Case(
        "a damaged model",
        "apply fitted people.csv --out out",
        "damaged",
        write("fitted/model/model.json", "{"),
    ),
    Case(
        "numbers of another model",
        "apply fitted people.csv --out out",
        "is damaged",
        cut("fitted/model/model.safetensors"),
    ),
    Case(
        "a model of the future",
        "apply fitted people.csv --out out",
        "schema 99",
        json_change("fitted/model/model.json", schema=99),
    ),
    Case(
        "a model with a part missing",
        "apply fitted people.csv --out out",
        "is damaged",
        lambda: without_part(),
    ),
    Case("a model of tables on images", "apply fitted bids --out out", "is of tables"),
    Case("a model of images on a table", "apply brains people.csv --out out", "is of images"),
    Case(
        "new rows without a feature",
        "apply fitted people.csv --out out",
        "'volume'",
        table(lambda frame: frame.drop(columns="volume")),
    ),
    Case("new rows of another site", "apply fitted people.csv --out out", "'C'", cell(3, "site", "C")),
    Case("new rows without a site", "apply fitted people.csv --out out", "row 4", cell(3, "site", None)),
    Case(
        "a level that the model has not seen", "apply fitted people.csv --out out", "'X'", cell(3, "sex", "X")
    ),
    Case(
        "new rows without a column of a covariate",
        "apply fitted people.csv --out out",
        "lacks 'age' (kept at the fit); add it, or have it estimated from the features with --infer",
        table(lambda frame: frame.drop(columns="age")),
    ),
    Case(
        "new rows without a column of the site",
        "apply fitted people.csv --out out",
        "name its column with --site",
        table(lambda frame: frame.drop(columns="site")),
    ),
    Case(
        "new rows whose age is in months",
        "apply fitted people.csv --out out",
        "it looks like months instead of years",
        table(lambda frame: frame.assign(age=12 * frame["age"])),
    ),
    Case(
        "new rows in another unit",
        "apply fitted people.csv --out out",
        "it looks like a unit ten times larger",
        table(lambda frame: frame.assign(thickness=frame["thickness"] / 10)),
    ),
    Case(
        "new rows of z-scores",
        "apply fitted people.csv --out out",
        "it looks like z-scores",
        table(lambda frame: frame.assign(volume=(frame["volume"] - 4) / frame["volume"].std())),
    ),
    Case(
        "new images whose age is in months",
        "apply brains bids --out out",
        "it looks like months instead of years",
        table(lambda frame: frame.assign(age=12 * frame["age"]), "bids/participants.tsv"),
    ),
    Case(
        "new rows with an infinite value",
        "apply fitted people.csv --out out",
        "'volume' is infinite",
        cell(3, "volume", np.inf),
    ),
    Case("new rows without an age", "apply fitted people.csv --out out", "'age'", cell(3, "age", None)),
    Case(
        "new rows with text for a number",
        "apply fitted people.csv --out out",
        "'thickness'",
        cell(3, "thickness", "thick"),
    ),
    Case(
        "new images of another site",
        "apply brains bids --out out",
        "'C'",
        cell(3, "site", "C", "bids/participants.tsv"),
    ),
    Case(
        "new images of another grid",
        "apply brains bids --out out",
        "6 × 6 × 7",
        scan(lambda image: np.pad(image, [(0, 1), (0, 0), (0, 0)]), every=True),
    ),
    Case(
        "a new image's age in words",
        "apply brains bids --out out",
        "'age' is 'old' in row 4",
        cell(3, "age", "old", "bids/participants.tsv"),
    ),
    Case(
        "a new image without an age",
        "apply brains bids --out out",
        "'age' has no finite value in row 4",
        cell(3, "age", None, "bids/participants.tsv"),
    ),
    Case(
        "a new image that is truncated",
        "apply brains bids --out out",
        "sub-00",
        cut("bids/sub-00/anat/sub-00_T1w.nii.gz"),
    ),
]

OTHERS = [
    Case("no tables to compare", "benchmark harmonizers --out out", "simulated-0"),
    Case("no such table", "benchmark harmonizers no.csv --out out", "no.csv"),
    Case("an odd simulated table", "benchmark harmonizers simulated-half --out out", "simulated-half"),
    Case(
        "a harmonizer that is not there",
        "benchmark harmonizers people.csv --methods combatt --out out",
        "'combatt'",
    ),
    Case("no repeats", "benchmark harmonizers people.csv --repeats 0 --out out", "0 repeats"),
    Case(
        "no covariate to keep", "benchmark harmonizers people.csv --covariate none --out out", "--covariate"
    ),
    Case(
        "sites too small to compare",
        "benchmark harmonizers people.csv --out out",
        "fewer than two sites",
        table(lambda frame: frame[:8]),
    ),
    Case("a dataset that is not there", "benchmark germany --out out", "'germany'"),
    Case("a cohort that is not there", "benchmark adni:no --out out", "no does not exist"),
    Case("a method that is not there", "benchmark german --methods our --out out", "'our'"),
    Case("no seeds", "benchmark german --seeds 0 --out out", "--seeds"),
    Case("settings that are not there", "benchmark german --settings no.json --out out", "no.json"),
    Case(
        "settings that are none",
        "benchmark german --settings my.json --out out",
        "my.json",
        write("my.json", "[1]"),
    ),
    Case("a search of a dataset that is not there", "select germany --out out", "'germany'"),
    Case("a search of a method that is not there", "select german --methods our --out out", "'our'"),
    Case("a search without trials", "select german --trials 0 --out out", "trials must be at least 1"),
    Case("a search with an odd tolerance", "select german --tolerance 2 --out out", "tolerance"),
    Case("a dataset to fetch that is not there", "datasets fetch germany", "'germany'"),
    Case("nothing to fetch", "datasets fetch", "such as german"),
    Case("names for a list", "datasets list german", "fetch german"),
    Case("an earlier simulation", SIMULATE, "--force", write("sim/.equipool-simulate", "{}")),
    Case("a simulation without counts", "simulate sim --like custom", "--people"),
    Case("patients without participants", "simulate sim --patients 3", "--patients"),
    Case("patients of another number of sites", f"{SIMULATE} --patients 2", "2 sites"),
    Case("more patients than participants", f"{SIMULATE} --patients 5 2", "site1 cannot have 5 patients"),
    Case("a simulation with an odd resolution", "simulate sim --resolution 20", "resolution"),
    Case("a simulation with an odd overlap", "simulate sim --overlap 7", "overlap"),
    Case("a simulation with an odd seed", f"{SIMULATE} --seed -1", "--seed"),
    Case("a simulation without jobs", f"{SIMULATE} --jobs 0", "--jobs"),
    Case("heads of no folder", "preprocess no out", "no is not a folder"),
    Case("heads to their own folder", "preprocess bids bids", "write to another one"),
    Case(
        "two heads of a participant",
        "preprocess bids out",
        "--desc",
        lambda: save("bids/sub-00/anat/sub-00_desc-b_T1w.nii.gz", np.ones((5, 6, 7))),
    ),
    Case("heads at an odd resolution", "preprocess bids out --resolution 99", "resolution"),
    Case(
        "heads of a preset by a part of their names",
        "preprocess bids out --preset adni --session 1",
        "--session goes with BIDS names",
    ),
    Case("heads without jobs", "preprocess bids out --jobs 0", "jobs"),
    Case("a step that cannot be skipped", "preprocess bids out --skip all", "n4, register, normalize"),
]

REPORTS = [
    Case("a report of no result", "report fitted", "fitted has no account.json"),
    Case("a report of what is not there", "report harmonised", "harmonised does not exist"),
    Case("a report of one table", "report people.csv", "--after"),
    Case("a report of a folder and a table", "report fitted --after people.csv", "--after"),
    Case("a report over something else", "report fitted --out people.csv", "people.csv is no report"),
    Case("a report with an odd seed", "report fitted --seed -1", "--seed"),
    Case("a report onto a folder", "report fitted --out bids", "bids is a folder"),
    Case("a report of a damaged account", "report fitted", "account.json", write("fitted/account.json", "{")),
    Case(
        "a report of a table that is not there", "report people.csv --after no.csv", "no.csv does not exist"
    ),
    Case(
        "a report of an older account", "report fitted", "another version", write("fitted/account.json", "{}")
    ),
    Case(
        "a report of a table without ids",
        "report people.csv --after after.csv",
        "'id'",
        lambda: pd.read_csv("people.csv").drop(columns="id").to_csv("after.csv", index=False),
    ),
    Case(
        "a report of tables of other lengths",
        "report people.csv --after after.csv --id none",
        "after.csv 21",
        lambda: pd.read_csv("people.csv")[:-3].to_csv("after.csv", index=False),
    ),
    Case(
        "a report of tables in another order",
        "report people.csv --after after.csv --id none",
        "--id",
        lambda: pd.read_csv("people.csv")[::-1].to_csv("after.csv", index=False),
    ),
    Case(
        "a report of tables of other participants",
        "report people.csv --after after.csv",
        "after.csv",
        lambda: pd.read_csv("people.csv")[:-3].to_csv("after.csv", index=False),
    ),
]

CASES = [*CALLS, *TABLES, *OUTPUTS, *CONFIGS, *IMAGES, *PRESETS, *APPLY, *REPORTS, *OTHERS]


def named(first: str, second: str) -> None:
    """Let two rows of scans.csv have these ids, and their files names that say nothing of the person."""
    frame = pd.read_csv("scans.csv")
    for k, path in enumerate(frame["scan"]):
        Path(path).rename(f"scan{k}.nii.gz")
    ids = [first, second, *frame["id"][2:]]
    frame.assign(scan=[f"scan{k}.nii.gz" for k in range(len(frame))], id=ids).to_csv("scans.csv", index=False)


def adcp() -> None:
    """A folder of ADCP that does not tell the sites."""
    write_now("adcp/table.csv", "subject,age,sex,dx\nS1,70,F,AD\nS2,71,F,CN\n")
    for name in ("S1", "S2"):
        save(f"adcp/{name}.nii", np.ones((3, 3, 3)))


def twice() -> None:
    """Let the second image of scans.csv be called as the first, in another folder."""
    rename("bids/sub-01/anat/sub-01_T1w.nii.gz", "other/sub-00_T1w.nii.gz")()
    cell(1, "scan", "other/sub-00_T1w.nii.gz", "scans.csv")()


def without_part() -> None:
    """Take away an entry of a saved model that it cannot be rebuilt without."""
    path = Path("fitted/model/model.json")
    facts = json.loads(path.read_text())
    keep = ("schema", "sha256", "estimator", "equipool")
    path.write_text(json.dumps({name: value for name, value in facts.items() if name in keep}))


def short(text: str) -> str:
    """Return a message without what differs between machines."""
    return re.sub(r"\S*/cache/images/\w+", "…/images/…", text)
