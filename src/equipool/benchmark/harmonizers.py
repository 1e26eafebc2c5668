"""Harmonizers compared on held-out participants of folds that are stratified by site.

- ``adv``: balanced accuracy of the best of three site classifiers, given the covariates too; ``adv_age`` is
  that of the covariates alone, which no harmonizer that keeps age can go below;
- ``age``: R² of a ridge regression of the first covariate; ``lso`` the same on sites left out of it;
- ``auc``: area under the ROC curve of a logistic regression of a binary target; ``auc_within`` the same among
  pairs of one site, where the proportion of classes at the site does not help;
- ``clean``: R² with the features without site effects, of simulated tables.

The method ``ours-y`` is ours given the target of the training rows, and ``clean`` the simulator's features:
a harmonizer that predicts the age better than these is not closer to the truth.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.benchmark.layout import markdown_table, mean_and_sd
from equipool.benchmark.runs import fingerprint, run_all
from equipool.checks import Roles
from equipool.checks.inputs import parse_labels
from equipool.data import PooledDataset
from equipool.data.tables import label_columns, read_table
from equipool.estimators.peers import PEERS, ComBatPeer, Raw
from equipool.estimators.site_harmonizer import SiteHarmonizer
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.judge.classifiers import BALANCED, SiteScore
from equipool.judge.heldout import Fold, make_folds
from equipool.judge.scores import r2_with_clean
from equipool.simulate import SimulatedTable, simulate_table

FloatArray = NDArray[np.float64]

HARMONIZERS = (*"raw combat-nocov combat combat-gam covbat covbat-gam ours ours-y clean".split(),)
SIMULATED = ("GE", "Philips", "Siemens", "Canon")
# Sites change shift, scale, covariance and warp; in the second kind also depending on shared factors.
SIMULATED_KINDS: dict[str, dict[str, Any]] = {
    "simulated-": {"features": 24, "noise": 0.12},
    "simulated-joint-": {"features": 80, "noise": 0.06, "joint": 0.3},
}
FOLDS, MIN_ROWS = 5, 10  # rows of a site
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


def run_harmonizers(
    pools: dict[str, PooledDataset],
    out: Path,
    *,
    methods: Sequence[str] = HARMONIZERS,
    subjects: Mapping[str, NDArray[Any] | None] | None = None,
    repeats: int = 3,
    jobs: int | None = None,
    fresh: bool = False,
) -> pd.DataFrame:
    """Score every harmonizer on every table; write ``folds.csv``, ``harmonizers.csv``, ``harmonizers.md``.

    Each fold is a file under ``folds`` (:func:`.run_all`), so a killed comparison resumes. ``subjects`` has
    the participant of each row of a table, where participants have several.
    """
    if repeats < 1:
        raise InputError(f"The folds must be made at least once. Got {repeats} repeats.")
    for method in methods:
        make_harmonizer(method)
    wanted = {}
    for name, pool in pools.items():
        if not pool.covariates or pool.X is None:
            raise InputError(f"{name} needs features and a covariate to keep; name it with --covariate.")
        subject = (subjects or {}).get(name)
        data = (pool.features, pool.C, pool.site, pool.sites, pool.y, subject)
        stem = out / "folds" / fingerprint(name, tuple(methods), *data)
        for repeat in range(repeats):
            for fold in range(len(_folds(name, pool, subject, repeat))):
                arguments = (pool, name, repeat, fold, methods, subject)
                wanted[stem.with_name(f"{stem.name}-{repeat}-{fold}.json")] = arguments
    out.mkdir(parents=True, exist_ok=True)
    scores = run_all(score_fold, wanted, what="folds", jobs=jobs, fresh=fresh)
    frame = pd.DataFrame(list(chain.from_iterable(scores)))
    _write(frame, out)
    return frame


def _folds(table: str, pool: PooledDataset, subject: NDArray[Any] | None, repeat: int) -> list[Fold]:
    folds = make_folds(pool, subject, FOLDS, repeat)
    if not folds:
        raise InputError(f"{table} has fewer than two sites that are large enough; give a larger table.")
    return folds


def read_pool(
    table: str, *, site: str | None, subject: str | None = None, **roles: Unpack[Roles]
) -> tuple[str, PooledDataset, NDArray[Any] | None]:
    """Return name, pool and participants of a table for scoring: a file's, or a simulated one.

    ``subject`` names the column of participants, where these have several rows. Sites of fewer than
    :data:`MIN_ROWS` rows are left out. Simulated tables are named by kind, overlap and seed.
    """
    truth = _simulated(table)
    if truth is not None:
        return table, truth.pool, None
    if site is None:
        raise InputError("Name the column that tells sites apart with --site.")
    frame = read_table(table, labels=label_columns(site, roles))
    pool = PooledDataset.from_frame(frame, site=site, **roles)
    large = np.bincount(pool.site, minlength=len(pool.sites))[pool.site] >= MIN_ROWS
    if len(np.unique(pool.site[large])) < 2:
        raise InputError(f"{table} has fewer than two sites with {MIN_ROWS} rows; give a larger table.")
    return Path(table).stem, pool[large], None if subject is None else parse_labels(frame[subject])[large]


def _simulated(table: str) -> SimulatedTable | None:
    """Return the simulated table of a name ``simulated-[joint-]OVERLAP[-SEED]``, ``None`` for other names."""
    if not table.startswith("simulated-"):
        return None
    kind = "simulated-joint-" if table.startswith("simulated-joint-") else "simulated-"
    overlap, _, seed = table.removeprefix(kind).partition("-")
    try:
        share, number = float(overlap), int(seed or 0)
    except ValueError:
        raise InputError(
            f"{table!r} is no simulated table; write simulated-0.5 for half overlap, simulated-0.5-7 for "
            "another such table, simulated-joint-0.5 for sites that act by factors that participants share."
        ) from None
    kinds = {"disease": 0.04, "mixing": 0.3, "bending": 0.1, **SIMULATED_KINDS[kind]}
    return simulate_table(sites=SIMULATED, people=120, overlap=share, random_state=number, **kinds)


def _clean(table: str, pool: PooledDataset) -> FloatArray | None:
    """Return the clean features of a simulated table; a file of the same name has none."""
    with suppress(InputError):
        truth = _simulated(table)
        if truth is not None and np.array_equal(truth.pool.features, pool.features):
            return truth.clean
    return None


def make_harmonizer(method: str) -> Any:
    """Return an unfitted harmonizer by its name in the table."""
    if method in ("raw", "clean"):
        return Raw()
    if method in ("ours", "ours-y"):
        return SiteHarmonizer(random_state=0)
    if method in PEERS:
        return ComBatPeer(method)
    raise InputError(f"There is no harmonizer {method!r}; there are {', '.join(HARMONIZERS)}.")


def score_fold(
    pool: PooledDataset,
    table: str,
    repeat: int,
    fold: int,
    methods: Sequence[str] | Mapping[str, Any],
    subject: NDArray[Any] | None = None,
) -> list[dict[str, Any]]:
    """Fit on the training rows of one fold and evaluate on its test rows; return one row a method.

    ``methods`` are names of :data:`HARMONIZERS`, or unfitted harmonizers by name. ``ours-y`` needs a binary
    target and ``clean`` a simulated table; otherwise they are left out.
    """
    part = _folds(table, pool, subject, repeat)[fold]
    clean, labels = _clean(table, pool), _two_classes(pool)
    missing = {"clean": clean is None, "ours-y": labels is None}
    adv_age = best_accuracy(part.site_scores(pool.C, BALANCED))
    scores = []
    for method in methods:
        if missing.get(method):
            continue
        harmonizer = methods[method] if isinstance(methods, Mapping) else make_harmonizer(method)
        data = replace(pool, X=clean) if method == "clean" else pool
        start = time.process_time()
        after = _harmonized(harmonizer, data, part, given_target=method == "ours-y", subject=subject)
        seconds = time.process_time() - start
        finite = np.nan_to_num(after)
        age = part.number_scores(finite, pool.C[:, 0])
        target = {} if labels is None else part.class_scores(finite, labels)
        scores.append(
            {
                "table": table,
                "method": method,
                "repeat": repeat,
                "fold": fold,
                "adv": best_accuracy(part.site_scores(np.hstack([finite, pool.C]), BALANCED)),
                "adv_age": adv_age,
                "age": age["all"],
                "lso": age["left-out sites"],
                "auc": target.get("all", float("nan")),
                "auc_within": target.get("within sites", float("nan")),
                "clean": float("nan")
                if clean is None
                else r2_with_clean(finite[part.test], clean[part.test]),
                "broken": 1 - float(np.isfinite(after).mean()),
                "seconds": seconds,
            }
        )
    return scores


def best_accuracy(scores: Sequence[SiteScore]) -> float:
    """Return the balanced accuracy of the best site classifier."""
    return max(score.balanced_accuracy for score in scores)


def _two_classes(pool: PooledDataset) -> NDArray[Any] | None:
    """Return the target where it has two classes."""
    labels = None if pool.y is None else pool.y.astype(str)
    return labels if labels is not None and pool.task == "class" and len(np.unique(labels)) == 2 else None


def _harmonized(
    harmonizer: Any, pool: PooledDataset, fold: Fold, *, given_target: bool, subject: NDArray[Any] | None
) -> FloatArray:
    """Fit on training rows, given their target or not, and return all rows; test targets are never given."""
    x, site, c, train = pool.features, pool.site_labels, pool.C, fold.train
    given = {"y": np.asarray(pool.y)[train]} if given_target else {}
    if subject is not None and "subject" in signature(harmonizer.fit).parameters:
        given["subject"] = subject[train]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers' warnings of small sites
        harmonizer.fit(x[train], **given, site=site[train], covariates=c[train])
        after = np.array(x)  # rows of sites without training rows stay as measured; they are not tested
        rows = np.isin(site, site[train])
        after[rows] = harmonizer.transform(x[rows], site=site[rows], covariates=c[rows])
    return after


def _write(frame: pd.DataFrame, out: Path) -> None:
    """Write folds and the table: means over folds, and their standard deviations over repeats."""
    write_whole(out / "folds.csv", frame.to_csv(index=False))
    by_repeat = frame.groupby(["table", "method", "repeat"], sort=False)[[*SHOWN, "broken"]].mean()
    grouped = by_repeat.groupby(["table", "method"], sort=False)
    mean, spread = grouped.mean(), grouped.std(ddof=0)
    write_whole(out / "harmonizers.csv", mean.join(spread.add_suffix("_std")).to_csv())
    lines = []
    for table, part in mean.groupby(level="table", sort=False):
        cells = pd.DataFrame(index=part.index.get_level_values("method"))
        for name, title in SHOWN.items():
            if name == "seconds":
                cells[title] = [f"{seconds:.2f}" for seconds in part[name]]
            elif part[name].notna().any():
                cells[title] = mean_and_sd(part[name], spread[name], 3)
        lines += [f"## {table}", "", markdown_table(cells), ""]
    write_whole(out / "harmonizers.md", "\n".join(lines))
