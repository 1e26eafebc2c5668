"""The methods of the benchmark by name: the paper's seven, the steps from the paper to ours, and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipool.exceptions import InputError

# Raise it when an estimator or a harmonizer gives other results: benchmarks are then run again.
METHODS_VERSION = 1

Settings = Mapping[str, Mapping[str, Mapping[str, Any]]]

BASELINES = {
    "naive": "NaivePooler",
    "mmd": "MMDPooler",
    "cai": "CAIPooler",
    "ss": "SubsamplingPooler",
    "rm": "RandMatchPooler",
}
METHODS = (*BASELINES, "paper", "ours")

# From the paper's Algorithm 1 to ours: each step keeps those before it.
STEPS: dict[str, dict[str, Any]] = {
    "paper": {},
    "paper+frame": {"tau": "frame", "generator": "spread"},
    "paper+still": {"turning_planes": 1, "independence": 1.0},
    "paper+finetune": {"finetune": True},
    "paper+channel": {"power": 6.0},
    "paper+adversary": {"adversary": 0.5},
    "paper+bounded": {"bounded": True},
}
ABLATION = (*STEPS, "ours", "transported")


def _linear(hidden: int, weight_decay: float) -> dict[str, Any]:
    return {"encoder": "linear", "hidden": hidden, "weight_decay": weight_decay}


# Settings that differ from the defaults: dataset → method → parameters, "*" for all methods. German's are
# those of `equipool select german --trials 12 --tolerance 0.01`, see docs/experiments.md.
SETTINGS: Settings = {
    "german": {
        "*": {"steps": 400},
        "naive": _linear(128, 0.0),
        "mmd": {**_linear(128, 0.0), "invariance": 3.0},
        "cai": {**_linear(64, 5.0), "invariance": 1.0},
        "ss": {**_linear(128, 1.0), "invariance": 1.0},
        "rm": {"encoder": "mlp", "hidden": 64, "weight_decay": 1.0, "invariance": 1.0},
        "paper": {**_linear(64, 1.0), "mmd": 0.1, "latent_reconstruction": 0.1},
        "ours": {**_linear(64, 0.0), "power": 10.0, "adversary": 0.5, "mmd": 0.3},
    },
    # Few scans, many voxels: chosen on another simulated cohort, see docs/experiments.md.
    **{
        name: {"*": {"encoder": "components", "steps": 300, "learning_rate": 1e-2}}
        for name in ("adni-sim", "adni-sim-hard", "adcp-sim", "adcp-sim-hard")
    },
}


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
    """Read settings as :func:`equipool.benchmark.selection.select` writes them."""
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
