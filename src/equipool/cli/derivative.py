"""What `harmonize` and `apply` write: a table like the source, or a BIDS derivative with codes and t-maps."""

import re
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.checks import require_columns
from equipool.checks.findings import listed, plural
from equipool.checks.inputs import parse_labels
from equipool.data.bids import KEY, as_label, image_path, is_bids_name, parse_name
from equipool.data.nifti import read_volume, write_volume
from equipool.data.tables import table_kind, write_table
from equipool.data.volumes import Volumes
from equipool.estimators import ImageHarmonizer, SiteHarmonizer
from equipool.exceptions import InputError
from equipool.files import write_json
from equipool.judge.statmaps import FDR, BoolArray, StatMap, detection, stat_map
from equipool.progress import Progress, say

BLOCK = 16  # volumes in memory at a time
BASELINE = "as measured, site intercepts"


def write_harmonized(
    arguments: Namespace, folder: Path, frame: pd.DataFrame, features: pd.DataFrame
) -> tuple[str, dict[str, Any]]:
    """Write a table with harmonized features in the format of the source, uncompressed.

    Where cells were filled in, a second table says which: the ids, and 1 for a filled cell, else 0. Returned
    are the name of the table, and how many cells of which features were empty and are filled.
    """
    kind, empty = table_kind(arguments.table), frame[list(features)].isna()
    filled, ids = empty & features.notna(), [name for name in (arguments.id, arguments.subject) if name]
    counts = {name: int(count) for name, count in empty.sum().items() if count}
    if filled.any(axis=None):
        write_table(folder / f"harmonized_filled{kind}", pd.concat([frame[ids], filled.astype(int)], axis=1))
    if counts:
        what = "stay empty (--missing impute fills them in)"
        if filled.any(axis=None):
            what = f"are filled in with draws, which harmonized_filled{kind} marks; these are no measurements"
        cells, where = plural(sum(counts.values()), "empty cell"), plural(len(counts), "feature")
        say(f"equipool: {cells} of {empty.size}, in {where} ({listed(counts)}), {what}.")
    harmonized = frame.assign(**{str(name): features[name] for name in features})
    cells_of = {"empty_cells": counts, "filled_cells": int(filled.to_numpy().sum())}
    return write_table(folder / f"harmonized{kind}", harmonized).name, cells_of


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
        what = f"Two images would be written under one name, of {double.iloc[0]}"
        raise InputError(f"{what}; rename one of them, or leave it out.")
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
    out: Path, places: pd.DataFrame, volumes: Volumes, model: Any, site: pd.Series, covariates: Any
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


def write_codes(
    out: Path, places: pd.DataFrame, volumes: Volumes, model: Any, *, predict: bool = False
) -> None:
    """Write the code of each image, and what is predicted for it with the probability of each class."""
    tables = {"codes": pd.DataFrame(model.transform(volumes)).add_prefix("code")}
    if predict:
        tables["predictions"] = pd.DataFrame({"predicted": model.predict(volumes)})
    if predict and model.task_ == "class":
        classes = [f"p_{name}" for name in model.classes_]
        tables["predictions"][classes] = model.predict_proba(volumes)
    names = places[KEY].dropna(axis="columns", how="all")  # the session only where there are sessions
    for name, table in tables.items():
        write_table(out / f"{name}.tsv", pd.concat([names, table], axis=1), missing="n/a")


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


def write_statmaps(
    arguments: Namespace, new: Path, rows: pd.DataFrame, volumes: Volumes, places: pd.DataFrame, allowed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write t-maps before and after with their picture; return their counts of voxels, and views.

    An intercept for each site stays in the model of harmonized scans, since what was removed was estimated.
    The scans as measured with the same model are what harmonizing has to be compared with.
    """
    from equipool.report.statmap_figures import statmap_figure, statmap_pictures, write_statmap
    from equipool.report.style import save_figure

    out, column = new / "statmaps", arguments.statmap
    if len(rows) < len(places):
        say(f"t-map of {column}: {plural(len(places) - len(rows), 'row')} without a value left out.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        files = [new / file for file in places["file"][rows.index]]
        harmonized = Volumes.build(files, mask=volumes.mask, cache=work, jobs=arguments.jobs)
        measured = volumes[rows.index.to_numpy()]
        maps = {
            "as measured": _map(arguments, rows, measured, sites=False),
            BASELINE: _map(arguments, rows, measured),
            "harmonized": _map(arguments, rows, harmonized),
        }
        mean = sum(block.sum(axis=0) for block in harmonized.blocks()) / len(harmonized)
        del harmonized  # its files are about to go
    file_name = re.sub(r'[\\/:*?"<>|]', "-", column)  # what no file's name may have
    mni = all("space-MNI" in path.name for path in volumes.paths)
    counts: dict[str, Any] = {"significant": {}, "significant_fdr": {}, "rms_t": {}}
    truth = _truth(arguments, volumes)
    counts |= {"truth": {}} if truth else {}
    for name, one in maps.items():
        stem = f"{file_name}_{name.replace(',', '').replace(' ', '-')}"
        write_statmap(out, stem, one, volumes.mask, volumes.affine, mni=mni)
        by_fdr = one.significant(**FDR)
        strict, fdr = int(one.significant().sum()), int(by_fdr.sum())
        counts["significant"][name], counts["significant_fdr"][name] = strict, fdr
        counts["rms_t"][name] = float(np.sqrt((one.t[one.tested] ** 2).mean())) if one.tested.any() else 0.0
        write_json(out / f"{stem}_statmap.json", _sidecar(arguments, name, one, allowed))
        true = ""
        if truth:
            counts["truth"][name] = detection(one, *truth, **FDR)._asdict()
            called = [f"{int(by_fdr[where].sum())} of {int(where.sum())}" for where in truth]
            true = f": {called[0]} that the disease changes, and {called[1]} that it does not"
        said = f"{strict} voxels (Bonferroni, 0.001), {fdr} (FDR, 5 %){true}"
        say(f"t-map {name}: {one.n} participants, {said}.")
    say(f"t-maps have an intercept for each site, but 'as measured'; compare 'harmonized' with {BASELINE!r}.")
    # The cautious picture, unless there is nothing in it.
    how = {} if any(counts["significant"].values()) else FDR
    drawn = maps, volumes.mask, volumes.affine, volumes.unmask(mean)
    save_figure(statmap_figure(*drawn, **how), out / f"{file_name}.png")
    honest = {name: one for name, one in maps.items() if name != "as measured"}
    return counts, statmap_pictures(honest, *drawn[1:], column)


def _truth(arguments: Namespace, volumes: Volumes) -> tuple[BoolArray, BoolArray] | None:
    """Return which voxels the disease changes and which it does not, if `equipool simulate` made them."""
    folder = arguments.table / "derivatives" / "truth"
    files = [folder / f"{name}.nii.gz" for name in ("affected", "unaffected")]
    if arguments.statmap != "dx" or not all(file.is_file() for file in files):
        return None
    changed, same = (read_volume(file) > 0 for file in files)
    if changed.shape != volumes.mask.shape:
        return None
    inside = changed[volumes.mask], same[volumes.mask]
    return inside if all(where.any() for where in inside) else None


def _sidecar(arguments: Namespace, name: str, one: StatMap, allowed: bool) -> dict[str, Any]:
    """Return what a t-map is of, for the JSON file beside it."""
    return {
        "Values": name.partition(",")[0],
        "Target": arguments.statmap,
        "Contrast": one.contrast,
        "Covariates": [column for column in arguments.covariates if column != arguments.statmap],
        "SiteIntercepts": name != "as measured",
        "Participants": one.n,
        "DegreesOfFreedom": one.df,
        "TargetGivenToHarmonizing": arguments.target if arguments.keep_target else None,
        "TargetAllowedForInHarmonizing": arguments.target if allowed else None,
    }


def say_of_target(arguments: Namespace, harmonizer: SiteHarmonizer | ImageHarmonizer) -> list[str]:
    """Say whether the target entered the fit; return that for the report, nothing without --keep-target."""
    if not arguments.keep_target:
        return []
    what = "was allowed for"
    if not harmonizer.choices_["target"]:
        what = "was given, but held-out participants gave no reason to allow for it"
    text = f"{arguments.target} {what} when site effects were estimated."
    say(f"equipool: {text}")
    return [text]


def rows_of_map(arguments: Namespace, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with a value; refuse a column that no t-map can be of, before hours of training."""
    require_columns(frame, [arguments.statmap])
    rows = frame[[label is not None for label in parse_labels(frame[arguments.statmap])]]
    if rows.empty:
        raise InputError(f"--statmap {arguments.statmap}: no row has a value there; name another column.")
    try:
        _map(arguments, rows, rows.index.to_numpy()[:, None])
    except InputError as error:
        raise InputError(f"--statmap {arguments.statmap}: {error}") from error
    return rows


def _map(arguments: Namespace, rows: pd.DataFrame, values: Any, *, sites: bool = True) -> StatMap:
    """Return the map of some rows; the other covariates are adjusted, and each participant counts once."""
    site = rows[arguments.site] if sites else None
    covariates = rows[[column for column in arguments.covariates if column != arguments.statmap]]
    subject = rows[arguments.subject] if arguments.subject else None
    return stat_map(values, rows[arguments.statmap], covariates=covariates, sites=site, subject=subject)
