"""The methods of the benchmark by name: the paper's seven, the steps from the paper to ours, and settings.

Settings are chosen as the paper does: every setting is evaluated on validation splits of the training rows.
Among those whose accuracy is within a tolerance (5 % in the paper) of the best, the one is chosen whose codes
predict the site worst.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.benchmark import datasets as data_of
from equipool.benchmark.runs import fingerprint, run_all
from equipool.exceptions import InputError
from equipool.files import packaged, write_json, write_whole
from equipool.judge.classifiers import classify_site
from equipool.progress import Progress, duration, say

Settings = Mapping[str, Mapping[str, Mapping[str, Any]]]

TABLES = packaged("benchmark", "methods.toml")
BASELINES: dict[str, str] = TABLES["baselines"]
STEPS: dict[str, dict[str, Any]] = TABLES["steps"]  # from the paper's Algorithm 1 to ours
SETTINGS: Settings = TABLES["settings"]
SPACE: dict[str, dict[str, list[Any]]] = TABLES["space"]
METHODS = (*BASELINES, "paper", "ours")
ABLATION = (*STEPS, "ours", "transported")


def settings_of(dataset: str, method: str, settings: Settings | None = None) -> dict[str, Any]:
    """Return the parameters of a method on a dataset that differ from its defaults.

    Methods that ``settings`` does not name keep :data:`SETTINGS`, or the comparison would be unfair.
    """
    default = SETTINGS.get(f"{dataset.partition(':')[0]}-sim" if ":" in dataset else dataset, {})
    chosen = {**default, **(settings or {}).get(dataset, {})}
    return {**chosen.get("*", {}), **chosen.get(method, {})}


def quick_settings(datasets: Sequence[str], methods: Sequence[str], settings: Settings | None) -> Settings:
    """Return settings with a third of the steps, for a quick trial."""

    def quick(usual: dict[str, Any]) -> dict[str, Any]:
        return {**usual, "steps": max(int(usual.get("steps", 1500)) // 3, 1)}

    return {name: {m: quick(settings_of(name, m, settings)) for m in methods} for name in datasets}


def read_settings(path: Path) -> Settings:
    """Read settings as :func:`select` writes them."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the DIR/settings.json that `equipool select` wrote.")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        for dataset, methods in settings.items():
            for method in methods:
                changes = settings_of(dataset, method, settings)
                if method != "*":
                    make_method(method, 0, changes)
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(
            f"{path} holds no settings ({error}); give JSON such as "
            '{"german": {"ours": {"power": 10.0}}}, as `equipool select` writes it.'
        ) from error
    return settings


def make_method(method: str, seed: int, changes: Mapping[str, Any]) -> Any:
    """Return an unfitted estimator by its name in the table."""
    from equipool import estimators as models

    if method in BASELINES:
        return getattr(models, BASELINES[method])(random_state=seed, **changes)
    if method in ("ours", "transported"):
        match = {"match": "transported"} if method == "transported" else {}
        return models.EquivariantPooler(random_state=seed, **{**changes, **match})
    if method in STEPS:
        names = list(STEPS)
        steps = {k: v for name in names[: names.index(method) + 1] for k, v in STEPS[name].items()}
        return models.EquivariantPooler.from_preset("paper", random_state=seed, **{**changes, **steps})
    raise InputError(f"There is no method {method!r}; there are {', '.join([*METHODS, *ABLATION[1:-2]])}.")


def settings_text(estimator: Any) -> str:
    """Return the class and all parameters of an estimator, but for its random state."""
    parameters = {k: v for k, v in estimator.get_params().items() if k != "random_state"}
    return repr((type(estimator).__name__, sorted(parameters.items())))


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
    chosen: dict[str, Any] = {}
    tables = []
    for method in methods:
        table = _search(dataset, method, out / "trials", trials, jobs)
        best = choose(table, tolerance)
        parameters = table["parameters"].map(json.dumps)
        tables.append(table.assign(chosen=table.index == best, parameters=parameters))
        row = table.loc[best]
        chosen[method] = row["parameters"]
        say(f"{method}: ACC {row['acc']:.1f}, AUC {row['auc']:.3f} with {chosen[method]}")
    write_whole(out / "trials.csv", pd.concat(tables).to_csv(index=False))
    path = out / "settings.json"
    # Settings of other methods and datasets, from an earlier search, are kept.
    settings = dict(read_settings(path)) if path.is_file() else {}
    write_json(path, {**settings, dataset: {**settings.get(dataset, {}), **chosen}})
    return chosen


def choose(table: pd.DataFrame, tolerance: float) -> int:
    """Return the row with the AUC nearest to 0.5 among those within the tolerance of the best accuracy."""
    accurate = table[table["acc"] >= (1 - tolerance) * table["acc"].max()]
    return int((accurate["auc"] - 0.5).abs().idxmin())


def _search(dataset: str, method: str, folder: Path, trials: int, jobs: int | None) -> pd.DataFrame:
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
        for part in product(range(3), range(2)):  # seeds and validation splits
            path = folder / f"{dataset}-{method}-{fingerprint(dataset, settings, *part)}.json"
            wanted[path] = (dataset, method, parameters, *part)
        acc, auc = np.mean(run_all(_judge, wanted, jobs=jobs), axis=0).tolist()
        study.tell(trial, [acc, abs(auc - 0.5)])
        rows.append({"method": method, "acc": acc, "auc": auc, "parameters": parameters})
        say(
            f"[{k + 1}/{trials}] {dataset} {method}: ACC {acc:.1f}, AUC {auc:.3f} {parameters}; "
            f"about {duration(progress.remaining(k + 1))} left for {method}"
        )
    return pd.DataFrame(rows)


def _judge(dataset: str, method: str, changes: Mapping[str, Any], seed: int, split: int) -> list[float]:
    """Fit on a part of the training rows; return the accuracy in percent and the best AUC on the others."""
    data = data_of.load_dataset(dataset, seed)
    rows = data.train.split(0.25, stratify=("site", "target"), random_state=1000 + split)
    fit, rest = (data.train[part] for part in rows)
    x, x_rest = data.x(fit), data.x(rest)
    estimator = make_method(method, seed, changes)
    estimator.fit(x, fit.y, site=fit.site_labels, covariates=fit.C)
    codes = estimator.transform(x), fit.site_labels, estimator.transform(x_rest), rest.site_labels
    auc = max(score.auc for score in classify_site(*codes, seed=seed))
    return [100 * float((estimator.predict(x_rest) == rest.y).mean()), auc]
