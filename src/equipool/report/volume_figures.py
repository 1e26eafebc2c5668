"""Figures of volumes: slices by scanner and age, harmonized beside raw and clean, ages by scanner, t-maps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equipool.benchmark.runs import file_stem
from equipool.report.figures import COLOURS, plain, save_figure
from equipool.report.statmap_figures import statmap_figure, write_statmap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from equipool.benchmark.harmonized_images import VolumeResult
    from equipool.data.pooled import PooledDataset
    from equipool.data.volumes import Volumes

__all__ = ["ages_figure", "harmonized_figure", "slices_figure", "volume_figures"]

SHOWN_MAPS = ("naive pool", "combat-gain", "ours")


def volume_figures(result: VolumeResult, out: Path) -> list[Path]:
    """Draw a cohort and what was made of it; write t-maps as NIfTI files. Return the figures."""
    stem = file_stem(result.name)
    volumes, pool = result.volumes, result.pool
    clean = result.truth.clean if result.truth is not None else None
    largest = max((m for m in result.maps if m.endswith(" alone")), key=lambda m: result.maps[m].n)
    shown = {name: result.maps[name] for name in (largest, *SHOWN_MAPS)}
    truth = None if result.truth is None else result.truth.direction
    unaffected = None if result.truth is None else result.truth.unaffected
    background = volumes.unmask(_mean(result.harmonized))
    for name, found in result.maps.items():
        label = name.replace(" ", "_").replace(",", "")
        write_statmap(out / f"{stem}-tmaps", label, found, volumes.mask, volumes.affine, mni=True)
    figures = {
        "slices": slices_figure(pool, volumes),
        "harmonized": harmonized_figure(pool, volumes, result.harmonized, clean),
        "ages": ages_figure(pool),
        "tmaps": statmap_figure(
            shown, volumes.mask, volumes.affine, background, truth=truth, unaffected=unaffected
        ),
    }
    return [save_figure(figure, out / f"{stem}-{name}.png") for name, figure in figures.items()]


def slices_figure(pool: PooledDataset, volumes: Volumes) -> Figure:
    """Draw one person of each scanner in each of three age groups, as the scanner gave them."""
    from matplotlib.figure import Figure

    age = pool.C[:, 0]
    wanted = np.quantile(age, [0.05, 0.5, 0.95])
    figure = Figure(figsize=(2.2 * len(wanted) * 2, 2.6 * len(pool.sites)), layout="constrained")
    axes = figure.subplots(len(pool.sites), 2 * len(wanted), squeeze=False)
    for row, site in enumerate(pool.sites):
        rows = np.flatnonzero(pool.site == row)
        for column, goal in enumerate(wanted):
            person = rows[np.argmin(np.abs(age[rows] - goal))]
            values = volumes.read([int(person)])[0]
            title = f"{site}, {age[person]:.0f} years, {'' if pool.y is None else pool.y[person]}"
            _draw_two(
                axes[row, 2 * column : 2 * column + 2], volumes.unmask(values / np.median(values)), title
            )
    return figure


def harmonized_figure(
    pool: PooledDataset, volumes: Volumes, harmonized: Volumes, clean: Volumes | None
) -> Figure:
    """Draw one person of each scanner: raw, harmonized, what was changed, and the clean volume if known."""
    from matplotlib.figure import Figure

    names = ["raw", "harmonized", "what was taken out", *(["clean"] if clean is not None else [])]
    figure = Figure(figsize=(4.2 * len(names), 2.6 * len(pool.sites)), layout="constrained")
    axes = figure.subplots(len(pool.sites), 2 * len(names), squeeze=False)
    for row, site in enumerate(pool.sites):
        rows = np.flatnonzero(pool.site == row)
        person = int(rows[np.argsort(pool.C[rows, 0])[len(rows) // 2]])
        raw, better = (v.read([person])[0] / np.median(v.read([person])) for v in (volumes, harmonized))
        shown = [raw, better, raw - better]
        if clean is not None:
            shown.append(clean.read([person])[0] / np.median(clean.read([person])))
        for k, (name, values) in enumerate(zip(names, shown, strict=True)):
            box = volumes.unmask(values)
            _draw_two(
                axes[row, 2 * k : 2 * k + 2], box, f"{site}: {name}", difference=name.startswith("what")
            )
    return figure


def ages_figure(pool: PooledDataset) -> Figure:
    """Draw the density of the first covariate by scanner."""
    from matplotlib.figure import Figure
    from scipy.stats import gaussian_kde

    figure = Figure(figsize=(5.5, 3), layout="constrained")
    axes = figure.subplots()
    values = pool.C[:, 0]
    grid = np.linspace(values.min(), values.max(), 200)
    for k, site in enumerate(pool.sites):
        own = values[pool.site == k]
        if len(own) > 1 and np.ptp(own) > 0:
            colour = COLOURS[k % len(COLOURS)]
            axes.plot(grid, gaussian_kde(own)(grid), color=colour, label=f"{site} ({len(own)})")
    axes.set(xlabel=plain(pool.covariate_names[0]), ylabel="density", yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _draw_two(axes: Any, box: NDArray[np.float32], title: str, *, difference: bool = False) -> None:
    """Draw an axial slice through the ventricles and a coronal one through the hippocampus."""
    _, y, z = box.shape
    limits: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 1.6}
    if difference:
        limits = {"cmap": "RdBu_r", "vmin": -0.3, "vmax": 0.3}
    for axis, part in zip(axes, (box[:, :, z // 2], box[:, int(0.48 * y), :]), strict=True):
        axis.imshow(part.T, origin="lower", interpolation="nearest", **limits)
        axis.set_axis_off()
    axes[0].set_title(plain(title), fontsize=8, loc="left")


def _mean(volumes: Volumes) -> NDArray[np.float64]:
    total = sum(rows.sum(axis=0, dtype=np.float64) for rows in volumes.blocks())
    mean: NDArray[np.float64] = np.asarray(total) / len(volumes)
    return mean
