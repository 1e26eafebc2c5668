"""``equipool datasets``: the datasets of the benchmark and the cache."""

from __future__ import annotations

import argparse

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser("datasets", help="list or fetch the datasets of the benchmark")
    command.add_argument("action", choices=("fetch",))
    command.add_argument("names", nargs="+", metavar="DATASET", help="german, adult")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch datasets."""
    from equipool.data.datasets import load_dataset
    from equipool.data.uci import FILES, fetch

    for name in arguments.names:
        for file in (file for file in FILES if file.startswith(f"{name}.")):
            print(fetch(file))
        split = load_dataset(name)
        print(f"{name}: {len(split.train)} people to fit on, {len(split.test)} to judge on")
    return 0
