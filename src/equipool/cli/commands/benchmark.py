"""``equipool benchmark``: methods compared on held-out participants."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from equipool.benchmark.datasets import is_brains, require_dataset
from equipool.benchmark.harmonizers import HARMONIZERS, read_pool, run_harmonizers
from equipool.benchmark.methods import ABLATION, METHODS, quick_settings, read_settings
from equipool.benchmark.table1 import expected_runs, run_benchmark
from equipool.cli.outputs import announce
from equipool.cli.source import read_rows, roles
from equipool.data.tables import table_kind
from equipool.exceptions import InputError
from equipool.progress import duration
from equipool.report.benchmark_figures import benchmark_figures, frontier_figure
from equipool.report.style import save_figure


def run(arguments: Namespace) -> int:
    """Run the benchmark, or the comparison of harmonizers, and draw it."""
    if arguments.datasets[0] == "harmonizers":
        return _benchmark_harmonizers(arguments)
    for name in arguments.datasets:
        require_dataset(name)  # before any folder is made
    methods = _methods(arguments, {"all": METHODS, "ablation": ABLATION})
    settings = read_settings(arguments.settings) if arguments.settings else None
    usual = 5 if any(map(is_brains, arguments.datasets)) else 3
    if arguments.quick:
        settings, usual = quick_settings(arguments.datasets, methods, settings), 1
    seeds, out = arguments.seeds or usual, arguments.out
    how = {"jobs": arguments.jobs, "fresh": arguments.fresh, "settings": settings}
    if arguments.dry_run:
        which = {"methods": methods, "seeds": seeds, "settings": settings, "fresh": arguments.fresh}
        count, todo, seconds = expected_runs(arguments.datasets, out, **which)
        time = duration(seconds / (arguments.jobs or os.cpu_count() or 1))
        print(f"{count} runs, {todo} to do, in about {time} (half to double); to {out}.")
        return 0
    runs = run_benchmark(arguments.datasets, out, methods=methods, seeds=seeds, **how)
    figures = benchmark_figures(runs, out)
    print((out / "table.md").read_text(encoding="utf-8"))
    announce(arguments, {"runs": out / "runs.csv", "figures": ", ".join(map(str, figures))})
    return 0


def _benchmark_harmonizers(arguments: Namespace) -> int:
    if len(arguments.datasets) < 2:
        raise InputError("Name the tables to compare harmonizers on, such as volumes.csv or simulated-0.")
    pools, subjects = {}, {}
    for table in arguments.datasets[1:]:
        # Each table may have other columns than the next.
        call = Namespace(**{**vars(arguments), "table": Path(table)})
        if not table.startswith("simulated-"):
            table_kind(call.table)  # before a folder is taken for one of images
            read_rows(call)
        name, pool, subject = read_pool(table, site=call.site, subject=call.subject, **roles(call))
        name = name if name not in pools else table
        pools[name], subjects[name] = pool, subject
    methods, out = _methods(arguments, {"all": HARMONIZERS}), arguments.out
    if arguments.dry_run:
        folds = 5 * arguments.repeats * len(pools)
        print(f"{len(methods)} harmonizers in {folds} folds, where no earlier run has done it; to {out}.")
        return 0
    how = {"repeats": arguments.repeats, "jobs": arguments.jobs, "fresh": arguments.fresh}
    folds = run_harmonizers(pools, out, methods=methods, subjects=subjects, **how)
    figure = save_figure(frontier_figure(folds), out / "frontier.png")
    print((out / "harmonizers.md").read_text(encoding="utf-8"))
    announce(arguments, {"folds": out / "folds.csv", "figure": figure})
    return 0


def _methods(arguments: Namespace, groups: dict[str, Any]) -> tuple[str, ...]:
    """Return the methods of a call, each once, with the names of groups resolved."""
    return tuple(dict.fromkeys(m for name in arguments.methods for m in groups.get(name, (name,))))
