"""What `harmonize` and `apply` write: a table like the source, or a BIDS derivative, perhaps with codes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from equipool.data.bids import as_label, image_path, is_bids_name, parse_name
from equipool.data.nifti import write_volume
from equipool.data.tables import table_kind, write_table
from equipool.data.volumes import Volumes
from equipool.exceptions import InputError
from equipool.progress import Progress

BLOCK = 16  # volumes in memory at a time
KEY = ["participant_id", "session"]
# What an earlier run may have written that this one does not.
FILES = """
summary.json account.json report.html harmonized.csv harmonized.tsv harmonized.parquet participants.tsv
sub-*/sub-*_sessions.tsv codes.tsv predictions.tsv statmaps/*_as-measured* statmaps/*_harmonized*
statmaps/*.png sub-*/anat/sub-*_desc-harmonized_*.nii.gz sub-*/ses-*/anat/sub-*_desc-harmonized_*.nii.gz
""".split()


def write_harmonized(folder: Path, source: Path, frame: pd.DataFrame, features: pd.DataFrame) -> str:
    """Write a table with harmonized features as .csv, .tsv or .parquet, as the source is; return its name.

    Text is written uncompressed.
    """
    kind = table_kind(source)
    ending = {".pq": ".parquet", ".txt": ".tsv"}.get(kind, kind)
    harmonized = frame.assign(**{str(name): features[name] for name in features})
    return write_table(folder / f"harmonized{ending}", harmonized).name


def places_of(frame: pd.DataFrame, paths: Iterable[Path], id: str | None) -> pd.DataFrame:
    """Return the participant of each image and where its harmonized one goes: participant_id, session, file.

    Images with BIDS names keep them but for ``desc-harmonized``; others are named by the id, or the row.
    """
    paths = list(paths)
    names = list(map(parse_name, paths)) if all(map(is_bids_name, paths)) else _names_by_id(frame, id)
    names = [{**{k: v for k, v in name.items() if k != "desc"}, "desc": "harmonized"} for name in names]
    places = pd.DataFrame(
        {
            "participant_id": [f"sub-{name['sub']}" for name in names],
            "session": [name.get("ses") for name in names],
            "file": [image_path(name).as_posix() for name in names],
        }
    )
    double = places.loc[places["file"].duplicated(), "participant_id"]
    if len(double):
        raise InputError(
            f"Two images would be written under one name, of {double.iloc[0]}; rename one of them, or leave "
            "it out."
        )
    return places


def _names_by_id(frame: pd.DataFrame, id: str | None) -> list[dict[str, str]]:
    """Return BIDS entities of each row: its id or its number, and the number of a visit among several."""
    labels = pd.Series([f"{k + 1:04d}" for k in range(len(frame))])
    if id:
        labels = frame[id].astype(str).str.removeprefix("sub-").map(as_label)
    if (labels == "").any():
        raise InputError(f"Column {id!r} holds an id without letters and digits; give each row a name.")
    visits = labels.groupby(labels).cumcount() + 1
    return [
        {"sub": label, **({"ses": f"{visit:02d}"} if more else {}), "suffix": "T1w"}
        for label, visit, more in zip(labels, visits, labels.duplicated(keep=False), strict=True)
    ]


def write_volumes(
    out: Path, places: pd.DataFrame, volumes: Volumes, model: Any, site: Any, covariates: Any
) -> None:
    """Harmonize and write the volumes, a block at a time; outside of the model's mask the files hold 0."""
    progress = Progress("Harmonized", len(volumes))
    # A new site is estimated from all its images.
    step = len(volumes) if model.unseen_site == "adapt" else BLOCK
    for start in range(0, len(volumes), step):
        part = slice(start, start + step)
        given = None if covariates is None else covariates.iloc[part]
        harmonized = model.transform(volumes[part], site=site.iloc[part], covariates=given)
        for k, row in enumerate(harmonized.read(), start=start):
            write_volume(out / places["file"].iloc[k], harmonized.unmask(row), volumes.paths[k])
            progress(k + 1)


def write_codes(out: Path, places: pd.DataFrame, volumes: Volumes, model: Any) -> None:
    """Write the code of each image."""
    codes = pd.DataFrame(model.transform(volumes)).add_prefix("code")
    _write(out / "codes.tsv", _by_image(places, codes))


def write_predictions(out: Path, places: pd.DataFrame, volumes: Volumes, model: Any) -> None:
    """Write the prediction for each image, and the probability of each class."""
    table = pd.DataFrame({"predicted": model.predict(volumes)})
    if model.task_ == "class":
        table[[f"p_{name}" for name in model.classes_]] = model.predict_proba(volumes)
    _write(out / "predictions.tsv", _by_image(places, table))


def write_participants(
    out: Path, places: pd.DataFrame, frame: pd.DataFrame, columns: Iterable[str | None]
) -> None:
    """Write the participants with some columns; where there are sessions, the sessions' tables too."""
    used = frame[[name for name in dict.fromkeys(columns) if name and name not in (*KEY, "file")]]
    table = pd.concat([places[["participant_id"]], used], axis=1)
    _write(out / "participants.tsv", table.drop_duplicates("participant_id"))
    if places["session"].isna().any():
        return
    visits = pd.concat([("ses-" + places["session"]).rename("session_id"), used], axis=1)
    for id, rows in places.groupby("participant_id").groups.items():
        _write(out / str(id) / f"{id}_sessions.tsv", visits.loc[rows])


def _write(path: Path, frame: pd.DataFrame) -> None:
    """Write a table as BIDS has it."""
    write_table(path, frame, missing="n/a")


def _by_image(places: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return a table after the columns that name each image: the session only where there are sessions."""
    key = [name for name in KEY if name != "session" or places[name].notna().any()]
    return pd.concat([places[key], table], axis=1)
