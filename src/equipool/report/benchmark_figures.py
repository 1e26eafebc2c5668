"""Figures of the benchmark: τ by age, the cost of less overlap, harmonizers compared, and harmonized images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from equipool.benchmark.harmonized_images import VolumeResult
from equipool.benchmark.table1 import file_stem
from equipool.data import PooledDataset, Volumes
from equipool.report.brain_figures import draw_two_slices
from equipool.report.figure_tables import density_table, embedding
from equipool.report.statmap_figures import statmap_figure, write_statmap
from equipool.report.style import COLOURS, LIGHT, SHADES, save_figure, shortened, styled

__all__ = [
    "benchmark_figures",
    "frontier_figure",
    "overlap_figure",
    "support_figure",
    "tau_figure",
    "volume_figures",
]

MAPPED = 800  # rows in a t-SNE map
OVERLAP = "adult-overlap-"
HARD = "-hard"  # the same cohort with ages that do not overlap
SHOWN_MAPS = ("naive pool", "combat-gain", "ours")


def benchmark_figures(runs: pd.DataFrame, out: Path) -> list[Path]:
    """Draw what can be drawn from the runs in a folder and return the files."""
    figures: dict[str, Figure] = {}
    for dataset, part in runs.groupby("dataset", sort=False):
        stem = file_stem(str(dataset))
        methods = [m for m in ("naive", "paper", "ours") if m in set(part["method"])]
        paths = {m: out / "runs" / f"{stem}-{m}-0.npz" for m in methods}
        vectors = {m: dict(np.load(path)) for m, path in paths.items() if path.is_file()}
        if vectors and not str(dataset).startswith(OVERLAP):
            figures[f"{stem}-tau"] = tau_figure(vectors, part.groupby("method")["age_rank"].mean())
    for hard in sorted({d for d in runs["dataset"] if str(d).endswith(HARD)}):
        easy = hard.removesuffix(HARD)
        if easy in set(runs["dataset"]):
            part = runs[runs["dataset"].isin([easy, hard])]
            figures[f"{file_stem(easy)}-support"] = support_figure(part)
    shifted = runs[runs["dataset"].str.startswith(OVERLAP)]
    if len(set(shifted["dataset"])) > 1:
        figures["overlap"] = overlap_figure(shifted)
    return [save_figure(figure, out / f"{name}.png") for name, figure in figures.items()]


@styled
def tau_figure(vectors: dict[str, dict[str, Any]], ranks: pd.Series[float]) -> Figure:
    """Draw t-SNE maps of τ coloured by age group, and below each the age predicted from τ.

    The number is the rank correlation of predicted with true age, mean of all seeds.
    """
    figure = Figure(figsize=(4 * len(vectors), 7))
    axes = figure.subplots(2, len(vectors), squeeze=False)
    age = next(iter(vectors.values()))["age"]
    edges = np.unique(np.quantile(age, [0, 0.2, 0.4, 0.6, 0.8, 1]))
    shades = [SHADES[k] for k in np.linspace(0, len(SHADES) - 1, len(edges) - 1).round().astype(int)]
    for k, (method, data) in enumerate(vectors.items()):
        group = np.clip(np.searchsorted(edges, data["age"], side="right") - 1, 0, len(edges) - 2)
        some = np.linspace(0, len(data["age"]) - 1, min(len(data["age"]), MAPPED)).astype(int)
        places = embedding(data["tau"][some])
        for g, shade in enumerate(shades):
            label = f"{edges[g]:.0f} to {edges[g + 1]:.0f}"
            axes[0, k].plot(*places[group[some] == g].T, ".", color=shade, ms=4, label=label)
        axes[0, k].set(xticks=[], yticks=[], title=f"τ of {method}, t-SNE")
        _draw_trend(axes[1, k], data, group, shades)
        axes[1, k].set_title(f"rank correlation {ranks[method]:.2f}")
    axes[1, 0].set_ylabel("age predicted from τ, cross-fitted")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="age", loc="outside right upper", markerscale=2)
    return figure


def _draw_trend(axes: Axes, data: dict[str, Any], group: NDArray[np.intp], shades: list[str]) -> None:
    """Draw the age that a ridge regression predicts from τ, on rows it was not fitted on, by true age."""
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import cross_val_predict

    age = data["age"]
    predicted = cross_val_predict(RidgeCV(np.logspace(-3, 3, 7)), data["tau"], age, cv=5)
    for g, shade in enumerate(shades):
        axes.plot(age[group == g], predicted[group == g], ".", color=shade, ms=2, alpha=0.5)
    means = pd.DataFrame({"age": age, "predicted": predicted})
    means = means.groupby(pd.qcut(age, 12, duplicates="drop"), observed=True).mean()
    axes.plot(means["age"], means["predicted"], "o-", color=LIGHT["ink"], ms=3, linewidth=1.5)
    axes.plot([age.min(), age.max()], [age.min(), age.max()], ":", color=LIGHT["ink"], linewidth=1)
    axes.set(xlabel="age", ylim=(age.min(), age.max()))


@styled
def overlap_figure(runs: pd.DataFrame) -> Figure:
    """Draw prediction of the site, M, accuracy and dropped rows against the overlap of ages."""
    shown = {
        "reader_auc": "best site classifier's AUC",
        "mmd": "M × 100",
        "acc": "accuracy, %",
        "dropped": "rows without a counterpart",
    }
    figure = Figure(figsize=(13, 3.4))
    axes = figure.subplots(1, len(shown))
    overlap = runs["dataset"].str.removeprefix(OVERLAP).astype(float)
    for line, (column, title) in zip(axes, shown.items(), strict=True):
        for k, (method, part) in enumerate(runs.groupby("method", sort=False)):
            by, colour = part.groupby(overlap[part.index])[column], COLOURS[k % len(COLOURS)]
            line.plot(by.mean(), "o-", color=colour, label=method, ms=4)
            line.fill_between(by.min().index, by.min(), by.max(), color=colour, alpha=0.2, linewidth=0)
        line.set(title=title, xlabel="overlap of the sites' ages", xticks=sorted(set(overlap)))
        line.invert_xaxis()
    axes[0].axhline(0.5, color=LIGHT["ink"], linestyle=":", linewidth=1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


@styled
def support_figure(runs: pd.DataFrame) -> Figure:
    """Draw M, the best classifier's accuracy and dropped rows where ages overlap and where they do not."""
    shown = {
        "mmd": "M × 100",
        "reader_acc": "best site classifier, %",
        "dropped": "rows without a counterpart",
    }
    figure = Figure(figsize=(12, 3.2))
    methods = list(dict.fromkeys(runs["method"]))
    place = np.arange(len(methods))
    for axes, (column, title) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for k, (dataset, part) in enumerate(runs.groupby("dataset", sort=True)):
            by = part.groupby("method")[column]
            label = "ages apart" if str(dataset).endswith(HARD) else "ages overlap"
            style: dict[str, Any] = {"yerr": by.std(ddof=0)[methods], "color": COLOURS[k], "label": label}
            axes.bar(place + 0.4 * (k - 0.5), by.mean()[methods], 0.38, **style)
        axes.set(title=title, xticks=place, xticklabels=methods)
        axes.tick_params(axis="x", rotation=30)
        if column == "reader_acc":
            axes.axhline(runs["adv_chance"].mean(), color=LIGHT["ink"], linestyle=":", linewidth=1)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return figure


# Colour, mark and inside of each harmonizer.
FRONTIER = {
    "raw": (COLOURS[6], "s", COLOURS[6]),
    "combat-nocov": (COLOURS[3], "o", COLOURS[3]),
    "combat": (COLOURS[1], "o", COLOURS[1]),
    "combat-gam": (COLOURS[2], "o", COLOURS[2]),
    "covbat": (COLOURS[4], "o", COLOURS[4]),
    "covbat-gam": (COLOURS[5], "o", COLOURS[5]),
    "ours": (COLOURS[0], "*", COLOURS[0]),
    "ours-y": (COLOURS[0], "*", "none"),
    "clean": ("black", "P", "black"),
}
NARROWEST = 0.1  # of the axis of the site: a smaller difference is not worth telling apart


@styled
def frontier_figure(folds: pd.DataFrame) -> Figure:
    """Draw harmonizers between site and biology: the better, the further to the upper left."""
    tables = list(dict.fromkeys(folds["table"]))
    handles: dict[str, Any] = {}
    measures = {"age": "age, R²", "lso": "age at left-out sites, R²"}
    figure = Figure(figsize=(4 * len(tables) + 1, 6.6))
    axes = figure.subplots(2, len(tables), squeeze=False, sharex="col")
    for (row, column), line in np.ndenumerate(axes):
        part = folds[folds["table"] == tables[column]]
        measure = list(measures)[row]
        repeats = part.groupby(["method", "repeat"], sort=False)[["adv", measure]].mean()
        for method, points in repeats.groupby(level="method", sort=False):
            colour, mark, inside = FRONTIER.get(str(method), (COLOURS[6], "o", "white"))
            (x, xerr), (y, yerr) = _mean_and_range(points["adv"]), _mean_and_range(points[measure])
            style: dict[str, Any] = {
                "color": colour,
                "markerfacecolor": inside,
                "ms": 12 if mark == "*" else 7,
            }
            handles[str(method)] = line.errorbar([x], [y], xerr=xerr, yerr=yerr, fmt=mark, **style)
        line.axvline(part["adv_age"].mean(), color=LIGHT["ink"], linestyle=":", linewidth=1)
        low, high = line.get_xlim()
        line.set_xlim(min(low, (low + high - NARROWEST) / 2), max(high, (low + high + NARROWEST) / 2))
    for line, table in zip(axes[0], tables, strict=True):
        line.set_title(table)
    for line in axes[1]:
        line.set_xlabel("prediction of the site (balanced accuracy)")
    for line, label in zip(axes[:, 0], measures.values(), strict=True):
        line.set_ylabel(label)
    figure.legend(list(handles.values()), list(handles), loc="outside right center")
    return figure


def _mean_and_range(values: pd.Series[float]) -> tuple[float, list[list[float]]]:
    """Return the mean, and how far values reach below and above it; rounding must not make that negative."""
    mean = values.mean()
    return mean, [[max(mean - values.min(), 0.0)], [max(values.max() - mean, 0.0)]]


# -- images ------------------------------------------------------------------------------------------------


def volume_figures(result: VolumeResult, out: Path) -> list[Path]:
    """Draw a cohort before and after harmonization; write t-maps as NIfTI files. Return the figures."""
    stem, volumes, pool, truth = file_stem(result.name), result.volumes, result.pool, result.truth
    largest = max((m for m in result.maps if m.endswith(" alone")), key=lambda m: result.maps[m].n)
    mean = sum(rows.sum(axis=0, dtype=np.float64) for rows in result.harmonized.blocks()) / len(volumes)
    for name, statistics in result.maps.items():
        label = name.replace(" ", "_").replace(",", "")
        write_statmap(out / f"{stem}-tmaps", label, statistics, volumes.mask, volumes.affine, mni=True)
    figures = {
        "slices": slices_figure(pool, volumes),
        "harmonized": harmonized_figure(
            pool, volumes, result.harmonized, None if truth is None else truth.clean
        ),
        "ages": ages_figure(pool),
        "tmaps": statmap_figure(
            {name: result.maps[name] for name in (largest, *SHOWN_MAPS)},
            volumes.mask,
            volumes.affine,
            volumes.unmask(np.asarray(mean)),
            truth=None if truth is None else truth.direction,
            unaffected=None if truth is None else truth.unaffected,
        ),
    }
    return [save_figure(figure, out / f"{stem}-{name}.png") for name, figure in figures.items()]


@styled
def slices_figure(pool: PooledDataset, volumes: Volumes) -> Figure:
    """Draw one participant of each scanner in each of three age groups, as the scanner gave them."""
    age = pool.C[:, 0]
    wanted = np.quantile(age, [0.05, 0.5, 0.95])
    figure = Figure(figsize=(4.4 * len(wanted), 2.6 * len(pool.sites)))
    axes = figure.subplots(len(pool.sites), 2 * len(wanted), squeeze=False)
    for row, site in enumerate(pool.sites):
        rows = np.flatnonzero(pool.site == row)
        for column, goal in enumerate(wanted):
            one = int(rows[np.argmin(np.abs(age[rows] - goal))])
            title = f"{site}, {age[one]:.0f} years, {'' if pool.y is None else pool.y[one]}"
            box = volumes.unmask(_at_median_one(volumes, one))
            draw_two_slices(axes[row, 2 * column : 2 * column + 2], box, title)
    return figure


@styled
def harmonized_figure(
    pool: PooledDataset, volumes: Volumes, harmonized: Volumes, clean: Volumes | None
) -> Figure:
    """Draw one participant of each scanner: raw, harmonized, their difference, and the truth where there is one."""
    names = ["raw", "harmonized", "raw − harmonized", *(["clean"] if clean is not None else [])]
    figure = Figure(figsize=(4.2 * len(names), 2.6 * len(pool.sites)))
    axes = figure.subplots(len(pool.sites), 2 * len(names), squeeze=False)
    for row, site in enumerate(pool.sites):
        rows = np.flatnonzero(pool.site == row)
        one = int(rows[np.argsort(pool.C[rows, 0])[len(rows) // 2]])
        raw, better = _at_median_one(volumes, one), _at_median_one(harmonized, one)
        shown = [raw, better, raw - better, *([_at_median_one(clean, one)] if clean is not None else [])]
        for k, (name, values) in enumerate(zip(names, shown, strict=True)):
            pair = axes[row, 2 * k : 2 * k + 2]
            draw_two_slices(pair, volumes.unmask(values), f"{site}: {name}", difference=k == 2)
    return figure


def _at_median_one(volumes: Volumes, row: int) -> NDArray[np.floating]:
    values = volumes.read([row])[0]
    return np.asarray(values / np.median(values))


@styled
def ages_figure(pool: PooledDataset) -> Figure:
    """Draw the density of the first covariate by scanner."""
    figure = Figure(figsize=(5.5, 3))
    axes, name = figure.subplots(), pool.covariate_names[0]
    rows = pd.DataFrame(density_table("x", pool.site_labels, pool.C[:, 0]))
    for k, (site, part) in enumerate(rows.groupby("site", sort=False)):
        label = f"{shortened(str(site))} ({int((pool.site_labels == site).sum())})"
        axes.plot(part.iloc[:, 1], part["density"], color=COLOURS[k % len(COLOURS)], label=label)
    axes.set(xlabel=shortened(name), ylabel="density", yticks=[])
    axes.spines["left"].set_visible(False)
    axes.legend()
    return figure
