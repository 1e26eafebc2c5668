"""``equipool demo``: a simulated pool of three scanners, from table to harmonized volumes."""

from __future__ import annotations

import argparse
from pathlib import Path

from equipool.cli import options


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser("demo", help="a simulated pool of three scanners: see what equipool does")
    option = command.add_argument
    option("--out", type=Path, default=Path("equipool-demo"), metavar="DIR", help="where to write")
    option("--overlap", type=float, default=0.0, help="of the sites' ages, 0 to 1 (default: 0)")
    options.add_common(command, "seed")
    option("--force", action="store_true", help="overwrite an earlier demo in DIR")
    command.set_defaults(command=run, go_on="Run it again with --force.")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from equipool.report.demo import run_demo

    run_demo(arguments.out, overlap=arguments.overlap, seed=arguments.seed, force=arguments.force)
    return 0
