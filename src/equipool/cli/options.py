"""Every command's help and options, each declared once. Imports are light, so that --help is instant."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Several(argparse.Action):
    """Names that may be given in one go or one by one; those of a config file are replaced, not added to."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """Take the names."""
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if earlier is self.default else earlier), *values])


def option(help: str, default: Any = None, *, choices: str = "", **settings: Any) -> dict[str, Any]:
    """Return what argparse takes; a help ends with the default, if there is one."""
    if choices:
        settings["choices"] = choices.split()
    if default is not None:
        settings["default"] = default
    if default not in (None, []) and default != ["all"]:
        help += f" (default: {default})"
    return {"help": help, **settings}


FLAG = {"action": "store_true"}
COLUMN = {"metavar": "COLUMN"}
COLUMNS = {"metavar": "COLUMN", "nargs": "+"}
NAMES = {"metavar": "NAME", "nargs": "+"}
DATASETS = {"metavar": "DATASET", "nargs": "+"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
FOLDER: dict[str, Any] = {"type": Path, "metavar": "DIR"}
COUNT: dict[str, Any] = {"type": int, "metavar": "N"}

ENTITIES = ("space", "res", "desc", "session", "run", "acq")  # parts of BIDS names

# By name, without -- where they are positional; "apply --site" is the --site of `apply`, which differs.
OPTIONS: dict[str, dict[str, Any]] = {
    # What is read and written.
    "table": option("a .csv, .tsv or .parquet table, or a folder of images", type=Path, metavar="SOURCE"),
    "report table": option("a folder of `harmonize`, or the table as measured", type=Path, metavar="SOURCE"),
    "model": option("a saved model, or the folder that `harmonize` wrote", type=Path, metavar="MODEL"),
    "bids": option("the folder with sub-… folders", type=Path, metavar="BIDS"),
    "out": option("the folder to write", type=Path, metavar="OUT"),
    "--out": option("where to write", required=True, **FOLDER),
    "demo --out": option("where to write", Path("equipool-demo"), **FOLDER),
    "report --out": option("the page to write (default: report.html, in the folder or here)", **FILE),
    "--after": option("the harmonized table", **FILE),
    "--figure": option("also draw it, as .png, .svg or .pdf", **FILE),
    "--write-config": option("also write the options to a TOML file, for --config", **FILE),
    # How it is done.
    "--seed": option("of the random numbers", 0, **COUNT),
    "--jobs": option("how many at a time (default: all cores)", **COUNT),
    "harmonize --jobs": option("images read at a time", 1, **COUNT),
    "--scheduler": option("of Dask, to run there, such as tcp://10.0.0.1:8786", metavar="ADDRESS"),
    "harmonize --fresh": option("of --codes: train anew, whatever an interrupted run has done", **FLAG),
    "--dry-run": option("say what would be done, and write nothing", **FLAG),
    "--json": option("print one JSON object, and nothing else", **FLAG),
    "--fresh": option("do again what an earlier run has done", **FLAG),
    "--force": option("overwrite an earlier result of this command", **FLAG),
    # The columns of a table.
    "--site": option("the scanner, centre or group", **COLUMN),
    "apply --site": option(
        "the site (default: guessed); none: tables with --infer, images with --codes", **COLUMN
    ),
    "--covariate": option(
        "differences to keep, such as age; may be repeated; none for none",
        [],
        dest="covariates",
        action=Several,
        **COLUMNS,
    ),
    "--target": option("what will be predicted or tested, such as dx; none for none", **COLUMN),
    "--id": option("one value for each row; none for none", **COLUMN),
    "--subject": option("the participant of each row, where some have several rows", **COLUMN),
    "--features": option(
        "the measurements, or '*_patterns' (default: all other columns of numbers)", **COLUMNS
    ),
    "--ignore": option("columns that are none of these", [], **COLUMNS),
    "--task": option("what the target is (default: guessed)", choices="class number"),
    "--no-guess": option("guess no column's role", **FLAG),
    "--config": option("a TOML file with options (see check --write-config)", **FILE),
    # Images.
    "--images": option("the column of SOURCE that holds paths of NIfTI files", **COLUMN),
    "--preset": option("how the folder is laid out (default: BIDS)", choices="adni adcp"),
    "--suffix": option("BIDS: the last part of the file names", "T1w"),
    **{f"--{name}": option(f"BIDS: only images with this {name}", metavar="LABEL") for name in ENTITIES},
    "--participants": option("BIDS: another table than the folder's participants.tsv", **FILE),
    "--missing-images": option("rows without an image, images without a row", "error", choices="error drop"),
    "--mask": option("a NIfTI file: the voxels to use", **FILE),
    # Harmonization.
    "--missing": option(
        "tables: empty cells stay empty, are refused, or are filled in", "keep", choices="keep error impute"
    ),
    "--keep-target": option("allow for the target when site effects are estimated", **FLAG),
    "--infer": option("tables: estimate the site or covariates where there are no columns of them", **FLAG),
    "--statmap": option(
        "images: also t-maps of this column before and after, covariates and sites adjusted", **COLUMN
    ),
    "--codes": option("images: also train codes, which predict the target (EquivariantPooler)", **FLAG),
    "apply --codes": option("images: also codes, and predictions, by a model of `harmonize --codes`", **FLAG),
    "--encoder": option(
        "of --codes; resnet takes hours without a GPU", "components", choices="components linear resnet"
    ),
    "--steps": option("of training for --codes", 1500, **COUNT),
    "--no-report": option("leave out the report, which takes a while", **FLAG),
    "--unseen-site": option("refuse, keep as it is, or adapt to it", "error", choices="error pooled adapt"),
    # Simulation and preprocessing.
    "--like": option("scanners and sample counts: the paper's, or yours", "adni", choices="adni adcp custom"),
    "--people": option("custom: participants of each site", nargs="+", **COUNT),
    "--patients": option("custom: how many of them are ill (default: 40 %%)", nargs="+", **COUNT),
    "--overlap": option("of the sites' ages, 0 to 1 (default: that of the dataset)", type=float),
    "demo --overlap": option("of the sites' ages, 0 to 1", 0.0, type=float),
    "--resolution": option("voxel size in mm, 1 to 8", 4.0, type=float),
    "preprocess --resolution": option("voxel size of the result in mm", 2.0, type=float),
    "--skip": option("steps to leave out", [], choices="n4 register normalize", action="extend", nargs="+"),
    "--brain-extracted": option("the images have no skull: the brain is where they are not 0", **FLAG),
    # Benchmarks.
    "datasets": option(
        "german, adult; adult-overlap-1, -0.5 and -0 (covariate shift); of images adni-sim, adcp-sim "
        "(simulated; -hard where ages do not overlap), adni:FOLDER, adcp:FOLDER; or harmonizers TABLE…, to "
        "compare SiteHarmonizer with ComBat's family on tables, simulated-OVERLAP or simulated-joint-OVERLAP",
        **DATASETS,
    ),
    "--repeats": option("harmonizers: of the five folds", 3, **COUNT),
    "--methods": option(
        "of `harmonizers` raw, combat, combat-gam, covbat, ours and others; else naive, mmd, cai, ss, rm, "
        "paper, ours, or all; ablation for the steps from paper to ours (default: all)",
        ["all"],
        **NAMES,
    ),
    "select --methods": option("of those of `benchmark` (default: all)", ["all"], **NAMES),
    "--seeds/--splits": option("repetitions; of images, random splits (default: 3, of images 5)", **COUNT),
    "--quick": option("one seed and a third of the training, to see the whole path", **FLAG),
    "--settings": option("settings of `equipool select` (default: ours)", **FILE),
    "dataset": option("german or adult", metavar="DATASET"),
    "--trials": option("settings tried a method", 20, **COUNT),
    "--tolerance": option("share of the best accuracy given up", 0.05, type=float),
    "action": option("what to do", "list", nargs="?", choices="list fetch"),
    "names": option("fetch: such as german", [], metavar="DATASET", nargs="*"),
}

# Options that stand below a heading in the help: its text, and their names.
GROUPS = {
    "columns": (
        "Site, covariates, target and id are guessed by name where they are not given.",
        "--site --covariate --target --id --subject --features --ignore --task --no-guess --config",
    ),
    "images": (
        "SOURCE may have a column of paths, or be a folder: BIDS, or that of a preset",
        f"--images --preset --suffix --{' --'.join(ENTITIES)} --participants --missing-images --mask",
    ),
}

GOES_ON = "What is done is kept; run the same command again to go on."


@dataclass(frozen=True)
class Command:
    """A command; ``run(arguments)`` in the module of its name in ``equipool.cli.commands`` does it."""

    help: str
    options: str  # names of OPTIONS and GROUPS
    description: str = ""
    go_on: str = "Nothing half done was left; the same command starts anew."  # after an interruption
    constants: dict[str, Any] = field(default_factory=dict)  # in place of options of others


COMMANDS = {
    "demo": Command(
        "a simulated pool of three scanners: see what equipool does",
        "--out --overlap --seed --force",
        "Simulate a table, check it, harmonize it and draw it.",
    ),
    "check": Command(
        "can the sites of a table or folder be pooled, at what price?",
        "table columns images --missing --json --figure --write-config",
        "Look at a table, or every image: sites, overlap of covariates, confounding, bad values; verdict.",
    ),
    "harmonize": Command(
        "remove site effects from a table or images; keep a model",
        "table --out columns images --missing --keep-target --statmap --codes --encoder --steps --seed "
        "--jobs --no-report --fresh --dry-run --json",
        "Fit on all rows; write a harmonized table, or BIDS derivative, and a model for `equipool apply`.",
        "What was half written is deleted again; the same command goes on with the training.",
    ),
    "apply": Command(
        "apply a saved model to new participants",
        "model table --out --site --codes --id --unseen-site --infer images --no-report --dry-run --json",
        "Harmonize new images or rows of a table with a model of `equipool harmonize`. Covariates are "
        "taken from the columns of the fit. Values in another unit than at the fit are refused.",
        constants={"target": None, "subject": None, "features": None, "no_guess": False}
        | {"covariates": [], "ignore": []},
    ),
    "report": Command(
        "the report of a harmonization again, or of any two tables",
        "table --after --out --seed columns --json",
        "Make the report of a folder of `equipool harmonize` again, without fitting anything; or judge a "
        "table that was harmonized by any means (ComBat's too): BEFORE.csv --after AFTER.csv.",
        constants={"images": None, "preset": None, "missing": "keep", "keep_target": False},
    ),
    "benchmark": Command(
        "compare methods on held-out participants, the paper's or your tables",
        "datasets columns --repeats --methods --seeds/--splits --quick --out --jobs --fresh --settings "
        "--dry-run --scheduler",
        "Fit every method with several seeds and evaluate it on held-out participants. Finished runs stay.",
        GOES_ON,
        constants={"images": None, "preset": None},
    ),
    "simulate": Command(
        "simulated brains of several scanners (BIDS), with the truth",
        "out --like --people --patients --overlap --resolution --seed --jobs --force --json",
        "Write brains that age and fall ill as measured by different scanners, the same brains without a "
        "scanner, and the true effects: something to try methods on.",
    ),
    "preprocess": Command(
        "heads of a BIDS folder to brains on the MNI grid, with a QC page",
        "bids --preset out --resolution --skip --brain-extracted --session --run --acq --desc --jobs "
        "--scheduler --fresh --dry-run",
        "Brain mask (deepbet), bias field (N4), affine registration to MNI152 (greedy), resampling and "
        "intensity normalisation of every T1-weighted image, in parallel. OUT/qc.html shows the result.",
        GOES_ON,
    ),
    "select": Command(
        "choose a method's settings on validation splits",
        "dataset --methods --trials --tolerance --out --jobs --scheduler",
        "Search settings on validation splits of the training rows: among those within the tolerance of the "
        "best accuracy, the one from which a classifier predicts the site worst. The result is for "
        "`equipool benchmark --settings FILE`.",
        GOES_ON,
    ),
    "datasets": Command(
        "list or fetch the datasets of the benchmark",
        "action names --json",
        "List them, or fetch some into the cache (EQUIPOOL_CACHE in the environment, else the user's own).",
        GOES_ON,
    ),
}
