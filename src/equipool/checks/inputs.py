"""Bring X, y, site and covariates, from arrays or a table, into one form that can be checked."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks.findings import listed
from equipool.exceptions import InputError

__all__ = [
    "Arrays",
    "Inputs",
    "Roles",
    "Task",
    "TextCell",
    "parse_covariates",
    "parse_labels",
    "require_columns",
    "target_columns",
]

Task = Literal["class", "number"]
FloatArray = NDArray[np.float64]
ObjectArray = NDArray[np.object_]


class Roles(TypedDict, total=False):
    """What a table's columns are; ``site`` is always asked for by name."""

    covariates: str | Sequence[str]
    target: str | None
    id: str | None
    features: str | Sequence[str] | None
    ignore: str | Sequence[str]
    task: Task | None
    levels: Mapping[str, tuple[str, ...] | None] | None


class Arrays(TypedDict, total=False):
    """What may come with X and the site, each with one value a row."""

    covariates: Any
    y: Any
    ids: Any
    covariate_names: Sequence[str] | None
    task: Task | None
    levels: Mapping[str, tuple[str, ...] | None] | None


@dataclass(frozen=True)
class TextCell:
    """A cell with text in a column of numbers."""

    column: str
    row: int
    value: str


@dataclass(frozen=True, eq=False)
class Inputs:
    """A pool before it is checked: numbers parsed, labels as text, nothing judged yet.

    Missing values are NaN in ``X``, ``covariates`` and numeric targets, ``None`` in labels.
    """

    X: FloatArray
    feature_names: tuple[str, ...]
    site: ObjectArray
    covariates: FloatArray
    covariate_names: tuple[str, ...]
    levels: tuple[tuple[str, ...] | None, ...]
    target: NDArray[Any] | None = None
    target_name: str = "target"
    task: Task | None = None
    ids: ObjectArray | None = None
    text_cells: tuple[TextCell, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    site_name: str = "site"
    id_name: str = "id"

    @property
    def n_rows(self) -> int:
        """How many rows the pool has."""
        return len(self.site)

    @classmethod
    def from_frame(cls, frame: pd.DataFrame, *, site: str, **roles: Unpack[Roles]) -> Inputs:
        """Take the roles of a table's columns; without ``features``, every other column of numbers is one."""
        frame = frame.rename(columns=str)
        _refuse_double_names(frame.columns, "The table")
        names = roles.get("covariates", ())
        names = (names,) if isinstance(names, str) else tuple(names)
        target, id = roles.get("target"), roles.get("id")
        taken = [site, *names, *([target] if target else []), *([id] if id else [])]
        ignore = roles.get("ignore", ())
        ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        require_columns(frame, [*taken, *ignore])
        _refuse_double_roles(taken)
        chosen, left_out = _choose_features(frame, roles.get("features"), taken={*taken, *ignore})
        X, cells = _numbers(frame[chosen])
        C, levels, more_cells = _covariates(frame[list(names)], roles.get("levels"))
        y, kind, y_cells = _target(frame[target] if target else None, target or "", roles.get("task"))
        return cls(
            X=X,
            feature_names=tuple(chosen),
            site=_labels(frame[site]),
            covariates=C,
            covariate_names=names,
            levels=levels,
            target=y,
            target_name=target or "target",
            task=kind,
            ids=None if id is None else _labels(frame[id]),
            text_cells=(*cells, *more_cells, *y_cells),
            left_out=tuple(left_out),
            site_name=site,
            id_name=id or "id",
        )

    @classmethod
    def from_arrays(cls, X: Any, *, site: Any, **arrays: Unpack[Arrays]) -> Inputs:
        """Take arrays, lists, series or frames of the same length."""
        features = _as_frame(X, "X", prefix="x")
        covariates, y, ids = arrays.get("covariates"), arrays.get("y"), arrays.get("ids")
        given = {"site": site, "covariates": covariates, "y": y, "ids": ids}
        for name, values in given.items():
            if values is not None and len(values) != len(features):
                raise InputError(
                    f"{name} has {len(values)} values but X has {len(features)} rows; "
                    f"give one value of {name} for each row of X."
                )
        C = _as_frame(np.empty((len(features), 0)) if covariates is None else covariates, "covariates", "c")
        if arrays.get("covariate_names") is not None:
            C = _rename(C, arrays["covariate_names"] or ())
        numbers, cells = _numbers(features)
        _refuse_double_names(features.columns, "X")
        _refuse_double_names(C.columns, "covariates")
        C_numbers, levels, more_cells = _covariates(C, arrays.get("levels"))
        target, kind, y_cells = _target(None if y is None else _series(y), "target", arrays.get("task"))
        return cls(
            X=numbers,
            feature_names=tuple(features.columns),
            site=_labels(_series(site)),
            covariates=C_numbers,
            covariate_names=tuple(C.columns),
            levels=levels,
            target=target,
            task=kind,
            ids=None if ids is None else _labels(_series(ids)),
            text_cells=(*cells, *more_cells, *y_cells),
        )


def require_columns(frame: pd.DataFrame, names: Iterable[str]) -> None:
    """Raise an error with the nearest name where a column is not in the table."""
    columns = list(frame.columns)
    for name in names:
        if name in columns:
            continue
        lower = {column.lower(): column for column in columns}
        near = lower.get(name.lower()) or next(
            iter(difflib.get_close_matches(name, columns, n=1, cutoff=0.65)), None
        )
        hint = f"did you mean {near!r}?" if near else f"add it, or name one of {listed(columns, shown=12)}."
        raise InputError(f"The table has no column {name!r}; {hint}")


def _refuse_double_names(names: Iterable[object], where: str) -> None:
    double = sorted(str(name) for name, count in Counter(names).items() if count > 1)
    if double:
        raise InputError(
            f"{where} has the column {listed(double)} more than once; rename or drop the copies."
        )


def _refuse_double_roles(roles: Sequence[str]) -> None:
    for role in roles:
        if roles.count(role) > 1:
            raise InputError(
                f"Column {role!r} was given two roles; give it one: the site, a covariate, the target or "
                "the id."
            )


def _choose_features(
    frame: pd.DataFrame, features: str | Sequence[str] | None, taken: set[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the feature columns and those left out with the reason."""
    if features is not None:
        return _match_names(frame, [features] if isinstance(features, str) else features, taken), []
    chosen, left_out = [], []
    for name in frame.columns:
        if name in taken:
            continue
        reason = _not_numbers(frame[name])
        if reason:
            left_out.append((name, reason))
        else:
            chosen.append(name)
    return chosen, left_out


def _match_names(frame: pd.DataFrame, patterns: Sequence[str], taken: set[str]) -> list[str]:
    """Resolve names and shell-style patterns such as ``*_thickness`` to columns, in table order."""
    matched: set[str] = set()
    for pattern in patterns:
        if pattern in frame.columns:
            hits = {pattern}
        else:
            hits = {name for name in frame.columns if fnmatchcase(name, pattern)} - taken
        if not hits:
            require_columns(frame, [pattern])
        if hits & taken:
            raise InputError(
                f"Column {pattern!r} cannot be a feature: it is the site, a covariate, the target, the id, "
                "or to be ignored; leave it out."
            )
        matched |= hits
    return [name for name in frame.columns if name in matched]


def as_numbers(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return what of a column can be read as numbers, NaN elsewhere."""
    try:
        return pd.to_numeric(column, errors="coerce")
    except OverflowError:  # an integer of hundreds of digits, which pandas does not coerce
        return pd.to_numeric(column.astype(str).where(column.notna()), errors="coerce")


def _not_numbers(column: pd.Series[Any]) -> str:
    """Return why a column is no feature, or "" if it is one (perhaps with some bad cells)."""
    present = column.dropna()
    if present.empty and len(column):
        return "empty"
    if _is_time(column):
        return "dates"
    if pd.api.types.is_bool_dtype(column) or pd.api.types.is_numeric_dtype(column):
        return ""
    parsed = as_numbers(present).notna().mean() if len(present) else 0.0
    return "" if parsed >= 0.5 else "text"


def parse_labels(values: Any) -> ObjectArray:
    """Return labels given after fit in the form they have at fit: text, ``None`` where missing."""
    return _labels(_series(values))


def parse_covariates(
    values: Any, names: Sequence[str], levels: Sequence[tuple[str, ...] | None]
) -> FloatArray:
    """Return covariates given after fit as numbers (rows, K), by the names and levels known from fit."""
    frame = _as_frame(values, "covariates", "c")
    if isinstance(values, pd.DataFrame):
        require_columns(frame, names)
        frame = frame[list(names)]
    if frame.shape[1] != len(names):
        raise InputError(
            f"There were {len(names)} covariate(s) at fit ({listed(names)}). Got {frame.shape[1]}; "
            "give the same."
        )
    numbers, _, cells = _covariates(
        frame.set_axis(list(names), axis=1), dict(zip(names, levels, strict=True))
    )
    if cells:
        cell = cells[0]
        raise InputError(
            f"The covariate {cell.column!r} is {cell.value!r} in row {cell.row + 1}, which was "
            "not seen at fit; correct it, or leave the row out."
        )
    if not np.isfinite(numbers).all():
        row, column = np.argwhere(~np.isfinite(numbers))[0]
        raise InputError(
            f"The covariate {names[column]!r} has no finite value in row {row + 1}; fill it in or "
            "drop the row."
        )
    return numbers


def target_columns(target: NDArray[Any] | None, task: Task | None, rows: int) -> FloatArray:
    """Return the target as columns of a regression, (rows, E): a number, or classes but the first as 0/1."""
    if target is None:
        return np.empty((rows, 0))
    if task == "number":
        return np.asarray(target, dtype=np.float64)[:, None]
    labels = np.asarray(target).astype(str)
    return (labels[:, None] == np.unique(labels)[1:]).astype(np.float64)


def _is_time(column: Any) -> bool:
    """Say whether a column, or a dtype, is of dates or durations."""
    return pd.api.types.is_datetime64_any_dtype(column) or pd.api.types.is_timedelta64_dtype(column)


def _numbers(frame: pd.DataFrame) -> tuple[FloatArray, tuple[TextCell, ...]]:
    """Parse columns as float64; text becomes NaN and is returned with its place."""
    # Looked at by dtype: a series of each of many columns takes longer than all that is done with them.
    kinds = set(frame.dtypes)
    if all(pd.api.types.is_numeric_dtype(dtype) for dtype in kinds):
        return frame.to_numpy(dtype=np.float64, na_value=np.nan), ()
    for name, dtype in zip(frame.columns, frame.dtypes, strict=True):
        if _is_time(dtype):
            raise InputError(
                f"Column {name!r} holds dates or durations; give it as a number, such as the age in years."
            )
    values = np.empty(frame.shape, dtype=np.float64)
    cells: list[TextCell] = []
    for k, name in enumerate(frame.columns):
        column = frame[name]
        parsed = as_numbers(column).to_numpy(dtype=np.float64, na_value=np.nan)
        values[:, k] = parsed
        bad = np.flatnonzero(column.notna().to_numpy() & np.isnan(parsed))
        cells += [TextCell(str(name), int(row), str(column.iloc[row])) for row in bad]
    return values, tuple(cells)


def _covariates(
    frame: pd.DataFrame, known: Mapping[str, tuple[str, ...] | None] | None = None
) -> tuple[FloatArray, tuple[tuple[str, ...] | None, ...], tuple[TextCell, ...]]:
    """Parse covariates; two text levels (such as F and M) become 0 and 1 in alphabetical order.

    ``known`` has the levels that an earlier pool gave to each covariate; they are kept.
    """
    values = np.empty(frame.shape, dtype=np.float64)
    levels: list[tuple[str, ...] | None] = []
    cells: list[TextCell] = []
    for k, name in enumerate(frame.columns):
        numbers, bad = _numbers(frame[[name]])
        levels.append(_text_levels(frame[name], bad) if known is None else known.get(name))
        own = levels[-1]
        if own is None:
            values[:, k] = numbers[:, 0]
            cells += bad
            continue
        code = {level: float(position) for position, level in enumerate(own)}
        for row, label in enumerate(_labels(frame[name])):
            values[row, k] = np.nan if label is None else code.get(label, np.nan)
            if label is not None and label not in code:
                cells.append(TextCell(str(name), row, label))
    return values, tuple(levels), tuple(cells)


def _text_levels(column: pd.Series[Any], bad: Sequence[TextCell]) -> tuple[str, ...] | None:
    """Return the levels of a category; only a column without a single number is one, else text is a slip."""
    if not bad or len(bad) < column.notna().sum():
        return None
    levels = sorted({label for label in _labels(column) if label is not None})
    return tuple(levels) if len(levels) <= 2 else None


def _target(
    column: pd.Series[Any] | None, name: str, task: Task | None
) -> tuple[NDArray[Any] | None, Task | None, tuple[TextCell, ...]]:
    """Parse the target, if any: labels for classes, numbers for regression."""
    if column is None:
        return None, None, ()
    if task not in (None, "class", "number"):
        raise InputError(f"task must be 'class' or 'number'. Got {task!r}.")
    task = _guess_task(column) if task is None else task
    if task == "class":
        return _labels(column), "class", ()
    values, cells = _numbers(column.to_frame(name))
    return values[:, 0], "number", cells


def _guess_task(column: pd.Series[Any]) -> Task:
    """Text, booleans and few whole numbers are classes; everything else is a number."""
    if pd.api.types.is_bool_dtype(column):
        return "class"
    if not pd.api.types.is_numeric_dtype(column):
        if _not_numbers(column):
            return "class"
        # Classes 0 and 1 are classes as text too, which is how a PooledDataset keeps them.
        numbers = as_numbers(column)
        if numbers.isna().sum() > column.isna().sum():
            return "number"  # with cells that will be named
        column = numbers
    present = column.dropna().to_numpy(dtype=np.float64)
    present = present[np.isfinite(present)]
    whole = bool((present == np.round(present)).all())
    return "class" if whole and len(np.unique(present)) <= 10 else "number"


def _labels(column: pd.Series[Any]) -> ObjectArray:
    """Return labels as text, ``None`` where missing or blank; whole floats lose their ".0"."""
    if pd.api.types.is_float_dtype(column):
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
        present = values[~np.isnan(values)]
        # Beyond 2^53 a float is no count any more, and infinity never was one.
        if ((present == np.round(present)) & (np.abs(present) < 2**53)).all():
            column = pd.Series(values).round().astype("Int64")
    missing = column.isna().to_numpy()
    labels = np.array([str(value) for value in column], dtype=object)
    blank = np.array([not label.strip() for label in labels], dtype=bool)
    labels[missing | blank] = None
    return labels


def _series(values: Any) -> pd.Series[Any]:
    """Return a one-dimensional column from anything that holds one."""
    if isinstance(values, pd.Series):
        return values.reset_index(drop=True)
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise InputError(f"Expected one value for each row, shape (rows,). Got shape {array.shape}.")
    return pd.Series(array)


def _as_frame(values: Any, name: str, prefix: str) -> pd.DataFrame:
    """Return a frame with text column names from a frame, a series or an array."""
    if isinstance(values, pd.DataFrame):
        return values.reset_index(drop=True).rename(columns=str)
    if isinstance(values, pd.Series):
        return values.reset_index(drop=True).to_frame(str(values.name or f"{prefix}0"))
    array = np.asarray(values)
    if array.ndim == 1 and name == "covariates":
        array = array[:, None]
    if array.ndim != 2:
        hint = "use X.reshape(-1, 1) for one feature" if array.ndim == 1 else "flatten all but the first axis"
        raise InputError(f"{name} must have two axes, rows and columns. Got shape {array.shape}; {hint}.")
    return pd.DataFrame(array, columns=[f"{prefix}{k}" for k in range(array.shape[1])])


def _rename(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    names = [names] if isinstance(names, str) else list(names)
    if len(names) != frame.shape[1]:
        raise InputError(
            f"covariate_names has {len(names)} names for {frame.shape[1]} covariates; give one for each."
        )
    return frame.set_axis(names, axis=1)
