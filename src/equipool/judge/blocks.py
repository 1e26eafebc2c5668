"""Images as means over blocks of the brain, made a few volumes at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipool.data import PooledDataset, Volumes
from equipool.estimators.image_harmonizer import ImageHarmonizer

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

    def fitted(self, pool: PooledDataset, train: IntArray) -> ImageHarmonizer:
        """Fit a harmonizer on some rows."""
        y = None if pool.y is None else pool.y[train]
        c = pool.C[train] if pool.covariates else None
        return ImageHarmonizer(unseen_site="pooled").fit(
            self.volumes[train], y, site=pool.site_labels[train], covariates=c
        )

    def harmonized(self, model: Any, pool: PooledDataset) -> FloatArray:
        """Return block means of all volumes, harmonized by a fitted harmonizer."""
        means = []
        for start in range(0, len(self.volumes), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            c = pool.C[part] if pool.covariates else None
            clean = model.transform(self.volumes[part], site=pool.site_labels[part], covariates=c)
            means.append(block_means(clean.read(), self.volumes.mask))
        return np.vstack(means)


def block_means(values: NDArray[np.floating], mask: NDArray[np.bool_]) -> FloatArray:
    """Return means over blocks of the box that hold enough of the brain, (people, blocks)."""
    place = np.argwhere(mask) // BLOCK_SIZE
    _, block = np.unique(place, axis=0, return_inverse=True)
    block = block.ravel()
    counts = np.bincount(block)
    means = np.stack([np.bincount(block, weights=row, minlength=len(counts)) for row in values]) / counts
    return means[:, counts >= BLOCK_VOXELS]
