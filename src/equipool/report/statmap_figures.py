"""T-maps over slices of the brain, one row a method, beside the truth; their files; the report's viewer."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import plural
from equipool.data.nifti import write_volume
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.judge.scores import FloatArray
from equipool.judge.statmaps import BoolArray, Correction, StatMap, clusters, detection, in_volume
from equipool.report.style import page_svg, shortened, styled

# Blue for negative and orange for positive, distinguishable with colour blindness; the lighter, the larger.
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

    def heights(self, slices: int | Sequence[float], shown: BoolArray) -> list[int]:
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
        self, axes: Axes, heights: list[int], values: FloatArray, top: float, truth: FloatArray | None
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
def statmap_figure(
    maps: Mapping[str, StatMap],
    mask: ArrayLike,
    affine: ArrayLike,
    background: ArrayLike,
    *,
    truth: ArrayLike | None = None,
    unaffected: ArrayLike | None = None,
    alpha: float = 0.001,
    correction: Correction = "bonferroni",
    slices: int | Sequence[float] = 8,
) -> Figure:
    """Draw the significant voxels of each map in axial slices, one row a map.

    Parameters
    ----------
    maps
        Maps over the same mask, by the name to show.
    mask, affine
        The volume that the voxels were taken from, and its 4 × 4 affine.
    background
        What to draw them over, of the mask's shape: the mean brain, a template, or the mask itself.
    truth
        The true effect of each voxel, (voxels,), 0 where there is none; or true and false. Drawn as the first
        row and outlined in the others, whose titles then give the shares of affected and unaffected voxels
        that are significant.
    unaffected
        Voxels that count as truly unaffected; default: all that ``truth`` has at 0.
    alpha, correction
        As for :meth:`~equipool.judge.statmaps.StatMap.significant`.
    slices
        Heights in mm, or how many to spread over what is affected or significant.
    """
    if not maps:
        raise InputError("There is no map to draw; give at least one.")
    significant = {name: m.significant(alpha=alpha, correction=correction) for name, m in maps.items()}
    shown = np.any(list(significant.values()), axis=0)
    drawn = max(float(np.abs(m.t[significant[name]]).max(initial=0)) for name, m in maps.items())
    top = drawn or _largest_t(maps)  # where nothing is drawn, the bar still needs a range
    panels: list[tuple[str, FloatArray, FloatArray | None]] = []
    if truth is not None:
        truth = np.asarray(truth, dtype=np.float64)
        shown = shown | (truth != 0)
        flat = np.where(truth == 0, np.nan, np.sign(truth) * 0.75 * top)
        panels.append((f"truth: {plural(int((truth != 0).sum()), 'affected voxel')}", flat, None))
    for name, m in maps.items():
        title = f"{shortened(name)}: {plural(int(significant[name].sum()), 'significant voxel')}"
        if truth is not None:
            other = truth == 0 if unaffected is None else unaffected
            shares = detection(m, truth != 0, other, alpha=alpha, correction=correction)
            title += f", {shares.found:.1%} of affected and {shares.false:.2%} of unaffected voxels called"
        panels.append((title, np.where(significant[name], m.t, np.nan), truth))
    brain = Brain(mask, affine, background)
    heights = brain.heights(slices, shown)
    figure = Figure(figsize=(1.25 * len(heights) + 1.2, 1.8 * len(panels) + 0.3), layout="constrained")
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (title, values, outlined) in zip(rows, panels, strict=True):
        brain.draw(axes, heights, values, top, outlined)
        axes.set_title(title, fontsize=9, loc="left")
    brain.label(rows[-1], heights)
    _colour_bar(figure, top, maps, alpha, correction)
    return figure


def _largest_t(maps: Mapping[str, StatMap]) -> float:
    return max(float(np.abs(m.t).max(initial=0)) for m in maps.values()) or 1.0


def _colour_bar(
    figure: Figure, top: float, maps: Mapping[str, StatMap], alpha: float, correction: Correction
) -> None:
    """Draw the one colour bar, with what is shown and what a positive value means."""
    how = {"bonferroni": "Bonferroni", "fdr": "FDR", None: "uncorrected"}[correction]
    contrasts = {m.contrast for m in maps.values()}
    what = f" ({shortened(contrasts.pop())})" if len(contrasts) == 1 and "" not in contrasts else ""
    shades = ScalarMappable(Normalize(-top, top), EFFECT_COLOURS)
    bar = figure.colorbar(shades, ax=figure.axes, shrink=0.8, aspect=30, pad=0.01)
    bar.set_label(f"t{what}, p < {alpha:g} {how}", fontsize=8)
    bar.ax.tick_params(labelsize=8)


# -- files -------------------------------------------------------------------------------------------------


def write_statmap(
    folder: str | Path,
    name: str,
    statistics: StatMap,
    mask: ArrayLike,
    affine: ArrayLike,
    *,
    mni: bool = False,
    alpha: float = 0.001,
    correction: Correction = "bonferroni",
    min_voxels: int = 1,
) -> list[Path]:
    """Write a map as NIfTI files (float32) and a table of its clusters; return the files.

    Parameters
    ----------
    folder
        Where; made if it is not there.
    name
        How the files' names begin: ``NAME_stat-t_statmap.nii.gz``, ``NAME_stat-logp_statmap.nii.gz`` (−log10
        of the uncorrected two-sided p), ``NAME_stat-effect_statmap.nii.gz`` and ``NAME_clusters.tsv``.
    statistics, mask, affine
        The map, the volume that its voxels were taken from, and that volume's 4 × 4 affine.
    mni
        Whether the affine leads to MNI space; the files say so (sform code 4).
    alpha, correction, min_voxels
        Which voxels are grouped into clusters, and how small those may be.
    """
    if not name or Path(name).name != name:
        raise InputError(f"A map cannot be called {name!r} in a file's name; leave slashes out.")
    keep = statistics.significant(alpha=alpha, correction=correction)
    table = clusters(statistics, mask, affine, keep=keep, min_voxels=min_voxels)
    # Where p is too small for a float, the smallest one stands for it: no infinity in a file.
    logp = -np.log10(np.maximum(statistics.p, np.finfo(np.float64).tiny))
    images: dict[str, tuple[Any, ...]] = {
        "t": (statistics.t, "t test", (statistics.df,)),
        "logp": (logp, "log10 p value"),
        "effect": (statistics.effect, "estimate"),
    }
    files = []
    for what, (values, *intent) in images.items():
        volume = in_volume(values, mask)
        grid = nib.Nifti1Image(volume.astype(np.float32), np.asarray(affine, dtype=np.float64))
        grid.header.set_intent(*intent)
        grid.header.set_xyzt_units("mm")
        grid.set_sform(grid.affine, code=4 if mni else 2)
        files.append(write_volume(Path(folder) / f"{name}_stat-{what}_statmap.nii.gz", volume, grid))
    text = table.to_csv(sep="\t", index=False, float_format="%.6g", lineterminator="\n")
    return [*files, write_whole(Path(folder) / f"{name}_clusters.tsv", text)]


# -- the report --------------------------------------------------------------------------------------------


def statmap_pictures(
    maps: Mapping[str, StatMap], mask: ArrayLike, affine: ArrayLike, background: ArrayLike, column: str
) -> dict[str, Any]:
    """Return what the report shows of t-maps as measured and harmonized, as JSON-ready values."""
    brain = Brain(mask, affine, background)
    significant, top = {name: m.significant() for name, m in maps.items()}, _largest_t(maps)
    least = min(float(np.abs(m.t[significant[name]]).min(initial=top)) for name, m in maps.items())
    first, last = next(iter(maps.values())), list(maps.values())[-1]
    table = clusters(last, brain.mask, affine).round(4)
    figure = statmap_figure(maps, mask, affine, background, slices=4)  # legible on a phone
    return {
        "column": column,
        "contrast": first.contrast,
        "participants": first.n,
        "tested": int(first.tested.sum()),
        "significant": {name: int(voxels.sum()) for name, voxels in significant.items()},
        "svg": page_svg(figure, "statmap"),
        "least": round(min(least, top), 1),
        "top": round(top, 1),
        "clusters": {str(name): table[name].tolist() for name in table},
        "viewer": viewer(brain, [m.t for m in maps.values()], top),
    }


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
