"""Images as means over blocks of the brain, made a few volumes at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equipool.data import PooledDataset, Volumes
from equipool.evaluate.volumes import BLOCK_SIZE, block_means
from equipool.models.scans import Box
from equipool.models.volumes import VolumeSites, fit_volume_sites

__all__ = ["Blocks"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

AT_ONCE = 16  # volumes in memory


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
