"""SiteHarmonizer's time beside combatlearn's in the same run, and its time and memory on a large table.

    python benchmarks/harmonizer_speed.py [--large]

Ends with one line of JSON. One core.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import warnings
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from equipool import SiteHarmonizer
from equipool.benchmark.harmonizers import make_harmonizer

CLOSED = "ours, closed form"  # without curves and network, which are learned
TAKEN = "ours, network"  # trained to the end, though there is nothing to learn here


def table(rows: int, features: int, sites: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    site = rng.integers(0, sites, rows)
    age = rng.uniform(20, 80, rows)
    x = rng.standard_normal((rows, features)) + rng.standard_normal((sites, features))[site]
    x += np.outer(age / 30, rng.standard_normal(features))
    return x, np.array([f"s{k:03d}" for k in site]), age


def make(method: str) -> Any:
    own = {CLOSED: {"bending": False, "network": False}, TAKEN: {"network": True}}
    return SiteHarmonizer(**own[method]) if method in own else make_harmonizer(method)


def seconds(method: str, x: np.ndarray, site: np.ndarray, age: np.ndarray, *, times: int = 3) -> float:
    """Return the best of a few runs of fit and transform."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        tool = make(method).fit(x, site=site, covariates=age[:, None])
        tool.transform(x, site=site, covariates=age[:, None])
        found.append(time.perf_counter() - start)
    return min(found)


def one_person(x: np.ndarray, site: np.ndarray, age: np.ndarray) -> float:
    tool = make_harmonizer("ours").fit(x, site=site, covariates=age[:, None])
    start = time.perf_counter()
    for k in range(20):
        tool.transform(x[k : k + 1], site=site[k : k + 1], covariates=age[k : k + 1, None])
    return (time.perf_counter() - start) / 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true", help="100 000 x 200 with 100 sites")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    result: dict[str, float] = {}
    with threadpool_limits(1):
        if arguments.large:
            result["large_seconds"] = seconds("ours", *table(100_000, 200, 100), times=1)
        else:
            small = table(1000, 121, 20)
            methods = (CLOSED, "ours", TAKEN, "combat", "combat-gam", "covbat", "covbat-gam")
            times = {m: seconds(m, *small) for m in methods}
            for method, spent in times.items():
                print(f"{method:18s} {spent:7.3f} s  the closed form takes {times[CLOSED] / spent:.2f} of it")
            result = {f"ratio_{m}": times[CLOSED] / spent for m, spent in times.items() if m != CLOSED}
            result["one_person_ms"] = 1000 * one_person(*small)
    unit = 1 if sys.platform == "darwin" else 1024
    result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
