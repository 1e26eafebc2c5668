"""The paper's Table 1: every method on every dataset with several seeds."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.benchmark.cohorts import is_brains, whole_cohort
from equipool.benchmark.layout import latex_table, markdown_table, mean_and_sd
from equipool.benchmark.methods import METHODS, Settings, make_method, settings_of, settings_text
from equipool.benchmark.runs import file_stem, fingerprint, run_all
from equipool.files import write_whole

VECTORS = 2000  # rows of τ that are saved for the figures

# Shown in the table, with the direction that is better.
COLUMNS = {
    "delta_eq": ("ΔEq", "high"),
    "adv": ("Adv %", "low"),
    "adv_auc": ("Adv AUC", "low"),
    "classifier_auc": ("best classifier AUC", "low"),
    "classifier_acc": ("its Adv %", "low"),
    "mmd": ("M ×100", "low"),
    "acc": ("ACC %", "high"),
}
BESIDE = ["permuted_low", "permuted_high", "dropped", "mmd_biased", "mmd_shuffled"]


def run_benchmark(
    datasets: Sequence[str],
    out: Path,
    *,
    methods: Sequence[str] = METHODS,
    seeds: int = 3,
    jobs: int | None = None,
    fresh: bool = False,
    settings: Settings | None = None,
) -> pd.DataFrame:
    """Run what is missing and write ``runs.csv``, ``table.csv``, ``table.md`` and ``table.tex``.

    Each run is a file under ``runs`` (:func:`.run_all`), so a killed benchmark resumes. ``settings`` replace
    :data:`equipool.benchmark.methods.SETTINGS`.
    """
    wanted = _wanted(datasets, out / "runs", methods, seeds, settings)
    for dataset in filter(is_brains, datasets):
        whole_cohort(dataset)  # simulated or read now, so that runs do not do it at the same time
    arguments = {path: (*key, settings) for path, key in wanted.items()}
    records = run_all(run_one, arguments, what="runs", jobs=jobs, fresh=fresh, describe=_described)
    runs = pd.DataFrame(records).assign(tau_file=[path.with_suffix(".npz").name for path in wanted])
    _write_tables(runs, out)
    return runs


def _wanted(
    datasets: Sequence[str], folder: Path, methods: Sequence[str], seeds: int, settings: Settings | None
) -> dict[Path, tuple[str, str, int]]:
    """Return dataset, method and seed of each run by its file; an unknown method is an error."""
    wanted = {}
    for dataset in datasets:
        for method in methods:
            estimator = make_method(method, 0, settings_of(dataset, method, settings))
            key = fingerprint(dataset, settings_text(estimator))
            for seed in range(seeds):
                wanted[folder / f"{file_stem(dataset)}-{method}-{seed}-{key}.json"] = dataset, method, seed
    return wanted


def run_one(dataset: str, method: str, seed: int, settings: Settings | None) -> tuple[dict[str, Any], bytes]:
    """Fit a method on a dataset; return its row of ``runs.csv``, and a file of τ and ages for the figures."""
    from equipool.benchmark.datasets import load_dataset

    data = load_dataset(dataset, seed)
    start = time.process_time()
    estimator = make_method(method, seed, settings_of(dataset, method, settings))
    train = data.train
    estimator.fit(data.x(train), train.y, site=train.site_labels, covariates=train.C)
    record = {"dataset": dataset, "method": method, "seed": seed} | _scores(estimator, data, seed, start)
    rows = np.linspace(0, len(data.test) - 1, min(len(data.test), VECTORS)).astype(int)
    part, content = data.test[rows], io.BytesIO()
    np.savez_compressed(content, tau=estimator.tau_vector(data.x(part)).astype(np.float32), age=part.C[:, 0])
    return record, content.getvalue()


def _scores(estimator: Any, data: Any, seed: int, start: float) -> dict[str, Any]:
    """Return all scores; site classifiers are fitted on training codes. Accuracies in percent, M times 100.

    ``mmd`` is the unbiased estimate, ``mmd_biased`` the V-statistic as in the paper's code, ``mmd_shuffled``
    the 95 % quantile of the unbiased estimate with shuffled sites.
    """
    from sklearn.metrics import balanced_accuracy_score

    from equipool.judge.classifiers import UNWEIGHTED, classify_site, shuffled_band
    from equipool.judge.scores import age_from_tau, delta_eq, discrepancy, equivariance_of

    test, train = data.test, data.train if data.classifier_train is None else data.classifier_train
    x, x_train = data.x(test), data.x(train)
    codes = estimator.transform(x_train), train.site_labels, estimator.transform(x), test.site_labels
    paper, *others = classify_site(*codes, classifiers=["paper", *UNWEIGHTED], seed=seed)
    best = max(others, key=lambda score: score.auc)
    low, high = shuffled_band(*codes, seed=seed)
    mmd = discrepancy(codes[2], test.site_labels, seed=seed)
    predicted = estimator.predict(x)
    tau, tau_train = estimator.tau_vector(x), estimator.tau_vector(x_train)
    age_r2, age_rank = age_from_tau(tau_train, train.C[:, 0], tau, test.C[:, 0])
    return {
        "delta_eq": delta_eq(tau, test.C),
        "adv": 100 * paper.accuracy,
        "adv_auc": paper.auc,
        "adv_chance": 100 * paper.chance,
        "mmd": 100 * mmd.unbiased,
        "acc": 100 * float((predicted == test.y).mean()),
        "seconds": time.process_time() - start,
        "classifier_auc": best.auc,
        "classifier_acc": 100 * best.accuracy,
        "classifier": best.classifier,
        "permuted_low": low,
        "permuted_high": high,
        "balanced_acc": 100 * float(balanced_accuracy_score(test.y, predicted)),
        "age_r2": age_r2,
        "age_rank": age_rank,
        "equivariance_error": equivariance_of(estimator, x),
        "dropped": float(getattr(estimator, "dropped_", 0.0)),
        "mmd_biased": 100 * mmd.biased,
        "mmd_shuffled": 100 * float(np.quantile(mmd.shuffled, 0.95)),
    }


def _described(record: dict[str, Any]) -> str:
    return (
        f"{record['dataset']} {record['method']} seed {record['seed']}: ACC {record['acc']:.1f}, best "
        f"classifier's AUC {record['classifier_auc']:.3f}, {record['seconds']:.0f} s"
    )


def best_rows(means: pd.DataFrame, column: str) -> pd.Series[bool]:
    """Return which methods are best in a column of means: AUC nearest to 0.5, M nearest to or below 0."""
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
    grouped = runs.groupby(["dataset", "method"], sort=False)[[*COLUMNS, *BESIDE]]
    means, spread = grouped.mean(), grouped.std(ddof=0)
    write_whole(out / "table.csv", means.join(spread.add_suffix("_std")).to_csv())
    markdown, latex = [], []
    for dataset, part in means.groupby(level="dataset", sort=False):
        cells = pd.DataFrame(index=part.index.get_level_values("method"))
        for column, (title, _) in COLUMNS.items():
            digits = 3 if "auc" in column else 2
            cells[title] = mean_and_sd(part[column], spread[column], digits, best_rows(part, column))
        chance = runs.loc[runs.dataset == dataset, "adv_chance"].mean()
        low, high = part["permuted_low"].mean(), part["permuted_high"].mean()
        note = (
            f"Majority site {chance:.1f} %; shuffled sites: AUC {low:.3f} to {high:.3f}, M below "
            f"{part['mmd_shuffled'].min():.2f} to {part['mmd_shuffled'].max():.2f}, by method, in 19 of 20 "
            "cases."
        )
        markdown.append(f"## {dataset}\n\n{markdown_table(cells)}\n\n{note}\n")
        latex.append(f"% {dataset}\n{latex_table(cells)}")
    write_whole(out / "table.md", "\n".join(markdown))
    write_whole(out / "table.tex", "\n".join(latex))
