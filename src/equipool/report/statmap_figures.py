"""T-maps over slices of the brain, one row a method, beside the truth; their files; the report's viewer."""

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
from nibabel.affines import from_matvec
from numpy.typing import ArrayLike

from equipool.checks.findings import plural
from equipool.data.nifti import write_volume
from equipool.data.tables import write_table
from equipool.exceptions import InputError
from equipool.judge.scores import FloatArray
from equipool.judge.statmaps import FDR, BoolArray, Correction, StatMap, clusters, detection, in_volume
from equipool.report.style import page_svg, shortened, styled

# Blue for negative and orange for positive, distinguishable with colour blindness; the lighter, the larger.
EFFECT_SHADES = ("#A6E4FF", "#2F8FD8", "#003B73", "#8A2B00", "#E8720C", "#FFE37A")
EFFECT_COLOURS = LinearSegmentedColormap.from_list(
    "blue-orange", list(zip((0.0, 0.25, 0.5, 0.5, 0.75, 1.0), EFFECT_SHADES, strict=True))
)
FINEST = 2.0  # mm: finer slices would make the page large


class Brain:
    """A brain turned so that x goes right, y to the front and z up, with one voxel around the mask."""

    def __init__(self, mask: ArrayLike, affine: ArrayLike, background: ArrayLike) -> None:
        self.mask, brain = np.asarray(mask) != 0, np.asarray(background, dtype=np.float64)
        if not self.mask.any():
            raise InputError("The mask is empty; give the one that the voxels were taken with.")
        if brain.shape != self.mask.shape:
            what = f"The background has shape {brain.shape}, the mask {self.mask.shape}"
            raise InputError(f"{what}; they must be alike.")
        # Where in the volume each voxel is taken from; -1 is beyond its edges.
        place = np.pad(np.arange(brain.size, dtype=np.int32).reshape(brain.shape), 1, constant_values=-1)
        padded = np.asarray(affine) @ from_matvec(np.eye(3), [-1, -1, -1])
        image = nib.as_closest_canonical(nib.Nifti1Image(place, padded))
        inside = np.argwhere(np.append(self.mask, False)[image.dataobj])
        image = image.slicer[tuple(map(slice, inside.min(axis=0) - 1, inside.max(axis=0) + 2))]
        self.place = np.asarray(image.dataobj)
        self.first, self.step = image.affine[:3, 3], np.diagonal(image.affine)[:3]  # mm
        brain = np.nan_to_num(brain, nan=0.0, posinf=0.0, neginf=0.0)
        low, high = np.percentile(brain[self.mask], [1, 99])
        # Greys from the middle of the range, so that dark and light colours both stand out.
        room = 0.3 * (high - low) or 1.0
        grey = np.clip((brain - low + room) / (high - low + 2 * room), 0, 1)
        # What is next to nothing outside of the mask is paper.
        self.grey = self._turned(np.where(self.mask | (np.abs(brain) > 0.1 * abs(high)), grey, np.nan))

    def _turned(self, volume: FloatArray) -> FloatArray:
        return np.append(volume, np.nan)[self.place]

    def volume(self, values: ArrayLike) -> FloatArray:
        """Return one value for each voxel of the mask as a turned volume; NaN outside of the mask."""
        return self._turned(in_volume(values, self.mask, fill=np.nan))

    def heights(self, slices: int, shown: BoolArray) -> list[int]:
        """Return which slices to draw: so many, over the voxels that are shown."""
        count = self.grey.shape[2]
        where = np.nonzero(self.volume(shown) == 1)[2]
        low, high = np.percentile(where, [5, 95]) if len(where) else (1, count - 2)
        # What is small is shown with its surroundings.
        centre, reach = (low + high) / 2, max((high - low) / 2, (slices - 1) / 2)
        # Halves go up: to the nearest even number, every other slice would be lost.
        spread = np.floor(np.linspace(centre - reach, centre + reach, slices) + 0.5).astype(int)
        return list(np.unique(np.clip(spread, 1, count - 2)))

    def draw(
        self, axes: Axes, heights: list[int], values: FloatArray, top: float, truth: FloatArray | None
    ) -> None:
        """Draw slices side by side, in colour where there is a value, with the outline of the truth."""

        def montage(volume: FloatArray) -> FloatArray:
            return np.concatenate([volume[:, :, k].T for k in heights], axis=1)

        style: dict[str, Any] = {"origin": "lower", "aspect": self.step[1] / self.step[0]}
        style["interpolation"] = "none"
        axes.imshow(montage(self.grey), cmap="gray", vmin=0, vmax=1, **style)
        colours = montage(self.volume(values))
        axes.imshow(colours, cmap=EFFECT_COLOURS, vmin=-top, vmax=top, **style)
        if truth is not None:
            inside = montage(self.volume(truth != 0)) == 1
            if inside.any():
                axes.contour(inside, [0.5], colors="black", linewidths=0.6)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)

    def label(self, axes: Axes, heights: list[int]) -> None:
        """Write the heights below a row, and which side is left."""
        width = len(self.grey)
        places = width * (np.arange(len(heights)) + 0.5) - 0.5
        mm = self.first[2] + self.step[2] * np.array(heights)
        axes.set_xticks(places, [f"z = {z:.0f} mm" for z in mm], fontsize=8)
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
    slices: int = 8,
) -> Figure:
    """Draw the significant voxels of each map in axial slices, one row a map, by the name to show.

    Parameters
    ----------
    mask, affine
        The volume that the voxels were taken from, and its 4 × 4 affine.
    background
        What to draw them over, of the mask's shape: the mean brain, a template, or the mask itself.
    truth
        The true effect of each voxel, (voxels,), 0 where there is none; or true and false. Drawn as the first
        row and outlined in the others, whose titles then give the shares of affected and unaffected voxels
        that are significant. ``unaffected`` are those truly so; default: all that ``truth`` has at 0.
    alpha, correction
        As for :meth:`~equipool.judge.statmaps.StatMap.significant`.
    slices
        How many to spread over what is affected or significant.
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
    contrasts = {m.contrast for m in maps.values()}
    what = f" ({shortened(contrasts.pop())})" if len(contrasts) == 1 and "" not in contrasts else ""
    shades = ScalarMappable(Normalize(-top, top), EFFECT_COLOURS)
    bar = figure.colorbar(shades, ax=figure.axes, shrink=0.8, aspect=30, pad=0.01)
    how = {"bonferroni": "Bonferroni", "fdr": "FDR", None: "uncorrected"}[correction]
    bar.set_label(f"t{what}, p < {alpha:g} {how}", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def _largest_t(maps: Mapping[str, StatMap]) -> float:
    return max(float(np.abs(m.t).max(initial=0)) for m in maps.values()) or 1.0


# -- files -------------------------------------------------------------------------------------------------


def write_statmap(
    folder: str | Path, name: str, statmap: StatMap, mask: ArrayLike, affine: ArrayLike, *, mni: bool = False
) -> list[Path]:
    """Write a map as NIfTI files (float32) and tables of its clusters; return the files.

    ``NAME_stat-t_statmap.nii.gz``, ``NAME_stat-logp_statmap.nii.gz`` (−log10 of the uncorrected two-sided p),
    ``NAME_stat-effect_statmap.nii.gz``, ``NAME_clusters.tsv`` (of voxels significant by Bonferroni, 0.001)
    and ``NAME_clusters-fdr.tsv`` (false discovery rate 5 %). The folder is made if it is not there. ``mask``
    and ``affine`` are of the volume that the voxels were taken from; ``mni`` says that it is in MNI space,
    and the files' sform code then does too.
    """
    if not name or Path(name).name != name:
        raise InputError(f"A map cannot be called {name!r} in a file's name; leave slashes out.")
    called = {"clusters": None, "clusters-fdr": statmap.significant(**FDR)}
    tables = {what: clusters(statmap, mask, affine, keep=keep) for what, keep in called.items()}
    # Where p is too small for a float, the smallest one stands for it: no infinity in a file.
    logp = -np.log10(np.maximum(statmap.p, np.finfo(np.float64).tiny))
    images: dict[str, tuple[Any, ...]] = {
        "t": (statmap.t, "t test", (statmap.df,)),
        "logp": (logp, "log10 p value"),
        "effect": (statmap.effect, "estimate"),
    }
    files = []
    for what, (values, *intent) in images.items():
        file = Path(folder) / f"{name}_stat-{what}_statmap.nii.gz"
        files.append(write_volume(file, in_volume(values, mask), affine, mni=mni, intent=intent))
    for what, table in tables.items():
        file = Path(folder) / f"{name}_{what}.tsv"
        files.append(write_table(file, table, float_format="%.6g"))
    return files


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

    The sheet is one PNG, a slice below the other: red holds the brain (0 for none), green and blue the t of
    the maps, 128 + 127 t/top.
    """
    from PIL import Image

    strides = np.maximum(np.round(FINEST / np.abs(brain.step)), 1).astype(int)
    some = tuple(slice(None, None, stride) for stride in strides)
    step, grey = brain.step * strides, brain.grey[some]
    volumes = [np.nan_to_num(brain.volume(t))[some] for t in maps]
    channels = [np.where(np.isnan(grey), 0, 1 + np.round(254 * np.nan_to_num(grey)))]
    channels += [np.clip(128 + np.round(127 * volume / top), 1, 255) for volume in volumes]
    width, height, count = grey.shape
    # Rows of a picture go from front to back.
    slices = np.stack(channels, axis=-1).astype(np.uint8)[:, ::-1].transpose(2, 1, 0, 3)
    buffer = io.BytesIO()
    Image.fromarray(slices.reshape(-1, width, 3)).save(buffer, "PNG", optimize=True)
    return {
        "sheet": "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(),
        "width": width,
        "height": height,
        "heights": [round(z) for z in (brain.first[2] + step[2] * np.arange(count)).tolist()],
        "start": int(np.argmax(np.abs(volumes[-1]).max(axis=(0, 1)))),
        "step": top / 127,
        "top": top,
        "shades": list(EFFECT_SHADES),
        # The mm of the first pixel and of a step.
        "x": [float(brain.first[0]), float(step[0])],
        "y": [float(brain.first[1] + step[1] * (height - 1)), -float(step[1])],
    }
