"""``equipool datasets``: the datasets of the benchmark, and which of them are in the cache."""

from __future__ import annotations

import argparse
import json

from equipool.benchmark.datasets import list_datasets, load_dataset, require_dataset
from equipool.exceptions import InputError

COLUMNS = ("name", "people", "sites", "source", "cached")


def run(arguments: argparse.Namespace) -> int:
    """List or fetch."""
    if arguments.action == "list" and arguments.names:
        raise InputError(f"`datasets list` takes no names; fetch with: datasets fetch {arguments.names[0]}.")
    if arguments.action == "fetch" and not arguments.names:
        raise InputError("Name the datasets to fetch, such as german; `equipool datasets` lists them.")
    return _fetch(arguments) if arguments.action == "fetch" else _list(arguments)


def _list(arguments: argparse.Namespace) -> int:
    rows = list_datasets()
    if arguments.json:
        print(json.dumps({"datasets": [dict(zip(COLUMNS, row, strict=True)) for row in rows]}))
        return 0
    table = [COLUMNS, *((*map(str, row[:-1]), "yes" if row[-1] else "no") for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    for name in arguments.names:
        require_dataset(name)
    fetched = []
    for name in arguments.names:
        split = load_dataset(name)
        fetched.append({"name": name, "train": len(split.train), "test": len(split.test)})
        if not arguments.json:
            print(f"{name}: {len(split.train)} training rows, {len(split.test)} test rows")
    if arguments.json:
        print(json.dumps({"fetched": fetched}))
    return 0
