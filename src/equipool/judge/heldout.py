"""The held-out protocol: harmonizer and classifiers are fitted on training rows and evaluated on others.

Rows of one participant are never split between training and test. The site is predicted from four things:
features ``before`` and ``after`` harmonization (with the covariates), ``covariates`` alone (no harmonizer
that keeps them can go below), and harmonized features with ``shuffled`` sites (chance). Cells that were not
measured become the mean of the training rows; where they are is given to every classifier of the site.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import PredefinedSplit, cross_val_predict

from equipool.data import PooledDataset
from equipool.data.splits import deal
from equipool.judge import scores, written
from equipool.judge.classifiers import CLASSIFIERS, REPORTED, SiteScore, classify_site, shuffled_sites
from equipool.judge.scores import Columns, FloatArray, IntArray
from equipool.progress import Progress
from equipool.randomness import seed_for
from equipool.sites.design import find_point_masses

MIN_PARTICIPANTS = 6  # of a site; participants of smaller sites stay in training
MANY_PARTICIPANTS = 400  # from here on, three folds are enough
MOST_FEATURES = 400  # for classifiers; of more, a random choice
MOST_PARTS = 5  # into which test rows are dealt to fit classifiers among them
AMONG_TEST = ("logistic", "tree")
SHUFFLES = 3  # after which a harmonizer is fitted again

# Harmonizes all rows again, fitted on all of them, with other covariates (rows, K) and another target.
Again = Callable[[FloatArray, NDArray[Any] | None], FloatArray]


@dataclass(frozen=True, eq=False)
class Fold:
    """Row numbers to fit on and to evaluate on; features are given for all rows, (rows, features)."""

    pool: PooledDataset
    train: IntArray
    test: IntArray
    participant: IntArray

    def site_scores(
        self, x: FloatArray, classifiers: Iterable[str], *, site: IntArray | None = None, seed: int = 0
    ) -> list[SiteScore]:
        """Predict the site; ``site`` takes the place of the true one in training, for chance levels."""
        true, train, test = self.pool.site, self.train, self.test
        site = true if site is None else site
        return classify_site(x[train], site[train], x[test], true[test], classifiers=classifiers, seed=seed)

    def site_scores_among_test(
        self, x: FloatArray, classifiers: Iterable[str] = AMONG_TEST, *, shuffled: bool = False, seed: int = 0
    ) -> dict[str, float]:
        """Return balanced accuracies of classifiers that are cross-validated within the test rows.

        A harmonizer makes the sites of its training rows alike by construction, so that classifiers fitted on
        these may miss how far the sites of new participants are apart. Participants are dealt into parts; if
        a site is in one part alone, nothing is returned.
        """
        rng = np.random.default_rng(seed)
        site = self.pool.site[self.test]
        _, first, number = np.unique(self.participant[self.test], return_index=True, return_inverse=True)
        fewest = int(_participants_by_site(site, number)[np.unique(site)].min())
        part = deal([site[first]], [], min(MOST_PARTS, max(fewest, 2)), int(rng.integers(2**31)))[number]
        if any(len(np.unique(part[site == s])) < 2 for s in np.unique(site)):
            return {}
        x, true = x[self.test], site.astype(str)
        labels, result = rng.permutation(true) if shuffled else true, {}
        for name in classifiers:
            model, parts = CLASSIFIERS[name](seed, len(x)), PredefinedSplit(part)
            with warnings.catch_warnings(action="ignore"):  # of convergence and small classes
                predicted = cross_val_predict(model, x, labels, cv=parts)
            result[name] = float(balanced_accuracy_score(true, predicted))
        return result

    def number_scores(self, x: FloatArray, values: FloatArray) -> dict[str, float]:
        """Return R² of a ridge regression of values: overall, within sites, and at left-out sites."""
        train, test = self.train, self.test
        predicted = scores.ridge().fit(x[train], values[train]).predict(x[test])
        return {
            "all": scores.r2(values[test], predicted),
            "within sites": scores.within_site_r2(x, values, self.pool.site, train, test),
            "left-out sites": scores.left_out_site_r2(x, values, self.pool.site, train, test),
        }

    def class_scores(self, x: FloatArray, labels: NDArray[Any]) -> dict[str, float]:
        """Return the AUC of a logistic regression of labels: overall, and within sites."""
        if len(np.unique(labels[self.train])) < 2:
            return {}
        model = scores.standardised(LogisticRegression(C=0.05, max_iter=300))
        model.fit(x[self.train], labels[self.train])
        tested = labels[self.test], model.predict_proba(x[self.test]), model.classes_
        return {"all": scores.auc(*tested), "within sites": scores.auc(*tested, self.pool.site[self.test])}


def make_folds(
    pool: PooledDataset, subject: NDArray[Any] | None, folds: int | None = None, seed: int = 0
) -> list[Fold]:
    """Return folds with sites in proportion; none if fewer than two sites are large enough.

    Sites with fewer than :data:`MIN_PARTICIPANTS` stay in training, except participants who are held out at
    another site. A site without training rows is not tested. By default there are five folds, from 400
    participants on three.
    """
    participant = numbered(subject, len(pool))
    first = np.unique(participant, return_index=True)[1]
    counts = _participants_by_site(pool.site, participant)
    large = counts[pool.site] >= MIN_PARTICIPANTS
    if len(np.unique(pool.site[large])) < 2:
        return []
    count = folds or (3 if len(first) >= MANY_PARTICIPANTS else 5)
    count = min(count, int(counts[counts >= MIN_PARTICIPANTS].min()))
    part = deal([pool.site[first]], [], count, seed)[participant]
    made = []
    for k in range(count):
        test = (part == k) & large
        train = (part != k) | (~large & ~np.isin(participant, participant[test]))
        test &= np.isin(pool.site, pool.site[train])
        if len(np.unique(pool.site[test])) > 1:
            made.append(Fold(pool, np.flatnonzero(train), np.flatnonzero(test), participant))
    return made


def numbered(subject: NDArray[Any] | None, rows: int) -> IntArray:
    """Return the number of each row's participant; without ``subject`` each row is another one."""
    if subject is None:
        return np.arange(rows)
    return np.unique(np.asarray(subject).astype(str), return_inverse=True)[1].astype(np.intp)


def sample_rows(pool: PooledDataset, most: int, seed: int) -> IntArray:
    """Return at most so many rows, every site in proportion."""
    if len(pool) <= most:
        return np.arange(len(pool))
    return pool.split(most / len(pool), stratify="site", random_state=seed)[1]


def _participants_by_site(site: IntArray, participant: IntArray) -> IntArray:
    """Return how many participants each site has; one with rows at two sites counts at both."""
    return np.bincount(np.unique(np.column_stack([site, participant]), axis=0)[:, 0])


def predicted_among(site: NDArray[Any], *stages: FloatArray) -> dict[str, list[float]]:
    """Return how well classifiers, cross-validated within these rows, predict the site from each stage.

    Balanced accuracies by the classifier's title: of the features (rows, features) at each stage, and of the
    last with shuffled sites. Nothing is returned where fewer than two sites have MIN_PARTICIPANTS rows.
    """
    names, number, counts = np.unique(site, return_inverse=True, return_counts=True)
    if (counts >= MIN_PARTICIPANTS).sum() < 2:
        return {}
    rows = np.flatnonzero(counts[number] >= MIN_PARTICIPANTS)
    wholes = [without_holes(x)[rows] for x in stages]
    every = np.arange(len(rows))
    fold = Fold(PooledDataset.from_arrays(wholes[0], site=names[number][rows]), every[:0], every, every)
    found = [fold.site_scores_among_test(x) for x in wholes]
    found.append(fold.site_scores_among_test(wholes[-1], shuffled=True))
    return {REPORTED[name]: [one[name] for one in found] for name in found[0]}


def held_out(
    pool: PooledDataset,
    before: FloatArray,
    harmonize: Callable[[IntArray], FloatArray],
    *,
    subject: NDArray[Any] | None = None,
    final: FloatArray | None = None,
    filled: NDArray[np.bool_] | None = None,
    again: Again | None = None,
    folds: int | None = None,
    seed: int = 0,
) -> dict[str, Any] | None:
    """Predict the site, covariates and target before and after harmonization; ``None`` without folds.

    ``before`` are the features as measured, (rows, features), with NaN where they were not: the pool's, or
    regional means of images. ``harmonize`` takes the numbers of training rows and returns the features of all
    rows, harmonized by what was fitted on these alone. ``subject`` is the participant of each row. ``final``
    are the features that are published, ``filled`` says which cells were imputed, and ``again`` harmonizes
    once more with shuffled covariates and target: see :mod:`equipool.judge.written`.

    Tables are columns by name: ``site_scores`` has stage, classifier, fitted_on (``"training participants"``,
    those of the harmonizer, or ``"held-out participants"``, others of the same fold), mean and sd over folds
    of the balanced accuracy; ``signals`` what, measure, where (``"all"``, ``"within sites"``, ``"left-out
    sites"``), before, after and change, each with its sd over folds; ``shares`` the site's share of each
    feature's variance; with ``final``, ``written`` and ``features`` are from :func:`_written`. Beside them
    are the titles of ``classifiers`` and the numbers of ``folds``, ``participants`` and ``sites``.
    """
    from threadpoolctl import threadpool_limits

    made = make_folds(pool, subject, folds, seed_for(seed, "report folds"))
    if not made:
        return None
    some = np.random.default_rng(seed_for(seed, "features")).permutation(before.shape[1])[:MOST_FEATURES]
    columns = np.sort(some)
    gone = np.isnan(before) if filled is None else np.isnan(before) | filled
    empty = {"before": gone, "after": gone if final is None else gone | np.isnan(final)}
    holes = {stage: np.unique(x[:, columns].astype(np.float64), axis=1) for stage, x in empty.items()}
    beside = {stage: np.hstack([pool.C, x[:, np.ptp(x, axis=0) > 0]]) for stage, x in holes.items()}
    site: list[dict[str, Any]] = []
    signals: list[dict[str, Any]] = []
    shares = []
    progress = Progress("Folds judged", len(made))
    with threadpool_limits(1), warnings.catch_warnings(action="ignore"):
        for done, fold in enumerate(made, start=1):
            stages = {"before": before, "after": harmonize(fold.train)}
            stages = {stage: without_holes(x, empty[stage], fold.train) for stage, x in stages.items()}
            features = {stage: x[:, columns] for stage, x in stages.items()}
            site += _site_rows(fold, features, beside, seed)
            signals += _signal_rows(fold, features)
            shares.append(np.stack([scores.site_shares(pool, x, fold.test) for x in stages.values()]))
            progress(done)
        more = {} if final is None else _written(made, before, final, empty, filled, again, columns, seed)
    tested = np.concatenate([fold.test for fold in made])
    numbers = {name: f"{name}_sd" for name in ("before", "after", "change")}
    return more | {
        "site_scores": _over_folds(site, ["stage", "classifier", "fitted_on"], {"mean": "sd"}),
        "signals": _over_folds(signals, ["what", "measure", "where"], numbers),
        "shares": dict(zip(("before", "after"), np.mean(shares, axis=0).round(5).tolist(), strict=True)),
        "classifiers": REPORTED,
        "folds": len(made),
        "participants": len(np.unique(made[0].participant[tested])),
        "sites": len(np.unique(pool.site[tested])),
    }


def without_holes(
    x: FloatArray, empty: NDArray[np.bool_] | None = None, rows: IntArray | None = None
) -> FloatArray:
    """Return features with empty cells at the mean of the others in some rows, which says nothing."""
    empty = np.isnan(x) if empty is None else empty | np.isnan(x)
    if not empty.any():
        return x
    part, gone = (x, empty) if rows is None else (x[rows], empty[rows])
    mean = np.where(gone, 0.0, part).sum(axis=0) / np.maximum((~gone).sum(axis=0), 1)
    return np.where(empty, mean, x)


def _site_rows(
    fold: Fold, features: dict[str, FloatArray], beside: dict[str, FloatArray], seed: int
) -> Iterator[dict[str, Any]]:
    """Predict the site from each stage, by classifiers fitted on training rows and among test rows.

    ``beside`` the features of a stage are the covariates and its pattern of empty cells, (rows, columns).
    """
    rng = np.random.default_rng(seed_for(seed, f"shuffled {fold.test[0]}"))
    shuffled = shuffled_sites(fold.pool.site, fold.train, rng)
    stages = {stage: np.hstack([x, beside[stage]]) for stage, x in features.items()}
    stages |= {"covariates": beside["before"], "shuffled": stages["after"]}
    for stage, x in stages.items():
        if not x.shape[1]:
            continue
        site = shuffled if stage == "shuffled" else None
        trained = fold.site_scores(x, REPORTED, site=site, seed=seed)
        by_training = {one.classifier: one.balanced_accuracy for one in trained}
        among_test = fold.site_scores_among_test(x, shuffled=site is not None, seed=seed)
        for fitted_on, accuracies in (("training", by_training), ("held-out", among_test)):
            row = {"stage": stage, "fitted_on": f"{fitted_on} participants"}
            yield from (row | {"classifier": name, "mean": value} for name, value in accuracies.items())


def _signal_rows(fold: Fold, features: dict[str, FloatArray]) -> Iterator[dict[str, Any]]:
    """Predict each covariate and the target, where they vary, from features alone."""
    pool = fold.pool
    for name, values in _variables(pool):
        is_class = values.dtype.kind == "U" or (len(np.unique(values)) == 2 and name in pool.covariate_names)
        score = fold.class_scores if is_class else fold.number_scores
        before, after = (score(x, values) for x in features.values())
        for where, value in before.items():
            row = {"what": name, "measure": "AUC" if is_class else "R²", "where": where}
            yield row | {"before": value, "after": after[where], "change": after[where] - value}


def _variables(pool: PooledDataset) -> list[tuple[str, NDArray[Any]]]:
    """Return each covariate and the target, where they vary, by name."""
    variables = [*zip(pool.covariate_names, pool.C.T, strict=True)]
    if pool.y is not None:
        variables.append((pool.target_name, pool.y.astype(str) if pool.task == "class" else pool.y))
    return [(name, values) for name, values in variables if len(np.unique(values)) > 1]


def _written(
    folds: list[Fold],
    before: FloatArray,
    final: FloatArray,
    empty: dict[str, NDArray[np.bool_]],
    filled: NDArray[np.bool_] | None,
    again: Again | None,
    columns: IntArray,
    seed: int,
) -> dict[str, Any]:
    """Return what the harmonizer may have written into features, by variable, and what it kept, by feature.

    ``written`` has what, before, after, gain and error (:func:`equipool.judge.written.gain`); of all values,
    R² from filled cells (``filled_after``), its gain over R² from measured cells, and the error of that; with
    ``again`` R² of shuffled values (``null``) and by what factor their effect rose (``chance``). ``features``
    has kept, by variable what it adds, and whether many rows share a value. The latter features are judged by
    what is added alone: who moves a shared value, as ComBat does, writes covariates there. Where measured
    cells were emptied, ``emptied`` has p-values of variables and the site saying which.
    """
    pool = folds[0].pool
    one, two = np.where(empty["before"], np.nan, before), np.where(empty["after"], np.nan, final)
    both = np.where(empty["after"], np.nan, before)  # as measured, where both are there
    variables = {name: written.as_numbers(values) for name, values in _variables(pool)}
    alone = np.isnan(find_point_masses(np.sort(one, axis=0)))  # no value is shared by many rows
    free = columns[alone[columns]] if alone[columns].any() else columns
    rows: list[dict[str, Any]] = []
    for name, v in variables.items():
        rows.append({"what": name, **written.gain(one[:, free], two[:, free], v, pool.site, folds)})
        if filled is not None and filled.any():
            measured, imputed = (np.where(gone, np.nan, final)[:, columns] for gone in (filled, ~filled))
            found = written.gain(measured, imputed, v, np.zeros_like(pool.site), folds)
            rows[-1] |= {f"filled_{key}": found[key] for key in ("after", "gain", "error")}
    if again is not None and rows:
        cells = np.where(empty["after"][:, free], np.nan, 0.0)
        nulls = _nulls(folds, both[:, free], lambda c, y: again(c, y)[:, free] + cells, variables, seed)
        rows = [row | null for row, null in zip(rows, nulls, strict=True)]
    features: Columns = {"kept": written.kept(both, two, pool.C, pool.site).round(4).tolist()}
    if variables:
        added = np.abs(written.coefficients(both, two, np.hstack([*variables.values()]), pool.site))
        ends = np.cumsum([v.shape[1] for v in variables.values()])
        for name, part in zip(variables, np.split(added, ends[:-1], axis=1), strict=True):
            features[f"{name} adds"] = part.max(axis=1).round(4).tolist()
    features["shared value"] = (~alone).tolist()
    emptied, gone = {}, empty["after"] & ~empty["before"]
    if gone.any():
        inside = np.where(np.isnan(one), np.nan, scores.within_sites(one, pool.site))
        by = [(name, v, pool.site) for name, v in variables.items()]
        by.append((pool.site_name, np.eye(len(pool.sites))[pool.site], np.zeros_like(pool.site)))
        emptied = {name: written.choice(gone, inside, v, s, folds[0].participant) for name, v, s in by}
    # JSON has no NaN.
    rows = [{k: v if isinstance(v, str) or np.isfinite(v) else None for k, v in row.items()} for row in rows]
    return {"written": rows, "features": features, "emptied": emptied}


def _nulls(
    folds: list[Fold], before: FloatArray, again: Again, variables: dict[str, FloatArray], seed: int
) -> list[dict[str, float]]:
    """Return how well shuffled variables are predicted after harmonizing again, and how their effect grew."""
    pool, rng = folds[0].pool, np.random.default_rng(seed_for(seed, "shuffled within sites"))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variables}
    for _ in range(SHUFFLES):
        c, order = (written.shuffled_within(x, pool.site, rng) for x in (pool.C, np.arange(len(pool))))
        x = again(c, None if pool.y is None else pool.y[order])
        for name, v in variables.items():
            k = [pool.covariate_names.index(name)] if name in pool.covariate_names else []
            v = c[:, k] if k else v[order]
            ratio = written.chance_ratio(before, x, v, c[:, :0] if k else c, pool.site)
            found[name].append((written.r2_within(x, v, pool.site, folds), ratio))
    means = (np.mean(values, axis=0) for values in found.values())
    return [{"null": float(null), "chance": float(chance)} for null, chance in means]


def _over_folds(rows: list[dict[str, Any]], keys: list[str], values: dict[str, str]) -> Columns:
    """Return means and standard deviations over folds, ``None`` where there is none: JSON has no NaN.

    ``values`` are the columns to summarise, each with the name of its standard deviation.
    """
    grouped = pd.DataFrame(rows, columns=[*keys, *values]).groupby(keys, sort=False)
    columns: dict[str, Any] = {}
    for name, sd in values.items():
        columns |= {name: grouped[name].mean(), sd: grouped[name].std()}
    table = pd.DataFrame(columns).reset_index().astype(object)
    return {str(name): list(column) for name, column in table.where(table.notna(), None).items()}
