"""Figures of tables: the pre-flight figure, the demo's, and those of the report with their numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from equipool.checks import PreflightReport
from equipool.data import PooledDataset
from equipool.judge.scores import Columns
from equipool.report.account import Account
from equipool.report.figure_tables import column, density_table
from equipool.report.style import COLOURS, LIGHT, MARKERS, SHADES, page_svg, panel, shortened, spread, styled

SITES_SHOWN = 30
STAGES = {
    "before": "as measured",
    "after": "harmonized",
    "covariates": "covariates alone",
    "shuffled": "chance",
}
WHERE = {"all": "all rows", "within sites": "within sites", "left-out sites": "at left-out sites"}
SIGNS = "●■▲◆✚"  # of MARKERS, in legends of pages
LINES = ("-", "--", ":", "-.", (0, (4, 1, 1, 1, 1, 1)))


# -- drawings that the pre-flight figure and the report share ----------------------------------------------


def _style(place: int, site: str) -> dict[str, Any]:
    """Return a site's colour, and what names it in a page."""
    return {"color": COLOURS[place % len(COLOURS)], "gid": f"site:{place}:{site}"}


def _round(place: int) -> int:
    """Return how often colours have come round before a site: marks and lines then differ."""
    return place // len(COLOURS) % len(MARKERS)


def _site_axis(axes: Axes, sites: Sequence[str]) -> None:
    axes.set_yticks(range(len(sites)), [shortened(site, 16) for site in sites], fontsize=8)
    axes.set_ylim(len(sites) - 0.5, -0.9)


def _size_table(preflight: Mapping[str, Any], target: str | None) -> Columns:
    """Return the rows of each site, the largest first, and of each class of the target."""
    sites = sorted(preflight["sites"].items(), key=lambda one: -one[1]["rows"])
    names = [name for name in (sites[0][1] if sites else ()) if target and name.startswith(f"{target}=")]
    table: Columns = {"site": [site for site, _ in sites], "rows": [int(row["rows"]) for _, row in sites]}
    classes = {name.replace("=", " = ", 1): [int(row[name] or 0) for _, row in sites] for name in names}
    return table | dict(list(classes.items())[: len(COLOURS)])


def _draw_sizes(axes: Axes, sites: Sequence[str], table: Columns) -> None:
    """Draw the rows of each site as bars, split by class where there is a target."""
    rows = pd.DataFrame(table).set_index("site").iloc[: len(sites)]
    rows = rows[[*rows][1:] or ["rows"]].rename(columns=shortened)
    rows.plot.barh(stacked=True, ax=axes, width=0.7, color=list(COLOURS), legend=False)
    _site_axis(axes, sites)
    axes.set(xlabel="rows", ylabel="")


def _draw_densities(axes: Axes, sites: Sequence[str], name: str, table: Columns) -> None:
    """Draw each site's density of one covariate, its peak at full height."""
    rows = pd.DataFrame(table)
    for k, site in enumerate(sites):
        part = rows[(rows["site"] == site) & (rows["density"] > 0)]
        top = k + 0.2 - 0.9 * part["density"] / part["density"].max()
        axes.fill_between(part[column(name)], k + 0.2, top, alpha=0.55, linewidth=0, **_style(k, site))
    _site_axis(axes, sites)
    axes.set_xlabel(shortened(name))


def _draw_overlap(axes: Axes, sites: Sequence[str], matrix: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the pairwise overlap of support as a matrix: the bluer, the more."""
    for (i, one), (j, two) in ((a, b) for a in enumerate(sites) for b in enumerate(sites)):
        share = float(matrix[one][two])
        axes.barh(i, 0.96, 0.96, left=j - 0.48, color=COLOURS[0], alpha=0.03 + 0.5 * share)
        if len(sites) <= 10:
            axes.text(j, i, f"{share:.0%}", ha="center", va="center", fontsize=8)
    _site_axis(axes, sites)
    axes.set(xlim=(-0.5, len(sites) - 0.5), ylim=(len(sites) - 0.5, -0.5), xticks=[])
    axes.spines[:].set_visible(False)


# -- figures of the command line ---------------------------------------------------------------------------


@styled
def preflight_figure(report: PreflightReport) -> Figure:
    """Draw rows per site, each covariate's density by site with its values, and the overlap of sites."""
    preflight, inputs = report.to_dict(), report.inputs
    names = [name for name in inputs.covariate_names if name in report.overlap]
    sizes, rows = _size_table(preflight, inputs.target_name), max(len(names), 1)
    sites = sizes["site"][:SITES_SHOWN]
    # The rows of a figure grow with the sites, or labels would run into each other.
    figure = Figure(figsize=(11, max(2.6, 0.3 * len(sites) + 1.2) * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False, width_ratios=(1, 1.6, 1.2))
    for unused in (*axes[1:, 0], *axes[0, 3 if names else 1 :]):
        unused.set_axis_off()
    _draw_sizes(axes[0, 0], sites, sizes)
    axes[0, 0].set_title("Rows by site")
    if len(sizes) > 2:
        figure.legend(loc="outside lower left", ncols=8)
    for (_, density, overlap), name in zip(axes, names, strict=False):
        values = inputs.covariates[:, inputs.covariate_names.index(name)]
        finite = np.isfinite(values) & np.array([site is not None for site in inputs.site])
        site, values = inputs.site[finite].astype(str), values[finite]
        _draw_densities(density, sites, name, density_table(name, site, values))
        jitter = np.random.default_rng(0).uniform(0.24, 0.4, len(values))
        for k, label in enumerate(sites):
            here = site == label
            density.plot(values[here], k + jitter[here], ".", ms=4, alpha=0.6, **_style(k, label))
        density.set_title(f"{report.common[name]:.0%} of rows lie in the range that all sites cover")
        _draw_overlap(overlap, sites, preflight["overlap"][name])
        if len(sites) <= 10:
            overlap.set_xticks(range(len(sites)), [shortened(one, 16) for one in sites], fontsize=8)
            overlap.tick_params(axis="x", rotation=45 if len(sites) > 4 or max(map(len, sites)) > 10 else 0)
        overlap.set_title(f"Shared range of {shortened(name, 20)}, share of rows")
    figure.suptitle(report.verdict, fontsize=11, x=0.01, ha="left")
    return figure


@styled
def pooling_figure(
    pool: PooledDataset, harmonized: Any, feature: str, areas: dict[str, float], chance: float
) -> Figure:
    """Draw one feature against the first covariate before and after, and how well the site is predicted."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    before, after, bars = figure.subplots(1, 3, width_ratios=(1.3, 1.3, 1))
    k, covariate = pool.feature_names.index(feature), pool.covariates[0]
    for axes, values, title in ((before, pool.features, "as measured"), (after, harmonized, "harmonized")):
        for s, site in enumerate(pool.sites):
            x, y = pool.C[pool.site == s, 0], values[pool.site == s, k]
            axes.plot(x, y, "o", ms=4, alpha=0.7, label=shortened(site), **_style(s, site))
        axes.set_xlabel(f"{covariate.name} ({covariate.unit})" if covariate.unit else covariate.name)
        axes.set_title(f"{shortened(feature)}, {title}")
    after.sharey(before)
    before.legend()
    bars.barh(list(areas), list(areas.values()), color=COLOURS[: len(areas)])
    bars.axvline(chance, color=LIGHT["ink"], linestyle=":", linewidth=1)
    bars.text(chance, -0.75, " chance", fontsize=8, va="center")
    bars.set(xlim=(0, 1), ylim=(len(areas) - 0.4, -1), title="Prediction of the site (AUC)")
    return figure


# -- figures of the report ---------------------------------------------------------------------------------


class Plot(NamedTuple):
    """A figure of the report: drawings by heading (in the page: SVG), numbers as columns, and a legend.

    A legend has sign, colour in the page and text, and may be of the sites; other words are in the template.
    """

    panels: dict[str, Any]
    table: Columns
    legend: Sequence[tuple[str, str, str]] = ()
    of_sites: bool = False


@styled
def report_plots(account: Account) -> dict[str, Plot]:
    """Draw everything that the account has numbers for, by key."""
    shares, table = account.shares, account.effects["table"] if account.effects else {}
    plots = dict([*_what_went_in(account), *_features(account)])
    if account.held_out is not None:
        plots["site"] = _site_scores(account.held_out["site_scores"], account.held_out["classifiers"])
        if account.held_out["signals"]["what"]:
            plots["signals"] = _signals(account.held_out["signals"])
    plots["shares"] = _scatter(shares["before"], shares["after"], "as measured", shares)
    x_name = next((name for name in ("with_site_t", "measured_t") if name in table), None)
    if x_name and "harmonized_t" in table:
        label = "t, as measured" + (", with site in the regression" if x_name == "with_site_t" else "")
        plots["effects"] = _scatter(table[x_name], table["harmonized_t"], label, table)
    plots["maps"] = _before_after(account)
    if account.equivariance is not None and account.equivariance["covariate"] is not None:
        plots["tau"] = _tau(account.maps["tau"], account.equivariance["covariate"])
    for key, plot in plots.items():
        panels = enumerate(plot.panels.items())
        plots[key] = plot._replace(panels={name: page_svg(one, f"{key}-{n}") for n, (name, one) in panels})
    return plots


def _site_panel(sites: Sequence[str]) -> tuple[Figure, Axes]:
    """Return a figure with one row a site."""
    return panel((14 if len(sites) > 12 else 24) * len(sites) + 50)


def _site_legend(account: Account) -> list[tuple[str, str, str]]:
    sites = enumerate(account.names["sites"])
    return [(SIGNS[_round(k)], f"c{k % len(COLOURS)}", site) for k, site in sites]


def _with_unit(account: Account, name: str) -> str:
    units = {column(one["name"]): one["unit"] for one in account.names["covariates"]}
    return shortened(f"{name} ({units[name]})" if units.get(name) else name)


def _what_went_in(account: Account) -> Iterator[tuple[str, Plot]]:
    names, preflight = account.names, account.preflight
    table = _size_table(preflight, names["target"] if names["task"] == "class" else None)
    sites = table["site"][:SITES_SHOWN]
    figure, axes = _site_panel(sites)
    _draw_sizes(axes, sites, table)
    legend = [("■", f"c{k}", name) for k, name in enumerate([*table][2:])]
    yield "sizes", Plot({"": figure}, table, legend)
    for n, (name, table) in enumerate(account.densities.items()):
        figure, axes = _site_panel(sites)
        _draw_densities(axes, sites, name, table)
        axes.set_xlabel(_with_unit(account, name))
        yield f"density-{n}", Plot({"": figure}, table)
    for n, matrix in enumerate(preflight["overlap"].values()):
        figure, axes = _site_panel(sites)
        _draw_overlap(axes, sites, matrix)
        axes.set_xlabel("the same sites, in order")
        table = {"site": [one for one in sites for _ in sites], "other site": sites * len(sites)}
        table["share of rows"] = [round(float(matrix[one][two]), 4) for one in sites for two in sites]
        yield f"overlap-{n}", Plot({"": figure}, table)


def _site_scores(table: Columns, classifiers: Mapping[str, str]) -> Plot:
    panels = {}
    for who, part in pd.DataFrame(table).groupby("fitted_on", sort=False):
        stages = [stage for stage in STAGES if stage in set(part["stage"])]
        by = {
            name: rows.set_index("stage")[["mean", "sd"]].reindex(stages)
            for name, rows in part.groupby("classifier")
        }
        labels, series = [STAGES[stage] for stage in stages], [by.get(name) for name in classifiers]
        panels[f"Classifiers fitted on {who}"] = _dots(labels, series, "balanced accuracy", 0.0)
    return Plot(panels, table, _series_legend(classifiers.values()))


def _signals(table: Columns) -> Plot:
    rows, stages = pd.DataFrame(table).dropna(subset="before"), ("before", "after")
    labels = [f"{shortened(str(row.what), 12)}, {WHERE[str(row.where)]}" for row in rows.itertuples()]
    series = [rows[[stage, f"{stage}_sd"]] for stage in stages]
    low = min(0.0, max(rows[[*stages]].to_numpy(float).min(), -0.5))
    figure = _dots(labels, series, "R² or AUC", low)
    return Plot({"": figure}, table, _series_legend(STAGES[stage] for stage in stages))


def _series_legend(names: Iterable[str]) -> list[tuple[str, str, str]]:
    return [(SIGNS[j], f"c{j}", name) for j, name in enumerate(names)]


def _dots(labels: Sequence[str], series: Sequence[Any], measure: str, low: float) -> Figure:
    """Draw means ± one standard deviation, a row a label and a mark a series."""
    figure, axes = panel(max(34, 11 * len(series)) * len(labels) + 50)
    for j, values in enumerate(series):
        if values is None:
            continue
        mean, sd = values.to_numpy(float).T
        y = np.arange(len(labels)) + 0.2 * (j - (len(series) - 1) / 2)
        style: dict[str, Any] = {"fmt": MARKERS[j], "color": COLOURS[j], "ecolor": LIGHT["soft"], "ms": 6}
        axes.errorbar(np.maximum(mean, low), y, xerr=np.where(mean < low, np.nan, sd), **style)
        for k in np.flatnonzero(mean < low):
            text = f"below: {mean[k]:.2g}".replace("-", "−")
            axes.text(low + 0.04, y[k], text, va="center", fontsize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set(xlim=(low - 0.03, 1.03), ylim=(len(labels) - 0.5, -0.5), xlabel=measure)
    axes.grid(axis="x")
    return figure


def _scatter(x: ArrayLike, y: ArrayLike, label: str, table: Columns) -> Plot:
    """Draw features as measured and harmonized beside the diagonal; squares are significant effects."""
    x, y, effects = np.asarray(x), np.asarray(y), "harmonized_q" in table
    ends = [min(0.0, x.min(), y.min()), max(0.05, x.max(), y.max())]
    figure, axes = panel(320)
    axes.plot(ends, ends, ":", color=LIGHT["soft"], linewidth=1)
    significant = np.array(table["harmonized_q"] if effects else np.ones(len(x))) <= 0.05
    for rows, marker, colour in ((~significant, "o", 6 if effects else 0), (significant, "s", 0)):
        axes.plot(x[rows], y[rows], marker, color=COLOURS[colour], ms=5, alpha=0.8)
    axes.set(xlabel=label, ylabel="t, harmonized" if effects else "harmonized")
    return Plot({"": figure}, table)


def _map_panel() -> tuple[Figure, Axes]:
    figure, axes = panel(360)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=LIGHT["line"])
    return figure, axes


def _before_after(account: Account) -> Plot:
    table = pd.concat({STAGES[stage]: pd.DataFrame(account.maps[stage]) for stage in ("before", "after")})
    table = table.rename_axis(["stage", None]).reset_index(level="stage").astype(object)
    panels = {}
    for stage, rows in table.groupby("stage", sort=False):
        panels[str(stage).capitalize()], axes = _map_panel()
        for k, site in enumerate(account.names["sites"]):
            part = rows[rows["site"] == site]
            axes.plot(part["x"], part["y"], MARKERS[_round(k)], ms=5, alpha=0.8, **_style(k, site))
    return Plot(panels, _columns(table), _site_legend(account), of_sites=True)


def _tau(table: Columns, name: str) -> Plot:
    rows, (figure, axes), legend = pd.DataFrame(table), _map_panel(), []
    groups = rows.groupby(pd.qcut(rows[column(name)], len(SHADES), duplicates="drop"), observed=True)
    for shade, (interval, part) in zip(spread(SHADES, len(groups)), groups, strict=True):
        axes.plot(part["x"], part["y"], "o", color=shade, ms=5, alpha=0.8)
        legend.append(("●", f"q{SHADES.index(shade)}", f"{interval.left:.3g} to {interval.right:.3g}"))
    return Plot({"": figure}, table, legend)


def _columns(table: pd.DataFrame) -> Columns:
    return {str(name): values.tolist() for name, values in table.items()}


def _features(account: Account) -> Iterator[tuple[str, Plot]]:
    """Draw each site's course and box of the features with the largest site effects."""
    for kind, table, draw in (("curve", account.curves, _curves), ("box", account.boxes, _boxes)):
        for n, (_, rows) in enumerate(pd.DataFrame(table).groupby("feature", sort=False) if table else ()):
            panels = {}
            for stage in ("before", "after"):
                heading, figure = draw(account, rows, rows[rows["stage"] == stage])
                panels[f"{STAGES[stage].capitalize()}, {heading}"] = figure
            legend = _site_legend(account) if kind == "curve" else []  # boxes have names beside them
            yield f"{kind}-{n}", Plot(panels, _columns(rows), legend, of_sites=True)


def _curves(account: Account, rows: pd.DataFrame, part: pd.DataFrame) -> tuple[str, Figure]:
    covariate, sites = str(rows.columns[3]), list(account.names["sites"])
    figure, axes = panel(230)
    for site, line in part.groupby("site", sort=False):
        k = sites.index(str(site))
        axes.plot(line[covariate], line["value"], linestyle=LINES[_round(k)], **_style(k, sites[k]))
    # Both stages have the same range.
    axes.update_datalim([(part[covariate].min(), value) for value in rows["value"]])
    axes.autoscale_view()
    axes.set_xlabel(_with_unit(account, covariate))
    axes.grid(axis="y")
    return f"over {covariate}", figure


def _boxes(account: Account, rows: pd.DataFrame, part: pd.DataFrame) -> tuple[str, Figure]:
    sites = list(account.names["sites"])[:SITES_SHOWN]
    figure, axes = _site_panel(sites)
    for k, (site, box) in enumerate(part.set_index("site").loc[sites].iterrows()):
        axes.plot([box["low"], box["high"]], [k, k], linewidth=1, **_style(k, str(site)))
        axes.barh(k, box["q3"] - box["q1"], 0.55, left=box["q1"], alpha=0.5, color=COLOURS[k % len(COLOURS)])
        axes.plot([box["median"]] * 2, [k - 0.28, k + 0.28], color=LIGHT["ink"])
    axes.update_datalim([(value, 0) for value in (*rows["low"], *rows["high"])])
    axes.autoscale_view()
    _site_axis(axes, sites)
    axes.set_xlabel("value, covariates adjusted")
    axes.grid(axis="x")
    return "by site", figure
