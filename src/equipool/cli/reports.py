"""The account and the page that `harmonize` writes at its end, and `report` of two tables."""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.checks import preflight
from equipool.cli.source import Source, roles
from equipool.data import Volumes
from equipool.data.tables import with_intensity
from equipool.estimators import EquivariantPooler, ImageHarmonizer, SiteHarmonizer
from equipool.files import file_sha256, write_whole
from equipool.judge.blocks import block_names, block_size, means_of_volumes
from equipool.progress import say
from equipool.report.account import Account, account_of, refit_images, refit_table, tau_of
from equipool.report.page import report_page

ACCOUNT, PAGE = "account.json", "report.html"
PACKAGES = ("equipool", "numpy", "scipy", "scikit-learn", "torch")
MARKS = {"good": "✓", "fair": "~", "bad": "✗"}
JUDGING = "Evaluating on held-out participants for the report (--no-report leaves it out) …"


def report_on_table(arguments: argparse.Namespace, source: Source, clean: pd.DataFrame) -> Path:
    """Write the account and the report of a harmonized table, and return the page."""
    say(JUDGING)
    subject = source.column(arguments.subject)
    make = partial(SiteHarmonizer, missing=arguments.missing, random_state=arguments.seed)
    account = account_of(
        source.pool,
        clean.to_numpy(),
        refit_table(source.pool, make, subject),
        preflight(source.inputs, missing=arguments.missing),
        subject=subject,
        seed=arguments.seed,
        made=how_made(arguments, [arguments.table]),
    )
    return _write(arguments.out, account)


def report_on_images(
    arguments: argparse.Namespace,
    source: Source,
    volumes: Volumes,
    harmonizer: ImageHarmonizer,
    pooler: EquivariantPooler | None,
    **more: Any,
) -> Path:
    """Write the account and the report of harmonized images, and return the page.

    ``more`` are the participants and the t-maps, as :func:`account_of` takes them.
    """
    say(JUDGING)
    pool = source.pool
    brightness = np.concatenate([np.median(rows, axis=1) for rows in volumes.blocks(16)])
    before = means_of_volumes(volumes, pool)
    size = f"{before.shape[1]} means over blocks of the brain of {block_size(volumes)}"
    account = account_of(
        pool,
        means_of_volumes(volumes, pool, harmonizer),
        refit_images(pool, volumes),
        preflight(with_intensity(source.inputs, brightness)),
        before=before,
        features=block_names(volumes),
        kind="images",
        method=[f"Images were summarised as {size}."],
        folds=2 if len(before) * volumes.shape[1] > 10**8 else 3,
        tau=None if pooler is None else tau_of(pooler, volumes, pool),
        seed=arguments.seed,
        made=how_made(arguments, images=volumes.paths),
        **more,
    )
    return _write(arguments.out, account)


def _write(out: Path, account: Account) -> Path:
    write_whole(out / ACCOUNT, account.to_json())
    for one in account.verdict:
        say(f"{MARKS[one['level']]} {one['text']}")
    return write_whole(out / PAGE, report_page(account))


def how_made(
    arguments: argparse.Namespace, tables: Sequence[Path] = (), *, images: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return what is needed to make a report again."""
    hashes = {path.name: file_sha256(path) for path in tables}
    if images:
        lines = "".join(f"{file_sha256(path)}  {path.name}\n" for path in images)
        list_hash = hashlib.sha256(lines.encode()).hexdigest()
        hashes[f"{len(images)} images (of their list of hashes and names)"] = list_hash
    kept = [*roles(arguments), "site", "seed", *(("codes", "encoder", "steps", "statmap") if images else ())]
    versions = {name: version(name) for name in PACKAGES}
    return {
        "source": arguments.table.name,
        "command": _command(),
        "versions": {**versions, "python": ".".join(map(str, sys.version_info[:3]))},
        "settings": {name: getattr(arguments, name) for name in kept},
        "inputs": hashes,
    }


def _command() -> str | None:
    """Return the command as it was typed, if it was."""
    program = Path(sys.argv[0])
    typed = program.stem == "equipool" or program.parent.name == "equipool"
    return shlex.join(["equipool", *sys.argv[1:]]) if typed else None
