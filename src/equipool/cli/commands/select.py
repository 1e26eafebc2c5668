"""``equipool select``: choose settings of methods on validation splits."""

from argparse import Namespace
from importlib.util import find_spec

from equipool.benchmark.datasets import require_dataset
from equipool.benchmark.methods import METHODS, select
from equipool.cli.outputs import announce
from equipool.exceptions import MissingExtraError


def run(arguments: Namespace) -> int:
    """Search, and say where the settings are."""
    require_dataset(arguments.dataset)
    if find_spec("optuna") is None:
        raise MissingExtraError("Selection needs Optuna: pip install 'equipool[select]'.")
    out, methods = arguments.out, METHODS if arguments.methods == ["all"] else arguments.methods
    how = {"trials": arguments.trials, "tolerance": arguments.tolerance, "jobs": arguments.jobs}
    select(arguments.dataset, out, methods=methods, **how)
    announce(arguments, {"settings": out / "settings.json", "trials": out / "trials.csv"})
    return 0
