"""The paper's Table 1: every method on every dataset with several seeds."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import balanced_accuracy_score

from equipool.benchmark import datasets as data_of
from equipool.benchmark.methods import METHODS, Settings, make_method, settings_of, settings_text
from equipool.benchmark.runs import file_stem, fingerprint, markdown_table, mean_and_sd, run_all
from equipool.files import packaged, read_json, write_whole
from equipool.judge.classifiers import UNWEIGHTED, classify_site, shuffled_band
from equipool.judge.scores import age_from_tau, delta_eq, discrepancy, equivariance_of

USUAL_SECONDS = {"german": 10.0, "adult": 65.0, "adni": 35.0, "adcp": 15.0}  # a run on one core
VECTORS = 2000  # rows of τ that are saved for the figures

# The columns that are shown: title, and the direction that is better.
COLUMNS: dict[str, tuple[str, str]] = packaged("benchmark", "tables.toml")["table1"]
SUMMARY = "{dataset} {method} seed {seed}: ACC {acc:.1f}, best AUC {classifier_auc:.3f}, {seconds:.0f} s"
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
    """Run what is missing; write ``runs.csv``, and means with standard deviations, ``table.csv`` and ``.md``.

    Each run is a file under ``runs`` (:func:`.run_all`), so a killed benchmark resumes. ``settings`` replace
    :data:`equipool.benchmark.methods.SETTINGS`.
    """
    wanted = _wanted(datasets, out / "runs", methods, seeds, settings)
    for cohort in filter(data_of.is_brains, datasets):
        # Simulated or read now, so that runs do not do it at the same time.
        data_of.whole_cohort(cohort.removesuffix("-hard"))
    records = run_all(run_one, wanted, what="runs", jobs=jobs, fresh=fresh, describe=SUMMARY.format_map)
    runs = pd.DataFrame(records).assign(tau_file=[path.with_suffix(".npz").name for path in wanted])
    write_whole(out / "runs.csv", runs.to_csv(index=False))
    grouped = runs.groupby(["dataset", "method"], sort=False)[[*COLUMNS, *BESIDE]]
    means, spread = grouped.mean(), grouped.std(ddof=0)
    write_whole(out / "table.csv", means.join(spread.add_suffix("_std")).to_csv())
    markdown = []
    for name, part in means.groupby(level="dataset", sort=False):
        cells = pd.DataFrame(index=part.index.get_level_values("method"))
        for column, (title, _) in COLUMNS.items():
            digits = 3 if "auc" in column else 2
            cells[title] = mean_and_sd(part[column], spread[column], digits, best_rows(part, column))
        chance = runs.loc[runs.dataset == name, "adv_chance"].mean()
        low, high = part["permuted_low"].mean(), part["permuted_high"].mean()
        least, most = part["mmd_shuffled"].min(), part["mmd_shuffled"].max()
        markdown.append(
            f"## {name}\n\n{markdown_table(cells)}\n\nMajority site {chance:.1f} %; shuffled sites: AUC "
            f"{low:.3f} to {high:.3f}, M below {least:.2f} to {most:.2f}, by method, in 19 of 20 cases.\n"
        )
    write_whole(out / "table.md", "\n".join(markdown))
    return runs


def expected_runs(datasets: Sequence[str], out: Path, *, fresh: bool, **which: Any) -> tuple[int, int, float]:
    """Return how many runs :func:`run_benchmark` needs, how many are missing, and their CPU seconds.

    These are estimated by the median of a dataset's finished runs, or :data:`USUAL_SECONDS`.
    """
    wanted = _wanted(datasets, out / "runs", **which)
    finished = {path: record for path in wanted if (record := read_json(path)) is not None}
    each = {}
    for name in datasets:
        seconds = [record["seconds"] for record in finished.values() if record["dataset"] == name]
        usual = USUAL_SECONDS[name.partition(":")[0].partition("-")[0]]
        each[name] = float(np.median(seconds)) if seconds else usual
    todo = [dataset for path, (dataset, *_) in wanted.items() if fresh or path not in finished]
    return len(wanted), len(todo), sum(each[dataset] for dataset in todo)


def _wanted(
    datasets: Sequence[str], folder: Path, methods: Sequence[str], seeds: int, settings: Settings | None
) -> dict[Path, tuple[str, str, int, Settings | None]]:
    """Return the arguments of each run by its file; an unknown method is an error."""
    wanted = {}
    for dataset, method in product(datasets, methods):
        estimator = make_method(method, 0, settings_of(dataset, method, settings))
        key = fingerprint(dataset, settings_text(estimator))
        for seed in range(seeds):
            path = folder / f"{file_stem(dataset)}-{method}-{seed}-{key}.json"
            wanted[path] = dataset, method, seed, settings
    return wanted


def run_one(dataset: str, method: str, seed: int, settings: Settings | None) -> tuple[dict[str, Any], bytes]:
    """Fit a method on a dataset; return its row of ``runs.csv``, and a file of τ and ages for the figures.

    Site classifiers are fitted on training codes. Accuracies are in percent, M is times 100: ``mmd`` is the
    unbiased estimate, ``mmd_biased`` the V-statistic as in the paper's code, ``mmd_shuffled`` the 95 %
    quantile of the unbiased estimate with shuffled sites.
    """
    data = data_of.load_dataset(dataset, seed)
    start = time.process_time()
    estimator = make_method(method, seed, settings_of(dataset, method, settings))
    test, train = data.test, data.train
    estimator.fit(data.x(train), train.y, site=train.site_labels, covariates=train.C)
    train = train if data.classifier_train is None else data.classifier_train
    x, x_train = data.x(test), data.x(train)
    codes = estimator.transform(x_train), train.site_labels, estimator.transform(x), test.site_labels
    paper, *others = classify_site(*codes, classifiers=["paper", *UNWEIGHTED], seed=seed)
    best = max(others, key=lambda score: score.auc)
    low, high = shuffled_band(*codes, seed=seed)
    mmd = discrepancy(codes[2], test.site_labels, seed=seed)
    predicted = estimator.predict(x)
    tau, tau_train = estimator.tau_vector(x), estimator.tau_vector(x_train)
    age_r2, age_rank = age_from_tau(tau_train, train.C[:, 0], tau, test.C[:, 0])
    rows, content = np.linspace(0, len(test) - 1, min(len(test), VECTORS)).astype(int), io.BytesIO()
    np.savez_compressed(content, tau=tau[rows].astype(np.float32), age=test.C[rows, 0])
    record = {
        "dataset": dataset,
        "method": method,
        "seed": seed,
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
    return record, content.getvalue()


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
