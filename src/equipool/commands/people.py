"""What commands share: people from a table, a table with a column of images, or a folder of images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.exceptions import InputError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["add_images", "add_roles", "preset_roles", "read_people", "roles"]

PRESET_ROLES = {"site": "site", "covariates": ["age"], "target": "dx"}


def add_roles(command: argparse.ArgumentParser, *, site_required: bool) -> None:
    """Add what a table's columns are."""
    command.add_argument(
        "--site", required=site_required, metavar="COLUMN", help="the scanner, centre or group"
    )
    command.add_argument(
        "--covariate",
        dest="covariates",
        nargs="+",
        action="extend",
        default=[],
        metavar="COLUMN",
        help="what people differ in, such as age; may be repeated",
    )
    command.add_argument("--target", metavar="COLUMN", help="what will be predicted or tested, such as dx")
    command.add_argument("--id", metavar="COLUMN", help="one value for each person or visit")
    command.add_argument(
        "--features",
        nargs="+",
        metavar="COLUMN",
        help="the measurements; patterns such as '*_thickness' work (default: all other columns of numbers)",
    )
    command.add_argument(
        "--ignore", nargs="+", default=[], metavar="COLUMN", help="columns that are none of these"
    )
    command.add_argument("--task", choices=("class", "number"), help="what the target is (default: guessed)")


def roles(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the roles of columns beside the site, as the Python interface takes them."""
    names = ("covariates", "target", "id", "features", "ignore", "task")
    return {name: getattr(arguments, name) for name in names}


def add_images(command: argparse.ArgumentParser) -> None:
    """Add how images are found."""
    images = command.add_argument_group(
        "images", "TABLE may have a column of paths, or be a folder: BIDS, or that of a preset"
    )
    images.add_argument(
        "--images", metavar="COLUMN", help="the column of TABLE that holds paths of NIfTI files"
    )
    images.add_argument(
        "--preset", choices=("adni", "adcp"), help="how the folder is laid out (default: BIDS)"
    )
    images.add_argument(
        "--suffix", default="T1w", help="BIDS: the last part of the file names (default: T1w)"
    )
    for name in ("space", "res", "desc", "session"):
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
        help="people without an image and images of people not in the table (default: error)",
    )
    images.add_argument("--mask", type=Path, metavar="FILE", help="a NIfTI file: the voxels that count")


def preset_roles(arguments: argparse.Namespace) -> None:
    """Let a preset say what its columns are, where the call does not."""
    if arguments.preset:
        for role, name in PRESET_ROLES.items():
            if not getattr(arguments, role):
                setattr(arguments, role, name)


def read_people(arguments: argparse.Namespace) -> tuple[pd.DataFrame, str | None]:
    """Return the people and the column of their images' paths, or ``None`` where there are none.

    In a folder the people's own id is taken where the call names none and nobody comes twice.
    """
    from equipool.data.tables import read_table

    source: Path = arguments.table
    if arguments.preset or source.is_dir():
        if arguments.images:
            raise InputError(
                f"--images names a column of a table, and {source} is read as a folder of images."
            )
        frame = _read_folder(arguments)
        if arguments.id is None and frame["participant_id"].is_unique:
            arguments.id = "participant_id"
        return frame, "path"
    labels = [name for name in (arguments.site, arguments.id, arguments.images) if name]
    frame = read_table(source, labels=labels)
    if arguments.images in frame:
        paths = [_beside(source, path) for path in frame[arguments.images]]
        frame = frame.assign(**{arguments.images: paths})
    return frame, arguments.images


def _read_folder(arguments: argparse.Namespace) -> pd.DataFrame:
    from equipool.data.bids import read_bids
    from equipool.data.presets import read_adcp, read_adni

    if arguments.preset == "adni":
        return read_adni(arguments.table, missing_images=arguments.missing_images)
    if arguments.preset == "adcp":
        return read_adcp(arguments.table, missing_images=arguments.missing_images)
    return read_bids(
        arguments.table,
        suffix=arguments.suffix,
        participants=arguments.participants,
        missing_images=arguments.missing_images,
        **{name: getattr(arguments, name) for name in ("space", "res", "desc", "session")},
    )


def _beside(table: Path, path: Any) -> Any:
    """Return a path that is meant from the table's folder as one from here."""
    there = table.parent / path if isinstance(path, str) else None
    return str(there) if there is not None and there.exists() else path
