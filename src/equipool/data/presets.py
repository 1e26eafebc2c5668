"""ADNI and ADCP as they are handed out: a table and a folder of images, joined with the paper's roles."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from equipool.checks.findings import listed, plural
from equipool.data.bids import MissingImages, require_partners
from equipool.data.roles import plain_name
from equipool.data.tables import read_table
from equipool.exceptions import EquipoolWarning, InputError

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
ADCP_COLUMNS = {
    "subject": ("subject", "subjectid", "participantid", "ptid", "id"),
    "age": ("age",),
    "sex": ("sex", "gender"),
    "dx": ("dx", "diagnosis", "group", "researchgroup"),
    "site": ("site", "siteid", "scanner", "centre", "center"),
    "mmse": ("mmse", "mmsetotalscore"),
}
OPTIONAL = {"image", "mmse", "visit", "date", "site"}

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
    """Return ADNI's participants with their images from the search export and a folder of NIfTI files.

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
    and ``mmse``, ``image_id``, ``visit`` and ``date`` where the export has them.
    """
    path, table = _find_table(Path(source), ADNI_COLUMNS, "ADNI's search export")
    folder = path.parent if images is None else Path(images)
    files = _images_by_id(folder, ADNI_IMAGE)
    table["key"] = table["subject"]
    if "image" in table:
        table["image"] = "I" + table["image"].str.strip().str.upper().str.removeprefix("I")
        table["key"] = table["image"]
    if not table["key"].isin(files["key"]).any():
        table["key"] = table["subject"]
        files = _images_by_id(folder, ADNI_SUBJECT)
    frame = _joined(table, files, path, groups, missing_images).rename(columns={"image": "image_id"})
    frame.insert(2, "site", _vendors(frame["protocol"], frame["participant_id"], path))
    return frame.drop(columns="protocol")


def read_adcp(
    folder: str | Path,
    *,
    groups: Sequence[str] | None = PAPER_GROUPS,
    missing_images: MissingImages = "error",
) -> pd.DataFrame:
    """Return ADCP's participants with their images from a folder with one table and NIfTI files below it.

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
    A frame with ``participant_id``, ``path``, ``site``, ``age``, ``sex``, ``dx`` and, if given, ``mmse``.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the one with ADCP's table and images.")
    path, table = _find_table(folder, ADCP_COLUMNS, "ADCP's table")
    ids = "|".join(re.escape(name) for name in sorted(table["subject"], key=len, reverse=True))
    images = _images_by_id(folder, re.compile(rf"(?<![A-Za-z0-9])(?:{ids})(?![A-Za-z0-9])"))
    frame = _joined(table.assign(key=table["subject"]), images, path, groups, missing_images)
    if "site" not in frame:
        frame.insert(2, "site", [_site_folder(one.relative_to(folder), path) for one in frame["path"]])
    return frame


def _find_table(source: Path, columns: Mapping[str, tuple[str, ...]], what: str) -> tuple[Path, pd.DataFrame]:
    """Return the table's path, and its columns under our names; labels as text."""
    if source.is_dir():
        tables = sorted(path for kind in ("csv", "tsv") for path in source.glob(f"*.{kind}"))
        if len(tables) != 1:
            files = listed(path.name for path in tables) or "none"
            raise InputError(
                f"{source} should hold one .csv or .tsv file, {what}; it has {files}. Keep one there."
            )
        source = tables[0]
    numbers = {*columns["age"], *columns["mmse"]}
    frame = read_table(source, labels=lambda names: [n for n in names if plain_name(n) not in numbers])
    there = {plain_name(name): name for name in map(str, frame.columns)}
    names = {our: next((there[one] for one in usual if one in there), None) for our, usual in columns.items()}
    absent = [
        f"{our} ({', '.join(columns[our])})" for our in columns if not names[our] and our not in OPTIONAL
    ]
    if absent:
        raise InputError(
            f"{source.name} lacks columns of {what}: {'; '.join(absent)}. It has "
            f"{listed(there.values(), shown=20)}; add what is missing, or rename columns."
        )
    ours = {name: our for our, name in names.items() if name}
    frame = frame[list(ours)].rename(columns=ours)
    blank = [our for our in ("subject", "dx", "sex") if frame[our].isna().any()]
    if blank:
        raise InputError(
            f"{source.name} has rows without {listed(blank)}; fill them in or delete these rows."
        )
    return source, frame.assign(
        subject=frame["subject"].str.strip(),
        dx=frame["dx"].str.strip().str.upper().replace(GROUP_NAMES),
        sex=frame["sex"].str.strip().str.upper().str[:1],
    )


def _vendors(protocols: pd.Series[Any], ids: pd.Series[Any], table: Path) -> list[str]:
    """Return the maker of each scanner from "Field Strength=3.0;Manufacturer=SIEMENS" or a plain name."""
    texts = protocols.fillna("").astype(str)
    makers = texts.str.replace(r".*manufacturer\s*=\s*([^;]*).*", r"\1", case=False, regex=True)
    makers = makers.str.strip().str.lower()
    vendors = [next((VENDORS[start] for start in VENDORS if maker.startswith(start)), "") for maker in makers]
    unknown = [f"{id}: {text}" for id, text, vendor in zip(ids, texts, vendors, strict=True) if not vendor]
    if unknown:
        raise InputError(
            f"{table.name} names no manufacturer GE, Philips or Siemens in {plural(len(unknown), 'row')} "
            f"({listed(unknown, shown=3)}); add Manufacturer to the search's Imaging Protocol."
        )
    return vendors


def _of_groups(table: pd.DataFrame, groups: Sequence[str] | None) -> pd.DataFrame:
    """Return the rows of some groups, and warn of how many are not."""
    if groups is None:
        return table
    inside = table["dx"].isin(list(groups))
    if not inside.any():
        raise InputError(
            f"No row is of the groups {listed(groups)}; choose among {listed(table['dx'].unique())}."
        )
    if not inside.all():
        counts = table.loc[~inside, "dx"].value_counts()
        others = ", ".join(f"{name} {count}" for name, count in counts.items())
        warnings.warn(
            f"{plural(int((~inside).sum()), 'row')} of other groups than {', '.join(groups)} left out "
            f"({others}); in Python, groups=None keeps them.",
            EquipoolWarning,
            stacklevel=4,
        )
    return table[inside]


def _images_by_id(folder: Path, id: re.Pattern[str]) -> pd.DataFrame:
    """Return the id of each image, from its name or else from its folders; its path where it has none."""
    files = sorted([*folder.rglob("*.nii"), *folder.rglob("*.nii.gz")])
    if not files:
        raise InputError(
            f"{folder} and its folders hold no .nii or .nii.gz files; give the folder of the images."
        )
    keys = []
    for place in (str(path.relative_to(folder)) for path in files):
        ids = set(id.findall(Path(place).name)) or set(id.findall(place))
        if len(ids) > 1:
            raise InputError(f"{place} could belong to {listed(sorted(ids))}; leave one id in its name.")
        keys.append(ids.pop() if ids else place)
    return pd.DataFrame({"key": keys, "path": files})


def _joined(
    table: pd.DataFrame,
    images: pd.DataFrame,
    path: Path,
    groups: Sequence[str] | None,
    missing_images: MissingImages,
) -> pd.DataFrame:
    """Join rows and images by key; images of rows of other groups are ignored."""
    rows = _of_groups(table, groups)
    images = images[~images["key"].isin(set(table["key"]) - set(rows["key"]))]
    for part, what in ((rows, f"rows of {path.name}"), (images, "images")):
        double = part.loc[part["key"].duplicated(), "key"].unique()
        if len(double):
            raise InputError(f"There are several {what} for {listed(double, shown=10)}; keep one of each.")
    rows, images = require_partners(rows, images, "key", missing_images, path.name)
    joined = rows.merge(images, on="key", validate="one_to_one").drop(columns="key")
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
