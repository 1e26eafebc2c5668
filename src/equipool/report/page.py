"""Pages as one HTML file that needs no network: the report of an account, and quality control of heads."""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from equipool.checks.findings import plural
from equipool.files import write_whole
from equipool.judge.scores import Columns
from equipool.report.account import Account, best, rows_of
from equipool.report.figures import STAGES, report_plots
from equipool.report.style import DARK, LIGHT


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


# -- quality control of preprocessed heads: a mosaic of each, outlying ones first ---------------------------

ODD = 4.0  # robust standard deviations
MIN_HEADS = 5  # below which a spread says nothing


class Measure(NamedTuple):
    """A number that is outlying when it is far from the other heads', or beyond a fixed limit.

    ``step`` is the smallest spread that counts, so that nearly identical heads do not flag each other.
    """

    title: str
    meaning: str
    step: float
    low: float = -np.inf
    high: float = np.inf
    both: bool = True
    form: str = ".3f"


MEASURES = {
    "correlation": Measure("correlation", "with the template, inside its brain", 0.02, low=0.4, both=False),
    "dice": Measure("Dice", "overlap of the brain mask with the template's", 0.01, low=0.85, both=False),
    "scale": Measure("scale", "size of the head against the template", 0.02, low=0.7, high=1.4),
    "stretch": Measure("stretch", "longest over shortest axis of the affine", 0.03, high=1.5),
    "volume_ml": Measure("volume", "of the brain mask, ml, before registration", 40, 700, 2400, form=".0f"),
}


def quality_table(quality: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """Return one row for each head: its numbers, how outlying it is, and why; the most outlying first.

    A number is outlying when it is more than four robust standard deviations (1.4826 times the median
    absolute deviation) from the median of all heads, or beyond a limit that no good head crosses.
    """
    rows = {name: dict(numbers) for name, numbers in quality.items()}
    table = pd.DataFrame.from_dict(rows, orient="index", columns=[*MEASURES]).astype(float)
    finite = table.where(np.isfinite(table))
    median = finite.median()
    reasons: list[list[str]] = [[] for _ in range(len(table))]
    score = np.zeros(len(table))
    for name, measure in MEASURES.items():
        z = np.zeros(len(table))
        if finite[name].count() >= MIN_HEADS:
            distance = finite[name] - median[name]
            z = np.nan_to_num(distance / max(1.4826 * distance.abs().median(), measure.step))
        values, distance = table[name].to_numpy(), np.abs(z) if measure.both else -z
        odd = (distance > ODD) | (values < measure.low) | (values > measure.high) | ~np.isfinite(values)
        score = np.fmax(score, distance)
        for row in np.flatnonzero(odd):
            side = "low" if z[row] < 0 or values[row] < measure.low else "high"
            reasons[row].append(f"{measure.title} {values[row]:{measure.form}} ({side})")
    table["oddness"] = np.round(score, 2)
    table["flags"] = ["; ".join(reason) for reason in reasons]
    order = sorted(range(len(table)), key=lambda row: (not reasons[row], -score[row]))
    return table.iloc[order].rename_axis("head")


def write_quality(
    out: Path,
    quality: Mapping[str, Mapping[str, float]],
    pictures: Mapping[str, Path],
    failed: Mapping[str, str],
) -> pd.DataFrame:
    """Write ``qc.tsv`` and ``qc.html`` and return the table."""
    table = quality_table(quality)
    write_whole(out / "qc.tsv", table.to_csv(sep="\t", lineterminator="\n"))
    write_whole(out / "qc.html", quality_page(table, pictures, failed))
    return table


def quality_page(table: pd.DataFrame, pictures: Mapping[str, Path], failed: Mapping[str, str]) -> str:
    """Return the page as one HTML text that needs no other file."""
    return render(
        "quality.html",
        heads={str(name): row for name, row in table.iterrows()},
        pictures={name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()},
        failed=failed,
        measures=MEASURES,
    )
