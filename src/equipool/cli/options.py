"""Options that several commands have: columns, images, and how a run is done."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

ENTITIES = ("space", "res", "desc", "session", "run", "acq")


class Several(argparse.Action):
    """Names that may be given in one go or one by one; those of a config file are replaced, not added to."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """Take the names."""
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if earlier is self.default else earlier), *values])


def add_roles(command: argparse.ArgumentParser) -> None:
    """Add what a table's columns are."""
    columns = command.add_argument_group(
        "columns", "Site, covariates, target and id are guessed by name where they are not given."
    )
    columns.add_argument("--site", metavar="COLUMN", help="the scanner, centre or group")
    columns.add_argument(
        "--covariate",
        dest="covariates",
        nargs="+",
        action=Several,
        default=[],
        metavar="COLUMN",
        help="what participants differ in and is to be kept, such as age; may be repeated; none for none",
    )
    columns.add_argument(
        "--target", metavar="COLUMN", help="what will be predicted or tested, such as dx; none for none"
    )
    columns.add_argument("--id", metavar="COLUMN", help="one value for each row; none for none")
    columns.add_argument(
        "--subject", metavar="COLUMN", help="the participant of each row, where some come several times"
    )
    columns.add_argument(
        "--features",
        nargs="+",
        metavar="COLUMN",
        help="the measurements; patterns such as '*_thickness' work (default: all other columns of numbers "
        "but those named like one of the above)",
    )
    columns.add_argument(
        "--ignore", nargs="+", default=[], metavar="COLUMN", help="columns that are none of these"
    )
    columns.add_argument("--task", choices=("class", "number"), help="what the target is (default: guessed)")
    columns.add_argument("--no-guess", action="store_true", help="guess no column's role")
    columns.add_argument(
        "--config", type=Path, metavar="FILE", help="a TOML file with options (see check --write-config)"
    )


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
    images.add_argument(
        "--images", metavar="COLUMN", help="the column of TABLE that holds paths of NIfTI files"
    )
    add_preset(images)
    images.add_argument(
        "--suffix", default="T1w", help="BIDS: the last part of the file names (default: T1w)"
    )
    for name in ENTITIES:
        images.add_argument(f"--{name}", help=f"BIDS: only images with this {name}")
    images.add_argument(
        "--participants",
        type=Path,
        metavar="FILE",
        help="BIDS: another table than the folder's participants.tsv",
    )
    images.add_argument(
        "--missing-images",
        choices=("error", "drop"),
        default="error",
        help="rows without an image and images without a row (default: error)",
    )
    images.add_argument("--mask", type=Path, metavar="FILE", help="a NIfTI file: the voxels that count")


def add_preset(command: argparse._ActionsContainer) -> None:
    """Add how a folder of images is laid out."""
    command.add_argument(
        "--preset", choices=("adni", "adcp"), help="how the folder is laid out (default: BIDS)"
    )


def add_missing(command: argparse.ArgumentParser) -> None:
    """Add what becomes of missing features."""
    command.add_argument(
        "--missing",
        choices=("error", "impute"),
        default="error",
        help="tables: refuse missing features, or fill them in (default: error)",
    )


def add_out(command: argparse.ArgumentParser) -> None:
    """Add the folder to write."""
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")


def add_seed(command: argparse.ArgumentParser) -> None:
    """Add the seed."""
    command.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")


def add_dry_run(command: argparse.ArgumentParser) -> None:
    """Add the option to do nothing."""
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")


def add_jobs(command: argparse.ArgumentParser, what: str) -> None:
    """Add how many processes or threads work at a time."""
    command.add_argument("--jobs", type=int, metavar="N", help=f"{what} at a time (default: all cores)")


def add_scheduler(command: argparse.ArgumentParser) -> None:
    """Add ``--scheduler``; the command line then runs the command within the cluster."""
    command.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="run on the Dask cluster with this scheduler, such as tcp://10.0.0.1:8786 (default: here)",
    )


def add_json(command: argparse.ArgumentParser) -> None:
    """Add the option for scripts."""
    command.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
