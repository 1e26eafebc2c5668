"""The account of a harmonization: every number of its report, and how it was obtained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipool.checks import PreflightReport
from equipool.data import PooledDataset, Volumes
from equipool.exceptions import InputError
from equipool.judge.blocks import means_of_volumes
from equipool.judge.heldout import MIN_PARTICIPANTS, held_out, numbered, sample_rows
from equipool.judge.scores import Columns, FloatArray, IntArray, delta_eq, equivariance_of, site_shares
from equipool.report import figure_tables as tables

Harmonize = Callable[[IntArray], FloatArray]  # positions of training rows -> harmonized features of all
Tau = tuple[dict[str, Any], IntArray, FloatArray]  # its errors, the rows it is of, the vectors

VERSION = 3
JUDGED = 5000  # rows beyond which the folds take a sample
MAPPED = 500  # rows drawn in a t-SNE
CONFOUNDED = 0.9  # balanced accuracy from covariates alone above which a site effect cannot be assessed
CLOSE = 0.03  # of a balanced accuracy, R² or AUC: a smaller difference is not worth a sentence
LEVELS = ("bad", "fair", "good")


@dataclass(frozen=True)
class Account:
    """What a report says, as JSON-ready values; tables are columns by name."""

    kind: str  # "table", "images", or "given": a table that another program harmonized
    names: dict[str, Any]  # site, covariates, target, task, and counts: of sites by name, rows, features …
    preflight: dict[str, Any]  # PreflightReport.to_dict
    densities: dict[str, Columns]  # of each numeric covariate by site
    # Predictions in held-out participants, None where sites are too small: "site_scores" (stage,
    # classifier, fitted_on, mean, sd), "signals" of covariates and target, "classifiers" and counts.
    held_out: dict[str, Any] | None
    equivariance: dict[str, Any] | None  # of the pooler that gave τ, if one was fitted
    maps: dict[str, Columns]  # t-SNE with site, covariates and target: "before", "after", perhaps "tau"
    shares: Columns  # of each feature's variance that is due to the site, before and after
    curves: Columns  # by site, of the features with the largest site effects
    boxes: Columns
    effects: dict[str, Any] | None  # of the target on each feature
    statmap: dict[str, Any] | None  # from statmap_figures.statmap_pictures
    verdict: list[dict[str, str]]  # sentences with a level: "good", "fair", "bad"
    method: list[str]  # sentences to add to how the numbers were obtained
    made: dict[str, Any] = field(default_factory=dict)  # versions, command, settings, hashes
    version: int = VERSION

    def to_json(self) -> str:
        """Return the account as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Account:
        """Read what :meth:`to_json` wrote."""
        again = "run `equipool harmonize` again."
        try:
            values = json.loads(text)
        except ValueError:
            raise InputError(f"This is no account of equipool (no JSON); {again}") from None
        names = {one.name for one in fields(cls)}
        if not isinstance(values, dict) or values.get("version") != VERSION or set(values) != names:
            raise InputError(f"This account was written by another version of equipool; {again}")
        return cls(**values)


def account_of(
    pool: PooledDataset,
    after: FloatArray,
    harmonize: Harmonize | None,
    preflight: PreflightReport,
    *,
    before: FloatArray | None = None,
    features: Sequence[str] | None = None,
    folds: int | None = None,
    method: Sequence[str] = (),
    kind: str = "table",
    tau: Tau | None = None,
    statmap: dict[str, Any] | None = None,
    subject: NDArray[Any] | None = None,
    seed: int = 0,
    made: dict[str, Any] | None = None,
) -> Account:
    """Return the account of the features of a pool before and after any harmonizer.

    ``after`` are the features, (rows, features), by the harmonizer fitted on all rows. ``harmonize`` takes
    the positions of training rows and returns the features of all rows by one fitted on these alone, as
    :func:`refit_table` gives it; None: it cannot be refitted. ``before`` and ``features`` are the features as
    measured and their names, by default the pool's; missing values become the mean. ``method`` has further
    sentences on how the numbers were obtained, ``tau`` is from :func:`tau_of`, ``subject`` the participant of
    each row.
    """
    before = pool.features if before is None else before
    if np.isnan(before).any():
        before = np.where(np.isnan(before), np.nanmean(before, axis=0), before)
        method = [*method, "As measured, missing values were replaced by the mean of the feature."]
    rows, drawn = sample_rows(pool, JUDGED, seed), sample_rows(pool, MAPPED, seed)
    judged = held_out(
        pool[rows],
        before[rows],
        lambda train: (harmonize(rows[train]) if harmonize else after)[rows],
        subject=None if subject is None else subject[rows],
        folds=folds,
        seed=seed,
    )
    stages = {"before": before, "after": after}
    shares = judged.pop("shares") if judged else {k: site_shares(pool, x) for k, x in stages.items()}
    names = list(pool.feature_names if features is None else features)
    shown = tables.worst(*map(np.asarray, shares.values()))
    largest = before[:, shown], after[:, shown], [names[k] for k in shown]
    mapped = {stage: (drawn, x[drawn]) for stage, x in stages.items()}
    if tau:
        mapped["tau"] = tau[1:]
    covariates = list(pool.covariate_names)
    words = " and ".join(filter(None, [", ".join(covariates[:-1]), *covariates[-1:]]))
    return Account(
        kind=kind if harmonize else "given",
        names=_names(pool, before.shape[1], numbered(subject, len(pool))),
        preflight=json.loads(json.dumps(preflight.to_dict())),
        densities={
            name: tables.density_table(name, pool.site_labels, pool.C[:, k])
            for k, name in enumerate(covariates)
            if len(np.unique(pool.C[:, k])) > 2
        },
        held_out=judged,
        equivariance=tau[0] if tau else None,
        maps={name: _mapped(pool, *where, seed) for name, where in mapped.items()},
        shares={"feature": names, **{stage: tables.rounded(values) for stage, values in shares.items()}},
        curves=tables.curves(pool, *largest),
        boxes=tables.boxes(pool, *largest),
        effects=tables.effects(pool, before, after, names, subject),
        statmap=statmap,
        verdict=verdict(judged, words),
        method=list(method),
        made=made or {},
    )


# -- harmonizers -------------------------------------------------------------------------------------------


def refit_table(
    pool: PooledDataset, make: Callable[[], Any], subject: NDArray[Any] | None = None
) -> Harmonize:
    """Return what fits a harmonizer of tables on some rows and harmonizes all.

    ``make`` returns an unfitted one with ``fit(X, y, site=, covariates=)`` (and ``subject=``, if that is
    given) and ``transform(X, site=, covariates=)``. Rows of a site without training rows stay as measured.
    """

    def harmonize(train: IntArray) -> FloatArray:
        def given(rows: Any) -> dict[str, Any]:
            return {"site": pool.site_labels[rows], "covariates": pool.C[rows] if pool.C.shape[1] else None}

        model, x, fitted = make(), pool.features, np.isin(pool.site, pool.site[train])
        more = {} if subject is None else {"subject": subject[train]}
        model.fit(x[train], None if pool.y is None else pool.y[train], **given(train), **more)
        after = np.where(np.isnan(x), np.nanmean(x, axis=0), x)
        after[fitted] = model.transform(x[fitted], **given(fitted))
        return after

    return harmonize


def refit_images(pool: PooledDataset, volumes: Volumes, *, keep_target: bool = False) -> Harmonize:
    """Return what fits a harmonizer of images on some rows and harmonizes the block means of all."""
    from equipool.estimators import ImageHarmonizer

    def harmonize(train: IntArray) -> FloatArray:
        y, covariates = None if pool.y is None else pool.y[train], pool.labelled_covariates.iloc[train]
        model = ImageHarmonizer(unseen_site="pooled", keep_target=keep_target)
        model.fit(volumes[train], y, site=pool.site_labels[train], covariates=covariates)
        return means_of_volumes(volumes, pool, model)

    return harmonize


def tau_of(pooler: Any, x: Any, pool: PooledDataset) -> Tau | None:
    """Return τ of some rows by the pooler that was fitted on them, and the error of its Φ."""
    if not pool.covariates:
        return None
    rows = sample_rows(pool, MAPPED, 0)
    tau = pooler.tau_vector(x[rows])
    error, k = float(equivariance_of(pooler, x[rows])), tables.first_number(pool)
    about = {
        "error": error if np.isfinite(error) else None,
        "delta_eq": float(delta_eq(tau, pool.C[rows])),
        "covariate": None if k is None else pool.covariate_names[k],
        "how": f"τ of the pooler that was fitted, for {len(rows)} of the rows it was fitted on.",
    }
    return about, rows, tau


# -- parts -------------------------------------------------------------------------------------------------


def _names(pool: PooledDataset, features: int, participant: IntArray) -> dict[str, Any]:
    counts = np.bincount(pool.site, minlength=len(pool.sites))
    order = np.argsort(-counts, kind="stable")
    return {
        "site": pool.site_name,
        "covariates": [
            {"name": c.name, "unit": c.unit, "levels": c.levels and list(c.levels)} for c in pool.covariates
        ],
        "target": None if pool.y is None else pool.target_name,
        "task": pool.task,
        "participants": len(np.unique(participant)),
        "rows": len(pool),
        "features": features,
        "judged_rows": min(len(pool), JUDGED),
        "min_participants": MIN_PARTICIPANTS,
        "small_sites": int(np.isin(counts, range(1, MIN_PARTICIPANTS)).sum()),
        "sites": {pool.sites[k]: int(counts[k]) for k in order if counts[k]},
    }


def _mapped(pool: PooledDataset, rows: IntArray, x: FloatArray, seed: int) -> Columns:
    """Return t-SNE of some rows with their site, covariates and target, under names that do not clash."""
    places, labelled = tables.embedding(x, seed), pool[rows].labelled_covariates
    table: Columns = {"x": tables.rounded(places[:, 0]), "y": tables.rounded(places[:, 1])}
    table["site"] = pool.site_labels[rows].tolist()
    for one in pool.covariates:
        values = labelled[one.name]
        table[tables.column(one.name)] = values.tolist() if one.levels else tables.rounded(values)
    if pool.y is not None:
        y, name = pool.y[rows], tables.column(pool.target_name)
        table[name] = tables.rounded(y) if pool.task == "number" else y.astype(str).tolist()
    return table


# -- the verdict: what predictions in held-out participants mean, in plain sentences ------------------------


def rows_of(table: Columns) -> Iterator[dict[str, Any]]:
    """Return a table's rows, each by the names of its columns."""
    for row in zip(*table.values(), strict=True):
        yield dict(zip(table, row, strict=True))


def best(site_scores: Columns, stage: str, fitted_on: str) -> dict[str, Any] | None:
    """Return the classifier with the highest mean at one stage."""
    rows = [row for row in rows_of(site_scores) if row["stage"] == stage and row["fitted_on"] == fitted_on]
    return max(rows, key=lambda row: row["mean"]) if rows else None


def verdict(judged: dict[str, Any] | None, covariates: str = "") -> list[dict[str, str]]:
    """Return what ``Account.held_out`` means, in sentences that name the covariates; it may be bad news."""
    if judged is None:
        text = "Harmonization cannot be judged: the sites are too small to hold participants out."
        return [{"level": "fair", "text": text}]
    return [_site_verdict(judged, covariates), *_signal_verdicts(judged)]


def _site_verdict(judged: dict[str, Any], covariates: str) -> dict[str, str]:
    """Judge by classifiers fitted on training and on held-out participants, and say the worse."""
    both = [_site(judged, who) for who in dict.fromkeys(judged["site_scores"]["fitted_on"])]
    sites = [site for site in both if site is not None]
    sites = [site for site in sites if site["floor"] < CONFOUNDED] or sites
    site = min(sites, key=lambda one: (LEVELS.index(one["level"]), -one["after"]))
    level, before, after, floor = site["level"], site["before"], site["after"], site["floor"]
    by_covariates = site["covariates"] is not None and site["covariates"] >= site["chance"]
    others = f"from {covariates} alone" if by_covariates else "by chance"
    if site["worse"]:
        text = "Bad news: the site is easier to predict than before"
    elif floor >= CONFOUNDED and by_covariates:
        level = "fair"
        text = f"Removal of the site effect cannot be assessed: the site can be predicted {others}"
    elif not site["shown"]:
        text = f"There was little to remove: the site could hardly be predicted better than {others}"
    elif level == "good":
        text = f"The site can no longer be predicted better than {others}"
    elif site["unclear"] and before - after < 0.5 * (before - floor):
        text = "There are too few participants to say whether the site effect is removed"
    elif site["unclear"]:
        text = "The site effect may be removed: the rest is within the sampling error of so few participants"
    elif level == "fair":
        gone = (before - after) / (before - floor)
        text = f"The site effect is reduced, not removed: {gone:.0%} of the excess over {floor:.2f} is gone"
    else:
        text = "Bad news: the site can be predicted nearly as well as before"
    given = "" if site["covariates"] is None else f"; given {covariates} alone: {site['covariates']:.2f}"
    numbers = (
        "A classifier predicts the site of held-out participants with a balanced accuracy of "
        f"{after:.2f} (as measured: {before:.2f}){given}; chance: {site['chance']:.2f}."
    )
    return {"level": level, "text": f"{text}. {numbers}"}


def _site(judged: dict[str, Any], who: str) -> dict[str, Any] | None:
    """Return how well the best classifier predicts the site; the floor: covariates alone, or chance."""
    stages = ("before", "after", "covariates", "shuffled")
    rows = {stage: best(judged["site_scores"], stage, who) for stage in stages}
    before, after, covariates, chance = (row["mean"] if row else None for row in rows.values())
    if before is None or after is None or chance is None:
        return None
    noise = {stage: _noise(row["sd"], judged["folds"]) for stage, row in rows.items() if row}
    floor = max(chance, covariates or 0.0)
    unclear, worse = after <= floor + noise["after"], after > max(before, floor) + noise["after"]
    shown, little = before > floor + noise["before"], before - after < 0.25 * (before - floor)
    level = "good" if after <= floor + CLOSE else "fair"
    if worse or (shown and little and not unclear):
        level = "bad"
    site = {"level": level, "before": before, "after": after, "covariates": covariates, "chance": chance}
    return site | {"floor": floor, "shown": shown, "unclear": unclear, "worse": worse}


def _noise(sd: float | None, folds: int) -> float:
    """Return by how much a mean over folds must differ to count: two standard errors, at least 0.03."""
    return max(CLOSE, 2 * (sd or 0.0) / folds**0.5)


def _signal_verdicts(judged: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Judge what is predicted within sites, where knowing the site does not help."""
    for row in rows_of(judged["signals"]):
        if row["where"] != "within sites" or row["change"] is None:
            continue
        what, change, noise = row["what"], row["change"], _noise(row["change_sd"], judged["folds"])
        hardly = (0.5 if row["measure"] == "AUC" else 0.0) + CLOSE  # chance, or little more
        level, text = "good", f"The signal of {what} was preserved"
        if change > noise and row["after"] > hardly:
            text = f"{what} is predicted better than before"
        elif row["before"] <= hardly:
            level, why = "fair", "so a loss of its signal could not be detected"
            text = f"{what} could hardly be predicted before, {why}"
        elif change < -noise:
            level, text = "bad", f"Bad news: part of the signal of {what} was lost"
        elif change < -CLOSE:
            level, why = "fair", "the change is within its sampling error"
            text = f"The signal of {what} may be reduced; {why}"
        numbers = f"{row['before']:.2f} as measured, {row['after']:.2f} harmonized".replace("-", "−")
        yield {"level": level, "text": f"{text} ({row['measure']} within sites {numbers})."}
