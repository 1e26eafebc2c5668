"""Choosing settings as the paper does: among the accurate ones, the most invariant.

Every setting is evaluated on validation splits of the training rows. Among those whose accuracy is within a
tolerance (5 % in the paper) of the best, the one is chosen whose codes predict the site worst.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.benchmark import datasets
from equipool.benchmark.methods import METHODS, SETTINGS, make_method, read_settings, settings_text
from equipool.benchmark.runs import fingerprint, run_all
from equipool.exceptions import InputError
from equipool.files import write_json, write_whole
from equipool.judge.classifiers import classify_site
from equipool.progress import Progress, duration, say

# The search space of all methods, and of each.
SPACE: dict[str, dict[str, list[Any]]] = {
    "*": {"encoder": ["mlp", "linear"], "hidden": [64, 128], "weight_decay": [0.0, 1.0, 5.0]},
    "naive": {},
    **{method: {"invariance": [0.1, 0.3, 1.0, 3.0]} for method in ("mmd", "cai", "ss", "rm")},
    "paper": {"mmd": [0.03, 0.1, 0.3, 1.0], "latent_reconstruction": [0.01, 0.1]},
    "ours": {"power": [6.0, 10.0, 14.0], "adversary": [0.1, 0.2, 0.5], "mmd": [0.3, 1.0, 3.0]},
}


def search_space(method: str) -> dict[str, list[Any]]:
    """Return the values that are tried for each parameter of a method."""
    if method not in METHODS:
        raise InputError(f"There is no method {method!r} to select; there are {', '.join(METHODS)}.")
    return {**SPACE["*"], **SPACE[method]}


def select(
    dataset: str,
    out: Path,
    *,
    methods: Sequence[str] = METHODS,
    trials: int = 20,
    tolerance: float = 0.05,
    seeds: int = 3,
    splits: int = 2,
    jobs: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Search settings for each method; write ``trials.csv`` and ``settings.json``, and return the settings.

    Each fit is a file under ``trials`` (:func:`.run_all`), so a killed search resumes and ends with the
    settings of an uninterrupted one. ``equipool benchmark --settings`` takes the file.
    """
    if not 0 <= tolerance < 1:
        raise InputError(f"tolerance must be a share of the best accuracy, from 0 to 1. Got {tolerance}.")
    if trials < 1:
        raise InputError(f"trials must be at least 1. Got {trials}.")
    for method in methods:
        search_space(method)
    parts = [(seed, split) for seed in range(seeds) for split in range(splits)]
    chosen: dict[str, Any] = {}
    tables = []
    for method in methods:
        table = _search(dataset, method, out / "trials", trials, parts, jobs)
        best = choose(table, tolerance)
        table.insert(0, "method", method)
        tables.append(table.assign(chosen=table.index == best))
        row = table.loc[best]
        chosen[method] = row["parameters"]
        say(f"{method}: ACC {row['acc']:.1f}, AUC {row['auc']:.3f} with {chosen[method]}")
    searched = pd.concat(tables)
    searched["parameters"] = searched["parameters"].map(json.dumps)
    write_whole(out / "trials.csv", searched.to_csv(index=False))
    path = out / "settings.json"
    # Settings of other methods and datasets, from an earlier search, are kept.
    settings = dict(read_settings(path)) if path.is_file() else {}
    settings[dataset] = {**settings.get(dataset, {}), **chosen}
    write_json(path, settings)
    return chosen


def choose(table: pd.DataFrame, tolerance: float) -> int:
    """Return the row with the AUC nearest to 0.5 among those within the tolerance of the best accuracy."""
    accurate = table[table["acc"] >= (1 - tolerance) * table["acc"].max()]
    return int((accurate["auc"] - 0.5).abs().idxmin())


def _search(
    dataset: str, method: str, folder: Path, trials: int, parts: list[tuple[int, int]], jobs: int | None
) -> pd.DataFrame:
    """Run the trials of one method; earlier ones are read, and lead to the same next ones."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study, space = optuna.create_study(directions=["maximize", "minimize"]), search_space(method)
    progress, rows = Progress(method, trials), []
    for k in range(trials):
        # Seeded by the number of the trial, so that a killed search resumes as it would have continued.
        study.sampler = optuna.samplers.TPESampler(seed=k, multivariate=True)
        trial = study.ask()
        searched = {name: trial.suggest_categorical(name, values) for name, values in space.items()}
        parameters = {**SETTINGS.get(dataset, {}).get("*", {}), **searched}
        settings, wanted = settings_text(make_method(method, 0, parameters)), {}
        for part in parts:
            path = folder / f"{dataset}-{method}-{fingerprint(dataset, settings, *part)}.json"
            wanted[path] = (dataset, method, parameters, *part)
        acc, auc = np.mean(run_all(_judge, wanted, jobs=jobs), axis=0).tolist()
        study.tell(trial, [acc, abs(auc - 0.5)])
        rows.append({"acc": acc, "auc": auc, "parameters": parameters})
        say(
            f"[{k + 1}/{trials}] {dataset} {method}: ACC {acc:.1f}, AUC {auc:.3f} {parameters}; "
            f"about {duration(progress.remaining(k + 1))} left for {method}"
        )
    return pd.DataFrame(rows)


def _judge(dataset: str, method: str, changes: Mapping[str, Any], seed: int, split: int) -> list[float]:
    """Fit on a part of the training rows; return the accuracy in percent and the best AUC on the others."""
    data = datasets.load_dataset(dataset, seed)
    rows = data.train.split(0.25, stratify=("site", "target"), random_state=1000 + split)
    fit, rest = (data.train[part] for part in rows)
    x, x_rest = data.x(fit), data.x(rest)
    estimator = make_method(method, seed, changes)
    estimator.fit(x, fit.y, site=fit.site_labels, covariates=fit.C)
    codes = estimator.transform(x), fit.site_labels, estimator.transform(x_rest), rest.site_labels
    auc = max(score.auc for score in classify_site(*codes, seed=seed))
    return [100 * float((estimator.predict(x_rest) == rest.y).mean()), auc]
