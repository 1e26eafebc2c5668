"""The figures of the report: each a title, a sentence, drawn panels, and the table of numbers behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equipool.judge.classifiers import REPORTED
from equipool.judge.scores import Columns
from equipool.report.account import Account
from equipool.report.svg import WIDTH, Panel, number, shortened
from equipool.report.views import column

__all__ = ["Drawing", "Figure", "figures"]

SITES_SHOWN = 30
SHAPES = 5
COLOURS = 7
SHADES = 8
NAMES = 112.0  # room for the names of sites


@dataclass(frozen=True)
class Drawing:
    """One panel: its heading and its SVG."""

    title: str
    svg: str


@dataclass(frozen=True)
class Figure:
    """A figure of the report.

    Attributes
    ----------
    key
        Names it in the page and in the downloaded file.
    caption
        What to see, in a sentence or two.
    drawings
        By the choice under which they are shown; one without a name is always shown.
    table
        The numbers, as columns.
    legend
        ``"sites"``, ``"classifiers"``, ``"stages"``, ``"shades"`` or nothing.
    """

    key: str
    title: str
    caption: str
    drawings: dict[str, list[Drawing]]
    table: Columns
    legend: str = ""
    shades: list[tuple[str, int]] = field(default_factory=list)


def figures(account: Account) -> dict[str, Figure]:
    """Draw everything that the account has numbers for, by key."""
    made = [
        _people(account),
        *_densities(account),
        *_overlaps(account),
        *_held_out(account),
        _tau(account),
        _before_after(account),
        _features(account),
        _shares(account),
        _effects(account),
    ]
    return {figure.key: figure for figure in made if figure is not None}


# -- what went in ------------------------------------------------------------------------------------------


def _shown(account: Account) -> list[str]:
    """Return the largest sites, which are drawn."""
    return list(account.names["sites"])[:SITES_SHOWN]


def site_style(place: int) -> tuple[int, int]:
    """Return colour and shape of a site by its place among them."""
    return place % COLOURS, place // COLOURS % SHAPES


def _rows(table: Columns) -> Iterator[dict[str, Any]]:
    for row in zip(*table.values(), strict=True):
        yield dict(zip(table, row, strict=True))


def _row(sites: Sequence[str]) -> float:
    """Return the height of a site's row."""
    return 14.0 if len(sites) > 12 else 22.0 if len(sites) < 6 else 18.0


def _site_panel(
    sites: Sequence[str], x: tuple[float, float], *, top: float = 10, bottom: float = 36
) -> Panel:
    """Return a panel with one row a site and their names at the left."""
    height = _row(sites) * len(sites) + top + bottom
    panel = Panel(x, (-0.5, len(sites) - 0.5), height=height, left=NAMES, top=top, bottom=bottom, down=True)
    for k, site in enumerate(sites):
        panel.text(NAMES - 6, panel.py(k) + 3.5, shortened(site, 17), "end", "small")
    return panel


def _people(account: Account) -> Figure:
    sites = _shown(account)
    target = account.names["target"]
    table: Columns = {"site": [], "people": []}
    classes: list[str] = []
    if target is not None and account.names["task"] == "class":
        labels = account.people[column(target)]
        classes = sorted(set(labels), key=lambda label: -labels.count(label))[:COLOURS]
    known = account.preflight["sites"]
    table |= {f"{target} = {label}": [] for label in classes}
    for site, count in account.names["sites"].items():
        table["site"].append(site)
        table["people"].append(count)
        for label in classes:
            table[f"{target} = {label}"].append(int((known.get(site) or {}).get(f"{target}={label}") or 0))
    panel = _site_panel(sites, (0.0, float(max(table["people"]))))
    panel.x_axis("people", grid=True)
    for k in range(len(sites)):
        start = 0.0
        parts = [table[name][k] for name in table if name not in ("site", "people")] or [table["people"][k]]
        for c, count in enumerate(parts):
            x, end = panel.px(start), panel.px(start + count)
            panel.rect(x, panel.py(k) - 5, end - x, 10, f"s{c}")
            start += count
        panel.hit(panel.px(start), panel.py(k), k)
    alt = f"Bars of the people of {len(sites)} sites; the largest is {sites[0]} with {table['people'][0]}."
    more = len(table["site"]) - len(sites)
    caption = f"The {len(sites)} largest of {len(table['site'])} sites." if more else ""
    drawing = Drawing("", panel.svg(alt, by="y"))
    return Figure(
        "people",
        f"{'People' if account.names.get('rows') in (None, account.names['people']) else 'Rows'} by "
        f"{account.names['site']}",
        caption,
        {"": [drawing]},
        table,
        legend="classes" if classes else "",
        shades=[(f"{target} = {label}", c) for c, label in enumerate(classes)],
    )


def _unit(account: Account, name: str) -> str:
    units = {column(c["name"]): c["unit"] for c in account.names["covariates"]}
    return f"{name} ({units[name]})" if units.get(name) else name


def _densities(account: Account) -> Iterator[Figure]:
    sites = _shown(account)
    for n, (name, table) in enumerate(account.densities.items()):
        of = column(name)
        grid = table[of]
        panel = _site_panel(sites, (min(grid), max(grid)), top=18)
        panel.x_axis(_unit(account, name), grid=True)
        rows = list(_rows(table))
        for k, site in enumerate(sites):
            own = [(r, row) for r, row in enumerate(rows) if row["site"] == site]
            top = max(row["density"] for _, row in own) or 1.0
            base, reach = panel.py(k) + 5, 1.3 * _row(sites) / top
            own = [(r, row) for r, row in own if row["density"] > 0]
            places = [(panel.px(row[of]), base - reach * row["density"]) for _, row in own]
            panel.group(f"s{site_style(k)[0]}", k)
            panel.path([(places[0][0], base), *places, (places[-1][0], base)], "area", closed=True)
            panel.end()
            for (r, row), (x, y) in zip(own, places, strict=True):
                if row["density"] > 0.02 * top:
                    panel.hit(x, y, r)
        share = account.preflight["common_support"].get(name)
        caption = "Each site's density, its peak at full height."
        if share is not None:
            caption += f" {share:.0%} of people lie in the range that all sites cover."
        alt = f"Densities of {name} at {len(sites)} sites, one row each."
        yield Figure(f"density-{n}", f"{name} by site", caption, {"": [Drawing("", panel.svg(alt))]}, table)


def _overlaps(account: Account) -> Iterator[Figure]:
    sites = _shown(account)
    for n, (name, matrix) in enumerate(account.preflight["overlap"].items()):
        panel = _site_panel(sites, (-0.5, len(sites) - 0.5), bottom=20)
        width, tall = (WIDTH - panel.left - panel.right) / len(sites), _row(sites)
        table: Columns = {"site": [], "other site": [], "share of people": []}
        for i, one in enumerate(sites):
            for j, two in enumerate(sites):
                share = float(matrix[one][two])
                for heading, value in zip(table, (one, two, round(share, 4)), strict=True):
                    table[heading].append(value)
                x, y = panel.px(j), panel.py(i)
                panel.rect(
                    x - width / 2 + 0.5,
                    y - tall / 2 + 0.5,
                    width - 1,
                    tall - 1,
                    "cell",
                    f' fill-opacity="{0.06 + 0.94 * share:.2f}"',
                )
                if len(sites) <= 6:
                    kind = "small on" if share > 0.5 else "small"
                    panel.text(x, y + 4, f"{share:.0%}", "middle", kind)
                panel.hit(x, y, len(table["site"]) - 1)
        panel.text(
            (panel.left + WIDTH - panel.right) / 2,
            panel.height - 5,
            "the same sites, in this order",
            "middle",
            "small",
        )
        alt = (
            f"Matrix of {len(sites)} by {len(sites)} sites: the share of people in the range of "
            f"{name} common to two."
        )
        caption = "The share of two sites' people in the range that both cover: the darker, the more."
        yield Figure(
            f"overlap-{n}",
            f"Who overlaps with whom in {name}",
            caption,
            {"": [Drawing("", panel.svg(alt))]},
            table,
        )


# -- did it work -------------------------------------------------------------------------------------------

STAGES = {
    "before": "as measured",
    "after": "harmonized",
    "covariates": "covariates alone",
    "shuffled": "chance",
}


def _held_out(account: Account) -> Iterator[Figure]:
    if account.held_out is None:
        return
    yield _readings(account.held_out["site_scores"])
    if account.held_out["signals"]["what"]:
        yield _signals(account.held_out["signals"])


def _readings(table: Columns) -> Figure:
    rows = list(_rows(table))
    top = min(1.0, max((row["mean"] or 0) + (row["sd"] or 0) for row in rows) * 1.05)
    drawings = []
    for who in ("training participants", "held-out participants"):
        own = [(r, row) for r, row in enumerate(rows) if row["fitted_on"] == who]
        if not own:
            continue
        stages = [stage for stage in STAGES if any(row["stage"] == stage for _, row in own)]
        panel = Panel(
            (0.0, top), (-0.5, len(stages) - 0.5), height=36.0 * len(stages) + 46, left=NAMES, down=True
        )
        panel.x_axis("balanced accuracy", grid=True)
        for k, stage in enumerate(stages):
            panel.text(NAMES - 6, panel.py(k) + 4, STAGES[stage], "end")
            same = [(r, row) for r, row in own if row["stage"] == stage]
            for j, (r, row) in enumerate(same):
                y = panel.py(k) + 8.0 * (j - (len(same) - 1) / 2)
                _error_bar(panel, row["mean"], row["sd"], y)
                shape = list(REPORTED).index(row["classifier"])
                panel.group(f"t{list(STAGES).index(stage)}")
                panel.mark(panel.px(row["mean"]), y, shape, big=True)
                panel.end()
                panel.hit(panel.px(row["mean"]), y, r)
        alt = "; ".join(
            f"{STAGES[row['stage']]}, {REPORTED[row['classifier']]}: {row['mean']:.2f}" for _, row in own
        )
        drawings.append(
            Drawing(
                f"Classifiers fitted on {who}", panel.svg(f"Balanced accuracy of site classifiers. {alt}.")
            )
        )
    caption = (
        "How well the site of held-out people is predicted from their features and covariates. Left of or "
        "level with covariates alone and chance is as good as it gets. Classifiers that were fitted on other "
        "held-out people see what harmonization leaves in people it has not seen."
    )
    return Figure("site", "Can the site still be read?", caption, {"": drawings}, table, legend="classifiers")


def _error_bar(panel: Panel, mean: float, sd: float | None, y: float) -> None:
    if sd:
        low, high = (min(max(v, panel.x[0]), panel.x[1]) for v in (mean - sd, mean + sd))
        panel.line(panel.px(low), y, panel.px(high), y, "error")


WHERE = {"all": "all people", "within sites": "within sites", "left-out sites": "at left-out sites"}


def _signals(table: Columns) -> Figure:
    rows = [(r, row) for r, row in enumerate(_rows(table)) if row["before"] is not None]
    low = min([0.0, *(max(min(row["before"], row["after"]), -0.5) for _, row in rows)])
    panel = Panel(
        (low, 1.0), (-0.5, len(rows) - 0.5), height=30.0 * max(len(rows), 1) + 46, left=150, down=True
    )
    panel.x_axis("R² or AUC", grid=True)
    for k, (r, row) in enumerate(rows):
        y = panel.py(k)
        panel.text(144, y + 4, f"{shortened(row['what'], 10)}, {WHERE[row['where']]}", "end", "small")
        for stage, shift, kind in (("before", -4.0, "t0"), ("after", 4.0, "t1")):
            value = max(row[stage], low)
            if row[stage] < low:
                panel.text(
                    panel.px(low) + 8, y + shift + 3, f"below: {number(row[stage], 2)}", "start", "small"
                )
            else:
                _error_bar(panel, value, row[f"{stage}_sd"], y + shift)
            panel.group(kind)
            panel.mark(panel.px(value), y + shift, 0 if stage == "before" else 1, big=True)
            panel.end()
        panel.hit(panel.px(max(row["after"], low)), y, r)
    alt = "; ".join(
        f"{row['what']} {WHERE[row['where']]}: {row['measure']} {row['before']:.2f} before, "
        f"{row['after']:.2f} after"
        for _, row in rows
    )
    caption = (
        "What people brought, read from features alone in held-out people: numbers by ridge regression "
        "(R²), classes by logistic regression (AUC, 0.5 is chance). Within sites, knowing the site helps "
        "nobody; at left-out sites, the regression was fitted without the site."
    )
    return Figure(
        "signals",
        "Is what people brought still there?",
        caption,
        {"": [Drawing("", panel.svg(alt + ".", by="y"))]},
        table,
        legend="stages",
    )


# -- what it looks like ------------------------------------------------------------------------------------


def _scatter(table: Columns) -> Panel:
    x, y = np.array(table["x"]), np.array(table["y"])
    reach = max(float(np.ptp(x)), float(np.ptp(y)), 1e-9) / 2 * 1.05
    centre = (x.max() + x.min()) / 2, (y.max() + y.min()) / 2
    panel = Panel(
        (centre[0] - reach, centre[0] + reach),
        (centre[1] - reach, centre[1] + reach),
        height=WIDTH,
        left=6,
        right=6,
        top=6,
        bottom=6,
    )
    panel.rect(1, 1, WIDTH - 2, WIDTH - 2, "frame", ' rx="4"')
    return panel


def _tau(account: Account) -> Figure | None:
    table = account.maps.get("tau")
    about = account.equivariance
    if table is None or about is None or about["covariate"] is None:
        return None
    name = about["covariate"]
    values = np.array(table[column(name)], dtype=float)
    edges = np.unique(np.quantile(values, np.linspace(0, 1, SHADES + 1)[1:-1]).round(1))
    edges = edges[(edges > values.min()) & (edges <= values.max())]
    bins = np.searchsorted(edges, values, side="right")
    shades = [round(q * (SHADES - 1) / max(len(edges), 1)) for q in range(len(edges) + 1)]
    panel = _scatter(table)
    for q, shade in enumerate(shades):
        panel.group(f"q{shade}")
        for r in np.flatnonzero(bins == q).tolist():
            panel.mark(panel.px(table["x"][r]), panel.py(table["y"][r]))
        panel.end()
    for r in range(len(values)):
        panel.hit(panel.px(table["x"][r]), panel.py(table["y"][r]), r)
    limits = [values.min(), *edges, values.max()]
    labels = [(f"{number(limits[q])} to {number(limits[q + 1])}", shade) for q, shade in enumerate(shades)]
    caption = (
        f"t-SNE of τ, one point a person, coloured by {name}: in an equivariant space {name} runs through it "
        f"in order. {about['how']}"
    )
    alt = (
        f"Scatter of {len(values)} people, coloured by {name} from {number(values.min())} to "
        f"{number(values.max())}."
    )
    return Figure(
        "tau", f"The space that turns with {name}", caption, {"": [Drawing("", panel.svg(alt))]}, table,
        legend="shades", shades=labels,
    )  # fmt: skip


def _before_after(account: Account) -> Figure:
    places = {site: k for k, site in enumerate(account.names["sites"])}
    drawings, whole = [], {"stage": []}  # type: tuple[list[Drawing], Columns]
    for stage in ("before", "after"):
        table = account.maps[stage]
        offset = len(whole["stage"])
        whole["stage"] += [STAGES[stage]] * len(table["x"])
        for name, values in table.items():
            whole.setdefault(name, [])
            whole[name] += values
        panel = _scatter(table)
        for site, k in places.items():
            colour, shape = site_style(k)
            panel.group(f"s{colour}", k)
            for r, own in enumerate(table["site"]):
                if own == site:
                    panel.mark(panel.px(table["x"][r]), panel.py(table["y"][r]), shape)
                    panel.hit(panel.px(table["x"][r]), panel.py(table["y"][r]), offset + r)
            panel.end()
        alt = (
            f"t-SNE of {len(table['x'])} people's features, {STAGES[stage]}, a colour and shape for "
            "each site."
        )
        drawings.append(Drawing(STAGES[stage].capitalize(), panel.svg(alt)))
    caption = (
        "t-SNE of all features, one point a person. Where the site shapes the data, its people lie "
        "together. Harmonized by the model that was fitted on these people; how far the site can be read in "
        "new people is told above."
    )
    return Figure("maps", "Before and after, by site", caption, {"": drawings}, whole, legend="sites")


def _features(account: Account) -> Figure | None:
    names = list(dict.fromkeys(account.boxes["feature"]))
    if not names:
        return None
    drawings: dict[str, list[Drawing]] = {}
    table: Columns = {"drawing": []}
    for part, source in (("curve", account.curves), ("box", account.boxes)):
        for row in _rows(source) if source else ():
            known = len(table["drawing"])
            for name in row:
                table.setdefault(name, [None] * known)
            for name in table:
                table[name].append(part if name == "drawing" else row.get(name))
    rows = list(_rows(table))
    for name in names:
        own = [(r, row) for r, row in enumerate(rows) if row["feature"] == name]
        drawings[name] = [
            *_curve_panels(account, own),
            *_box_panels(account, own),
        ]
    caption = (
        "The features that the site changes most as measured, and those in which most of it is left. "
        "Curves: each site's course over its own range. Boxes: quartiles by site with the covariates' "
        "common course taken out; whiskers reach to the last person within 1.5 box lengths."
    )
    return Figure("features", "Feature by feature", caption, drawings, table, legend="sites")


def _curve_panels(account: Account, own: list[tuple[int, dict[str, Any]]]) -> Iterator[Drawing]:
    lines = [(r, row) for r, row in own if row["drawing"] == "curve"]
    if not lines:
        return
    covariate = list(account.curves)[3]
    xs, ys = [row[covariate] for _, row in lines], [row["value"] for _, row in lines]
    room = 0.04 * ((max(ys) - min(ys)) or 1)
    places = {site: k for k, site in enumerate(account.names["sites"])}
    for stage in ("before", "after"):
        panel = Panel((min(xs), max(xs)), (min(ys) - room, max(ys) + room), left=48)
        panel.y_axis()
        panel.x_axis(_unit(account, covariate))
        by_site: dict[str, list[tuple[float, float]]] = {}
        for r, row in lines:
            if row["stage"] == stage:
                place = panel.px(row[covariate]), panel.py(row["value"])
                by_site.setdefault(row["site"], []).append(place)
                panel.hit(*place, r)
        for site, points in by_site.items():
            panel.group(f"s{site_style(places[site])[0]}", places[site])
            panel.path(points, f"curve d{site_style(places[site])[1]}")
            panel.end()
        alt = (
            f"Course of the feature over {covariate}, {STAGES[stage]}, one line for each of "
            f"{len(by_site)} sites."
        )
        yield Drawing(f"{STAGES[stage].capitalize()}, over {covariate}", panel.svg(alt))


def _box_panels(account: Account, own: list[tuple[int, dict[str, Any]]]) -> Iterator[Drawing]:
    sites = _shown(account)
    found = [(r, row) for r, row in own if row["drawing"] == "box" and row["site"] in sites]
    low, high = min(row["low"] for _, row in found), max(row["high"] for _, row in found)
    room = 0.04 * ((high - low) or 1)
    for stage in ("before", "after"):
        panel = _site_panel(sites, (low - room, high + room))
        panel.x_axis("value, covariates taken out", grid=True)
        for r, row in found:
            if row["stage"] != stage:
                continue
            k = sites.index(row["site"])
            y = panel.py(k)
            ends = [panel.px(row[name]) for name in ("low", "q1", "median", "q3", "high")]
            panel.group(f"box s{site_style(k)[0]}", k)
            panel.line(ends[0], y, ends[4], y, "whisker")
            panel.rect(ends[1], y - 5, max(ends[3] - ends[1], 0.5), 10)
            panel.line(ends[2], y - 5, ends[2], y + 5, "median")
            panel.end()
            panel.hit(ends[2], y, r)
        alt = f"Box plots of the feature at {len(sites)} sites, {STAGES[stage]}."
        yield Drawing(f"{STAGES[stage].capitalize()}, by site", panel.svg(alt, by="y"))


def _shares(account: Account) -> Figure:
    table = account.shares
    top = max(*table["before"], *table["after"], 0.05) * 1.05
    panel = Panel((0.0, top), (0.0, top), height=320, left=50, bottom=40)
    panel.y_axis("harmonized")
    panel.x_axis("as measured")
    panel.line(panel.px(0), panel.py(0), panel.px(top), panel.py(top), "rule")
    panel.group("t1")
    for r, (before, after) in enumerate(zip(table["before"], table["after"], strict=True)):
        panel.mark(panel.px(before), panel.py(after), 0)
        panel.hit(panel.px(before), panel.py(after), r)
    panel.end()
    below = sum(a < b for a, b in zip(table["after"], table["before"], strict=True))
    where = "in held-out people" if account.held_out is not None else "in the people fitted on"
    caption = (
        f"The share of each feature's variance that the site explains beyond the covariates (ω²), {where}. "
        f"It fell in {below} of {len(table['feature'])} features; on average from "
        f"{np.mean(table['before']):.2f} to {np.mean(table['after']):.2f}."
    )
    alt = (
        f"Scatter of {len(table['feature'])} features: the site's share of variance as measured and "
        "harmonized."
    )
    return Figure(
        "shares", "What the site does to each feature", caption, {"": [Drawing("", panel.svg(alt))]}, table
    )


# -- what it found -----------------------------------------------------------------------------------------


def _effects(account: Account) -> Figure | None:
    if account.effects is None or "harmonized_t" not in account.effects["table"]:
        return None
    table = account.effects["table"]
    x_name = "with_site_t" if "with_site_t" in table else "measured_t"
    if x_name not in table:
        return None
    values = np.array([table[x_name], table["harmonized_t"]])
    low, high = float(values.min()), float(values.max())
    room = 0.05 * ((high - low) or 1)
    panel = Panel((low - room, high + room), (low - room, high + room), height=320, left=50, bottom=40)
    panel.y_axis("t, harmonized")
    panel.x_axis("t, as measured" + (", site in the regression" if x_name == "with_site_t" else ""))
    panel.line(panel.px(low), panel.py(low), panel.px(high), panel.py(high), "rule")
    for r in range(values.shape[1]):
        found = table["harmonized_q"][r] <= 0.05
        panel.group("t1" if found else "t3")
        panel.mark(panel.px(values[0, r]), panel.py(values[1, r]), 1 if found else 0)
        panel.end()
        panel.hit(panel.px(values[0, r]), panel.py(values[1, r]), r)
    of = account.effects["about"]["of"]
    alt = f"Scatter of {values.shape[1]} features: t of the effect of {of}, as measured and harmonized."
    caption = "One point a feature; squares are significant after harmonization (false discovery rate 5 %)."
    return Figure("effects", f"Effects of {of}", caption, {"": [Drawing("", panel.svg(alt))]}, table)
