"""Harmonizers against simulated truth: clean features, the age effect, and the power to find a disease.

    python benchmarks/harmonizer_truth.py [--seeds 10]

Prints, for ages that overlap fully, by half and not at all: R² of harmonized with clean features (after the
pool's own mean, which nobody can know, is removed), the error of the age effect (mean absolute difference of
the fitted and the true change per decade, in percent of the true one), and of the truly affected features the
share that is found at a false-positive rate of 5 %, the threshold taken from those that are not affected.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from equipool.data import simulate_table
from equipool.evaluate.harmonizers import HARMONIZERS, SIMULATED, make_harmonizer

METHODS = HARMONIZERS[:-2]  # but for those told the target, or the truth


def slopes(features: np.ndarray, age: np.ndarray) -> np.ndarray:
    """Return the change per decade of each feature by a straight line."""
    centred = (age - age.mean()) / 10
    return centred @ (features - features.mean(axis=0)) / (centred @ centred)


def t_values(features: np.ndarray, sick: np.ndarray, age: np.ndarray) -> np.ndarray:
    """Return |t| of the disease beside a parabola in age."""
    design = np.column_stack([sick, np.ones_like(age), age / 50, (age / 50) ** 2])
    inverse = np.linalg.pinv(design.T @ design)
    beta = inverse @ design.T @ features
    left = features - design @ beta
    variance = (left**2).sum(axis=0) / (len(age) - design.shape[1])
    return np.abs(beta[0]) / np.sqrt(variance * inverse[0, 0])


def one(overlap: float, seed: int, kind: str) -> list[dict[str, object]]:
    effects = {"affine": {}, "mixed and bent": {"mixing": 0.3, "bending": 0.1}}[kind]
    truth = simulate_table(
        sites=SIMULATED,
        people=80,
        features=40,
        overlap=overlap,
        disease=0.03,
        noise=0.1,
        random_state=seed,
        **effects,
    )
    pool, clean = truth.pool, truth.clean
    sick, age = (pool.y == "AD").astype(float), pool.C[:, 0]
    rows = []
    largest = pool.site == np.bincount(pool.site).argmax()
    single = t_values(pool.features[largest], sick[largest], age[largest])
    rows.append({"method": "single site", "t": single})
    for method in METHODS:
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = {"site": pool.site_labels, "covariates": pool.C}
            found = make_harmonizer(method).fit(pool.features, **given).transform(pool.features, **given)
        ours, theirs = found - found.mean(axis=0), clean - clean.mean(axis=0)
        r2 = 1 - ((ours - theirs) ** 2).sum(axis=0) / (theirs**2).sum(axis=0)
        true = slopes(clean, age)
        error = np.abs(slopes(found, age) - true).mean() / np.abs(true).mean()
        rows.append(
            {"method": method, "r2": r2.mean(), "age error %": 100 * error, "t": t_values(found, sick, age)}
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
    arguments = parser.parse_args()
    tasks = [
        (overlap, seed, kind)
        for kind in ("affine", "mixed and bent")
        for overlap in (1.0, 0.5, 0.0)
        for seed in range(arguments.seeds)
    ]
    runs = pd.DataFrame(
        [row for rows in Parallel(n_jobs=-1)(delayed(one)(*task) for task in tasks) for row in rows]
    )
    keys = ["kind", "overlap", "method"]
    table = runs.groupby(keys, sort=False)[["r2", "age error %"]].mean()
    table["power %"] = runs.groupby(keys, sort=False)[["t", "affected"]].apply(power)
    print(table.round(3).to_string())


if __name__ == "__main__":
    main()
