"""The paper's Table 1: every method on every dataset with several seeds, resumable, in parallel."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.exceptions import InputError
from equipool.files import write_whole

__all__ = ["METHODS", "Run", "best_rows", "run_benchmark", "run_one"]

# Shown in the table, with the direction that is better.
COLUMNS = {
    "delta_eq": ("ΔEq", "high"),
    "adv": ("Adv %", "low"),
    "adv_auc": ("Adv AUC", "low"),
    "reader_auc": ("best reader AUC", "low"),
    "mmd": ("M ×100", "low"),
    "acc": ("ACC %", "high"),
}

# Where a dataset needs others than the defaults: chosen on validation splits of its training people, see
# docs/experiments.md. German has 700 people to fit on, so all methods take fewer steps and weights decay.
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("german", "*"): {"steps": 400, "weight_decay": 5.0},
    ("german", "ours"): {"power": 10.0, "adversary": 0.2, "mmd": 1.0},
}

METHODS = ("naive", "mmd", "cai", "ss", "rm", "paper", "ours")


@dataclass(frozen=True)
class Run:
    """One row of ``runs.csv``: accuracies in percent, M times 100."""

    dataset: str
    method: str
    seed: int
    delta_eq: float
    adv: float
    adv_auc: float
    adv_chance: float
    mmd: float
    acc: float
    seconds: float
    reader_auc: float
    reader: str
    permuted_low: float
    permuted_high: float
    balanced_acc: float
    age_r2: float
    age_rank: float
    equivariance_error: float
    dropped: float


def run_benchmark(
    datasets: Sequence[str],
    out: Path,
    *,
    methods: Sequence[str] = METHODS,
    seeds: int = 3,
    jobs: int | None = None,
    fresh: bool = False,
) -> pd.DataFrame:
    """Run what is not there yet and write ``runs.csv``, ``table.csv``, ``table.md`` and ``table.tex``.

    Each run is a file of its own, written in one go, so a killed benchmark goes on where it stopped.
    """
    from joblib import Parallel, delayed

    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise InputError(f"There is no method {unknown[0]!r}; there are {', '.join(METHODS)}.")
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(d, m, s) for d in datasets for m in methods for s in range(seeds)]
    todo = [key for key in wanted if fresh or _read(folder, *key) is None]
    if len(todo) < len(wanted):
        _say(f"{len(wanted) - len(todo)} of {len(wanted)} runs are there already")
    start = time.perf_counter()
    parallel = Parallel(n_jobs=jobs or os.cpu_count(), return_as="generator_unordered")
    for done, run in enumerate(parallel(delayed(_run_and_write)(folder, *key) for key in todo), start=1):
        left = (time.perf_counter() - start) / done * (len(todo) - done)
        _say(
            f"[{done}/{len(todo)}] {run.dataset} {run.method} seed {run.seed}: ACC {run.acc:.1f}, "
            f"best reader's AUC {run.reader_auc:.3f}, {run.seconds:.0f} s; about {left / 60:.0f} min left"
        )
    runs = pd.DataFrame([asdict(_must_read(folder, *key)) for key in wanted])
    _write_tables(runs, out)
    return runs


def run_one(dataset: str, method: str, seed: int) -> Run:
    """Fit one method on one dataset with one seed, and judge it on the test people."""
    import torch
    from threadpoolctl import threadpool_limits

    from equipool.data.uci import load_dataset

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            data = load_dataset(dataset, seed)
            start = time.process_time()
            estimator = _make(method, seed, dataset)
            train = data.train
            estimator.fit(train.X, train.y, site=train.site_labels, covariates=train.C)
            return _judge(dataset, method, seed, estimator, data, start)
    finally:
        torch.set_num_threads(threads)


def _make(method: str, seed: int, dataset: str) -> Any:
    from equipool import models

    settings = SETTINGS.get((dataset, "*"), {}) | SETTINGS.get((dataset, method), {})
    if method in ("paper", "ours"):
        preset = {"paper": "paper", "ours": "default"}[method]
        return models.EquivariantPooler.from_preset(preset, random_state=seed, **settings)
    baselines = {
        "naive": models.NaivePooler,
        "mmd": models.MMDPooler,
        "cai": models.CAIPooler,
        "ss": models.SubsamplingPooler,
        "rm": models.RandMatchPooler,
    }
    return baselines[method](random_state=seed, **settings)


def _judge(dataset: str, method: str, seed: int, estimator: Any, data: Any, start: float) -> Run:
    """Compute every figure of a run: readers are fitted on training codes and read on test codes."""
    from sklearn.metrics import balanced_accuracy_score

    from equipool.evaluate.adversaries import paper_adversary, permuted_band, site_readers
    from equipool.evaluate.metrics import delta_eq, mmd_measure

    train, test = data.train, data.test
    codes = estimator.transform(train.X), train.site_labels, estimator.transform(test.X), test.site_labels
    adversary = paper_adversary(*codes, seed=seed)
    best = max(site_readers(*codes, seed=seed), key=lambda reading: reading.auc)
    low, high = permuted_band(*codes, seed=seed)
    said = estimator.predict(test.X)
    tau, tau_train = estimator.tau_vector(test.X), estimator.tau_vector(train.X)
    age_r2, age_rank = age_from(tau_train, train.C[:, 0], tau, test.C[:, 0])
    return Run(
        dataset=dataset,
        method=method,
        seed=seed,
        delta_eq=delta_eq(tau, test.C),
        adv=100 * adversary.accuracy,
        adv_auc=adversary.auc,
        adv_chance=100 * adversary.chance,
        mmd=100 * mmd_measure(codes[2], test.site_labels),
        acc=100 * float((said == test.y).mean()),
        seconds=time.process_time() - start,
        reader_auc=best.auc,
        reader=best.reader,
        permuted_low=low,
        permuted_high=high,
        balanced_acc=100 * float(balanced_accuracy_score(test.y, said)),
        age_r2=age_r2,
        age_rank=age_rank,
        equivariance_error=equivariance_of(estimator, test.X),
        dropped=float(getattr(estimator, "dropped_", 0.0)),
    )


def age_from(tau: Any, age: Any, tau_test: Any, age_test: Any) -> tuple[float, float]:
    """Return R² and rank correlation of the age as a ridge regression reads it from τ."""
    from scipy.stats import spearmanr
    from sklearn.linear_model import RidgeCV
    from sklearn.metrics import r2_score

    read = RidgeCV(np.logspace(-3, 3, 7)).fit(tau, age).predict(tau_test)
    return float(r2_score(age_test, read)), float(spearmanr(age_test, read).statistic)


def equivariance_of(estimator: Any, X: Any) -> float:
    """Return the largest relative error of Φ(ρ(t)ℓ) = ρ(t)Φ(ℓ) at people's latents; NaN without a Φ."""
    import torch

    from equipool.groups.testing import equivariance_error

    network = estimator.network_
    if not hasattr(network, "one"):
        return float("nan")
    one, two = network.one, network.two
    with torch.no_grad():
        latents = one.latent(estimator._scaled(np.asarray(X)[:512]).double())
    return equivariance_error(
        lambda latent: two.phi(*one.upright(latent)),
        one.action,
        out=two.out,
        inputs=latents,
        span=0.25,
    )


def best_rows(means: pd.DataFrame, column: str) -> pd.Series[bool]:
    """Say which methods are best in a column of a table of means.

    An AUC is best near 0.5 and M near 0: below is chance as much as above, and M below 0 counts as 0.
    """
    values = means[column]
    if COLUMNS[column][1] == "high":
        return values == values.max()
    if "auc" in column:
        values = (values - 0.5).abs()
    elif column == "mmd":
        values = values.clip(lower=0)
    return values == values.min()


def _write_tables(runs: pd.DataFrame, out: Path) -> None:
    """Write runs.csv, and the table of means with standard deviations as CSV, Markdown and LaTeX."""
    write_whole(out / "runs.csv", runs.to_csv(index=False))
    shown = list(COLUMNS)
    grouped = runs.groupby(["dataset", "method"], sort=False)[
        [*shown, "permuted_low", "permuted_high", "dropped"]
    ]
    means, spread = grouped.mean(), grouped.std(ddof=0)
    write_whole(out / "table.csv", means.join(spread.add_suffix("_std")).to_csv())
    markdown, latex = [], []
    for dataset, part in means.groupby(level="dataset", sort=False):
        cells = pd.DataFrame(index=part.index.get_level_values("method"))
        for column in shown:
            bold = best_rows(part, column).to_numpy()
            digits = 3 if "auc" in column else 2
            cells[COLUMNS[column][0]] = [
                f"{'**' if b else ''}{m:.{digits}f}{'**' if b else ''} ({s:.{digits}f})"
                for m, s, b in zip(part[column], spread.loc[part.index, column], bold, strict=True)
            ]
        chance = runs.loc[runs.dataset == dataset, "adv_chance"].mean()
        band = part[["permuted_low", "permuted_high"]].mean()
        note = (
            f"Majority site {chance:.1f} %; AUC with shuffled sites {band.iloc[0]:.3f} to {band.iloc[1]:.3f}."
        )
        markdown.append(f"## {dataset}\n\n{_markdown(cells)}\n\n{note}\n")
        latex.append(_latex(str(dataset), cells))
    write_whole(out / "table.md", "\n".join(markdown))
    write_whole(out / "table.tex", "\n".join(latex))


def _markdown(cells: pd.DataFrame) -> str:
    lines = ["| method | " + " | ".join(cells.columns) + " |", "|---" * (len(cells.columns) + 1) + "|"]
    lines += [
        f"| {method} | " + " | ".join(row) + " |"
        for method, row in zip(cells.index, cells.to_numpy(), strict=True)
    ]
    return "\n".join(lines)


def _latex(dataset: str, cells: pd.DataFrame) -> str:
    def cell(text: str) -> str:
        head, tail = text.split(" ", 1)
        return (rf"\textbf{{{head[2:-2]}}}" if head.startswith("**") else head) + " " + tail

    names = [
        str(name).replace("%", r"\%").replace("ΔEq", r"$\Delta_{Eq}$").replace("×", r"$\times$")
        for name in map(str, cells)
    ]
    lines = [rf"% {dataset}", rf"\begin{{tabular}}{{l{'r' * len(names)}}}", r"\toprule"]
    lines.append(" & ".join(["method", *names]) + r" \\ \midrule")
    lines += [
        " & ".join([str(m), *map(cell, row)]) + r" \\"
        for m, row in zip(cells.index, cells.to_numpy(), strict=True)
    ]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _settings(method: str, dataset: str) -> str:
    """Return a fingerprint of a method's settings: a run with others is not taken for this one."""
    from equipool import __version__

    settings = repr(sorted(_make(method, 0, dataset).get_params().items())) + __version__
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def _run_and_write(folder: Path, dataset: str, method: str, seed: int) -> Run:
    run = run_one(dataset, method, seed)
    record = {"settings": _settings(method, dataset), **asdict(run)}
    write_whole(_path(folder, dataset, method, seed), json.dumps(record))
    return run


def _path(folder: Path, dataset: str, method: str, seed: int) -> Path:
    return folder / f"{dataset}-{method}-{seed}.json"


def _read(folder: Path, dataset: str, method: str, seed: int) -> Run | None:
    """Return an earlier run with the same settings, if there is one."""
    path = _path(folder, dataset, method, seed)
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    return Run(**record) if record.pop("settings") == _settings(method, dataset) else None


def _must_read(folder: Path, dataset: str, method: str, seed: int) -> Run:
    run = _read(folder, dataset, method, seed)
    if run is None:
        raise InputError(f"The run {dataset} {method} {seed} in {folder} was changed while it was read.")
    return run


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
