"""Covariates to keep, numbers and categories, as the numbers that a regression takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from equipool.checks.inputs import as_numbers, parse_labels
from equipool.exceptions import InputError

__all__ = ["Encoding", "covariate_frame", "encode"]


@dataclass(frozen=True)
class Encoding:
    """How the user's covariates become numbers: categories of more than two levels are taken apart."""

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
            wrong = [k for k, label in enumerate(labels) if label not in levels]
            if wrong:
                raise InputError(
                    f"The covariate {name!r} is {labels[wrong[0]]!r} in row {wrong[0] + 1}; at fit it was "
                    f"one of {', '.join(levels)}; correct it, or leave the row out."
                )
            columns |= {f"{name}={level}": (labels == level).astype(float) for level in levels[1:]}
        return pd.DataFrame(columns, index=frame.index)


def encode(frame: pd.DataFrame) -> Encoding:
    """Find the categories with more than two levels; their levels are kept in alphabetical order."""
    categories = {}
    for name in frame.columns:
        column = frame[name]
        said = isinstance(column.dtype, pd.CategoricalDtype)
        if not said and as_numbers(column).notna().any():
            continue  # numbers, perhaps with a slip: the validator names the cell
        labels = parse_labels(column)
        levels = sorted({label for label in labels if label is not None})
        if 2 < len(levels) <= max(20, len(labels) // 10) and None not in labels:
            categories[str(name)] = tuple(levels)
    return Encoding(tuple(map(str, frame.columns)), categories)


def covariate_frame(covariates: Any, rows: int, names: tuple[str, ...] | None = None) -> pd.DataFrame:
    """Return covariates as a frame; what has no names of its own takes those known from fit, by position."""
    if covariates is None:
        return pd.DataFrame(index=range(rows))
    if isinstance(covariates, (pd.DataFrame, dict)):
        frame = pd.DataFrame(covariates).reset_index(drop=True).rename(columns=str)
        if names is not None and frame.shape[1] == len(names) == 1 and names[0] == "c0":
            frame.columns = list(names)
    elif isinstance(covariates, pd.Series):
        name = names[0] if names is not None and len(names) == 1 else str(covariates.name or "c0")
        frame = covariates.reset_index(drop=True).to_frame(name)
    else:
        array = np.asarray(covariates)
        array = array[:, None] if array.ndim == 1 else array
        if names is not None and array.shape[1] != len(names):
            raise InputError(
                f"There were {len(names)} covariate(s) at fit ({', '.join(names)}). Got {array.shape[1]}."
            )
        frame = pd.DataFrame(array, columns=list(names or (f"c{k}" for k in range(array.shape[1]))))
    if len(frame) != rows:
        raise InputError(f"covariates must have one row for each of the {rows} rows of X. Got {len(frame)}.")
    return frame
