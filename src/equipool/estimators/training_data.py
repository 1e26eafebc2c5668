"""What estimators train on: the rows of a table as a tensor, or volumes that are read when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equipool import distributed
from equipool.data import PooledDataset
from equipool.data.nifti import Frame, read_header
from equipool.data.volumes import Volumes
from equipool.exceptions import InputError

FloatArray = NDArray[np.float64]
Corrected = Callable[[NDArray[np.floating]], FloatArray]

BLOCK = 32  # volumes read at a time
IN_MEMORY = 2**28  # bytes of scaled volumes that are kept while training
NO_EFFECT = ("checkpoint", "verbose")  # parameters that do not change the result


@dataclass(frozen=True, eq=False)
class ScaledVolumes:
    """Volumes as the input of a network, read block by block.

    ``corrected`` takes gain and offset, or the site, out of a scan (:mod:`equipool.estimators.front`). Then
    each voxel is standardised over the training participants.
    """

    volumes: Volumes
    mean: FloatArray
    scale: FloatArray
    varies: NDArray[np.bool_]
    corrected: Corrected
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
            scaled = (self.corrected(self.volumes.read(part)) - self.mean) / self.scale
            result[part] = torch.from_numpy(np.where(self.varies, scaled, 0.0))
        return result

    def loaded(self) -> ScaledVolumes:
        """Return the same, already read if they fit into memory, so that training reads them once."""
        return self if 4 * self.shape[0] * self.shape[1] > IN_MEMORY else replace(self, ready=self.tensor())

    def singles(self) -> Iterator[Tensor]:
        """Read them one after the other, (1, voxels) each."""
        for start in range(0, len(self), BLOCK):
            yield from self[slice(start, start + BLOCK)].tensor().split(1)


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
    return [x] if isinstance(x, Tensor) else x.singles()


def through(network: Callable[[Tensor], Tensor], x: Rows) -> Tensor:
    """Apply a network in double precision, so that a code does not depend on the other rows of the batch."""
    if not isinstance(x, Tensor) and not len(x):
        raise InputError("There is no image among these volumes; give at least one.")
    return torch.cat([network(part.double()) for part in parts(x)])


def voxel_scales(volumes: Volumes, corrected: Corrected) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard deviation of each voxel over rows, read in blocks that processes share out."""
    total, squares = np.zeros(volumes.shape[1]), np.zeros(volumes.shape[1])
    for start in distributed.turns(range(0, len(volumes), BLOCK)):
        values = corrected(volumes.read(slice(start, start + BLOCK)))
        total += values.sum(axis=0)
        squares += (values**2).sum(axis=0)
    total, squares = distributed.summed(total), distributed.summed(squares)
    mean = total / len(volumes)
    return mean, np.sqrt(np.maximum(squares / len(volumes) - mean**2, 0.0))


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


def _hash(values: list[Any]) -> str:
    plain = [np.ascontiguousarray(v) if isinstance(v, Tensor | np.ndarray) else v for v in values]
    return str(joblib.hash(plain))


# -- what users give as volumes ----------------------------------------------------------------------------


def as_volumes(
    X: Any, mask: NDArray[np.bool_] | None = None, affine: FloatArray | None = None
) -> Volumes | None:
    """Return volumes if X is volumes, paths of images or a pool of images; ``None`` if it is a table.

    Files are read with the mask of a fitted estimator, if it is given with its affine.
    """
    if isinstance(X, PooledDataset) and X.images is not None:
        X = list(X.images)
    if isinstance(X, Volumes):
        # Values that were changed in memory are in no file, so they are not read again with the mask.
        if mask is None or np.array_equal(X.mask, mask) or X.scales is None:
            return X
        X = list(X.paths)
    X = [X] if isinstance(X, str | Path) else X
    # A frame is no list of paths, although it iterates over names.
    listed = hasattr(X, "__len__") and not hasattr(X, "columns") and len(X) > 0
    are_paths = listed and all(isinstance(x, str | Path) for x in X)
    return volumes_for(list(X), mask, affine) if are_paths else None


def volumes_for(
    paths: Sequence[str | Path], mask: NDArray[np.bool_] | None, affine: FloatArray | None
) -> Volumes:
    """Read images with the mask of a fitted estimator; those on another grid are refused."""
    if mask is not None and affine is not None and len(paths):
        grid = read_header(Path(paths[0]))
        if isinstance(grid, Frame):
            _require_grid(*grid, mask, affine)
    return Volumes.build(paths, mask=mask)


def check_grid(volumes: Volumes, mask: NDArray[np.bool_], affine: FloatArray) -> None:
    """Raise an error where volumes are not on the grid that an estimator was fitted on."""
    _require_grid(volumes.mask.shape, volumes.affine, mask, affine)
    if not (volumes.mask == mask).all():
        raise InputError("These volumes were cut out by another mask than at fit; build them with that one.")


def _require_grid(
    shape: tuple[int, ...], place: FloatArray, mask: NDArray[np.bool_], affine: FloatArray
) -> None:
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
