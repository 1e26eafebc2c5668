"""Warnings and notes: what does not prevent pooling, but matters."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from equipool.checks.findings import Finding, listed, note, plural, warning
from equipool.checks.inputs import Inputs
from equipool.checks.overlap import NINE_TENTHS, SitePrediction, nine_tenths, two_valued

SMALL_SITE = 10  # participants
NEAR_CONSTANT = 0.95  # share of rows with one value
LITTLE_OVERLAP = 0.5
FEW = 0.02  # the share of rows that may be called outliers
COPY_FEATURES = 3  # fewer may agree by chance
OUTLYING = 30.0  # robust standard deviations: no measurement is so far off
SAMPLE = 5000  # rows that the spread is estimated on


def site_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of sites that are too small to estimate, and of names that may be one site."""
    labels, counts = inputs.sites, np.bincount(inputs.site_index)
    if len(labels) < 2:
        return
    single, small = labels[counts == 1], labels[(counts > 1) & (counts < SMALL_SITE)]
    if 0 < len(single) < len(labels):
        sites = plural(len(single), "site has", "sites have")
        yield warning("single-person-site", inputs.site_name, sites=sites, names=listed(single))
    if len(small):
        words: dict[str, Any] = {"sites": plural(len(small), "site has", "sites have"), "least": SMALL_SITE}
        yield warning("small-site", inputs.site_name, **words, names=listed(small))
    for _, names in pd.Series(labels).groupby([re.sub(r"[\W_]+", "", label).casefold() for label in labels]):
        if len(names) > 1:
            yield warning("similar-site-names", inputs.site_name, names=listed(names))


def absence_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of sites without a class of the target, or without a level of a two-valued covariate."""
    if len(inputs.sites) < 2:
        return
    rows, columns = inputs.rows_with_site, []
    if inputs.task == "class" and inputs.target is not None:
        columns.append(("class", inputs.target_name, pd.Series(inputs.target[rows])))
    for name, values, levels in inputs.covariates_with_site():
        if two_valued(values):
            label = "{:g}".format if levels is None else dict(enumerate(levels))
            columns.append(("level", name, pd.Series(values).map(label, na_action="ignore")))
    for kind, name, labels in columns:
        counts = pd.crosstab(inputs.sites[inputs.site_index], labels).reindex(inputs.sites, fill_value=0)
        absent = counts.index[(counts == 0).any(axis=1)]
        if len(absent) and (kind == "class" or len(absent) < len(inputs.sites)):
            lacking = counts.columns[counts.loc[absent[0]] == 0]
            words = {"kind": kind, "example": absent[0], "lacking": listed(lacking)}
            words |= {"sites": plural(len(absent), "site does", "sites do"), "absent": listed(absent)}
            yield warning("{kind}-absent", name, inputs.site_name, **words)


def overlap_cautions(overlap: dict[str, pd.DataFrame], common: dict[str, float]) -> Iterator[Finding]:
    """Warn where two sites share no, or little, range of a covariate."""
    for name, frame in overlap.items():
        pairs = pairs_by_overlap(frame)
        disjoint, (share, *worst) = sum(share == 0 for share, *_ in pairs), pairs[0]
        pair = " and ".join(map(repr, worst))
        if disjoint:
            pairs_share = plural(disjoint, "pair of sites shares", "pairs of sites share")
            yield warning("disjoint-support", name, pairs=pairs_share, pair=pair)
        elif share < LITTLE_OVERLAP:
            yield warning("little-support", name, pair=pair, share=share, common=common[name])


def pairs_by_overlap(frame: pd.DataFrame) -> list[tuple[float, str, str]]:
    """Return the share and the names of each pair of sites, least overlap first."""
    first, second = np.triu_indices(len(frame), k=1)
    shares = frame.to_numpy()[first, second]
    order = np.argsort(shares, kind="stable")
    return list(zip(shares[order], frame.index[first[order]], frame.index[second[order]], strict=True))


def confounding_cautions(
    inputs: Inputs, confounding: dict[str, float], prediction: SitePrediction | None
) -> Iterator[Finding]:
    """Warn where covariates and target predict the site."""
    if prediction is None:
        return
    above = prediction.balanced_accuracy - prediction.chance
    excess = above / (1 - prediction.chance)  # from 0, no better than guessing, to 1, always right
    if excess < 0.1 or above <= 3 * prediction.chance_error:
        return
    advice = []
    if inputs.covariate_names:
        advice.append("keep the covariates, or their effect is removed with the site's")
    if confounding.get(inputs.target_name, 0) > 0.1 and inputs.target is not None:
        advice.append(f"the effects of {inputs.target_name!r} and of the site cannot be fully separated")
    degree = "strongly" if excess > 0.5 else "moderately"
    words: dict[str, Any] = {"accuracy": prediction.balanced_accuracy, "chance": prediction.chance}
    yield warning("confounded", *confounding, **words, degree=degree, advice="; ".join(advice))


def outlier_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of a few values behind a gap wider than the range of all others: a slip, or a missing code."""
    for name, values in zip(inputs.covariate_names, inputs.covariates.T, strict=True):
        ordered = np.sort(values[np.isfinite(values)])
        if len(ordered) < 4 or two_valued(values):
            continue
        gaps = np.diff(ordered)
        cut = int(gaps.argmax())
        few, many = sorted((ordered[cut + 1 :], ordered[: cut + 1]), key=len)
        if gaps[cut] <= many[-1] - many[0] or len(few) > max(FEW * len(ordered), 1):
            continue
        rows = np.flatnonzero(np.isin(values, few)).tolist()
        words = {"value": values[rows[0]], "low": many[0], "high": many[-1]}
        yield warning("covariate-outlier", name, rows=rows, **words, where=inputs.rows_text(rows))


def feature_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of a few values of features that no measurement gives: failures, or codes for missing."""
    X = inputs.X
    finite = np.isfinite(X)
    if len(X) < SMALL_SITE or not X.shape[1]:
        return
    some = slice(None, None, max(len(X) // SAMPLE, 1))
    low, middle, high = nine_tenths(np.where(finite[some], X[some], np.nan))
    deviation = (high - low) / NINE_TENTHS
    # By division, since the largest numbers have no distance.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        outlying = finite & (deviation > 0) & (np.abs(X / deviation - middle / deviation) > OUTLYING)
    columns, rows = np.nonzero((outlying & (outlying.mean(axis=0) <= FEW)).T)
    if len(rows):
        row, column, names = int(rows[0]), columns[0], [inputs.feature_names[k] for k in columns]
        words = {"values": plural(len(rows), "value is", "values are"), "value": X[row, column]}
        words |= {"where": inputs.rows_text([row]), "low": low[column], "high": high[column]}
        yield warning("feature-outlier", *dict.fromkeys(names), rows=dict.fromkeys(rows), **words)


def copy_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of rows that agree in every measurement, as no two scans do: copies, whatever their ids."""
    X = inputs.X
    varying = np.nanmax(X, axis=0, initial=-np.inf) > np.nanmin(X, axis=0, initial=np.inf)
    if varying.sum() < COPY_FEATURES:
        return
    copied = pd.DataFrame(X[:, varying]).duplicated(keep=False).to_numpy()
    rows = np.flatnonzero(copied & np.isfinite(X[:, varying]).any(axis=1)).tolist()
    if rows:
        copies, where = plural(len(rows), "row"), inputs.rows_text(rows)
        yield warning("copied-rows", rows=rows, copies=copies, where=where)


def column_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of features that never or hardly vary, and of those that are the site in disguise."""
    X = inputs.X[inputs.rows_with_site]
    if not X.size:
        return
    n_sites, grouped = len(inputs.sites), pd.DataFrame(X).groupby(inputs.site_index)
    low, high = grouped.min().to_numpy(), grouped.max().to_numpy()
    constant = np.nanmin(low, axis=0, initial=np.inf) >= np.nanmax(high, axis=0, initial=-np.inf)
    by_site = (low >= high).all(axis=0) & ~constant & (n_sites > 1) & (len(X) > 2 * n_sites)
    # A value that nearly all of a sorted column has covers its middle.
    commonest = np.sort(X, axis=0)[len(X) // 2]
    near = ((commonest == X).mean(axis=0) >= NEAR_CONSTANT) & ~constant & ~by_site
    found = {"constant-columns": constant, "near-constant-columns": near, "site-in-disguise": by_site}
    for code, which in found.items():
        if which.any():
            names = np.array(inputs.feature_names, dtype=object)[which]
            count = f"{len(names)} of {plural(X.shape[1], 'feature')}"
            yield warning(code, *names, count=count, share=NEAR_CONSTANT)


def notes(inputs: Inputs) -> Iterator[Finding]:
    """Note which columns were left out and how text levels were coded."""
    for reason in dict.fromkeys(reason for _, reason in inputs.left_out):
        names = [name for name, why in inputs.left_out if why == reason]
        left_out = plural(len(names), "column")
        yield note("columns-left-out", *names, left_out=left_out, reason=reason)
    for name, levels in zip(inputs.covariate_names, inputs.levels, strict=True):
        if levels is not None:
            coded = ", ".join(f"{level!r} is {k}" for k, level in enumerate(levels))
            yield note("levels", name, coded=coded)
