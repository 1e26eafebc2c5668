"""What the harmonizers of tables and of images share: the rows to learn from, sites, and the target."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin

from equipool.checks import Inputs
from equipool.checks.findings import listed, plural
from equipool.checks.inputs import parse_labels, require_length
from equipool.estimators.persistence import save
from equipool.exceptions import EquipoolWarning, InputError
from equipool.sites.design import site_rows

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

FOLDS = 5  # of participants, for choices in fit
MIN_ROWS_TO_ADAPT = 10  # of a new site; of fewer, the shift is mostly that of these participants


@dataclass(kw_only=True, eq=False, repr=False)
class Harmonizer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Base of the harmonizers, whose ``fit`` and ``transform`` take site and covariates with X."""

    unseen_site: Literal["error", "pooled", "adapt"] = "error"
    random_state: int | None = None
    sites_: NDArray[np.str_] = field(init=False)
    model_: Any = field(init=False)

    _learned: ClassVar[type]
    _advice: ClassVar[str]  # what to do with a site that was not in the data of the fit
    save = save

    def fit_transform(
        self: Any, X: Any, y: Any = None, *, site: Any = None, covariates: Any = None, **more: Any
    ) -> Any:
        """Fit, and transform the same rows; arguments as for ``fit``."""
        self.fit(X, y, site=site, covariates=covariates, **more)
        return self.transform(X, site=site, covariates=covariates)

    def _site_index(self, labels: NDArray[Any]) -> IntArray:
        """Return site indices; −1 for a site that was not in the data of the fit, if that is allowed."""
        index = {str(name): k for k, name in enumerate(self.sites_)}
        # 1 and 1.0 are the same site, whatever else is in the batch.
        index |= {name[:-2]: k for name, k in index.items() if name.endswith(".0")}
        unseen = sorted({str(label) for label in labels} - set(index))
        if unseen and self.unseen_site == "error":
            raise InputError(
                f"Site {unseen[0]!r} was not seen at fit; there were {listed(self.sites_, shown=8)}. "
                f"{self._advice}"
            )
        return np.array([index.get(str(label), -1) for label in labels], dtype=np.intp)

    def _with_new_sites(
        self, labels: NDArray[Any], index: IntArray, add: Callable[[Any, NDArray[np.bool_]], Any]
    ) -> tuple[Any, IntArray]:
        """Return the model with each new site, if asked to adapt; ``add(model, rows)`` adds one."""
        model, index, small = self.model_, index.copy(), []
        if self.unseen_site != "adapt":
            return model, index
        for name in sorted({str(label) for label in labels[index < 0]}):
            rows = labels.astype(str) == name
            small += [name] if rows.sum() < MIN_ROWS_TO_ADAPT else []
            model = add(model, rows)
            index[rows] = len(model.n_participants) - 1
        if small:
            warnings.warn(
                f"{plural(len(small), 'new site')} with fewer than {MIN_ROWS_TO_ADAPT} rows "
                f"({listed(small)}): what is removed there is partly what distinguishes these participants. "
                "Bring more of them at once.",
                EquipoolWarning,
                stacklevel=4,
            )
        return model, index


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
        raise InputError("fit_on selects no row; nothing can be learned.")
    return mask


def participants(subject: Any, rows: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the participant of each row to learn from."""
    labels = _labels("subject", subject, len(rows))
    if any(label is None for label in labels):
        raise InputError("subject is empty in some rows; give each row the name of its participant.")
    return labels[rows].astype(str)


def _labels(name: str, values: Any, rows: int) -> NDArray[Any]:
    labels = parse_labels(values)
    if labels.shape != (rows,):
        raise InputError(f"{name} must have one value for each of the {rows} rows. Got shape {labels.shape}.")
    return labels


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
        for s, low, high in zip(range(len(sites)), *others, strict=True):
            inside = values[of_site[s]]
            beyond = np.maximum(np.maximum(low - inside, inside - high), 0.0)
            table.append((sites[s], name, lows[s], highs[s], (beyond > 0).mean(), beyond.max()))
    return pd.DataFrame(table, columns=["site", "covariate", "low", "high", "share_beyond", "farthest"])


def _least_of_others(values: FloatArray) -> FloatArray:
    """Return for each value the least of the others, −∞ where there are none."""
    if len(values) < 2:
        return np.full(len(values), -np.inf)
    first, second = np.argsort(values)[:2]
    return np.where(np.arange(len(values)) == first, values[second], values[first])
