"""The pre-flight report as text for the terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from equipool.checks.findings import Finding, plural

if TYPE_CHECKING:
    from equipool.checks.preflight import PreflightReport

__all__ = ["report_text"]

WIDTH = 100
SITES_SHOWN = 24  # longer tables are cut in the text; report.sites has all of it
MATRIX_SHOWN = 8
MARKS = {"error": "✗", "warning": "!", "note": "·"}


def report_text(report: PreflightReport) -> str:
    """Return the whole report, verdict last, where the eye of a terminal user is."""
    sections = [_sites(report), _overlap(report), _confounding(report), _findings(report.findings)]
    return "\n\n".join([*(section for section in sections if section), report.verdict])


def _sites(report: PreflightReport) -> str:
    inputs = report.inputs
    head = (
        f"{plural(inputs.n_rows, 'row')}, {plural(len(inputs.feature_names), 'feature')}, "
        f"{plural(len(report.sites), 'site')}"
    )
    if report.sites.empty:
        return head
    shown = report.sites.sort_values("rows", ascending=False)
    more = len(shown) - SITES_SHOWN
    lines = shown.head(SITES_SHOWN).to_string(
        float_format=lambda v: f"{v:.4g}" if v == v else "–", line_width=WIDTH
    )
    tail = f"\n… and {plural(more, 'smaller site')}" if more > 0 else ""
    return f"{head}\n{textwrap.indent(lines + tail, '  ')}"


def _overlap(report: PreflightReport) -> str:
    parts = []
    for name, frame in report.overlap.items():
        head = (
            f"Support of {name}: {report.common[name]:.0%} of people lie in the range that all sites cover. "
            "Share of people in the range common to two sites:"
        )
        parts.append(f"{textwrap.fill(head, WIDTH)}\n{textwrap.indent(_pairs(frame), '  ')}")
    return "\n\n".join(parts)


def _pairs(frame: pd.DataFrame) -> str:
    """Return a small matrix whole, of a large one the pairs with the least overlap."""
    if len(frame) <= MATRIX_SHOWN:
        return frame.to_string(float_format=lambda share: f"{share:.0%}")
    first, second = np.triu_indices(len(frame), k=1)
    values = frame.to_numpy()[first, second]
    worst = np.argsort(values, kind="stable")[:5]
    lines = [f"{values[k]:4.0%}  {frame.index[first[k]]} – {frame.index[second[k]]}" for k in worst]
    return "\n".join([*lines, f"… the least of {len(values)} pairs; median {np.median(values):.0%}"])


def _confounding(report: PreflightReport) -> str:
    if not report.confounding:
        return ""
    lines = [
        "How far each goes with the site (0 not at all, 1 fully: ω² for numbers, Cramér's V for classes):"
    ]
    lines += [f"  {value:.2f}  {name}" for name, value in report.confounding.items()]
    if report.readability:
        read = report.readability
        lines.append(
            f"  Site read from all of them: balanced accuracy {read.balanced_accuracy:.2f}, "
            f"chance {read.chance:.2f} ± {read.chance_error:.2f}"
        )
    return "\n".join(lines)


def _findings(findings: tuple[Finding, ...]) -> str:
    wrap = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(f"{MARKS[finding.level]} {finding.text}") for finding in findings)
