"""``equipool report``: the HTML report of a harmonization, by `harmonize` at its end or by another tool."""

import hashlib
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.checks import preflight
from equipool.cli.outputs import announce
from equipool.cli.source import Source, read_source, roles
from equipool.data import PooledDataset, Volumes, read_table
from equipool.data.tables import with_intensity
from equipool.data.volumes import block_names, block_size, means_of_volumes
from equipool.estimators import EquivariantPooler, ImageHarmonizer, SiteHarmonizer
from equipool.exceptions import InputError
from equipool.files import file_sha256, write_whole
from equipool.progress import say
from equipool.report.account import Account, account_of, again_table, refit_images, refit_table, tau_of
from equipool.report.page import report_page

ACCOUNT, PAGE = "account.json", "report.html"
PACKAGES = ("equipool", "numpy", "scipy", "scikit-learn", "torch")
OPTIONS = ("covariates", "target", "id", "features", "task", "ignore", "site", "seed", "keep_target")
OF_IMAGES = ("codes", "encoder", "steps", "statmap")
MARKS = {"good": "✓", "fair": "~", "bad": "✗"}


def run(arguments: Namespace) -> int:
    """Write the report of a folder or of two tables."""
    source: Path = arguments.table
    if not source.exists():
        what = f"{source} does not exist"
        raise InputError(f"{what}; give a folder of `equipool harmonize`, or the table as measured.")
    if source.is_dir() and arguments.after is not None:
        raise InputError(f"{source} is a folder; --after goes with the table as it was measured.")
    if source.is_file() and arguments.after is None:
        advice = "name the harmonized one with --after, or give a folder of `equipool harmonize`."
        raise InputError(f"{source} is a table; {advice}")
    out = arguments.out or (source / PAGE if source.is_dir() else Path(PAGE))
    _require_page(out)
    account = _read_account(source) if source.is_dir() else _two_tables(arguments)
    announce(arguments, {"report": write_whole(out, report_page(account))})
    return 0


def _require_page(out: Path) -> None:
    """Refuse to write over anything but an earlier report, or where nothing can be written."""
    if out.is_dir():
        raise InputError(f"{out} is a folder; give the name of a page, such as {out / PAGE}.")
    if out.exists() and b"Made by equipool" not in out.read_bytes():
        raise InputError(f"{out} is no report of equipool; choose another name with --out.")
    folder = next(one for one in out.parents if one.exists())  # the rest of it will be made
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be written in {folder}; choose another place with --out.")


def _read_account(folder: Path) -> Account:
    path = folder / ACCOUNT
    if not path.is_file():
        what = f"{folder} has no {ACCOUNT}"
        raise InputError(f"{what}; it is written by `equipool harmonize` without --no-report.")
    try:
        return Account.from_json(path.read_text(encoding="utf-8", errors="replace"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _two_tables(arguments: Namespace) -> Account:
    source = read_source(arguments)
    labels = [name for name in (arguments.site, arguments.id) if name]
    after = _aligned(source.frame, read_table(arguments.after, labels=labels), arguments)
    columns = {**roles(arguments), "task": None}
    given = PooledDataset.from_frame(after, site=arguments.site, like=source.pool, missing="keep", **columns)
    made = _how_made(arguments, [arguments.table, arguments.after])
    say("Evaluating on held-out participants …")
    more = {"subject": source.subject, "seed": arguments.seed, "made": made}
    checked = preflight(source.inputs, missing=arguments.missing)
    return account_of(source.pool, given.features, None, checked, **more)


def _aligned(before: pd.DataFrame, after: pd.DataFrame, arguments: Namespace) -> pd.DataFrame:
    """Return the harmonized table in the order of the other, with the columns that it does not have."""
    id, tables = arguments.id, (arguments.table, arguments.after)
    if id:
        if id not in after:
            raise InputError(f"{tables[1]} has no column {id!r}, by which rows are matched; add it.")
        missing = set(before[id].astype(str)) ^ set(after[id].astype(str))
        if missing or after[id].duplicated().any():
            who = sorted(missing)[0] if missing else "an id twice"
            what = f"{tables[0]} and {tables[1]} are not of the same participants ({who!r})"
            raise InputError(f"{what}; give both the same rows.")
        after = after.set_index(after[id].astype(str)).loc[before[id].astype(str)]
    if len(before) != len(after):
        what = f"{tables[0]} has {len(before)} rows and {tables[1]} {len(after)}"
        raise InputError(f"{what}; give the same rows.")
    after = after.reset_index(drop=True)
    for name in filter(None, (arguments.site, *arguments.covariates, arguments.target)):
        if name in after and not _same(before[name], after[name], exactly=name == arguments.site):
            advice = "rows are not of the same participants; name the column to match them by with --id."
            if id:
                advice = f"rows were matched by {id!r}; correct the column, or leave it out of {tables[1]}."
            raise InputError(f"Column {name!r} differs between the two tables: {advice}")
        after[name] = before[name]
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


def report_on_table(arguments: Namespace, source: Source, clean: pd.DataFrame, method: list[str]) -> Path:
    """Write the account and the report of a harmonized table, and return the page."""
    settings = {"keep_target": arguments.keep_target, "random_state": arguments.seed}
    make = partial(SiteHarmonizer, missing=arguments.missing, **settings)
    pool, subject = source.pool, source.subject
    refit, again = (refit_of(pool, make, subject) for refit_of in (refit_table, again_table))
    checked = preflight(source.inputs, missing=arguments.missing)
    made = _how_made(arguments, [arguments.table])
    more = {"subject": subject, "again": again, "made": made, "method": method}
    return _write(arguments, pool, clean.to_numpy(), refit, checked, **more)


def report_on_images(
    arguments: Namespace,
    source: Source,
    volumes: Volumes,
    harmonizer: ImageHarmonizer,
    pooler: EquivariantPooler | None,
    method: list[str],
    **more: Any,
) -> Path:
    """Write the account and the report of harmonized images, and return the page.

    ``method``, and in ``more`` the participants and the t-maps, as :func:`account_of` takes them.
    """
    pool = source.pool
    brightness = np.concatenate([np.median(rows, axis=1) for rows in volumes.blocks(16)])
    before = means_of_volumes(volumes, pool)
    size = f"{before.shape[1]} means over blocks of the brain of {block_size(volumes)}"
    return _write(
        arguments,
        pool,
        means_of_volumes(volumes, pool, harmonizer),
        refit_images(pool, volumes, keep_target=arguments.keep_target, random_state=arguments.seed),
        preflight(with_intensity(source.inputs, brightness)),
        before=before,
        features=block_names(volumes),
        kind="images",
        method=[f"Images were summarised as {size}.", *method],
        folds=2 if len(before) * volumes.shape[1] > 10**8 else 3,
        tau=None if pooler is None else tau_of(pooler, volumes, pool),
        made=_how_made(arguments, images=volumes.paths),
        **more,
    )


def _write(arguments: Namespace, *harmonized: Any, **more: Any) -> Path:
    say("Evaluating on held-out participants for the report (--no-report leaves it out) …")
    account = account_of(*harmonized, **more, seed=arguments.seed)
    write_whole(arguments.out / ACCOUNT, account.to_json())
    for one in account.verdict:
        say(f"{MARKS[one['level']]} {one['text']}")
    return write_whole(arguments.out / PAGE, report_page(account))


def _how_made(
    arguments: Namespace, tables: Sequence[Path] = (), *, images: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return what is needed to make a report again."""
    hashes = {path.name: file_sha256(path) for path in tables}
    if images:
        lines = "".join(f"{file_sha256(path)}  {path.name}\n" for path in images)
        list_hash = hashlib.sha256(lines.encode()).hexdigest()
        hashes[f"{len(images)} images (of their list of hashes and names)"] = list_hash
    program = Path(sys.argv[0])
    typed = program.stem == "equipool" or program.parent.name == "equipool"  # else a script called `main`
    python = {"python": ".".join(map(str, sys.version_info[:3]))}
    return {
        "source": arguments.table.name,
        "command": shlex.join(["equipool", *sys.argv[1:]]) if typed else None,
        "versions": {name: version(name) for name in PACKAGES} | python,
        "settings": {name: getattr(arguments, name) for name in OPTIONS + (OF_IMAGES if images else ())},
        "inputs": hashes,
    }
