"""Read tables from CSV, TSV and Parquet files, and run the pre-flight check on one."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import pandas as pd

from equipool.exceptions import InputError, MissingExtraError
from equipool.validation import Inputs, Missing, PreflightReport, Roles, preflight
from equipool.validation.findings import listed

__all__ = ["check", "label_columns", "read_table"]

DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
COMPRESSIONS = {".gz", ".bz2", ".xz", ".zip"}
PARQUET = {".parquet", ".pq"}


def read_table(path: str | Path, *, labels: Sequence[str] = ()) -> pd.DataFrame:
    """Read a CSV, TSV or Parquet file, plain or compressed.

    Parameters
    ----------
    path
        The file. For text the separator is found in the header: comma, tab, semicolon or bar.
    labels
        Columns to keep as text, such as the site and the id, so that ``001`` does not become 1.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder, not a table" if path.is_dir() else "does not exist"
        raise InputError(f"{path} {what}; give a CSV, TSV or Parquet file.")
    kinds = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSIONS]
    kind = kinds[-1] if kinds else ""
    if kind in PARQUET:
        return _read_parquet(path)
    if kind not in DELIMITERS:
        raise InputError(
            f"{path.name} is not a kind of table that equipool reads; save it as .csv, .tsv or .parquet."
        )
    return _read_text(path, DELIMITERS[kind], labels)


def check(
    table: str | Path | pd.DataFrame, *, site: str, missing: Missing = "error", **roles: Unpack[Roles]
) -> PreflightReport:
    """Tell whether the sites of a table can be pooled, and at what price.

    Parameters
    ----------
    table
        A data frame or a file for :func:`read_table`.
    site, covariates, target, id
        Names of the columns with these roles.
    features
        Names or patterns (``"*_thickness"``) of the measurements; default: every other column of numbers.
    ignore
        Columns that are none of these.
    task
        ``"class"`` or ``"number"`` for the target; default: guessed.
    missing
        ``"error"`` or ``"impute"``: whether missing features stand in the way.

    Examples
    --------
    >>> people = pd.DataFrame({"site": list("AAABBB"), "age": [20, 30, 40, 60, 70, 80],
    ...                        "volume": [9.1, 8.9, 8.4, 7.0, 6.8, 6.1]})
    >>> report = check(people, site="site", covariates="age")
    >>> report.ok
    True
    >>> [finding.code for finding in report.warnings]
    ['small-site', 'disjoint-support']
    """
    if not isinstance(table, pd.DataFrame):
        table = read_table(table, labels=label_columns(site, roles))
    inputs = Inputs.from_frame(table, site=site, **roles)
    return preflight(inputs, missing=missing)


def label_columns(site: str, roles: Roles) -> list[str]:
    """Return the columns of a table that must be read as text."""
    id = roles.get("id")
    return [site, id] if id else [site]


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise MissingExtraError(
            f"Reading {path.name} needs pyarrow; install it with: pip install 'equipool[parquet]'."
        ) from error
    except Exception as error:  # whatever the reader meets in a damaged file
        raise InputError(
            f"{path.name} cannot be read as Parquet ({_first_line(error)}); is the file complete?"
        ) from error


def _read_text(path: Path, delimiter: str, labels: Sequence[str]) -> pd.DataFrame:
    try:
        header = pd.read_csv(path, header=None, nrows=1, sep="\0", dtype=str, engine="python", quoting=3)
        names, delimiter = _header(str(header.iloc[0, 0]), delimiter, path)
        frame = pd.read_csv(
            path,
            sep=delimiter,
            dtype={name: "object" for name in labels if name in names},
            encoding="utf-8-sig",
            low_memory=False,
            index_col=False,
            # pandas would read a short row as one with missing values and let a long one fail the parse
            on_bad_lines="error",
        )
    except pd.errors.EmptyDataError as error:
        raise InputError(f"{path.name} is empty; it needs a header and at least one row.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path.name} is not UTF-8 text (byte {error.start}); save it as UTF-8, or as .parquet."
        ) from error
    except (pd.errors.ParserError, pd.errors.ParserWarning, OSError, EOFError) as error:
        raise InputError(f"{path.name} cannot be read as a table ({_first_line(error)}).") from error
    return frame


def _header(line: str, delimiter: str, path: Path) -> tuple[list[str], str]:
    """Return the column names and the separator that the header really uses."""
    line = line.lstrip("\ufeff")
    candidates = [delimiter, *(mark for mark in ",\t;|" if mark != delimiter)]
    best = max(candidates, key=lambda mark: len(next(csv.reader([line], delimiter=mark))))
    names = next(csv.reader([line], delimiter=best))
    double = {name for name in names if names.count(name) > 1 and name}
    if double:
        raise InputError(
            f"{path.name} has the column {listed(sorted(double))} more than once; rename or drop the copies."
        )
    return names, best


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
