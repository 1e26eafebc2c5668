"""Features, target, site and covariates from arrays or a table, parsed into one form that can be checked."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, TypedDict, Unpack

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks.findings import listed, rows_text
from equipool.exceptions import InputError, did_you_mean

Task = Literal["class", "number"]
Levels = tuple[str, ...] | None  # of a covariate that is text: its values, coded 0 and 1
FloatArray = NDArray[np.float64]
ObjectArray = NDArray[np.object_]

DATES = "mM"  # kinds of NumPy's dtypes


class Roles(TypedDict, total=False):
    """What a table's columns are; ``site`` is always asked for by name."""

    covariates: str | Sequence[str]
    target: str | None
    id: str | None
    features: str | Sequence[str] | None
    ignore: str | Sequence[str]
    task: Task | None
    levels: Mapping[str, Levels] | None


class Arrays(TypedDict, total=False):
    """What may come with X and the site, each with one value a row."""

    covariates: Any
    y: Any
    ids: Any
    covariate_names: Sequence[str] | None
    task: Task | None
    levels: Mapping[str, Levels] | None


class TextCell(NamedTuple):
    """A cell with text in a column of numbers."""

    column: str
    row: int
    value: str


@dataclass(frozen=True, eq=False)
class Inputs:
    """A pool before it is checked: numbers parsed, labels as text, nothing checked yet.

    Missing values are NaN in ``X``, ``covariates`` and numeric targets, ``None`` in labels. A pool of images
    has no features: ``X`` then has no columns, and ``has_features`` is false.
    """

    X: FloatArray
    feature_names: tuple[str, ...]
    site: ObjectArray
    covariates: FloatArray
    covariate_names: tuple[str, ...]
    levels: tuple[Levels, ...]
    target: NDArray[Any] | None = None
    target_name: str = "target"
    task: Task | None = None
    ids: ObjectArray | None = None
    text_cells: tuple[TextCell, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # columns that are no features, and why
    site_name: str = "site"
    id_name: str = "id"
    has_features: bool = True

    @classmethod
    def from_frame(
        cls, frame: pd.DataFrame, *, site: str, images: str | None = None, **roles: Unpack[Roles]
    ) -> Self:
        """Take the roles of a table's columns.

        Without ``features``, every other column of numbers is one; with ``images``, a column of paths, none.
        """
        frame = frame.rename(columns=str)
        refuse_double_names(frame.columns, "The table")
        covariates, ignore = _as_names(roles.get("covariates", ())), _as_names(roles.get("ignore", ()))
        target, id = roles.get("target"), roles.get("id")
        taken = [site, *covariates, *(name for name in (target, id, images) if name)]
        require_columns(frame, [*taken, *ignore])
        for name, count in Counter(taken).items():
            if count > 1:
                remedy = "give it one: the site, a covariate, the target or the id"
                raise InputError(f"Column {name!r} was given two roles; {remedy}.")
        chosen = [] if images else roles.get("features")
        reasons: dict[str, str] = {}
        if chosen is None:
            free = frame.columns.difference([*taken, *ignore], sort=False)
            reasons = {name: _not_numbers(frame[name]) for name in free}
            features = [name for name, reason in reasons.items() if not reason]
        else:
            features = _match_names(frame, _as_names(chosen), {*taken, *ignore})
        columns = {"site": site, "target": target, "id": id}
        return cls._parsed(
            frame[features],
            frame[covariates],
            {role: frame[name] for role, name in columns.items() if name},
            roles,
            left_out=tuple((name, reason) for name, reason in reasons.items() if reason),
            has_features=images is None,
        )

    @classmethod
    def from_arrays(cls, X: Any, *, site: Any, **arrays: Unpack[Arrays]) -> Self:
        """Take arrays, lists, series or frames of the same length; X is ``None`` for images."""
        features = pd.DataFrame(index=range(len(site))) if X is None else as_frame(X, "X", prefix="x")
        for name, values in {"site": site, **arrays}.items():
            if name in ("site", "covariates", "y", "ids") and values is not None:
                require_length(name, values, len(features))
        C = covariate_frame(arrays.get("covariates"), len(features))
        if (given := arrays.get("covariate_names")) is not None:
            names = _as_names(given)
            if len(names) != C.shape[1]:
                what = f"covariate_names has {len(names)} names for {C.shape[1]} covariates"
                raise InputError(f"{what}; give one for each.")
            C = C.set_axis(names, axis=1)
        refuse_double_names(features.columns, "X")
        refuse_double_names(C.columns, "covariates")
        columns = {"site": site, "target": arrays.get("y"), "id": arrays.get("ids")}
        series = {role: _series(values, role) for role, values in columns.items() if values is not None}
        return cls._parsed(features, C, series, arrays, has_features=X is not None)

    @classmethod
    def _parsed(
        cls,
        features: pd.DataFrame,
        covariates: pd.DataFrame,
        columns: Mapping[str, pd.Series],  # site, target and id
        coding: Roles | Arrays,
        **more: Any,
    ) -> Self:
        X, text = _numbers(features)
        C, levels, text_in_covariates = _covariates(covariates, coding.get("levels"))
        text += text_in_covariates
        if "target" in columns:
            more["target"], more["task"], text_in_target = _target(columns["target"], coding.get("task"))
            text += text_in_target
        more |= {f"{role}_name": str(column.name) for role, column in columns.items()}
        return cls(
            X=X,
            feature_names=tuple(features.columns),
            site=parse_labels(columns["site"]),
            covariates=C,
            covariate_names=tuple(covariates.columns),
            levels=levels,
            ids=parse_labels(columns["id"]) if "id" in columns else None,
            text_cells=tuple(text),
            **more,
        )

    @property
    def n_rows(self) -> int:
        """How many rows the pool has."""
        return len(self.site)

    @cached_property
    def rows_with_site(self) -> NDArray[np.intp]:
        """The rows whose site is given; numbers by site are computed from these."""
        return np.flatnonzero(pd.notna(self.site))

    @cached_property
    def sites(self) -> NDArray[Any]:
        """The sites' names, in order."""
        return np.unique(self.site[self.rows_with_site].astype(str)).astype(object)

    @cached_property
    def site_index(self) -> NDArray[np.intp]:
        """The site of each of ``rows_with_site``, as its place among ``sites``."""
        return np.searchsorted(self.sites.astype(str), self.site[self.rows_with_site].astype(str))

    def covariates_with_site(self) -> Iterable[tuple[str, FloatArray, Levels]]:
        """Return the name, the values in ``rows_with_site`` and the levels of each covariate."""
        return zip(self.covariate_names, self.covariates[self.rows_with_site].T, self.levels, strict=True)

    @property
    def target_numbers(self) -> FloatArray | None:
        """The target as numbers, classes as their place in alphabetical order; NaN where it is missing."""
        if self.target is None or self.task == "number":
            return self.target
        places = pd.factorize(self.target, sort=True)[0].astype(np.float64)
        return np.where(places < 0, np.nan, places)

    def rows_text(self, rows: Sequence[int]) -> str:
        """Name rows by number and id."""
        return rows_text(rows, None if self.ids is None else self.ids.tolist())


def require_columns(frame: pd.DataFrame, names: Iterable[str]) -> None:
    """Raise an error with the nearest name where a column is not in the table."""
    for name in (name for name in names if name not in frame.columns):
        same = [column for column in frame.columns if column.lower() == name.lower()]
        otherwise = f"add it, or name one of {listed(frame.columns, shown=12)}."
        hint = did_you_mean([*same, name][0], frame.columns, otherwise)
        raise InputError(f"The table has no column {name!r}; {hint}")


def require_length(name: str, values: Any, rows: int) -> None:
    """Raise an error where there is not one value for each row of X."""
    if len(values) != rows:
        raise InputError(f"{name} has {len(values)} values but X has {rows} rows; give one for each row.")


def _as_names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def refuse_double_names(names: Iterable[object], where: str) -> None:
    """Raise an error where a table has a column twice."""
    double = sorted(str(name) for name, count in Counter(names).items() if count > 1)
    if double:
        raise InputError(f"{where} has the column {listed(double)} more than once; rename or drop copies.")


def _match_names(frame: pd.DataFrame, patterns: Sequence[str], taken: set[str]) -> list[str]:
    """Resolve names and shell-style patterns such as ``*_thickness`` to columns, in table order."""
    matched: set[str] = set()
    for pattern in patterns:
        hits = {name for name in frame.columns if fnmatchcase(name, pattern)} - taken
        if pattern in frame.columns:
            hits = {pattern}
        if not hits:
            require_columns(frame, [pattern])
        if hits & taken:
            roles = "the site, a covariate, the target, the id, or to be ignored"
            raise InputError(f"Column {pattern!r} cannot be a feature: it is {roles}; leave it out.")
        matched |= hits
    return [name for name in frame.columns if name in matched]


def as_numbers(column: pd.Series) -> pd.Series:
    """Return what of a column can be read as numbers, NaN elsewhere."""
    try:
        return pd.to_numeric(column, errors="coerce")
    except OverflowError:  # an integer of hundreds of digits, which pandas does not coerce
        return pd.to_numeric(column.astype(str).where(column.notna()), errors="coerce")


def parse_labels(values: Any) -> ObjectArray:
    """Return labels as text, ``None`` where missing or blank; whole floats lose their ".0"."""
    column = _series(values)
    if pd.api.types.is_float_dtype(column):
        numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
        present = numbers[~np.isnan(numbers)]
        # Beyond 2^53 a float is no count any more, and infinity never was one.
        if ((present == np.round(present)) & (np.abs(present) < 2**53)).all():
            column = pd.Series(numbers).round().astype("Int64")
    labels = np.array([str(value) for value in column], dtype=object)
    labels[column.isna().to_numpy() | np.array([not label.strip() for label in labels], dtype=bool)] = None
    return labels


def parse_covariates(values: Any, names: Sequence[str], levels: Sequence[Levels]) -> FloatArray:
    """Return covariates given after fit as numbers (rows, K), by the names and levels of the fit."""
    frame = covariate_frame(values, None, names)
    numbers, _, cells = _covariates(frame, dict(zip(names, levels, strict=True)))
    for name, row, value in cells:
        what = f"The covariate {name!r} is {value!r} in row {row + 1}, which was not seen at fit"
        raise InputError(f"{what}; correct it, or leave the row out.")
    for row, column in np.argwhere(~np.isfinite(numbers)):
        where = f"The covariate {names[column]!r} has no finite value in row {row + 1}"
        raise InputError(f"{where}; fill it in or drop the row.")
    return numbers


def covariate_frame(covariates: Any, rows: int | None, names: Sequence[str] | None = None) -> pd.DataFrame:
    """Return covariates as a frame; after fit with its columns, by position where they have no names."""
    if covariates is None:
        return pd.DataFrame(index=range(rows or 0))
    given = pd.DataFrame(covariates) if isinstance(covariates, dict) else covariates
    frame = as_frame(given, "covariates", "c")
    unnamed = names is not None and list(names) == ["c0"] and frame.shape[1] == 1  # at fit, it had no name
    if names is not None and isinstance(given, pd.DataFrame) and not unnamed:
        require_columns(frame, names)
        frame = frame[list(names)]
    elif names is not None:
        if frame.shape[1] != len(names):
            what = f"There were {len(names)} covariate(s) at fit ({listed(names)})"
            raise InputError(f"{what}. Got {frame.shape[1]}; give the same.")
        frame = frame.set_axis(list(names), axis=1)
    if rows is not None and len(frame) != rows:
        raise InputError(f"covariates must have one row for each of the {rows} rows of X. Got {len(frame)}.")
    return frame


def _not_numbers(column: pd.Series) -> str:
    """Return why a column is no feature, or "" if it is one (perhaps with some bad cells)."""
    present = column.dropna()
    if present.empty and len(column):
        return "empty"
    if column.dtype.kind in DATES:
        return "dates"
    if pd.api.types.is_bool_dtype(column) or pd.api.types.is_numeric_dtype(column):
        return ""
    return "" if len(present) and as_numbers(present).notna().mean() >= 0.5 else "text"


def _numbers(frame: pd.DataFrame) -> tuple[FloatArray, list[TextCell]]:
    """Parse columns as float64; text becomes NaN and is returned with its place."""
    # Looked at by dtype: a series of each of many columns takes longer than all that is done with them.
    if all(pd.api.types.is_numeric_dtype(dtype) for dtype in set(frame.dtypes)):
        return frame.to_numpy(dtype=np.float64, na_value=np.nan), []
    values = np.empty(frame.shape, dtype=np.float64)
    cells: list[TextCell] = []
    for k, name in enumerate(frame.columns):
        column = frame[name]
        if column.dtype.kind in DATES:
            what = f"Column {name!r} holds dates or durations"
            raise InputError(f"{what}; give it as a number, such as the age in years.")
        values[:, k] = as_numbers(column).to_numpy(dtype=np.float64, na_value=np.nan)
        text = np.flatnonzero(column.notna().to_numpy() & np.isnan(values[:, k]))
        cells += [TextCell(str(name), int(row), str(column.iloc[row])) for row in text]
    return values, cells


def _covariates(
    frame: pd.DataFrame, given: Mapping[str, Levels] | None = None
) -> tuple[FloatArray, tuple[Levels, ...], list[TextCell]]:
    """Parse covariates; two text levels (such as F and M) become 0 and 1 in alphabetical order.

    ``given`` has the levels that each covariate has in an earlier pool.
    """
    values = np.empty(frame.shape, dtype=np.float64)
    all_levels: list[Levels] = []
    cells: list[TextCell] = []
    for k, name in enumerate(frame.columns):
        numbers, text = _numbers(frame[[name]])
        labels = parse_labels(frame[name])
        levels = None if given is None else given.get(name)
        # Only a column without a single number is a category, else text is a slip.
        if given is None and text and len(text) == frame[name].notna().sum():
            different = sorted({label for label in labels if label is not None})
            levels = tuple(different) if len(different) <= 2 else None
        all_levels.append(levels)
        if levels is None:
            values[:, k] = numbers[:, 0]
            cells += text
        else:
            values[:, k] = [levels.index(label) if label in levels else np.nan for label in labels]
            unknown = [row for row, label in enumerate(labels) if label is not None and label not in levels]
            cells += [TextCell(str(name), row, labels[row]) for row in unknown]
    return values, tuple(all_levels), cells


def _target(column: pd.Series, task: Task | None) -> tuple[NDArray[Any], Task, list[TextCell]]:
    """Parse the target: labels for classes, numbers for regression."""
    if task not in (None, "class", "number"):
        raise InputError(f"task must be 'class' or 'number'. Got {task!r}.")
    if (task or _guess_task(column)) == "class":
        return parse_labels(column), "class", []
    values, cells = _numbers(column.to_frame())
    return values[:, 0], "number", cells


def _guess_task(column: pd.Series) -> Task:
    """Text, booleans and few whole numbers are classes; everything else is a number."""
    if pd.api.types.is_bool_dtype(column) or _not_numbers(column):
        return "class"
    # Classes 0 and 1 are classes as text too, which is how a PooledDataset keeps them.
    numbers = as_numbers(column)
    if numbers.isna().sum() > column.isna().sum():
        return "number"  # with cells that will be named
    present = numbers.dropna().to_numpy(dtype=np.float64)
    present = present[np.isfinite(present)]
    whole = bool((present == np.round(present)).all())
    return "class" if whole and len(np.unique(present)) <= 10 else "number"


def _series(values: Any, name: str = "") -> pd.Series:
    """Return a one-dimensional column from anything that holds one."""
    if isinstance(values, pd.Series):
        return values.reset_index(drop=True).rename(name)
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise InputError(f"Expected one value for each row, shape (rows,). Got shape {array.shape}.")
    return pd.Series(array, name=name)


def as_frame(values: Any, name: str, prefix: str) -> pd.DataFrame:
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
