"""What a fit is of: settings, data and software, so that a checkpoint is resumed with the same."""

from __future__ import annotations

import hashlib
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
        "X": [_hash_of_rows(data.x), estimator.feature_mean_, estimator.feature_scale_],
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


def _hash_of_rows(x: Rows) -> str:
    """Return the hash of a table, or of volumes as the cache holds them, read in blocks."""
    if isinstance(x, Tensor):
        return _hash([x])
    digest, volumes = hashlib.sha256(np.packbits(x.volumes.mask).tobytes()), x.volumes
    for start in range(0, len(volumes), BLOCK):
        rows = volumes.rows[start : start + BLOCK]
        digest.update(np.ascontiguousarray(volumes.store[rows]).tobytes())
        if volumes.scales is not None:
            digest.update(volumes.scales[rows].tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Return a parameter as JSON can hold it: a module by its form and a hash of its first weights."""
    if isinstance(value, nn.Module):
        return f"{value!r} {_hash(list(value.state_dict().values()))}"
    plain = value.tolist() if hasattr(value, "tolist") else value
    return plain if isinstance(plain, bool | int | float | str | list | None) else repr(plain)


def _hash(parts: list[Any]) -> str:
    return str(joblib.hash([part.numpy() if isinstance(part, Tensor) else part for part in parts]))
