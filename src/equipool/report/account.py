"""The account of a harmonization: every number of its report, and how it was obtained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipool.checks import PreflightReport
from equipool.checks.findings import plural
from equipool.data import PooledDataset
from equipool.exceptions import InputError
from equipool.judge.heldout import LEAST as MIN_ROWS
from equipool.judge.heldout import READERS as CLASSIFIERS
from equipool.judge.heldout import HeldOut, held_out, persons
from equipool.judge.heldout import some_people as some_rows
from equipool.judge.scores import Columns, site_shares
from equipool.report.figure_tables import (
    boxes,
    column,
    curves,
    density_table,
    effects,
    embedding,
    first_number,
    rounded,
    worst,
)
from equipool.report.verdict import verdict

__all__ = ["Account", "Harmonize", "Tau", "account_of", "refit_images", "refit_table", "tau_of"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
Harmonize = Callable[[IntArray], FloatArray]  # positions of training rows -> harmonized features of all rows
Tau = tuple[dict[str, Any], IntArray, FloatArray]  # its errors, the rows it is of, the vectors

VERSION = 2
JUDGED = 5000  # rows beyond which the folds take a sample
MAPPED = 500  # rows drawn in a t-SNE
REFITTED = "The harmonizer was fitted anew in each fold, on the training participants alone."
GIVEN = (
    "The harmonized table was given, so the harmonizer itself was not cross-validated: it may have seen the "
    "participants that classifiers are tested on. Then the site looks better hidden, and signals clearer, than they "
    "would be in new participants."
)


@dataclass(frozen=True)
class Account:
    """What a report says, as JSON-ready values; tables are columns by name.

    Attributes
    ----------
    kind
        ``"table"``, ``"images"``, or ``"given"``: a table that another program harmonized.
    names
        site, covariates (name, unit, levels), target, task, participants, rows, features, sites by size.
    preflight
        :meth:`PreflightReport.to_dict`.
    densities
        Of each numeric covariate by site.
    held_out
        Predictions of the site and of covariates and target in held-out participants: ``readings`` (stage,
        classifier, fitted_on, mean, sd), ``signals``, the ``classifiers``' names, and counts; ``None`` where sites are
        too small.
    equivariance
        Of the pooler that gave τ; ``None`` where none was fitted.
    maps
        t-SNE by name: ``before``, ``after``, and ``tau`` if there is one; each with site, covariates and target.
    shares
        Each feature's share of variance that is due to the site, before and after.
    curves, boxes
        Of the features with the largest site effects.
    effects
        The target's effect on each feature, and how many are significant.
    statmap
        t-maps of images, with their pictures; see :func:`equipool.report.statmap_figures.statmap_pictures`.
    verdict
        Sentences with a level: ``"good"``, ``"fair"``, ``"bad"``.
    method
        How the numbers were obtained, in sentences.
    made
        Facts that are needed to make it again: harmonizer, versions, command, settings, hashes.
    """

    kind: str
    names: dict[str, Any]
    preflight: dict[str, Any]
    densities: dict[str, Columns]
    held_out: dict[str, Any] | None
    equivariance: dict[str, Any] | None
    maps: dict[str, Columns]
    shares: Columns
    curves: Columns
    boxes: Columns
    effects: dict[str, Any] | None
    statmap: dict[str, Any] | None
    verdict: list[dict[str, str]]
    method: list[str]
    made: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> str:
        """Return the account as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Account:
        """Read what :meth:`to_json` wrote."""
        try:
            values = json.loads(text)
        except ValueError:
            raise InputError(
                "This is no account of equipool (no JSON); run `equipool harmonize` again."
            ) from None
        names = {one.name for one in fields(cls)}
        if not isinstance(values, dict) or values.get("version") != VERSION or set(values) != names:
            raise InputError(
                "This account was written by another version of equipool; run `equipool harmonize` again."
            )
        return cls(**values)


def account_of(
    pool: PooledDataset,
    after: FloatArray,
    harmonize: Harmonize | None,
    preflight: PreflightReport,
    *,
    before: FloatArray | None = None,
    features: Sequence[str] | None = None,
    kind: str = "table",
    method: Sequence[str] = (),
    folds: int | None = None,
    tau: Tau | None = None,
    statmap: dict[str, Any] | None = None,
    subject: NDArray[Any] | None = None,
    seed: int = 0,
    made: dict[str, Any] | None = None,
) -> Account:
    """Return the account of the features of a pool before and after any harmonizer.

    Parameters
    ----------
    pool
        Site, covariates and target of each row.
    after
        Harmonized features, (rows, features), of the harmonizer that was fitted on all rows.
    harmonize
        Takes the positions of training rows and returns the features of all rows, harmonized by what was learned from
        these alone, as for :func:`~equipool.judge.heldout.held_out`; see :func:`refit_table`. None: the harmonizer
        cannot be fitted anew, and the report says so.
    preflight
        What was seen before.
    before, features
        Features as measured and their names; default: the pool's. Missing values are replaced by the mean.
    method
        Further sentences on how the numbers were obtained.
    folds
        Default: by the number of participants.
    tau
        From :func:`tau_of`, where an :class:`EquivariantPooler` was fitted.
    subject
        The participant of each row, where participants have several.
    made
        Facts about the harmonizer and the call.
    """
    before = pool.features if before is None else before
    said = [REFITTED if harmonize else GIVEN, *method]
    if np.isnan(before).any():
        before = np.where(np.isnan(before), np.nanmean(before, axis=0), before)
        said.append("As measured, missing values were replaced by the mean of the feature.")
    names = list(pool.feature_names if features is None else features)
    rows = some_rows(pool, JUDGED, seed)
    result = held_out(
        pool[rows],
        before[rows],
        (lambda train: harmonize(rows[train])[rows]) if harmonize else (lambda train: after[rows]),
        subject=None if subject is None else subject[rows],
        folds=folds,
        seed=seed,
    )
    judged = None if result is None else _judged(result)
    shares = (
        [site_shares(pool, x) for x in (before, after)]
        if result is None
        else [np.array(result.shares[stage]) for stage in ("before", "after")]
    )
    shown = worst(*shares)
    largest = before[:, shown], after[:, shown], [names[k] for k in shown]
    drawn = some_rows(pool, MAPPED, seed)
    maps = {
        "before": _mapped(pool, drawn, before[drawn], seed),
        "after": _mapped(pool, drawn, after[drawn], seed),
    }
    if tau is not None:
        maps["tau"] = _mapped(pool, tau[1], tau[2], seed)
    return Account(
        kind=kind if harmonize else "given",
        names=_names(pool, before.shape[1], persons(subject, len(pool))),
        preflight=preflight.to_dict(),
        densities={
            name: density_table(name, pool.site_labels, pool.C[:, k])
            for k, name in enumerate(pool.covariate_names)
            if len(np.unique(pool.C[:, k])) > 2
        },
        held_out=judged,
        equivariance=None if tau is None else tau[0],
        maps=maps,
        shares={"feature": names, "before": rounded(shares[0]), "after": rounded(shares[1])},
        curves=curves(pool, *largest),
        boxes=boxes(pool, *largest),
        effects=effects(pool, before, after, names, subject),
        statmap=statmap,
        verdict=verdict(judged, _listed(pool.covariate_names)),
        method=[*_method(pool, judged), *said],
        made=made or {},
    )


def _judged(result: HeldOut) -> dict[str, Any]:
    """Return what was predicted in held-out participants, in the report's words."""
    readings = {
        "classifier" if name == "reader" else name: values for name, values in result.readings.items()
    }
    return {
        "readings": readings,
        "signals": result.signals,
        "classifiers": dict(CLASSIFIERS),
        "folds": result.folds,
        "participants": result.people,
        "sites": result.sites,
    }


# -- harmonizers -------------------------------------------------------------------------------------------


def refit_table(
    pool: PooledDataset, make: Callable[[], Any], subject: NDArray[Any] | None = None
) -> Harmonize:
    """Return what fits a harmonizer of tables on some rows and harmonizes all.

    ``make`` returns an unfitted one with ``fit(X, y, site=, covariates=)`` (and ``subject=``, if that is given)
    and ``transform(X, site=, covariates=)``. Rows of a site without training rows stay as measured.
    """

    def harmonize(train: IntArray) -> FloatArray:
        model = make()
        x, C = pool.features, pool.C if pool.C.shape[1] else None
        y = None if pool.y is None else pool.y[train]
        more: dict[str, Any] = {} if subject is None else {"subject": subject[train]}
        model.fit(
            x[train], y, site=pool.site_labels[train], covariates=None if C is None else C[train], **more
        )
        seen = np.isin(pool.site, pool.site[train])
        after = x.copy()
        after[seen] = model.transform(
            x[seen], site=pool.site_labels[seen], covariates=None if C is None else C[seen]
        )
        return np.where(np.isnan(after), np.nanmean(x, axis=0), after) if np.isnan(after).any() else after

    return harmonize


def refit_images(pool: PooledDataset, blocks: Any) -> Harmonize:
    """Return what fits the closed form of images on some rows and harmonizes the block means of all."""

    def harmonize(train: IntArray) -> FloatArray:
        numbered = with_sites_of(pool, train)
        means: FloatArray = blocks.harmonized(blocks.fitted(numbered, train), numbered)
        return means

    return harmonize


def with_sites_of(pool: PooledDataset, train: IntArray) -> PooledDataset:
    """Return the pool with sites numbered among those in training; no row of any other is judged."""
    seen = np.unique(pool.site[train])
    return replace(pool, site=np.searchsorted(seen, pool.site).clip(max=len(seen) - 1))


def tau_of(pooler: Any, x: Any, pool: PooledDataset) -> Tau | None:
    """Return τ of some rows by the pooler that was fitted on them, with the error of Φ; None without covariates."""
    from equipool.benchmark.table1 import equivariance_of
    from equipool.judge.scores import delta_eq

    if not pool.covariates:
        return None
    rows = some_rows(pool, MAPPED, 0)
    tau = pooler.tau_vector(x[rows])
    error, k = float(equivariance_of(pooler, x[rows])), first_number(pool)
    about = {
        "error": error if np.isfinite(error) else None,
        "delta_eq": float(delta_eq(tau, pool.C[rows])),
        "covariate": None if k is None else pool.covariate_names[k],
        "how": f"τ of the pooler that was fitted, for {len(rows)} of the rows it was fitted on: none was held out.",
    }
    return about, rows, tau


# -- parts -------------------------------------------------------------------------------------------------


def _names(pool: PooledDataset, features: int, person: IntArray) -> dict[str, Any]:
    counts = np.bincount(pool.site, minlength=len(pool.sites))
    order = np.argsort(-counts, kind="stable")
    return {
        "site": pool.site_name,
        "covariates": [
            {"name": c.name, "unit": c.unit, "levels": None if c.levels is None else list(c.levels)}
            for c in pool.covariates
        ],
        "target": None if pool.y is None else pool.target_name,
        "task": pool.task,
        "participants": len(np.unique(person)),
        "rows": len(pool),
        "features": features,
        "sites": {pool.sites[k]: int(counts[k]) for k in order if counts[k]},
    }


def _mapped(pool: PooledDataset, rows: IntArray, x: FloatArray, seed: int) -> Columns:
    """Return t-SNE of some rows with their site, covariates and target, under names that do not clash."""
    places = embedding(x, seed)
    table: Columns = {"x": rounded(places[:, 0]), "y": rounded(places[:, 1])}
    table["site"] = [pool.sites[k] for k in pool.site[rows]]
    for k, covariate in enumerate(pool.covariates):
        values, levels = pool.C[rows, k], covariate.levels
        table[column(covariate.name)] = (
            rounded(values) if levels is None else [levels[int(value)] for value in values]
        )
    if pool.y is not None:
        values = pool.y[rows]
        table[column(pool.target_name)] = (
            rounded(values) if pool.task == "number" else [str(v) for v in values]
        )
    return table


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _method(pool: PooledDataset, judged: dict[str, Any] | None) -> list[str]:
    if judged is None:
        return [
            f"No participant could be held out: fewer than two sites have {MIN_ROWS} participants, so nothing was judged."
        ]
    count = np.bincount(pool.site)
    small = int(((count > 0) & (count < MIN_ROWS)).sum())
    said = [
        f"Judged on {judged['participants']} participants of {judged['sites']} sites in {judged['folds']} folds, "
        "stratified by site; ± is the standard deviation over folds."
    ]
    if len(pool) > JUDGED:
        said.append(f"Of {plural(len(pool), 'row')} a sample of {JUDGED}, stratified by site, was judged.")
    if small:
        few = plural(small, "site with", "sites with")
        said.append(f"{few} fewer than {MIN_ROWS} participants {'was' if small == 1 else 'were'} not judged.")
    return said
