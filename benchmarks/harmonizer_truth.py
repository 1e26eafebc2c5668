"""Harmonizers against simulated truth: clean features, the age effect, and the power to find a disease.

    python benchmarks/harmonizer_truth.py [--seeds 10] [--jobs 2] [--kinds affine joint] [--methods ours]

Prints, for ages that overlap fully, by half and not at all: R² of harmonized with clean features (after the
pool's own mean, which nobody can know, is removed), the error of the age effect (mean absolute difference of
the fitted and the true change per decade, in percent of the true one), and of the truly affected features the
share that is found at a false-positive rate of 5 %, the threshold taken from those that are not affected.

Sites shift and stretch ("affine"), also mix and bend features, do so by the factors of people too ("joint",
of less chance), or shift and stretch where one value in 200 is a failure, anything within twenty deviations
("failures"): people are then judged where nothing failed.
"clean" are the simulator's features before any site touched them: more cannot be found.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from equipool.benchmark.harmonizers import HARMONIZERS, SIMULATED, make_harmonizer
from equipool.judge.scores import r2_with_clean
from equipool.simulate import simulate_table

METHODS = (*HARMONIZERS[:-2], "clean")  # but for those given the target
KINDS = {
    "affine": {},
    "mixed and bent": {"mixing": 0.3, "bending": 0.1},
    "joint": {"mixing": 0.3, "bending": 0.1, "joint": 0.3, "noise": 0.06},
    "failures": {},
}


def slope(feature: np.ndarray, age: np.ndarray) -> float:
    """Return the change per decade by a straight line."""
    centred = (age - age.mean()) / 10
    return float(centred @ feature / (centred @ centred))


def t_value(feature: np.ndarray, sick: np.ndarray, age: np.ndarray) -> float:
    """Return |t| of the disease beside a parabola in age."""
    design = np.column_stack([sick, np.ones_like(age), age / 50, (age / 50) ** 2])
    inverse = np.linalg.pinv(design.T @ design)
    beta = inverse @ design.T @ feature
    residuals = feature - design @ beta
    variance = (residuals**2).sum() / (len(age) - design.shape[1])
    return float(np.abs(beta[0]) / np.sqrt(variance * inverse[0, 0]))


def failed(features: np.ndarray, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the features with failures, if there are to be any, and where nothing failed."""
    rng = np.random.default_rng(1000 + seed)
    fails = (rng.random(features.shape) < 0.005) & (kind == "failures")
    odd = features.mean(axis=0) + 20 * features.std(axis=0) * rng.uniform(-1, 1, features.shape)
    return np.where(fails, odd, features), ~fails


def one(overlap: float, seed: int, kind: str, methods: list[str]) -> list[dict[str, object]]:
    usual = {"people": 80, "features": 40, "disease": 0.03, "noise": 0.1}
    truth = simulate_table(sites=SIMULATED, overlap=overlap, random_state=seed, **usual | KINDS[kind])
    pool, clean = truth.pool, truth.clean
    features, whole = failed(pool.features, kind, seed)
    columns = range(features.shape[1])
    sick, age = (pool.y == "AD").astype(float), pool.C[:, 0]
    rows = []
    largest = pool.site == np.bincount(pool.site).argmax()
    own = [largest & whole[:, j] for j in columns]
    single = [t_value(features[own[j], j], sick[own[j]], age[own[j]]) for j in columns]
    rows.append({"method": "single site", "t": single})
    people = [whole[:, j] for j in columns]
    true = [slope(clean[people[j], j], age[people[j]]) for j in columns]
    for method in methods:
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = {"site": pool.site_labels, "covariates": pool.C}
            x = clean if method == "clean" else features
            tool = make_harmonizer(method)
            found = x if tool is None else np.asarray(tool.fit(x, **given).transform(x, **given))
        judged = [(found[people[j], j], age[people[j]]) for j in columns]
        error = np.mean([abs(slope(*judged[j]) - true[j]) for j in columns]) / np.mean(np.abs(true))
        rows.append(
            {
                "method": method,
                "r2": np.mean(
                    [r2_with_clean(judged[j][0][:, None], clean[people[j], j, None]) for j in columns]
                ),
                "age error %": 100 * error,
                "t": [t_value(judged[j][0], sick[people[j]], judged[j][1]) for j in columns],
            }
        )
    return [
        {"kind": kind, "overlap": overlap, "seed": seed, "affected": truth.affected, **row} for row in rows
    ]


def power(runs: pd.DataFrame) -> float:
    """Return the share of affected features beyond the 95 % quantile of those that are not."""
    t, affected = np.concatenate(list(runs["t"])), np.concatenate(list(runs["affected"]))
    return 100 * float((t[affected] > np.quantile(t[~affected], 0.95)).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=-1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    arguments = parser.parse_args()
    tasks = [
        (overlap, seed, kind, arguments.methods)
        for kind in arguments.kinds
        for overlap in (1.0, 0.5, 0.0)
        for seed in range(arguments.seeds)
    ]
    runs = pd.DataFrame(
        [
            row
            for rows in Parallel(n_jobs=arguments.jobs)(delayed(one)(*task) for task in tasks)
            for row in rows
        ]
    )
    keys = ["kind", "overlap", "method"]
    table = runs.groupby(keys, sort=False)[["r2", "age error %"]].mean()
    table["power %"] = runs.groupby(keys, sort=False)[["t", "affected"]].apply(power)
    print(table.round(3).to_string())


if __name__ == "__main__":
    main()
