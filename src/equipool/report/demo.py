"""The demo: three scanners whose people's ages do not overlap, from a table to a picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from equipool.data import check, simulate_table
from equipool.exceptions import InputError
from equipool.report.figures import preflight_figure, save_figure

__all__ = ["run_demo"]

MARKER = ".equipool-demo"


def run_demo(out: Path, *, overlap: float = 0.0, seed: int = 0, force: bool = False) -> Path:
    """Write a simulated table and its pre-flight report into ``out``; return the picture's path."""
    _prepare(out, force)
    truth = simulate_table(overlap=overlap, random_state=seed)
    table = out / "table.csv"
    truth.pool.to_frame().to_csv(table, index=False)
    report = check(table, site="site", covariates="age", target="dx", id="id")
    print(report)
    (out / "preflight.json").write_text(json.dumps(report.to_dict(), ensure_ascii=False, indent=2))
    picture = save_figure(preflight_figure(report), out / "preflight.png")
    print(f"\nTable:   {table}\nNumbers: {out / 'preflight.json'}\nPicture: {picture}")
    return picture


def _prepare(out: Path, force: bool) -> None:
    """Make an empty folder; never remove one that is not an earlier demo's."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        if not (force and (out / MARKER).is_file()):
            raise InputError(
                f"{out} is not empty; choose another folder with --out"
                + (", or overwrite the earlier demo with --force." if (out / MARKER).is_file() else ".")
            )
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
