"""What makes a pool impossible to use: each problem in one sentence with its remedy."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import Finding, error, listed, plural, raise_first_error, rows_text, warning
from equipool.checks.inputs import Inputs, Levels, TextCell, label_codes
from equipool.exceptions import EquipoolWarning, InputError

Missing = Literal["error", "impute"]
PATHS = ("path", "paths", "file", "filename", "image", "images")  # as columns of images are called
MIN_PARTICIPANTS = 3  # of a site: with fewer its effects are mostly the pool's
COLLINEAR = 1 - 1e-9  # correlation
IT = {"covariate": "it", "target": "the target"}  # in a sentence


def check_inputs(
    inputs: Inputs, *, missing: Missing = "error", pooled: bool = True, one_site: bool = False
) -> Inputs:
    """Raise :class:`equipool.exceptions.InputError` for the first problem; return the inputs otherwise.

    With ``one_site`` a single site is no problem: none was given.
    """
    findings = find_errors(inputs, missing=missing, pooled=pooled)
    raise_first_error(one for one in findings if not (one_site and one.code == "one-site"))
    return inputs


def check_for_fit(inputs: Inputs, *, site_given: bool) -> None:
    """Raise the first problem that stands in the way of fitting; without a site, warn that there is one."""
    check_inputs(inputs, one_site=not site_given)
    if not site_given:
        warn_of_no_site("the code is not made to forget sites")


def warn_of_no_site(result: str) -> None:
    """Say what follows from ``fit`` without a site; called two levels below it."""
    warnings.warn(
        f"No site was given, so all rows are one site's: {result}. Pass site=, one label a row.",
        EquipoolWarning,
        stacklevel=4,
    )


def warn_of_small_sites(names: Iterable[Any], participants: ArrayLike) -> None:
    """Name the sites with too few participants to estimate their effects; called by ``fit``."""
    few = np.asarray(participants) < MIN_PARTICIPANTS
    small = [str(name) for name, is_small in zip(names, few, strict=True) if is_small]
    if small and len(few) > 1:
        warnings.warn(
            f"{plural(len(small), 'site')} with fewer than {MIN_PARTICIPANTS} participants "
            f"({listed(small, shown=5)}): their effects are mostly those of the pool.",
            EquipoolWarning,
            stacklevel=3,
        )


def refuse_text(X: Any) -> None:
    """Raise an error that names the cell where a data frame of features has text among its numbers."""
    if not hasattr(X, "columns") or all(pd.api.types.is_numeric_dtype(dtype) for dtype in X.dtypes):
        return
    raise_first_error(_text(Inputs.from_arrays(X, site=np.zeros(len(X), dtype=int))))


def find_errors(inputs: Inputs, *, missing: Missing = "error", pooled: bool = True) -> list[Finding]:
    """Return every problem that stands in the way of pooling, gravest first.

    With ``pooled=False`` only the cells are judged: new participants, perhaps one of them, need no second
    site and no variation.
    """
    if missing not in ("error", "impute"):
        raise InputError(f"missing must be 'error' or 'impute'. Got {missing!r}.")
    if inputs.n_rows == 0:
        text = "The table has no rows; give at least two sites with participants."
        return [error("empty-table", text)]
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
        text = f"No column of numbers is left to pool{hint}; name the measurements with --features{images}."
        yield error("no-features", text)


def _text(inputs: Inputs) -> Iterator[Finding]:
    by_column: dict[str, list[TextCell]] = {}
    for cell in inputs.text_cells:
        by_column.setdefault(cell.column, []).append(cell)
    for column, cells in by_column.items():
        rows = [cell.row for cell in cells]
        remedy = "correct these cells, or empty them to mark them as missing"
        if len(rows) > 0.5 * inputs.n_rows:
            remedy = "give it numbers in a meaningful order, or one 0/1 column for each level"
        text = (
            f"Column {column!r} must hold numbers but has text, such as {cells[0].value!r}, in "
            f"{inputs.rows_text(rows)}; {remedy}."
        )
        yield error("text-in-numbers", text, column, rows=rows)


def _number_columns(inputs: Inputs) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Yield the role, the name and the values of each covariate, and of a target that is a number."""
    for name, values in zip(inputs.covariate_names, inputs.covariates.T, strict=True):
        yield "covariate", name, values
    if inputs.task == "number" and inputs.target is not None:
        yield "target", inputs.target_name, inputs.target


def _missing(inputs: Inputs, policy: Missing) -> Iterator[Finding]:
    labels = [("site", inputs.site_name, inputs.site), ("id", inputs.id_name, inputs.ids)]
    if inputs.task == "class":
        labels.insert(1, ("target", inputs.target_name, inputs.target))
    text = {(cell.column, cell.row) for cell in inputs.text_cells}
    cells = [
        (role, name, "is empty", [row for row, label in enumerate(values) if label is None])
        for role, name, values in labels
        if values is not None
    ]
    cells += [
        (
            role,
            name,
            "has no value",
            [k for k in np.flatnonzero(np.isnan(values)).tolist() if (name, k) not in text],
        )
        for role, name, values in _number_columns(inputs)
    ]
    for role, name, lacks, rows in cells:
        if rows:
            where = inputs.rows_text(rows)
            sentence = f"Column {name!r} ({role}) {lacks} in {where}; fill it in or drop these rows."
            yield error(f"missing-{role}", sentence, name, rows=rows)
    yield from _missing_features(inputs, policy, text)


def _missing_features(inputs: Inputs, policy: Missing, text_cells: set[tuple[str, int]]) -> Iterator[Finding]:
    empty = np.isnan(inputs.X)
    index = {name: k for k, name in enumerate(inputs.feature_names)}
    for column, row in text_cells:
        if column in index:
            empty[row, index[column]] = False
    if not empty.any():
        return
    rows = np.flatnonzero(empty.any(axis=1)).tolist()
    columns = [inputs.feature_names[k] for k in np.flatnonzero(empty.any(axis=0))]
    remedy = 'fill them in, drop them, or let them be imputed (missing="impute", --missing impute)'
    text = (
        f"{plural(int(empty.sum()), 'value')} ({empty.mean():.1%}) missing (NaN) in "
        f"{plural(len(columns), 'feature')} ({listed(columns)}), {inputs.rows_text(rows)}; "
        f"{remedy if policy == 'error' else 'they will be imputed'}."
    )
    yield (error if policy == "error" else warning)("missing-values", text, *columns, rows=rows)


def _infinite(inputs: Inputs) -> Iterator[Finding]:
    infinite = np.flatnonzero(np.isinf(inputs.X).any(axis=0))
    columns = [(inputs.feature_names[k], inputs.X[:, k]) for k in infinite]
    for name, values in (*columns, *((name, values) for _, name, values in _number_columns(inputs))):
        rows = np.flatnonzero(np.isinf(values)).tolist()
        if rows:
            text = (
                f"Column {name!r} is infinite in {inputs.rows_text(rows)}; correct it (a division by zero?) "
                "or empty it to mark it as missing."
            )
            yield error("infinite-values", text, name, rows=rows)


def _ids(inputs: Inputs) -> Iterator[Finding]:
    if inputs.ids is None:
        return
    counts = Counter(value for value in inputs.ids if value is not None)
    double = [value for value, count in counts.items() if count > 1]
    if double:
        rows = [row for row, value in enumerate(inputs.ids) if counts.get(value, 0) > 1]
        text = (
            f"{plural(len(double), 'id')} in column {inputs.id_name!r} "
            f"{'stands' if len(double) == 1 else 'stand'} more than once ({listed(double)}), "
            f"{rows_text(rows)}; drop the copies, or give each visit its own id."
        )
        yield error("duplicate-ids", text, inputs.id_name, rows=rows)


def _sites(inputs: Inputs) -> Iterator[Finding]:
    counts = np.bincount(inputs.site_index)
    if len(counts) == 1:
        text = (
            f"Column {inputs.site_name!r} has the single site {inputs.sites[0]!r}: there is nothing to "
            "harmonize; add the rows of another site, or name the column that tells sites apart."
        )
        yield error("one-site", text, inputs.site_name)
    elif len(counts) > 2 and counts.max() == 1:
        text = (
            f"Column {inputs.site_name!r} has a different value in every row, as an id would; "
            "name the column that tells the scanner or the centre."
        )
        yield error("site-per-row", text, inputs.site_name)


def _target(inputs: Inputs) -> Iterator[Finding]:
    values, is_class = inputs.target_numbers, inputs.task == "class"
    if values is None or inputs.target is None:
        return
    name, finite = inputs.target_name, values[np.isfinite(values)]
    labels = [label for label in inputs.target if label] if is_class else []
    if is_class and len(np.unique(finite)) == len(values) > 2:
        text = (
            f"The target {name!r} has a different value in every row, as an id would; name the column to be "
            "predicted, or leave the target out."
        )
        yield error("target-per-row", text, name)
    elif is_class and len(set(labels)) == 1:
        yield _constant("one-class", "target", name, f"has one class only, {labels[0]!r}")
    else:
        yield from _varies_too_little(inputs, "target", name, values, None)


def _covariates(inputs: Inputs) -> Iterator[Finding]:
    varying: list[int] = []
    columns = zip(inputs.covariate_names, inputs.covariates.T, inputs.levels, strict=True)
    for k, (name, values, levels) in enumerate(columns):
        findings = list(_varies_too_little(inputs, "covariate", name, values, levels))
        yield from findings
        if not findings and np.isfinite(values).any():
            varying.append(k)
    yield from _collinear(inputs, varying)


def _varies_too_little(
    inputs: Inputs, role: str, name: str, values: NDArray[Any], levels: Levels
) -> Iterator[Finding]:
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() == finite.max():
        only = f"{finite[0]:g}" if levels is None else repr(levels[0])
        yield _constant(f"constant-{role}", role, name, f"is {only}")
    elif _tied(inputs, values):
        text = (
            f"The {role} {name!r} never varies within a site, so its effect and the site's are the same "
            f"thing; add sites in which it varies, or leave {IT[role]} out (everything else can still be "
            "learned)."
        )
        yield error(f"{role}-tied-to-site", text, name, inputs.site_name)


def _constant(code: str, role: str, name: str, what: str) -> Finding:
    text = (
        f"The {role} {name!r} {what} in every row, so nothing can be learned about it; leave {IT[role]} out "
        "or add rows in which it varies."
    )
    return error(code, text, name)


def _collinear(inputs: Inputs, columns: list[int]) -> Iterator[Finding]:
    names = [inputs.covariate_names[k] for k in columns]
    complete = inputs.covariates[np.isfinite(inputs.covariates).all(axis=1)][:, columns]
    correlation = pd.DataFrame(complete).corr().to_numpy()
    first, second = np.nonzero(np.triu(np.abs(correlation) > COLLINEAR, k=1) & (len(complete) > 2))
    for a, b in zip(first, second, strict=True):
        text = (
            f"The covariates {names[a]!r} and {names[b]!r} are the same up to scale, so their "
            "effects cannot be told apart; leave one of them out."
        )
        yield error("covariates-collinear", text, names[a], names[b])


def _tied(inputs: Inputs, values: NDArray[Any]) -> bool:
    """Whether values are constant within every site that has at least two of them, and one has."""
    finite = np.flatnonzero(np.isfinite(values))
    sites = pd.Series(values[finite]).groupby(label_codes(inputs.site)[finite])
    several = sites.count() > 1
    constant = (sites.min() == sites.max())[several]
    return bool(len(several) > 1 and several.any() and constant.all())
