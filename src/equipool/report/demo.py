"""The demo: three scanners whose people's ages do not overlap, from a table to harmonized volumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from equipool.data import PooledDataset, check
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.report.figures import pooling_figure, preflight_figure, save_figure
from equipool.simulate import SimulatedTable, simulate_table

__all__ = ["run_demo"]

MARKER = ".equipool-demo"
FILES = ("table.csv", "preflight.json", "preflight.png", "harmonized.csv", "pooled.png")


def run_demo(out: Path, *, overlap: float = 0.0, seed: int = 0, force: bool = False) -> Path:
    """Simulate, check, pool and harmonize; write it all into ``out`` and return the picture's path."""
    truth = simulate_table(overlap=overlap, random_state=seed)
    _prepare(out, force)
    table = out / "table.csv"
    write_whole(table, truth.pool.to_frame().to_csv(index=False))
    report = check(table, site="site", covariates="age", target="dx", id="id")
    print(report)
    write_whole(out / "preflight.json", json.dumps(report.to_dict(), ensure_ascii=False, indent=2))
    save_figure(preflight_figure(report), out / "preflight.png")
    print("\nFitting the pooler (about 20 seconds) …", file=sys.stderr)
    figures, harmonized = _pool(truth, seed)
    frame = truth.pool.to_frame()
    frame[list(truth.pool.feature_names)] = harmonized
    write_whole(out / "harmonized.csv", frame.to_csv(index=False))
    readings = {"raw features": figures["site_auc_raw"], "the code": figures["site_auc_code"]}
    figure = pooling_figure(truth.pool, harmonized, truth.pool.feature_names[0], readings, chance=0.5)
    picture = save_figure(figure, out / "pooled.png")
    print(_summary(figures))
    print(f"\nTable:      {table}\nHarmonized: {out / 'harmonized.csv'}\nPicture:    {picture}")
    return picture


def _pool(truth: SimulatedTable, seed: int) -> tuple[dict[str, float], Any]:
    """Fit on half of the people, judge on the other half; harmonize all of them."""
    from equipool.estimators import EquivariantPooler
    from equipool.judge import classify_site
    from equipool.judge.scores import r2_with_clean

    pool = truth.pool
    first, second = pool.split(0.5, stratify=("site", "target"), random_state=seed)
    train, test = pool[first], pool[second]
    pooler = EquivariantPooler(random_state=seed, steps=800)
    pooler.fit(train.X, train.y, site=train.site_labels, covariates=train.C)
    harmonized = pooler.harmonize(pool.X, site=pool.site_labels, covariates=pool.C)

    def site_auc(a: Any, b: Any) -> float:
        return max(score.auc for score in classify_site(a, train.site, b, test.site, seed=seed))

    return {
        "site_auc_raw": site_auc(train.X, test.X),
        "site_auc_code": site_auc(pooler.transform(train.X), pooler.transform(test.X)),
        "accuracy": pooler.score(test.X, test.y),
        "majority": _majority(test),
        "clean_raw": r2_with_clean(pool.features[second], truth.clean[second]),
        "clean_harmonized": r2_with_clean(harmonized[second], truth.clean[second]),
    }, harmonized


def _majority(pool: PooledDataset) -> float:
    return float(np.unique(np.asarray(pool.y).astype(str), return_counts=True)[1].max() / len(pool))


def _summary(figures: dict[str, float]) -> str:
    return (
        "\nOn people whom the pooler has not seen:\n"
        f"  agreement with the clean volumes (R²)    {figures['clean_raw']:5.2f} as measured, "
        f"{figures['clean_harmonized']:.2f} harmonized\n"
        f"  site read by the best of three (AUC)     {figures['site_auc_raw']:5.2f} from the features, "
        f"{figures['site_auc_code']:.2f} from the code (chance 0.50)\n"
        f"  diagnosis predicted from the code        {figures['accuracy']:5.0%} right "
        f"(always the larger class: {figures['majority']:.0%})"
    )


def _prepare(out: Path, force: bool) -> None:
    """Make the folder; of an earlier demo replace its own files alone, and touch nothing else."""
    if out.is_dir() and any(out.iterdir()):
        earlier = (out / MARKER).is_file()
        if not (force and earlier):
            hint = ", or overwrite the earlier demo with --force." if earlier else "."
            raise InputError(f"{out} is not empty; choose another folder with --out{hint}")
        for name in FILES:
            (out / name).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
