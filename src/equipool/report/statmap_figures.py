"""Pictures and files of t-maps: significant voxels over the brain, one row a method, beside the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from equipool.checks.findings import plural
from equipool.data.nifti import write_volume
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.judge.statmaps import Correction, StatMap, clusters, detection, in_volume
from equipool.report.brain_figures import EFFECT_COLOURS, Brain, viewer
from equipool.report.style import page_svg, shortened, styled

__all__ = ["statmap_figure", "statmap_pictures", "write_statmap"]


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
    significant = _significant(maps, alpha, correction)
    shown = np.any(list(significant.values()), axis=0)
    if truth is not None:
        truth = np.asarray(truth, dtype=np.float64)
        shown = shown | (truth != 0)
    brain = Brain(mask, affine, background)
    heights = brain.heights(slices, shown)
    count = len(maps) + (truth is not None)
    figure = Figure(figsize=(1.25 * len(heights) + 1.2, 1.8 * count + 0.3), layout="constrained")
    rows = list(figure.subplots(count, 1, squeeze=False)[:, 0])
    top = _top(maps, significant)
    if truth is not None:
        flat = np.where(truth == 0, np.nan, np.sign(truth) * 0.75 * top)
        brain.draw(rows[0], heights, flat, top)
        title = f"truth: {plural(int((truth != 0).sum()), 'affected voxel')}"
        rows.pop(0).set_title(title, fontsize=9, loc="left")
    for axes, (name, m) in zip(rows, maps.items(), strict=True):
        title = f"{shortened(name)}: {plural(int(significant[name].sum()), 'significant voxel')}"
        if truth is not None:
            other = truth == 0 if unaffected is None else unaffected
            shares = detection(m, truth != 0, other, alpha=alpha, correction=correction)
            title += f", {shares.found:.1%} of affected and {shares.false:.2%} of unaffected voxels called"
        brain.draw(axes, heights, np.where(significant[name], m.t, np.nan), top, truth=truth)
        axes.set_title(title, fontsize=9, loc="left")
    brain.label(rows[-1], heights)
    _colour_bar(figure, top, maps, alpha, correction)
    return figure


def _significant(
    maps: Mapping[str, StatMap], alpha: float, correction: Correction
) -> dict[str, NDArray[np.bool_]]:
    if not maps:
        raise InputError("There is no map to draw; give at least one.")
    return {name: m.significant(alpha=alpha, correction=correction) for name, m in maps.items()}


def _top(maps: Mapping[str, StatMap], significant: Mapping[str, NDArray[np.bool_]]) -> float:
    """Return the largest |t| to be drawn, or where nothing is, the largest there is."""
    drawn = max(float(np.abs(m.t[significant[name]]).max(initial=0)) for name, m in maps.items())
    return drawn or max(float(np.abs(m.t).max(initial=0)) for m in maps.values()) or 1.0


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
    images: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "t": (statistics.t, ("t test", (statistics.df,))),
        "logp": (logp, ("log10 p value",)),
        "effect": (statistics.effect, ("estimate",)),
    }
    files = []
    for what, (values, intent) in images.items():
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
    significant = _significant(maps, 0.001, "bonferroni")
    top = max(float(np.abs(m.t).max(initial=0)) for m in maps.values()) or 1.0
    least = min(float(np.abs(m.t[significant[name]]).min(initial=top)) for name, m in maps.items())
    first, last = next(iter(maps.values())), list(maps.values())[-1]
    table = clusters(last, brain.mask, affine).round(4)
    counts = ", ".join(f"{plural(int(voxels.sum()), 'voxel')} {name}" for name, voxels in significant.items())
    figure = statmap_figure(maps, mask, affine, background, slices=4)  # legible on a phone
    return {
        "column": column,
        "contrast": first.contrast,
        "sentence": (
            f"{first.n} participants, covariates adjusted. Significant at p < 0.001 after Bonferroni: "
            f"{counts}, of {int(first.tested.sum())} tested. The harmonized map takes site effects as known, "
            "although they were estimated: where the variable is confounded with site, its t is too large."
        ),
        "svg": page_svg(figure, "statmap"),
        "alt": f"Axial slices with the significant voxels of {column}: {counts}.",
        "least": round(min(least, top), 1),
        "top": round(top, 1),
        "clusters": {str(name): table[name].tolist() for name in table},
        "viewer": viewer(brain, [m.t for m in maps.values()], top),
    }
