"""Warnings and notes: what does not prevent pooling, but matters."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
        sites = f"{plural(len(single), 'site has', 'sites have')} one participant only ({listed(single)})"
        what = "nothing can be estimated there, the pooled estimate is used"
        text = f"{sites}: {what}; add participants or merge it with a like site."
        yield warning("single-person-site", text, inputs.site_name)
    if len(small):
        sites = f"{plural(len(small), 'site has', 'sites have')} fewer than {SMALL_SITE} participants"
        what = f"{sites} ({listed(small)}): estimates are shrunk towards the pool"
        yield warning("small-site", f"{what}; add participants or merge like sites.", inputs.site_name)
    for _, names in pd.Series(labels).groupby([re.sub(r"[\W_]+", "", label).casefold() for label in labels]):
        if len(names) > 1:
            what = f"The sites {listed(names)} differ only in case, spaces or punctuation"
            text = f"{what}; if they are one site, give them one name."
            yield warning("similar-site-names", text, inputs.site_name)


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
            sites = f"{plural(len(absent), 'site does', 'sites do')} not have every {kind} of {name!r}"
            example = f"{listed(absent)}; {absent[0]!r} lacks {listed(lacking)}"
            text = f"{sites} ({example}): the effect there is estimated from the other sites alone."
            yield warning(f"{kind}-absent", text, name, inputs.site_name)


def overlap_cautions(overlap: dict[str, pd.DataFrame], common: dict[str, float]) -> Iterator[Finding]:
    """Warn where two sites share no, or little, range of a covariate."""
    for name, frame in overlap.items():
        pairs = pairs_by_overlap(frame)
        disjoint, (share, *worst) = sum(share == 0 for share, *_ in pairs), pairs[0]
        pair = " and ".join(map(repr, worst))
        if disjoint:
            pairs_share = plural(disjoint, "pair of sites shares", "pairs of sites share")
            what = f"{pairs_share} no range of {name!r} (such as {pair})"
            matching = "matching would exclude all of their participants"
            text = f"{what}: {matching}; equipool transports them to a common {name}, which extrapolates."
            yield warning("disjoint-support", text, name)
        elif share < LITTLE_OVERLAP:
            what = f"{pair} have {share:.0%} of their participants in a common range of {name!r}"
            range_of_all = f"{common[name]:.0%} of all participants are in the range that every site covers"
            text = f"{what}, and {range_of_all}: methods that need common support drop the rest."
            yield warning("little-support", text, name)


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
    accuracy = f"{prediction.balanced_accuracy:.0%} (chance {prediction.chance:.0%})"
    text = (
        f"The site is {degree} confounded with {listed(confounding)}: from these alone a classifier predicts "
        f"the site with a balanced accuracy of {accuracy}; {'; '.join(advice)}."
    )
    yield warning("confounded", text, *confounding)


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
        what = f"The covariate {name!r} is {values[rows[0]]:g} in {inputs.rows_text(rows)}"
        others = f"far from all others ({many[0]:g} to {many[-1]:g}), and would set the scale of its action"
        text = f"{what}, {others}; correct it if it is a slip or a code for missing."
        yield warning("covariate-outlier", text, name, rows=rows)


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
        row, column, names = rows[0], columns[0], [inputs.feature_names[k] for k in columns]
        text = (
            f"{plural(len(rows), 'value is', 'values are')} far from all others, such as {X[row, column]:g} "
            f"in {names[0]!r}, {inputs.rows_text([int(row)])} (most lie between {low[column]:g} and "
            f"{high[column]:g}): a failure, or a code for missing? Correct it, or empty the cell and impute; "
            "SiteHarmonizer winsorises it when site effects are estimated, and still harmonizes it."
        )
        yield warning("feature-outlier", text, *dict.fromkeys(names), rows=dict.fromkeys(rows))


def copy_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of rows that agree in every measurement, as no two scans do: copies, whatever their ids."""
    X = inputs.X
    varying = np.nanmax(X, axis=0, initial=-np.inf) > np.nanmin(X, axis=0, initial=np.inf)
    if varying.sum() < COPY_FEATURES:
        return
    copied = pd.DataFrame(X[:, varying]).duplicated(keep=False).to_numpy()
    rows = np.flatnonzero(copied & np.isfinite(X[:, varying]).any(axis=1)).tolist()
    if rows:
        what = f"{plural(len(rows), 'row')} have the very same features as another ({inputs.rows_text(rows)})"
        text = (
            f"{what}: copies? Keep one of each, or one participant is in the training and in the test data."
        )
        yield warning("copied-rows", text, rows=rows)


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
    share = f"have the same value in {NEAR_CONSTANT:.0%} of rows or more"
    disguise = "never vary within a site but differ between sites, so they identify the site"
    for code, which, text in (
        ("constant-columns", constant, "never vary; they carry nothing and pass through unchanged"),
        ("near-constant-columns", near, f"{share}; check that they are measurements"),
        ("site-in-disguise", by_site, f"{disguise}; leave them out of the features"),
    ):
        if which.any():
            names = np.array(inputs.feature_names, dtype=object)[which]
            count = f"{len(names)} of {plural(X.shape[1], 'feature')}"
            yield warning(code, f"{count} ({listed(names)}) {text}.", *names)


def notes(inputs: Inputs) -> Iterator[Finding]:
    """Note which columns were left out and how text levels were coded."""
    for reason in dict.fromkeys(reason for _, reason in inputs.left_out):
        names = [name for name, why in inputs.left_out if why == reason]
        text = f"{plural(len(names), 'column')} left out of the features ({reason}): {listed(names)}."
        yield note("columns-left-out", text, *names)
    for name, levels in zip(inputs.covariate_names, inputs.levels, strict=True):
        if levels is not None:
            coded = ", ".join(f"{level!r} is {k}" for k, level in enumerate(levels))
            yield note("levels", f"The covariate {name!r} is coded as a number: {coded}.", name)
