"""ADNI and ADCP as they are handed out: a table and a folder of images, joined with the paper's roles."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from equipool.checks.findings import listed, plural
from equipool.data.bids import MissingImages, require_partners
from equipool.data.roles import COLUMNS, plain_name
from equipool.data.tables import read_table
from equipool.exceptions import EquipoolWarning, InputError

PAPER_GROUPS = ("AD", "CN")
OPTIONAL = {"image", "mmse", "visit", "date", "site"}

ADNI_SUBJECT = re.compile(r"\d{3}_S_\d{4,5}")
ADNI_IMAGE = re.compile(r"(?<![A-Za-z0-9])I\d{3,}(?![A-Za-z0-9])")
SITE_FOLDER = re.compile(r"site[-_ ]?\w+", re.IGNORECASE)
VENDORS = {"ge": "GE", "philips": "Philips", "siemens": "Siemens"}  # as names of makers begin
GROUP_NAMES = {"NL": "CN", "NORMAL": "CN", "CONTROL": "CN", "DEMENTIA": "AD"}


def read_adni(
    source: str | Path,
    *,
    images: str | Path | None = None,
    groups: Sequence[str] | None = PAPER_GROUPS,
    missing_images: MissingImages = "error",
) -> pd.DataFrame:
    """Return ADNI's participants with their images from the search export and a folder of NIfTI files.

    The columns are ``participant_id``, ``path``, ``site`` (GE, Philips or Siemens), ``age``, ``sex``, ``dx``,
    and ``mmse``, ``image_id``, ``visit`` and ``date`` where the export has them.

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
    """
    path, table = _find_table(Path(source), "adni", "ADNI's search export")
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
    # "Field Strength=3.0;Manufacturer=SIEMENS", or a plain name.
    protocols = frame.pop("protocol").fillna("").astype(str)
    makers = protocols.str.replace(r"(?i).*manufacturer\s*=\s*([^;]*).*", r"\1", regex=True).str.strip()
    vendors = makers.str.lower().str.extract(f"^({'|'.join(VENDORS)})", expand=False).map(VENDORS)
    unknown = (frame["participant_id"] + ": " + protocols)[vendors.isna()]
    if len(unknown):
        rows = f"{plural(len(unknown), 'row')} ({listed(unknown, shown=3)})"
        what = f"{path.name} names no manufacturer GE, Philips or Siemens in {rows}"
        raise InputError(f"{what}; add Manufacturer to the search's Imaging Protocol.")
    frame.insert(2, "site", vendors)
    return frame


def read_adcp(
    folder: str | Path,
    *,
    groups: Sequence[str] | None = PAPER_GROUPS,
    missing_images: MissingImages = "error",
) -> pd.DataFrame:
    """Return ADCP's participants with their images from a folder with one table and NIfTI files below it.

    The columns are ``participant_id``, ``path``, ``site``, ``age``, ``sex``, ``dx`` and, if given, ``mmse``.

    Parameters
    ----------
    folder
        Holds one ``.csv`` or ``.tsv`` with the columns subject, age, sex, dx and site (case and spaces do not
        matter; mmse is used if there). Without a site column, the site is the folder ``site1``, ``site2``, …
        that the image lies in. A file belongs to the subject whose id its name holds, or else one of its
        folders.
    groups, missing_images
        As for :func:`read_adni`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the one with ADCP's table and images.")
    path, table = _find_table(folder, "adcp", "ADCP's table")
    ids = "|".join(re.escape(name) for name in sorted(table["subject"], key=len, reverse=True))
    images = _images_by_id(folder, re.compile(rf"(?<![A-Za-z0-9])(?:{ids})(?![A-Za-z0-9])"))
    frame = _joined(table.assign(key=table["subject"]), images, path, groups, missing_images)
    if "site" not in frame:
        places = [image.relative_to(folder) for image in frame["path"]]
        sites = [next(filter(SITE_FOLDER.fullmatch, place.parts[:-1]), None) for place in places]
        if None in sites:
            place = places[sites.index(None)]
            what = f"{path.name} has no column for the site, and {place} lies in no folder"
            raise InputError(f"{what} site1, site2, …; add the column.")
        frame.insert(2, "site", sites)
    return frame


def _find_table(source: Path, preset: str, what: str) -> tuple[Path, pd.DataFrame]:
    """Return the table's path, and its columns under our names; labels as text."""
    if source.is_dir():
        tables = sorted(path for kind in ("csv", "tsv") for path in source.glob(f"*.{kind}"))
        if len(tables) != 1:
            files = listed(path.name for path in tables) or "none"
            raise InputError(f"{source} should hold one .csv or .tsv file, {what}; it has {files}. Keep one.")
        source = tables[0]
    columns = {our: usual.split() for our, usual in COLUMNS[preset].items()}
    numbers = {*columns["age"], *columns["mmse"]}
    frame = read_table(source, labels=lambda names: [n for n in names if plain_name(n) not in numbers])
    there = {plain_name(name): name for name in map(str, frame.columns)}
    names = {our: next((there[one] for one in usual if one in there), None) for our, usual in columns.items()}
    absent = [
        f"{our} ({', '.join(columns[our])})" for our, name in names.items() if not (name or our in OPTIONAL)
    ]
    if absent:
        there_are = f"It has {listed(there.values(), shown=20)}; add what is missing, or rename columns"
        raise InputError(f"{source.name} lacks columns of {what}: {'; '.join(absent)}. {there_are}.")
    ours = {name: our for our, name in names.items() if name}
    frame = frame[list(ours)].rename(columns=ours)
    blank = frame.columns[frame.isna().any()].intersection(["subject", "dx", "sex"])
    if len(blank):
        raise InputError(f"{source.name} has rows without {listed(blank)}; fill them in or delete them.")
    return source, frame.assign(
        subject=frame["subject"].str.strip(),
        dx=frame["dx"].str.strip().str.upper().replace(GROUP_NAMES),
        sex=frame["sex"].str.strip().str.upper().str[:1],
    )


def _images_by_id(folder: Path, id: re.Pattern[str]) -> pd.DataFrame:
    """Return the id of each image, from its name or else from its folders; its path where it has none."""
    files = sorted([*folder.rglob("*.nii"), *folder.rglob("*.nii.gz")])
    if not files:
        raise InputError(f"{folder} and its folders hold no .nii or .nii.gz files; give the images' folder.")
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
    inside = table["dx"].isin(table["dx"] if groups is None else list(groups))
    if not inside.any():
        there = listed(table["dx"].unique())
        raise InputError(f"No row is of the groups {listed(groups or ())}; choose among {there}.")
    if not inside.all():
        counts = table.loc[~inside, "dx"].value_counts()
        others = ", ".join(f"{name} {count}" for name, count in counts.items())
        left_out = f"{plural(int((~inside).sum()), 'row')} of other groups than {', '.join(groups or ())}"
        text = f"{left_out} left out ({others}); in Python, groups=None keeps them."
        warnings.warn(text, EquipoolWarning, stacklevel=3)
    rows = table[inside]
    images = images[~images["key"].isin(set(table["key"]) - set(rows["key"]))]
    for part, what in ((rows, f"rows of {path.name}"), (images, "images")):
        double = part.loc[part["key"].duplicated(), "key"].unique()
        if len(double):
            raise InputError(f"There are several {what} for {listed(double, shown=10)}; keep one of each.")
    rows, images = require_partners(rows, images, "key", missing_images, path.name)
    joined = rows.merge(images, on="key", validate="one_to_one").drop(columns="key")
    joined.insert(1, "path", joined.pop("path"))
    return joined.rename(columns={"subject": "participant_id"})
