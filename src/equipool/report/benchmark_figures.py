"""Figures of the benchmark: τ by age, less overlap, and harmonizers compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import cross_val_predict

from equipool.benchmark.runs import file_stem
from equipool.report.figure_tables import embedding
from equipool.report.style import COLOURS, LIGHT, SHADES, save_figure, spread, styled

MAPPED = 800  # rows in a t-SNE map
OVERLAP = "adult-overlap-"
HARD = "-hard"  # the same cohort with ages that do not overlap


def benchmark_figures(runs: pd.DataFrame, out: Path) -> list[Path]:
    """Draw what can be drawn from the runs in a folder and return the files."""
    figures, names = {}, set(runs["dataset"])
    for dataset, part in runs.groupby("dataset", sort=False):
        stem = file_stem(str(dataset))
        files = part[part["seed"] == 0].set_index("method")["tau_file"]
        paths = {m: out / "runs" / files[m] for m in ("naive", "paper", "ours") if m in files}
        vectors = {m: dict(np.load(path)) for m, path in paths.items() if path.is_file()}
        if vectors and not str(dataset).startswith(OVERLAP):
            figures[f"{stem}-tau"] = tau_figure(vectors, part.groupby("method")["age_rank"].mean())
    shifted = {  # by figure: datasets that differ in the overlap of ages alone, and their labels
        f"{file_stem(easy)}-support": {easy: "ages overlap", easy + HARD: "ages apart"}
        for easy in sorted(name for name in names if name + HARD in names)
    }
    shares = sorted((float(n.removeprefix(OVERLAP)) for n in names if n.startswith(OVERLAP)), reverse=True)
    if len(shares) > 1:
        shifted["overlap"] = {f"{OVERLAP}{share:g}": f"{share:.0%}" for share in shares}
    figures |= {name: overlap_figure(runs, labels) for name, labels in shifted.items()}
    return [save_figure(figure, out / f"{name}.png") for name, figure in figures.items()]


@styled
def tau_figure(vectors: dict[str, dict[str, Any]], ranks: pd.Series[float]) -> Figure:
    """Draw t-SNE maps of τ coloured by age group, and below each the age predicted from τ.

    The number is the rank correlation of predicted with true age, mean of all seeds.
    """
    figure = Figure(figsize=(4 * len(vectors), 7), layout="constrained")
    axes = figure.subplots(2, len(vectors), squeeze=False)
    for (above, below), (method, data) in zip(axes.T, vectors.items(), strict=True):
        some = np.linspace(0, len(data["age"]) - 1, min(len(data["age"]), MAPPED)).astype(int)
        places = embedding(data["tau"][some])
        age, groups = data["age"], pd.qcut(data["age"], 5, duplicates="drop")
        predicted = cross_val_predict(RidgeCV(np.logspace(-3, 3, 7)), data["tau"], age, cv=5)
        for k, shade in enumerate(spread(SHADES, len(groups.categories))):
            rows, limits = groups.codes == k, groups.categories[k]
            label = f"{limits.left:.0f} to {limits.right:.0f}"
            above.plot(*places[rows[some]].T, "o", color=shade, ms=3, label=label)
            below.plot(age[rows], predicted[rows], "o", color=shade, ms=2, alpha=0.5)
        bins = pd.qcut(age, 12, duplicates="drop")
        means = pd.DataFrame({"age": age, "predicted": predicted}).groupby(bins, observed=True).mean()
        below.plot(means["age"], means["predicted"], "o-", color=LIGHT["ink"], ms=3)
        below.plot([age.min(), age.max()], [age.min(), age.max()], ":", color=LIGHT["ink"], linewidth=1)
        above.set(xticks=[], yticks=[], title=f"τ of {method}, t-SNE")
        title = f"rank correlation {ranks[method]:.2f}"
        below.set(xlabel="age", ylim=(age.min(), age.max()), title=title)
    axes[1, 0].set_ylabel("age predicted from τ, cross-fitted")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, title="age", loc="outside right upper", markerscale=2)
    return figure


MEASURES = {
    "classifier_auc": "best site classifier's AUC",
    "mmd": "M × 100",
    "acc": "accuracy, %",
    "dropped": "rows without a counterpart",
}


@styled
def overlap_figure(runs: pd.DataFrame, labels: dict[str, str]) -> Figure:
    """Draw means of measures over seeds, and their range, on datasets by their labels, a line a method."""
    figure = Figure(figsize=(3.6 * len(MEASURES), 3.4), layout="constrained")
    for axes, (column, title) in zip(figure.subplots(1, len(MEASURES)), MEASURES.items(), strict=True):
        for colour, (method, part) in zip(COLOURS, runs.groupby("method", sort=False), strict=False):
            by = part.groupby("dataset")[column].agg(["mean", "min", "max"]).reindex([*labels]).rename(labels)
            axes.plot(by["mean"], "o-", color=colour, label=method, ms=4)
            axes.fill_between(by.index, by["min"], by["max"], color=colour, alpha=0.2, linewidth=0)
        axes.set(title=title, xlabel="overlap of the sites' ages")
    figure.axes[0].axhline(0.5, color=LIGHT["ink"], linestyle=":", linewidth=1)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return figure


# Colour, mark and inside of each harmonizer.
FRONTIER = {
    "raw": (COLOURS[6], "s", COLOURS[6]),
    "ours": (COLOURS[0], "*", COLOURS[0]),
    "ours-y": (COLOURS[0], "*", "none"),
    "clean": ("black", "P", "black"),
}
PEERS = ("combat", "combat-gam", "combat-nocov", "covbat", "covbat-gam")
FRONTIER |= {name: (COLOURS[k], "o", COLOURS[k]) for k, name in enumerate(PEERS, start=1)}
FRONTIER_MEASURES = {"age": "age, R²", "lso": "age at left-out sites, R²"}
NARROWEST = 0.1  # of the axis of the site: a smaller difference is not worth telling apart


@styled
def frontier_figure(folds: pd.DataFrame) -> Figure:
    """Draw harmonizers between site and biology: the better, the further to the upper left."""
    tables = list(dict.fromkeys(folds["table"]))
    handles: dict[str, Any] = {}
    figure = Figure(figsize=(4 * len(tables) + 1, 6.6), layout="constrained")
    axes = figure.subplots(2, len(tables), squeeze=False, sharex="col")
    for row, (measure, label) in zip(axes, FRONTIER_MEASURES.items(), strict=True):
        row[0].set_ylabel(label)
        for line, table in zip(row, tables, strict=True):
            part = folds[folds["table"] == table]
            repeats = part.groupby(["method", "repeat"], sort=False)[["adv", measure]].mean()
            for method, points in repeats.groupby(level="method", sort=False):
                colour, mark, inside = FRONTIER.get(str(method), (COLOURS[6], "o", "white"))
                middle = points.mean()
                reach = np.abs(points.agg(["min", "max"]) - middle)
                error = {"xerr": reach[["adv"]], "yerr": reach[[measure]]}
                style: dict[str, Any] = {"color": colour, "mfc": inside, "mew": 1, "fmt": mark}
                style["ms"] = 12 if mark == "*" else 7
                handles[str(method)] = line.errorbar(*middle, **error, **style)
            line.axvline(part["adv_age"].mean(), color=LIGHT["ink"], linestyle=":", linewidth=1)
            low, high = line.get_xlim()
            line.set_xlim(min(low, (low + high - NARROWEST) / 2), max(high, (low + high + NARROWEST) / 2))
    for column, table in enumerate(tables):
        axes[0, column].set_title(table)
        axes[1, column].set_xlabel("prediction of the site (balanced accuracy)")
    figure.legend(list(handles.values()), list(handles), loc="outside right center")
    return figure
