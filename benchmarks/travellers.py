"""Participants measured at several sites: what SiteHarmonizer makes of them, with truth from real people.

    python benchmarks/travellers.py TABLE --deal 0 3 10 30     # so many training participants travelled
    python benchmarks/travellers.py TABLE --groups 6 7 --draws 20

TABLE has one row for each of some hundred participants and each of three FreeSurfer versions, with the
columns ``person``, ``software``, ``age`` and thicknesses. Participants are dealt one version each by thirds
of age, some of them all three; then all three measurements of held-out participants should come together. In
groups, six or seven participants were measured by every version, and each is held out in turn.

``apart`` is the within-person RMS difference between versions over the standard deviation between
participants, the median of the features; ``slope`` the error of the age slope of the harmonized training
participants, in SDs between participants for an SD of age.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from sklearn.model_selection import KFold

from equipool import SiteHarmonizer

Data = dict[str, np.ndarray]


def read(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return measurements (versions, participants, features) and ages (participants,)."""
    table = pd.read_csv(path, sep="\t").sort_values(["software", "person"])
    features = [name for name in table if name.endswith("_thickness")]
    parts = [part for _, part in table.groupby("software")]
    return np.stack([part[features].to_numpy(float) for part in parts]), parts[0]["age"].to_numpy(float)


def raw(a: Data, b: Data) -> tuple[np.ndarray, np.ndarray]:
    return a["X"], b["X"]


def within(a: Data, b: Data) -> tuple[np.ndarray, np.ndarray]:
    """Shift each version by its mean difference within participants who were measured several times."""
    x, site, person = a["X"], a["site"], np.unique(a["person"], return_inverse=True)[1]
    often = np.bincount(person)[person] > 1
    if not often.any():
        return raw(a, b)
    dummies = np.eye(3)[site]
    count = np.bincount(person)[:, None]
    means = [np.stack([np.bincount(person, c) for c in m.T], 1) / count for m in (x, dummies)]
    away, columns = x - means[0][person], dummies - means[1][person]
    shift = np.linalg.lstsq(columns[often], away[often], rcond=None)[0]
    return x - shift[site], b["X"] - shift[b["site"]]


def combat(a: Data, b: Data) -> tuple[np.ndarray, np.ndarray]:
    from combatlearn import ComBat

    n, x = len(a["X"]), pd.DataFrame(np.r_[a["X"], b["X"]])
    more = {"continuous_covariates": pd.DataFrame({"age": np.r_[a["age"], b["age"]]})}
    tool = ComBat(batch=pd.Series(np.r_[a["site"], b["site"]].astype(str)), method="fortin", **more)
    tool.fit(x.iloc[:n])
    return np.asarray(tool.transform(x.iloc[:n])), np.asarray(tool.transform(x.iloc[n:]))


def ours(a: Data, b: Data, *, subject: bool, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    def given(d: Data) -> dict[str, Any]:
        return {"site": d["site"], "covariates": d["age"][:, None]}

    more = {"subject": a["person"]} if subject else {}
    tool = SiteHarmonizer(random_state=0, **settings).fit(a["X"], **given(a), **more)
    return tool.transform(a["X"], **given(a)), tool.transform(b["X"], **given(b))


METHODS: dict[str, Callable[[Data, Data], tuple[np.ndarray, np.ndarray]]] = {
    "raw": raw,
    "within": within,
    "combat": combat,
    "ours": partial(ours, subject=False),
    "ours, subject": partial(ours, subject=True),
}


def apart(rows: np.ndarray) -> float:
    """Return the within-person RMS difference over the SD between participants; rows are (versions, n, p)."""
    mid = rows.mean(axis=0)
    within_person = np.sqrt(((rows - mid) ** 2).mean(axis=(0, 1)) * 1.5)
    return float(np.median(within_person / mid.std(axis=0)))


def slopes(x: np.ndarray, age: np.ndarray, sd: np.ndarray) -> np.ndarray:
    return ((x - x.mean(0)) * ((age - age.mean()) / age.std())[:, None]).mean(0) / sd


def rows_of(table: np.ndarray, age: np.ndarray, person: np.ndarray, site: np.ndarray) -> Data:
    return {"X": table[site, person], "site": site, "person": person, "age": age[person]}


def deal(path: str, counts: list[int], methods: list[str], overlap: float, seeds: int = 3) -> None:
    table, age = read(path)
    sd, rank = table.mean(0).std(0), age.argsort().argsort() / len(age)
    for count in counts:
        scores: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            version = rng.integers(0, 3, len(age)) if overlap else np.clip((rank * 3).astype(int), 0, 2)
            for train, test in KFold(5, shuffle=True, random_state=seed).split(age):
                travels = rng.permutation(train)[:count]
                person, site = np.append(train, np.repeat(travels, 2)), version[train]
                others = (version[travels][:, None] + [1, 2]) % 3
                a = rows_of(table, age, person, np.append(site, others.ravel()))
                b = rows_of(table, age, np.tile(test, 3), np.repeat(np.arange(3), len(test)))
                for method in methods:
                    x, y = METHODS[method](a, b)
                    error = slopes(np.asarray(x)[: len(train)], age[train], sd)
                    error = error - slopes(table[:, train].mean(0), age[train], sd)
                    y = np.asarray(y).reshape(3, len(test), -1)
                    scores[method].append((apart(y), float(np.sqrt((error**2).mean()))))
        for method, values in scores.items():
            mean = np.mean(values, axis=0)
            result = f"apart {mean[0]:.3f} slope {mean[1]:.3f}"
            print(f"overlap {overlap:g} travellers {count:3d} {method:16s} {result}", flush=True)


def groups(path: str, sizes: list[int], methods: list[str], draws: int) -> None:
    table, age = read(path)
    for size in sizes:
        scores: dict[str, list[float]] = {method: [] for method in methods}
        for draw in range(draws):
            people = np.random.default_rng(draw).permutation(len(age))[:size]
            harmonized = {method: np.empty((3, size, table.shape[2])) for method in methods}
            for k in range(size):
                train = np.delete(people, k)
                a = rows_of(table, age, np.tile(train, 3), np.repeat(np.arange(3), size - 1))
                b = rows_of(table, age, np.repeat(people[k], 3), np.arange(3))
                for method in methods:
                    harmonized[method][:, k] = METHODS[method](a, b)[1]
            for method in methods:
                scores[method].append(apart(harmonized[method]))
        for method, values in scores.items():
            error = np.std(values, ddof=1) / np.sqrt(draws)
            print(f"group of {size} {method:16s} apart {np.mean(values):.3f} ± {error:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument("--deal", type=int, nargs="+", default=[])
    parser.add_argument("--overlap", type=float, default=0.0, choices=(0.0, 1.0))
    parser.add_argument("--groups", type=int, nargs="+", default=[])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    call = parser.parse_args()
    warnings.simplefilter("ignore")
    if call.deal:
        deal(call.table, call.deal, call.methods, call.overlap)
    if call.groups:
        groups(call.table, call.groups, call.methods, call.draws)


if __name__ == "__main__":
    main()
