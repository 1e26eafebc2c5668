"""The paper's Table 1: every method on every dataset with several seeds, resumable, in parallel."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.benchmark.cohorts import is_brains, prepare_brains
from equipool.benchmark.layout import write_tables
from equipool.benchmark.methods import METHODS, Settings, fingerprint, make_method, settings_of
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.parallel import fan_out
from equipool.progress import duration, say

__all__ = ["METHODS", "Run", "expected_runs", "file_stem", "run_benchmark", "run_one"]

USUAL_SECONDS = {"german": 10.0, "adult": 65.0, "adni": 35.0, "adcp": 15.0}  # a run on one core
VECTORS = 2000  # rows of τ that are kept for the figures


@dataclass(frozen=True)
class Run:
    """One row of ``runs.csv``: accuracies in percent, M times 100.

    ``mmd`` is the unbiased estimate, ``mmd_biased`` the V-statistic as in the paper's code, ``mmd_shuffled``
    what the unbiased one stays below in 19 of 20 cases where sites are shuffled.
    """

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
    reader_acc: float
    reader: str
    permuted_low: float
    permuted_high: float
    balanced_acc: float
    age_r2: float
    age_rank: float
    equivariance_error: float
    dropped: float
    mmd_biased: float
    mmd_shuffled: float


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
    """Run what is not there yet and write ``runs.csv``, ``table.csv``, ``table.md`` and ``table.tex``.

    Runs are fanned out over the cores, or over a Dask cluster (:func:`equipool.parallel.cluster`); what they
    find comes back and is written here. Each is a file of its own, so a killed benchmark goes on; a run
    that was made with other settings or another version of the code is made anew. ``settings`` takes the
    place of the ones in :data:`equipool.benchmark.methods.SETTINGS`.
    """
    for method in methods:
        make_method(method, 0, {})  # an unknown one is answered before a folder is made
    for dataset in filter(is_brains, datasets):
        prepare_brains(dataset)
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    wanted, todo = _plan(datasets, folder, methods, seeds, fresh, settings)
    if len(todo) < len(wanted):
        say(f"{len(wanted) - len(todo)} of {len(wanted)} runs are there already")
    start = time.perf_counter()
    found = fan_out(run_one, ((*key, settings) for key in todo), jobs=jobs)
    for done, (run, vectors) in enumerate(found, start=1):
        _write_run(folder, run, vectors, settings)
        left = (time.perf_counter() - start) / done * (len(todo) - done)
        say(
            f"[{done}/{len(todo)}] {run.dataset} {run.method} seed {run.seed}: ACC {run.acc:.1f}, "
            f"best reader's AUC {run.reader_auc:.3f}, {run.seconds:.0f} s; about {duration(left)} left"
        )
    runs = pd.DataFrame([asdict(_must_read(folder, *key, settings)) for key in wanted])
    write_tables(runs, out)
    return runs


def expected_runs(
    datasets: Sequence[str],
    out: Path,
    *,
    methods: Sequence[str] = METHODS,
    seeds: int = 3,
    fresh: bool = False,
    settings: Settings | None = None,
) -> tuple[int, int, float]:
    """Return how many runs :func:`run_benchmark` needs, how many are not there, and their CPU seconds.

    Those are the median of the runs of the same dataset that are there, or what was usual elsewhere.
    """
    for method in methods:
        make_method(method, 0, {})
    wanted, todo = _plan(datasets, out / "runs", methods, seeds, fresh, settings)
    known: dict[str, list[float]] = {}
    for key in wanted:
        if (run := _read(out / "runs", *key, settings)) is not None:
            known.setdefault(run.dataset, []).append(run.seconds)
    usual = {name: USUAL_SECONDS[name.partition(":")[0].partition("-")[0]] for name in datasets}
    each = {name: float(np.median(known[name])) if name in known else usual[name] for name in datasets}
    return len(wanted), len(todo), sum(each[dataset] for dataset, _, _ in todo)


def _plan(
    datasets: Sequence[str],
    folder: Path,
    methods: Sequence[str],
    seeds: int,
    fresh: bool,
    settings: Settings | None,
) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]:
    """Return all runs, and those that are not there yet."""
    wanted = [(d, m, s) for d in datasets for m in methods for s in range(seeds)]
    return wanted, [key for key in wanted if fresh or _read(folder, *key, settings) is None]


def run_one(dataset: str, method: str, seed: int, settings: Settings | None = None) -> tuple[Run, bytes]:
    """Fit one method on one dataset with one seed, and judge it on the test people.

    Beside the figures of the run, τ and ages of some test people are returned, as an ``.npz`` file from which
    figures are drawn.
    """
    from equipool.benchmark.datasets import load_dataset

    data = load_dataset(dataset, seed)
    start = time.process_time()
    estimator = make_method(method, seed, settings_of(dataset, method, settings))
    train = data.train
    estimator.fit(data.x(train), train.y, site=train.site_labels, covariates=train.C)
    return _judge(dataset, method, seed, estimator, data, start), _vectors(estimator, data)


def _judge(dataset: str, method: str, seed: int, estimator: Any, data: Any, start: float) -> Run:
    """Compute every figure of a run: readers are fitted on training codes and read on test codes."""
    from sklearn.metrics import balanced_accuracy_score

    from equipool.judge.classifiers import paper_adversary, permuted_band, site_readers
    from equipool.judge.scores import delta_eq, discrepancy

    train, test = data.train, data.test
    shown = train if data.readers is None else data.readers
    x, x_shown = data.x(test), data.x(shown)
    codes = estimator.transform(x_shown), shown.site_labels, estimator.transform(x), test.site_labels
    adversary = paper_adversary(*codes, seed=seed)
    best = max(site_readers(*codes, seed=seed), key=lambda reading: reading.auc)
    low, high = permuted_band(*codes, seed=seed)
    apart = discrepancy(codes[2], test.site_labels, seed=seed)
    said = estimator.predict(x)
    tau, tau_shown = estimator.tau_vector(x), estimator.tau_vector(x_shown)
    age_r2, age_rank = age_from(tau_shown, shown.C[:, 0], tau, test.C[:, 0])
    return Run(
        dataset=dataset,
        method=method,
        seed=seed,
        delta_eq=delta_eq(tau, test.C),
        adv=100 * adversary.accuracy,
        adv_auc=adversary.auc,
        adv_chance=100 * adversary.chance,
        mmd=100 * apart.unbiased,
        acc=100 * float((said == test.y).mean()),
        seconds=time.process_time() - start,
        reader_auc=best.auc,
        reader_acc=100 * best.accuracy,
        reader=best.reader,
        permuted_low=low,
        permuted_high=high,
        balanced_acc=100 * float(balanced_accuracy_score(test.y, said)),
        age_r2=age_r2,
        age_rank=age_rank,
        equivariance_error=equivariance_of(estimator, x),
        dropped=float(getattr(estimator, "dropped_", 0.0)),
        mmd_biased=100 * apart.biased,
        mmd_shuffled=100 * float(np.quantile(apart.shuffled, 0.95)),
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

    from equipool.data.volumes import Volumes
    from equipool.estimators.training_data import through
    from equipool.groups.testing import equivariance_error

    network = estimator.network_
    if not hasattr(network, "one"):
        return float("nan")
    one, two = network.one, network.two
    with torch.no_grad():
        some = X[:512] if isinstance(X, Volumes) else np.asarray(X)[:512]
        latents = through(one.latent, estimator._scaled(some))
    return equivariance_error(
        lambda latent: two.phi(*one.tau.at_reference(latent)),
        one.action,
        out=two.out,
        inputs=latents,
        span=0.25,
    )


def _write_run(folder: Path, run: Run, vectors: bytes, settings: Settings | None) -> None:
    path = _path(folder, run.dataset, run.method, run.seed)
    write_whole(path.with_suffix(".npz"), vectors)
    record = {"settings": _fingerprint(run.dataset, run.method, settings), **asdict(run)}
    write_whole(path, json.dumps(record))


def _fingerprint(dataset: str, method: str, settings: Settings | None) -> str:
    return fingerprint(make_method(method, 0, settings_of(dataset, method, settings)))


def _vectors(estimator: Any, data: Any) -> bytes:
    """Return τ and the age of evenly spaced people, as a file."""
    people = data.test
    part = people[np.linspace(0, len(people) - 1, min(len(people), VECTORS)).astype(int)]
    content = io.BytesIO()
    np.savez_compressed(content, tau=estimator.tau_vector(data.x(part)).astype(np.float32), age=part.C[:, 0])
    return content.getvalue()


def _path(folder: Path, dataset: str, method: str, seed: int) -> Path:
    return folder / f"{file_stem(dataset)}-{method}-{seed}.json"


def file_stem(dataset: str) -> str:
    """Return a dataset's name as part of a file name: of a folder its last part, and a hash of the whole."""
    kind, _, place = dataset.partition(":")
    if not place:
        return kind
    whole = hashlib.sha256(str(Path(place).resolve()).encode()).hexdigest()[:8]
    return f"{kind}-{Path(place).resolve().name}-{whole}"


def _read(folder: Path, dataset: str, method: str, seed: int, settings: Settings | None) -> Run | None:
    """Return an earlier run with the same settings, if there is one."""
    path = _path(folder, dataset, method, seed)
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    same = record.pop("settings", None) == _fingerprint(dataset, method, settings)
    return Run(**record) if same else None


def _must_read(folder: Path, dataset: str, method: str, seed: int, settings: Settings | None) -> Run:
    run = _read(folder, dataset, method, seed, settings)
    if run is None:
        raise InputError(f"The run {dataset} {method} {seed} in {folder} was changed while it was read.")
    return run
