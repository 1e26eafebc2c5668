"""The participants of a call: from a table, a table with a column of images, or a folder of images."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.cli.options import ENTITIES
from equipool.exceptions import InputError
from equipool.progress import say

if TYPE_CHECKING:
    import pandas as pd

ROLES = ("site", "covariates", "target", "id")
FLAGS = {
    "site": "--site",
    "covariates": "--covariate",
    "target": "--target",
    "id": "--id",
    "subject": "--subject",
}
PRESET_ROLES = {"site": "site", "covariates": ["age"], "target": "dx"}


def preset_roles(arguments: argparse.Namespace) -> None:
    """Let a preset say what its columns are, where the call does not."""
    for role, name in PRESET_ROLES.items() if arguments.preset else ():
        if not getattr(arguments, role):
            setattr(arguments, role, name)


def read_participants(
    arguments: argparse.Namespace,
    *,
    guess: Sequence[str] = ROLES,
    site_needed: bool = True,
    fitted_site: str | None = None,
) -> tuple[pd.DataFrame, str | None]:
    """Return the table and the column of images' paths, or ``None`` where there are none.

    Roles to guess that the call does not name are set in ``arguments``, and said on stderr; the column that a
    model had for its site comes before any other.
    """
    from equipool.data.tables import read_table

    source: Path = arguments.table
    guessed: dict[str, Any] = {}

    def take(columns: Iterable[str]) -> list[str]:
        if fitted_site and not arguments.site and fitted_site in columns:
            arguments.site = fitted_site
            say(f"equipool: took {shlex.join(['--site', fitted_site])}, as the model was fitted.")
        guessed.update(take_roles(arguments, columns, guess, site_needed))
        named = (arguments.site, arguments.id, arguments.subject, arguments.images)
        return [name for name in named if name]

    if not source.exists():
        raise InputError(
            f"{source} does not exist; give a table (.csv, .tsv, .parquet) or a folder of images."
        )
    if arguments.preset or source.is_dir():
        if arguments.images:
            raise InputError(
                f"--images names a column of a table, and {source} is a folder of images; leave it out."
            )
        frame, images = _read_folder(arguments), "path"
        take(frame.columns)
    else:
        frame, images = read_table(source, labels=take), arguments.images
        if images in frame:
            frame[images] = [_beside(source, path) for path in frame[images]]
        if site_needed:  # else nothing is fitted, and participants who come again do not matter
            _refuse_numbers_of_sites(arguments, frame, guessed)
    _take_visits(arguments, frame, guessed)
    say_roles(guessed)
    if site_needed and images is None:
        leave_out(arguments, frame)
    return frame, images


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
    open_roles = [role for role in guess if not given[role] and not arguments.no_guess]
    if arguments.subject:
        open_roles = [role for role in open_roles if role != "id"]
    taken = [given["site"], *given["covariates"], given["target"], given["id"], arguments.subject]
    taken += [getattr(arguments, "images", None), *arguments.ignore, *(arguments.features or ())]
    # A site that the call names as something else too is answered by the check of the roles.
    site = guess_roles(columns, roles=[role for role in open_roles if role == "site"])
    others = [role for role in open_roles if role != "site"]
    taken = [name for name in (*taken, site.get("site")) if name]
    guessed = {**site, **guess_roles(columns, roles=others, taken=taken)}
    for role, value in guessed.items():
        setattr(arguments, role, value)
    if not arguments.site and site_needed:
        raise InputError(
            f"No column of {arguments.table} has the name of a site; name it with --site. "
            f"The columns are {listed(columns, shown=8)}."
        )
    return guessed


def say_roles(guessed: dict[str, Any]) -> None:
    """Say what was guessed and how to say otherwise."""
    words = []
    for role, value in guessed.items():
        words += [FLAGS[role], *(value if isinstance(value, list) else [value])]
    if words:
        say(
            f"equipool: by their names, took {shlex.join(words)}. Give a flag to say otherwise; "
            "with `none` it is left out."
        )


def leave_out(arguments: argparse.Namespace, frame: pd.DataFrame) -> None:
    """Ignore columns of numbers without a role whose names say that they measure nothing; say which."""
    from equipool.checks.findings import listed
    from equipool.checks.inputs import as_numbers
    from equipool.data.roles import named_like_a_role

    if arguments.features or arguments.no_guess:
        return
    taken = {arguments.site, *arguments.covariates, arguments.target, arguments.id, arguments.subject}
    free = [name for name in frame if name not in {*taken, *arguments.ignore}]
    counts = [name for name in free if str(name).startswith("Unnamed:") and _counts_rows(frame[name])]
    if counts:
        say("equipool: left out the column without a name, which counts the rows.")
    like_roles = [n for n in free if named_like_a_role(str(n)) and as_numbers(frame[n]).notna().any()]
    if like_roles:
        say(
            f"equipool: left out {listed(like_roles, shown=8)}, named like ids, sites, covariates or "
            "targets; to measure them, name all measurements with --features."
        )
    arguments.ignore = [*arguments.ignore, *counts, *like_roles]


def _counts_rows(column: pd.Series[Any]) -> bool:
    """Whether a column is 0, 1, 2 … or 1, 2, 3 …, as tables are written together with their row numbers."""
    import pandas as pd

    return pd.api.types.is_integer_dtype(column) and bool((column.diff().iloc[1:] == 1).all())


def _refuse_numbers_of_sites(
    arguments: argparse.Namespace, frame: pd.DataFrame, guessed: dict[str, Any]
) -> None:
    """Refuse to guess whether an id at several sites is a travelling participant, or a number used again."""
    id, site = guessed.get("id"), arguments.site
    if id is None or site not in frame or site == id:
        return
    if not frame[[id, site]].dropna().drop_duplicates()[id].is_unique:
        raise InputError(
            f"Column {id!r} has the same values at several sites: if participants travelled, say --subject "
            f"{id}; if each site numbers its own participants, say --id none --ignore {id}."
        )


def _take_visits(arguments: argparse.Namespace, frame: pd.DataFrame, guessed: dict[str, Any]) -> None:
    """Take a guessed id that comes several times for that of participants with visits; refuse gaps in it."""
    from equipool.checks import require_columns
    from equipool.checks.findings import rows_text

    if "id" in guessed and not frame[guessed["id"]].is_unique:
        arguments.subject, arguments.id = arguments.id, None
        guessed["subject"] = guessed.pop("id")
    if arguments.subject:
        require_columns(frame, [arguments.subject])
        empty = frame[arguments.subject].isna().to_numpy().nonzero()[0].tolist()
        if empty:
            raise InputError(
                f"Column {arguments.subject!r} names no participant in {rows_text(empty)}; fill it in."
            )


def _read_folder(arguments: argparse.Namespace) -> pd.DataFrame:
    from equipool.data.bids import read_bids
    from equipool.data.presets import read_adcp, read_adni

    if arguments.preset:
        read = read_adni if arguments.preset == "adni" else read_adcp
        return read(arguments.table, missing_images=arguments.missing_images)
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
