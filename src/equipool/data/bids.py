"""BIDS folders: find one image for each person and visit, and join it with what is known of them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from equipool.checks.findings import listed, plural
from equipool.data.tables import read_table
from equipool.exceptions import EquipoolWarning, InputError

__all__ = ["MissingImages", "find_images", "read_bids", "require_partners"]

MissingImages = Literal["error", "drop"]

ENTITY = re.compile(r"([A-Za-z]+)-([A-Za-z0-9+]+)_")
SHOWN = 10
KEY = ["participant_id", "session"]


def find_images(folder: str | Path, *, suffix: str = "T1w", **entities: object) -> pd.DataFrame:
    """Return the images of a BIDS folder, raw or derivative: one for each person and session.

    Parameters
    ----------
    folder
        The folder that holds ``sub-…``; its ``derivatives`` are not searched, give one of them instead.
    suffix
        The last part of the file names, such as ``T1w``.
    **entities
        What the images must have: ``space="MNI152NLin2009cAsym"``, ``res=2``, ``desc="brain"``,
        ``session="01"``, ``run=1``, …; ``""`` for images without that part of the name.

    Returns
    -------
    A frame with ``participant_id``, ``session`` (``None`` where there are none), ``path`` and a column for
    each other entity found.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give a BIDS folder, which holds sub-… folders.")
    wanted = {"session" if name == "ses" else name: value for name, value in entities.items()}
    rows = [_entities(path) for path in _candidates(folder, suffix)]
    if not rows:
        raise InputError(_nothing_found(folder, suffix))
    frame = pd.DataFrame(rows).astype(object)
    frame = frame.where(frame.notna(), None)
    for name, value in wanted.items():
        if value is not None:
            frame = _narrowed(frame, folder, suffix, name, str(value))
    frame = frame.dropna(axis="columns", how="all")
    if "session" not in frame:
        frame["session"] = None
    _require_one_each(frame)
    order = [*KEY, "path", *sorted(set(frame.columns) - {*KEY, "path"})]
    return frame[order].sort_values(KEY, ignore_index=True)


def read_bids(
    folder: str | Path,
    *,
    suffix: str = "T1w",
    participants: str | Path | pd.DataFrame | None = None,
    missing_images: MissingImages = "error",
    **entities: object,
) -> pd.DataFrame:
    """Return the people of a BIDS folder with their images: ``participants.tsv`` and a column ``path``.

    Where there are sessions, the columns of each person's ``sub-…_sessions.tsv`` (such as the age at the
    visit) come before those of ``participants.tsv``.

    Parameters
    ----------
    folder, suffix, **entities
        As for :func:`find_images`.
    participants
        Another table of the people with a column ``participant_id``: a file or a frame. Derivatives often
        lack one of their own; give that of the raw dataset.
    missing_images
        What to do with people without an image and images of people who are not in the table: ``"error"``
        names them, ``"drop"`` leaves them out with a warning.
    """
    images = find_images(folder, suffix=suffix, **entities)
    people = _participants(Path(folder), participants)
    images, people = require_partners(
        images, people, "participant_id", missing_images=missing_images, table="the participants' table"
    )
    # A column of the table that is called as an entity of the file names (say, "run") stays the table's.
    shared = [name for name in images.columns if name in people.columns and name != "participant_id"]
    if "session" in shared or "path" in shared:
        raise InputError(
            "The participants' table has a column 'session' or 'path', which the images have too; rename it."
        )
    frame = images.drop(columns=shared).merge(people, on="participant_id", how="left", validate="many_to_one")
    return _with_sessions(frame, Path(folder))


def require_partners(
    images: pd.DataFrame,
    people: pd.DataFrame,
    key: str,
    *,
    missing_images: MissingImages = "error",
    table: str = "the table",
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return images and people that have each other; name those that have not, or drop them."""
    if missing_images not in ("error", "drop"):
        raise InputError(f"missing_images must be 'error' or 'drop'. Got {missing_images!r}.")
    without_image = sorted(set(people[key]) - set(images[key]))
    without_row = sorted(set(images[key]) - set(people[key]))
    complaints = []
    if without_image:
        complaints.append(
            f"{plural(len(without_image), 'id')} of {table} without an image: "
            f"{listed(without_image, shown=SHOWN)}"
        )
    if without_row:
        complaints.append(
            f"{plural(len(without_row), 'image')} without a row in {table}: "
            f"{listed(without_row, shown=SHOWN)}"
        )
    if len(without_row) == images[key].nunique():
        raise InputError(
            f"No image belongs to an id of {table}: {'; '.join(complaints)}. Give both the same ids."
        )
    if complaints and missing_images == "error":
        raise InputError(
            f"{'; '.join(complaints)}. Complete them, or leave them out (missing_images='drop', "
            "--missing-images drop)."
        )
    if complaints:
        warnings.warn(f"Left out are {'; '.join(complaints)}.", EquipoolWarning, stacklevel=3)
    return images[images[key].isin(people[key])], people[people[key].isin(images[key])]


# -- names -------------------------------------------------------------------------------------------------


def _candidates(folder: Path, suffix: str) -> list[Path]:
    found: set[Path] = set()
    for ending in (".nii", ".nii.gz"):
        for start in ("sub-*", "sub-*/**/sub-*"):
            found.update(folder.glob(f"{start}_{suffix}{ending}"))
    return sorted(found)


def _entities(path: Path) -> dict[str, Any]:
    parts = dict(ENTITY.findall(path.name))
    return {
        "participant_id": f"sub-{parts.pop('sub', '')}",
        "session": parts.pop("ses", None),
        "path": path,
        **parts,
    }


def _nothing_found(folder: Path, suffix: str) -> str:
    others = {path.name.rsplit("_", 1)[-1].split(".")[0] for path in _candidates(folder, "*")}
    if others:
        there = listed(sorted(others))
        return f"{folder} has no images with the suffix {suffix!r}; choose one with --suffix: {there}."
    derivatives = sorted(path.parent for path in folder.glob("derivatives/*/sub-*"))
    if derivatives:
        return f"{folder} has no images of its own; give one of its derivatives, such as {derivatives[0]}."
    return f"{folder} holds no images named sub-…_{suffix}.nii or .nii.gz; give a BIDS folder."


def _narrowed(frame: pd.DataFrame, folder: Path, suffix: str, name: str, value: str) -> pd.DataFrame:
    """Keep the images whose entity has this value; numbers match with and without leading zeros."""
    prefix = "ses-" if name == "session" else f"{name}-"

    def plain(text: str) -> str:
        text = text.removeprefix(prefix)
        return text.lstrip("0") if text.isdigit() else text

    there = frame[name] if name in frame else pd.Series([None] * len(frame), dtype=object)
    kept = frame[[plain(found or "") == plain(value) for found in there]]
    if kept.empty:
        values = sorted(set(there.dropna()))
        hint = f"there are {listed(values)}" if values else f"no name has a part {prefix}…; leave it out"
        raise InputError(f"No {suffix} image of {folder} has {name}={value!r}; {hint}.")
    return kept


def _require_one_each(frame: pd.DataFrame) -> None:
    """Raise an error where a person's visit has several images, and say what tells them apart."""
    several = frame[frame.duplicated(KEY, keep=False)]
    if several.empty:
        return
    groups = [group for _, group in several.groupby(KEY, dropna=False)]
    names = [path.name for path in groups[0]["path"]]
    more = f" ({len(groups) - 1} more like this)" if len(groups) > 1 else ""
    telling = {}
    for name in sorted(set(frame.columns) - {*KEY, "path"}):
        values = {value or "" for value in groups[0][name]}
        if len(values) > 1:
            telling[name] = sorted(values)
    hints = [f"{name} (--{name}: {listed(values)})" for name, values in telling.items()]
    remedy = f"choose by {' or '.join(hints)}" if hints else "only one can be used; move the others away"
    raise InputError(f"{_visit(groups[0].iloc[0])} has {len(names)} images{more}: {listed(names)}; {remedy}.")


def _visit(row: pd.Series[Any]) -> str:
    return f"{row['participant_id']}" + (f" in session {row['session']}" if row["session"] else "")


# -- tables ------------------------------------------------------------------------------------------------


def _participants(folder: Path, participants: str | Path | pd.DataFrame | None) -> pd.DataFrame:
    if isinstance(participants, pd.DataFrame):
        return _with_ids(participants.copy(), "The participants' table", "participant_id", "sub-")
    path = folder / "participants.tsv" if participants is None else Path(participants)
    if not path.is_file():
        raise InputError(
            f"{path} does not exist; give the table of the people (participants=, --participants), "
            "such as the participants.tsv of the raw dataset."
        )
    return _with_ids(read_table(path, labels=["participant_id"]), path.name, "participant_id", "sub-")


def _with_ids(frame: pd.DataFrame, where: str, column: str, prefix: str) -> pd.DataFrame:
    """Return the table with ids that all have the prefix, as in the names of files; refuse double ones."""
    if column not in frame:
        raise InputError(
            f"{where} has no column {column!r}; add it, or rename one of {listed(frame.columns)}."
        )
    if frame[column].isna().any():
        empty = plural(int(frame[column].isna().sum()), "row")
        raise InputError(f"{where} has {empty} without {column}; fill it in, or delete these rows.")
    ids = [prefix + str(value).strip().removeprefix(prefix) for value in frame[column]]
    frame = frame.assign(**{column: ids})
    double = frame.loc[frame.duplicated(column), column].unique()
    if len(double):
        raise InputError(
            f"{where} has more than one row for {listed(double, shown=SHOWN)}; keep one of each."
        )
    return frame


def _with_sessions(frame: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Let what is known of a visit override what is known of the person."""
    if frame["session"].isna().all():
        return frame
    tables = []
    for person in frame["participant_id"].unique():
        path = folder / person / f"{person}_sessions.tsv"
        if path.is_file():
            visits = _with_ids(read_table(path, labels=["session_id"]), path.name, "session_id", "ses-")
            session = visits.pop("session_id").str.removeprefix("ses-")
            tables.append(visits.assign(participant_id=person, session=session))
    if not tables:
        return frame
    visits = pd.concat(tables, ignore_index=True).set_index(KEY)
    visits = visits.drop(columns=[name for name in ("path",) if name in visits])
    known = visits.reindex(pd.MultiIndex.from_frame(frame[KEY])).reset_index(drop=True)
    for name in known.columns:
        frame[name] = known[name].where(known[name].notna(), frame[name]) if name in frame else known[name]
    return frame
