"""The demo: three scanners whose people's ages do not overlap, from a table to a picture."""

from __future__ import annotations

import json
from pathlib import Path

from equipool.data import check, simulate_table
from equipool.exceptions import InputError
from equipool.report.figures import preflight_figure, save_figure

__all__ = ["run_demo"]

MARKER = ".equipool-demo"
FILES = ("table.csv", "preflight.json", "preflight.png")


def run_demo(out: Path, *, overlap: float = 0.0, seed: int = 0, force: bool = False) -> Path:
    """Write a simulated table and its pre-flight report into ``out``; return the picture's path."""
    truth = simulate_table(overlap=overlap, random_state=seed)
    _prepare(out, force)
    table = out / "table.csv"
    truth.pool.to_frame().to_csv(table, index=False)
    report = check(table, site="site", covariates="age", target="dx", id="id")
    print(report)
    (out / "preflight.json").write_text(json.dumps(report.to_dict(), ensure_ascii=False, indent=2))
    picture = save_figure(preflight_figure(report), out / "preflight.png")
    print(f"\nTable:   {table}\nNumbers: {out / 'preflight.json'}\nPicture: {picture}")
    return picture


def _prepare(out: Path, force: bool) -> None:
    """Make the folder; of an earlier demo replace its own files alone, and touch nothing else."""
    files = [out / name for name in FILES]
    if out.is_dir() and any(out.iterdir()):
        earlier = (out / MARKER).is_file()
        if not (force and earlier):
            hint = ", or overwrite the earlier demo with --force." if earlier else "."
            raise InputError(f"{out} is not empty; choose another folder with --out{hint}")
        for file in files:
            file.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
