"""The front of a pooler: a harmonizer that takes the site out of what the network sees.

It gets X alone, at fit as later: the site is inferred, so a participant has the same code in training and
after, and new ones need no label.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, clone

from equipool.data.volumes import Volumes
from equipool.estimators.image_harmonizer import ImageHarmonizer
from equipool.estimators.site_harmonizer import SiteHarmonizer
from equipool.exceptions import InputError

__all__ = ["Front", "fit_front", "with_site", "without_site"]

FloatArray = NDArray[np.float64]
Front: TypeAlias = BaseEstimator | Literal["auto"] | bool | None


def fit_front(front: Front, X: Any, y: Any, *, site: Any, covariates: Any) -> Any:
    """Return a fitted harmonizer of the kind of data, or ``None``.

    ``"auto"`` is one for volumes and none for tables; ``True`` is the default one for both.
    """
    of_volumes = isinstance(X, Volumes)
    if front == "auto":
        front = of_volumes
    if isinstance(front, bool):
        front = (ImageHarmonizer() if of_volumes else SiteHarmonizer()) if front else None
    if front is None:
        return None
    wanted = ImageHarmonizer if of_volumes else SiteHarmonizer
    if not isinstance(front, wanted):
        raise InputError(
            f"front must be {wanted.__name__}() for {'volumes' if of_volumes else 'tables'}, True, 'auto' or "
            f"None. Got {front!r}."
        )
    return clone(front).fit(X, y, site=site, covariates=covariates)


def without_site(front: Any, rows: NDArray[np.floating]) -> FloatArray:
    """Return volumes as a network sees them: residuals, or without a front each scan with mean 0 and SD 1."""
    if front is not None:
        residuals: FloatArray = front.model_.without_site(rows)
        return residuals
    values = np.asarray(rows, dtype=np.float64)
    values = values - values.mean(axis=1, keepdims=True)
    deviation = values.std(axis=1, keepdims=True)
    return values / np.where(deviation > 0, deviation, 1.0)


def with_site(front: Any, values: FloatArray, rows: NDArray[np.floating]) -> FloatArray:
    """Return such values in the units of the scans that they belong to: the inverse."""
    if front is not None:
        scans: FloatArray = front.model_.with_site(values, rows)
        return scans
    rows = np.asarray(rows, dtype=np.float64)
    return values * rows.std(axis=1, keepdims=True) + rows.mean(axis=1, keepdims=True)
