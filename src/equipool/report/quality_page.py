"""The page for quality control of preprocessed heads: a mosaic of each, outlying ones first."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from equipool.files import write_whole
from equipool.report.page import render

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

    Examples
    --------
    >>> usual = {"correlation": 0.8, "dice": 0.95, "scale": 1.0, "stretch": 1.05, "volume_ml": 1500.0}
    >>> heads = {f"sub-{k}": usual for k in range(6)} | {"sub-x": usual | {"dice": 0.7}}
    >>> quality_table(heads)["flags"].iloc[0]
    'Dice 0.700 (low)'
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
