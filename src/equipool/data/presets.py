"""ADNI and ADCP as they are handed out: a table and a folder of images, joined with the paper's roles."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from equipool.checks.findings import listed, plural
from equipool.data.bids import MissingImages, require_partners
from equipool.data.tables import read_table
from equipool.exceptions import EquipoolWarning, InputError

__all__ = ["read_adcp", "read_adni"]

PAPER_GROUPS = ("AD", "CN")

# What a column may be called, without case, spaces and signs; the first that the table has is taken.
ADNI_COLUMNS = {
    "subject": ("subjectid", "subject", "ptid"),
    "age": ("age",),
    "sex": ("sex", "gender", "ptgender"),
    "dx": ("researchgroup", "group", "dxgroup", "dx"),
    "protocol": ("imagingprotocol", "manufacturer"),
    "image": ("imageid", "imagedataid", "imageuid"),
    "mmse": ("mmsetotalscore", "mmse", "mmscore"),
    "visit": ("visit", "viscode"),
    "date": ("acqdate", "studydate", "scandate"),
}
ADNI_OPTIONAL = {"image", "mmse", "visit", "date"}
ADCP_COLUMNS = {
    "subject": ("subject", "subjectid", "participantid", "ptid", "id"),
    "age": ("age",),
    "sex": ("sex", "gender"),
    "dx": ("dx", "diagnosis", "group", "researchgroup"),
    "site": ("site", "siteid", "scanner", "centre", "center"),
    "mmse": ("mmse", "mmsetotalscore"),
}
ADCP_OPTIONAL = {"site", "mmse"}

ADNI_SUBJECT = re.compile(r"\d{3}_S_\d{4,5}")
ADNI_IMAGE = re.compile(r"(?<![A-Za-z0-9])I\d{3,}(?![A-Za-z0-9])")
SITE_FOLDER = re.compile(r"site[-_ ]?\w+", re.IGNORECASE)
VENDORS = {"ge": "GE", "general electric": "GE", "philips": "Philips", "siemens": "Siemens"}
GROUP_NAMES = {"NL": "CN", "NORMAL": "CN", "CONTROL": "CN", "DEMENTIA": "AD"}


def read_adni(
    source: str | Path,
    *,
    images: str | Path | None = None,
    groups: Sequence[str] | None = PAPER_GROUPS,
    missing_images: MissingImages = "error",
) -> pd.DataFrame:
    """Return ADNI's people with their images from the search export and a folder of NIfTI files.

    Parameters
    ----------
    source
        The CSV of ADNI's advanced search, or a folder with that one CSV. It needs the columns Subject ID,
        Age, Sex, Research Group and Imaging Protocol (with Manufacturer); Image ID, MMSE Total Score,
        Visit and the date are used if they are there. Case and spaces do not matter.
    images
        Folder of the images; by default that of the CSV. A file belongs to a row if its name or one of its
        folders holds the row's image id (``I12345``); where none does, the subject id (``002_S_0295``),
        which must then be one file and one row.
    groups
        The research groups to keep, by default the paper's AD and CN; ``None`` keeps all.
    missing_images
        ``"error"`` names rows without an image and images without a row; ``"drop"`` leaves them out.

    Returns
    -------
    A frame with ``participant_id``, ``path``, ``site`` (GE, Philips or Siemens), ``age``, ``sex``, ``dx``,
    and ``mmse``, ``image_id``, ``visit`` and ``date`` where known.
    """
    table, frame = _find_table(Path(source), ADNI_COLUMNS, ADNI_OPTIONAL, "ADNI's search export")
    folder = table.parent if images is None else Path(images)
    files = _nifti_files(folder)
    found = _by_id(files, folder, ADNI_IMAGE)
    frame["key"] = frame["subject"]
    if "image" in frame:
        frame["image"] = "I" + frame["image"].str.strip().str.upper().str.removeprefix("I")
        frame["key"] = frame["image"]
    if not frame["key"].isin(found["key"]).any():
        frame["key"] = frame["subject"]
        found = _by_id(files, folder, ADNI_SUBJECT)
    joined = _joined(frame, found, table, groups, missing_images).rename(columns={"image": "image_id"})
    joined.insert(2, "site", _vendors(joined["protocol"], joined["participant_id"], table))
    return joined.drop(columns="protocol")


def read_adcp(
    folder: str | Path,
    *,
    groups: Sequence[str] | None = PAPER_GROUPS,
    missing_images: MissingImages = "error",
) -> pd.DataFrame:
    """Return ADCP's people with their images from a folder with one table and NIfTI files below it.

    Parameters
    ----------
    folder
        Holds one ``.csv`` or ``.tsv`` with the columns subject, age, sex, dx and site (case and spaces do not
        matter; mmse is used if there). Without a site column, the site is the folder ``site1``, ``site2``, …
        that the image lies in. A file belongs to the subject whose id its name holds, or else one of its
        folders.
    groups, missing_images
        As for :func:`read_adni`.

    Returns
    -------
    A frame with ``participant_id``, ``path``, ``site``, ``age``, ``sex``, ``dx`` and ``mmse`` where known.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the one with ADCP's table and images.")
    table, frame = _find_table(folder, ADCP_COLUMNS, ADCP_OPTIONAL, "ADCP's table")
    frame["key"] = frame["subject"]
    ids = "|".join(re.escape(name) for name in sorted(frame["subject"], key=len, reverse=True))
    found = _by_id(_nifti_files(folder), folder, re.compile(rf"(?<![A-Za-z0-9])(?:{ids})(?![A-Za-z0-9])"))
    joined = _joined(frame, found, table, groups, missing_images)
    if "site" not in joined:
        sites = [_site_folder(path.relative_to(folder), table) for path in joined["path"]]
        joined.insert(2, "site", sites)
    return joined


# -- tables ------------------------------------------------------------------------------------------------


def _find_table(
    source: Path, columns: Mapping[str, tuple[str, ...]], optional: set[str], what: str
) -> tuple[Path, pd.DataFrame]:
    """Return the table and its known columns under our names; labels as text."""
    if source.is_dir():
        tables = sorted(path for kind in ("csv", "tsv") for path in source.glob(f"*.{kind}"))
        if len(tables) != 1:
            seen = f"it has {listed(path.name for path in tables)}" if tables else "it has none"
            raise InputError(
                f"{source} should hold one .csv or .tsv file, {what}; {seen}. Put the one there."
            )
        source = tables[0]
    names = {re.sub(r"[^a-z0-9]", "", str(name).lower()): str(name) for name in read_table(source).columns}
    chosen = {
        ours: next((names[name] for name in theirs if name in names), None)
        for ours, theirs in columns.items()
    }
    absent = [ours for ours, name in chosen.items() if name is None and ours not in optional]
    if absent:
        asked = "; ".join(f"{ours} ({', '.join(columns[ours])})" for ours in absent)
        raise InputError(
            f"{source.name} lacks columns of {what}: {asked}. It has "
            f"{listed(names.values(), shown=20)}; add what is missing, or rename columns."
        )
    there = {name: ours for ours, name in chosen.items() if name is not None}
    labels = [name for name, ours in there.items() if ours not in ("age", "mmse")]
    frame = read_table(source, labels=labels)[list(there)].rename(columns=there)
    blank = [ours for ours in ("subject", "dx", "sex") if frame[ours].isna().any()]
    if blank:
        raise InputError(
            f"{source.name} has rows without {listed(blank)}; fill them in or delete these rows."
        )
    return source, frame.assign(
        subject=frame["subject"].str.strip(),
        dx=frame["dx"].str.strip().str.upper().replace(GROUP_NAMES),
        sex=frame["sex"].str.strip().str.upper().str[:1],
    )


def _vendors(protocols: pd.Series[Any], people: pd.Series[Any], table: Path) -> list[str]:
    """Return the maker of each scanner from "Field Strength=3.0;Manufacturer=SIEMENS" or a plain name."""
    vendors, unknown = [], []
    for person, protocol in zip(people, protocols.fillna("").astype(str), strict=True):
        stated = re.search(r"manufacturer\s*=\s*([^;]*)", protocol, re.IGNORECASE)
        name = (stated.group(1) if stated else protocol).strip().lower()
        vendors.append(next((ours for start, ours in VENDORS.items() if name.startswith(start)), ""))
        if not vendors[-1]:
            unknown.append(f"{person}: {protocol}")
    if unknown:
        raise InputError(
            f"{table.name} names no manufacturer GE, Philips or Siemens in {plural(len(unknown), 'row')} "
            f"({listed(unknown, shown=3)}); add Manufacturer to the search's Imaging Protocol."
        )
    return vendors


def _kept(frame: pd.DataFrame, groups: Sequence[str] | None) -> pd.DataFrame:
    """Keep the people of some groups, and say how many are not."""
    if groups is None:
        return frame
    inside = frame["dx"].isin(list(groups))
    if not inside.any():
        raise InputError(
            f"Nobody is of the groups {listed(groups)}; choose among {listed(frame['dx'].unique())}."
        )
    if not inside.all():
        counts = frame.loc[~inside, "dx"].value_counts()
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        warnings.warn(
            f"{plural(int((~inside).sum()), 'row')} of other groups than {', '.join(groups)} left out "
            f"({said}); in Python, groups=None keeps them.",
            EquipoolWarning,
            stacklevel=3,
        )
    return frame[inside]


# -- images ------------------------------------------------------------------------------------------------


def _nifti_files(folder: Path) -> list[Path]:
    files = sorted(path for ending in ("nii", "nii.gz") for path in folder.rglob(f"*.{ending}"))
    if not files:
        raise InputError(
            f"{folder} and its folders hold no .nii or .nii.gz files; give the folder of the images."
        )
    return files


def _by_id(files: Iterable[Path], folder: Path, id: re.Pattern[str]) -> pd.DataFrame:
    """Return the id of each file, from its name or else from its folders; its path where it has none."""
    rows = []
    for path in files:
        place = str(path.relative_to(folder))
        ids = set(id.findall(path.name)) or set(id.findall(place))
        if len(ids) > 1:
            raise InputError(f"{place} could belong to {listed(sorted(ids))}; leave one id in its name.")
        rows.append({"key": ids.pop() if ids else place, "path": path})
    return pd.DataFrame(rows)


def _joined(
    frame: pd.DataFrame,
    found: pd.DataFrame,
    table: Path,
    groups: Sequence[str] | None,
    missing_images: MissingImages,
) -> pd.DataFrame:
    """Join people and images by key; images of people left out on purpose are no concern."""
    people = _kept(frame, groups)
    found = found[~found["key"].isin(set(frame["key"]) - set(people["key"]))]
    for part, what in ((people, f"rows of {table.name}"), (found, "images")):
        double = part.loc[part["key"].duplicated(), "key"].unique()
        if len(double):
            raise InputError(f"There are several {what} for {listed(double, shown=10)}; keep one of each.")
    found, people = require_partners(found, people, "key", missing_images=missing_images, table=table.name)
    joined = people.merge(found, on="key", validate="one_to_one").drop(columns="key")
    joined = joined.rename(columns={"subject": "participant_id"})
    first = [name for name in ("participant_id", "path", "site", "age", "sex", "dx") if name in joined]
    return joined[[*first, *(name for name in joined if name not in first)]]


def _site_folder(path: Path, table: Path) -> str:
    site = next((part for part in path.parts[:-1] if SITE_FOLDER.fullmatch(part)), None)
    if site is None:
        raise InputError(
            f"{table.name} has no column for the site, and {path} lies in no folder site1, site2, "
            "…; add the column."
        )
    return site
