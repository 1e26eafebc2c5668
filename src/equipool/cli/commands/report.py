"""``equipool report``: the HTML report of a harmonization, by equipool or another tool."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import pandas as pd

from equipool.checks import preflight
from equipool.cli.outputs import announce
from equipool.cli.reports import ACCOUNT, PAGE, how_made
from equipool.cli.source import read_source, roles
from equipool.data import PooledDataset, read_table
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.progress import say
from equipool.report.account import Account, account_of
from equipool.report.page import report_page

MARK = b"Made by equipool"


def run(arguments: argparse.Namespace) -> int:
    """Write the report of a folder or of two tables."""
    if arguments.seed < 0:
        raise InputError(f"--seed must be at least 0. Got {arguments.seed}.")
    source: Path = arguments.table
    if not source.exists():
        raise InputError(
            f"{source} does not exist; give a folder of `equipool harmonize`, or the table as measured."
        )
    if source.is_dir() and arguments.after is not None:
        raise InputError(f"{source} is a folder; --after goes with the table as it was measured.")
    if source.is_file() and arguments.after is None:
        raise InputError(
            f"{source} is a table; name the harmonized one with --after, or give a folder of "
            "`equipool harmonize`."
        )
    out = arguments.out or (source / PAGE if source.is_dir() else Path(PAGE))
    _require_page(out)
    account = _read_account(source) if source.is_dir() else _two_tables(arguments)
    announce(arguments, {"report": write_whole(out, report_page(account))})
    return 0


def _require_page(out: Path) -> None:
    """Refuse to write over anything but an earlier report, or where nothing can be written."""
    if out.is_dir():
        raise InputError(f"{out} is a folder; give the name of a page, such as {out / PAGE}.")
    if out.exists() and MARK not in out.read_bytes():
        raise InputError(f"{out} is no report of equipool; choose another name with --out.")
    folder = next(one for one in out.parents if one.exists())  # the rest of it will be made
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be written in {folder}; choose another place with --out.")


def _read_account(folder: Path) -> Account:
    path = folder / ACCOUNT
    if not path.is_file():
        raise InputError(
            f"{folder} has no {ACCOUNT}; it is written by `equipool harmonize` without --no-report."
        )
    try:
        return Account.from_json(path.read_text(encoding="utf-8", errors="replace"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _two_tables(arguments: argparse.Namespace) -> Account:
    source = read_source(arguments)
    labels = [name for name in (arguments.site, arguments.id) if name]
    after = _aligned(source.frame, read_table(arguments.after, labels=labels), arguments)
    columns = {**roles(arguments), "task": None}
    given = PooledDataset.from_frame(after, site=arguments.site, like=source.pool, **columns)
    made = how_made(arguments, [arguments.table, arguments.after])
    say("Evaluating on held-out participants …")
    more = {"subject": source.column(arguments.subject), "seed": arguments.seed, "made": made}
    return account_of(source.pool, given.features, None, preflight(source.inputs), **more)


def _aligned(before: pd.DataFrame, after: pd.DataFrame, arguments: argparse.Namespace) -> pd.DataFrame:
    """Return the harmonized table in the order of the other, with the columns that it does not have."""
    after = after.rename(columns=str)
    id, tables = arguments.id, (arguments.table, arguments.after)
    if id:
        if id not in after:
            raise InputError(f"{tables[1]} has no column {id!r}, by which rows are matched; add it.")
        missing = set(before[id].astype(str)) ^ set(after[id].astype(str))
        if missing or after[id].duplicated().any():
            who = sorted(missing)[0] if missing else "an id twice"
            raise InputError(
                f"{tables[0]} and {tables[1]} are not of the same participants ({who!r}); give both the same "
                "rows."
            )
        after = after.set_index(after[id].astype(str)).loc[before[id].astype(str)]
    if len(before) != len(after):
        raise InputError(
            f"{tables[0]} has {len(before)} rows and {tables[1]} {len(after)}; give the same rows."
        )
    after = after.reset_index(drop=True)
    for name in filter(None, (arguments.site, *arguments.covariates, arguments.target)):
        if name in after and not _same(before[name], after[name], exactly=name == arguments.site):
            advice = (
                f"rows were matched by {id!r}, so correct the column, or leave it out of {tables[1]}."
                if id
                else "rows are not of the same participants; name the column to match them by with --id."
            )
            raise InputError(f"Column {name!r} differs between the two tables: {advice}")
        after = after.assign(**{name: before[name].to_numpy()})
    return after


def _same(one: pd.Series, other: pd.Series, *, exactly: bool = False) -> bool:
    """Compare numbers as numbers, since programs write 34 as 34.0 and round; anything else as text.

    Sites' numbers are names, which are not rounded: these are compared ``exactly``.
    """
    try:
        first, second = (pd.to_numeric(values).to_numpy(dtype=np.float64) for values in (one, other))
    except (ValueError, TypeError, OverflowError):
        return bool((one.astype(str).to_numpy() == other.astype(str).to_numpy()).all())
    return bool(np.allclose(first, second, rtol=0.0 if exactly else 1e-4, equal_nan=True))
