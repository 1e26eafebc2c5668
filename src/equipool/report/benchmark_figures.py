"""Figures of the benchmark: τ as a map coloured by age, the age trend, and what less overlap costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from equipool.benchmark.runs import file_stem
from equipool.report.figures import COLOURS, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["benchmark_figures", "frontier_figure", "overlap_figure", "support_figure", "tau_figure"]

MAPPED = 800  # people in a t-SNE map
OVERLAP = "adult-overlap-"
HARD = "-hard"  # the same cohort with ages that do not overlap


def benchmark_figures(runs: pd.DataFrame, out: Path) -> list[Path]:
    """Draw what can be drawn from the runs in a folder and return the files."""
    figures = []
    for dataset, part in runs.groupby("dataset", sort=False):
        methods = [m for m in ("naive", "paper", "ours") if m in set(part["method"])]
        files = part[part["seed"] == 0].set_index("method")["tau_file"]
        vectors = {m: out / "runs" / files[m] for m in methods if m in files}
        found = {m: dict(np.load(path)) for m, path in vectors.items() if path.is_file()}
        if found and not str(dataset).startswith(OVERLAP):
            ranks = part.groupby("method")["age_rank"].mean()
            figures.append(save_figure(tau_figure(found, ranks), out / f"{file_stem(str(dataset))}-tau.png"))
    for hard in sorted({d for d in runs["dataset"] if str(d).endswith(HARD)}):
        easy = hard.removesuffix(HARD)
        if easy in set(runs["dataset"]):
            part = runs[runs["dataset"].isin([easy, hard])]
            figures.append(save_figure(support_figure(part), out / f"{file_stem(easy)}-support.png"))
    shifted = runs[runs["dataset"].str.startswith(OVERLAP)]
    if len(set(shifted["dataset"])) > 1:
        figures.append(save_figure(overlap_figure(shifted), out / "overlap.png"))
    return figures


def tau_figure(vectors: dict[str, dict[str, Any]], ranks: pd.Series[float]) -> Figure:
    """Draw t-SNE maps of τ coloured by age group, and below each the age that is read from τ.

    The number is the rank correlation of the age read with the true one, mean of all seeds.
    """
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    figure = Figure(figsize=(4 * len(vectors), 7), layout="constrained")
    axes = figure.subplots(2, len(vectors), squeeze=False)
    age = next(iter(vectors.values()))["age"]
    edges = np.unique(np.quantile(age, [0, 0.2, 0.4, 0.6, 0.8, 1]))
    shades = _shades(len(edges) - 1)
    for k, (method, data) in enumerate(vectors.items()):
        group = np.clip(np.searchsorted(edges, data["age"], side="right") - 1, 0, len(edges) - 2)
        some = np.linspace(0, len(data["age"]) - 1, min(len(data["age"]), MAPPED)).astype(int)
        perplexity = min(30, (len(some) - 1) / 3)
        flat = TSNE(random_state=0, perplexity=perplexity, init="pca").fit_transform(data["tau"][some])
        for g, shade in enumerate(shades):
            own = group[some] == g
            label = f"{edges[g]:.0f} to {edges[g + 1]:.0f}"
            axes[0, k].plot(*flat[own].T, ".", color=shade, markersize=4, label=label)
        axes[0, k].set(xticks=[], yticks=[])
        axes[0, k].set_title(f"τ of {method}, t-SNE", fontsize=10)
        _draw_trend(axes[1, k], data, group, shades)
        axes[1, k].set_title(f"rank correlation {ranks[method]:.2f}", fontsize=10)
    axes[1, 0].set_ylabel("age read from τ, cross-fitted")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="age", loc="outside right upper", frameon=False, markerscale=2)
    return figure


def overlap_figure(runs: pd.DataFrame) -> Figure:
    """Draw how well the site is read, M, accuracy and dropped people against the overlap of ages."""
    from matplotlib.figure import Figure

    shown = {
        "classifier_auc": "best site classifier's AUC",
        "mmd": "M × 100",
        "acc": "accuracy, %",
        "dropped": "people without a counterpart",
    }
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    axes = figure.subplots(1, len(shown))
    overlap = runs["dataset"].str.removeprefix(OVERLAP).astype(float)
    for line, (column, title) in zip(axes, shown.items(), strict=True):
        for k, (method, part) in enumerate(runs.groupby("method", sort=False)):
            by = part.groupby(overlap[part.index])[column]
            mean, low, high = by.mean(), by.min(), by.max()
            colour = COLOURS[k % len(COLOURS)]
            line.plot(mean.index, mean, "o-", color=colour, label=method, markersize=4)
            line.fill_between(mean.index, low, high, color=colour, alpha=0.2, linewidth=0)
        line.set(title=title, xlabel="overlap of the sites' ages", xticks=sorted(set(overlap)))
        line.invert_xaxis()
        line.spines[["top", "right"]].set_visible(False)
    axes[0].axhline(0.5, color="black", linestyle=":", linewidth=1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def support_figure(runs: pd.DataFrame) -> Figure:
    """Draw M, the best classifier's accuracy and dropped people where ages overlap and where they do not."""
    from matplotlib.figure import Figure

    shown = {
        "mmd": "M × 100",
        "classifier_acc": "best site classifier, %",
        "dropped": "people without a counterpart",
    }
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    methods = list(dict.fromkeys(runs["method"]))
    place = np.arange(len(methods))
    for axes, (column, title) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for k, (dataset, part) in enumerate(runs.groupby("dataset", sort=True)):
            by = part.groupby("method")[column]
            label = "ages apart" if str(dataset).endswith(HARD) else "ages overlap"
            axes.bar(
                place + 0.4 * (k - 0.5),
                by.mean()[methods],
                0.38,
                yerr=by.std(ddof=0)[methods],
                color=COLOURS[k],
                label=label,
            )
        axes.set(title=title, xticks=place, xticklabels=methods)
        axes.tick_params(axis="x", rotation=30)
        axes.spines[["top", "right"]].set_visible(False)
        if column == "classifier_acc":
            axes.axhline(runs["adv_chance"].mean(), color="black", linestyle=":", linewidth=1)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
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
NARROWEST = 0.1  # of the axis of the site: less is not worth telling apart


def frontier_figure(folds: pd.DataFrame) -> Figure:
    """Draw harmonizers between site and biology: the better, the further to the upper left."""
    from matplotlib.figure import Figure

    tables = list(dict.fromkeys(folds["table"]))
    handles: dict[str, Any] = {}
    rows = {"age": "age, R²", "lso": "age on sites left out, R²"}
    figure = Figure(figsize=(4 * len(tables) + 1, 6.6), layout="constrained")
    axes = figure.subplots(2, len(tables), squeeze=False, sharex="col")
    for (row, column), line in np.ndenumerate(axes):
        part = folds[folds["table"] == tables[column]]
        repeats = part.groupby(["method", "repeat"], sort=False)[["adv", list(rows)[row]]].mean()
        for method, points in repeats.groupby(level="method", sort=False):
            x, y = points["adv"], points[list(rows)[row]]
            colour, mark, inside = FRONTIER.get(str(method), (COLOURS[6], "o", "white"))
            handles[str(method)] = line.errorbar(
                [x.mean()],
                [y.mean()],
                xerr=_bars(x),
                yerr=_bars(y),
                fmt=mark,
                color=colour,
                markerfacecolor=inside,
                markersize=12 if mark == "*" else 7,
            )
        line.axvline(part["adv_age"].mean(), color="black", linestyle=":", linewidth=1)
        low, high = line.get_xlim()
        line.set_xlim(min(low, (low + high - NARROWEST) / 2), max(high, (low + high + NARROWEST) / 2))
        line.set(ylabel=list(rows.values())[row] if column == 0 else "")
        line.set(
            **({"title": tables[column]} if row == 0 else {"xlabel": "site is read (balanced accuracy)"})
        )
        line.spines[["top", "right"]].set_visible(False)
    figure.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False)
    return figure


def _bars(values: pd.Series[float]) -> list[list[float]]:
    """Return how far the values reach below and above their mean; rounding must not make it negative."""
    mean = values.mean()
    return [[max(mean - values.min(), 0.0)], [max(values.max() - mean, 0.0)]]


def _draw_trend(axes: Any, data: dict[str, Any], group: Any, shades: list[Any]) -> None:
    """Draw the age that a ridge regression reads from τ, on people it was not fitted on, by true age."""
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import cross_val_predict

    read = cross_val_predict(RidgeCV(np.logspace(-3, 3, 7)), data["tau"], data["age"], cv=5)
    for g, shade in enumerate(shades):
        axes.plot(data["age"][group == g], read[group == g], ".", color=shade, markersize=2, alpha=0.5)
    order = pd.qcut(data["age"], 12, duplicates="drop")
    means = pd.DataFrame({"age": data["age"], "read": read}).groupby(order, observed=True).mean()
    axes.plot(means["age"], means["read"], "o-", color="black", markersize=3, linewidth=1.5)
    low, high = data["age"].min(), data["age"].max()
    axes.plot([low, high], [low, high], ":", color="black", linewidth=1)
    axes.set(xlabel="age", ylim=(low, high))
    axes.spines[["top", "right"]].set_visible(False)


def _shades(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(0, 0.92, count)]
