"""Covariates as numbers: the name, unit and scale of each, and 0/1 columns for categories."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from equipool.checks.inputs import FloatArray, Inputs, as_numbers, parse_labels
from equipool.exceptions import InputError


@dataclass(frozen=True)
class Covariate:
    """A covariate's name, unit and scale; scaled values lie in [−1, 1] over the rows it was made from.

    Examples
    --------
    >>> age = Covariate.of("age", np.array([20.0, 80.0]), unit="years")
    >>> age.scaled(np.array([20.0, 50.0, 80.0, 95.0]))
    array([-1. ,  0. ,  1. ,  1.5])
    """

    name: str
    unit: str = ""
    centre: float = 0.0
    scale: float = field(default=1.0, metadata={"above": 0})
    levels: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, name: str, values: FloatArray, *, unit: str = "", levels: tuple[str, ...] | None = None
    ) -> Self:
        """Take the scale from the range of values."""
        low, high = float(values.min()), float(values.max())
        return cls(name, unit, (low + high) / 2, (high - low) / 2 or 1.0, levels)

    def scaled(self, values: ArrayLike) -> Any:
        """Return (values − centre) / scale."""
        return (np.asarray(values, dtype=np.float64) - self.centre) / self.scale


def covariates_of(inputs: Inputs, units: Mapping[str, str] | None = None) -> tuple[Covariate, ...]:
    """Take each covariate's scale from the rows at hand; units are by name."""
    columns = zip(inputs.covariate_names, inputs.covariates.T, inputs.levels, strict=True)
    unit = (units or {}).get
    return tuple(Covariate.of(name, x, unit=unit(name, ""), levels=levels) for name, x, levels in columns)


def scaled(values: FloatArray, covariates: Sequence[Covariate]) -> FloatArray:
    """Return covariates (rows, K) in the scales of these."""
    return (values - [one.centre for one in covariates]) / [one.scale for one in covariates]


@dataclass(frozen=True)
class Encoding:
    """How the user's covariates become numbers: categories of more than two levels become 0/1 columns."""

    columns: tuple[str, ...]
    categories: dict[str, tuple[str, ...]]
    names: tuple[str, ...] = field(default=(), metadata={"dimensions": ("covariates",)})
    levels: tuple[tuple[str, ...] | None, ...] = field(default=(), metadata={"dimensions": ("covariates",)})

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, names that do not come from the columns and their categories."""
        names = [name for column in self.columns for name in self._names(column)]
        if self.names and names != list(self.names):
            raise ValueError("names")

    def apart(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the frame with a 0/1 column for each level but the first of a category."""
        columns: dict[str, Any] = {}
        for column in frame.columns:
            if column not in self.categories:
                columns[column] = frame[column]
                continue
            levels, labels = self.categories[column], parse_labels(frame[column])
            for row, label in enumerate(labels, start=1):
                if label not in levels:
                    what = f"The covariate {column!r} is {label!r} in row {row}"
                    at_fit = f"at fit it was one of {', '.join(levels)}"
                    raise InputError(f"{what}; {at_fit}; correct it, or leave the row out.")
            is_level = ((labels == level).astype(float) for level in levels[1:])
            columns |= dict(zip(self._names(column), is_level, strict=True))
        return pd.DataFrame(columns, index=frame.index)

    def _names(self, column: str) -> list[str]:
        """Return the names of the columns of numbers that one of the user's becomes."""
        levels = self.categories.get(column)
        return [column] if levels is None else [f"{column}={level}" for level in levels[1:]]


def encode(frame: pd.DataFrame) -> Encoding:
    """Detect the categories with more than two levels; their levels are kept in alphabetical order."""
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
