"""The account of a harmonization: every number of its report, and how it was obtained."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from equipool.checks import PreflightReport
from equipool.checks.findings import listed, plural
from equipool.data import PooledDataset, Volumes
from equipool.data.volumes import means_of_volumes
from equipool.exceptions import InputError
from equipool.judge.heldout import MIN_PARTICIPANTS, Again, held_out, numbered, sample_rows, without_holes
from equipool.judge.scores import Columns, FloatArray, IntArray, delta_eq, equivariance_of, site_shares
from equipool.report import figure_tables as tables

Harmonize = Callable[[IntArray], FloatArray]  # positions of training rows -> harmonized features of all
Tau = tuple[dict[str, Any], IntArray, FloatArray]  # its errors, the rows it is of, the vectors

VERSION = 4
JUDGED = 5000  # rows beyond which the folds take a sample
MAPPED = 500  # rows drawn in a t-SNE
CONFOUNDED = 0.9  # balanced accuracy from covariates alone above which a site effect cannot be assessed
CLOSE = 0.03  # of a balanced accuracy, R² or AUC: a smaller difference is not worth a sentence
LEVELS = ("bad", "fair", "good")
# What a variable may have been written by, each (suspicious, evident); measured on honest harmonizers and on
# planted ones, see docs/experiments.md.
GAIN = (CLOSE, 0.12)  # of R² within sites beyond equal means and spreads, and three standard errors
ADDED = (0.12, 0.20)  # to a feature beyond its measured value, in standard deviations
NULL = (0.05, 0.10)  # R² of shuffled values
CHANCE = (1.07, 1.2)  # times which the joint effect of shuffled values is as large as on measured features
FILLED = 0.02  # R² of a variable from filled-in cells, over that from measured ones
CHOSEN = 0.005  # p-value of a variable saying which cells were emptied
KEPT = (0.5, 0.1)  # correlation with the measured value; the share of features below it that is evident


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
    # By feature: the share of variance due to the site, before and after; perhaps what was kept and added
    # (heldout), and the numbers of cells that were empty, filled in, or emptied.
    shares: Columns
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
    def from_json(cls, text: str) -> Self:
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
    filled: NDArray[np.bool_] | None = None,
    again: Again | None = None,
    seed: int = 0,
    made: dict[str, Any] | None = None,
) -> Account:
    """Return the account of the features of a pool before and after any harmonizer.

    ``after`` are the features, (rows, features), by the harmonizer fitted on all rows. ``harmonize`` takes
    the positions of training rows and returns the features of all rows by one fitted on these alone, as
    :func:`refit_table` gives it; None: it cannot be refitted. ``before`` and ``features`` are the features as
    measured and their names, by default the pool's. ``method`` has further sentences on how the numbers were
    obtained, ``tau`` is from :func:`tau_of`, ``subject`` the participant of each row. ``filled`` are cells
    that were imputed (by default, those that are empty in ``before`` alone): they are not judged. Cells that
    are empty in ``after`` alone are judged as measured. ``again`` is from :func:`again_table`.
    """
    before = pool.features if before is None else before
    filled = np.isnan(before) & ~np.isnan(after) if filled is None else filled
    empty, emptied = np.isnan(before) & ~filled, np.isnan(after) & ~np.isnan(before) & ~filled
    rows, drawn = sample_rows(pool, JUDGED, seed), sample_rows(pool, MAPPED, seed)
    if len(rows) < len(pool):
        again = None  # it harmonizes all rows
    judged = held_out(
        pool[rows],
        before[rows],
        lambda train: (harmonize(rows[train]) if harmonize else after)[rows],
        subject=None if subject is None else subject[rows],
        final=after[rows],
        filled=filled[rows],
        again=again,
        folds=folds,
        seed=seed,
    )
    before, after = (without_holes(x, filled) for x in (before, after))
    stages = {"before": before, "after": after}
    shares = judged.pop("shares") if judged else {k: site_shares(pool, x) for k, x in stages.items()}
    names = list(pool.feature_names if features is None else features)
    shown = tables.worst(*map(np.asarray, shares.values()))
    largest = before[:, shown], after[:, shown], [names[k] for k in shown]
    by_feature = judged.pop("features") if judged else {}
    method = [*method, *_on_cells(by_feature, empty, filled, emptied)]
    mapped = {stage: (drawn, x[drawn]) for stage, x in stages.items()}
    if tau:
        mapped["tau"] = tau[1:]
    covariates = list(pool.covariate_names)
    known = [*covariates, *(["which cells are empty"] if (empty | filled).any() else [])]
    words = " and ".join(filter(None, [", ".join(known[:-1]), *known[-1:]]))
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
        shares={"feature": names, **{k: tables.rounded(v) for k, v in shares.items()}, **by_feature},
        curves=tables.curves(pool, *largest),
        boxes=tables.boxes(pool, *largest),
        effects=tables.effects(pool, before, after, names, subject),
        statmap=statmap,
        verdict=verdict(judged, words, {"feature": names, **by_feature}),
        method=method,
        made=made or {},
    )


# -- harmonizers -------------------------------------------------------------------------------------------


def refit_table(
    pool: PooledDataset, make: Callable[[], Any], subject: NDArray[Any] | None = None
) -> Callable[..., FloatArray]:
    """Return what fits a harmonizer of tables on some rows and harmonizes all.

    ``make`` returns an unfitted one with ``fit(X, y, site=, covariates=)`` (and ``subject=``, if that is
    given) and ``transform(X, site=, covariates=)``. Rows of a site without training rows stay as measured.
    """

    def harmonize(
        train: IntArray, covariates: FloatArray = pool.C, y: NDArray[Any] | None = pool.y
    ) -> FloatArray:
        def given(rows: Any) -> dict[str, Any]:
            return {
                "site": pool.site_labels[rows],
                "covariates": covariates[rows] if pool.C.shape[1] else None,
            }

        model, fitted = make(), np.isin(pool.site, pool.site[train])
        more = {} if subject is None else {"subject": subject[train]}
        model.fit(pool.features[train], None if y is None else y[train], **given(train), **more)
        after = pool.features.copy()
        after[fitted] = model.transform(after[fitted], **given(fitted))
        return after

    return harmonize


def again_table(pool: PooledDataset, make: Callable[[], Any], subject: NDArray[Any] | None = None) -> Again:
    """Return what fits on all rows, given other covariates and another target, and harmonizes these rows."""
    return partial(refit_table(pool, make, subject), np.arange(len(pool)))


def refit_images(pool: PooledDataset, volumes: Volumes, **settings: Any) -> Harmonize:
    """Return what fits a harmonizer of images on some rows and harmonizes the block means of all."""
    from equipool.estimators import ImageHarmonizer

    def harmonize(train: IntArray) -> FloatArray:
        y, covariates = None if pool.y is None else pool.y[train], pool.labelled_covariates.iloc[train]
        model = ImageHarmonizer(unseen_site="pooled", **settings)
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


def _on_cells(by_feature: Columns, *cells_of: NDArray[np.bool_]) -> list[str]:
    """Add the numbers of empty, filled and emptied cells to the table of features; return sentences."""
    texts = []
    for what, cells in zip(("empty", "filled-in", "emptied"), cells_of, strict=True):
        if cells.any():
            by_feature[f"{what} cells"] = cells.sum(axis=0).tolist()
            where = plural(int(cells.any(axis=0).sum()), "feature")
            count = f"{plural(int(cells.sum()), f'{what} cell')} ({cells.mean():.1%}) in {where}"
            how = "judged as measured alone" if what == "emptied" else "not judged"
            texts.append(f"{count} were {how}; their place is given to every classifier of the site.")
    return texts


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


def rows_of(table: Columns) -> list[dict[str, Any]]:
    """Return a table's rows, each by the names of its columns."""
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def best(site_scores: Columns, stage: str, fitted_on: str) -> dict[str, Any] | None:
    """Return the classifier with the highest mean at one stage."""
    rows = [row for row in rows_of(site_scores) if row["stage"] == stage and row["fitted_on"] == fitted_on]
    return max(rows, key=lambda row: row["mean"]) if rows else None


def verdict(
    judged: dict[str, Any] | None, covariates: str = "", features: Columns | None = None
) -> list[dict[str, str]]:
    """Return what ``Account.held_out`` means, in sentences that name the covariates; it may be bad news.

    ``features`` has the names of features with what was kept of them, added to them, filled in and emptied.
    """
    features = features or {}
    if judged is None:
        text = "Harmonization cannot be judged: the sites are too small to hold participants out."
        return [{"level": "fair", "text": text}, *_feature_verdicts(features, {})]
    rows, emptied = judged.get("written", []), judged.get("emptied", {})
    suspected = {row["what"]: _written_verdict(row, features) for row in rows}
    accused = {what: one for what, one in suspected.items() if one is not None}
    signals = list(_signal_verdicts(judged, {row["what"]: row for row in rows}, accused))
    for one in signals:
        if "emptied cells" in features and one["level"] == "good":
            one |= {"level": "fair", "text": f"In the cells that are left: {one['text']}"}
    chosen = {name: name in accused for name, p in emptied.items() if p <= CHOSEN}
    about = _feature_verdicts(features, chosen)
    return [_site_verdict(judged, covariates), *signals, *accused.values(), *about]


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


def _signal_verdicts(
    judged: dict[str, Any], written: dict[str, dict[str, Any]], accused: Collection[str]
) -> Iterator[dict[str, str]]:
    """Judge what is predicted within sites, where knowing the site does not help.

    Better than before is no good news by itself: it is where sites' means and spreads explain it.
    """
    for row in rows_of(judged["signals"]):
        if row["where"] != "within sites" or row["change"] is None:
            continue
        what, change, noise = row["what"], row["change"], _noise(row["change_sd"], judged["folds"])
        hardly = _noise(row["before_sd"], judged["folds"])  # chance, or little more
        if row["measure"] == "AUC":  # its standard error by chance, of n rows in equal classes: 1 / √3n
            hardly = 0.5 + max(hardly, 2.5 / (3 * judged["participants"]) ** 0.5)
        level, text = "good", f"The signal of {what} was preserved"
        if change > noise and row["after"] > hardly:
            level, why = "fair", "which harmonization does not explain"
            if what in written and what not in accused:
                level, why = "good", "as sites' means and spreads no longer hide it"
            text = f"{what} is predicted better than before, {why}"
        elif row["before"] <= hardly:
            level, why = "fair", "so a loss of its signal could not be detected"
            text = f"{what} could hardly be predicted before, {why}"
        elif change < -noise:
            level, text = "bad", f"Bad news: part of the signal of {what} was lost"
        elif change < -CLOSE:
            level, why = "fair", "the change is within its sampling error"
            text = f"The signal of {what} may be reduced; {why}"
        elif what in accused:
            level, text = "fair", f"The signal of {what} was preserved, or written into the features"
        numbers = f"{row['before']:.2f} as measured, {row['after']:.2f} harmonized".replace("-", "−")
        yield {"level": level, "text": f"{text} ({row['measure']} within sites {numbers})."}


def _written_verdict(row: dict[str, Any], features: Columns) -> dict[str, str] | None:
    """Say that a variable was written into features, with the evidence; ``None`` without any."""
    found = list(_evidence(row, features))
    if not found:
        return None
    bad, what = any(level == "bad" for level, _ in found), row["what"]
    claim = f"Bad news: {what} was" if bad else f"{what} may have been"
    said = " ".join(text for _, text in found)
    advice = "Trust its effects as far as the data as measured show them, with the site in the regression."
    text = f"{claim} written into features. {said} {advice}"
    return {"level": "bad" if bad else "fair", "text": text}


def _evidence(row: dict[str, Any], features: Columns) -> Iterator[tuple[str, str]]:
    """Yield what says that a variable was written into features, each with its level."""
    what, number = row["what"], {k: -np.inf if v is None else v for k, v in row.items() if k != "what"}
    r2 = {k: f"{v:.2f}".replace("-", "−") for k, v in number.items()}
    again = "Harmonized again with its values shuffled within sites,"
    claims: list[tuple[float, tuple[float, float], str]] = []  # value, where suspicious and evident, sentence
    if number["gain"] >= 3 * number["error"]:
        text = (
            "Within sites it is predicted better than before, even where each site's means and spreads are "
            f"made equal (R² {r2['before']} as measured, {r2['after']} harmonized)."
        )
        claims.append((number["gain"], GAIN, text))
    added, shared = (np.array(features.get(name, [])) for name in (f"{what} adds", "shared value"))
    for moved, limits in (("", ADDED), (", where a value that many share was moved", (ADDED[0], np.inf))):
        some = [k for k in np.argsort(-added) if shared[k] == bool(moved) and added[k] >= ADDED[0]]
        if some:
            names = listed((features["feature"][k] for k in some), shown=3)
            text = (
                f"Participants of a site with the same measured value differ in {names}{moved}, by up to "
                f"{added[some[0]]:.2f} standard deviations for one of {what}."
            )
            claims.append((added[some[0]], limits, text))
    if "null" in number:
        claims.append((number["null"], NULL, f"{again} features predict these (R² {r2['null']})."))
        text = f"{again} their chance effect (T²) grew {r2['chance']} times."
        claims.append((number["chance"], CHANCE, text))
    if "filled_after" in number:
        least = max(FILLED, 2 * number["filled_error"])
        how = "better than measured ones: they were made from it"
        text = f"Filled-in cells predict it (R² {r2['filled_after']}) {how}."
        claims.append((min(number["filled_after"], number["filled_gain"]), (least, least), text))
    for value, (suspicious, evident), text in claims:
        if value >= suspicious:
            yield "bad" if value >= evident else "fair", text


def _feature_verdicts(features: Columns, chosen: dict[str, bool]) -> Iterator[dict[str, str]]:
    """Say which features keep little of what was measured, and which have cells filled in or emptied.

    ``chosen`` are variables that say which cells were emptied, and whether they seem written into features.
    """
    kept = np.array(features.get("kept", []))
    low = [features["feature"][k] for k in np.argsort(kept) if kept[k] < KEPT[0]]
    if low:
        many = len(low) >= KEPT[1] * len(kept)
        text = (
            f"{'Bad news: ' if many else ''}{plural(len(low), 'feature')} ({listed(low, shown=3)}) "
            f"{'keeps' if len(low) == 1 else 'keep'} little of how participants of a site differ: the "
            f"correlation with the measured values, covariates adjusted, is below {KEPT[0]}. Site means, "
            "predictions or noise may stand in their place."
        )
        yield {"level": "bad" if many else "fair", "text": text}
    for what in ("filled-in", "emptied"):
        cells = np.array(features.get(f"{what} cells", [0]))
        if not cells.any():
            continue
        some = [features["feature"][k] for k in np.argsort(-cells, kind="stable") if cells[k]]
        count = f"{plural(int(cells.sum()), 'cell')} of {plural(len(some), 'feature')}"
        told = "They were not judged; do not count them as measurements in a test."
        text, bad = f"{count} were filled in, not measured. {told}", False
        if what == "emptied":
            bad = any(chosen.values())
            why = f" Which ones depends on {listed(chosen)}: this can make up an effect." if chosen else ""
            text = f"{count} ({listed(some, shown=3)}) were emptied: measured, and empty after harmonization."
            text = f"{'Bad news: ' if bad else ''}{text}{why} Test the table as measured too."
        yield {"level": "bad" if bad else "fair", "text": text}
