"""The benchmark's table: means with standard deviations as CSV, Markdown and LaTeX."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from equipool.files import write_whole

__all__ = ["COLUMNS", "best_rows", "write_tables"]

# Shown in the table, with the direction that is better.
COLUMNS = {
    "delta_eq": ("ΔEq", "high"),
    "adv": ("Adv %", "low"),
    "adv_auc": ("Adv AUC", "low"),
    "reader_auc": ("best reader AUC", "low"),
    "reader_acc": ("its Adv %", "low"),
    "mmd": ("M ×100", "low"),
    "acc": ("ACC %", "high"),
}


def best_rows(means: pd.DataFrame, column: str) -> pd.Series[bool]:
    """Say which methods are best in a column of a table of means.

    An AUC is best near 0.5 and M near 0: below is chance as much as above, and M below 0 counts as 0.
    """
    values = means[column]
    if COLUMNS[column][1] == "high":
        return values == values.max()
    if "auc" in column:
        values = (values - 0.5).abs()
    elif column == "mmd":
        values = values.clip(lower=0)
    return values == values.min()


def write_tables(runs: pd.DataFrame, out: Path) -> None:
    """Write runs.csv, and the table of means with standard deviations as CSV, Markdown and LaTeX."""
    write_whole(out / "runs.csv", runs.to_csv(index=False))
    shown = list(COLUMNS)
    beside = ["permuted_low", "permuted_high", "dropped", "mmd_biased", "mmd_shuffled"]
    grouped = runs.groupby(["dataset", "method"], sort=False)[[*shown, *beside]]
    means, spread = grouped.mean(), grouped.std(ddof=0)
    write_whole(out / "table.csv", means.join(spread.add_suffix("_std")).to_csv())
    markdown, latex = [], []
    for dataset, part in means.groupby(level="dataset", sort=False):
        cells = pd.DataFrame(index=part.index.get_level_values("method"))
        for column in shown:
            bold = best_rows(part, column).to_numpy()
            digits = 3 if "auc" in column else 2
            cells[COLUMNS[column][0]] = [
                f"{'**' if b else ''}{m:.{digits}f}{'**' if b else ''} ({s:.{digits}f})"
                for m, s, b in zip(part[column], spread.loc[part.index, column], bold, strict=True)
            ]
        chance = runs.loc[runs.dataset == dataset, "adv_chance"].mean()
        band = part[["permuted_low", "permuted_high"]].mean()
        low, high = part["mmd_shuffled"].min(), part["mmd_shuffled"].max()
        note = (
            f"Majority site {chance:.1f} %; shuffled sites: AUC {band.iloc[0]:.3f} to {band.iloc[1]:.3f}, "
            f"M below {low:.2f} to {high:.2f}, by method, in 19 of 20 cases."
        )
        markdown.append(f"## {dataset}\n\n{_markdown(cells)}\n\n{note}\n")
        latex.append(_latex(str(dataset), cells))
    write_whole(out / "table.md", "\n".join(markdown))
    write_whole(out / "table.tex", "\n".join(latex))


def _markdown(cells: pd.DataFrame) -> str:
    lines = ["| method | " + " | ".join(cells.columns) + " |", "|---" * (len(cells.columns) + 1) + "|"]
    lines += [
        f"| {method} | " + " | ".join(row) + " |"
        for method, row in zip(cells.index, cells.to_numpy(), strict=True)
    ]
    return "\n".join(lines)


def _latex(dataset: str, cells: pd.DataFrame) -> str:
    def cell(text: str) -> str:
        head, tail = text.split(" ", 1)
        return (rf"\textbf{{{head[2:-2]}}}" if head.startswith("**") else head) + " " + tail

    names = [
        str(name).replace("%", r"\%").replace("ΔEq", r"$\Delta_{Eq}$").replace("×", r"$\times$")
        for name in map(str, cells)
    ]
    lines = [rf"% {dataset}", rf"\begin{{tabular}}{{l{'r' * len(names)}}}", r"\toprule"]
    lines.append(" & ".join(["method", *names]) + r" \\ \midrule")
    lines += [
        " & ".join([str(m), *map(cell, row)]) + r" \\"
        for m, row in zip(cells.index, cells.to_numpy(), strict=True)
    ]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
