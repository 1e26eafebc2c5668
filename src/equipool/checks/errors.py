"""What makes a pool impossible to use: each problem in one sentence with its remedy."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import Finding, error, listed, plural, raise_first_error, rows_text, warning
from equipool.checks.inputs import Inputs
from equipool.exceptions import EquipoolWarning, InputError

Missing = Literal["keep", "error", "impute"]
PATHS = ("path", "paths", "file", "filename", "image", "images")  # as columns of images are called
MIN_PARTICIPANTS = 3  # of a site: with fewer its effects are mostly the pool's
COLLINEAR = 1 - 1e-9  # correlation


def check_inputs(inputs: Inputs, *, missing: Missing = "error", pooled: bool = True) -> None:
    """Raise :class:`InputError` for the first problem, as :func:`find_errors` finds them."""
    raise_first_error(find_errors(inputs, missing=missing, pooled=pooled))


def check_for_fit(
    inputs: Inputs,
    *,
    site_given: bool,
    missing: Missing = "error",
    without_site: str = "the code is not made to forget sites",
) -> None:
    """Raise the first problem that prevents fitting; warn where no site was given."""
    findings = find_errors(inputs, missing=missing)
    raise_first_error(one for one in findings if site_given or one.code != "one-site")
    if not site_given:
        text = f"No site was given, so all rows are one site's: {without_site}. Pass site=, one label a row."
        warnings.warn(text, EquipoolWarning, stacklevel=3)


def warn_of_small_sites(names: Iterable[Any], participants: ArrayLike) -> None:
    """Name the sites with too few participants to estimate their effects; called by ``fit``."""
    few = np.asarray(participants) < MIN_PARTICIPANTS
    small = [str(name) for name, is_small in zip(names, few, strict=True) if is_small]
    if small and len(few) > 1:
        what = f"{plural(len(small), 'site')} with fewer than {MIN_PARTICIPANTS} participants"
        text = f"{what} ({listed(small)}): their effects are mostly those of the pool."
        warnings.warn(text, EquipoolWarning, stacklevel=3)


def refuse_text(X: Any) -> None:
    """Raise an error that names the cell where a data frame of features has text among its numbers."""
    if hasattr(X, "columns") and not all(pd.api.types.is_numeric_dtype(dtype) for dtype in X.dtypes):
        raise_first_error(_cells(Inputs.from_arrays(X, site=np.zeros(len(X), dtype=int))))


def find_errors(inputs: Inputs, *, missing: Missing = "error", pooled: bool = True) -> list[Finding]:
    """Return every problem that prevents pooling, gravest first.

    With ``pooled=False`` only the cells are checked: new rows, perhaps one, need no second site and no
    variation.
    """
    if missing not in get_args(Missing):
        raise InputError(f"missing must be {' or '.join(map(repr, get_args(Missing)))}. Got {missing!r}.")
    if inputs.n_rows == 0:
        return [error("empty-table")]
    findings = [*_cells(inputs), *_missing(inputs, missing), *_infinite(inputs)]
    for finder in (_ids, _sites, _target, _covariates) if pooled else (_ids,):
        findings += finder(inputs)
    return findings


def _cells(inputs: Inputs) -> Iterator[Finding]:
    """Find text among numbers, and tables without a feature."""
    if inputs.has_features and not inputs.feature_names:
        left_out = [name for name, _ in inputs.left_out]
        hint = f" (left out: {listed(left_out)})" if left_out else ""
        paths = [name for name in left_out if name.lower() in PATHS]
        images = f", or the column of images with --images {paths[0]}" if paths else ""
        yield error("no-features", hint=hint, images=images)
    for column, group in groupby(inputs.text_cells, key=attrgetter("column")):
        cells = list(group)
        rows = [cell.row for cell in cells]
        remedy = "correct these cells, or empty them to mark them as missing"
        if len(rows) > 0.5 * inputs.n_rows:
            remedy = "give it numbers in a meaningful order, or one 0/1 column for each level"
        words = {"example": cells[0].value, "where": inputs.rows_text(rows), "remedy": remedy}
        yield error("text-in-numbers", column, rows=rows, **words)


def _columns(inputs: Inputs) -> list[tuple[str, str, NDArray[Any] | None]]:
    """Return the role, the name and the values of each column that is no feature."""
    covariates = zip(inputs.covariate_names, inputs.covariates.T, strict=True)
    return [
        ("site", inputs.site_name, inputs.site),
        ("target", inputs.target_name, inputs.target),
        ("id", inputs.id_name, inputs.ids),
        *(("covariate", name, values) for name, values in covariates),
    ]


def _missing(inputs: Inputs, policy: Missing) -> Iterator[Finding]:
    text = {(cell.column, cell.row) for cell in inputs.text_cells}
    for role, name, values in _columns(inputs):
        missing = np.flatnonzero(pd.isna(values)).tolist() if values is not None else ()
        rows = [row for row in missing if (name, row) not in text]
        if rows:
            yield error("missing-{role}", name, rows=rows, role=role, where=inputs.rows_text(rows))
    empty = np.isnan(inputs.X)
    for name, row in text:
        empty[row, np.array(inputs.feature_names, dtype=object) == name] = False
    if not empty.any():
        return
    rows = np.flatnonzero(empty.any(axis=1)).tolist()
    columns = [inputs.feature_names[k] for k in np.flatnonzero(empty.any(axis=0))]
    kind, remedy = warning, "they stay empty" if policy == "keep" else "they will be imputed"
    if policy == "error":
        kind = error
        remedy = "fill them in, drop them, or let them stay empty "
        remedy += '(missing="keep") or be imputed (missing="impute", --missing impute)'
    words = {"count": plural(int(empty.sum()), "value"), "share": empty.mean(), "remedy": remedy}
    words |= {"features": f"{plural(len(columns), 'feature')} ({listed(columns)})"}
    yield kind("missing-values", *columns, rows=rows, **words, where=inputs.rows_text(rows))


def _infinite(inputs: Inputs) -> Iterator[Finding]:
    infinite = np.flatnonzero(np.isinf(inputs.X).any(axis=0))
    columns = [(inputs.feature_names[k], inputs.X[:, k]) for k in infinite]
    for _, name, values in _columns(inputs):
        if values is not None and values.dtype == np.float64:
            columns.append((name, values))
    for name, values in columns:
        rows = np.flatnonzero(np.isinf(values)).tolist()
        if rows:
            yield error("infinite-values", name, rows=rows, where=inputs.rows_text(rows))


def _ids(inputs: Inputs) -> Iterator[Finding]:
    ids = pd.Series([] if inputs.ids is None else inputs.ids, dtype=object)
    copies = ids[ids.duplicated(keep=False) & ids.notna()]
    if len(copies):
        double, rows = copies.unique(), copies.index.tolist()
        words = {"ids": plural(len(double), "id"), "which": listed(double), "where": rows_text(rows)}
        occur = "occurs" if len(double) == 1 else "occur"
        yield error("duplicate-ids", inputs.id_name, rows=rows, occur=occur, **words)


def _sites(inputs: Inputs) -> Iterator[Finding]:
    counts, name = np.bincount(inputs.site_index), inputs.site_name
    if len(counts) == 1:
        yield error("one-site", name, site=inputs.sites[0])
    elif len(counts) > 2 and counts.max() == 1:
        yield error("site-per-row", name)


def _target(inputs: Inputs) -> Iterator[Finding]:
    values, name = inputs.target_numbers, inputs.target_name
    if values is None or inputs.target is None:
        return
    classes = sorted(filter(None, inputs.target)) if inputs.task == "class" else None
    if classes is not None and len(set(classes)) == len(values) > 2:
        yield error("target-per-row", name)
    else:
        yield from _varies_too_little(inputs, "target", name, values, classes)


def _covariates(inputs: Inputs) -> Iterator[Finding]:
    varying: list[str] = []
    for name, values, levels in zip(inputs.covariate_names, inputs.covariates.T, inputs.levels, strict=True):
        findings = list(_varies_too_little(inputs, "covariate", name, values, levels))
        yield from findings
        if not findings:
            varying.append(name)
    complete = inputs.covariates[np.isfinite(inputs.covariates).all(axis=1)]
    correlation = pd.DataFrame(complete, columns=list(inputs.covariate_names))[varying].corr().to_numpy()
    first, second = np.nonzero(np.triu(np.abs(correlation) > COLLINEAR, k=1) & (len(complete) > 2))
    for one, other in np.array(varying, dtype=object)[np.column_stack([first, second])]:
        yield error("covariates-collinear", one, other, one=one, other=other)


def _varies_too_little(
    inputs: Inputs, role: str, name: str, values: NDArray[Any], levels: Sequence[str] | None
) -> Iterator[Finding]:
    finite = pd.Series(values).where(np.isfinite(values))
    words: dict[str, Any] = {"role": role, "it": "it" if role == "covariate" else "the target"}
    by_site = finite.groupby(inputs.site).agg(["count", "min", "max"])
    several = by_site[by_site["count"] > 1]
    if finite.min() == finite.max():
        only = f"{finite.min():g}" if levels is None else repr(levels[0])
        code = "one-class" if role == "target" and levels else "constant-{role}"
        yield error(code, name, only=only, **words)
    elif len(several) and (several["min"] == several["max"]).all():
        yield error("{role}-tied-to-site", name, inputs.site_name, **words)
