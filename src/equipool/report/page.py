"""Pages: the report of an account as one HTML file that needs no network, and what every page shares."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd

from equipool.checks.findings import plural
from equipool.judge.scores import Columns
from equipool.report.account import Account
from equipool.report.figures import STAGES, report_plots
from equipool.report.style import DARK, LIGHT
from equipool.report.verdict import best, rows_of


def report_page(account: Account) -> str:
    """Return the report as one HTML text that needs no other file."""
    effects: Columns = account.effects["table"] if account.effects else {}
    last = [name for name in effects if name.endswith("_t")][-1:]  # the largest effects come first
    return render(
        "report.html",
        account=account,
        plots=report_plots(account),
        covariates=", ".join(one["name"] for one in account.names["covariates"]),
        made={"versions": {}, "settings": {}, "command": None, "inputs": None, "source": None} | account.made,
        effect_rows=sorted(rows_of(effects), key=lambda row: -abs(row[last[0]])) if last else [],
        stages=STAGES,
        best=best,
        rows_of=rows_of,
        plural=plural,
    )


def render(name: str, **values: Any) -> str:
    """Return a page from its template.

    Names are escaped. A Content-Security-Policy lets the page run its own script and styles and load nothing.
    """
    environment = _environment()
    style = environment.get_template("page.css").render(light=LIGHT, dark=DARK)
    script = _template("report.js")
    hashes = {"style_hash": _policy_hash(style), "script_hash": _policy_hash(script)}
    page: str = environment.get_template(name).render(style=style, script=script, **hashes, **values)
    return page + "\n"


@cache
def _environment() -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(_template),
        autoescape=lambda name: bool(name) and str(name).endswith("html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Inside a script a "<" could end it; JSON may write it otherwise.
    environment.filters["data"] = lambda values: Markup(
        json.dumps(values, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    )
    environment.filters["csv"] = _csv
    environment.filters["number"] = _number
    return environment


def _template(name: str) -> str:
    return files("equipool.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def _policy_hash(text: str) -> str:
    """Return what a Content-Security-Policy lets run: this very text and nothing else."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _number(value: Any, form: str = ".5g") -> str:
    """Return a number with a true minus sign; text as it is."""
    return f"{value:{form}}".replace("-", "−") if isinstance(value, float | int) else str(value or "")


def _csv(table: Columns) -> str:
    """Return a table as the address of a CSV file."""
    frame = pd.DataFrame(table, dtype=object).map(_inert).rename(columns=_inert)
    text = frame.to_csv(index=False, lineterminator="\r\n")
    return "data:text/csv;base64," + base64.b64encode(text.encode()).decode()


def _inert(value: Any) -> Any:
    """Return a text that a spreadsheet would take for a formula with an apostrophe before it."""
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value
