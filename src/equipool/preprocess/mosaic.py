"""Six slices of a head in MNI space with the outlines of its brain mask and of the template's."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

Array = npt.NDArray[Any]

PLANES = ((2, -18.0), (2, 8.0), (2, 40.0), (1, -22.0), (1, 18.0), (0, 4.0))  # axis and mm in MNI
HEIGHT = 150  # pixels of a slice
BRAIN, TEMPLATE = (230, 159, 0), (86, 180, 233)  # orange and sky blue, of the Okabe–Ito palette


def mosaic(head: Array, mask: Array, template: Array, grid: Array) -> bytes:
    """Return a JPEG: three axial, two coronal and one sagittal slice in a row.

    Given the head, its brain mask, the template's brain mask, and the voxel-to-mm matrix of their RAS grid.
    """
    top = np.percentile(head[mask], 99.5) if mask.any() else head.max()
    tiles = [_tile(head / (top or 1), mask, template, grid, axis, mm) for axis, mm in PLANES]
    picture = io.BytesIO()
    # subsampling=0: colours at full resolution, or the thin outlines would fade.
    Image.fromarray(np.concatenate(tiles, axis=1)).save(picture, format="JPEG", quality=80, subsampling=0)
    return picture.getvalue()


def _tile(head: Array, mask: Array, template: Array, grid: Array, axis: int, mm: float) -> Array:
    """Draw one slice: left is left, up is superior or anterior."""
    at = int(np.clip(round((mm - grid[axis, 3]) / grid[axis, axis]), 0, head.shape[axis] - 1))
    grey, brain, mni = (_enlarged(np.take(volume, at, axis).T[::-1]) for volume in (head, mask, template))
    colours = np.repeat((np.clip(grey, 0, 1) * 255).astype(np.uint8)[..., None], 3, axis=2)
    colours[_edge(mni > 0.5)] = TEMPLATE
    colours[_edge(brain > 0.5)] = BRAIN
    return colours


def _enlarged(plane: Array) -> Array:
    size = (round(plane.shape[1] * HEIGHT / plane.shape[0]), HEIGHT)
    return np.asarray(Image.fromarray(plane.astype(np.float32)).resize(size, Image.Resampling.BILINEAR))


def _edge(inside: Array) -> Array:
    return np.asarray(inside & ~ndimage.binary_erosion(inside, border_value=1))
