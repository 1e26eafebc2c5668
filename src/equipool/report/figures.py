"""Figures. Colours are those of Okabe and Ito, which colour-blind people can tell apart."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equipool.checks import PreflightReport
from equipool.data import PooledDataset
from equipool.exceptions import InputError
from equipool.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_figure_path", "pooling_figure", "preflight_figure", "save_figure"]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#5C5C5C")
SITES_SHOWN = 30
FORMATS = (".png", ".svg", ".pdf")


def preflight_figure(report: PreflightReport) -> Figure:
    """Draw who is where: rows per site, each covariate's spread by site, and who overlaps with whom."""
    from matplotlib.figure import Figure

    names = [name for name in report.inputs.covariate_names if name in report.overlap]
    shown = report.sites.sort_values("rows", ascending=False).index[:SITES_SHOWN]
    rows = max(len(names), 1)
    # The rows of a figure grow with the sites, or labels would run into each other.
    height = max(2.6, 0.3 * len(shown) + 1.2)
    figure = Figure(figsize=(11, height * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False, width_ratios=(1, 1.6, 1.2))
    for k, line in enumerate(axes):
        _draw_sizes(line[0], report, list(shown)) if k == 0 else line[0].set_axis_off()
        if k < len(names):
            _draw_spread(line[1], report, names[k], list(shown))
            _draw_overlap(line[2], report, names[k], list(shown))
        else:
            line[1].set_axis_off(), line[2].set_axis_off()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=8, fontsize=8, frameon=False)
    figure.suptitle(report.verdict, fontsize=11, x=0.01, ha="left")
    return figure


def pooling_figure(
    pool: PooledDataset, harmonized: Any, feature: str, readings: dict[str, float], chance: float
) -> Figure:
    """Draw one feature against the first covariate before and after, and how well the site can be read."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    before, after, bars = figure.subplots(1, 3, width_ratios=(1.3, 1.3, 1))
    k = pool.feature_names.index(feature)
    covariate = pool.covariates[0]
    for axes, values, title in ((before, pool.features, "as measured"), (after, harmonized, "harmonized")):
        for s, site in enumerate(pool.sites):
            own = pool.site == s
            colour = COLOURS[s % len(COLOURS)]
            axes.plot(
                pool.C[own, 0], values[own, k], ".", color=colour, markersize=4, alpha=0.7, label=plain(site)
            )
        axes.set_xlabel(f"{plain(covariate.name)} ({covariate.unit})" if covariate.unit else covariate.name)
        axes.set_title(f"{plain(feature)}, {title}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    after.sharey(before)
    before.legend(fontsize=8, frameon=False)
    bars.barh(list(readings), list(readings.values()), color=COLOURS[: len(readings)])
    bars.axvline(chance, color="black", linestyle=":", linewidth=1)
    bars.text(chance, -0.75, " chance", fontsize=8, va="center")
    bars.set_ylim(len(readings) - 0.4, -1)
    bars.set_xlim(0, 1)
    bars.set_title("How well the site is read (AUC)", fontsize=10)
    bars.spines[["top", "right"]].set_visible(False)
    return figure


def check_figure_path(path: Path) -> None:
    """Refuse a path that no figure can be written to, before anything is computed."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path.name} is no picture that equipool writes; end it in {', '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: the folder {path.parent} does not exist; make it first.")


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure; the format follows the file's ending."""
    check_figure_path(path)
    with warnings.catch_warnings():
        # Names in a script that the font lacks are drawn as boxes; that is no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        kind, content = path.suffix.lower().removeprefix("."), io.BytesIO()
        figure.savefig(content, format=kind, dpi=150, metadata={"Software": None} if kind == "png" else None)
    return write_whole(path, content.getvalue())


def _draw_sizes(axes: Axes, report: PreflightReport, shown: list[str]) -> None:
    """Draw people per site as bars, split by class where there is a target."""
    prefix = f"{report.inputs.target_name}="
    classes = [column for column in report.sites.columns if column.startswith(prefix)]
    table = report.sites.loc[shown]
    left = np.zeros(len(shown))
    for k, column in enumerate(classes or ["rows"]):
        width = table[column].to_numpy(dtype=float)
        label = plain(column.replace("=", " = ", 1)) if classes else None
        axes.barh(range(len(shown)), width, left=left, color=COLOURS[k % len(COLOURS)], label=label)
        left += width
    _site_axis(axes, shown)
    axes.set_xlabel("people")
    axes.set_title("Who was scanned where", fontsize=10)


def _draw_spread(axes: Axes, report: PreflightReport, name: str, shown: list[str]) -> None:
    """Draw each site's density of one covariate above its people."""
    values = report.inputs.covariates[:, report.inputs.covariate_names.index(name)]
    rng = np.random.default_rng(0)
    for k, site in enumerate(shown):
        own = values[(report.inputs.site == site) & np.isfinite(values)]
        colour = COLOURS[k % len(COLOURS)]
        centres, density = _density(own, values[np.isfinite(values)])
        axes.fill_between(centres, k, k - 0.75 * density, color=colour, alpha=0.5, linewidth=0)
        axes.plot(own, k + rng.uniform(0.04, 0.2, len(own)), ".", color=colour, markersize=2, alpha=0.6)
    _site_axis(axes, shown)
    axes.set_xlabel(plain(name))
    share = report.common[name]
    axes.set_title(f"{share:.0%} of people lie where all sites have somebody", fontsize=10)


def _density(own: Any, everybody: Any) -> tuple[Any, Any]:
    """Return a smoothed histogram of own values, its peak at 1."""
    low, high = everybody.min(), everybody.max()
    centres = np.linspace(low, high, 200)
    width = max(np.std(own) * max(len(own), 1) ** -0.2, (high - low) / 60)
    density = np.exp(-0.5 * ((centres[:, None] - own) / width) ** 2).sum(axis=1)
    inside = (centres >= own.min() - width) & (centres <= own.max() + width)
    density = np.where(inside, density, 0)
    return centres, density / max(density.max(), 1e-12)


def _draw_overlap(axes: Axes, report: PreflightReport, name: str, shown: list[str]) -> None:
    """Draw the pairwise overlap of support as a matrix with its numbers."""
    matrix = report.overlap[name].loc[shown, shown].to_numpy()
    axes.imshow(matrix, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    if len(shown) <= 10:
        for (i, j), value in np.ndenumerate(matrix):
            colour = "white" if value > 0.6 else "black"
            axes.text(j, i, f"{value:.0%}", ha="center", va="center", fontsize=8, color=colour)
    _site_axis(axes, shown)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    labels = axes.get_yticklabels() if len(shown) <= 10 else []
    axes.set_xticks(range(len(labels)), [label.get_text() for label in labels], fontsize=8)
    axes.tick_params(axis="x", rotation=45 if len(shown) > 4 or max(map(len, shown)) > 10 else 0)
    axes.set_title(f"Shared range of {plain(name, longest=20)}, share of people", fontsize=10)


def plain(name: str, *, longest: int = 40) -> str:
    """Return a name that matplotlib draws as it is: a dollar sign would start a formula."""
    short = name if len(name) <= longest else name[: longest - 1] + "…"
    return short.replace("\\", "\\\\").replace("$", r"\$") if "$" in short else short


def _site_axis(axes: Axes, shown: list[str]) -> None:
    axes.set_yticks(range(len(shown)), [plain(site, longest=16) for site in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.9)
    axes.spines[["top", "right"]].set_visible(False)
