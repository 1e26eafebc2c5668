"""Harmonizers compared on held-out people: how far the site can still be read, and what is left of biology.

Folds are stratified by site; a harmonizer is fitted on train and applied to test. Then, on its output:

- ``adv``: balanced accuracy of the best of three site readers, given the covariates too; ``adv_age`` is the
  same readers' given the covariates alone, which no harmonizer that keeps age can go below;
- ``age``: R² of a ridge regression of the first covariate; ``lso`` the same on sites left out of it;
- ``auc``: area under the ROC curve of a logistic regression of the target, where that has two classes;
  ``auc_within`` the same among people of one site, where the site's share of each class is of no use;
- ``clean``: R² with the features as they were before any site touched them, where a simulator knows them.

``ours-y`` is ours told the target of the training people, and ``clean`` the simulator's own features: what is
better than them at reading the age is not nearer to the truth.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.class_weight import compute_sample_weight

from equipool.benchmark.methods import code_hash
from equipool.checks import Roles
from equipool.data import PooledDataset
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.parallel import fan_out
from equipool.progress import duration, say
from equipool.simulate import SimulatedTable, simulate_table

__all__ = [
    "HARMONIZERS",
    "READERS",
    "Score",
    "make_harmonizer",
    "run_harmonizers",
    "score_fold",
    "site_readers",
]

FloatArray = NDArray[np.float64]

READERS = ("logistic", "trees", "perceptron")  # of the site, as site_readers gives them

SIMULATED = ("GE", "Philips", "Siemens", "Canon")
# Sites shift, stretch, mix and bend features; in the second kind also by the factors of people.
SIMULATED_KINDS: dict[str, dict[str, Any]] = {
    "simulated-": {"features": 24, "noise": 0.12},
    "simulated-joint-": {"features": 80, "noise": 0.06, "joint": 0.3},
}
HARMONIZERS = (
    "raw",
    "combat-nocov",
    "combat",
    "combat-gam",
    "covbat",
    "covbat-gam",
    "ours",
    "ours-y",
    "clean",
)
READER_BINS = 255
SHOWN = {
    "adv": "adv",
    "adv_age": "adv, covariates alone",
    "age": "age R²",
    "lso": "lso R²",
    "auc": "AUC",
    "auc_within": "AUC within sites",
    "clean": "R² with clean",
    "seconds": "s",
}


@dataclass(frozen=True)
class Score:
    """One fold of one harmonizer on one table."""

    table: str
    method: str
    repeat: int
    fold: int
    adv: float
    adv_age: float
    age: float
    lso: float
    auc: float
    auc_within: float
    clean: float
    broken: float
    seconds: float


def run_harmonizers(
    pools: dict[str, PooledDataset],
    out: Path,
    *,
    methods: Sequence[str] = HARMONIZERS,
    repeats: int = 3,
    jobs: int | None = None,
    fresh: bool = False,
) -> pd.DataFrame:
    """Score every harmonizer on every table; write ``folds.csv``, ``harmonizers.csv``, ``harmonizers.md``.

    Folds are fanned out as in :func:`equipool.benchmark.table1.run_benchmark`. Each is kept as a file of
    its own under ``folds``, named by all that decides it, so a killed comparison goes on.
    """
    if repeats < 1:
        raise InputError(f"The folds must be made at least once. Got {repeats} repeats.")
    for method in methods:
        make_harmonizer(method)
    for name, pool in pools.items():
        if not pool.covariates or pool.X is None:
            raise InputError(f"{name} needs features and a covariate to keep; name it with --covariate.")
    out.mkdir(parents=True, exist_ok=True)
    tasks = [(name, repeat, fold) for name in pools for repeat in range(repeats) for fold in range(5)]
    keys = {name: _fold_key(name, pool, methods) for name, pool in pools.items()}
    kept = {task: out / "folds" / f"{keys[task[0]]}-{task[1]}-{task[2]}.json" for task in tasks}
    known = {task: None if fresh else _read_fold(kept[task]) for task in tasks}
    todo = [task for task in tasks if known[task] is None]
    if len(todo) < len(tasks):
        say(f"{len(tasks) - len(todo)} of {len(tasks)} folds are there already")
    start = time.perf_counter()
    runs = fan_out(score_fold, ((pools[task[0]], *task, methods) for task in todo), jobs=jobs)
    for done, found in enumerate(runs, start=1):
        task = found[0].table, found[0].repeat, found[0].fold
        known[task] = [asdict(score) for score in found]
        write_whole(kept[task], json.dumps(known[task]))
        left = (time.perf_counter() - start) / done * (len(todo) - done)
        say(f"[{done}/{len(todo)}] folds; about {duration(left)} left")
    frame = pd.DataFrame([score for task in tasks for score in known[task] or ()])
    _write(frame, out)
    return frame


def _fold_key(table: str, pool: PooledDataset, methods: Sequence[str]) -> str:
    """Return a name for the folds of a table that no other data, methods or code share."""
    digest = hashlib.sha256(repr((table, tuple(methods), code_hash(), pool.features.shape)).encode())
    for part in (pool.features, pool.C, pool.site):
        digest.update(np.ascontiguousarray(part).tobytes())
    digest.update(repr((pool.sites, None if pool.y is None else pool.y.tolist())).encode())
    return digest.hexdigest()[:16]


def _read_fold(path: Path) -> list[dict[str, Any]] | None:
    """Return the scores of an earlier run; one that is no fold is made anew."""
    try:
        return [asdict(Score(**score)) for score in json.loads(path.read_text(encoding="utf-8"))] or None
    except (OSError, ValueError, TypeError):
        return None


def read_pool(
    table: str, *, site: str | None, least: int = 10, **roles: Unpack[Roles]
) -> tuple[str, PooledDataset]:
    """Return a table for scoring by its path, or a simulated one.

    These are ``simulated-OVERLAP[-SEED]`` and ``simulated-joint-OVERLAP[-SEED]`` (:data:`SIMULATED_KINDS`).

    Sites with fewer than ``least`` people are left out: nobody could judge them in five folds.
    """
    truth = _simulated(table)
    if truth is not None:
        return table, truth.pool
    if site is None:
        raise InputError("Name the column that tells sites apart with --site.")
    pool = PooledDataset.read(table, site=site, **roles)
    people = np.bincount(pool.site, minlength=len(pool.sites))
    kept = pool[people[pool.site] >= least]
    if len(np.unique(kept.site)) < 2:
        raise InputError(f"{table} has fewer than two sites with {least} people; give a larger table.")
    return Path(table).stem, kept


def _simulated(table: str) -> SimulatedTable | None:
    """Return the simulated table of that name, None where it is no such name."""
    if not table.startswith("simulated-"):
        return None
    kind = "simulated-joint-" if table.startswith("simulated-joint-") else "simulated-"
    overlap, _, seed = table.removeprefix(kind).partition("-")
    try:
        share, number = float(overlap), int(seed or 0)
    except ValueError:
        raise InputError(
            f"{table!r} is no simulated table; write simulated-0.5 for half overlap, simulated-0.5-7 for "
            "another such table, simulated-joint-0.5 for sites that act by people's factors."
        ) from None
    return simulate_table(
        sites=SIMULATED,
        people=120,
        overlap=share,
        random_state=number,
        disease=0.04,
        mixing=0.3,
        bending=0.1,
        **SIMULATED_KINDS[kind],
    )


def _clean(table: str, pool: PooledDataset) -> FloatArray | None:
    """Return the clean features of a simulated table; a file may have such a name too, and has none."""
    try:
        truth = _simulated(table)
    except InputError:
        return None
    if truth is None or not np.array_equal(truth.pool.features, pool.features):
        return None
    return truth.clean


def make_harmonizer(method: str) -> Any:
    """Return an unfitted harmonizer by its name in the table."""
    from equipool.estimators.peers import PEERS, ComBatPeer, Raw
    from equipool.estimators.site_harmonizer import SiteHarmonizer

    if method in ("raw", "clean"):
        return Raw()
    if method in ("ours", "ours-y"):
        return SiteHarmonizer(random_state=0)
    if method in PEERS:
        return ComBatPeer(method)
    raise InputError(f"There is no harmonizer {method!r}; there are {', '.join(HARMONIZERS)}.")


def score_fold(
    pool: PooledDataset, table: str, repeat: int, fold: int, methods: Sequence[str] | dict[str, Any]
) -> list[Score]:
    """Fit on four fifths of every site and judge on the last.

    ``methods`` are names of :data:`HARMONIZERS`, or harmonizers of one's own by name. Those that a table has
    nothing for, a target of two classes or a truth, are left out.
    """
    train, test = pool.folds(5, stratify="site", random_state=repeat)[fold]
    site, c = pool.site_labels, pool.C
    clean = _clean(table, pool)
    missing = {"clean": clean is None, "ours-y": _classes(pool) is None}
    scores = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # readers' remarks on convergence, peers' on small sites
        alone = _adversary(c[train], site[train], c[test], site[test])
        for method in methods:
            if missing.get(method):
                continue
            harmonizer = methods[method] if isinstance(methods, dict) else make_harmonizer(method)
            seen = replace(pool, X=clean) if method == "clean" else pool
            found = _judged(harmonizer, seen, train, test, told=method == "ours-y", clean=clean)
            scores.append(Score(table, method, repeat, fold, adv_age=alone, **found))
    return scores


def _judged(
    harmonizer: Any, pool: PooledDataset, train: Any, test: Any, *, told: bool, clean: FloatArray | None
) -> dict[str, float]:
    """Fit on train, and judge both parts as harmonized."""
    site, c = pool.site_labels, pool.C
    start = time.process_time()
    a, b = _applied(harmonizer, pool, train, test, told=told)
    seconds = time.process_time() - start
    broken = 1 - float(np.isfinite(np.vstack([a, b])).mean())
    a, b = np.nan_to_num(a), np.nan_to_num(b)
    auc, within = _auc(pool, train, test, a, b)
    return {
        "adv": _adversary(np.hstack([a, c[train]]), site[train], np.hstack([b, c[test]]), site[test]),
        "age": _r2(a, c[train, 0], b, c[test, 0]),
        "lso": _left_out(a, c[train, 0], site[train], b, c[test, 0], site[test]),
        "auc": auc,
        "auc_within": within,
        "clean": float("nan") if clean is None else _like_clean(b, clean[test]),
        "broken": broken,
        "seconds": seconds,
    }


def _applied(
    harmonizer: Any, pool: PooledDataset, train: Any, test: Any, *, told: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Fit on train, told its target or not, and return both parts harmonized; test's target is never told."""
    x, site, c = pool.features, pool.site_labels, pool.C
    target = {"y": np.asarray(pool.y)[train]} if told else {}
    harmonizer.fit(x[train], **target, site=site[train], covariates=c[train])
    a, b = (harmonizer.transform(x[rows], site=site[rows], covariates=c[rows]) for rows in (train, test))
    return np.asarray(a), np.asarray(b)


class _Quantiles(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Columns as the numbers of their quantiles, every class weighing the same; few values stay apart."""

    def fit(self, x: FloatArray, y: Any) -> _Quantiles:
        weight = compute_sample_weight("balanced", y)
        wanted = np.arange(1, READER_BINS) / READER_BINS * weight.sum()
        self.cuts_ = []
        for column in x.T:
            values = np.unique(column)
            if len(values) > READER_BINS:
                order = np.argsort(column)
                place = np.searchsorted(np.cumsum(weight[order]), wanted)
                values = np.unique(column[order[np.minimum(place, len(order) - 1)]])
            self.cuts_.append(values[1:] / 2 + values[:-1] / 2)
        return self

    def transform(self, x: FloatArray) -> FloatArray:
        columns = zip(self.cuts_, x.T, strict=True)
        return np.column_stack([np.searchsorted(cuts, column) for cuts, column in columns]).astype(float)


def site_readers() -> Iterator[Any]:
    """Return three readers of the site: logistic regression, boosted trees, a perceptron.

    Columns are cut before the trees see them, at the quantiles that these would look for themselves, but
    one after the other: a minute for 600 columns.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    yield make_pipeline(StandardScaler(), LogisticRegression(C=0.3, max_iter=300, class_weight="balanced"))
    trees = HistGradientBoostingClassifier(
        max_iter=40, max_leaf_nodes=15, class_weight="balanced", random_state=0
    )
    yield make_pipeline(_Quantiles(), trees)
    perceptron = MLPClassifier((64, 64), max_iter=60, early_stopping=True, random_state=0)
    yield make_pipeline(StandardScaler(), perceptron)


def _adversary(train: FloatArray, site: Any, test: FloatArray, test_site: Any) -> float:
    from sklearn.metrics import balanced_accuracy_score

    site, test_site = site.astype(str), test_site.astype(str)
    return max(
        float(balanced_accuracy_score(test_site, reader.fit(train, site).predict(test)))
        for reader in site_readers()
    )


def _r2(train: FloatArray, age: FloatArray, test: FloatArray, test_age: FloatArray) -> float:
    from sklearn.metrics import r2_score

    return float(r2_score(test_age, _ridge().fit(train, age).predict(test)))


def _left_out(
    train: FloatArray, age: FloatArray, site: Any, test: FloatArray, test_age: FloatArray, test_site: Any
) -> float:
    """Return R² of the age of people whose site was left out of the age regression."""
    from sklearn.metrics import r2_score

    read, true = [], []
    for name in np.unique(site.astype(str)):
        others, own = site != name, test_site == name
        if own.any():
            read.append(_ridge().fit(train[others], age[others]).predict(test[own]))
            true.append(test_age[own])
    return float(r2_score(np.concatenate(true), np.concatenate(read)))


def _classes(pool: PooledDataset) -> NDArray[np.bool_] | None:
    """Return who is of the second of two classes, None where the target is no such thing."""
    if pool.y is None or pool.task != "class" or len(np.unique(pool.y.astype(str))) != 2:
        return None
    second: NDArray[np.bool_] = pool.y.astype(str) == np.unique(pool.y.astype(str))[1]
    return second


def _auc(pool: PooledDataset, train: Any, test: Any, a: FloatArray, b: FloatArray) -> tuple[float, float]:
    """Return the area under the ROC curve over everybody, and over pairs of people of one site."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    y = _classes(pool)
    if y is None or y[test].all() or not y[test].any():
        return float("nan"), float("nan")
    reader = make_pipeline(StandardScaler(), LogisticRegression(C=0.05, max_iter=300))
    said = reader.fit(a, y[train]).decision_function(b)
    areas, pairs = [], []
    for s in np.unique(pool.site[test]):
        own = pool.site[test] == s
        positive = y[test][own]
        if positive.any() and not positive.all():
            areas.append(roc_auc_score(positive, said[own]))
            pairs.append(positive.sum() * (~positive).sum())
    within = float(np.average(areas, weights=pairs)) if areas else float("nan")
    return float(roc_auc_score(y[test], said)), within


def _like_clean(x: FloatArray, clean: FloatArray) -> float:
    """Return the mean R² of features with the clean ones, after the mean, which nobody can know."""
    x, clean = x - x.mean(axis=0), clean - clean.mean(axis=0)
    return float((1 - ((x - clean) ** 2).sum(axis=0) / (clean**2).sum(axis=0)).mean())


def _ridge() -> Any:
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), RidgeCV(np.logspace(0, 4, 9)))


def _write(frame: pd.DataFrame, out: Path) -> None:
    """Write folds and the table: mean of all folds, and the standard deviation over repeats."""
    write_whole(out / "folds.csv", frame.to_csv(index=False))
    by_repeat = frame.groupby(["table", "method", "repeat"], sort=False)[[*SHOWN, "broken"]].mean()
    grouped = by_repeat.groupby(["table", "method"], sort=False)
    mean, spread = grouped.mean(), grouped.std(ddof=0)
    write_whole(out / "harmonizers.csv", mean.join(spread.add_suffix("_std")).to_csv())
    lines = []
    for table, part in mean.groupby(level="table", sort=False):
        shown = [name for name in SHOWN if part[name].notna().any()]
        lines += [
            f"## {table}",
            "",
            "| method | " + " | ".join(SHOWN[name] for name in shown) + " |",
            "|---" * (len(shown) + 1) + "|",
        ]
        around = spread.loc[part.index]
        for k, method in enumerate(part.index.get_level_values("method")):
            row, deviation = part.iloc[k], around.iloc[k]
            cells = [
                f"{row[name]:.2f}" if name == "seconds" else f"{row[name]:.3f} ({deviation[name]:.3f})"
                for name in shown
            ]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        lines.append("")
    write_whole(out / "harmonizers.md", "\n".join(lines))
