"""The command line: thin functions over the Python interface. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from equipool import __version__
from equipool.commands import apply, harmonize, preprocess, report, simulate
from equipool.commands.people import add_images, add_roles, preset_roles, read_people, roles
from equipool.exceptions import EquipoolError, EquipoolWarning

__all__ = ["main"]

FINE, CANNOT_BE_POOLED, WRONG_CALL, OUR_FAULT, INTERRUPTED = 0, 1, 2, 3, 130

EPILOG = """\
exit codes: 0 fine, 1 the data cannot be pooled, 2 the call or a file is wrong,
3 a defect of equipool, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a sign (η, ✗) shows a question mark rather than failing.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = _run(command, arguments)
        sys.stdout.flush()
    except (EquipoolError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_left()
        print(f"equipool: {error}", file=sys.stderr)
        return WRONG_CALL
    except KeyboardInterrupt:
        print("equipool: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("EQUIPOOL_TRACEBACK"):
            raise
        kind = type(error).__name__
        print(
            f"equipool: this should not have happened ({kind}: {error}). Run it again with "
            "EQUIPOOL_TRACEBACK=1 and report what it prints.",
            file=sys.stderr,
        )
        return OUR_FAULT
    return status


def _run(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a command; our own warnings are printed as sentences, without the line of code that gave them."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, EquipoolWarning):
            print(f"equipool: {message}", file=sys.stderr)
        else:
            usual(message, category, *where, **more)

    with warnings.catch_warnings():
        warnings.showwarning = show
        return command(arguments)


def _reader_left() -> int:
    """Return what a command in a pipe returns whose reader (head, less) left early: not a verdict."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + 13


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="equipool",
        description="Pool multi-site datasets so that they can be analysed as one.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"equipool {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_check(commands)
    _add_benchmark(commands)
    _add_select(commands)
    _add_datasets(commands)
    _add_demo(commands)
    preprocess.add(commands)
    simulate.add(commands)
    harmonize.add(commands)
    apply.add(commands)
    report.add(commands)
    return parser


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check",
        help="can the sites of this table or folder be pooled, and at what price?",
        description="Look at a table before anything is fitted: sites, overlap of covariates, confounding, "
        "bad values; where there are images, every one of them. Ends with a verdict.",
        epilog=EPILOG,
    )
    check.add_argument(
        "table", metavar="TABLE", type=Path, help="a .csv, .tsv or .parquet file, or a folder of images"
    )
    add_roles(check, site_required=False)
    add_images(check)
    check.add_argument(
        "--missing",
        choices=("error", "impute"),
        default="error",
        help="whether missing feature values stand in the way (default: error)",
    )
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    check.add_argument("--figure", type=Path, metavar="FILE", help="also draw it, as .png, .svg or .pdf")
    check.set_defaults(command=_check, refuse=check.error)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="make a pool of three scanners up and show what equipool does")
    demo.add_argument("--out", type=Path, default=Path("equipool-demo"), metavar="DIR", help="where to write")
    demo.add_argument("--overlap", type=float, default=0.0, help="of the sites' ages, 0 to 1 (default: 0)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--force", action="store_true", help="overwrite an earlier demo in DIR")
    demo.set_defaults(command=_demo)


def _add_benchmark(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    benchmark = commands.add_parser(
        "benchmark",
        help="the paper's table: every method on its datasets, with several seeds",
        description="Fit every method with several seeds and judge it on held-out people. Runs that are "
        "there already are kept, so that a killed benchmark goes on where it stopped.",
    )
    benchmark.add_argument(
        "datasets",
        nargs="+",
        metavar="DATASET",
        help="german, adult; adult-overlap-1, -0.5 and -0 for the experiment on covariate shift; of images "
        "adni-sim, adcp-sim (simulated; -hard where ages do not overlap), adni:FOLDER, adcp:FOLDER; or "
        "harmonizers TABLE…, to compare SiteHarmonizer with the ComBat family on your tables, or on "
        "simulated-OVERLAP",
    )
    add_roles(benchmark, site_required=False)
    benchmark.add_argument(
        "--repeats", type=int, default=3, help="harmonizers: of the five folds (default: 3)"
    )
    benchmark.add_argument(
        "--methods",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="naive, mmd, cai, ss, rm, paper, ours, or all; ablation for the steps from paper to ours",
    )
    benchmark.add_argument(
        "--seeds",
        "--splits",
        type=int,
        help="with which everything is repeated; for images, random splits (default: 3, of images 5)",
    )
    benchmark.add_argument(
        "--quick", action="store_true", help="one seed and a third of the training, to see the whole path"
    )
    benchmark.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    benchmark.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: all cores)")
    benchmark.add_argument("--fresh", action="store_true", help="run everything anew")
    benchmark.add_argument(
        "--settings", type=Path, metavar="FILE", help="settings of `equipool select` (default: ours)"
    )
    benchmark.set_defaults(command=_benchmark)


def _add_select(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    select = commands.add_parser(
        "select",
        help="choose a method's settings on validation splits, as the paper does",
        description="Search settings on validation splits of the training people: among those within the "
        "tolerance of the best accuracy, the one from which the site is read worst. A killed search goes on "
        "where it stopped. `equipool benchmark --settings DIR/settings.json` takes the result.",
    )
    select.add_argument("dataset", metavar="DATASET", help="german or adult")
    select.add_argument("--methods", nargs="+", default=["all"], metavar="NAME", help="default: all")
    select.add_argument("--trials", type=int, default=20, help="settings tried a method (default: 20)")
    select.add_argument(
        "--tolerance", type=float, default=0.05, help="share of the best accuracy given up (default: 0.05)"
    )
    select.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    select.add_argument("--jobs", type=int, metavar="N", help="fits at a time (default: all cores)")
    select.set_defaults(command=_select)


def _add_datasets(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    datasets = commands.add_parser("datasets", help="fetch the datasets of the benchmark into the cache")
    datasets.add_argument("action", choices=("fetch",))
    datasets.add_argument("names", nargs="+", metavar="DATASET", help="german, adult")
    datasets.set_defaults(command=_datasets)


def _benchmark(arguments: argparse.Namespace) -> int:
    from equipool.data.brainsets import is_brains
    from equipool.data.datasets import require_dataset
    from equipool.evaluate.benchmark import run_benchmark
    from equipool.evaluate.methods import ABLATION, METHODS, quick_settings, read_settings
    from equipool.report.benchmark import benchmark_figures

    if arguments.datasets[0] == "harmonizers":
        return _benchmark_harmonizers(arguments)
    for name in arguments.datasets:
        require_dataset(name)  # before any folder is made
    if arguments.seeds is not None and arguments.seeds < 1:
        raise EquipoolError(f"--splits (or --seeds) must be at least 1. Got {arguments.seeds}.")
    groups = {"all": METHODS, "ablation": ABLATION}
    methods = tuple(dict.fromkeys(m for name in arguments.methods for m in groups.get(name, (name,))))
    settings = read_settings(arguments.settings) if arguments.settings else None
    usual = 5 if any(map(is_brains, arguments.datasets)) else 3
    if arguments.quick:
        settings, usual = quick_settings(arguments.datasets, methods, settings), 1
    runs = run_benchmark(
        arguments.datasets,
        arguments.out,
        methods=methods,
        seeds=arguments.seeds or usual,
        jobs=arguments.jobs,
        fresh=arguments.fresh,
        settings=settings,
    )
    figures = benchmark_figures(runs, arguments.out)
    for name in filter(is_brains, arguments.datasets):
        figures += _benchmark_volumes(name, arguments, arguments.seeds or usual, settings)
    print((arguments.out / "table.md").read_text(encoding="utf-8"))
    print(f"Runs: {arguments.out / 'runs.csv'}\nTable: {arguments.out / 'table.md'}")
    print("Figures: " + ", ".join(str(path) for path in figures))
    return FINE


def _benchmark_volumes(name: str, arguments: argparse.Namespace, splits: int, settings: Any) -> list[Path]:
    """Judge harmonized volumes and t-maps of one cohort, and draw them."""
    from equipool.evaluate.volumes import run_volumes
    from equipool.report.volumes import volume_figures

    if name.endswith("-hard"):
        return []
    result = run_volumes(name, arguments.out, splits=splits, jobs=arguments.jobs, settings=settings)
    print(result.text)
    return volume_figures(result, arguments.out)


def _benchmark_harmonizers(arguments: argparse.Namespace) -> int:
    from equipool.evaluate.harmonizers import HARMONIZERS, read_pool, run_harmonizers
    from equipool.report.benchmark import frontier_figure
    from equipool.report.figures import save_figure

    if len(arguments.datasets) < 2:
        raise EquipoolError("Name the tables to compare harmonizers on, such as volumes.csv or simulated-0.")
    pools = {}
    for table in arguments.datasets[1:]:
        name, pool = read_pool(table, site=arguments.site, **roles(arguments))
        pools[name if name not in pools else table] = pool
    groups = {"all": HARMONIZERS}
    methods = tuple(dict.fromkeys(m for name in arguments.methods for m in groups.get(name, (name,))))
    folds = run_harmonizers(
        pools, arguments.out, methods=methods, repeats=arguments.repeats, jobs=arguments.jobs
    )
    figure = save_figure(frontier_figure(folds), arguments.out / "frontier.png")
    print((arguments.out / "harmonizers.md").read_text(encoding="utf-8"))
    print(f"Folds: {arguments.out / 'folds.csv'}\nFigure: {figure}")
    return FINE


def _select(arguments: argparse.Namespace) -> int:
    from equipool.data.datasets import require_dataset
    from equipool.evaluate.methods import METHODS
    from equipool.evaluate.selection import select

    require_dataset(arguments.dataset)
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise EquipoolError("Selection needs Optuna: pip install 'equipool[select]'.") from None
    select(
        arguments.dataset,
        arguments.out,
        methods=METHODS if arguments.methods == ["all"] else arguments.methods,
        trials=arguments.trials,
        tolerance=arguments.tolerance,
        jobs=arguments.jobs,
    )
    print(f"Settings: {arguments.out / 'settings.json'}\nTrials: {arguments.out / 'trials.csv'}")
    return FINE


def _datasets(arguments: argparse.Namespace) -> int:
    from equipool.data.datasets import load_dataset
    from equipool.data.uci import FILES, fetch

    for name in arguments.names:
        for file in (file for file in FILES if file.startswith(f"{name}.")):
            print(fetch(file))
        split = load_dataset(name)
        print(f"{name}: {len(split.train)} people to fit on, {len(split.test)} to judge on")
    return FINE


def _check(arguments: argparse.Namespace) -> int:
    preset_roles(arguments)
    if not arguments.site:
        arguments.refuse("name the column of the site with --site")
    from equipool.data import check

    if arguments.figure:
        from equipool.report.figures import check_figure_path, preflight_figure, save_figure

        check_figure_path(arguments.figure)
    people, images = read_people(arguments)
    report = check(
        people,
        site=arguments.site,
        images=images,
        mask=arguments.mask,
        missing=arguments.missing,
        **roles(arguments),
    )
    print(json.dumps(report.to_dict(), ensure_ascii=False, indent=2) if arguments.json else report)
    if arguments.figure:
        written = save_figure(preflight_figure(report), arguments.figure)
        print(f"Figure: {written}", file=sys.stderr)
    return FINE if report.ok else CANNOT_BE_POOLED


def _demo(arguments: argparse.Namespace) -> int:
    from equipool.report.demo import run_demo

    run_demo(arguments.out, overlap=arguments.overlap, seed=arguments.seed, force=arguments.force)
    return FINE


if __name__ == "__main__":
    sys.exit(main())
