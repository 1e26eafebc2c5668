"""BIDS: names of files, and images of a folder joined with the participants' table."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from equipool.checks.findings import listed, plural
from equipool.data.tables import read_table
from equipool.exceptions import EquipoolWarning, InputError
from equipool.files import write_json
from equipool.version import __version__

MissingImages = Literal["error", "drop"]

SHOWN = 10
KEY = ["participant_id", "session"]


def parse_name(path: Path) -> dict[str, str]:
    """Return the entities of a file's name in their order, and its suffix.

    Examples
    --------
    >>> parse_name(Path("sub-01_ses-2_T1w.nii.gz"))
    {'sub': '01', 'ses': '2', 'suffix': 'T1w'}
    """
    *pairs, suffix = re.sub(r"\.nii(\.gz)?$", "", path.name).split("_")
    entities = dict(pair.split("-", 1) for pair in pairs if re.match(r"[A-Za-z]+-.", pair))
    return {**entities, "suffix": suffix}


def format_name(entities: Mapping[str, str]) -> str:
    """Return the name, without an ending, that :func:`parse_name` takes apart: ``sub-01_ses-2_T1w``."""
    pairs = [f"{key}-{value}" for key, value in entities.items() if key != "suffix"]
    return "_".join([*pairs, *([entities["suffix"]] if "suffix" in entities else [])])


def is_bids_name(path: Path) -> bool:
    """Whether a name has the parts of BIDS, the participant first, and no others."""
    return path.name.startswith("sub-") and path.name.split(".nii")[0] == format_name(parse_name(path))


def image_path(entities: Mapping[str, str], folder: str = "anat") -> Path:
    """Return where an image with these entities belongs below a BIDS folder."""
    parts = [f"{key}-{entities[key]}" for key in ("sub", "ses") if key in entities]
    return Path(*parts, folder, f"{format_name(entities)}.nii.gz")


def as_label(text: object) -> str:
    """Return letters and digits alone, as a value in a name must be."""
    return re.sub(r"[^A-Za-z0-9]", "", str(text))


def write_description(folder: Path, name: str, command: str, **more: str) -> None:
    """Make a folder a BIDS derivative."""
    facts: dict[str, Any] = {"Name": name, "BIDSVersion": "1.9.0", "DatasetType": "derivative", **more}
    facts["GeneratedBy"] = [{"Name": f"equipool {command}", "Version": __version__}]
    write_json(folder / "dataset_description.json", facts)


def find_images(folder: str | Path, *, suffix: str = "T1w", **entities: object) -> pd.DataFrame:
    """Return the images of a BIDS folder, raw or derivative: one for each participant and session.

    The columns are ``participant_id``, ``session`` (``None`` where there are none), ``path`` and one for each
    other entity.

    Parameters
    ----------
    folder
        The folder that holds ``sub-…``; its ``derivatives`` are not searched, give one of them instead.
    suffix
        The last part of the file names, such as ``T1w``.
    **entities
        What the images must have: ``space="MNI152NLin2009cAsym"``, ``res=2``, ``desc="brain"``,
        ``session="01"``, ``run=1``, …; ``""`` for images without that part of the name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give a BIDS folder, which holds sub-… folders.")
    paths = _candidates(folder, suffix)
    if not paths:
        raise InputError(_no_images(folder, suffix))
    frame = pd.DataFrame([{"sub": "", **parse_name(path), "path": path} for path in paths], dtype=object)
    frame = frame.rename(columns={"sub": "participant_id", "ses": "session"}).drop(columns="suffix")
    frame["participant_id"] = "sub-" + frame["participant_id"]
    frame = frame.where(frame.notna(), None)
    for name, value in entities.items():
        if value is not None:
            name = "session" if name == "ses" else name
            frame = _narrowed(frame, f"{suffix} image of {folder}", name, str(value))
    frame = frame.dropna(axis="columns", how="all")
    if "session" not in frame:
        frame["session"] = None
    _require_one_each(frame)
    others = sorted(set(frame.columns) - {*KEY, "path"})
    return frame[[*KEY, "path", *others]].sort_values(KEY, ignore_index=True)


def _candidates(folder: Path, suffix: str) -> list[Path]:
    names = (f"{start}_{suffix}.nii{end}" for start in ("sub-*", "sub-*/**/sub-*") for end in ("", ".gz"))
    return sorted({path for name in names for path in folder.glob(name)})


def _no_images(folder: Path, suffix: str) -> str:
    suffixes = {parse_name(path)["suffix"] for path in _candidates(folder, "*")}
    if suffixes:
        there = listed(sorted(suffixes))
        return f"{folder} has no images with the suffix {suffix!r}; choose one with --suffix: {there}."
    derivatives = sorted(path.parent for path in folder.glob("derivatives/*/sub-*"))
    if derivatives:
        return f"{folder} has no images itself; give one of its derivatives, such as {derivatives[0]}."
    return f"{folder} holds no images named sub-…_{suffix}.nii or .nii.gz; give a BIDS folder."


def _narrowed(frame: pd.DataFrame, what: str, name: str, value: str) -> pd.DataFrame:
    """Keep the images whose entity has this value; numbers match with and without leading zeros."""
    prefix = "ses-" if name == "session" else f"{name}-"

    def plain(text: str) -> str:
        text = text.removeprefix(prefix)
        return text.lstrip("0") if text.isdigit() else text

    values = frame[name] if name in frame else pd.Series([None] * len(frame), dtype=object)
    chosen = frame[[plain(one or "") == plain(value) for one in values]]
    if chosen.empty:
        there = sorted(set(values.dropna()))
        hint = f"there are {listed(there)}" if there else f"no name has a part {prefix}…; leave it out"
        raise InputError(f"No {what} has {name}={value!r}; {hint}.")
    return chosen


def _require_one_each(frame: pd.DataFrame) -> None:
    """Raise an error where a visit has several images, and name the entities that distinguish them."""
    several = frame[frame.duplicated(KEY, keep=False)]
    if several.empty:
        return
    visits = several.groupby(KEY, dropna=False)
    first = next(group for _, group in visits)
    more = f" ({len(visits) - 1} more like this)" if len(visits) > 1 else ""
    others = sorted(set(frame.columns) - {*KEY, "path"})
    values = {name: sorted({value or "" for value in first[name]}) for name in others}
    hints = [f"{name} (--{name}: {listed(each)})" for name, each in values.items() if len(each) > 1]
    remedy = f"choose by {' or '.join(hints)}" if hints else "only one can be used; move the others away"
    id, session = first.iloc[0][KEY]
    visit = f"{id} in session {session}" if session else id
    names = listed(path.name for path in first["path"])
    raise InputError(f"{visit} has {len(first)} images{more}: {names}; {remedy}.")


def read_bids(
    folder: str | Path,
    *,
    suffix: str = "T1w",
    participants: str | Path | pd.DataFrame | None = None,
    missing_images: MissingImages = "error",
    **entities: object,
) -> pd.DataFrame:
    """Return ``participants.tsv`` of a BIDS folder with a column ``path`` of the images.

    Where there are sessions, the columns of each participant's ``sub-…_sessions.tsv`` (such as the age at the
    visit) come before those of ``participants.tsv``.

    Parameters
    ----------
    folder, suffix, **entities
        As for :func:`find_images`.
    participants
        Another table with a column ``participant_id``: a file or a frame. Derivatives often lack one; give
        that of the raw dataset.
    missing_images
        What to do with participants without an image and images without a row in the table: ``"error"``
        names them, ``"drop"`` leaves them out with a warning.
    """
    folder = Path(folder)
    images = find_images(folder, suffix=suffix, **entities)
    if isinstance(participants, pd.DataFrame):
        table, where = participants, "The participants' table"
    else:
        path = folder / "participants.tsv" if participants is None else Path(participants)
        if not path.is_file():
            what = f"{path} does not exist; give the participants' table (participants=, --participants)"
            raise InputError(f"{what}, such as the participants.tsv of the raw dataset.")
        table, where = read_table(path, labels=["participant_id"]), path.name
    table, name = _with_ids(table, where, "participant_id", "sub-"), "the participants' table"
    table, images = require_partners(table, images, "participant_id", missing_images, name)
    # Where the table and the file names both have, say, a "run", the table's is kept.
    shared = [name for name in images.columns if name in table.columns and name != "participant_id"]
    if "session" in shared or "path" in shared:
        what = "The participants' table has a column 'session' or 'path', which the images have too"
        raise InputError(f"{what}; rename it.")
    frame = images.drop(columns=shared).merge(table, on="participant_id", how="left", validate="many_to_one")
    return _with_sessions(frame, folder)


def require_partners(
    table: pd.DataFrame, images: pd.DataFrame, key: str, missing_images: MissingImages, name: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of a table and the images with the same key; name the others, or drop them."""
    if missing_images not in ("error", "drop"):
        raise InputError(f"missing_images must be 'error' or 'drop'. Got {missing_images!r}.")
    without_image = sorted(set(table[key]) - set(images[key]))
    without_row = sorted(set(images[key]) - set(table[key]))
    complaints = []
    if without_image:
        ids = f"{plural(len(without_image), 'id')} of {name} without an image"
        complaints.append(f"{ids}: {listed(without_image, shown=SHOWN)}")
    if without_row:
        extra = f"{plural(len(without_row), 'image')} without a row in {name}"
        complaints.append(f"{extra}: {listed(without_row, shown=SHOWN)}")
    what = "; ".join(complaints)
    if len(without_row) == images[key].nunique():
        raise InputError(f"No image belongs to an id of {name}: {what}. Give both the same ids.")
    if complaints and missing_images == "error":
        remedy = "Complete them, or leave them out (missing_images='drop', --missing-images drop)"
        raise InputError(f"{what}. {remedy}.")
    if complaints:
        warnings.warn(f"Left out are {what}.", EquipoolWarning, stacklevel=3)
    return table[table[key].isin(images[key])], images[images[key].isin(table[key])]


def _with_ids(frame: pd.DataFrame, where: str, column: str, prefix: str) -> pd.DataFrame:
    """Return the table with ids that all have the prefix, as in the names of files; refuse double ones."""
    if column not in frame:
        hint = f"add it, or rename one of {listed(frame.columns)}"
        raise InputError(f"{where} has no column {column!r}; {hint}.")
    if frame[column].isna().any():
        empty = plural(int(frame[column].isna().sum()), "row")
        raise InputError(f"{where} has {empty} without {column}; fill it in, or delete these rows.")
    ids = [prefix + str(value).strip().removeprefix(prefix) for value in frame[column]]
    double = pd.Index(ids)[pd.Index(ids).duplicated()].unique()
    if len(double):
        rows = f"more than one row for {listed(double, shown=SHOWN)}"
        raise InputError(f"{where} has {rows}; keep one of each.")
    return frame.assign(**{column: ids})


def _with_sessions(frame: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Let the values of a visit override those of the participant."""
    if frame["session"].isna().all():
        return frame
    tables = []
    for id in frame["participant_id"].unique():
        path = folder / id / f"{id}_sessions.tsv"
        if path.is_file():
            visits = _with_ids(read_table(path, labels=["session_id"]), path.name, "session_id", "ses-")
            session = visits.pop("session_id").str.removeprefix("ses-")
            tables.append(visits.assign(participant_id=id, session=session))
    if not tables:
        return frame
    visits = pd.concat(tables, ignore_index=True).set_index(KEY).drop(columns="path", errors="ignore")
    visits = visits.reindex(pd.MultiIndex.from_frame(frame[KEY])).reset_index(drop=True)
    for name, values in visits.items():
        frame[name] = values.where(values.notna(), frame[name]) if name in frame else values
    return frame
