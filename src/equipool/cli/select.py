"""``equipool select``: choose settings of methods on validation splits."""

from __future__ import annotations

import argparse

from equipool.cli import options
from equipool.exceptions import MissingExtraError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "select",
        help="choose a method's settings on validation splits",
        description="Search settings on validation splits of the training rows: among those within the "
        "tolerance of the best accuracy, the one from which a classifier predicts the site worst. A killed "
        "search goes on where it stopped. The result is for `equipool benchmark --settings FILE`.",
    )
    option = command.add_argument
    option("dataset", metavar="DATASET", help="german or adult")
    option("--methods", nargs="+", default=["all"], metavar="NAME", help="default: all")
    option("--trials", type=int, default=20, help="settings tried a method (default: 20)")
    option(
        "--tolerance", type=float, default=0.05, help="share of the best accuracy given up (default: 0.05)"
    )
    options.add_common(command, "out", "jobs", "scheduler")
    command.set_defaults(
        command=run, go_on="Trials that are done are kept; run the same command again to go on."
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, and say where the settings are."""
    from equipool.benchmark.datasets import require_dataset
    from equipool.benchmark.methods import METHODS
    from equipool.benchmark.selection import select

    require_dataset(arguments.dataset)
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise MissingExtraError("Selection needs Optuna: pip install 'equipool[select]'.") from None
    select(
        arguments.dataset,
        arguments.out,
        methods=METHODS if arguments.methods == ["all"] else arguments.methods,
        trials=arguments.trials,
        tolerance=arguments.tolerance,
        jobs=arguments.jobs,
    )
    print(f"Settings: {arguments.out / 'settings.json'}\nTrials: {arguments.out / 'trials.csv'}")
    return 0
