"""The one validator: what makes a pool impossible to use, each problem in one sentence with its remedy."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import Finding, Level, listed, plural, raise_first_error, rows_text
from equipool.checks.inputs import Inputs
from equipool.exceptions import EquipoolWarning, InputError

__all__ = [
    "Missing",
    "check_for_fit",
    "check_inputs",
    "find_errors",
    "refuse_text",
    "warn_of_no_site",
    "warn_of_small_sites",
]

Missing = Literal["error", "impute"]
PATHS = ("path", "paths", "file", "filename", "image", "images")  # as columns of images are called
LEAST_PEOPLE = 3  # of a site, from whom anything of it can be told


def check_inputs(
    inputs: Inputs, *, missing: Missing = "error", pooled: bool = True, one_site: bool = False
) -> Inputs:
    """Raise :class:`equipool.exceptions.InputError` for the first problem; return the inputs otherwise.

    With ``one_site`` a single site is no problem: none was given.
    """
    findings = find_errors(inputs, missing=missing, pooled=pooled)
    raise_first_error(f for f in findings if not (one_site and f.code == "one-site"))
    return inputs


def check_for_fit(inputs: Inputs, *, site_given: bool) -> None:
    """Raise the first problem that stands in the way of fitting; without a site, warn that there is one."""
    check_inputs(inputs, one_site=not site_given)
    if not site_given:
        warn_of_no_site("the code is not made to forget sites")


def warn_of_no_site(result: str) -> None:
    """Say what comes of ``fit`` without a site; called two levels below it."""
    warnings.warn(
        f"No site was given, so all rows are one site's: {result}. Pass site=, one label a row.",
        EquipoolWarning,
        stacklevel=4,
    )


def warn_of_small_sites(names: Iterable[Any], people: ArrayLike) -> None:
    """Say which sites' effects can hardly be told; called by ``fit``."""
    few = np.asarray(people) < LEAST_PEOPLE
    small = [str(name) for name, one in zip(names, few, strict=True) if one]
    if small and len(few) > 1:
        warnings.warn(
            f"{plural(len(small), 'site')} with fewer than {LEAST_PEOPLE} people ({listed(small, shown=5)}): "
            "their effects are mostly those of the pool.",
            EquipoolWarning,
            stacklevel=3,
        )


def refuse_text(X: Any) -> None:
    """Raise an error that names the cell where a data frame of features has text among its numbers."""
    if not hasattr(X, "columns") or all(pd.api.types.is_numeric_dtype(dtype) for dtype in X.dtypes):
        return
    inputs = Inputs.from_arrays(X, site=np.zeros(len(X), dtype=int))
    raise_first_error(f for f in find_errors(inputs, pooled=False) if f.code == "text-in-numbers")


def find_errors(inputs: Inputs, *, missing: Missing = "error", pooled: bool = True) -> list[Finding]:
    """Return every problem that stands in the way of pooling, gravest first.

    With ``pooled=False`` only the cells are judged: new people, perhaps one of them, need no second site and
    no variation.
    """
    if missing not in ("error", "impute"):
        raise InputError(f"missing must be 'error' or 'impute'. Got {missing!r}.")
    if inputs.n_rows == 0:
        return [
            Finding("error", "empty-table", "The table has no rows; give at least two sites with people.")
        ]
    findings = [*_features(inputs), *_text(inputs), *_missing(inputs, missing), *_infinite(inputs)]
    for finder in (_ids, _sites, _target, _covariates) if pooled else (_ids,):
        findings += finder(inputs)
    return findings


def _features(inputs: Inputs) -> Iterator[Finding]:
    if inputs.has_features and not inputs.feature_names:
        left_out = [name for name, _ in inputs.left_out]
        hint = f" (left out: {listed(left_out)})" if left_out else ""
        paths = [name for name in left_out if name.lower() in PATHS]
        images = f", or the column of images with --images {paths[0]}" if paths else ""
        yield Finding(
            "error",
            "no-features",
            f"No column of numbers is left to pool{hint}; name the measurements with --features{images}.",
        )


def _text(inputs: Inputs) -> Iterator[Finding]:
    columns: dict[str, list[int]] = {}
    first: dict[str, str] = {}
    for cell in inputs.text_cells:
        columns.setdefault(cell.column, []).append(cell.row)
        first.setdefault(cell.column, cell.value)
    for column, rows in columns.items():
        all_text = len(rows) > 0.5 * inputs.n_rows
        remedy = "give it numbers in a meaningful order, or one 0/1 column for each level"
        if not all_text:
            remedy = "correct these cells, or empty them to mark them as missing"
        yield Finding(
            "error",
            "text-in-numbers",
            f"Column {column!r} must hold numbers but has text, such as {first[column]!r}, in "
            f"{_rows(inputs, rows)}; {remedy}.",
            (column,),
            _numbered(rows),
        )


def _missing(inputs: Inputs, policy: Missing) -> Iterator[Finding]:
    text = {(cell.column, cell.row) for cell in inputs.text_cells}
    for code, name, values in _label_columns(inputs):
        rows = [row for row, value in enumerate(values) if value is None]
        if rows:
            yield Finding(
                "error",
                f"missing-{code}",
                f"Column {name!r} ({code}) is empty in {_rows(inputs, rows)}; fill it in or drop these rows.",
                (name,),
                _numbered(rows),
            )
    numbers = [("covariate", inputs.covariate_names, inputs.covariates)]
    if inputs.task == "number" and inputs.target is not None:
        numbers.append(("target", (inputs.target_name,), inputs.target[:, None]))
    for code, names, values in numbers:
        for k, name in enumerate(names):
            rows = [row for row in np.flatnonzero(np.isnan(values[:, k])).tolist() if (name, row) not in text]
            if rows:
                yield Finding(
                    "error",
                    f"missing-{code}",
                    f"Column {name!r} ({code}) has no value in {_rows(inputs, rows)}; fill it in or drop "
                    "these rows.",
                    (name,),
                    _numbered(rows),
                )
    yield from _missing_features(inputs, policy, text)


def _missing_features(inputs: Inputs, policy: Missing, text: set[tuple[str, int]]) -> Iterator[Finding]:
    empty = np.isnan(inputs.X)
    index = {name: k for k, name in enumerate(inputs.feature_names)}
    for column, row in text:
        if column in index:
            empty[row, index[column]] = False
    if not empty.any():
        return
    rows = np.flatnonzero(empty.any(axis=1)).tolist()
    columns = [inputs.feature_names[k] for k in np.flatnonzero(empty.any(axis=0))]
    level: Level = "error" if policy == "error" else "warning"
    remedy = 'fill them in, drop them, or let them be imputed (missing="impute", --missing impute)'
    if policy == "impute":
        remedy = "they will be imputed"
    yield Finding(
        level,
        "missing-values",
        f"{plural(int(empty.sum()), 'value')} ({empty.mean():.1%}) missing (NaN) in "
        f"{plural(len(columns), 'feature')} ({listed(columns)}), {_rows(inputs, rows)}; {remedy}.",
        tuple(columns),
        _numbered(rows),
    )


def _infinite(inputs: Inputs) -> Iterator[Finding]:
    blocks = [(inputs.feature_names, inputs.X), (inputs.covariate_names, inputs.covariates)]
    if inputs.task == "number" and inputs.target is not None:
        blocks.append(((inputs.target_name,), inputs.target[:, None]))
    for names, values in blocks:
        for k in np.flatnonzero(np.isinf(values).any(axis=0)):
            rows = np.flatnonzero(np.isinf(values[:, k])).tolist()
            yield Finding(
                "error",
                "infinite-values",
                f"Column {names[k]!r} is infinite in {_rows(inputs, rows)}; correct it (a division by zero?) "
                "or empty it to mark it as missing.",
                (names[k],),
                _numbered(rows),
            )


def _ids(inputs: Inputs) -> Iterator[Finding]:
    if inputs.ids is None:
        return
    counts = Counter(value for value in inputs.ids if value is not None)
    double = [value for value, count in counts.items() if count > 1]
    if double:
        rows = [row for row, value in enumerate(inputs.ids) if counts.get(value, 0) > 1]
        yield Finding(
            "error",
            "duplicate-ids",
            f"{plural(len(double), 'id')} in column {inputs.id_name!r} "
            f"{'stands' if len(double) == 1 else 'stand'} more than once ({listed(double)}), "
            f"{rows_text(rows)}; drop the copies, or give each visit its own id.",
            (inputs.id_name,),
            _numbered(rows),
        )


def _sites(inputs: Inputs) -> Iterator[Finding]:
    counts = Counter(value for value in inputs.site if value is not None)
    if len(counts) == 1:
        only = next(iter(counts))
        yield Finding(
            "error",
            "one-site",
            f"Column {inputs.site_name!r} has the single site {only!r}: there is nothing to harmonize; "
            "add the rows of another site, or name the column that tells sites apart.",
            (inputs.site_name,),
        )
    elif len(counts) > 2 and max(counts.values()) == 1:
        yield Finding(
            "error",
            "site-per-row",
            f"Column {inputs.site_name!r} has a different value in every row, as an id would; "
            "name the column that tells the scanner or the centre.",
            (inputs.site_name,),
        )


def _target(inputs: Inputs) -> Iterator[Finding]:
    if inputs.target is None:
        return
    name = inputs.target_name
    values = inputs.target if inputs.task == "number" else _codes(inputs.target)
    finite = values[np.isfinite(values)]
    distinct = len(np.unique(finite))
    if distinct == 1:
        is_class = inputs.task == "class"
        has = "has one class only, " if is_class else "is "
        only = repr(next(v for v in inputs.target if v)) if is_class else f"{finite[0]:g}"
        yield Finding(
            "error",
            "one-class" if is_class else "constant-target",
            f"The target {name!r} {has}{only} in every row, so nothing can be learned about it; "
            "add rows in which it varies, or leave the target out.",
            (name,),
        )
    elif inputs.task == "class" and distinct == len(values) > 2:
        yield Finding(
            "error",
            "target-per-row",
            f"The target {name!r} has a different value in every row, as an id would; name the column to be "
            "predicted, or leave the target out.",
            (name,),
        )
    elif _tied(inputs, values):
        yield Finding(
            "error",
            "target-tied-to-site",
            f"The target {name!r} never varies within a site, so its effect and the site's are the same "
            "thing; add sites in which it varies, or leave the target out (covariate effects can still be "
            "learned).",
            (name, inputs.site_name),
        )


def _covariates(inputs: Inputs) -> Iterator[Finding]:
    varying: list[int] = []
    for k, name in enumerate(inputs.covariate_names):
        values = inputs.covariates[:, k]
        finite = values[np.isfinite(values)]
        if not len(finite):
            continue
        if finite.min() == finite.max():
            level = inputs.levels[k]
            only = f"{finite[0]:g}" if level is None else repr(level[0])
            yield Finding(
                "error",
                "constant-covariate",
                f"The covariate {name!r} is {only} in every row, so nothing can be learned about it; leave "
                "it out or add rows in which it varies.",
                (name,),
            )
        elif _tied(inputs, values):
            yield Finding(
                "error",
                "covariate-tied-to-site",
                f"The covariate {name!r} never varies within a site, so its effect and the site's are the "
                "same thing; add sites in which it varies, or leave it out (everything else can still be "
                "learned).",
                (name, inputs.site_name),
            )
        else:
            varying.append(k)
    yield from _collinear(inputs, varying)


def _collinear(inputs: Inputs, varying: list[int]) -> Iterator[Finding]:
    complete = inputs.covariates[np.isfinite(inputs.covariates).all(axis=1)]
    if len(complete) < 3:
        return
    for position, a in enumerate(varying):
        for b in varying[position + 1 :]:
            pair = complete[:, [a, b]]
            if (pair.std(axis=0) > 0).all() and _correlation(pair) > 1 - 1e-9:
                names = inputs.covariate_names[a], inputs.covariate_names[b]
                yield Finding(
                    "error",
                    "covariates-collinear",
                    f"The covariates {names[0]!r} and {names[1]!r} are the same up to scale, so their "
                    "effects cannot be told apart; leave one of them out.",
                    names,
                )


def _correlation(pair: NDArray[np.float64]) -> float:
    a, b = (pair - pair.mean(axis=0)).T
    return float(abs(a @ b) / np.sqrt((a @ a) * (b @ b)))


def _tied(inputs: Inputs, values: NDArray[Any]) -> bool:
    """Whether values are constant within every site that has at least two of them, and one has."""
    known = np.array([site is not None for site in inputs.site]) & np.isfinite(values)
    codes = _codes(inputs.site)[known].astype(int)
    values = values[known]
    if not len(codes):
        return False
    low, high, count = (np.full(codes.max() + 1, fill) for fill in (np.inf, -np.inf, 0.0))
    np.minimum.at(low, codes, values)
    np.maximum.at(high, codes, values)
    np.add.at(count, codes, 1)
    several = count > 1
    return bool(several.sum() > 0 and (low[several] == high[several]).all() and (count > 0).sum() > 1)


def _codes(labels: NDArray[Any]) -> NDArray[np.float64]:
    """Give each label its number; missing ones become NaN."""
    order = {label: k for k, label in enumerate(sorted({x for x in labels if x is not None}))}
    return np.array([np.nan if label is None else order[label] for label in labels], dtype=np.float64)


def _label_columns(inputs: Inputs) -> Iterator[tuple[str, str, NDArray[Any]]]:
    yield "site", inputs.site_name, inputs.site
    if inputs.task == "class" and inputs.target is not None:
        yield "target", inputs.target_name, inputs.target
    if inputs.ids is not None:
        yield "id", inputs.id_name, inputs.ids


def _rows(inputs: Inputs, rows: list[int]) -> str:
    ids = None if inputs.ids is None else inputs.ids.tolist()
    return rows_text(rows, ids)


def _numbered(rows: list[int]) -> tuple[int, ...]:
    """Rows as people count them: from 1 below the header."""
    return tuple(int(row) + 1 for row in rows)
