"""Verdicts of the report on planted cheats and on honest harmonizers: who is accused, and of what.

    python benchmarks/verdicts.py [--seeds 10] [--people 60] [--features 12] [--overlap 0.6]
    python benchmarks/verdicts.py --table fcon1000.tsv --site site --covariate age --target sex [--seeds 3]

Each harmonizer is judged twice: by its table alone (``given``, as `equipool report BEFORE --after AFTER`),
and refitted (``refitted``, as at the end of `equipool harmonize`). Printed is the share of seeds in which the
covariate, the target or features are named, suspected (fair) or accused (bad). Right: 0 for honest ones,
1 for what a cheat did. On a table of your own, seeds are those of the report. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool import SiteHarmonizer
from equipool.benchmark.harmonizers import ComBatPeer, read_pool
from equipool.judge import heldout
from equipool.report import account

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import planted

PEERS = ("combat-nocov", "combat", "combat-gam", "covbat")


class Raw:
    """Features as measured."""

    def fit(self, X: Any, y: Any = None, **given: Any) -> Raw:
        """Learn nothing."""
        return self

    def transform(self, X: Any, **given: Any) -> Any:
        """Return X."""
        return X


def methods() -> dict[str, Any]:
    cheats = (*planted.TARGET, *planted.AGE, planted.SiteMeans)
    peers = {name: lambda name=name: ComBatPeer(name) for name in PEERS}
    told = {"ours, given the target": lambda: SiteHarmonizer(keep_target=True)}
    honest = {"raw": Raw, "ours": SiteHarmonizer, "own combat": planted.Honest, **peers, **told}
    return honest | {one.__name__: one for one in cheats}


def named(pool: Any, make: Any, refitted: bool, seed: int) -> dict[str, str]:
    """Return the level at which each variable, and the features, are named."""
    given = {"site": pool.site_labels, "covariates": pool.C}
    final = make().fit(pool.features, pool.y, **given).transform(pool.features, **given)
    refit, again = account.refit_table(pool, make), account.again_table(pool, make)
    judged = heldout.held_out(
        pool,
        pool.features,
        refit if refitted else lambda train: final,
        final=final,
        again=again if refitted else None,
        folds=3,
        seed=seed,
    )
    features = {"feature": list(pool.feature_names), **judged["features"]}
    found = {}
    for one in account.verdict(judged, "age", features):
        for what in (*pool.covariate_names, pool.target_name):
            if "written into" in one["text"] and what in one["text"].split(" written")[0]:
                found[what] = one["level"]
        if "keep little" in one["text"] or "keeps little" in one["text"]:
            found["features"] = one["level"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--people", type=int, default=60)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--features", type=int, default=12)
    parser.add_argument("--overlap", type=float, default=0.6)
    parser.add_argument("--table")
    parser.add_argument("--site", default="site")
    parser.add_argument("--covariate", default="age")
    parser.add_argument("--target", default="sex")
    parser.add_argument("--methods", nargs="+", default=list(methods()), choices=list(methods()))
    arguments = parser.parse_args()
    heldout.REPORTED, heldout.AMONG_TEST = {"tree": "decision tree"}, ("tree",)  # sites are not the question
    rows, whole = [], None
    if arguments.table:
        given = {"site": arguments.site, "covariates": [arguments.covariate], "target": arguments.target}
        _, whole, _ = read_pool(arguments.table, **given)
    for name in arguments.methods:
        for form in ("given", "refitted"):
            counts: Counter[tuple[str, str]] = Counter()
            for seed in range(arguments.seeds):
                sizes = {k: getattr(arguments, k) for k in ("people", "sites", "features", "overlap")}
                pool = planted.table(seed, **sizes) if whole is None else whole
                counts.update(named(pool, methods()[name], form == "refitted", seed).items())
            covariate, target = pool.covariate_names[0], pool.target_name
            row: dict[str, Any] = {"method": name, "form": form}
            for what in (covariate, target, "features"):
                row |= {f"{what} {level}": counts[what, level] / arguments.seeds for level in ("fair", "bad")}
            rows.append(row)
            print("  ".join(f"{key}: {value}" for key, value in row.items() if value), flush=True)
    frame = pd.DataFrame(rows).replace(0.0, np.nan)
    print(frame.to_string(index=False, na_rep="-"))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
