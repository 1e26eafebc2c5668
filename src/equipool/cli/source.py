"""The rows of a call: from a table, a table with a column of images, or a folder of images."""

import shlex
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from numpy.typing import NDArray

from equipool.checks import Inputs, require_columns
from equipool.checks.findings import listed, rows_text
from equipool.checks.inputs import as_numbers
from equipool.data import PooledDataset, guess_roles, read_adcp, read_adni, read_bids, read_table
from equipool.data.roles import ROLES, named_like_a_role
from equipool.data.tables import image_paths
from equipool.exceptions import InputError
from equipool.progress import say

PRESET_ROLES = {"site": "site", "covariates": ["age"], "target": "dx"}
ENTITIES = ("space", "res", "desc", "session", "run", "acq")  # parts of BIDS names that choose images
READERS: dict[str, Callable[..., pd.DataFrame]] = {"adni": read_adni, "adcp": read_adcp}  # by preset


class Source(NamedTuple):
    """What a call is about: a table, its columns by their roles, and the pool of its features or images."""

    frame: pd.DataFrame
    inputs: Inputs
    pool: PooledDataset
    subject: NDArray[Any] | None  # the participant of each row, where some have several


def read_source(arguments: Namespace) -> Source:
    """Read the table or folder of a call, and check that its sites can be pooled."""
    frame, images = read_rows(arguments)
    inputs = Inputs.from_frame(frame, site=arguments.site, images=images, **roles(arguments))
    paths = image_paths(frame, images) if images else None
    pool = PooledDataset.from_inputs(inputs, images=paths, missing=arguments.missing)
    return Source(frame, inputs, pool, frame[arguments.subject].to_numpy() if arguments.subject else None)


def read_rows(
    arguments: Namespace, *, fits: bool = True, fitted_site: str | None = None
) -> tuple[pd.DataFrame, str | None]:
    """Return the table and the column of images' paths, or ``None`` where there are none.

    Roles that the call leaves open are guessed, set in ``arguments``, and said on stderr. A call that
    ``fits`` a model needs a site; one that applies a model takes the column ``fitted_site`` before any other.
    """
    source: Path = arguments.table
    guessed: dict[str, Any] = {}

    def take(columns: Iterable[str]) -> list[str]:
        """Set the roles; return the columns that are read as text."""
        if not arguments.site and fitted_site in list(columns):
            arguments.site = fitted_site
            say(f"equipool: took {shlex.join(['--site', fitted_site])}, as the model was fitted.")
        guessed.update(_take_roles(arguments, columns, fits))
        return list(filter(None, (arguments.site, arguments.id, arguments.subject, arguments.images)))

    for role, name in PRESET_ROLES.items() if arguments.preset else ():
        setattr(arguments, role, getattr(arguments, role) or name)
    if not source.exists():
        what = f"{source} does not exist"
        raise InputError(f"{what}; give a table (.csv, .tsv, .parquet) or a folder of images.")
    if arguments.preset or source.is_dir():
        frame, images = _read_folder(arguments), "path"
        take(frame.columns)
    else:
        frame, images = read_table(source, labels=take), arguments.images
        if images in frame:  # paths are meant from the table's folder, or from here
            beside = [source.parent / path if isinstance(path, str) else None for path in frame[images]]
            here = zip(beside, frame[images], strict=True)
            frame[images] = [str(there) if there and there.exists() else path for there, path in here]
        if fits:
            _refuse_reused_ids(arguments.site, guessed.get("id"), frame)
    _take_visits(arguments, frame, guessed)
    if fits and images is None and not arguments.features and not arguments.no_guess:
        _leave_out(arguments, frame)
    return frame.reset_index(drop=True), images


def roles(arguments: Namespace) -> dict[str, Any]:
    """Return the roles of columns beside the site, as the Python interface takes them."""
    names = ("covariates", "target", "id", "features", "task")
    ignore = [name for name in (*arguments.ignore, arguments.subject) if name]
    return {**{name: getattr(arguments, name) for name in names}, "ignore": ignore}


def _take_roles(arguments: Namespace, columns: Iterable[str], fits: bool) -> dict[str, Any]:
    """Guess the roles that a call leaves open and set them; return them. ``none`` leaves a role empty."""
    columns = [str(name) for name in columns]
    given = {role: getattr(arguments, role) for role in ROLES}
    for role, value in given.items():
        if value in ("none", ["none"]) and "none" not in columns:
            setattr(arguments, role, [] if role == "covariates" else None)
    wanted = () if arguments.no_guess else ROLES if fits else ("site", "id")
    empty = [role for role in wanted if not given[role] and not (role == "id" and arguments.subject)]
    taken = [given["site"], *given["covariates"], given["target"], given["id"], arguments.subject]
    taken += [arguments.images, *arguments.ignore, *(arguments.features or ())]
    # A site that the call names as something else too is answered by the check of the roles.
    guessed = guess_roles(columns, roles=[role for role in empty if role == "site"])
    guessed |= guess_roles(columns, roles=[role for role in empty if role != "site"], taken=taken)
    for role, value in guessed.items():
        setattr(arguments, role, value)
    if fits and not arguments.site:
        what = f"No column of {arguments.table} has the name of a site"
        raise InputError(f"{what}; name it with --site. The columns are {listed(columns, shown=8)}.")
    return guessed


def _refuse_reused_ids(site: str, id: str | None, frame: pd.DataFrame) -> None:
    """Refuse to guess whether an id at several sites is a travelling participant, or a number used again."""
    if id is None or site not in frame or site == id:
        return
    if not frame[[id, site]].dropna().drop_duplicates()[id].is_unique:
        raise InputError(
            f"Column {id!r} has the same values at several sites: if participants travelled, say --subject "
            f"{id}; if each site numbers its participants anew, say --id none --ignore {id}."
        )


def _take_visits(arguments: Namespace, frame: pd.DataFrame, guessed: dict[str, Any]) -> None:
    """Take a guessed id that several rows have for that of participants with visits; say what was guessed."""
    if "id" in guessed and not frame[guessed["id"]].is_unique:
        arguments.subject, arguments.id = arguments.id, None
        guessed["subject"] = guessed.pop("id")
    if arguments.subject:
        require_columns(frame, [arguments.subject])
        empty = frame[arguments.subject].isna().to_numpy().nonzero()[0].tolist()
        if empty:
            what = f"Column {arguments.subject!r} names no participant in {rows_text(empty)}"
            raise InputError(f"{what}; fill it in.")
    words = []
    for role, value in guessed.items():
        words += ["--covariate", *value] if role == "covariates" else [f"--{role}", value]
    if words:
        say(
            f"equipool: by their names, took {shlex.join(words)}. Give a flag to say otherwise; "
            "with `none` it is left out."
        )


def _leave_out(arguments: Namespace, frame: pd.DataFrame) -> None:
    """Ignore columns of numbers without a role whose names say that they measure nothing; say which."""
    taken = {arguments.site, *arguments.covariates, arguments.target, arguments.id, arguments.subject}
    free = [name for name in frame if name not in {*taken, *arguments.ignore}]
    # 0, 1, 2 … or 1, 2, 3 …, as tables are written together with their row numbers.
    nameless = [name for name in free if str(name).startswith("Unnamed:")]
    counts = [name for name in nameless if as_numbers(frame[name]).diff().iloc[1:].eq(1).all()]
    if counts:
        say("equipool: left out the column without a name, which counts the rows.")
    like_roles = [n for n in free if named_like_a_role(str(n)) and as_numbers(frame[n]).notna().any()]
    if like_roles:
        say(
            f"equipool: left out {listed(like_roles, shown=8)}, named like ids, sites, covariates or "
            "targets; to measure them, name all measurements with --features."
        )
    arguments.ignore = [*arguments.ignore, *counts, *like_roles]


def _read_folder(arguments: Namespace) -> pd.DataFrame:
    """Return the images of a folder with the rows of its table."""
    if arguments.images:
        what = f"--images names a column of a table, and {arguments.table} is a folder of images"
        raise InputError(f"{what}; leave it out.")
    if arguments.preset:
        return READERS[arguments.preset](arguments.table, missing_images=arguments.missing_images)
    return read_bids(
        arguments.table,
        suffix=arguments.suffix,
        participants=arguments.participants,
        missing_images=arguments.missing_images,
        **{name: getattr(arguments, name) for name in ENTITIES},
    )
