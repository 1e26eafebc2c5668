"""Tables of text, one row a method, as Markdown and LaTeX; a cell in bold begins with ``**``."""

from __future__ import annotations

import pandas as pd

LATEX = {"%": r"\%", "ΔEq": r"$\Delta_{Eq}$", "×": r"$\times$"}


def mean_and_sd(
    means: pd.Series[float], sds: pd.Series[float], digits: int, bold: pd.Series[bool] | None = None
) -> list[str]:
    """Return cells of means and standard deviations, those of ``bold`` rows in bold.

    Examples
    --------
    >>> mean_and_sd(pd.Series([0.5]), pd.Series([0.123]), 2, bold=pd.Series([True]))
    ['**0.50** (0.12)']
    """
    stars = [""] * len(means) if bold is None else ["**" * best for best in bold]
    rows = zip(stars, means, sds.reindex(means.index), strict=True)
    return [f"{star}{mean:.{digits}f}{star} ({sd:.{digits}f})" for star, mean, sd in rows]


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
    names = pd.Index(cells.columns.map(str), name="method")
    for text, symbol in LATEX.items():
        names = names.str.replace(text, symbol, regex=False)
    bold = cells.replace(r"^\*\*(.+)\*\*", r"\\textbf{\1}", regex=True).rename_axis(index=None)
    return bold.set_axis(names, axis=1).to_latex(column_format="l" + "r" * len(names))
