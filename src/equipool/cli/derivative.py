"""What `harmonize` and `apply` write: a table like the source, or a BIDS derivative with codes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.exceptions import InputError

if TYPE_CHECKING:
    import pandas as pd

    from equipool.data.volumes import Volumes

BLOCK = 16  # volumes in memory at a time
KEY = ("participant_id", "session")
# What an earlier run may have written that this one does not.
FILES = (
    "summary.json",
    "account.json",
    "report.html",
    "participants.tsv",
    "sub-*/sub-*_sessions.tsv",
    "codes.tsv",
    "predictions.tsv",
    "harmonized.csv",
    "harmonized.tsv",
    "harmonized.parquet",
    "statmaps/*_as-measured*",
    "statmaps/*_harmonized*",
    "statmaps/*.png",
    "sub-*/anat/sub-*_desc-harmonized_*.nii.gz",
    "sub-*/ses-*/anat/sub-*_desc-harmonized_*.nii.gz",
)


def write_harmonized(folder: Path, source: Path, frame: pd.DataFrame) -> Path:
    """Write ``harmonized`` as .csv, .tsv or .parquet, as the source is; text is written uncompressed."""
    from equipool.data import tables

    kind = tables.table_kind(source)
    ending = {".pq": ".parquet", ".txt": ".tsv"}.get(kind, kind)
    return tables.write_table(folder / f"harmonized{ending}", frame)


def places_of(frame: pd.DataFrame, images: str, id: str | None) -> pd.DataFrame:
    """Return the participant of each image and where its harmonized one goes: participant_id, session, file.

    Images with BIDS names keep them but for ``desc-harmonized``; others are named by the id, or the row.
    """
    import pandas as pd

    from equipool.data.bids import as_label, image_path, is_bids_name, parse_name

    paths = [Path(str(path)) for path in frame[images]]
    names = [parse_name(path) for path in paths]
    if not all(map(is_bids_name, paths)):
        labels = pd.Series([f"{k + 1:04d}" for k in range(len(frame))])
        if id:
            labels = frame[id].astype(str).str.removeprefix("sub-").map(as_label).reset_index(drop=True)
        if (labels == "").any():
            raise InputError(f"Column {id!r} holds an id without letters and digits; give each row a name.")
        visits = labels.groupby(labels).cumcount() + 1
        several = labels.duplicated(keep=False)
        names = [
            {"sub": label, **({"ses": f"{visit:02d}"} if more else {}), "suffix": "T1w"}
            for label, visit, more in zip(labels, visits, several, strict=True)
        ]
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


def write_volumes(
    out: Path, places: pd.DataFrame, volumes: Volumes, model: Any, site: Any, covariates: Any
) -> None:
    """Harmonize and write the volumes, a block at a time; outside of the model's mask the files hold 0."""
    from equipool.data.nifti import write_volume
    from equipool.progress import Progress

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
    import pandas as pd

    codes = pd.DataFrame(model.transform(volumes)).add_prefix("code")
    _write(out / "codes.tsv", pd.concat([_key(places), codes], axis=1))


def write_predictions(out: Path, places: pd.DataFrame, volumes: Volumes, model: Any) -> None:
    """Write the prediction for each image, and the probability of each class."""
    import pandas as pd

    table = _key(places).assign(predicted=model.predict(volumes))
    if model.task_ == "class":
        names = [f"p_{name}" for name in model.classes_]
        table = pd.concat([table, pd.DataFrame(model.predict_proba(volumes), columns=names)], axis=1)
    _write(out / "predictions.tsv", table)


def write_participants(
    out: Path, places: pd.DataFrame, frame: pd.DataFrame, columns: Iterable[str | None]
) -> None:
    """Write the participants with some columns; where there are sessions, the sessions' tables too."""
    import pandas as pd

    chosen = [name for name in dict.fromkeys(columns) if name and name not in (*KEY, "file")]
    used = frame[chosen].reset_index(drop=True)
    table = pd.concat([places[["participant_id"]], used], axis=1)
    _write(out / "participants.tsv", table.drop_duplicates("participant_id"))
    if places["session"].isna().any():
        return
    visits = pd.concat([("ses-" + places["session"]).rename("session_id"), used], axis=1)
    for id, rows in places.groupby("participant_id").groups.items():
        _write(out / str(id) / f"{id}_sessions.tsv", visits.loc[rows])


def _write(path: Path, frame: pd.DataFrame) -> None:
    """Write a table as BIDS has it."""
    from equipool.data.tables import write_table

    write_table(path, frame, missing="n/a")


def _key(places: pd.DataFrame) -> pd.DataFrame:
    return places[[name for name in KEY if name != "session" or places[name].notna().any()]]
