"""Options that several commands have: columns, images, and how a run is done."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

ENTITIES = ("space", "res", "desc", "session", "run", "acq")

COMMON: dict[str, dict[str, Any]] = {
    "out": {"type": Path, "required": True, "metavar": "DIR", "help": "where to write"},
    "seed": {"type": int, "default": 0, "help": "of all that is random (default: 0)"},
    "jobs": {"type": int, "metavar": "N", "help": "how many at a time (default: all cores)"},
    "dry-run": {"action": "store_true", "help": "say what would be done, and write nothing"},
    "json": {"action": "store_true", "help": "print one JSON object, and nothing else"},
    "preset": {"choices": ("adni", "adcp"), "help": "how the folder is laid out (default: BIDS)"},
    "missing": {
        "choices": ("error", "impute"),
        "default": "error",
        "help": "tables: refuse missing features, or fill them in (default: error)",
    },
    "scheduler": {
        "metavar": "ADDRESS",
        "help": "run on the Dask cluster with this scheduler, such as tcp://10.0.0.1:8786 (default: here)",
    },
}


def add_common(command: argparse._ActionsContainer, *names: str) -> None:
    """Add options that several commands have."""
    for name in names:
        command.add_argument(f"--{name}", **COMMON[name])


class Several(argparse.Action):
    """Names that may be given in one go or one by one; those of a config file are replaced, not added to."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """Take the names."""
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if earlier is self.default else earlier), *values])


def add_roles(command: argparse.ArgumentParser) -> None:
    """Add what a table's columns are."""
    add = command.add_argument_group(
        "columns", "Site, covariates, target and id are guessed by name where they are not given."
    ).add_argument
    add("--site", metavar="COLUMN", help="the scanner, centre or group")
    add(
        "--covariate",
        dest="covariates",
        nargs="+",
        action=Several,
        default=[],
        metavar="COLUMN",
        help="what participants differ in and is to be kept, such as age; may be repeated; none for none",
    )
    add("--target", metavar="COLUMN", help="what will be predicted or tested, such as dx; none for none")
    add("--id", metavar="COLUMN", help="one value for each row; none for none")
    add("--subject", metavar="COLUMN", help="the participant of each row, where some come several times")
    add(
        "--features",
        nargs="+",
        metavar="COLUMN",
        help="the measurements; patterns such as '*_thickness' work (default: all other columns of numbers "
        "but those named like one of the above)",
    )
    add("--ignore", nargs="+", default=[], metavar="COLUMN", help="columns that are none of these")
    add("--task", choices=("class", "number"), help="what the target is (default: guessed)")
    add("--no-guess", action="store_true", help="guess no column's role")
    add("--config", type=Path, metavar="FILE", help="a TOML file with options (see check --write-config)")


def roles(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the roles of columns beside the site, as the Python interface takes them."""
    names = ("covariates", "target", "id", "features", "task")
    ignore = [name for name in (*arguments.ignore, arguments.subject) if name]
    return {**{name: getattr(arguments, name) for name in names}, "ignore": ignore}


def add_images(command: argparse.ArgumentParser) -> None:
    """Add how images are found."""
    images = command.add_argument_group(
        "images", "TABLE may have a column of paths, or be a folder: BIDS, or that of a preset"
    )
    add = images.add_argument
    add("--images", metavar="COLUMN", help="the column of TABLE that holds paths of NIfTI files")
    add_common(images, "preset")
    add("--suffix", default="T1w", help="BIDS: the last part of the file names (default: T1w)")
    for name in ENTITIES:
        add(f"--{name}", help=f"BIDS: only images with this {name}")
    participants = "BIDS: another table than the folder's participants.tsv"
    add("--participants", type=Path, metavar="FILE", help=participants)
    add(
        "--missing-images",
        choices=("error", "drop"),
        default="error",
        help="rows without an image and images without a row (default: error)",
    )
    add("--mask", type=Path, metavar="FILE", help="a NIfTI file: the voxels that count")
