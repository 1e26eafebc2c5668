"""What a fit is of: its settings, its data and the software, so that a checkpoint goes on with the same."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipool.estimators.training_data import BLOCK, Rows, TrainingData

__all__ = ["hash_of_rows", "manifest_of"]

BESIDE = ("checkpoint", "verbose")  # parameters that decide nothing of the result


def manifest_of(estimator: Any, data: TrainingData) -> dict[str, dict[str, Any]]:
    """Return settings, hashes of the data, and versions, by name."""
    from equipool.version import __version__

    # Numbers as they are trained on, and the scales that brought them there.
    meaning = getattr(estimator, "classes_", None), getattr(estimator, "target_scale_", None)
    parts: dict[str, list[Any]] = {
        "X": [hash_of_rows(data.x), _hash(estimator.feature_mean_), _hash(estimator.feature_scale_)],
        "y": [None if data.y is None else _hash(data.y), meaning],
        "site": [_hash(data.site), estimator.sites_.tolist()],
        "covariates": [_hash(data.c), estimator.covariates_],
    }
    parameters = {k: v for k, v in estimator.get_params(deep=False).items() if k not in BESIDE}
    return {
        "settings": {
            "estimator": type(estimator).__name__,
            **{k: _plain(value) for k, value in parameters.items()},
        },
        "data": {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()},
        "software": {"equipool": __version__, "torch": torch.__version__},
    }


def hash_of_rows(x: Rows) -> str:
    """Return the hash of a table, or of volumes as the cache holds them, read in blocks."""
    if isinstance(x, Tensor):
        return _hash(x)
    digest, volumes = hashlib.sha256(np.packbits(x.volumes.mask).tobytes()), x.volumes
    for start in range(0, len(volumes), BLOCK):
        rows = volumes.rows[start : start + BLOCK]
        digest.update(np.ascontiguousarray(volumes.store[rows]).tobytes())
        if volumes.scales is not None:
            digest.update(volumes.scales[rows].tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Return a parameter as JSON can hold it: a module by its form and its first weights."""
    if isinstance(value, nn.Module):
        weights = [_hash(tensor) for tensor in value.state_dict().values()]
        return f"{value!r} {hashlib.sha256(repr(weights).encode()).hexdigest()}"
    return value.tolist() if hasattr(value, "tolist") else value


def _hash(values: Any) -> str:
    array = np.ascontiguousarray(values)
    return hashlib.sha256(f"{array.dtype.str}{array.shape}".encode() + array.tobytes()).hexdigest()
