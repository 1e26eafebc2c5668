"""``equipool benchmark``: methods compared on held-out participants."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from equipool.cli import options
from equipool.cli.participants import ROLES, leave_out, say_roles, take_roles
from equipool.exceptions import InputError
from equipool.progress import duration


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "benchmark",
        help="compare methods on held-out participants, the paper's or your tables",
        description="Fit every method with several seeds and evaluate it on held-out participants. Runs that "
        "are there already are kept, so that a killed benchmark goes on where it stopped.",
    )
    option = command.add_argument
    option(
        "datasets",
        nargs="+",
        metavar="DATASET",
        help="german, adult; adult-overlap-1, -0.5 and -0 for the experiment on covariate shift; of images "
        "adni-sim, adcp-sim (simulated; -hard where ages do not overlap), adni:FOLDER, adcp:FOLDER; or "
        "harmonizers TABLE…, to compare SiteHarmonizer with the ComBat family on your tables, or on "
        "simulated-OVERLAP, simulated-joint-OVERLAP",
    )
    options.add_roles(command)
    option("--repeats", type=int, default=3, help="harmonizers: of the five folds (default: 3)")
    option(
        "--methods",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="naive, mmd, cai, ss, rm, paper, ours, or all; ablation for the steps from paper to ours; of "
        "harmonizers raw, combat, combat-gam, covbat, ours and others",
    )
    option(
        "--seeds",
        "--splits",
        type=int,
        help="with which everything is repeated; for images, random splits (default: 3, of images 5)",
    )
    option("--quick", action="store_true", help="one seed and a third of the training, to see the whole path")
    options.add_common(command, "out", "jobs")
    option("--fresh", action="store_true", help="run everything anew")
    option("--settings", type=Path, metavar="FILE", help="settings of `equipool select` (default: ours)")
    options.add_common(command, "dry-run", "scheduler")
    command.set_defaults(
        command=run, go_on="Runs that are done are kept; run the same command again to go on."
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark, or the comparison of harmonizers, and draw it."""
    from equipool.benchmark.cohorts import is_brains
    from equipool.benchmark.datasets import require_dataset
    from equipool.benchmark.methods import ABLATION, METHODS, quick_settings, read_settings
    from equipool.benchmark.table1 import expected_runs, run_benchmark
    from equipool.report.benchmark_figures import benchmark_figures

    if arguments.datasets[0] == "harmonizers":
        return _benchmark_harmonizers(arguments)
    for name in arguments.datasets:
        require_dataset(name)  # before any folder is made
    if arguments.seeds is not None and arguments.seeds < 1:
        raise InputError(f"--splits (or --seeds) must be at least 1. Got {arguments.seeds}.")
    methods = _methods(arguments, {"all": METHODS, "ablation": ABLATION})
    settings = read_settings(arguments.settings) if arguments.settings else None
    usual = 5 if any(map(is_brains, arguments.datasets)) else 3
    if arguments.quick:
        settings, usual = quick_settings(arguments.datasets, methods, settings), 1
    what: dict[str, Any] = {
        "methods": methods,
        "seeds": arguments.seeds or usual,
        "fresh": arguments.fresh,
        "settings": settings,
    }
    if arguments.dry_run:
        return _say_dry(arguments, "runs", *expected_runs(arguments.datasets, arguments.out, **what))
    runs = run_benchmark(arguments.datasets, arguments.out, jobs=arguments.jobs, **what)
    figures = benchmark_figures(runs, arguments.out)
    for name in filter(is_brains, arguments.datasets):
        figures += _benchmark_volumes(name, arguments, arguments.seeds or usual, settings)
    print((arguments.out / "table.md").read_text(encoding="utf-8"))
    print(f"Runs: {arguments.out / 'runs.csv'}\nTable: {arguments.out / 'table.md'}")
    print("Figures: " + ", ".join(str(path) for path in figures))
    return 0


def _benchmark_volumes(name: str, arguments: argparse.Namespace, splits: int, settings: Any) -> list[Path]:
    """Judge harmonized volumes and t-maps of one cohort, and draw them."""
    from equipool.benchmark.harmonized_images import run_volumes
    from equipool.report.benchmark_figures import volume_figures

    if name.endswith("-hard"):
        return []
    result = run_volumes(
        name, arguments.out, splits=splits, jobs=arguments.jobs, settings=settings, fresh=arguments.fresh
    )
    print(result.text)
    return volume_figures(result, arguments.out)


def _benchmark_harmonizers(arguments: argparse.Namespace) -> int:
    from equipool.benchmark.harmonizers import HARMONIZERS, read_pool, run_harmonizers
    from equipool.report.benchmark_figures import frontier_figure
    from equipool.report.style import save_figure

    if len(arguments.datasets) < 2:
        raise InputError("Name the tables to compare harmonizers on, such as volumes.csv or simulated-0.")
    pools, subjects = {}, {}
    for table in arguments.datasets[1:]:
        chosen = _with_roles(arguments, table)
        name, pool, subject = read_pool(
            table, site=chosen.site, subject=chosen.subject, **options.roles(chosen)
        )
        name = name if name not in pools else table
        pools[name], subjects[name] = pool, subject
    methods = _methods(arguments, {"all": HARMONIZERS})
    if arguments.dry_run:
        tasks = 5 * arguments.repeats * len(pools)
        seconds = [_fold_seconds(pool, methods) for pool in pools.values()]
        return _say_dry(arguments, "folds", tasks, tasks, 5 * arguments.repeats * sum(seconds))
    folds = run_harmonizers(
        pools,
        arguments.out,
        methods=methods,
        subjects=subjects,
        repeats=arguments.repeats,
        jobs=arguments.jobs,
        fresh=arguments.fresh,
    )
    figure = save_figure(frontier_figure(folds), arguments.out / "frontier.png")
    print((arguments.out / "harmonizers.md").read_text(encoding="utf-8"))
    print(f"Folds: {arguments.out / 'folds.csv'}\nFigure: {figure}")
    return 0


def _methods(arguments: argparse.Namespace, groups: dict[str, Any]) -> tuple[str, ...]:
    """Return the methods of a call, each once, with the names of groups resolved."""
    return tuple(dict.fromkeys(m for name in arguments.methods for m in groups.get(name, (name,))))


def _fold_seconds(pool: Any, methods: tuple[str, ...]) -> float:
    """Return how long one fold takes: by doing one."""
    from equipool.benchmark.harmonizers import score_fold

    start = time.perf_counter()
    score_fold(pool, "", 0, 0, methods)
    return time.perf_counter() - start


def _say_dry(arguments: argparse.Namespace, what: str, wanted: int, todo: int, seconds: float) -> int:
    """Say how much is to be done and how long it takes, give or take a factor of two."""
    jobs = arguments.jobs or os.cpu_count() or 1
    seconds = seconds / min(jobs, max(1, todo))
    print(
        f"{wanted} {what}, {wanted - todo} of them done; the rest takes about {duration(seconds)} "
        f"(half to double) with {jobs} at a time.\nTo {arguments.out}."
    )
    return 0


def _with_roles(arguments: argparse.Namespace, table: str) -> argparse.Namespace:
    """Return the arguments with the roles of one table, which may have other columns than the next."""
    chosen = argparse.Namespace(**{**vars(arguments), "table": Path(table)})
    if not table.startswith("simulated-"):
        from equipool.data.tables import read_table

        frame = read_table(table)
        say_roles(take_roles(chosen, frame.columns, ROLES, site_needed=True))
        leave_out(chosen, frame)
    return chosen
