"""Choosing settings as the paper does: accurate enough first, then as invariant as can be.

Every setting is judged on validation splits of the training rows; test rows are never used. Among those whose
accuracy is within a tolerance (5 % in the paper) of the best, the one is taken whose codes predict the site
worst.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from equipool.benchmark.methods import METHODS, make_method, read_settings, settings_text
from equipool.benchmark.runs import fingerprint
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.parallel import fan_out
from equipool.progress import Progress, duration, say

if TYPE_CHECKING:
    import optuna

__all__ = ["SPACE", "choose", "search_space", "select"]

# The whole search space: for all methods, and for each.
SPACE: dict[str, dict[str, list[Any]]] = {
    "*": {"encoder": ["mlp", "linear"], "hidden": [64, 128], "weight_decay": [0.0, 1.0, 5.0]},
    "naive": {},
    "mmd": {"invariance": [0.1, 0.3, 1.0, 3.0]},
    "cai": {"invariance": [0.1, 0.3, 1.0, 3.0]},
    "ss": {"invariance": [0.1, 0.3, 1.0, 3.0]},
    "rm": {"invariance": [0.1, 0.3, 1.0, 3.0]},
    "paper": {"mmd": [0.03, 0.1, 0.3, 1.0], "latent_reconstruction": [0.01, 0.1]},
    "ours": {"power": [6.0, 10.0, 14.0], "adversary": [0.1, 0.2, 0.5], "mmd": [0.3, 1.0, 3.0]},
}

# Not searched: as many steps as a dataset of its size needs.
STEPS = {"german": 400}


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

    Trials are kept in a journal for each method, so a killed search goes on where it stopped and ends with
    the settings of an uninterrupted one. ``equipool benchmark --settings`` takes the file.
    """
    if not 0 <= tolerance < 1:
        raise InputError(f"tolerance must be a share of the best accuracy, from 0 to 1. Got {tolerance}.")
    if trials < 1:
        raise InputError(f"trials must be at least 1. Got {trials}.")
    spaces = {method: search_space(method) for method in methods}
    out.mkdir(parents=True, exist_ok=True)
    chosen: dict[str, dict[str, Any]] = {}
    tables = []
    for method, space in spaces.items():
        table = _search(dataset, method, space, out, trials=trials, seeds=seeds, splits=splits, jobs=jobs)
        best = choose(table, tolerance)
        table.insert(0, "method", method)
        tables.append(table.assign(chosen=table.index == best))
        row = table.loc[best]
        chosen[method] = {**_fixed(dataset), **row["parameters"]}
        say(f"{method}: ACC {row['acc']:.1f}, AUC {row['auc']:.3f} with {chosen[method]}")
    trials_of_all = pd.concat(tables)
    trials_of_all["parameters"] = [json.dumps(parameters) for parameters in trials_of_all["parameters"]]
    write_whole(out / "trials.csv", trials_of_all.to_csv(index=False))
    path = out / "settings.json"
    # Settings of other methods and datasets, from an earlier search, stay.
    settings = dict(read_settings(path)) if path.is_file() else {}
    settings[dataset] = {**settings.get(dataset, {}), **chosen}
    write_whole(path, json.dumps(settings, indent=2) + "\n")
    return chosen


def choose(table: pd.DataFrame, tolerance: float) -> int:
    """Return the row that is nearest to an AUC of 0.5 among those within the tolerance of the best accuracy.

    Examples
    --------
    >>> trials = pd.DataFrame({"acc": [80.0, 77.0, 70.0], "auc": [0.8, 0.6, 0.5]})
    >>> choose(trials, 0.05), choose(trials, 0.0)
    (1, 0)
    """
    accurate = table[table["acc"] >= (1 - tolerance) * table["acc"].max()]
    return int((accurate["auc"] - 0.5).abs().idxmin())


def _search(
    dataset: str,
    method: str,
    space: Mapping[str, list[Any]],
    out: Path,
    *,
    trials: int,
    seeds: int,
    splits: int,
    jobs: int | None,
) -> pd.DataFrame:
    """Run the trials that the journal does not hold yet; return all."""
    import optuna

    parts = [(seed, split) for seed in range(seeds) for split in range(splits)]
    study = _study(out / f"{dataset}-{method}.journal", _name(dataset, method, space, parts))
    progress = Progress(method, trials - len(_complete(study)))
    while len(done := _complete(study)) < trials:
        # Seeded by the number of trials, so that a search that was killed goes on as it would have.
        study.sampler = optuna.samplers.TPESampler(seed=len(done), multivariate=True)
        trial = study.ask()
        parameters = {name: trial.suggest_categorical(name, values) for name, values in space.items()}
        changes = {**_fixed(dataset), **parameters}
        # Sorted, whichever came first: sums of floats depend on the order.
        judged = sorted(fan_out(_judge, ((dataset, method, changes, *part) for part in parts), jobs=jobs))
        acc, auc = np.mean(judged, axis=0).tolist()
        trial.set_user_attr("acc", acc)
        trial.set_user_attr("auc", auc)
        study.tell(trial, [acc, abs(auc - 0.5)])
        left = progress.remaining(progress.total - (trials - len(done) - 1))
        say(
            f"[{len(done) + 1}/{trials}] {dataset} {method}: ACC {acc:.1f}, AUC {auc:.3f} {parameters}; "
            f"about {duration(left)} left for {method}"
        )
    trials_done = _complete(study)[:trials]
    table = pd.DataFrame([trial.user_attrs for trial in trials_done], columns=["acc", "auc"])
    return table.assign(parameters=[trial.params for trial in trials_done])


def _study(journal: Path, name: str) -> optuna.Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # The lock by opening a file works where links do not, and is not left behind on the disk of a cluster.
    backend = JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal)))
    return optuna.create_study(
        storage=JournalStorage(backend),
        study_name=name,
        directions=["maximize", "minimize"],
        load_if_exists=True,
    )


def _complete(study: optuna.Study) -> list[Any]:
    import optuna

    return study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])


def _name(dataset: str, method: str, space: Mapping[str, list[Any]], parts: Sequence[Any]) -> str:
    """Name a study by all that decides its trials; others start another study in the same file."""
    settings = settings_text(make_method(method, 0, _fixed(dataset)))
    return f"{dataset}-{method}-{fingerprint(dataset, sorted(space.items()), list(parts), settings)}"


def _fixed(dataset: str) -> dict[str, Any]:
    return {"steps": STEPS[dataset]} if dataset in STEPS else {}


def _judge(
    dataset: str, method: str, changes: Mapping[str, Any], seed: int, split: int
) -> tuple[float, float]:
    """Fit on a part of the training rows; return accuracy in percent and the best AUC on the rest."""
    from equipool.benchmark.datasets import load_dataset
    from equipool.judge.classifiers import classify_site

    pool = load_dataset(dataset, seed).train
    rows, others = pool.split(0.25, stratify=("site", "target"), random_state=1000 + split)
    fit, rest = pool[rows], pool[others]
    estimator = make_method(method, seed, changes)
    estimator.fit(fit.X, fit.y, site=fit.site_labels, covariates=fit.C)
    codes = estimator.transform(fit.X), fit.site_labels, estimator.transform(rest.X), rest.site_labels
    auc = max(score.auc for score in classify_site(*codes, seed=seed))
    return 100 * float((estimator.predict(rest.X) == rest.y).mean()), auc
