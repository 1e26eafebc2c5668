"""False positives: what means nothing must mean nothing after harmonizing.

    python benchmarks/nulls.py tables TABLE --site site --covariate age --target sex [--shuffles 20]
    python benchmarks/nulls.py volumes FOLDER --target sex [--break-at sub-M2052] [--shuffles 10]
    python benchmarks/nulls.py power [--shuffles 20]

A target, the ages or the sites are shuffled (target and ages within sites), the harmonizer is fitted on all
rows, given what a user would give it, and tested as a user would test. Printed, with the standard error over
shuffles:

- ``t2``: mean t² of the shuffled target (or age) over features, age adjusted, an intercept for each site;
  ``t2-``: the same without site intercepts, to be compared with ``ours`` (not given the target): the shuffle
  keeps each site's share of the target, so a part of it is true; ``p05``: share of features with p < .05;
  ``fdr``: features at a false discovery rate of 5 %; ``auc`` and ``r2``: cross-validated. Right: t2, p05 and
  fdr as for raw, an auc of 0.5, an r2 of at most 0.
- Shuffled sites: balanced accuracy by which a classifier predicts them (right: one in so many), and by how
  much the R² of the true age falls from that of raw (right: 0).
- ``power`` (simulated tables, in which the disease's share differs between sites): share of truly affected
  features that is found at the false-positive rate of 5 % that unaffected features have, and that rate at
  p < .05.

Methods ending in ``-y`` are given the target.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from equipool import ImageHarmonizer, SiteHarmonizer, simulate_table
from equipool.benchmark.harmonizers import ComBatPeer, read_pool
from equipool.data.bids import read_bids
from equipool.data.volumes import Volumes
from equipool.judge.statmaps import stat_map

METHODS = ("raw", "ours", "ours-y", "combat", "combat-y", "combat-gam", "covbat-gam")
FOLDS = StratifiedKFold(5, shuffle=True, random_state=0)


def harmonized(method: str, x: np.ndarray, site: np.ndarray, c: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the features harmonized by a method; ``-y``: with the target as what it is to keep."""
    name = method.removesuffix("-y")
    given = {"site": site, "covariates": c}
    if name == "raw":
        return x
    if name == "ours":
        model = SiteHarmonizer(random_state=0, keep_target=name != method)
        return model.fit(x, np.where(y > 0, "a", "b"), **given).transform(x, **given)
    if name != method:  # ComBat keeps what is among its covariates
        given["covariates"] = np.c_[c, y]
    return ComBatPeer(name).fit(x, **given).transform(x, **given)


def t_values(x: np.ndarray, y: np.ndarray, beside: np.ndarray) -> tuple[np.ndarray, int]:
    """Return t of y in the regression of each feature on y and other columns, and the degrees of freedom."""
    q = np.linalg.qr(np.c_[np.ones(len(y)), beside])[0]
    y, x = y - q @ (q.T @ y), x - q @ (q.T @ x)
    slope, df = y @ x / (y @ y), len(y) - q.shape[1] - 1
    return slope / np.sqrt(((x - np.outer(y, slope)) ** 2).sum(axis=0) / df / (y @ y)), df


def tests(x: np.ndarray, y: np.ndarray, trend: np.ndarray, site: np.ndarray) -> dict[str, float]:
    """Return mean t² with and without site intercepts, and what is called significant with them."""
    intercepts = (site[:, None] == np.unique(site)[None, 1:]).astype(float)
    t, df = t_values(x, y, np.c_[trend, intercepts])
    without, _ = t_values(x, y, trend)
    p = 2 * stats.t.sf(np.abs(t), df)
    fdr = float((stats.false_discovery_control(p) <= 0.05).sum())
    return {"t2": (t**2).mean(), "t2-": (without**2).mean(), "p05": (p < 0.05).mean(), "fdr": fdr}


def within(values: np.ndarray, site: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return values shuffled within sites."""
    result = values.copy()
    for s in np.unique(site):
        rows = np.flatnonzero(site == s)
        result[rows] = rng.permutation(values[rows])
    return result


def classifier() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=2000))


def regression() -> Any:
    return make_pipeline(StandardScaler(), RidgeCV(np.logspace(0, 4, 9)))


def of_target(method: str, pool: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, float]:
    y = within(pool["y"], pool["site"], rng)
    x = harmonized(method, pool["x"], pool["site"], pool["c"], y)
    auc = cross_val_score(classifier(), x, y, cv=FOLDS, scoring="roc_auc").mean()
    return tests(x, y, np.c_[pool["c"], pool["c"] ** 2], pool["site"]) | {"auc": auc}


def of_ages(method: str, pool: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, float]:
    c = within(pool["c"], pool["site"], rng)
    x = harmonized(method, pool["x"], pool["site"], c, pool["y"])
    r2 = cross_val_score(regression(), x, c[:, 0], cv=FOLDS.split(x, pool["site"]), scoring="r2").mean()
    nothing = np.empty((len(x), 0))
    return tests(x, c[:, 0], nothing, pool["site"]) | {"r2": r2}


def of_sites(method: str, pool: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, float]:
    site = rng.permutation(pool["site"])
    x = harmonized(method, pool["x"], site, pool["c"], pool["y"])
    accuracy = cross_val_score(classifier(), x, site, cv=FOLDS, scoring="balanced_accuracy").mean()
    age = [
        cross_val_score(regression(), each, pool["c"][:, 0], cv=FOLDS.split(x, site), scoring="r2").mean()
        for each in (x, pool["x"])
    ]
    return {"accuracy": accuracy, "chance": 1 / len(np.unique(site)), "age r2 − raw": age[0] - age[1]}


def simulated(seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return a table in which ages and the disease's share differ between sites, and what is affected."""
    rng = np.random.default_rng(seed)
    truth = simulate_table(
        sites=("A", "B", "C", "D"),
        people=250,
        features=60,
        overlap=0.5,
        disease=0.03,
        noise=0.1,
        random_state=seed,
    )
    pool = truth.pool
    y = (pool.y == "AD").astype(float)
    share = np.array([0.2, 0.4, 0.6, 0.8])[pool.site]
    kept = rng.random(len(y)) < np.where(y > 0, share, 1 - share)
    return {
        "x": pool.X[kept],
        "site": pool.site_labels[kept],
        "c": pool.C[kept],
        "y": y[kept],
    }, truth.affected


def of_power(method: str, seed: int) -> dict[str, float]:
    pool, affected = simulated(seed)
    x = harmonized(method, pool["x"], pool["site"], pool["c"], pool["y"])
    intercepts = (pool["site"][:, None] == np.unique(pool["site"])[None, 1:]).astype(float)
    trend, result = np.c_[pool["c"], pool["c"] ** 2], {}
    for name, beside in (("site intercepts", np.c_[trend, intercepts]), ("without", trend)):
        t, df = t_values(x, pool["y"], beside)
        t = np.abs(t)
        result[f"power, {name}"] = (t[affected] > np.quantile(t[~affected], 0.95)).mean()
        result[f"false, {name}"] = (2 * stats.t.sf(t[~affected], df) < 0.05).mean()
    return result


def table_of(rows: Iterator[tuple[str, str, dict[str, float]]]) -> str:
    frame = pd.DataFrame([{"shuffled": what, "method": method, **row} for what, method, row in rows])
    lines = []
    for what, part in frame.groupby("shuffled", sort=False):
        grouped = (
            part.drop(columns="shuffled").dropna(axis="columns", how="all").groupby("method", sort=False)
        )
        mean, error = grouped.mean(), grouped.sem()
        text = mean.map("{:.3f}".format) + " (" + error.map("{:.3f}".format) + ")"
        lines += [f"shuffled: {what}", text.to_string(), ""]
    return "\n".join(lines)


def tables(arguments: argparse.Namespace) -> None:
    _, pool, _ = read_pool(
        arguments.source, site=arguments.site, covariates=[arguments.covariate], target=arguments.target
    )
    labels = np.asarray(pool.y).astype(str)
    x = pool.features[:, pool.features.std(axis=0) > 0]
    given = {"x": x, "site": pool.site_labels, "c": pool.C, "y": (labels == max(labels)).astype(float)}
    kinds: dict[str, Callable[..., dict[str, float]]]
    kinds = {"target": of_target, "ages": of_ages, "sites": of_sites}

    def runs() -> Iterator[tuple[str, str, dict[str, float]]]:
        for what in arguments.kinds:
            for method in arguments.methods:
                if method.endswith("-y") and what != "target":
                    continue
                for seed in range(arguments.shuffles):
                    yield what, method, kinds[what](method, given, np.random.default_rng(seed))

    print(table_of(runs()))


def volumes(arguments: argparse.Namespace) -> None:
    """t-maps of a shuffled target with the scanner in the model, on scans as measured and as harmonized."""
    frame = read_bids(Path(arguments.source))
    if arguments.break_at:  # the scanner changed there: participants before and after are two
        first = frame.loc[frame["participant_id"] == arguments.break_at, arguments.site].iloc[0]
        early = (frame[arguments.site] == first) & (frame["participant_id"] < arguments.break_at)
        frame[arguments.site] = frame[arguments.site].astype(str).where(~early, "before the change")
    scans = Volumes.build(list(frame["path"]), progress=True)
    site, age = frame[arguments.site].astype(str).to_numpy(), frame[[arguments.covariate]]
    given = {"site": site, "covariates": age}

    def fitted(y: np.ndarray | None) -> Volumes:
        model = ImageHarmonizer(random_state=0, keep_target=y is not None)
        return model.fit(scans, y, **given).transform(scans, **given)

    maps = {"raw": scans, "ours": fitted(None)}

    def runs() -> Iterator[tuple[str, str, dict[str, float]]]:
        for seed in range(arguments.shuffles):
            y = within(frame[arguments.target].to_numpy(), site, np.random.default_rng(seed))
            t2, given_y = {}, {"ours-y": fitted(y)} if "ours-y" in arguments.methods else {}
            for method, values in {**maps, **given_y}.items():
                one = stat_map(values, y, covariates=age, sites=site)
                t2[method] = float(np.sqrt((one.t[one.tested] ** 2).mean()))
                fdr = int(one.significant(alpha=0.05, correction="fdr").sum())
                numbers = {"rms t": t2[method], "over raw": t2[method] / t2["raw"], "fdr": fdr}
                yield "target", method, numbers | {"any fdr": float(fdr > 0)}

    print(table_of(runs()))


def power(arguments: argparse.Namespace) -> None:
    seeds = range(arguments.shuffles)
    print(table_of(("nothing", m, of_power(m, seed)) for m in arguments.methods for seed in seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["tables", "volumes", "power"])
    parser.add_argument("source", nargs="?")
    parser.add_argument("--site", default="site")
    parser.add_argument("--covariate", default="age")
    parser.add_argument("--target", default="sex")
    parser.add_argument("--break-at")
    parser.add_argument("--shuffles", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--kinds", nargs="+", default=["target", "ages", "sites"])
    arguments = parser.parse_args()
    with threadpool_limits(1), warnings.catch_warnings(action="ignore"):
        {"tables": tables, "volumes": volumes, "power": power}[arguments.what](arguments)


if __name__ == "__main__":
    main()
