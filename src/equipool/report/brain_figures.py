"""Slices of the brain: how they are chosen, drawn side by side, and packed for the report's viewer."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation
from numpy.typing import ArrayLike, NDArray

from equipool.data import Volumes
from equipool.exceptions import InputError
from equipool.judge.statmaps import in_volume
from equipool.report.style import shortened, styled

__all__ = ["EFFECT_COLOURS", "Brain", "slice_pairs", "viewer"]

FloatArray = NDArray[np.float64]

# Blue for less and orange for more, which everybody can tell apart; the stronger, the lighter.
EFFECT_SHADES = ("#A6E4FF", "#2F8FD8", "#003B73", "#8A2B00", "#E8720C", "#FFE37A")
EFFECT_COLOURS = LinearSegmentedColormap.from_list(
    "blue-orange", list(zip((0.0, 0.25, 0.5, 0.5, 0.75, 1.0), EFFECT_SHADES, strict=True))
)
FINEST = 2.0  # mm: finer slices would make the page large
COLUMNS = 8  # slices in a row of the viewer's sheet


class Brain:
    """A brain turned so that x goes right, y to the front and z up, and how to draw axial slices of it."""

    def __init__(self, mask: ArrayLike, affine: ArrayLike, background: ArrayLike) -> None:
        self.mask = np.asarray(mask) != 0
        brain = np.asarray(background, dtype=np.float64)
        if not self.mask.any():
            raise InputError("The mask is empty; give the one that the voxels were taken with.")
        if brain.shape != self.mask.shape:
            raise InputError(
                f"The background has shape {brain.shape}, the mask {self.mask.shape}; they must be alike."
            )
        self.turn = io_orientation(np.asarray(affine))
        self.affine = np.asarray(affine) @ inv_ornt_aff(self.turn, self.mask.shape)
        brain = np.nan_to_num(brain, nan=0.0, posinf=0.0, neginf=0.0)
        low, high = np.percentile(brain[self.mask], [1, 99])
        # Greys from the middle of the range, so that dark and light colours both stand out.
        room = 0.3 * (high - low) or 1.0
        self.grey = {"cmap": "gray", "vmin": low - room, "vmax": high + room}
        # What is next to nothing outside of the mask is paper.
        self.brain = self.turned(np.where(self.mask | (np.abs(brain) > 0.1 * abs(high)), brain, np.nan))
        inside = np.argwhere(self.turned(self.mask))
        self.low, self.high = inside.min(axis=0), inside.max(axis=0)

    def turned(self, volume: NDArray[Any]) -> NDArray[Any]:
        """Return a volume on the mask's grid with its axes turned."""
        return apply_orientation(volume, self.turn)

    def mm(self, axis: int, k: int) -> float:
        """Return where a voxel lies along an axis."""
        return float(self.affine[axis, 3] + self.affine[axis, axis] * k)

    def heights(self, slices: int | Sequence[float], shown: NDArray[np.bool_]) -> list[int]:
        """Return which slices to draw: those asked for in mm, or so many over the voxels that are shown."""
        if not isinstance(slices, int):
            indices = np.round((np.asarray(slices) - self.affine[2, 3]) / self.affine[2, 2]).astype(int)
            if not len(indices) or indices.min() < 0 or indices.max() >= self.brain.shape[2]:
                raise InputError(f"slices must be heights in mm inside the volume. Got {list(slices)}.")
            return list(indices)
        where = np.argwhere(self.turned(in_volume(shown, self.mask)))[:, 2]
        low, high = np.percentile(where, [5, 95]) if len(where) else (self.low[2], self.high[2])
        # What is small is shown with its surroundings.
        centre, reach = (low + high) / 2, max((high - low) / 2, (slices - 1) / 2)
        # Halves go up: to the nearest even number, every other slice would be lost.
        spread = np.floor(np.linspace(centre - reach, centre + reach, slices) + 0.5).astype(int)
        return list(np.unique(np.clip(spread, self.low[2], self.high[2])))

    def montage(self, volume: NDArray[Any], heights: list[int]) -> NDArray[Any]:
        """Return slices side by side as an image: rows go to the front, columns to the right."""
        (left, back, _), (right, front, _) = self.low - 1, self.high + 1
        padded = np.pad(volume, 1, constant_values=np.nan)
        window = padded[left + 1 : right + 2, back + 1 : front + 2, 1:-1]
        return np.concatenate([window[:, :, k].T for k in heights], axis=1)

    def draw(
        self,
        axes: Axes,
        heights: list[int],
        values: FloatArray,
        top: float,
        truth: FloatArray | None = None,
    ) -> None:
        """Draw a row of slices, in colour where there is a value, and the outline of the truth."""
        style: dict[str, Any] = {"origin": "lower", "interpolation": "none"}
        style["aspect"] = abs(self.affine[1, 1] / self.affine[0, 0])
        axes.imshow(self.montage(self.brain, heights), **self.grey, **style)
        colours = self.turned(in_volume(values, self.mask, fill=np.nan))
        axes.imshow(self.montage(colours, heights), cmap=EFFECT_COLOURS, vmin=-top, vmax=top, **style)
        if truth is not None:
            inside = self.montage(self.turned(in_volume(truth != 0, self.mask)), heights) > 0
            rows, columns = np.nonzero(np.diff(inside, axis=1, prepend=False, append=False))
            axes.vlines(columns - 0.5, rows - 0.5, rows + 0.5, color="black", linewidth=0.6)
            rows, columns = np.nonzero(np.diff(inside, axis=0, prepend=False, append=False))
            axes.hlines(rows - 0.5, columns - 0.5, columns + 0.5, color="black", linewidth=0.6)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)

    def label(self, axes: Axes, heights: list[int]) -> None:
        """Write the heights below a row, and which side is left."""
        width = self.high[0] - self.low[0] + 3
        places = width * (np.arange(len(heights)) + 0.5) - 0.5
        axes.set_xticks(places, [f"z = {self.mm(2, k):.0f} mm" for k in heights], fontsize=8)
        axes.tick_params(axis="x", length=0)
        for x, side in ((0, "L"), (width - 2, "R")):
            axes.text(x, 0, side, fontsize=8, ha="center")


@styled
def slice_pairs(volumes: Volumes, rows: Sequence[Mapping[str, NDArray[np.floating]]]) -> Figure:
    """Draw rows of volumes, by title: an axial slice at the ventricles and a coronal one at the hippocampus.

    A title with a minus sign is of a difference.
    """
    figure = Figure(figsize=(4.3 * len(rows[0]), 2.6 * len(rows)), layout="constrained")
    for line, row in zip(figure.subplots(len(rows), 2 * len(rows[0]), squeeze=False), rows, strict=True):
        for pair, (title, values) in zip(line.reshape(-1, 2), row.items(), strict=True):
            box, difference = volumes.unmask(values), "−" in title
            limits = {"vmin": -0.3, "vmax": 0.3} if difference else {"vmin": 0.0, "vmax": 1.6}
            slices = box[:, :, box.shape[2] // 2], box[:, int(0.48 * box.shape[1]), :]
            for axes, part in zip(pair, slices, strict=True):
                axes.imshow(part.T, origin="lower", cmap="RdBu_r" if difference else "gray", **limits)
                axes.set_axis_off()
            pair[0].set_title(shortened(title), fontsize=8, loc="left")
    return figure


# -- the report's viewer -----------------------------------------------------------------------------------


def viewer(brain: Brain, maps: Sequence[FloatArray], top: float) -> dict[str, Any]:
    """Return all slices of two t-maps for the viewer, as JSON-ready values.

    The sheet is one PNG: red holds the brain (0 for none), green and blue the t of the maps, 128 + 127 t/top.
    """
    volumes = [brain.turned(in_volume(t, brain.mask)) for t in maps]
    strides = [max(1, round(FINEST / abs(brain.affine[k, k]))) for k in range(3)]
    window = tuple(slice(max(brain.low[k] - 1, 0), brain.high[k] + 2, strides[k]) for k in range(3))
    x, y, z = (list(range(*part.indices(size))) for part, size in zip(window, brain.brain.shape, strict=True))
    low, high = brain.grey["vmin"], brain.grey["vmax"]
    share = np.clip((np.nan_to_num(brain.brain, nan=low) - low) / (high - low), 0, 1)
    grey = np.where(np.isnan(brain.brain), 0, 1 + np.round(254 * share))[window]
    steps = [np.clip(128 + np.round(127 * volume[window] / top), 1, 255) for volume in volumes]
    return {
        "sheet": _sheet(np.stack([grey, *steps], axis=-1).astype(np.uint8)),
        "width": len(x),
        "height": len(y),
        "columns": COLUMNS,
        "heights": [round(brain.mm(2, k)) for k in z],
        "start": int(np.argmax(np.abs(volumes[-1][window]).max(axis=(0, 1)))),
        "step": top / 127,
        "top": top,
        "shades": list(EFFECT_SHADES),
        # The mm of the first pixel and of a step; rows of a picture go from front to back.
        "x": [brain.mm(0, x[0]), float(brain.affine[0, 0]) * strides[0]],
        "y": [brain.mm(1, y[-1]), -float(brain.affine[1, 1]) * strides[1]],
    }


def _sheet(volume: NDArray[np.uint8]) -> str:
    """Return the slices of (x, y, z, 3) side by side, row after row, as the address of a PNG."""
    from PIL import Image

    width, height, count, _ = volume.shape
    sheet = np.zeros((-(-count // COLUMNS) * height, COLUMNS * width, 3), dtype=np.uint8)
    for k in range(count):
        top, left = k // COLUMNS * height, k % COLUMNS * width
        sheet[top : top + height, left : left + width] = volume[:, ::-1, k].swapaxes(0, 1)
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
