"""What estimators train on: the rows of a table as a tensor, or volumes that are read when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipool import distributed
from equipool.checks.inputs import parse_covariates
from equipool.data import PooledDataset
from equipool.data.covariates import Covariate, covariate_frame
from equipool.data.nifti import read_grid
from equipool.data.volumes import Volumes
from equipool.exceptions import InputError
from equipool.sites.scans import BLOCK, blocks

FloatArray = NDArray[np.float64]

IN_MEMORY = 2**28  # bytes of scaled volumes that are kept while training
NO_EFFECT = ("checkpoint", "verbose")  # parameters that do not change the result


def without_site(front: Any, rows: NDArray[np.floating]) -> Any:
    """Return volumes as a network sees them: residuals, or without a front each scan with mean 0 and SD 1."""
    if front is not None:
        return front.model_.without_site(rows)
    values = np.asarray(rows, dtype=np.float64)
    deviation = values.std(axis=1, keepdims=True)
    return (values - values.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0)


def with_site(front: Any, values: FloatArray, rows: NDArray[np.floating]) -> Any:
    """Return such values in the units of the scans that they belong to: the inverse."""
    if front is not None:
        return front.model_.with_site(values, rows)
    rows = np.asarray(rows, dtype=np.float64)
    return values * rows.std(axis=1, keepdims=True) + rows.mean(axis=1, keepdims=True)


@dataclass(frozen=True, eq=False)
class ScaledVolumes:
    """Volumes as the input of a network, read block by block.

    The front takes the site out of a scan, or there is none and each scan is standardised. Then each voxel is
    standardised over the training participants.
    """

    volumes: Volumes
    mean: FloatArray
    scale: FloatArray
    varies: NDArray[np.bool_]
    front: Any
    ready: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and voxels."""
        return self.volumes.shape

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, rows: Any) -> ScaledVolumes:
        positions = rows.numpy() if isinstance(rows, Tensor) else rows
        ready = None if self.ready is None else self.ready[rows]
        return replace(self, volumes=self.volumes[positions], ready=ready)

    def tensor(self) -> Tensor:
        """Read them all."""
        if self.ready is not None:
            return self.ready
        # In blocks: on the way they are several times as large, in double precision.
        result = torch.empty(self.shape)
        for start in range(0, len(self), BLOCK):
            part = slice(start, start + BLOCK)
            values = (without_site(self.front, self.volumes.read(part)) - self.mean) / self.scale
            result[part] = torch.from_numpy(np.where(self.varies, values, 0.0))
        return result

    def loaded(self) -> ScaledVolumes:
        """Return the same, already read if they fit into memory, so that training reads them once."""
        return self if 4 * self.shape[0] * self.shape[1] > IN_MEMORY else replace(self, ready=self.tensor())


Rows = Tensor | ScaledVolumes


@dataclass(frozen=True)
class TrainingData:
    """The pool as tensors: scaled features, coded target, site index, scaled covariates."""

    x: Rows
    y: Tensor | None
    site: Tensor
    c: Tensor

    @property
    def n_sites(self) -> int:
        """Number of sites."""
        return int(self.site.max()) + 1

    def rows(self, index: Tensor) -> TrainingData:
        """Select rows; volumes are not read yet."""
        y = None if self.y is None else self.y[index]
        return TrainingData(self.x[index], y, self.site[index], self.c[index])

    def ready(self) -> TrainingData:
        """Return a batch as this process computes it: its part of the features, read, and all labels."""
        to = distributed.device()
        y = None if self.y is None else self.y.to(to)
        return TrainingData(
            dense(self.x[distributed.local_rows()]).to(to), y, self.site.to(to), self.c.to(to)
        )

    def batches(self, size: int) -> list[TrainingData]:
        """Return a table as it is, and volumes ``size`` at a time."""
        if isinstance(self.x, Tensor):
            return [self]
        return [self.rows(part) for part in torch.arange(len(self.x)).split(size)]


def dense(x: Rows) -> Tensor:
    """Return rows as a tensor."""
    return x if isinstance(x, Tensor) else x.tensor()


def parts(x: Rows) -> Iterable[Tensor]:
    """Return a table as one tensor, and volumes one at a time, so that memory does not grow with the rows."""
    if isinstance(x, Tensor):
        return [x]
    starts = range(0, len(x), BLOCK)
    return (scan for start in starts for scan in x[start : start + BLOCK].tensor().split(1))


def through(network: Callable[[Tensor], Tensor], x: Rows) -> Tensor:
    """Apply a network in double precision, so that a code does not depend on the other rows of the batch."""
    if not isinstance(x, Tensor) and not len(x):
        raise InputError("There is no image among these volumes; give at least one.")
    return torch.cat([network(part.double()) for part in parts(x)])


def voxel_scales(
    volumes: Volumes, corrected: Callable[[FloatArray], FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard deviation of each voxel over rows, read in blocks that processes share out."""
    total, squares = np.zeros(volumes.shape[1]), np.zeros(volumes.shape[1])
    for _, rows in blocks(volumes):
        values = corrected(rows)
        total += values.sum(axis=0)
        squares += (values**2).sum(axis=0)
    mean = distributed.summed(total) / len(volumes)
    variance = distributed.summed(squares) / len(volumes) - mean**2
    return mean, np.sqrt(np.maximum(variance, 0.0))


def manifest_of(estimator: Any, data: TrainingData) -> dict[str, dict[str, Any]]:
    """Return settings, hashes of the data, and versions: a checkpoint is resumed with the same."""
    from equipool.version import __version__

    # Numbers as they are trained on, and the scales that brought them there.
    hashed = {
        "X": [*_hashable(data.x), estimator.feature_mean_, estimator.feature_scale_],
        "y": [data.y, getattr(estimator, "classes_", None), getattr(estimator, "target_scale_", None)],
        "site": [data.site, estimator.sites_],
        "covariates": [data.c, estimator.covariates_],
    }
    settings = {k: _plain(v) for k, v in estimator.get_params(deep=False).items() if k not in NO_EFFECT}
    return {
        "settings": {"estimator": type(estimator).__name__, **settings},
        "data": {name: _hash(values) for name, values in hashed.items()},
        "software": {"equipool": __version__, "torch": torch.__version__},
    }


def _hashable(x: Rows) -> list[Any]:
    """Return a table, or hashes of volumes as they are read."""
    if isinstance(x, Tensor):
        return [x]
    starts = range(0, len(x), BLOCK)
    return [x.volumes.mask, *(_hash([x.volumes.read(slice(start, start + BLOCK))]) for start in starts)]


def _plain(value: Any) -> Any:
    """Return a parameter as JSON can hold it: a module by its form and a hash of its first weights."""
    if isinstance(value, nn.Module):
        return f"{value!r} {_hash(list(value.state_dict().values()))}"
    plain = value.tolist() if hasattr(value, "tolist") else value
    return plain if isinstance(plain, bool | int | float | str | list | None) else repr(plain)


def _hash(values: list[Any]) -> str:
    plain = [np.ascontiguousarray(v) if isinstance(v, Tensor | np.ndarray) else v for v in values]
    return str(joblib.hash(plain))


# -- what users give ---------------------------------------------------------------------------------------


def as_volumes(
    X: Any, mask: NDArray[np.bool_] | None = None, affine: FloatArray | None = None
) -> Volumes | None:
    """Return volumes if X is volumes, paths of images or a pool of images; ``None`` if it is a table.

    Given the mask and the affine of a fitted estimator, files are read with that mask, and volumes on another
    grid are refused.
    """
    paths = _paths_of(X, mask)
    if paths:
        grid = None if mask is None else read_grid(Path(paths[0]))
        if grid is not None:
            _require_grid(*grid, mask, affine)
        X = Volumes.build(paths, mask=mask)
    if not isinstance(X, Volumes):
        return None
    if mask is not None:
        _require_grid(X.mask.shape, X.affine, mask, affine)
        if not (X.mask == mask).all():
            raise InputError(
                "These volumes were cut out by another mask than at fit; build them with that one."
            )
    return X


def _paths_of(X: Any, mask: Any) -> list[Any]:
    """Return the paths of images that are to be read; none of a table, and of volumes that are read."""
    if isinstance(X, Volumes):
        # Values that were changed in memory are in no file, so they are not read again with the mask.
        again = mask is not None and X.scales is not None and not np.array_equal(X.mask, mask)
        return list(X.paths) if again else []
    if isinstance(X, PooledDataset) and X.images is not None:
        return list(X.images)
    X = [X] if isinstance(X, str | Path) else X
    # A frame is no list of paths, although it iterates over names.
    listed = hasattr(X, "__len__") and not hasattr(X, "columns") and all(isinstance(x, str | Path) for x in X)
    return list(X) if listed else []


def _require_grid(shape: tuple[int, ...], place: FloatArray, mask: Any, affine: Any) -> None:
    if shape != mask.shape or np.abs(place - affine).max() > 1e-3:
        raise InputError(
            f"The estimator was fitted on a grid of {_grid(mask.shape, affine)}; these volumes have "
            f"{_grid(shape, place)}. Resample them to the grid of the training images."
        )


def _grid(shape: tuple[int, ...], affine: FloatArray) -> str:
    size, corner = np.linalg.norm(affine[:3, :3], axis=0), affine[:3, 3]
    return (
        f"{' × '.join(map(str, shape))} voxels of {' × '.join(f'{s:.3g}' for s in size)} mm from "
        f"({', '.join(f'{c:.4g}' for c in corner)})"
    )


def scaled(values: FloatArray, covariates: tuple[Covariate, ...]) -> FloatArray:
    """Return covariates (rows, K) as scaled at fit."""
    return (values - [one.centre for one in covariates]) / [one.scale for one in covariates]


def given_covariates(values: Any, covariates: tuple[Covariate, ...], rows: int) -> FloatArray:
    """Return covariates that are given after fit, one row for each of so many, as scaled at fit."""
    names = tuple(one.name for one in covariates)
    frame = covariate_frame(values, rows, names=names)
    return scaled(parse_covariates(frame, names, [one.levels for one in covariates]), covariates)
