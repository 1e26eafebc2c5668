"""The standard grid of MNI space."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The paper's box: 91 × 109 × 91 voxels at 2 mm.
CORNER, EXTENT = (-90.0, -126.0, -72.0), (180.0, 216.0, 180.0)


def mni_grid(resolution: float) -> tuple[tuple[int, int, int], NDArray[np.float64]]:
    """Return shape and affine (RAS) of the standard MNI152 box at a voxel size in mm.

    Examples
    --------
    >>> mni_grid(2)[0], mni_grid(4)[0]
    ((91, 109, 91), (46, 55, 46))
    """
    x, y, z = (int(extent / resolution + 1e-6) + 1 for extent in EXTENT)
    affine = np.diag([resolution, resolution, resolution, 1.0])
    affine[:3, 3] = CORNER
    return (x, y, z), affine
