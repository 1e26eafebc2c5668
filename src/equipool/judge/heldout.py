"""Did it work? Readers of the site and of what people brought, fitted on some people and read on others.

In each fold the harmonizer is fitted anew on the training people and applied to all; readers are fitted on
the training people and read on the held-out ones, before and after. Four readings of the site stand side by
side: ``before`` and ``after`` (features and covariates), ``covariates`` (these alone: what no harmonizer that
keeps them can go below) and ``shuffled`` (harmonized features of people whose sites were shuffled: chance).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipool.data import PooledDataset
from equipool.data.splits import deal
from equipool.judge.scores import Columns, site_shares
from equipool.progress import Progress
from equipool.randomness import seed_for

__all__ = ["LEAST", "READERS", "HeldOut", "held_out", "make_folds", "persons", "some_people"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

LEAST = 6  # people of a site below which none of them is held out
MANY = 400  # people from which three folds do
TREES = 40
FEATURES = 400  # that readers see; of more, a random choice
READERS = {
    "logistic": "logistic regression",
    "tree": "a decision tree",
    "trees": "extremely randomised trees",
    "network": "a network with one hidden layer",
}


@dataclass(frozen=True)
class HeldOut:
    """What was read: tables with one row a reading, as columns.

    Attributes
    ----------
    readings
        stage, reader, fitted_on (``"training people"``, those the harmonizer saw, or ``"held-out people"``,
        others of the same fold), mean and sd over folds of the balanced accuracy.
    signals
        what, measure, where (``"all"``, ``"within sites"``, ``"left-out sites"``), before, before_sd, after,
        after_sd, change, change_sd over folds.
    shares
        before and after, each feature's share of variance that is the site's, in held-out people.
    """

    readings: Columns
    signals: Columns
    shares: Columns
    folds: int
    people: int
    sites: int


def held_out(
    pool: PooledDataset,
    before: FloatArray,
    harmonize: Callable[[IntArray], FloatArray],
    *,
    subject: NDArray[Any] | None = None,
    folds: int | None = None,
    seed: int = 0,
) -> HeldOut | None:
    """Read the site and people's own variables before and after, on people who were not fitted on.

    Parameters
    ----------
    pool
        The people; its features are not looked at.
    before
        Features as measured, (people, features): the pool's own, or regional means of images.
    harmonize
        Takes the positions of training people and returns everybody's features, harmonized by what was
        learned from these alone.
    subject
        Who each row is, where people come several times; they are never split.
    folds
        Default: five, from 400 people on three.
    """
    parts = make_folds(pool, subject, folds, seed)
    if parts is None:
        return None
    person, chosen = persons(subject, len(pool)), _some_features(before.shape[1], seed)
    reads: dict[tuple[str, str, str], list[float]] = {}
    signals: dict[tuple[str, str, str, str], list[float]] = {}
    shares: dict[str, list[FloatArray]] = {"before": [], "after": []}
    progress = Progress("Folds judged", len(parts))
    with _quiet():
        for done, (train, test) in enumerate(parts, start=1):
            after = harmonize(train)
            seen = before[:, chosen], after[:, chosen]
            for key, value in _read_sites(pool, person, *seen, train, test, seed):
                reads.setdefault(key, []).append(value)
            for stage, x in zip(("before", "after"), seen, strict=True):
                for name, value in _read_people(pool, x, train, test):
                    signals.setdefault((*name, stage), []).append(value)
            shares["before"].append(site_shares(pool, before, test))
            shares["after"].append(site_shares(pool, after, test))
            progress(done)
    judged = np.concatenate([test for _, test in parts])
    return HeldOut(
        readings=_reading_table(reads),
        signals=_signal_table(signals),
        shares={stage: np.mean(found, axis=0).round(5).tolist() for stage, found in shares.items()},
        folds=len(parts),
        people=len(np.unique(person[judged])),
        sites=len(np.unique(pool.site[judged])),
    )


def make_folds(
    pool: PooledDataset, subject: NDArray[Any] | None, folds: int | None, seed: int
) -> list[tuple[IntArray, IntArray]] | None:
    """Return (train, test) of each fold, sites in proportion and people whole; ``None`` if that cannot be.

    People of sites with fewer than :data:`LEAST` stay in training, so that every site is known there, but
    for who is held out at another site. A site that training does not know is not judged.
    """
    person = persons(subject, len(pool))
    first = np.unique(person, return_index=True)[1]
    counts = _people_of_sites(pool.site, person)
    judged = counts[pool.site] >= LEAST
    if len(np.unique(pool.site[judged])) < 2:
        return None
    count = folds or (3 if len(first) >= MANY else 5)
    count = min(count, int(counts[counts >= LEAST].min()))
    part = deal([pool.site[first]], [], count, seed_for(seed, "report folds"))[person]
    found = []
    for k in range(count):
        test = (part == k) & judged
        train = (part != k) | (~judged & ~np.isin(person, person[test]))
        test &= np.isin(pool.site, pool.site[train])
        if len(np.unique(pool.site[test])) > 1:
            found.append((np.flatnonzero(train), np.flatnonzero(test)))
    return found or None


def persons(subject: NDArray[Any] | None, rows: int) -> IntArray:
    """Return a number for who each row is: everybody another, unless told."""
    if subject is None:
        return np.arange(rows)
    return np.unique(np.asarray(subject).astype(str), return_inverse=True)[1].astype(np.intp)


def _people_of_sites(site: IntArray, person: IntArray) -> IntArray:
    """Return how many people each site has; who was at two counts at both."""
    return np.bincount(np.unique(np.column_stack([site, person]), axis=0)[:, 0])


def some_people(pool: PooledDataset, most: int, seed: int) -> IntArray:
    """Return at most so many rows, every site in proportion."""
    if len(pool) <= most:
        return np.arange(len(pool))
    return pool.split(most / len(pool), stratify="site", random_state=seed)[1]


def _some_features(count: int, seed: int) -> IntArray:
    if count <= FEATURES:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed_for(seed, "features")).permutation(count)[:FEATURES])


# -- the site ----------------------------------------------------------------------------------------------


def _read_sites(
    pool: PooledDataset,
    person: IntArray,
    before: FloatArray,
    after: FloatArray,
    train: IntArray,
    test: IntArray,
    seed: int,
) -> Iterator[tuple[tuple[str, str, str], float]]:
    rng = np.random.default_rng(seed_for(seed, f"shuffled {test[0]}"))
    site = pool.site
    shuffled = site.copy()
    shuffled[train] = rng.permutation(site[train])
    stages = {
        "before": (np.hstack([before, pool.C]), site),
        "after": (np.hstack([after, pool.C]), site),
        "covariates": (pool.C, site),
        "shuffled": (np.hstack([after, pool.C]), shuffled),
    }
    halves = _halves(site, person, test, rng)
    for stage, (x, labels) in stages.items():
        if not x.shape[1]:
            continue
        for name, reader in _site_readers(seed):
            reader.fit(x[train], labels[train])
            yield (stage, name, "training people"), _balanced(site[test], reader.predict(x[test]))
        # A harmonizer makes its training people's sites alike by construction, so that readers fitted on them
        # may miss how far those of new people are apart. These never saw a training person.
        if halves is not None:
            for name, reader in (("logistic", _logistic(0.3, balanced=True)), ("tree", _tree(seed))):
                yield (stage, name, "held-out people"), _read_halves(reader, x, site, halves, stage, rng)


def _halves(
    site: IntArray, person: IntArray, test: IntArray, rng: np.random.Generator
) -> tuple[IntArray, IntArray] | None:
    """Return the held-out people in two halves with all their sites in both, or ``None``."""
    if _people_of_sites(site[test], person[test])[np.unique(site[test])].min() < 2:
        return None
    _, first, who = np.unique(person[test], return_index=True, return_inverse=True)
    half = deal([site[test][first]], [], 2, int(rng.integers(2**31)))[who]
    one, two = test[half == 0], test[half == 1]
    return (one, two) if set(site[one]) == set(site[two]) else None


def _read_halves(
    reader: Any,
    x: FloatArray,
    site: IntArray,
    halves: tuple[IntArray, IntArray],
    stage: str,
    rng: np.random.Generator,
) -> float:
    found = []
    for fitted, read in (halves, halves[::-1]):
        labels = rng.permutation(site[fitted]) if stage == "shuffled" else site[fitted]
        found.append(_balanced(site[read], reader.fit(x[fitted], labels).predict(x[read])))
    return float(np.mean(found))


def _site_readers(seed: int) -> Iterator[tuple[str, Any]]:
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.neural_network import MLPClassifier

    state = seed_for(seed, "readers") % 2**32
    yield "logistic", _logistic(0.3, balanced=True)
    yield "tree", _tree(seed)
    yield (
        "trees",
        ExtraTreesClassifier(TREES, class_weight="balanced", min_samples_leaf=2, random_state=state),
    )
    yield "network", _standardised(MLPClassifier((64,), max_iter=40, random_state=state))


def _balanced(true: IntArray, said: NDArray[Any]) -> float:
    """Return the share of each site's people that were found, averaged over sites."""
    return float(np.mean([(said[true == k] == k).mean() for k in np.unique(true)]))


def _reading_table(reads: dict[tuple[str, str, str], list[float]]) -> Columns:
    table: Columns = {name: [] for name in ("stage", "reader", "fitted_on", "mean", "sd")}
    for (stage, reader, fitted_on), values in reads.items():
        row = (stage, reader, fitted_on, *_summary(values))
        for name, value in zip(table, row, strict=True):
            table[name].append(value)
    return table


# -- what people brought -----------------------------------------------------------------------------------


def _read_people(
    pool: PooledDataset, x: FloatArray, train: IntArray, test: IntArray
) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Read each covariate and the target from features alone."""
    first = True
    for name, values, is_class in _variables(pool):
        if is_class:
            yield from _read_class(pool, name, values, x, train, test)
            continue
        reader = _ridge().fit(x[train], values[train])
        said = reader.predict(x[test])
        yield (name, "R²", "all"), _r2(values[test], said)
        yield (name, "R²", "within sites"), _within(pool.site, values, x, train, test)
        if first:
            yield (name, "R²", "left-out sites"), _left_out(pool, values, x, train, test, reader[-1].alpha_)
        first = False


def _variables(pool: PooledDataset) -> Iterator[tuple[str, NDArray[Any], bool]]:
    """Give name, values and whether these are classes, of what varies."""
    for k, covariate in enumerate(pool.covariates):
        values = pool.C[:, k]
        distinct = len(np.unique(values))
        if distinct > 1:
            yield covariate.name, values, distinct == 2
    if pool.y is not None and len(np.unique(pool.y.astype(str))) > 1:
        is_class = pool.task == "class"
        yield pool.target_name, pool.y.astype(str) if is_class else pool.y, is_class


def _read_class(
    pool: PooledDataset, name: str, values: NDArray[Any], x: FloatArray, train: IntArray, test: IntArray
) -> Iterator[tuple[tuple[str, str, str], float]]:
    if len(np.unique(values[train])) < 2:
        return
    reader = _logistic(0.05).fit(x[train], values[train])
    score = reader.predict_proba(x[test])
    yield (name, "AUC", "all"), _auc(values[test], score, reader.classes_)
    sites = pool.site[test]
    areas, weights = [], []
    for own in (sites == k for k in np.unique(sites)):
        area = _auc(values[test][own], score[own], reader.classes_)
        if np.isfinite(area):
            areas.append(area)
            weights.append(own.sum())
    yield (name, "AUC", "within sites"), float(np.average(areas, weights=weights)) if areas else float("nan")


def _auc(true: NDArray[Any], score: FloatArray, classes: NDArray[Any]) -> float:
    """Return the area under the ROC curve, averaged over classes where there are more than two."""
    from scipy.stats import rankdata

    areas = []
    for k in [1] if len(classes) == 2 else range(len(classes)):
        own = true == classes[k]
        if 0 < own.sum() < len(own):
            ranks = rankdata(score[:, k])[own]
            areas.append((ranks.mean() - (own.sum() + 1) / 2) / (~own).sum())
    return float(np.mean(areas)) if areas else float("nan")


def _r2(true: FloatArray, said: FloatArray) -> float:
    total = float(((true - true.mean()) ** 2).sum())
    return 1 - float(((true - said) ** 2).sum()) / total if total > 0 else float("nan")


def _within(site: IntArray, values: FloatArray, x: FloatArray, train: IntArray, test: IntArray) -> float:
    """Return R² of what differs between people of one site, so that knowing the site helps nobody.

    The reader learns from differences within sites too: one that learns from everybody leaves to a readable
    site what lies between sites, and weighs features for what is within, which flatters raw features.
    """
    true, features = values.astype(np.float64), x.astype(np.float64)
    for part in (train, test):
        for k in np.unique(site[part]):
            own = part[site[part] == k]
            true[own] -= true[own].mean()
            features[own] -= features[own].mean(axis=0)
    return _r2(true[test], _ridge().fit(features[train], true[train]).predict(features[test]))


def _left_out(
    pool: PooledDataset, values: FloatArray, x: FloatArray, train: IntArray, test: IntArray, alpha: float
) -> float:
    """Return R² where each site in turn is left out of the regression, never of the harmonizer."""
    scale = x[train].std(axis=0)
    z = (x - x[train].mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    said = np.empty(len(test))
    for k in np.unique(pool.site[test]):
        others, own = train[pool.site[train] != k], test[pool.site[test] == k]
        centre = z[others].mean(axis=0)
        a, goal = z[others] - centre, values[others].mean()
        weights = np.linalg.solve(a.T @ a + alpha * np.eye(a.shape[1]), a.T @ (values[others] - goal))
        said[pool.site[test] == k] = (z[own] - centre) @ weights + goal
    return _r2(values[test], said)


def _signal_table(signals: dict[tuple[str, str, str, str], list[float]]) -> Columns:
    names = ("what", "measure", "where", "before", "before_sd", "after", "after_sd", "change", "change_sd")
    table: Columns = {name: [] for name in names}
    for what, measure, where, stage in signals:
        if stage == "after":
            continue
        before, after = (np.array(signals[what, measure, where, s]) for s in ("before", "after"))
        row = (what, measure, where, *_summary(before), *_summary(after), *_summary(after - before))
        for name, value in zip(table, row, strict=True):
            table[name].append(value)
    return table


def _summary(values: Any) -> tuple[float | None, float | None]:
    """Return mean and standard deviation over folds that have a value; JSON knows no NaN."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not len(known):
        return None, None
    return float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else None


# -- estimators --------------------------------------------------------------------------------------------


def _logistic(strength: float, *, balanced: bool = False) -> Any:
    from sklearn.linear_model import LogisticRegression

    weight = "balanced" if balanced else None
    return _standardised(LogisticRegression(C=strength, max_iter=100, class_weight=weight))


def _tree(seed: int) -> Any:
    """Return a reader that finds what others miss: a value that many share, moved by each site elsewhere."""
    from sklearn.tree import DecisionTreeClassifier

    state = seed_for(seed, "tree") % 2**32
    return DecisionTreeClassifier(class_weight="balanced", min_samples_leaf=2, random_state=state)


def _ridge() -> Any:
    from sklearn.linear_model import RidgeCV

    return _standardised(RidgeCV(np.logspace(0, 4, 9)))


def _standardised(estimator: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), estimator)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep remarks on convergence and small sites out of the terminal, and to one thread."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
