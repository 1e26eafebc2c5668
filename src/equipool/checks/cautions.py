"""What does not stand in the way of pooling but should be known before: the warnings and notes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks.findings import Finding, listed, plural, rows_text
from equipool.checks.inputs import Inputs
from equipool.checks.overlap import NINE_TENTHS, Readability, nine_tenths

__all__ = [
    "class_cautions",
    "column_cautions",
    "confounding_cautions",
    "feature_cautions",
    "level_cautions",
    "notes",
    "outlier_cautions",
    "overlap_cautions",
    "site_cautions",
    "two_valued",
]

SMALL_SITE = 10
NEAR_CONSTANT = 0.95
LITTLE_OVERLAP = 0.5
FEW = 0.02  # the share of rows that may be called outliers
COPY_FEATURES = 3  # fewer may agree by chance
FAR, SAMPLE = 30.0, 5000  # deviations of the middle nine tenths, by so many rows: no measurement


def site_cautions(inputs: Inputs, labels: NDArray[Any], codes: NDArray[np.intp]) -> Iterator[Finding]:
    """Warn of sites that are too small to estimate, and of names that may be one site."""
    if len(labels) < 2:
        return
    counts = np.bincount(codes)
    alone = labels[counts == 1]
    if len(alone) and len(alone) < len(labels):
        yield Finding(
            "warning",
            "single-person-site",
            f"{plural(len(alone), 'site has', 'sites have')} one person only ({listed(alone)}): nothing can "
            "be estimated there, the pooled estimate is used; add people or merge it with a like site.",
            (inputs.site_name,),
        )
    small = labels[(counts > 1) & (counts < SMALL_SITE)]
    if len(small):
        yield Finding(
            "warning",
            "small-site",
            f"{plural(len(small), 'site has', 'sites have')} fewer than {SMALL_SITE} people "
            f"({listed(small)}): estimates are drawn towards the pool; add people or merge like sites.",
            (inputs.site_name,),
        )
    alike = defaultdict(list)
    for label in labels:
        alike[re.sub(r"[\W_]+", "", label).casefold()].append(label)
    for names in (group for group in alike.values() if len(group) > 1):
        yield Finding(
            "warning",
            "similar-site-names",
            f"The sites {listed(names)} differ only in case, spaces or punctuation; if they are one site, "
            "give them one name.",
            (inputs.site_name,),
        )


def class_cautions(
    inputs: Inputs, known: NDArray[np.intp], labels: NDArray[Any], codes: NDArray[np.intp]
) -> Iterator[Finding]:
    """Warn of classes that do not occur at some sites."""
    if inputs.task != "class" or inputs.target is None or len(labels) < 2:
        return
    target = inputs.target[known]
    values = sorted({label for label in target if label is not None})
    count = np.array(
        [np.bincount(codes, weights=target == value, minlength=len(labels)) for value in values]
    ).reshape(len(values), len(labels))
    absent = labels[(count == 0).any(axis=0)]
    if len(absent):
        site = int(np.flatnonzero((count == 0).any(axis=0))[0])
        lacking = [value for value, here in zip(values, count[:, site], strict=True) if here == 0]
        yield Finding(
            "warning",
            "class-absent",
            f"{plural(len(absent), 'site does', 'sites do')} not have every class of {inputs.target_name!r} "
            f"({listed(absent)}; {str(labels[site])!r} lacks {listed(lacking)}): the effect there is known "
            "from the other sites alone.",
            (inputs.target_name, inputs.site_name),
        )


def level_cautions(
    inputs: Inputs, known: NDArray[np.intp], labels: NDArray[Any], codes: NDArray[np.intp]
) -> Iterator[Finding]:
    """Warn of sites that have one level only of a two-valued covariate."""
    for k, name in enumerate(inputs.covariate_names):
        values = inputs.covariates[known, k]
        if not two_valued(values) or len(labels) < 2:
            continue
        grouped = pd.Series(values).groupby(codes)
        one = labels[(grouped.min() == grouped.max()).to_numpy()]
        if 0 < len(one) < len(labels):
            yield Finding(
                "warning",
                "level-absent",
                f"{plural(len(one), 'site has', 'sites have')} one value of {name!r} only ({listed(one)}): "
                "its effect there is known from the other sites alone.",
                (name, inputs.site_name),
            )


def overlap_cautions(overlap: dict[str, pd.DataFrame], common: dict[str, float]) -> Iterator[Finding]:
    """Warn where two sites share no, or little, range of a covariate."""
    for name, frame in overlap.items():
        matrix = frame.to_numpy()
        first, second = np.triu_indices(len(matrix), k=1)
        values = matrix[first, second]
        disjoint = int((values == 0).sum())
        worst = int(values.argmin())
        pair = f"{frame.index[first[worst]]!r} and {frame.index[second[worst]]!r}"
        if disjoint:
            yield Finding(
                "warning",
                "disjoint-support",
                f"{plural(disjoint, 'pair of sites shares', 'pairs of sites share')} no range of {name!r} "
                f"(such as {pair}): matching would drop everybody there; equipool transports people to a "
                f"common {name}, which extrapolates.",
                (name,),
            )
        elif values[worst] < LITTLE_OVERLAP:
            yield Finding(
                "warning",
                "little-support",
                f"{pair} have {values[worst]:.0%} of their people in a common range of {name!r}, and "
                f"{common[name]:.0%} of all people lie where every site has somebody: methods that need "
                "common support drop the rest.",
                (name,),
            )


def confounding_cautions(
    inputs: Inputs, confounding: dict[str, float], readability: Readability | None
) -> Iterator[Finding]:
    """Warn where covariates and target tell the site."""
    if readability is None or not readability.beyond_chance or readability.excess < 0.1:
        return
    word = "strongly" if readability.excess > 0.5 else "moderately"
    advice = []
    if inputs.covariate_names:
        advice.append("keep the covariates, or their effect is removed with the site's")
    if confounding.get(inputs.target_name, 0) > 0.1 and inputs.target is not None:
        advice.append(f"the effects of {inputs.target_name!r} and of the site cannot be told apart fully")
    yield Finding(
        "warning",
        "confounded",
        f"The site is {word} tied to {listed(confounding)}: from these alone it is read with a balanced "
        f"accuracy of {readability.balanced_accuracy:.0%} (chance {readability.chance:.0%}); "
        f"{'; '.join(advice)}.",
        tuple(confounding),
    )


def outlier_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of a few values behind a gap wider than the spread of all others: a slip, or a missing code."""
    for k, name in enumerate(inputs.covariate_names):
        values = inputs.covariates[:, k]
        ordered = np.sort(values[np.isfinite(values)])
        if len(ordered) < 4 or two_valued(values):
            continue
        gaps = np.diff(ordered)
        cut = int(gaps.argmax())
        below, above = ordered[: cut + 1], ordered[cut + 1 :]
        few, many = (below, above) if len(below) < len(above) else (above, below)
        if gaps[cut] <= many[-1] - many[0] or len(few) > max(FEW * len(ordered), 1):
            continue
        rows = np.flatnonzero(np.isin(values, few)).tolist()
        yield Finding(
            "warning",
            "covariate-outlier",
            f"The covariate {name!r} is {values[rows[0]]:g} in "
            f"{rows_text(rows, None if inputs.ids is None else inputs.ids.tolist())}, far from all others "
            f"({many[0]:g} to {many[-1]:g}), and would set the scale of its action; correct it if it is a "
            "slip or a code for missing.",
            (name,),
            tuple(row + 1 for row in rows),
        )


def feature_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of a few values of features that no measurement gives: failures, or codes for missing."""
    X = inputs.X
    finite = np.isfinite(X)
    if len(X) < SMALL_SITE or not X.shape[1]:
        return
    some = slice(None, None, max(len(X) // SAMPLE, 1))
    low, middle, high = nine_tenths(np.where(finite[some], X[some], np.nan))
    width = (high - low) / NINE_TENTHS
    # By division, since the largest numbers have no distance.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        far = finite & (width > 0) & (np.abs(X / width - middle / width) > FAR)
    far[:, far.mean(axis=0) > FEW] = False
    cells = np.argwhere(far.T)[:, ::-1]
    if not len(cells):
        return
    rows = [int(row) for row, _ in cells]
    names = [inputs.feature_names[column] for _, column in cells]
    row, column = cells[0]
    yield Finding(
        "warning",
        "feature-outlier",
        f"{plural(len(cells), 'value is', 'values are')} far from all others, such as {X[row, column]:g} in "
        f"{names[0]!r}, {rows_text(rows[:1], None if inputs.ids is None else inputs.ids.tolist())} (most lie "
        f"between {low[column]:g} and {high[column]:g}): a failure, or a code for missing? Correct it, or "
        "empty the cell and impute; SiteHarmonizer does not let it decide what sites do, but it stays there.",
        tuple(dict.fromkeys(names)),
        tuple(row + 1 for row in dict.fromkeys(rows)),
    )


def copy_cautions(inputs: Inputs) -> Iterator[Finding]:
    """Warn of rows that agree in every measurement, as no two scans do: copies, whatever their ids."""
    X = inputs.X
    varying = np.nanmax(X, axis=0, initial=-np.inf) > np.nanmin(X, axis=0, initial=np.inf)
    if varying.sum() < COPY_FEATURES:
        return
    table = pd.DataFrame(X[:, varying])
    same = table.duplicated(keep=False).to_numpy() & np.isfinite(X[:, varying]).any(axis=1)
    rows = np.flatnonzero(same).tolist()
    if rows:
        yield Finding(
            "warning",
            "copied-rows",
            f"{plural(len(rows), 'row')} have the very same features as another "
            f"({rows_text(rows, None if inputs.ids is None else inputs.ids.tolist())}): copies? Drop all but "
            "one of each, or people will be held out who were trained on.",
            (),
            tuple(row + 1 for row in rows),
        )


def two_valued(values: NDArray[np.float64]) -> bool:
    """Whether a covariate has two values, such as sex: it has levels rather than a range."""
    return len(np.unique(values[np.isfinite(values)])) <= 2


def column_cautions(inputs: Inputs, known: NDArray[np.intp], codes: NDArray[np.intp]) -> Iterator[Finding]:
    """Warn of features that never or hardly vary, and of those that are the site in disguise."""
    if not inputs.feature_names or not len(known):
        return
    X = inputs.X[known]
    names = np.array(inputs.feature_names, dtype=object)
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(codes.max() + 1))
    low, high = (f.reduceat(X[order], starts, axis=0) for f in (np.fmin, np.fmax))
    constant = np.nanmin(low, axis=0, initial=np.inf) >= np.nanmax(high, axis=0, initial=-np.inf)
    per_site = (low >= high).all(axis=0) & ~constant & (len(starts) > 1) & (len(known) > 2 * len(starts))
    near = _mode_share(X) >= NEAR_CONSTANT
    total = len(names)
    for code, which, text in (
        ("constant-columns", constant, "never vary; they carry nothing and pass through unchanged"),
        (
            "near-constant-columns",
            near & ~constant & ~per_site,
            f"have the same value in {NEAR_CONSTANT:.0%} of rows or more; look whether they are measurements",
        ),
        (
            "site-in-disguise",
            per_site,
            "never vary within a site but differ between sites: they give the site away; leave them out of "
            "the features",
        ),
    ):
        if which.any():
            yield Finding(
                "warning",
                code,
                f"{which.sum()} of {plural(total, 'feature')} ({listed(names[which])}) {text}.",
                tuple(names[which]),
            )


def _mode_share(X: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each column the share of rows that have its commonest value."""
    share = np.empty(X.shape[1])
    for k in range(X.shape[1]):
        column = np.sort(X[:, k])
        # Cheap test first: a value held by 95 % of the sorted column covers its whole middle.
        middle = column[len(column) // 10 : max(9 * len(column) // 10, 1)]
        if len(middle) and middle[0] == middle[-1]:
            share[k] = (column == middle[0]).mean()
        else:
            share[k] = 0.0
    return share


def notes(inputs: Inputs) -> Iterator[Finding]:
    """Note which columns were left out and how text levels were coded."""
    by_reason = defaultdict(list)
    for name, reason in inputs.left_out:
        by_reason[reason].append(name)
    for reason, names in by_reason.items():
        yield Finding(
            "note",
            "columns-left-out",
            f"{plural(len(names), 'column')} left out of the features ({reason}): {listed(names)}.",
            tuple(names),
        )
    for name, levels in zip(inputs.covariate_names, inputs.levels, strict=True):
        if levels is not None:
            coded = ", ".join(f"{level!r} is {k}" for k, level in enumerate(levels))
            yield Finding("note", "levels", f"The covariate {name!r} is coded as a number: {coded}.", (name,))
