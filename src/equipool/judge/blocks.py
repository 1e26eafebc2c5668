"""Images as means over blocks of the brain, made a few volumes at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equipool.data import PooledDataset, Volumes
from equipool.sites.scans import Box
from equipool.sites.volume_model import VolumeSites, fit_volume_sites

__all__ = ["Blocks"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

AT_ONCE = 16  # volumes in memory
BLOCK_SIZE, BLOCK_VOXELS = 4, 8  # voxels along an axis of a block; fewest brain voxels that make one


class Blocks:
    """The block means of volumes as measured and as harmonized.

    Parameters
    ----------
    volumes
        Everybody's; they are read in blocks and never held at once.
    """

    def __init__(self, volumes: Volumes) -> None:
        self.volumes = volumes
        self.box = Box(volumes.mask)

    @property
    def size(self) -> str:
        """Edge lengths of a block in mm."""
        edges = np.linalg.norm(self.volumes.affine[:3, :3], axis=0) * BLOCK_SIZE
        return " × ".join(f"{edge:.3g}" for edge in edges) + " mm"

    def names(self) -> list[str]:
        """Return where each block's centre is, in mm."""
        voxels = np.argwhere(self.volumes.mask)
        mm = voxels @ self.volumes.affine[:3, :3].T + self.volumes.affine[:3, 3]
        return [
            "block at {:.0f} {:.0f} {:.0f} mm".format(*place).replace("-", "−")
            for place in block_means(mm.T, self.volumes.mask).T
        ]

    def measured(self) -> FloatArray:
        """Return block means of the volumes as they are."""
        return np.vstack([block_means(rows, self.volumes.mask) for rows in self.volumes.blocks(AT_ONCE)])

    def fitted(self, pool: PooledDataset, train: IntArray) -> VolumeSites:
        """Fit the closed form on some people, told covariates and target as the pooler is."""
        return fit_volume_sites(
            self.volumes[train], pool.scaled[train], pool.site[train], _target_columns(pool, train)
        )

    def harmonized(self, model: VolumeSites, pool: PooledDataset) -> FloatArray:
        """Return block means of everybody's volumes, harmonized by a fitted closed form."""
        means, start = [], 0
        for rows in self.volumes.blocks(AT_ONCE):
            part = slice(start, start + len(rows))
            clean = model.remove(rows, pool.scaled[part], pool.site[part], self.box)
            means.append(block_means(clean, self.volumes.mask))
            start += len(rows)
        return np.vstack(means)


def _target_columns(pool: PooledDataset, rows: IntArray) -> FloatArray:
    """Return the target as regressors, (people, E): classes but the first as 0/1, or the number."""
    if pool.y is None:
        return np.empty((len(rows), 0))
    if pool.task == "number":
        return np.asarray(pool.y[rows], dtype=np.float64)[:, None]
    labels = pool.y[rows].astype(str)
    classes = np.unique(labels)[1:]
    return (labels[:, None] == classes).astype(np.float64)


def block_means(values: NDArray[np.floating], mask: NDArray[np.bool_]) -> FloatArray:
    """Return means over blocks of the box that hold enough of the brain, (people, blocks)."""
    place = np.argwhere(mask) // BLOCK_SIZE
    _, block = np.unique(place, axis=0, return_inverse=True)
    block = block.ravel()
    counts = np.bincount(block)
    means = np.stack([np.bincount(block, weights=row, minlength=len(counts)) for row in values]) / counts
    return means[:, counts >= BLOCK_VOXELS]
