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

import re
import time
import warnings
from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin

from equipool.benchmark.runs import fingerprint, markdown_table, mean_and_sd, run_all
from equipool.checks import Roles
from equipool.checks.inputs import parse_labels
from equipool.data import PooledDataset
from equipool.data.tables import read_table
from equipool.estimators.site_harmonizer import SiteHarmonizer
from equipool.exceptions import InputError, MissingExtraError
from equipool.files import packaged, write_whole
from equipool.judge.classifiers import BALANCED, SiteScore
from equipool.judge.heldout import Fold, make_folds
from equipool.judge.scores import r2_with_clean
from equipool.simulate import SimulatedTable, simulate_table

HARMONIZERS = (*"raw combat-nocov combat combat-gam covbat covbat-gam ours ours-y clean".split(),)
SIMULATED = ("GE", "Philips", "Siemens", "Canon")
# Sites change shift, scale, covariance and warp; in the joint kind also depending on shared factors.
USUAL: dict[str, Any] = {"features": 24, "noise": 0.12, "disease": 0.04, "mixing": 0.3, "bending": 0.1}
JOINT = {"features": 80, "noise": 0.06, "joint": 0.3}
FOLDS, MIN_ROWS = 5, 10  # rows of a site
SHOWN: dict[str, str] = packaged("benchmark", "tables.toml")["harmonizers"]  # the titles of columns

# The ComBat family, by our names, in the package combatlearn, the extra ``peers``; nothing else needs it.
PEERS = {"combat-nocov": "johnson", "combat": "fortin", "combat-gam": "gam"}
PEERS |= {"covbat": "chen", "covbat-gam": "covbat_gam"}
LINEAR = {"combat-gam": "combat", "covbat-gam": "covbat"}
SPLINE_VALUES = 10  # distinct values of a covariate that combatlearn requires for a spline


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
        make_harmonizer(method)  # an unknown one is an error
    wanted = {}
    for name, pool in pools.items():
        if not pool.covariates or pool.X is None:
            raise InputError(f"{name} needs features and a covariate to keep; name it with --covariate.")
        subject = (subjects or {}).get(name)
        data = (pool.features, pool.C, pool.site, pool.sites, pool.y, subject)
        stem = out / "folds" / fingerprint(name, tuple(methods), *data)
        for repeat in range(repeats):
            for fold in range(len(_folds(name, pool, subject, repeat))):
                path = stem.with_name(f"{stem.name}-{repeat}-{fold}.json")
                wanted[path] = (pool, name, repeat, fold, methods, subject)
    scores = run_all(score_fold, wanted, what="folds", jobs=jobs, fresh=fresh)
    frame = pd.DataFrame(list(chain.from_iterable(scores)))
    write_whole(out / "folds.csv", frame.to_csv(index=False))
    # Means over folds, and their standard deviations over repeats.
    by_repeat = frame.groupby(["table", "method", "repeat"], sort=False)[[*SHOWN, "broken"]].mean()
    grouped = by_repeat.groupby(["table", "method"], sort=False)
    mean, spread = grouped.mean(), grouped.std(ddof=0)
    write_whole(out / "harmonizers.csv", mean.join(spread.add_suffix("_std")).to_csv())
    lines = []
    for table, part in mean.groupby(level="table", sort=False):
        cells = pd.DataFrame(index=part.index.get_level_values("method"))
        for column in part[list(SHOWN)].dropna(axis=1, how="all"):
            cells[SHOWN[str(column)]] = mean_and_sd(part[column], spread[column], 3)
        lines += [f"## {table}", "", markdown_table(cells), ""]
    write_whole(out / "harmonizers.md", "\n".join(lines))
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
    if table.startswith("simulated-"):
        truth = _simulated(table)
        if truth is None:
            raise InputError(
                f"{table!r} is no simulated table; write simulated-0.5 for half overlap, simulated-0.5-7 for "
                "another such table, simulated-joint-0.5 for sites that act by factors that participants "
                "share."
            )
        return table, truth.pool, None
    if site is None:
        raise InputError("Name the column that tells sites apart with --site.")
    frame = read_table(table, labels=[site, roles.get("id")])
    pool = PooledDataset.from_frame(frame, site=site, **roles)
    large = np.bincount(pool.site, minlength=len(pool.sites))[pool.site] >= MIN_ROWS
    if len(np.unique(pool.site[large])) < 2:
        raise InputError(f"{table} has fewer than two sites with {MIN_ROWS} rows; give a larger table.")
    return Path(table).stem, pool[large], None if subject is None else parse_labels(frame[subject])[large]


def _simulated(table: str) -> SimulatedTable | None:
    """Return the simulated table of a name ``simulated-[joint-]OVERLAP[-SEED]``, ``None`` for other names."""
    named = re.fullmatch(r"simulated-(joint-)?(0|1|[01]?\.\d+)(?:-(\d+))?", table)
    if named is None or float(named[2]) > 1:
        return None
    kind = {**USUAL, **(JOINT if named[1] else {})}
    return simulate_table(sites=SIMULATED, overlap=float(named[2]), random_state=int(named[3] or 0), **kind)


def make_harmonizer(method: str) -> Any:
    """Return an unfitted harmonizer by its name in the table; none for features as they are."""
    if method in ("raw", "clean"):
        return None
    if method in ("ours", "ours-y"):
        return SiteHarmonizer(random_state=0, keep_target=method == "ours-y")
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
    site, train = pool.site_labels, part.train
    rows = np.isin(site, site[train])
    truth, nan = _simulated(table), float("nan")
    # A file of the same name as a simulated table has no truth.
    clean = truth.clean if truth and np.array_equal(truth.pool.features, pool.features) else None
    labels = np.empty(0) if pool.y is None else pool.y.astype(str)
    two_classes = pool.task == "class" and len(np.unique(labels)) == 2
    missing = {"clean": clean is None, "ours-y": not two_classes}
    adv_age = best_accuracy(part.site_scores(pool.C, BALANCED))
    scores = []
    for method in methods:
        if missing.get(method):
            continue
        harmonizer = methods[method] if isinstance(methods, Mapping) else make_harmonizer(method)
        start, x = time.process_time(), clean if method == "clean" else pool.features
        after = np.array(x)  # rows of sites without training rows stay as measured; they are not tested
        if harmonizer is not None:
            given = {"y": np.asarray(pool.y)[train]} if method == "ours-y" else {}
            if subject is not None and "subject" in signature(harmonizer.fit).parameters:
                given["subject"] = subject[train]
            with warnings.catch_warnings(action="ignore"):  # peers' warnings of small sites
                harmonizer.fit(after[train], **given, site=site[train], covariates=pool.C[train])
                after[rows] = harmonizer.transform(after[rows], site=site[rows], covariates=pool.C[rows])
        seconds = time.process_time() - start
        finite = np.nan_to_num(after)
        age = part.number_scores(finite, pool.C[:, 0])
        target = part.class_scores(finite, labels) if two_classes else {}
        row: dict[str, Any] = {"table": table, "method": method, "repeat": repeat, "fold": fold}
        row["adv"] = best_accuracy(part.site_scores(np.hstack([finite, pool.C]), BALANCED))
        row |= {"adv_age": adv_age, "age": age["all"], "lso": age["left-out sites"]}
        row |= {"auc": target.get("all", nan), "auc_within": target.get("within sites", nan)}
        row["clean"] = nan if clean is None else r2_with_clean(finite[part.test], clean[part.test])
        scores.append({**row, "broken": 1 - float(np.isfinite(after).mean()), "seconds": seconds})
    return scores


def best_accuracy(scores: Sequence[SiteScore]) -> float:
    """Return the balanced accuracy of the best site classifier."""
    return max(score.balanced_accuracy for score in scores)


class ComBatPeer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A member of the ComBat family (one of :data:`PEERS`), with covariates where it takes them."""

    def __init__(self, method: str = "combat") -> None:
        self.method = method

    def fit(self, X: Any, y: Any = None, *, site: Any, covariates: Any = None) -> Self:
        """Fit combatlearn's estimator, whose metadata belong to its constructor."""
        try:
            from combatlearn import ComBat
        except ImportError:
            needed = "The ComBat family needs combatlearn: pip install 'equipool[peers]'."
            raise MissingExtraError(needed) from None
        if self.method not in PEERS:
            raise InputError(f"There is no peer {self.method!r}; there are {', '.join(PEERS)}.")
        metadata, method = self._metadata(site, covariates), self.method
        settings: dict[str, Any] = {}
        if method in LINEAR:  # splines only where a covariate has enough values
            numbers = metadata.get("continuous_covariates", pd.DataFrame())
            smooth = [name for name in numbers if numbers[name].nunique() >= SPLINE_VALUES]
            method, settings = (method, {"smooth_terms": smooth}) if smooth else (LINEAR[method], {})
        self.combat_ = ComBat(**metadata, method=PEERS[method], **settings)
        try:
            self.combat_.fit(pd.DataFrame(np.asarray(X, dtype=np.float64)))
        except (ValueError, np.linalg.LinAlgError) as error:
            what = f"combatlearn's {self.method} cannot be fitted here ({str(error).splitlines()[0]})"
            raise InputError(f"{what}; name the methods to compare without it, with --methods.") from error
        return self

    def transform(self, X: Any, *, site: Any, covariates: Any = None) -> NDArray[np.float64]:
        """Return the harmonized features."""
        self.combat_.set_params(**self._metadata(site, covariates))
        return np.asarray(self.combat_.transform(pd.DataFrame(np.asarray(X, dtype=np.float64))))

    def _metadata(self, site: Any, covariates: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = {"batch": pd.Series(np.asarray(site).astype(str))}
        if covariates is not None and self.method != "combat-nocov":
            values = np.asarray(covariates, dtype=np.float64).reshape(len(metadata["batch"]), -1)
            metadata["continuous_covariates"] = pd.DataFrame(values).add_prefix("c")
        return metadata
