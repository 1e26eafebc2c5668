"""Volumes as means over blocks of the brain, as measured and as harmonized, made a few at a time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipool.data import PooledDataset, Volumes
from equipool.judge.scores import FloatArray

AT_ONCE = 16  # volumes in memory
BLOCK_SIZE, BLOCK_VOXELS = 4, 8  # voxels along an axis of a block; fewest brain voxels that make one


def means_of_volumes(volumes: Volumes, pool: PooledDataset, harmonizer: Any = None) -> FloatArray:
    """Return block means of all volumes, (rows, blocks): as measured, or by a fitted ImageHarmonizer."""
    means, covariates = [], pool.labelled_covariates
    for start in range(0, len(volumes), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        part = volumes[rows]
        if harmonizer is not None:
            part = harmonizer.transform(part, site=pool.site_labels[rows], covariates=covariates.iloc[rows])
        means.append(block_means(part.read(), volumes.mask))
    return np.vstack(means)


def block_means(values: NDArray[np.floating], mask: NDArray[np.bool_]) -> FloatArray:
    """Return means over blocks of the box that hold enough of the brain, (rows, blocks)."""
    _, block = np.unique(np.argwhere(mask) // BLOCK_SIZE, axis=0, return_inverse=True)
    counts = np.bincount(block)
    means = np.stack([np.bincount(block, weights=row, minlength=len(counts)) for row in values]) / counts
    return means[:, counts >= BLOCK_VOXELS]


def block_size(volumes: Volumes) -> str:
    """Return the edge lengths of a block in mm."""
    edges = np.linalg.norm(volumes.affine[:3, :3], axis=0) * BLOCK_SIZE
    return " × ".join(f"{edge:.3g}" for edge in edges) + " mm"


def block_names(volumes: Volumes) -> list[str]:
    """Return where the centre of each block is, in mm."""
    mm = np.argwhere(volumes.mask) @ volumes.affine[:3, :3].T + volumes.affine[:3, 3]
    return [
        "block at {:.0f} {:.0f} {:.0f} mm".format(*place).replace("-", "−")
        for place in block_means(mm.T, volumes.mask).T
    ]
