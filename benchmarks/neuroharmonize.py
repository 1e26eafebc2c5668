"""neuroHarmonize, which needs an older numpy than equipool, scored on the same folds as everybody else.

    python -m venv older && older/bin/pip install neuroHarmonize 'numpy<2' 'pandas<2.2'
    python benchmarks/neuroharmonize.py older/bin/python simulated-1 simulated-0.5 simulated-0
    python benchmarks/neuroharmonize.py older/bin/python volumes.csv --site scanner --covariate age

Its two functions run in that environment, in a process for each fold; the judging is equipool's. Prints the
rows `neuroharmonize` (linear age) and `neuroharmonize-gam` (smooth age) beside `ours`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SCORES = ("adv", "adv_age", "age", "lso", "auc", "auc_within", "clean", "broken")


def worker(folder: Path, smooth: bool) -> None:
    """Learn and apply, inside the older environment: numpy, pandas and neuroHarmonize alone."""
    import pandas as pd
    from neuroHarmonize import harmonizationApply, harmonizationLearn

    parts = {}
    for part in ("train", "test"):
        with np.load(folder / f"{part}.npz", allow_pickle=False) as file:
            table = pd.DataFrame(file["c"], columns=[f"c{k}" for k in range(file["c"].shape[1])])
            parts[part] = file["x"], table.assign(SITE=file["site"])
    # Its splines refuse ages beyond those of training, so they are told the range of all.
    ages = [parts[part][1]["c0"] for part in parts]
    bounds = min(a.min() for a in ages), max(a.max() for a in ages)
    smoothed = {"smooth_terms": ["c0"], "smooth_term_bounds": bounds} if smooth else {}
    model, _ = harmonizationLearn(*parts["train"], **smoothed)
    np.save(folder / "result.npy", harmonizationApply(*parts["test"], model))


class Elsewhere:
    """neuroHarmonize in another interpreter, behind the interface of our harmonizer."""

    def __init__(self, python: str, smooth: bool) -> None:
        self.python, self.smooth = python, smooth

    def fit(self, X: Any, *, site: Any, covariates: Any) -> Elsewhere:
        """Keep the training people."""
        self.train = X, site, covariates
        return self

    def transform(self, X: Any, *, site: Any, covariates: Any) -> Any:
        """Learn and apply in the other interpreter; NaN where it fails."""
        with tempfile.TemporaryDirectory() as work:
            for part, (x, s, c) in {"train": self.train, "test": (X, site, covariates)}.items():
                np.savez(Path(work) / f"{part}.npz", x=np.asarray(x, float), site=np.asarray(s, str), c=c)
            call = [self.python, __file__, "--worker", work] + ["--smooth"] * self.smooth
            ended = subprocess.run(call, capture_output=True, text=True)
            if ended.returncode:
                print(ended.stderr.strip().splitlines()[-1], file=sys.stderr)
                return np.full(np.shape(X), np.nan)
            return np.load(Path(work) / "result.npy", allow_pickle=False)


def compare(arguments: argparse.Namespace) -> None:
    from equipool.benchmark.harmonizers import make_harmonizer, read_pool, score_fold

    print("| table | method | " + " | ".join(SCORES) + " |\n" + "|---" * (len(SCORES) + 2) + "|")
    for table in arguments.tables:
        name, pool, _ = read_pool(
            table, site=arguments.site, covariates=arguments.covariate, target=arguments.target
        )
        methods = {
            "neuroharmonize": Elsewhere(arguments.python, smooth=False),
            "neuroharmonize-gam": Elsewhere(arguments.python, smooth=True),
            "ours": make_harmonizer("ours"),
        }
        found = []
        for repeat in range(arguments.repeats):
            for fold in range(5):
                found += score_fold(pool, name, repeat, fold, methods)
        for method in methods:
            own = [score for score in found if score["method"] == method]
            cells = [f"{np.mean([score[key] for score in own]):.3f}" for key in SCORES]
            print(f"| {name} | {method} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", nargs="?", help="the interpreter that has neuroHarmonize")
    parser.add_argument("tables", nargs="*", help="paths, or simulated-OVERLAP")
    parser.add_argument("--site")
    parser.add_argument("--covariate", nargs="+", default=[])
    parser.add_argument("--target")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--smooth", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.smooth)
    elif not arguments.python or not arguments.tables:
        parser.error("name the interpreter that has neuroHarmonize, and the tables")
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
