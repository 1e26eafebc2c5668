"""What `harmonize` and `apply` write: a table like the source, or a BIDS derivative, perhaps with codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from equipool.data.bids import KEY, as_label, image_path, is_bids_name, parse_name
from equipool.data.nifti import write_volume
from equipool.data.tables import table_kind, write_table
from equipool.data.volumes import Volumes
from equipool.exceptions import InputError
from equipool.progress import Progress

BLOCK = 16  # volumes in memory at a time


def write_harmonized(folder: Path, source: Path, frame: pd.DataFrame, features: pd.DataFrame) -> str:
    """Write a table with harmonized features in the format of the source, uncompressed; return its name."""
    harmonized = frame.assign(**{str(name): features[name] for name in features})
    return write_table(folder / f"harmonized{table_kind(source)}", harmonized).name


def places_of(frame: pd.DataFrame, paths: Sequence[Path], id: str | None) -> pd.DataFrame:
    """Return the participant of each image and where its harmonized one goes: participant_id, session, file.

    Images with BIDS names keep them but for ``desc-harmonized``; others are named by the id, or the row.
    """
    names = list(map(parse_name, paths)) if all(map(is_bids_name, paths)) else _names_by_id(frame, id)
    for name in names:
        name.pop("desc", None)
        name["desc"] = "harmonized"  # the last of its entities
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
    out: Path, places: pd.DataFrame, volumes: Volumes, model: Any, site: pd.Series[Any], covariates: Any
) -> None:
    """Harmonize and write the volumes, a block at a time; outside of the model's mask the files hold 0."""
    progress = Progress("Harmonized", len(volumes))
    # A new site is estimated from all its images.
    step = len(volumes) if model.unseen_site == "adapt" else BLOCK
    for start in range(0, len(volumes), step):
        part = slice(start, start + step)
        harmonized = model.transform(volumes[part], site=site.iloc[part], covariates=covariates.iloc[part])
        for k, row in enumerate(harmonized.read(), start=start):
            write_volume(out / places["file"].iloc[k], harmonized.unmask(row), volumes.paths[k])
            progress(k + 1)


def write_codes(out: Path, places: pd.DataFrame, volumes: Volumes, model: Any) -> None:
    """Write the code of each image."""
    _write_by_image(out / "codes.tsv", places, pd.DataFrame(model.transform(volumes)).add_prefix("code"))


def write_predictions(out: Path, places: pd.DataFrame, volumes: Volumes, model: Any) -> None:
    """Write the prediction for each image, and the probability of each class."""
    table = pd.DataFrame({"predicted": model.predict(volumes)})
    if model.task_ == "class":
        table[[f"p_{name}" for name in model.classes_]] = model.predict_proba(volumes)
    _write_by_image(out / "predictions.tsv", places, table)


def write_participants(
    out: Path, places: pd.DataFrame, frame: pd.DataFrame, columns: Iterable[str | None]
) -> None:
    """Write the participants with some columns; where there are sessions, the sessions' tables too."""
    used = frame[[name for name in dict.fromkeys(columns) if name and name not in (*KEY, "file")]]
    table = pd.concat([places["participant_id"], used], axis=1).drop_duplicates("participant_id")
    write_table(out / "participants.tsv", table, missing="n/a")
    if places["session"].isna().any():
        return
    visits = pd.concat([("ses-" + places["session"]).rename("session_id"), used], axis=1)
    for id, rows in visits.groupby(places["participant_id"]):
        write_table(out / str(id) / f"{id}_sessions.tsv", rows, missing="n/a")


def _write_by_image(path: Path, places: pd.DataFrame, table: pd.DataFrame) -> None:
    """Write a table after the columns that name each image: the session only where there are sessions."""
    names = places[KEY].dropna(axis="columns", how="all")
    write_table(path, pd.concat([names, table], axis=1), missing="n/a")
