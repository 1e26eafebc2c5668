"""t-maps for the report: a row of slices to look at, and a sheet of all slices for the viewer."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import plural
from equipool.judge.statmaps import StatMap, clusters, in_volume
from equipool.report.statmap_figures import SHADES, Brain

__all__ = ["statmap_pictures"]

FINEST = 2.0  # mm: finer slices would make the page large
SLICES = 8
COLUMNS = 8  # slices in a row of the sheet


def statmap_pictures(
    maps: Mapping[str, StatMap], mask: ArrayLike, affine: ArrayLike, background: ArrayLike, column: str
) -> dict[str, Any]:
    """Return what the report shows of two t-maps, as measured and harmonized, as JSON-ready values.

    The sheet is one PNG: red holds the brain, green and blue the t of the two maps in steps, 128 for 0.
    """
    brain = Brain(mask, affine, background)
    called = {name: found.significant() for name, found in maps.items()}
    volumes = [brain.turned(in_volume(found.t, brain.mask)) for found in maps.values()]
    top = max(float(np.abs(volume).max()) for volume in volumes) or 1.0
    stride = [max(1, round(FINEST / abs(brain.affine[k, k]))) for k in range(3)]
    window = tuple(slice(max(brain.low[k] - 1, 0), brain.high[k] + 2, stride[k]) for k in range(3))
    grey = _grey(brain)[window]
    steps = [
        np.clip(128 + np.round(127 * volume[window] / top), 1, 255).astype(np.uint8) for volume in volumes
    ]
    heights = [
        round(float(brain.affine[2, 3] + brain.affine[2, 2] * k))
        for k in range(window[2].start, window[2].stop, stride[2])
    ][: grey.shape[2]]
    shown = brain.heights(SLICES, np.any(list(called.values()), axis=0))
    strongest = int(np.argmax(np.abs(volumes[-1][window]).max(axis=(0, 1))))
    least = min([float(np.abs(found.t[called[name]]).min(initial=top)) for name, found in maps.items()])
    first = next(iter(maps.values()))
    return {
        "column": column,
        "contrast": first.contrast,
        "sentence": _sentence(maps, called),
        "montages": [
            {
                "name": f"{name.capitalize()}: {plural(int(called[name].sum()), 'significant voxel')}",
                "png": _montage(brain, shown, np.where(called[name], found.t, np.nan), top),
                "alt": f"Axial slices at {', '.join(f'{_mm(brain, k):.0f}' for k in shown)} mm with "
                f"the significant voxels of {column}, {name}: {int(called[name].sum())}.",
            }
            for name, found in maps.items()
        ],
        "heights": heights,
        "start": strongest,
        "top": round(top, 1),
        "least": round(min(least, top), 1),
        "width": grey.shape[0],
        "height": grey.shape[1],
        "clusters": _clusters(list(maps.values())[-1], brain, affine),
        "viewer": {
            "sheet": _sheet(grey, steps),
            "width": grey.shape[0],
            "height": grey.shape[1],
            "columns": COLUMNS,
            "heights": heights,
            "step": top / 127,
            "top": top,
            "shades": list(SHADES),
            "x": _axis(brain, window, 0),
            "y": _axis(brain, window, 1),
        },
    }


def _mm(brain: Brain, k: int) -> float:
    return float(brain.affine[2, 3] + brain.affine[2, 2] * k)


def _axis(brain: Brain, window: tuple[slice, ...], axis: int) -> list[float]:
    """Return the mm of the first pixel and of a step; rows of a picture go from front to back."""
    step = float(brain.affine[axis, axis]) * window[axis].step
    start = float(brain.affine[axis, 3] + brain.affine[axis, axis] * window[axis].start)
    if axis == 0:
        return [start, step]
    count = len(range(*window[axis].indices(brain.brain.shape[axis])))
    return [start + (count - 1) * step, -step]


def _sentence(maps: Mapping[str, StatMap], called: Mapping[str, NDArray[np.bool_]]) -> str:
    first = next(iter(maps.values()))
    counts = ", ".join(f"{plural(int(called[name].sum()), 'voxel')} {name}" for name in maps)
    return (
        f"{first.n} people, covariates adjusted. Significant at p < 0.001 after Bonferroni: {counts}, of "
        f"{int(first.tested.sum())} tested. The harmonized map does not know that the site's effects were "
        "themselves estimated; where the variable and the site go together, its t-values are too large."
    )


def _clusters(found: StatMap, brain: Brain, affine: ArrayLike) -> dict[str, list[float]]:
    """Return the clusters of significant voxels, the largest first."""
    table = clusters(found, brain.mask, affine).round(4)
    return {str(name): table[name].tolist() for name in table}


def _grey(brain: Brain) -> NDArray[np.uint8]:
    """Return the brain in greys from 1, and 0 where there is none."""
    low, high = brain.grey["vmin"], brain.grey["vmax"]
    share = np.clip((np.nan_to_num(brain.brain, nan=low) - low) / (high - low), 0, 1)
    return np.where(np.isnan(brain.brain), 0, 1 + np.round(254 * share)).astype(np.uint8)


def _sheet(grey: NDArray[np.uint8], steps: list[NDArray[np.uint8]]) -> str:
    """Return all slices side by side, row after row."""
    width, height, count = grey.shape
    rows = -(-count // COLUMNS)
    sheet = np.zeros((rows * height, COLUMNS * width, 3), dtype=np.uint8)
    for k in range(count):
        y, x = k // COLUMNS * height, k % COLUMNS * width
        for channel, volume in enumerate((grey, *steps)):
            sheet[y : y + height, x : x + width, channel] = volume[:, ::-1, k].T
    return _png(sheet)


def _montage(brain: Brain, heights: list[int], values: NDArray[np.float64], top: float) -> str:
    """Return a row of slices with coloured voxels, clear around the brain."""
    grey = brain.montage(np.where(_grey(brain) > 0, _grey(brain), np.nan), heights)[::-1]
    t = brain.montage(brain.turned(in_volume(values, brain.mask, fill=np.nan)), heights)[::-1]
    picture = np.zeros((*grey.shape, 4), dtype=np.uint8)
    inside = np.isfinite(grey)
    picture[inside, :3] = grey[inside, None]
    picture[inside, 3] = 255
    coloured = np.isfinite(t)
    picture[coloured, :3] = _colours(t[coloured] / top)
    picture[coloured, 3] = 255
    return _png(picture)


def _colours(share: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the colours of values from −1 to 1: blue for less, orange for more, the stronger the lighter."""
    stops = np.array([[int(shade[k : k + 2], 16) for k in (1, 3, 5)] for shade in SHADES], dtype=np.float64)
    at = np.clip(np.abs(share), 0, 1) * 2
    columns = [
        np.where(
            share < 0,
            np.interp(at, [0, 1, 2], stops[:3][::-1, c]),
            np.interp(at, [0, 1, 2], stops[3:, c]),
        )
        for c in range(3)
    ]
    return np.stack(columns, axis=-1).round().astype(np.uint8)


def _png(pixels: NDArray[np.uint8]) -> str:
    """Return a picture as a data address."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
