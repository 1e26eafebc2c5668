"""Pictures and files of t-maps: significant voxels over the brain, one row a method, beside the truth."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import plural
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.judge.statmaps import Correction, StatMap, clusters, detection, in_volume
from equipool.report.figures import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = ["glass_figure", "statmap_figure", "write_statmap"]

FloatArray = NDArray[np.float64]

# Blue for less and orange for more, which everybody can tell apart; the stronger, the lighter.
SHADES = ("#A6E4FF", "#2F8FD8", "#003B73", "#8A2B00", "#E8720C", "#FFE37A")


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
        row and outlined in the others, whose titles then tell the shares of affected and unaffected voxels
        called.
    unaffected
        Voxels that count as truly unaffected; default: all that ``truth`` has at 0.
    alpha, correction
        As for :meth:`~equipool.judge.statmaps.StatMap.significant`.
    slices
        Heights in mm, or how many to spread over what is affected or significant.
    """
    from matplotlib.figure import Figure

    if not maps:
        raise InputError("There is no map to draw; give at least one.")
    called = {name: m.significant(alpha=alpha, correction=correction) for name, m in maps.items()}
    shown = np.any(list(called.values()), axis=0)
    if truth is not None:
        truth = np.asarray(truth, dtype=np.float64)
        shown = shown | (truth != 0)
    brain = Brain(mask, affine, background)
    heights = brain.heights(slices, shown)
    rows = len(maps) + (truth is not None)
    figure = Figure(figsize=(1.25 * len(heights) + 1.2, 1.8 * rows + 0.3), layout="constrained")
    lines = list(figure.subplots(rows, 1, squeeze=False)[:, 0])
    top = _top(maps, called)
    if truth is not None:
        flat = np.where(truth == 0, np.nan, np.sign(truth) * 0.75 * top)
        title = f"truth: {plural(int((truth != 0).sum()), 'affected voxel')}"
        brain.draw(lines.pop(0), heights, flat, top, title)
    for line, (name, m) in zip(lines, maps.items(), strict=True):
        title = f"{plain(name)}: {plural(int(called[name].sum()), 'significant voxel')}"
        if truth is not None:
            other = truth == 0 if unaffected is None else unaffected
            found = detection(m, truth != 0, other, alpha=alpha, correction=correction)
            title += f", {found.found:.1%} of affected and {found.false:.2%} of unaffected voxels called"
        brain.draw(line, heights, np.where(called[name], m.t, np.nan), top, title, outline=truth)
    brain.label(lines[-1], heights)
    _colour_bar(figure, top, maps, alpha, correction)
    return figure


def glass_figure(
    maps: Mapping[str, StatMap],
    mask: ArrayLike,
    affine: ArrayLike,
    *,
    alpha: float = 0.001,
    correction: Correction = "bonferroni",
) -> Figure:
    """Draw each map's significant voxels through a glass brain (nilearn; MNI space): nothing is cut away."""
    import nibabel as nib
    from matplotlib.figure import Figure
    from nilearn.plotting import plot_glass_brain

    if not maps:
        raise InputError("There is no map to draw; give at least one.")
    called = {name: m.significant(alpha=alpha, correction=correction) for name, m in maps.items()}
    top = _top(maps, called)
    figure = Figure(figsize=(10, 2.6 * len(maps)))
    figure.subplots_adjust(left=0.01, right=0.9, bottom=0.02, top=0.95, hspace=0.2)
    for axes, (name, m) in zip(figure.subplots(len(maps), 1, squeeze=False)[:, 0], maps.items(), strict=True):
        t = in_volume(np.where(called[name], m.t, 0), mask).astype(np.float32)
        axes.set_title(f"{plain(name)}: {plural(int(called[name].sum()), 'significant voxel')}", fontsize=9)
        plot_glass_brain(
            nib.Nifti1Image(t, np.asarray(affine)),
            figure=figure,
            axes=axes,
            display_mode="lyrz",
            plot_abs=False,
            threshold=1e-6,
            vmin=-top,
            vmax=top,
            cmap=_colours(),
            colorbar=False,
        )
    _colour_bar(figure, top, maps, alpha, correction)
    return figure


def _top(maps: Mapping[str, StatMap], called: Mapping[str, NDArray[np.bool_]]) -> float:
    """Return the largest |t| to be drawn, or where nothing is, the largest there is."""
    drawn = max(float(np.abs(m.t[called[name]]).max(initial=0)) for name, m in maps.items())
    return drawn or max(float(np.abs(m.t).max(initial=0)) for m in maps.values()) or 1.0


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
    images = {
        "t": (statistics.t, ("t test", (statistics.df,))),
        "logp": (logp, ("log10 p value",)),
        "effect": (statistics.effect, ("estimate",)),
    }
    contents: dict[str, bytes | str] = {
        f"{name}_stat-{what}_statmap.nii.gz": _nifti(in_volume(values, mask), affine, intent, mni)
        for what, (values, intent) in images.items()
    }
    contents[f"{name}_clusters.tsv"] = table.to_csv(
        sep="\t", index=False, float_format="%.6g", lineterminator="\n"
    )
    return [write_whole(Path(folder) / file, content) for file, content in contents.items()]


def _nifti(volume: FloatArray, affine: ArrayLike, intent: tuple[Any, ...], mni: bool) -> bytes:
    """Return a compressed NIfTI file; the same map gives the same bytes."""
    import nibabel as nib

    image = nib.Nifti1Image(volume.astype(np.float32), np.asarray(affine, dtype=np.float64))
    image.header.set_intent(*intent)
    image.header.set_xyzt_units("mm")
    image.set_sform(image.affine, code=4 if mni else 2)
    return gzip.compress(image.to_bytes(), mtime=0)


class Brain:
    """A brain turned so that x goes right, y to the front and z up, and how to draw slices of it."""

    def __init__(self, mask: ArrayLike, affine: ArrayLike, background: ArrayLike) -> None:
        from nibabel.orientations import inv_ornt_aff, io_orientation

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
        from nibabel.orientations import apply_orientation

        return apply_orientation(volume, self.turn)

    def heights(self, slices: int | Sequence[float], shown: NDArray[np.bool_]) -> list[int]:
        """Return which slices to draw: the ones asked for in mm, or so many over what there is to see."""
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
        title: str,
        *,
        outline: FloatArray | None = None,
    ) -> None:
        """Draw a row of slices, in colour where there is a value."""
        style: dict[str, Any] = {"origin": "lower", "interpolation": "nearest"}
        style["aspect"] = abs(self.affine[1, 1] / self.affine[0, 0])
        axes.imshow(self.montage(self.brain, heights), **self.grey, **style)
        colours = self.turned(in_volume(values, self.mask, fill=np.nan))
        axes.imshow(self.montage(colours, heights), cmap=_colours(), vmin=-top, vmax=top, **style)
        if outline is not None:
            _outline(axes, self.montage(self.turned(in_volume(outline != 0, self.mask)), heights) > 0)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(title, fontsize=9, loc="left")

    def label(self, axes: Axes, heights: list[int]) -> None:
        """Write the heights below a row, and which side is left."""
        width = self.high[0] - self.low[0] + 3
        mm = [self.affine[2, 3] + self.affine[2, 2] * k for k in heights]
        places = width * (np.arange(len(heights)) + 0.5) - 0.5
        axes.set_xticks(places, [f"z = {z:.0f} mm" for z in mm], fontsize=8)
        axes.tick_params(axis="x", length=0)
        for x, side in ((0, "L"), (width - 2, "R")):
            axes.text(x, 0, side, fontsize=8, ha="center")


def _outline(axes: Axes, inside: NDArray[np.bool_]) -> None:
    """Draw the edges between voxels inside and outside."""
    padded = np.pad(inside, 1)
    rows, columns = np.nonzero(padded[1:-1, 1:] != padded[1:-1, :-1])
    axes.vlines(columns - 0.5, rows - 0.5, rows + 0.5, color="black", linewidth=0.6)
    rows, columns = np.nonzero(padded[1:, 1:-1] != padded[:-1, 1:-1])
    axes.hlines(rows - 0.5, columns - 0.5, columns + 0.5, color="black", linewidth=0.6)


def _colours() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    places = (0.0, 0.25, 0.5, 0.5, 0.75, 1.0)
    return LinearSegmentedColormap.from_list("blue-orange", list(zip(places, SHADES, strict=True)))


def _colour_bar(
    figure: Figure, top: float, maps: Mapping[str, StatMap], alpha: float, correction: Correction
) -> None:
    """Draw the one colour bar, with what is shown and what a positive value means."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    how = {"bonferroni": "Bonferroni", "fdr": "FDR", None: "uncorrected"}[correction]
    contrasts = {m.contrast for m in maps.values()}
    what = f" ({plain(*contrasts)})" if len(contrasts) == 1 and "" not in contrasts else ""
    label = f"t{what}, p < {alpha:g} {how}"
    shades = ScalarMappable(Normalize(-top, top), _colours())
    bar = figure.colorbar(shades, ax=figure.axes, shrink=0.8, aspect=30, pad=0.01)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
