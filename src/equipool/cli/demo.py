"""``equipool demo``: a simulated pool of three scanners, from table to harmonized volumes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.exceptions import InputError
from equipool.files import write_whole

if TYPE_CHECKING:
    from equipool.simulate import SimulatedTable

from equipool.cli import options

MARKER = ".equipool-demo"
FILES = ("table.csv", "preflight.json", "preflight.png", "harmonized.csv", "pooled.png")
SUMMARY = """
In participants whom the pooler has not seen:
  agreement with clean volumes (R²)           {clean_raw:5.2f} as measured, {clean_harmonized:.2f} harmonized
  prediction of the site, best of three (AUC) {site_auc_raw:5.2f} as measured, {site_auc_code:.2f} from codes
  chance                                       0.50
  prediction of the diagnosis from codes      {accuracy:5.0%} correct (larger class: {majority:.0%})
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser("demo", help="a simulated pool of three scanners: see what equipool does")
    option = command.add_argument
    option("--out", type=Path, default=Path("equipool-demo"), metavar="DIR", help="where to write")
    option("--overlap", type=float, default=0.0, help="of the sites' ages, 0 to 1 (default: 0)")
    options.add_common(command, "seed")
    option("--force", action="store_true", help="overwrite an earlier demo in DIR")
    command.set_defaults(command=run, go_on="Run it again with --force.")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, check, pool and harmonize; write it all into the folder."""
    from equipool.data import check
    from equipool.report.figures import pooling_figure, preflight_figure
    from equipool.report.style import save_figure
    from equipool.simulate import simulate_table

    truth, out = simulate_table(overlap=arguments.overlap, random_state=arguments.seed), arguments.out
    pool, frame = truth.pool, truth.pool.to_frame()
    _prepare(out, arguments.force)
    table = write_whole(out / "table.csv", frame.to_csv(index=False))
    report = check(table, site="site", covariates="age", target="dx", id="id")
    print(report)
    write_whole(out / "preflight.json", json.dumps(report.to_dict(), ensure_ascii=False, indent=2))
    save_figure(preflight_figure(report), out / "preflight.png")
    print("\nFitting the pooler (about 20 seconds) …", file=sys.stderr)
    numbers, harmonized = _pooled(truth, arguments.seed)
    frame[list(pool.feature_names)] = harmonized
    write_whole(out / "harmonized.csv", frame.to_csv(index=False))
    readings = {"raw features": numbers["site_auc_raw"], "the code": numbers["site_auc_code"]}
    figure = pooling_figure(pool, harmonized, pool.feature_names[0], readings, chance=0.5)
    picture = save_figure(figure, out / "pooled.png")
    print(SUMMARY.format(**numbers))
    print(f"Table:      {table}\nHarmonized: {out / 'harmonized.csv'}\nPicture:    {picture}")
    return 0


def _pooled(truth: SimulatedTable, seed: int) -> tuple[dict[str, float], Any]:
    """Fit on half of the participants, judge on the other half; harmonize all of them."""
    import numpy as np

    from equipool.estimators import EquivariantPooler, SiteHarmonizer
    from equipool.judge import classify_site

    pool = truth.pool
    first, second = pool.split(0.5, stratify=("site", "target"), random_state=seed)
    train, test = pool[first], pool[second]
    pooler = EquivariantPooler(random_state=seed, steps=800)
    pooler.fit(train.X, train.y, site=train.site_labels, covariates=train.C)
    harmonizer = SiteHarmonizer(random_state=seed).fit(train.X, site=train.site_labels, covariates=train.C)
    harmonized = harmonizer.transform(pool.X, site=pool.site_labels, covariates=pool.C)

    def site_auc(a: Any, b: Any) -> float:
        return max(score.auc for score in classify_site(a, train.site, b, test.site, seed=seed))

    def agreement(x: Any) -> float:
        """Return R² with the clean features, averaged over features; their means are left out."""
        a, b = (y[second] - y[second].mean(axis=0) for y in (x, truth.clean))
        return float((1 - ((a - b) ** 2).mean(axis=0) / b.var(axis=0)).mean())

    return {
        "site_auc_raw": site_auc(train.X, test.X),
        "site_auc_code": site_auc(pooler.transform(train.X), pooler.transform(test.X)),
        "accuracy": pooler.score(test.X, test.y),
        "majority": float(np.unique(np.asarray(test.y).astype(str), return_counts=True)[1].max() / len(test)),
        "clean_raw": agreement(pool.features),
        "clean_harmonized": agreement(harmonized),
    }, harmonized


def _prepare(out: Path, force: bool) -> None:
    """Make the folder; of an earlier demo replace its files alone, and touch nothing else."""
    if out.is_dir() and any(out.iterdir()):
        earlier = (out / MARKER).is_file()
        if not (force and earlier):
            hint = ", or overwrite the earlier demo with --force." if earlier else "."
            raise InputError(f"{out} is not empty; choose another folder with --out{hint}")
        for name in FILES:
            (out / name).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
