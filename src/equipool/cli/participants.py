"""What commands share: people from a table, a table with a column of images, or a folder of images."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.cli.config import add_config
from equipool.exceptions import InputError

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ROLES",
    "add_images",
    "add_roles",
    "leave_out",
    "preset_roles",
    "read_people",
    "roles",
    "say_roles",
    "take_roles",
]

ENTITIES = ("space", "res", "desc", "session", "run", "acq")
ROLES = ("site", "covariates", "target", "id")
FLAGS = {
    "site": "--site",
    "covariates": "--covariate",
    "target": "--target",
    "id": "--id",
    "subject": "--subject",
}
PRESET_ROLES = {"site": "site", "covariates": ["age"], "target": "dx"}


class Several(argparse.Action):
    """Names that may be given in one go or one by one; those of a config file are replaced, not added to."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        """Take the names."""
        known = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if known is self.default else known), *values])


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
        help="what people differ in and is to be kept, such as age; may be repeated; none for none",
    )
    columns.add_argument(
        "--target", metavar="COLUMN", help="what will be predicted or tested, such as dx; none for none"
    )
    columns.add_argument("--id", metavar="COLUMN", help="one value for each row; none for none")
    columns.add_argument(
        "--subject", metavar="COLUMN", help="who each row is, where people come several times"
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
    add_config(columns)


def roles(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the roles of columns beside the site, as the Python interface takes them."""
    names = ("covariates", "target", "id", "features", "task")
    others = [name for name in (*arguments.ignore, arguments.subject) if name]
    return {**{name: getattr(arguments, name) for name in names}, "ignore": others}


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
        help="people without an image and images of people not in the table (default: error)",
    )
    images.add_argument("--mask", type=Path, metavar="FILE", help="a NIfTI file: the voxels that count")


def preset_roles(arguments: argparse.Namespace) -> None:
    """Let a preset say what its columns are, where the call does not."""
    if arguments.preset:
        for role, name in PRESET_ROLES.items():
            if not getattr(arguments, role):
                setattr(arguments, role, name)


def read_people(
    arguments: argparse.Namespace,
    *,
    guess: Sequence[str] = ROLES,
    site_needed: bool = True,
    fitted_site: str | None = None,
) -> tuple[pd.DataFrame, str | None]:
    """Return the people and the column of their images' paths, or ``None`` where there are none.

    Roles to guess that the call does not name are set in ``arguments``, and told on stderr; the column that a
    model had for its site comes before any other.
    """
    from equipool.data.tables import read_columns, read_table

    source: Path = arguments.table
    if not source.exists():
        raise InputError(
            f"{source} does not exist; give a table (.csv, .tsv, .parquet) or a folder of images."
        )
    if arguments.preset or source.is_dir():
        if arguments.images:
            raise InputError(
                f"--images names a column of a table, and {source} is a folder of images; leave it out."
            )
        frame = _read_folder(arguments)
        _take_site(arguments, frame.columns, fitted_site)
        guessed = take_roles(arguments, frame.columns, guess, site_needed)
        _take_visits(arguments, frame, guessed)
        say_roles(guessed)
        return frame, "path"
    _take_site(arguments, read_columns(source), fitted_site)
    guessed = take_roles(arguments, read_columns(source), guess, site_needed)
    named = (arguments.site, arguments.id, arguments.subject, arguments.images)
    frame = read_table(source, labels=[name for name in named if name])
    if arguments.images in frame:
        paths = [_beside(source, path) for path in frame[arguments.images]]
        frame = frame.assign(**{arguments.images: paths})
    if site_needed:  # else nothing is fitted, and who comes again does not matter
        _refuse_numbers_of_sites(arguments, frame, guessed)
    _take_visits(arguments, frame, guessed)
    say_roles(guessed)
    if site_needed and not arguments.images:
        leave_out(arguments, frame)
    return frame, arguments.images


def take_roles(
    arguments: argparse.Namespace, columns: Iterable[str], guess: Sequence[str], site_needed: bool
) -> dict[str, Any]:
    """Guess the roles that a call leaves open and set them; return what was guessed.

    ``none`` leaves a role empty.
    """
    from equipool.checks.findings import listed
    from equipool.data.roles import guess_roles

    columns = [str(name) for name in columns]
    given = {role: getattr(arguments, role) for role in ROLES}
    for role, value in given.items():
        if value in ("none", ["none"]) and "none" not in columns:
            setattr(arguments, role, [] if role == "covariates" else None)
    taken = [given["site"], *given["covariates"], given["target"], given["id"]]
    taken += [
        getattr(arguments, "images", None),
        arguments.subject,
        *arguments.ignore,
        *(arguments.features or ()),
    ]
    open_roles = [role for role in guess if not given[role] and not arguments.no_guess]
    if arguments.subject:
        open_roles = [role for role in open_roles if role != "id"]
    # A site that the call names as something else too is answered by what checks the roles.
    guessed: dict[str, Any] = dict(
        guess_roles(columns, roles=[role for role in open_roles if role == "site"])
    )
    taken += guessed.values()
    others = [role for role in open_roles if role != "site"]
    guessed |= guess_roles(columns, roles=others, taken=[name for name in taken if name])
    for role, value in guessed.items():
        setattr(arguments, role, value)
    if not arguments.site and site_needed:
        raise InputError(
            f"No column of {arguments.table} is known for its site; name it with --site. "
            f"The columns are {listed(columns, shown=8)}."
        )
    return guessed


def _take_site(arguments: argparse.Namespace, columns: Iterable[str], fitted: str | None) -> None:
    if fitted and not arguments.site and fitted in columns:
        arguments.site = fitted
        print(f"equipool: took {shlex.join(['--site', fitted])}, as the model was fitted.", file=sys.stderr)


def say_roles(guessed: dict[str, Any]) -> None:
    """Tell what was guessed and how to say otherwise."""
    if not guessed:
        return
    words = []
    for role, value in guessed.items():
        words += [FLAGS[role], *(value if isinstance(value, list) else [value])]
    print(
        f"equipool: by their names, took {shlex.join(words)}. Give a flag to say otherwise; "
        "with `none` it is left out.",
        file=sys.stderr,
    )


def leave_out(arguments: argparse.Namespace, frame: pd.DataFrame) -> None:
    """Ignore columns of numbers without a role whose names say that they measure nothing; tell which."""
    from equipool.checks.findings import listed
    from equipool.checks.inputs import as_numbers
    from equipool.data.roles import named_like_a_role

    if arguments.features or arguments.no_guess:
        return
    taken = {arguments.site, *arguments.covariates, arguments.target, arguments.id, arguments.subject}
    free = [name for name in frame if name not in taken and name not in arguments.ignore]
    counted = [name for name in free if str(name).startswith("Unnamed:") and _counts_rows(frame[name])]
    if counted:
        arguments.ignore = [*arguments.ignore, *counted]
        print("equipool: left out the column without a name, which counts the rows.", file=sys.stderr)
    names = [n for n in free if named_like_a_role(str(n)) and as_numbers(frame[n]).notna().any()]
    if names:
        arguments.ignore = [*arguments.ignore, *names]
        print(
            f"equipool: left out {listed(names, shown=8)}, named like ids, sites, covariates or targets; to "
            "measure them, name all measurements with --features.",
            file=sys.stderr,
        )


def _counts_rows(column: pd.Series[Any]) -> bool:
    """Whether a column is 0, 1, 2 … or 1, 2, 3 …, as tables are written together with their row numbers."""
    import pandas as pd

    return pd.api.types.is_integer_dtype(column) and bool((column.diff().iloc[1:] == 1).all())


def _refuse_numbers_of_sites(
    arguments: argparse.Namespace, frame: pd.DataFrame, guessed: dict[str, Any]
) -> None:
    """Refuse to guess whether an id at several sites is a person who travelled, or a number used again."""
    id, site = guessed.get("id"), arguments.site
    if id is None or site not in frame or site == id:
        return
    if not frame[[id, site]].dropna().drop_duplicates()[id].is_unique:
        raise InputError(
            f"Column {id!r} has the same values at several sites: if people travelled, say --subject {id}; "
            f"if each site numbers its own people, say --id none --ignore {id}."
        )


def _take_visits(arguments: argparse.Namespace, frame: pd.DataFrame, guessed: dict[str, Any]) -> None:
    """Take a guessed id that comes several times as the name of a person who does; refuse gaps in those."""
    from equipool.checks import require_columns
    from equipool.checks.findings import rows_text

    if "id" in guessed and not frame[guessed["id"]].is_unique:
        arguments.subject, arguments.id = arguments.id, None
        guessed["subject"] = guessed.pop("id")
    if arguments.subject:
        require_columns(frame, [arguments.subject])
        empty = [k for k, gap in enumerate(frame[arguments.subject].isna()) if gap]
        if empty:
            raise InputError(
                f"Column {arguments.subject!r} names no person in {rows_text(empty)}; fill it in."
            )


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
        **{name: getattr(arguments, name) for name in ENTITIES},
    )


def _beside(table: Path, path: Any) -> Any:
    """Return a path that is meant from the table's folder as one from here."""
    there = table.parent / path if isinstance(path, str) else None
    return str(there) if there is not None and there.exists() else path
