"""Tables: read from CSV, TSV and Parquet files, written to them, and checked before pooling."""

import io
import lzma
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks import Inputs, Missing, PreflightReport, Roles, preflight, require_columns
from equipool.checks.findings import LEVELS, note, plural, rows_text, warning
from equipool.checks.inputs import refuse_double_names
from equipool.data.nifti import check_volumes, read_mask, region_means
from equipool.exceptions import EquipoolWarning, InputError, MissingExtraError, first_line
from equipool.files import write_whole

INTENSITY = "median intensity"  # of an image: its one feature in the pre-flight report
DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
COMPRESSIONS = {".gz", ".bz2", ".xz", ".zip"}
PARQUET = {".parquet", ".pq"}
DAMAGED = (OSError, EOFError, ValueError, zipfile.BadZipFile, lzma.LZMAError, zlib.error)


def read_table(
    path: str | Path, *, labels: Sequence[str | None] | Callable[[list[str]], Sequence[str | None]] = ()
) -> pd.DataFrame:
    """Read a CSV, TSV or Parquet file, plain or compressed.

    For text the separator is found in the header: comma, tab, semicolon or bar. ``labels`` are columns to
    keep as text, such as the site and the id, so that ``001`` does not become 1; or a function that returns
    them, given the names of all columns.
    """
    path = Path(path)
    kind = table_kind(path)
    if kind in PARQUET:
        frame = _read_parquet(path)
        if callable(labels):
            labels(list(map(str, frame.columns)))
        return frame
    try:
        with warnings.catch_warnings():
            # A row longer than the header is only a warning to pandas, which then cuts or shifts columns.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return _read_text(path, DELIMITERS[kind], labels)
    except InputError:
        raise
    except (*DAMAGED, pd.errors.ParserWarning) as error:
        what = f"cannot be read as a table ({first_line(error)}); open it and save it anew, or give another"
        if isinstance(error, pd.errors.EmptyDataError):
            what = "is empty; it needs a header and at least one row"
        elif isinstance(error, UnicodeDecodeError):
            what = f"is not UTF-8 text (byte {error.start}); save it as UTF-8, or as .parquet"
        elif isinstance(error, pd.errors.ParserWarning):
            remedy = "name every column (R: write.csv(..., row.names = FALSE))"
            what = f"has rows with more cells than the header has names; {remedy}"
        raise InputError(f"{path.name} {what}.") from error


def write_table(path: Path, frame: pd.DataFrame, *, missing: str = "", **options: Any) -> Path:
    """Write a table as its name ends: .csv, .tsv or .parquet; BIDS has ``n/a`` for missing values."""
    if path.suffix in PARQUET:
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        return write_whole(path, buffer.getvalue())
    options |= {"sep": DELIMITERS[path.suffix], "na_rep": missing, "lineterminator": "\n"}
    return write_whole(path, frame.to_csv(index=False, **options))


def check(
    table: str | Path | pd.DataFrame,
    *,
    site: str,
    images: str | None = None,
    mask: str | Path | None = None,
    missing: Missing = "error",
    progress: bool = False,
    **roles: Unpack[Roles],
) -> PreflightReport:
    """Report whether the sites of a table can be pooled, and what prevents it.

    Parameters
    ----------
    table
        A data frame or a file for :func:`read_table`.
    site, covariates, target, id
        Names of the columns with these roles.
    images, mask, progress
        Name of a column with paths of NIfTI files, which are then checked too
        (:func:`equipool.data.check_volumes`), a mask for them, and whether to show progress on the terminal;
        the median intensity of each image stands for the features.
    features, ignore
        Names or patterns (``"*_thickness"``) of the measurements; default: every other column of numbers
        that is not to be ignored.
    task
        ``"class"`` or ``"number"`` for the target; default: guessed.
    missing
        ``"error"`` or ``"impute"``: whether missing features are an error.

    Examples
    --------
    >>> table = pd.DataFrame({"site": list("AAABBB"), "age": [20, 30, 40, 60, 70, 80],
    ...                       "volume": [9.1, 8.9, 8.4, 7.0, 6.8, 6.1]})
    >>> report = check(table, site="site", covariates="age")
    >>> report.ok
    True
    >>> [finding.code for finding in report.warnings]
    ['small-site', 'disjoint-support']
    """
    if not isinstance(table, pd.DataFrame):
        table = read_table(table, labels=[site, roles.get("id")])
    inputs = Inputs.from_frame(table, site=site, images=images, **roles)
    if images is None:
        return preflight(inputs, missing=missing)
    paths = image_paths(table, images)
    regions: list[NDArray[np.float64]] = []
    chosen = None if mask is None else read_mask(mask)
    inside = True if chosen is None else chosen.inside

    def look(_: int, values: NDArray[Any]) -> None:
        regions.append(region_means(np.where(inside, values, 0.0)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EquipoolWarning)
        grid = check_volumes(paths, mask=chosen, progress=progress, each=look)
    # At brightness 1, and where there is brain in most images.
    measured = np.stack(regions) / np.array(grid.brightness)[:, None]
    measured = measured[:, region_means(grid.present * inside) > 0.5 * len(paths)]
    report = preflight(with_intensity(inputs, grid.brightness), missing=missing, measured=measured)
    findings = [warning("image-intensities", images, text=one.message) for one in caught]
    findings.append(note("images", images, images=plural(len(paths), "image"), grid=grid))
    by_level = sorted([*report.findings, *findings], key=lambda one: LEVELS.index(one.level))
    return replace(report, findings=tuple(by_level))


def with_intensity(inputs: Inputs, brightness: Sequence[float] | NDArray[Any]) -> Inputs:
    """Return inputs of images whose one feature is the median intensity of each."""
    X = np.array(brightness, dtype=np.float64)[:, None]
    return replace(inputs, X=X, feature_names=(INTENSITY,), has_features=True)


def image_paths(frame: pd.DataFrame, column: str) -> tuple[Path, ...]:
    """Return the paths of an image column; name the rows without one."""
    frame = frame.rename(columns=str)
    require_columns(frame, [column])
    blank = frame[column].isna() | (frame[column].astype(str).str.strip() == "")
    if blank.any():
        where = rows_text(np.flatnonzero(blank).tolist())
        raise InputError(f"Column {column!r} names no image in {where}; fill it in or drop these rows.")
    return tuple(Path(str(value)) for value in frame[column])


def table_kind(path: Path) -> str:
    """Return the ending that says what a file is, compressed or not."""
    if not path.is_file():
        what = "is a folder, not a table" if path.is_dir() else "does not exist"
        raise InputError(f"{path} {what}; give a CSV, TSV or Parquet file.")
    kinds = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSIONS]
    if not kinds or kinds[-1] not in {*PARQUET, *DELIMITERS}:
        raise InputError(f"{path.name} is no table that equipool reads; save it as .csv, .tsv or .parquet.")
    return kinds[-1]


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except ImportError as error:
        text = f"Reading {path.name} needs pyarrow; install it with: pip install 'equipool[parquet]'."
        raise MissingExtraError(text) from error
    except Exception as error:  # whatever the reader meets in a damaged file
        what = f"{path.name} cannot be read as Parquet ({first_line(error)})"
        raise InputError(f"{what}; copy it anew, or save it as .csv.") from error


def _read_text(path: Path, delimiter: str, labels: Any) -> pd.DataFrame:
    """Read with the separator of the file's kind, or with one that gives more columns."""
    first: Any = {"header": None, "nrows": 1, "dtype": str, "keep_default_na": False}
    read: Any = partial(pd.read_csv, path, encoding="utf-8-sig")
    names = {delimiter: read(sep=delimiter, **first).iloc[0].tolist()}
    if len(names[delimiter]) == 1:
        marks = [mark for mark in ",\t;|" if mark in names[delimiter][0]]
        names |= {mark: read(sep=mark, **first).iloc[0].tolist() for mark in marks}
    delimiter = max(names, key=lambda mark: len(names[mark]))
    refuse_double_names(filter(None, names[delimiter]), path.name)
    chosen = labels(names[delimiter]) if callable(labels) else labels
    types = {name: "object" for name in chosen if name in names[delimiter]}
    read = partial(read, sep=delimiter, dtype=types, low_memory=False, index_col=False)
    frame: pd.DataFrame = read()
    return read(decimal=",") if delimiter != "," and _has_decimal_commas(frame) else frame


def _has_decimal_commas(frame: pd.DataFrame) -> bool:
    """Whether some column of text is numbers with a comma, as spreadsheets of many countries write them."""
    for name in frame.select_dtypes(exclude="number"):
        text = frame[name].dropna().astype(str).str.strip()
        is_number = text.str.fullmatch(r"[-+]?\d+(,\d+)?")
        if is_number.mean() > 0.5 and text[is_number].str.contains(",").any():
            return True
    return False
