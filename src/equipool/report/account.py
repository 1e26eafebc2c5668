"""The honest account of a harmonization: every number of its report, and how it was obtained."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipool.checks import PreflightReport
from equipool.checks.findings import plural
from equipool.data import PooledDataset, Volumes
from equipool.exceptions import InputError
from equipool.judge.heldout import MIN_PARTICIPANTS, HeldOut, held_out, numbered, sample_rows
from equipool.judge.scores import Columns, site_shares
from equipool.report.views import (
    boxes,
    column,
    curves,
    densities,
    effects,
    embedding,
    first_number,
    rounded,
    worst,
)

__all__ = ["Account", "account_of_images", "account_of_table", "account_of_two_tables", "verdict"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

VERSION = 1
JUDGED = 5000  # people beyond whom the folds take a sample
MAPPED = 500  # people drawn in a t-SNE
TURNED = 1000  # people that τ is learned from
TAU_STEPS = 150
TELLS = 0.9  # balanced accuracy from the covariates alone; beyond, reading the site says nothing
CLOSE = 0.03  # of a balanced accuracy, R² or AUC: less is not worth a sentence


@dataclass(frozen=True)
class Account:
    """What a report says, as JSON-ready values; tables are columns by name.

    Attributes
    ----------
    kind
        ``"table"``, ``"images"``, or ``"given"``: somebody else's harmonized table.
    names
        site, covariates (name, unit, levels), target, task, people, features, sites by size.
    preflight
        :meth:`PreflightReport.to_dict`.
    people
        One row a person: site, covariates, target; no ids.
    densities
        Of each numeric covariate by site.
    held_out
        Readings of the site and of people's own variables on held-out people; ``None`` where sites are too
        small.
    equivariance
        Of the pooler that gave τ; ``None`` without covariates.
    maps
        t-SNE by name: ``before``, ``after``, ``tau``.
    shares
        Each feature's share of variance that is the site's, before and after.
    curves, boxes
        Of the features that the site changes most.
    effects
        What the target does to each feature, and how many are significant.
    statmap
        t-maps of images, with their pictures; see :func:`equipool.report.brain_figures.statmap_pictures`.
    verdict
        Sentences with a level: ``"good"``, ``"fair"``, ``"bad"``.
    method
        How the numbers were obtained, in sentences.
    made
        What is needed to make it again: versions, command, settings, hashes.
    """

    kind: str
    names: dict[str, Any]
    preflight: dict[str, Any]
    people: Columns
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
        known = {one.name for one in fields(cls)}
        if not isinstance(values, dict) or values.get("version") != VERSION or set(values) != known:
            raise InputError(
                "This account was written by another version of equipool; run `equipool harmonize` again."
            )
        return cls(**values)


# -- the three kinds ---------------------------------------------------------------------------------------


def account_of_table(
    pool: PooledDataset,
    harmonized: FloatArray,
    preflight: PreflightReport,
    *,
    make: Callable[[], Any] | None = None,
    subject: NDArray[Any] | None = None,
    seed: int = 0,
    made: dict[str, Any] | None = None,
) -> Account:
    """Return the account of a table that a harmonizer was fitted on.

    Parameters
    ----------
    pool, harmonized
        The people with their features as measured, and the features harmonized.
    preflight
        What was found before.
    make
        Returns an unfitted harmonizer, with ``fit(X, y, site=, covariates=)`` (and ``subject=``, if that is
        given) and ``transform``; it is fitted anew in each fold. Default: :class:`SiteHarmonizer`.
    subject
        Who each row is, where people come several times.
    """
    from equipool.estimators import SiteHarmonizer

    factory = make or (lambda: SiteHarmonizer(random_state=seed))
    rows = sample_rows(pool, JUDGED, seed)
    part, before = pool[rows], _filled(pool.features)
    own = None if subject is None else subject[rows]

    def refitted(train: IntArray) -> FloatArray:
        model = factory()
        y = None if part.y is None else part.y[train]
        who: dict[str, Any] = {} if own is None else {"subject": own[train]}
        model.fit(
            part.features[train], y, site=part.site_labels[train], covariates=_given(part.C[train]), **who
        )
        # A site whose only people are held out at another one stays as measured; nobody is read there.
        known, clean = np.isin(part.site, part.site[train]), before[rows]
        clean[known] = model.transform(
            part.features[known], site=part.site_labels[known], covariates=_given(part.C[known])
        )
        return clean

    found = held_out(part, before[rows], refitted, subject=own, seed=seed)
    how = ["The harmonizer was fitted anew in each fold, on its training people alone."]
    if np.isnan(pool.features).any():
        how.append("As measured, missing values were read as the feature's mean.")
    tau = _tau_of_table(replace(pool, X=before), subject, seed)
    given: dict[str, Any] = {"subject": subject, "seed": seed, "made": made}
    return _account("table", pool, before, harmonized, preflight, found, how, tau=tau, **given)


def account_of_two_tables(
    pool: PooledDataset,
    harmonized: FloatArray,
    preflight: PreflightReport,
    *,
    subject: NDArray[Any] | None = None,
    seed: int = 0,
    made: dict[str, Any] | None = None,
) -> Account:
    """Return the account of anybody's harmonized table, which cannot be fitted anew."""
    rows = sample_rows(pool, JUDGED, seed)
    own = None if subject is None else subject[rows]
    found = held_out(pool[rows], pool.features[rows], lambda train: harmonized[rows], subject=own, seed=seed)
    how = (
        "The harmonized table was given, so the harmonizer itself was not cross-validated: it may have seen "
        "the people that readers are judged on, and then the site looks better hidden, and signals clearer, "
        "than they would be in new people."
    )
    tau = _tau_of_table(pool, subject, seed)
    given: dict[str, Any] = {"subject": subject, "seed": seed, "made": made}
    return _account("given", pool, pool.features, harmonized, preflight, found, [how], tau=tau, **given)


def account_of_images(
    pool: PooledDataset,
    volumes: Volumes,
    pooler: Any,
    preflight: PreflightReport,
    *,
    subject: NDArray[Any] | None = None,
    statmap: dict[str, Any] | None = None,
    seed: int = 0,
    made: dict[str, Any] | None = None,
) -> Account:
    """Return the account of images that an :class:`EquivariantPooler` was fitted on.

    Everything is read from means over blocks of the brain. In the folds the closed form that harmonizes
    images is fitted anew; the pooler's networks, which τ comes from, are those fitted on all people.
    """
    from equipool.judge.blocks import ImageHarmonizer, block_names, block_size, means_of_volumes

    before = means_of_volumes(volumes, pool)
    after = means_of_volumes(volumes, pool, ImageHarmonizer(pooler.volume_sites_))
    large = before.shape[0] * volumes.shape[1] > 10**8

    def refitted(train: IntArray) -> FloatArray:
        told = _numbered(pool, train)
        y = None if told.y is None else told.y[train]
        model = ImageHarmonizer().fit(volumes[train], y, site=told.site[train], covariates=told.scaled[train])
        return means_of_volumes(volumes, told, model)

    found = held_out(
        pool,
        before,
        refitted,
        subject=subject,
        folds=2 if large else 3,
        seed=seed,
    )
    how = [
        f"Images were read as {before.shape[1]} means over blocks of the brain of {block_size(volumes)}.",
        "The closed form that harmonizes images was fitted anew in each fold, on its training people alone.",
    ]
    return _account(
        "images",
        pool,
        before,
        after,
        preflight,
        found,
        how,
        features=block_names(volumes),
        tau=_tau_of_images(pool, volumes, pooler),
        statmap=statmap,
        subject=subject,
        seed=seed,
        made=made,
    )


def _account(
    kind: str,
    pool: PooledDataset,
    before: FloatArray,
    after: FloatArray,
    preflight: PreflightReport,
    found: HeldOut | None,
    how: list[str],
    *,
    tau: tuple[dict[str, Any], IntArray, FloatArray] | None,
    features: list[str] | None = None,
    statmap: dict[str, Any] | None = None,
    subject: NDArray[Any] | None,
    seed: int,
    made: dict[str, Any] | None,
) -> Account:
    features = list(pool.feature_names) if features is None else features
    if found is None:
        shares = site_shares(pool, before), site_shares(pool, after)
    else:
        shares = np.array(found.shares["before"]), np.array(found.shares["after"])
    shown = worst(*shares)
    names = [features[k] for k in shown]
    rows = sample_rows(pool, MAPPED, seed)
    maps = {
        "before": _mapped(pool, rows, embedding(before[rows], seed)),
        "after": _mapped(pool, rows, embedding(after[rows], seed)),
    }
    if tau is not None:
        maps["tau"] = _mapped(pool, tau[1], embedding(tau[2], seed))
    known = effects(pool, before, after, features, subject)
    return Account(
        kind=kind,
        names=_names(pool, before.shape[1], numbered(subject, len(pool))),
        preflight=preflight.to_dict(),
        people=_described(pool, sample_rows(pool, JUDGED, seed)),
        densities=densities(pool),
        held_out=None if found is None else asdict(found),
        equivariance=None if tau is None else tau[0],
        maps=maps,
        shares={"feature": features, "before": rounded(shares[0]), "after": rounded(shares[1])},
        curves=curves(pool, before[:, shown], after[:, shown], names),
        boxes=boxes(pool, before[:, shown], after[:, shown], names),
        effects=None if known is None else {"about": known[0], "table": known[1]},
        statmap=statmap,
        verdict=verdict(found, _covariate_words(pool)),
        method=[*_method(pool, found), *how],
        made=made or {},
    )


# -- parts -------------------------------------------------------------------------------------------------


def _filled(x: FloatArray) -> FloatArray:
    """Return features with each one's mean where it is missing."""
    return np.where(np.isnan(x), np.nanmean(x, axis=0), x) if np.isnan(x).any() else x


def _given(C: FloatArray) -> FloatArray | None:
    return C if C.shape[1] else None


def _numbered(pool: PooledDataset, train: IntArray) -> PooledDataset:
    """Return the pool with sites numbered among those in training; nobody is read at any other."""
    known = np.unique(pool.site[train])
    return replace(pool, site=np.searchsorted(known, pool.site).clip(max=len(known) - 1))


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
        "people": len(np.unique(person)),
        "rows": len(pool),
        "features": features,
        "sites": {pool.sites[k]: int(counts[k]) for k in order if counts[k]},
    }


def _described(pool: PooledDataset, rows: IntArray) -> Columns:
    """Return site, covariates and target of people, under names that do not clash."""
    table: Columns = {"site": [pool.sites[k] for k in pool.site[rows]]}
    for k, covariate in enumerate(pool.covariates):
        values, levels = pool.C[rows, k], covariate.levels
        table[column(covariate.name)] = (
            rounded(values) if levels is None else [levels[int(v)] for v in values]
        )
    if pool.y is not None:
        values = pool.y[rows]
        table[column(pool.target_name)] = (
            rounded(values) if pool.task == "number" else [str(v) for v in values]
        )
    return table


def _mapped(pool: PooledDataset, rows: IntArray, places: FloatArray) -> Columns:
    return {"x": rounded(places[:, 0]), "y": rounded(places[:, 1]), **_described(pool, rows)}


def _tau_of_table(
    pool: PooledDataset, subject: NDArray[Any] | None, seed: int
) -> tuple[dict[str, Any], IntArray, FloatArray] | None:
    """Fit a short pooler on two thirds of the people; return its errors and the τ of the other third."""
    from threadpoolctl import threadpool_limits

    from equipool.estimators import EquivariantPooler

    rows = sample_rows(pool, TURNED, seed)
    _, first, person = np.unique(numbered(subject, len(pool))[rows], return_index=True, return_inverse=True)
    if not pool.covariates or len(first) < 12:
        return None
    part = pool[rows]
    fitted, judged = part[first].split(1 / 3, stratify="site", random_state=seed)
    train, test = (np.flatnonzero(np.isin(person, who)) for who in (fitted, judged))
    x = part.features
    # Stage one is what τ comes from; stage two is only walked through, so that Φ can be tried.
    pooler = EquivariantPooler(
        steps=TAU_STEPS, mmd=0.0, adversary=0.0, finetune=False, task=part.task, random_state=seed
    )
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the harmonizer has said it
        pooler.fit(x[train], None, site=part.site_labels[train], covariates=part.C[train])
        tau = pooler.tau_vector(x)
    about = _turning(pooler, x[test], tau[test], tau[train], part, train, test)
    about["how"] = (
        f"A table is harmonized in closed form, which has no τ. For this figure a pooler was fitted for "
        f"{TAU_STEPS} steps on {len(fitted)} people; it is shown and judged on {len(judged)} others."
    )
    return about, rows[test], tau[test]


def _tau_of_images(
    pool: PooledDataset, volumes: Volumes, pooler: Any
) -> tuple[dict[str, Any], IntArray, FloatArray] | None:
    if not pool.covariates:
        return None
    rows = sample_rows(pool, MAPPED, 0)
    own = volumes[rows]
    tau = pooler.tau_vector(own)
    about = _turning(pooler, own, tau, None, pool, rows, rows)
    about["how"] = (
        f"τ of the pooler that was fitted, of {len(rows)} of the people it was fitted on: nobody is held out."
    )
    return about, rows, tau


def _turning(
    pooler: Any,
    x: Any,
    tau: FloatArray,
    fitted: FloatArray | None,
    pool: PooledDataset,
    train: Any,
    test: Any,
) -> dict[str, Any]:
    """Return the error of Φ, ΔEq, and how well the first number is read from τ."""
    from equipool.judge.scores import age_from_tau, delta_eq, equivariance_of

    k = first_number(pool)
    read = None
    if fitted is not None and k is not None:
        read = age_from_tau(fitted, pool.C[train, k], tau, pool.C[test, k])[0]
    error = equivariance_of(pooler, x)
    return {
        "error": float(error) if np.isfinite(error) else None,
        "delta_eq": float(delta_eq(tau, pool.C[test])),
        "covariate": None if k is None else pool.covariate_names[k],
        "r2": read,
    }


def _covariate_words(pool: PooledDataset) -> str:
    names = list(pool.covariate_names)
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _method(pool: PooledDataset, found: HeldOut | None) -> list[str]:
    if found is None:
        return [
            f"Nobody could be held out: fewer than two sites have {MIN_PARTICIPANTS} people, so nothing was "
            "judged."
        ]
    count = np.bincount(pool.site)
    small = int(((count > 0) & (count < MIN_PARTICIPANTS)).sum())
    few = plural(small, "site with", "sites with")
    said = [
        f"Judged on {found.participants} people of {found.sites} sites in {found.folds} folds, every site in "
        "proportion; ± is the standard deviation over folds."
    ]
    if len(pool) > JUDGED:
        said.append(
            f"Of {plural(len(pool), 'person', 'people')} a sample of {JUDGED} was judged, every site "
            "in proportion."
        )
    if small:
        said.append(
            f"{few} fewer than {MIN_PARTICIPANTS} people {'was' if small == 1 else 'were'} not judged."
        )
    return said


# -- the verdict -------------------------------------------------------------------------------------------


def verdict(found: HeldOut | None, covariates: str = "") -> list[dict[str, str]]:
    """Return what the readings mean, in plain sentences that may be bad news."""
    if found is None:
        return [
            {"level": "fair", "text": "Whether it worked cannot be told: the sites are too small to hold "
             "anybody out."}
        ]  # fmt: skip
    return [_site_verdict(found, covariates), *_signal_verdicts(found)]


def best(readings: Columns, stage: str, fitted_on: str) -> dict[str, Any] | None:
    """Return the classifier with the highest mean at one stage."""
    rows = [dict(zip(readings, row, strict=True)) for row in zip(*readings.values(), strict=True)]
    own = [row for row in rows if row["stage"] == stage and row["fitted_on"] == fitted_on]
    return max(own, key=lambda row: row["mean"]) if own else None


class _SiteLevel(NamedTuple):
    """How well the site is read, and the higher of what covariates and shuffled sites give."""

    level: str
    before: float
    after: float
    floor: float
    spread: float  # of what is read after
    shown: bool  # whether more than the floor was read before
    by_chance: bool  # whether the floor is that of shuffled sites


def _site_verdict(found: HeldOut, covariates: str) -> dict[str, str]:
    """Judge by both kinds of readers and say the worse."""
    both = [_site_level(found, who) for who in ("training participants", "held-out participants")]
    judged = [one for one in both if one is not None]
    order = ("bad", "fair", "good")
    level, before, after, floor, spread, shown, by_chance = min(
        [one for one in judged if one.floor < TELLS] or judged,
        key=lambda one: (order.index(one.level), -one.after),
    )
    others = "by chance" if by_chance else f"from {covariates} alone"
    numbers = f"(balanced accuracy {before:.2f} before, {after:.2f} after, {floor:.2f} {others})"
    if after > max(before, floor) + spread:
        text = f"Bad news: the site is easier to read than before {numbers}."
    elif floor >= TELLS and not by_chance:
        level = "fair"
        text = (
            f"Whether the site is gone cannot be told by reading it: {covariates} alone tells it {numbers}."
        )
    elif not shown:
        text = f"There was little to take out: the site could hardly be read better than {others} {numbers}."
    elif level == "good":
        text = f"The site can no longer be read better than {others} {numbers}."
    elif after <= floor + spread and before - after < 0.5 * (before - floor):
        text = f"Whether the site is gone cannot be told from so few people {numbers}."
    elif after <= floor + spread:
        text = f"The site may be gone: what is left is within the noise of so few people {numbers}."
    elif level == "fair":
        share = (before - after) / (before - floor)
        text = f"The site is harder to read but not gone: {share:.0%} of it was taken out {numbers}."
    else:
        text = f"Bad news: the site can be read nearly as well as before {numbers}."
    return {"level": level, "text": text}


def _site_level(found: HeldOut, who: str) -> _SiteLevel | None:
    stages = ("before", "after", "covariates", "shuffled")
    read = {stage: best(found.site_scores, stage, who) for stage in stages}
    before, after, shuffled = read["before"], read["after"], read["shuffled"]
    if before is None or after is None or shuffled is None:
        return None
    told = read["covariates"] or shuffled
    by_chance = read["covariates"] is None or told["mean"] < shuffled["mean"]
    floor = max(told["mean"], shuffled["mean"])
    spread = _noise(after["sd"], found.folds)
    shown = before["mean"] > floor + _noise(before["sd"], found.folds)
    level = "good" if after["mean"] <= floor + CLOSE else "fair"
    little = before["mean"] - after["mean"] < 0.25 * (before["mean"] - floor)
    if after["mean"] > floor + spread and shown and little:
        level = "bad"
    if after["mean"] > max(before["mean"], floor) + spread:
        level = "bad"
    return _SiteLevel(level, before["mean"], after["mean"], floor, spread, shown, by_chance)


def _noise(sd: float | None, folds: int) -> float:
    """Return what a mean over folds must differ by to be worth a word: two standard errors, 0.03 at least."""
    return max(CLOSE, 2 * (sd or 0.0) / folds**0.5)


def _signal_verdicts(found: HeldOut) -> list[dict[str, str]]:
    """Judge what is read within sites, where knowing the site helps nobody."""
    signals = found.signals
    rows = [dict(zip(signals, row, strict=True)) for row in zip(*signals.values(), strict=True)]
    said = []
    for row in rows:
        if row["where"] != "within sites" or row["change"] is None:
            continue
        level, text = _signal_verdict(row, _noise(row["change_sd"], found.folds))
        said.append({"level": level, "text": text})
    return said


def _signal_verdict(row: dict[str, Any], noise: float) -> tuple[str, str]:
    what, change = row["what"], row["change"]
    numbers = f"({row['measure']} within sites {row['before']:.2f} before, {row['after']:.2f} after)"
    numbers = numbers.replace("-", "−")
    hardly = (0.5 if row["measure"] == "AUC" else 0.0) + CLOSE  # chance, or little more
    if change > noise and row["after"] > hardly:
        return "good", f"{what} is read better than before {numbers}."
    if row["before"] <= hardly:
        return "fair", f"{what} could hardly be read before {numbers}, so nothing can be said of its loss."
    if change < -noise:
        return "bad", f"Bad news: some of the signal of {what} was lost {numbers}."
    if change < -CLOSE:
        return "fair", f"{what} may have lost signal; the change is within its noise {numbers}."
    return "good", f"The signal of {what} was kept {numbers}."
