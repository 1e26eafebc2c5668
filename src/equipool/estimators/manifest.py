"""What a fit is of: settings, data and software, so that a checkpoint is resumed with the same."""

from __future__ import annotations

from typing import Any

import joblib
import numpy as np
import torch
from torch import Tensor, nn

from equipool.estimators.training_data import BLOCK, Rows, TrainingData

__all__ = ["manifest_of"]

BESIDE = ("checkpoint", "verbose")  # parameters that do not change the result


def manifest_of(estimator: Any, data: TrainingData) -> dict[str, dict[str, Any]]:
    """Return settings, hashes of the data, and versions, by name."""
    from equipool.version import __version__

    # Numbers as they are trained on, and the scales that brought them there.
    parts = {
        "X": [*_parts(data.x), estimator.feature_mean_, estimator.feature_scale_],
        "y": [data.y, getattr(estimator, "classes_", None), getattr(estimator, "target_scale_", None)],
        "site": [data.site, estimator.sites_],
        "covariates": [data.c, estimator.covariates_],
    }
    settings = {k: _plain(v) for k, v in estimator.get_params(deep=False).items() if k not in BESIDE}
    return {
        "settings": {"estimator": type(estimator).__name__, **settings},
        "data": {name: _hash(part) for name, part in parts.items()},
        "software": {"equipool": __version__, "torch": torch.__version__},
    }


def _parts(x: Rows) -> list[Any]:
    """Return what there is to hash of a table, or of volumes as the cache holds them, read in blocks."""
    if isinstance(x, Tensor):
        return [x]
    volumes, blocks = x.volumes, range(0, len(x), BLOCK)
    hashes = [_hash([volumes.store[volumes.rows[start : start + BLOCK]]]) for start in blocks]
    return [volumes.mask, None if volumes.scales is None else volumes.scales[volumes.rows], *hashes]


def _plain(value: Any) -> Any:
    """Return a parameter as JSON can hold it: a module by its form and a hash of its first weights."""
    if isinstance(value, nn.Module):
        return f"{value!r} {_hash(list(value.state_dict().values()))}"
    plain = value.tolist() if hasattr(value, "tolist") else value
    return plain if isinstance(plain, bool | int | float | str | list | None) else repr(plain)


def _hash(parts: list[Any]) -> str:
    plain = [np.ascontiguousarray(p) if isinstance(p, Tensor | np.ndarray) else p for p in parts]
    return str(joblib.hash(plain))
