"""Work that is done once, and tables of it as text.

Each result is a file named by a hash of its inputs, so that killed runs resume. A table has one row a method;
a cell in bold begins with ``**``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import joblib
import pandas as pd

from equipool.files import read_json, write_whole
from equipool.judge.scores import SCORES_VERSION
from equipool.parallel import fan_out
from equipool.progress import Progress, duration, say
from equipool.simulate.brains import BRAINS_VERSION
from equipool.version import __version__

# Raise it when an estimator or a harmonizer gives other results: benchmarks are then run again.
METHODS_VERSION = 2


def fingerprint(*parts: Any) -> str:
    """Return a hash of the parts and of the versions of the code that computes results.

    Raise ``METHODS_VERSION``, ``SCORES_VERSION`` or ``BRAINS_VERSION`` when results change.
    """
    return joblib.hash((__version__, METHODS_VERSION, SCORES_VERSION, BRAINS_VERSION, *parts))[:16]


def run_all(
    task: Callable[..., Any],
    wanted: Mapping[Path, tuple[Any, ...]],
    *,
    what: str = "",
    jobs: int | None = None,
    fresh: bool = False,
    describe: Callable[[Any], str] | None = None,
) -> list[Any]:
    """Return the results of all tasks in order; those whose file exists are not run again, unless ``fresh``.

    ``wanted`` has the arguments of each task by the file of its result. ``task`` is a function of a module
    that returns what JSON can hold, or that and the bytes of a ``.npz`` file to keep beside; it is fanned out
    over cores or a cluster (:mod:`equipool.parallel`). For messages, ``what`` names the tasks, and
    ``describe`` gives one line on a result.
    """
    results = {path: None if fresh else read_json(path) for path in wanted}
    todo = [path for path, result in results.items() if result is None]
    if what and len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {len(wanted)} {what} are there already")
    progress = Progress(what, len(todo))
    finished = fan_out(_with_path, ((task, path, wanted[path]) for path in todo), jobs=jobs)
    for done, (path, result) in enumerate(finished, start=1):
        if isinstance(result, tuple):
            result, beside = result
            write_whole(path.with_suffix(".npz"), beside)
        write_whole(path, json.dumps(result))
        results[path] = result
        if what:
            line = what if describe is None else describe(result)
            say(f"[{done}/{len(todo)}] {line}; about {duration(progress.remaining(done))} left")
    return list(results.values())


def file_stem(dataset: str) -> str:
    """Return a dataset's name for file names: for a folder its last part and a hash of its path."""
    kind, _, place = dataset.partition(":")
    if not place:
        return kind
    folder = Path(place).resolve()
    return f"{kind}-{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def _with_path(task: Callable[..., Any], path: Path, arguments: tuple[Any, ...]) -> tuple[Path, Any]:
    return path, task(*arguments)


def mean_and_sd(
    means: pd.Series[float], sds: pd.Series[float], digits: int, bold: pd.Series[bool] | None = None
) -> list[str]:
    """Return cells of means and standard deviations, those of ``bold`` rows in bold."""
    stars = [""] * len(means) if bold is None else ["**" * best for best in bold]
    rows = zip(stars, means, sds.reindex(means.index), strict=True)
    return [f"{star}{mean:.{digits}f}{star} ({sd:.{digits}f})" for star, mean, sd in rows]


def markdown_table(cells: pd.DataFrame, first: str = "method") -> str:
    """Return a Markdown table with the index as its first column."""
    rows = [[first, *cells.columns], *cells.reset_index().to_numpy().tolist()]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
