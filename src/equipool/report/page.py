"""The report: one HTML file without network access, from an account."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from equipool.checks.findings import plural
from equipool.files import write_whole
from equipool.judge.classifiers import REPORTED
from equipool.report.account import Account, best
from equipool.report.charts import STAGES, figures, site_style
from equipool.report.diagram import causal_diagram
from equipool.report.svg import number

__all__ = ["report_page", "write_report"]

TITLES = {
    "table": "Harmonization report",
    "images": "Harmonization report",
    "given": "A harmonized table, judged",
}
FIRST_EFFECTS = 15
MOST_EFFECTS = 500


def write_report(path: Path, account: Account) -> Path:
    """Write the report and return its path."""
    return write_whole(path, report_page(account))


def report_page(account: Account) -> str:
    """Return the report as one HTML text that needs no other file."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    parts = {name: _template(name) for name in ("report.html", "report.css", "report.js")}
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Inside a script a "<" could end it; JSON may write it otherwise.
    environment.filters["data"] = lambda values: Markup(
        json.dumps(values, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    )
    page = environment.from_string(parts["report.html"]).render(
        css=Markup(parts["report.css"]),
        js=Markup(parts["report.js"]),
        css_hash=_csp_hash(parts["report.css"]),
        js_hash=_csp_hash(parts["report.js"]),
        **_contents(account),
    )
    return page + "\n"


def _template(name: str) -> str:
    return files("equipool.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """Return what a Content-Security-Policy lets run: this very text and nothing else."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _contents(account: Account) -> dict[str, Any]:
    names = account.names
    covariates = [covariate["name"] for covariate in names["covariates"]]
    words = ", ".join(covariates)
    what = "features" if account.kind != "images" else "blocks of the brain"
    target = f"; target {names['target']}" if names["target"] else ""
    kept = f"; kept: {words}" if words else "; nothing was named to be kept"
    return {
        "kind": account.kind,
        "title": ": ".join([TITLES[account.kind], *filter(None, [account.made.get("source")])]),
        "subtitle": f"{_who(names)} of {len(names['sites'])} sites, "
        f"{names['features']} {what}"
        f"{kept}{target}.",
        "figures": figures(account),
        "sites": [_site(k, name) for k, name in enumerate(names["sites"])],
        "classifiers": list(REPORTED.values()),
        "preflight": account.preflight,
        "confounding": list(account.preflight["confounding"].items()),
        "verdict": account.verdict,
        "tiles": _tiles(account),
        "method": account.method,
        "readings": _readings(account),
        "covariate_words": words,
        "diagram": causal_diagram(names["site"], covariates, names["target"], account.kind),
        "statmap": account.statmap,
        "effects": _effects(account),
        "made": {"versions": None, "command": None, "inputs": None, **account.made},
        "facts": _facts(account),
        "person_words": ", ".join(["site", *covariates, *([names["target"]] if names["target"] else [])]),
    }


def _site(place: int, name: str) -> dict[str, Any]:
    colour, shape = site_style(place)
    return {"name": name, "colour": colour, "shape": shape}


def _tiles(account: Account) -> list[dict[str, Any]]:
    """Return the few numbers to be seen first."""
    tiles: list[dict[str, Any]] = []
    if account.held_out is not None:
        readings = account.held_out["site_scores"]
        for who in ("training participants", "held-out participants"):
            read = {stage: best(readings, stage, who) for stage in STAGES}
            before, after = read["before"], read["after"]
            if before is None or after is None:
                continue
            floors = [
                f"{STAGES[stage]} {row['mean']:.2f}"
                for stage, row in read.items()
                if stage in ("covariates", "shuffled") and row
            ]
            tiles.append(
                {
                    "name": f"Site predicted, classifiers fitted on {who}",
                    "from": f"{before['mean']:.2f}",
                    "value": f"{after['mean']:.2f}",
                    "note": f"balanced accuracy; {', '.join(floors)}",
                }
            )
        tiles += _signal_tiles(account.held_out["signals"])
    if account.equivariance is not None:
        tiles.append(_equivariance_tile(account.equivariance))
    return tiles


def _signal_tiles(signals: dict[str, list[Any]]) -> list[dict[str, Any]]:
    tiles = []
    for row in zip(*signals.values(), strict=True):
        one = dict(zip(signals, row, strict=True))
        if one["where"] == "within sites" and one["before"] is not None:
            spread = f"; change {number(one['change'], 2)}"
            spread += f" ± {number(one['change_sd'], 2)}" if one["change_sd"] is not None else ""
            tiles.append(
                {
                    "name": f"{one['what']} read within sites",
                    "from": f"{one['before']:.2f}".replace("-", "−"),
                    "value": f"{one['after']:.2f}".replace("-", "−"),
                    "note": f"{one['measure']}{spread}",
                }
            )
    return tiles


def _equivariance_tile(about: dict[str, Any]) -> dict[str, Any]:
    read = "" if about["r2"] is None else f"; {about['covariate']} read from τ with R² {about['r2']:.2f}"
    value = "none" if about["error"] is None else number(about["error"], 2)
    return {
        "name": "Equivariance error",
        "from": "",
        "value": value,
        "note": f"largest relative error of Φ(ρ(t)ℓ) = ρ(t)Φ(ℓ); ΔEq {number(about['delta_eq'], 3)}{read}",
    }


def _readings(account: Account) -> list[dict[str, str]]:
    if account.held_out is None:
        return []
    table = account.held_out["site_scores"]
    rows = []
    for row in zip(*table.values(), strict=True):
        one = dict(zip(table, row, strict=True))
        rows.append(
            {
                "stage": STAGES[one["stage"]],
                "classifier": REPORTED[one["classifier"]],
                "fitted_on": one["fitted_on"],
                "mean": f"{one['mean']:.3f}",
                "sd": "" if one["sd"] is None else f"{one['sd']:.3f}",
            }
        )
    return rows


KINDS = {"measured": "as measured", "with_site": "site in the regression", "harmonized": "harmonized"}


def _effects(account: Account) -> dict[str, Any] | None:
    """Return the effect table, the surest first, with a sentence on how to read it."""
    if account.effects is None:
        return None
    about, table = account.effects["about"], account.effects["table"]
    kinds = [kind for kind in KINDS if f"{kind}_t" in table]
    if not kinds:
        return None
    order = sorted(range(len(table["feature"])), key=lambda k: -abs(table[f"{kinds[-1]}_t"][k]))
    rows = [
        {
            "feature": table["feature"][k],
            "cells": [
                {
                    "text": f"{table[f'{kind}_t'][k]:.2f}".replace("-", "−"),
                    "strong": table[f"{kind}_q"][k] <= 0.05,
                }
                for kind in kinds
            ],
        }
        for k in order[:MOST_EFFECTS]
    ]
    counts = ", ".join(f"{about['found'][kind]} {KINDS[kind]}" for kind in kinds)
    one = "block" if account.kind == "images" else "feature"
    contrast = f" ({about['contrast']})" if about.get("contrast") else ""
    sentence = (
        f"Effects of {about['of']}{contrast} on each {one}, covariates adjusted, {about['people']} people. "
        f"Significant at a false discovery rate of 5 %: {counts}, of {len(table['feature'])} {one}s. "
        f"{about['note']} The harmonized column does not know that the site's effects were themselves "
        "estimated, so its t-values are too large where the variable and the site go together; the column "
        "with the site in the regression is the cautious one."
    )
    return {
        "sentence": sentence,
        "columns": [KINDS[kind] for kind in kinds],
        "first": rows[:FIRST_EFFECTS],
        "rest": rows[FIRST_EFFECTS:],
    }


def _who(names: dict[str, Any]) -> str:
    """Return how many people there are, and rows if somebody has several."""
    people = plural(names["people"], "person", "people")
    rows = names.get("rows", names["people"])
    return people if rows == names["people"] else f"{people} in {plural(rows, 'row')}"


def _facts(account: Account) -> list[tuple[str, str]]:
    made = account.made
    facts = [(name, str(value)) for name, value in (made.get("versions") or {}).items()]
    for name, value in (made.get("settings") or {}).items():
        if value not in (None, [], ""):
            facts.append((name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return facts
