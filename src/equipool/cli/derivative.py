"""What `harmonize` and `apply` write: scans as a BIDS derivative, codes, predictions, the people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.exceptions import InputError
from equipool.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

    from equipool.data.volumes import Volumes

__all__ = [
    "OWN",
    "people_of",
    "write_codes",
    "write_description",
    "write_people",
    "write_predictions",
    "write_volumes",
]

BLOCK = 16  # volumes in memory at a time
KEY = ("participant_id", "session")
OWN = (
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


def people_of(frame: pd.DataFrame, images: str, id: str | None) -> pd.DataFrame:
    """Return who each image is of and where its harmonized one goes: participant_id, session, file.

    Images with BIDS names keep them but for ``desc-harmonized``; others are named by the id, or the row.
    """
    import pandas as pd

    names = [_entities(Path(str(path))) for path in frame[images]]
    if all(entities is not None for entities in names):
        rows = [(entities or {}) for entities in names]
    else:
        given = frame[id].astype(str) if id else pd.Series([f"{k + 1:04d}" for k in range(len(frame))])
        labels = pd.Series([re.sub(r"[^A-Za-z0-9]", "", value.removeprefix("sub-")) for value in given])
        if (labels == "").any():
            raise InputError(f"Column {id!r} holds an id without letters and digits; give each row a name.")
        visit = labels.groupby(labels).cumcount() + 1
        several = labels.duplicated(keep=False)
        rows = [
            {"sub": label, **({"ses": f"{number:02d}"} if more else {}), "suffix": "T1w"}
            for label, number, more in zip(labels, visit, several, strict=True)
        ]
    people = pd.DataFrame(
        {
            "participant_id": [f"sub-{row['sub']}" for row in rows],
            "session": [row.get("ses") for row in rows],
            "file": [_place(row) for row in rows],
        }
    )
    double = people.loc[people["file"].duplicated(), "participant_id"]
    if len(double):
        raise InputError(
            f"Two images would be written under one name, of {double.iloc[0]}; rename one of them, or leave "
            "it out."
        )
    return people


def _entities(path: Path) -> dict[str, str] | None:
    """Return the parts of a BIDS name in order, with its suffix; ``None`` for another name."""
    stem = path.name.removesuffix(".gz").removesuffix(".nii")
    *pairs, suffix = stem.split("_")
    if not pairs or not all(re.fullmatch(r"[A-Za-z]+-[A-Za-z0-9+]+", pair) for pair in pairs):
        return None
    entities = dict(pair.split("-", 1) for pair in pairs)
    return {**entities, "suffix": suffix} if "sub" in entities and suffix.isalnum() else None


def _place(entities: dict[str, str]) -> str:
    pairs = {name: value for name, value in entities.items() if name not in ("desc", "suffix")}
    name = "_".join(f"{key}-{value}" for key, value in pairs.items())
    folders = [f"sub-{pairs['sub']}", *([f"ses-{pairs['ses']}"] if "ses" in pairs else []), "anat"]
    return "/".join([*folders, f"{name}_desc-harmonized_{entities['suffix']}.nii.gz"])


def write_volumes(
    out: Path, people: pd.DataFrame, volumes: Volumes, model: Any, site: Any, covariates: Any
) -> Iterator[int]:
    """Harmonize and write the volumes, a block at a time; yields how many are done.

    Beyond the model's mask nothing is known, and the files hold 0.
    """
    from equipool.data.volumes import write_volume

    for start in range(0, len(volumes), BLOCK):
        part = slice(start, start + BLOCK)
        own = None if covariates is None else covariates.iloc[part]
        harmonized = model.front_.transform(volumes[part], site=site.iloc[part], covariates=own)
        for k, row in enumerate(harmonized.read(), start=start):
            write_volume(out / people["file"].iloc[k], harmonized.unmask(row), volumes.paths[k])
            yield k + 1


def write_codes(out: Path, people: pd.DataFrame, volumes: Volumes, model: Any) -> None:
    """Write each person's code."""
    import pandas as pd

    codes = pd.DataFrame(model.transform(volumes)).add_prefix("code")
    _write_table(out / "codes.tsv", pd.concat([_key(people), codes], axis=1))


def write_predictions(out: Path, people: pd.DataFrame, volumes: Volumes, model: Any) -> None:
    """Write what the model predicts for each person, and how likely it holds each class to be."""
    import pandas as pd

    table = _key(people).assign(predicted=model.predict(volumes))
    if model.task_ == "class":
        names = [f"p_{name}" for name in model.classes_]
        table = pd.concat([table, pd.DataFrame(model.predict_proba(volumes), columns=names)], axis=1)
    _write_table(out / "predictions.tsv", table)


def write_people(out: Path, people: pd.DataFrame, used: pd.DataFrame) -> None:
    """Write the people with the columns used; where someone comes twice, visits go to sessions' tables."""
    import pandas as pd

    used = used.drop(columns=[name for name in (*KEY, "file") if name in used]).reset_index(drop=True)
    table = pd.concat([people[["participant_id"]], used], axis=1)
    _write_table(out / "participants.tsv", table.drop_duplicates("participant_id"))
    if people["session"].isna().any():
        return
    visits = pd.concat([("ses-" + people["session"]).rename("session_id"), used], axis=1)
    for person, rows in people.groupby("participant_id").groups.items():
        _write_table(out / str(person) / f"{person}_sessions.tsv", visits.loc[rows])


def write_description(out: Path, command: str) -> None:
    """Make the folder a BIDS derivative."""
    from equipool.version import __version__

    facts = {
        "Name": "Harmonized brains",
        "BIDSVersion": "1.9.0",
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": f"equipool {command}", "Version": __version__}],
    }
    write_whole(out / "dataset_description.json", json.dumps(facts, indent=1))


def _write_table(path: Path, frame: pd.DataFrame) -> None:
    """Write a tab-separated file as BIDS has it."""
    write_whole(path, frame.to_csv(sep="\t", index=False, na_rep="n/a", lineterminator="\n"))


def _key(people: pd.DataFrame) -> pd.DataFrame:
    return people[[name for name in KEY if name != "session" or people[name].notna().any()]]
