"""The account of a harmonization: every number of its report, and how it was obtained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipool.checks import PreflightReport
from equipool.data import PooledDataset, Volumes
from equipool.exceptions import InputError
from equipool.judge.blocks import means_of_volumes
from equipool.judge.classifiers import REPORTED
from equipool.judge.heldout import MIN_PARTICIPANTS, held_out, numbered, sample_rows
from equipool.judge.scores import Columns, FloatArray, IntArray, delta_eq, equivariance_of, site_shares
from equipool.report import figure_tables as tables
from equipool.report.verdict import verdict

Harmonize = Callable[[IntArray], FloatArray]  # positions of training rows -> harmonized features of all
Tau = tuple[dict[str, Any], IntArray, FloatArray]  # its errors, the rows it is of, the vectors

VERSION = 3
JUDGED = 5000  # rows beyond which the folds take a sample
MAPPED = 500  # rows drawn in a t-SNE


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
    result = held_out(
        pool[rows],
        before[rows],
        lambda train: (harmonize(rows[train]) if harmonize else after)[rows],
        subject=None if subject is None else subject[rows],
        folds=folds,
        seed=seed,
    )
    # What was predicted, and the classifiers' titles.
    judged = None if result is None else {**vars(result), "classifiers": REPORTED}
    shares = [
        np.array(judged["shares"][stage]) if judged else site_shares(pool, x)
        for stage, x in (("before", before), ("after", after))
    ]
    if judged:
        del judged["shares"]
    names = list(pool.feature_names if features is None else features)
    shown = tables.worst(*shares)
    largest = before[:, shown], after[:, shown], [names[k] for k in shown]
    mapped = {"before": (drawn, before[drawn]), "after": (drawn, after[drawn])}
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
        shares={"feature": names, "before": tables.rounded(shares[0]), "after": tables.rounded(shares[1])},
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


def refit_images(pool: PooledDataset, volumes: Volumes) -> Harmonize:
    """Return what fits a harmonizer of images on some rows and harmonizes the block means of all."""
    from equipool.estimators import ImageHarmonizer

    def harmonize(train: IntArray) -> FloatArray:
        y, covariates = None if pool.y is None else pool.y[train], pool.labelled_covariates.iloc[train]
        model = ImageHarmonizer(unseen_site="pooled")
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
