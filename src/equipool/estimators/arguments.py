"""Arguments of a harmonizer as arrays of rows: sites, rows to learn from, participants, targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks import Inputs
from equipool.checks.inputs import parse_labels, require_length
from equipool.exceptions import InputError
from equipool.sites.passes import site_rows

__all__ = [
    "chosen_rows",
    "given_sites",
    "learned_from",
    "like",
    "persons",
    "same_label",
    "support",
    "target_columns",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


def given_sites(site: Any, rows: int) -> NDArray[Any]:
    """Return the label of each row's site."""
    if isinstance(site, str):
        raise InputError(f"site must have one value for each row, such as [{site!r}]. Got the text {site!r}.")
    labels = _labels("site", site, rows)
    missing = [k for k, label in enumerate(labels) if label is None]
    if missing:
        raise InputError(
            f"site has no value in row {missing[0] + 1}; fill it in, or leave site out (--site none) to "
            "have it inferred."
        )
    return labels


def learned_from(fit_on: Any, rows: int) -> NDArray[np.bool_]:
    """Return which rows to learn from, all by default."""
    mask = np.ones(rows, dtype=bool) if fit_on is None else np.asarray(fit_on)
    if mask.shape != (rows,) or mask.dtype != bool:
        raise InputError(
            f"fit_on must be a mask of True and False with {rows} values, such as (dx == 'CN'). Got "
            f"shape {mask.shape} of {mask.dtype}."
        )
    if not mask.any():
        raise InputError("fit_on selects nobody; nothing can be learned.")
    return mask


def persons(subject: Any, rows: NDArray[np.bool_]) -> NDArray[Any]:
    """Return whose rows are learned from."""
    labels = _labels("subject", subject, len(rows))
    if any(label is None for label in labels):
        raise InputError("subject is empty in some rows; give each row the name of its person.")
    return labels[rows].astype(str)


def _labels(name: str, values: Any, rows: int) -> NDArray[Any]:
    labels = parse_labels(values)
    if labels.shape != (rows,):
        raise InputError(f"{name} must have one value for each of the {rows} rows. Got shape {labels.shape}.")
    return labels


def same_label(value: Any, names: list[str]) -> bool:
    """Say whether a label is among names, where 2 and 2.0 are the same."""
    label = str(parse_labels([value])[0])
    return label in names or f"{label}.0" in names


def chosen_rows(values: Any, rows: NDArray[np.bool_], name: str) -> Any:
    """Return the values of the rows to learn from."""
    require_length(name, values, len(rows))
    return values.reset_index(drop=True)[rows] if hasattr(values, "iloc") else np.asarray(values)[rows]


def target_columns(inputs: Inputs) -> FloatArray:
    """Return the target as standardised columns, (rows, E): the number, or all classes but the first."""
    if inputs.target is None:
        return np.empty((inputs.n_rows, 0))
    if inputs.task == "number":
        columns = np.asarray(inputs.target, dtype=np.float64)[:, None]
    else:
        levels = sorted(set(inputs.target))[1:]
        columns = np.column_stack([(inputs.target == level).astype(np.float64) for level in levels])
    deviation = columns.std(axis=0)
    return (columns - columns.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)


def support(inputs: Inputs, sites: NDArray[Any], site_index: IntArray) -> pd.DataFrame:
    """Return each site's range of each covariate, and what share of its rows lies beyond all others."""
    of_site = site_rows(site_index, len(sites))
    table = []
    for name, values in zip(inputs.covariate_names, inputs.covariates.T, strict=True):
        lows, highs = (np.array([end(values[rows]) for rows in of_site]) for end in (np.min, np.max))
        others = _least_of_others(lows), -_least_of_others(-highs)
        for site, rows, low, high in zip(sites, of_site, *others, strict=True):
            beyond = np.maximum(np.maximum(low - values[rows], values[rows] - high), 0.0)
            ends = values[rows].min(), values[rows].max()
            table.append((site, name, *ends, (beyond > 0).mean(), beyond.max()))
    return pd.DataFrame(table, columns=["site", "covariate", "low", "high", "share_beyond", "farthest"])


def _least_of_others(values: FloatArray) -> FloatArray:
    """Return for each value the least of the others, −∞ where there are none."""
    if len(values) < 2:
        return np.full(len(values), -np.inf)
    first, second = np.argsort(values)[:2]
    return np.where(np.arange(len(values)) == first, values[second], values[first])


def like(X: Any, values: FloatArray) -> Any:
    """Return a frame for a frame, an array for anything else."""
    if isinstance(X, pd.DataFrame):
        return pd.DataFrame(values, index=X.index, columns=X.columns)
    return values
