"""``equipool report``: the HTML report of a harmonization, by equipool or another tool."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.cli import options
from equipool.cli.options import roles
from equipool.cli.outputs import announce
from equipool.exceptions import InputError
from equipool.files import file_sha256, write_whole
from equipool.progress import say

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from equipool.checks import Inputs
    from equipool.data import PooledDataset, Volumes
    from equipool.report.account import Account

ACCOUNT, PAGE = "account.json", "report.html"
PACKAGES = ("equipool", "numpy", "scipy", "scikit-learn", "torch")
MARK = b"Made by equipool"
MARKS = {"good": "✓", "fair": "~", "bad": "✗"}
JUDGING = "Evaluating on held-out participants for the report (--no-report leaves it out) …"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "report",
        help="the report of a harmonization again, or of any two tables",
        description="Make the report of a folder that `equipool harmonize` wrote again, without "
        "fitting anything; or judge a table that was harmonized by any means (ComBat's too): "
        "BEFORE.csv --after AFTER.csv.",
    )
    option = command.add_argument
    option("table", metavar="SOURCE", type=Path, help="a folder of `harmonize`, or the table as measured")
    option("--after", type=Path, metavar="FILE", help="the harmonized table")
    option(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page to write (default: report.html, in the folder or here)",
    )
    option("--seed", type=int, default=0, help="of the folds (default: 0)")
    options.add_roles(command)
    options.add_common(command, "json")
    command.set_defaults(command=run, go_on="Nothing was written; run it again.")


def run(arguments: argparse.Namespace) -> int:
    """Write the report of a folder or of two tables."""
    from equipool.report.page import write_report

    if arguments.seed < 0:
        raise InputError(f"--seed must be at least 0. Got {arguments.seed}.")
    source: Path = arguments.table
    if not source.exists():
        raise InputError(
            f"{source} does not exist; give a folder of `equipool harmonize`, or the table as measured."
        )
    if source.is_dir():
        if arguments.after is not None:
            raise InputError(f"{source} is a folder; --after goes with the table as it was measured.")
        out = _page(arguments.out or source / PAGE)
        account = _read_account(source)
    else:
        if arguments.after is None:
            raise InputError(
                f"{source} is a table; name the harmonized one with --after, or give a folder of "
                "`equipool harmonize`."
            )
        out = _page(arguments.out or Path(PAGE))
        account = _two_tables(arguments)
    announce(arguments.json, {"report": write_report(out, account)})
    return 0


def _page(out: Path) -> Path:
    """Refuse to write over anything but an earlier report, or where nothing can be written."""
    if out.is_dir():
        raise InputError(f"{out} is a folder; give the name of a page, such as {out / PAGE}.")
    if out.exists() and MARK not in out.read_bytes():
        raise InputError(f"{out} is no report of equipool; choose another name with --out.")
    folder = next(one for one in out.parents if one.exists())  # the rest of it will be made
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be written in {folder}; choose another place with --out.")
    return out


def _read_account(folder: Path) -> Account:
    from equipool.report.account import Account

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
    from equipool.checks import Inputs, preflight
    from equipool.cli.participants import read_participants
    from equipool.data import PooledDataset
    from equipool.data.tables import read_table
    from equipool.report.account import account_of

    for name in ("images", "preset"):
        setattr(arguments, name, None)
    frame, _ = read_participants(arguments)
    inputs = Inputs.from_frame(frame, site=arguments.site, **roles(arguments))
    pool = PooledDataset.from_inputs(inputs)
    labels = [name for name in (arguments.site, arguments.id) if name]
    after = _aligned(frame, read_table(arguments.after, labels=labels), arguments)
    given = PooledDataset.from_frame(
        after, site=arguments.site, like=pool, **{**roles(arguments), "task": None}
    )
    made = _made(arguments, {arguments.table.name: arguments.table, arguments.after.name: arguments.after})
    say("Evaluating on held-out participants …")
    subject = frame[arguments.subject].to_numpy() if arguments.subject else None
    before = preflight(inputs)
    return account_of(pool, given.features, None, before, subject=subject, seed=arguments.seed, made=made)


def _aligned(before: pd.DataFrame, after: pd.DataFrame, arguments: argparse.Namespace) -> pd.DataFrame:
    """Return the harmonized table in the order of the other, with the columns that it does not have."""
    after = after.rename(columns=str)
    id = arguments.id
    if id:
        if id not in after:
            raise InputError(f"{arguments.after} has no column {id!r}, by which rows are matched; add it.")
        missing = set(before[id].astype(str)) ^ set(after[id].astype(str))
        if missing or after[id].duplicated().any():
            who = sorted(missing)[0] if missing else "an id twice"
            raise InputError(
                f"{arguments.table} and {arguments.after} are not of the same participants ({who!r}); give "
                "both the same rows."
            )
        after = after.set_index(after[id].astype(str)).loc[before[id].astype(str)]
    if len(before) != len(after):
        raise InputError(
            f"{arguments.table} has {len(before)} rows and {arguments.after} {len(after)}; give the "
            "same rows."
        )
    after = after.reset_index(drop=True)
    shared = [arguments.site, *arguments.covariates, arguments.target]
    for name in (name for name in shared if name):
        if name in after and not _same(before[name], after[name], exactly=name == arguments.site):
            advice = (
                f"rows were matched by {id!r}, so correct the column, or leave it out of {arguments.after}."
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
    import numpy as np
    import pandas as pd

    try:
        first, second = (pd.to_numeric(values).to_numpy(dtype=np.float64) for values in (one, other))
    except (ValueError, TypeError, OverflowError):
        return bool((one.astype(str).to_numpy() == other.astype(str).to_numpy()).all())
    return bool(np.allclose(first, second, rtol=0.0 if exactly else 1e-4, equal_nan=True))


# -- at the end of harmonize -------------------------------------------------------------------------------


def report_on_table(
    arguments: argparse.Namespace,
    inputs: Inputs,
    pool: PooledDataset,
    clean: NDArray[np.float64],
    subject: pd.Series | None,
) -> Path:
    """Write the account and the report of a harmonized table, and return the page."""
    from equipool.checks import preflight
    from equipool.estimators import SiteHarmonizer
    from equipool.report.account import account_of, refit_table

    say(JUDGING)
    participants = None if subject is None else subject.to_numpy()
    make = partial(SiteHarmonizer, missing=arguments.missing, random_state=arguments.seed)
    account = account_of(
        pool,
        clean,
        refit_table(pool, make, participants),
        preflight(inputs, missing=arguments.missing),
        subject=participants,
        seed=arguments.seed,
        made=_made(arguments, {arguments.table.name: arguments.table}),
    )
    return _write(arguments.out, account)


def report_on_images(
    arguments: argparse.Namespace,
    inputs: Inputs,
    pool: PooledDataset,
    volumes: Volumes,
    fitted: tuple[Any, Any],
    subject: NDArray[Any],
    statmap: dict[str, Any] | None,
) -> Path:
    """Write the account and the report of harmonized images, and return the page.

    ``fitted`` are the harmonizer and, where codes were trained, the pooler.
    """
    import numpy as np

    from equipool.checks import preflight
    from equipool.data.tables import with_intensity
    from equipool.judge.blocks import block_names, block_size, means_of_volumes
    from equipool.report.account import account_of, refit_images, tau_of

    say(JUDGING)
    brightness = np.concatenate([np.median(rows, axis=1) for rows in volumes.blocks(16)])
    before = means_of_volumes(volumes, pool)
    size = f"{before.shape[1]} means over blocks of the brain of {block_size(volumes)}"
    account = account_of(
        pool,
        means_of_volumes(volumes, pool, fitted[0]),
        refit_images(pool, volumes),
        preflight(with_intensity(inputs, brightness)),
        before=before,
        features=block_names(volumes),
        kind="images",
        method=[f"Images were summarised as {size}."],
        folds=2 if len(before) * volumes.shape[1] > 10**8 else 3,
        tau=None if fitted[1] is None else tau_of(fitted[1], volumes, pool),
        subject=subject,
        statmap=statmap,
        seed=arguments.seed,
        made=_made(arguments, {}, images=volumes.paths),
    )
    return _write(arguments.out, account)


def _write(out: Path, account: Account) -> Path:
    from equipool.report.page import write_report

    write_whole(out / ACCOUNT, account.to_json())
    for one in account.verdict:
        say(f"{MARKS[one['level']]} {one['text']}")
    return write_report(out / PAGE, account)


def _made(
    arguments: argparse.Namespace, inputs: dict[str, Path], *, images: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Return what is needed to make it again."""
    hashes = {name: file_sha256(path) for name, path in inputs.items()}
    if images:
        lines = "".join(f"{file_sha256(path)}  {path.name}\n" for path in images)
        hashes[f"{len(images)} images (of their list of hashes and names)"] = hashlib.sha256(
            lines.encode()
        ).hexdigest()
    kept = [*roles(arguments), "site", "seed", *(("codes", "encoder", "steps", "statmap") if images else ())]
    settings = {name: getattr(arguments, name) for name in kept}
    versions = {name: version(name) for name in PACKAGES}
    return {
        "source": arguments.table.name,
        "command": _command(),
        "versions": {**versions, "python": ".".join(map(str, sys.version_info[:3]))},
        "settings": settings,
        "inputs": hashes,
    }


def _command() -> str | None:
    """Return the command as it was typed, if it was."""
    program = Path(sys.argv[0])
    typed = program.stem == "equipool" or program.parent.name == "equipool"
    return shlex.join(["equipool", *sys.argv[1:]]) if typed else None
