"""Tables of text, one row a method, as Markdown and LaTeX; a cell in bold begins with ``**``."""

from __future__ import annotations

import pandas as pd

__all__ = ["latex_table", "markdown_table", "mean_and_sd"]

LATEX = {"%": r"\%", "ΔEq": r"$\Delta_{Eq}$", "×": r"$\times$"}


def mean_and_sd(mean: float, sd: float, digits: int, *, bold: bool = False) -> str:
    """Return a cell of a mean and a standard deviation.

    Examples
    --------
    >>> mean_and_sd(0.5, 0.123, 2, bold=True)
    '**0.50** (0.12)'
    """
    stars = "**" if bold else ""
    return f"{stars}{mean:.{digits}f}{stars} ({sd:.{digits}f})"


def markdown_table(cells: pd.DataFrame, first: str = "method") -> str:
    """Return a Markdown table with the index as its first column.

    Examples
    --------
    >>> print(markdown_table(pd.DataFrame({"ACC %": ["74.0"]}, index=["ours"])))
    | method | ACC % |
    |---|---|
    | ours | 74.0 |
    """
    rows = [[first, *cells.columns], *cells.reset_index().to_numpy().tolist()]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def latex_table(cells: pd.DataFrame) -> str:
    """Return a LaTeX table for the package booktabs."""

    def cell(text: str) -> str:
        head, tail = text.split(" ", 1)
        return (rf"\textbf{{{head[2:-2]}}}" if head.startswith("**") else head) + " " + tail

    names = list(map(str, cells.columns))
    for text, symbol in LATEX.items():
        names = [name.replace(text, symbol) for name in names]
    lines = [rf"\begin{{tabular}}{{l{'r' * len(names)}}}", r"\toprule"]
    lines.append(" & ".join(["method", *names]) + r" \\ \midrule")
    for method, row in zip(cells.index, cells.to_numpy(), strict=True):
        lines.append(" & ".join([str(method), *map(cell, row)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
