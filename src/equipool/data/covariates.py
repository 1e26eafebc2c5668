"""Covariates to keep, numbers and categories, as the numbers that a regression takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from equipool.checks.inputs import as_frame, as_numbers, parse_labels
from equipool.exceptions import InputError


@dataclass(frozen=True)
class Encoding:
    """How the user's covariates become numbers: categories of more than two levels become 0/1 columns."""

    columns: tuple[str, ...]
    categories: dict[str, tuple[str, ...]]
    names: tuple[str, ...] = field(default=(), metadata={"dimensions": ("covariates",)})
    levels: tuple[tuple[str, ...] | None, ...] = field(default=(), metadata={"dimensions": ("covariates",)})

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, names that do not come from the columns and their categories."""
        apart = [
            [f"{column}={level}" for level in self.categories[column][1:]]
            if column in self.categories
            else [column]
            for column in self.columns
        ]
        if self.names and [name for names in apart for name in names] != list(self.names):
            raise ValueError("names")

    def apart(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the frame with a 0/1 column for each level but the first of a category."""
        columns: dict[str, Any] = {}
        for name in frame.columns:
            levels = self.categories.get(name)
            if levels is None:
                columns[name] = frame[name]
                continue
            labels = parse_labels(frame[name])
            for row, label in enumerate(labels, start=1):
                if label not in levels:
                    raise InputError(
                        f"The covariate {name!r} is {label!r} in row {row}; at fit it was one of "
                        f"{', '.join(levels)}; correct it, or leave the row out."
                    )
            columns |= {f"{name}={level}": (labels == level).astype(float) for level in levels[1:]}
        return pd.DataFrame(columns, index=frame.index)


def encode(frame: pd.DataFrame) -> Encoding:
    """Find the categories with more than two levels; their levels are kept in alphabetical order."""
    categories = {}
    for name, column in frame.items():
        is_category = isinstance(column.dtype, pd.CategoricalDtype)
        if not is_category and as_numbers(column).notna().any():
            continue  # numbers, perhaps with a slip: the check of the inputs names the cell
        labels = parse_labels(column)
        levels = sorted({label for label in labels if label is not None})
        if 2 < len(levels) <= max(20, len(labels) // 10) and None not in labels:
            categories[str(name)] = tuple(levels)
    return Encoding(tuple(map(str, frame.columns)), categories)


def covariate_frame(covariates: Any, rows: int, names: tuple[str, ...] | None = None) -> pd.DataFrame:
    """Return covariates as a frame; values without names take those of the fit, by position."""
    if covariates is None:
        return pd.DataFrame(index=range(rows))
    named = isinstance(covariates, (pd.DataFrame, dict))
    frame = as_frame(pd.DataFrame(covariates) if named else covariates, "covariates", "c")
    if names is not None and (not named or (names == ("c0",) and frame.shape[1] == 1)):
        if frame.shape[1] != len(names):
            raise InputError(
                f"There were {len(names)} covariate(s) at fit ({', '.join(names)}). Got {frame.shape[1]}."
            )
        frame.columns = list(names)
    if len(frame) != rows:
        raise InputError(f"covariates must have one row for each of the {rows} rows of X. Got {len(frame)}.")
    return frame
