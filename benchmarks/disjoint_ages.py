"""Harmonizing where the sites' ages do not overlap, with truth from real people, as a table and a figure.

    python benchmarks/disjoint_ages.py TABLE [--seeds 10] [--figure disjoint-ages.png]

TABLE has one row for each participant and each of three FreeSurfer versions, with the columns ``person``,
``software``, ``age`` and thicknesses. Each training participant is dealt one version, which is then the site:
at random (overlap 1), or by age (0.5, and 0: thirds of age). All three measurements of held-out participants
are harmonized, and should come together:

- ``apart``: within-person RMS difference over the SD between participants, median of features;
- ``found``: share of measurements whose nearest measurement by another version is the same participant's;
- ``slope``: error of the age slope of the harmonized training participants, in standard deviations.

Means over seeds, each of five folds, with an interval of 95 % over seeds (participants are the same).
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats
from sklearn.model_selection import KFold
from travellers import Data, apart, combat, ours, raw, read, rows_of, slopes

from equipool import SiteHarmonizer

OVERLAPS = {1.0: "the same", 0.5: "half overlap", 0.0: "disjoint"}


def age_withheld(a: Data, b: Data) -> tuple[np.ndarray, np.ndarray]:
    tool = SiteHarmonizer(random_state=0).fit(a["X"], site=a["site"])
    return tool.transform(a["X"], site=a["site"]), tool.transform(b["X"], site=b["site"])


METHODS = {
    "as measured": raw,
    "ComBat, given the age": combat,
    "equipool, age withheld": age_withheld,
    "equipool, given the age": partial(ours, subject=False),
}


def dealt(age: np.ndarray, overlap: float, rng: np.random.Generator) -> np.ndarray:
    """Return the version of each participant."""
    if overlap == 1:
        return rng.integers(0, 3, len(age))
    rank = age.argsort().argsort() / len(age)
    return np.clip(((rank + rng.uniform(-overlap, overlap, len(age)) / 2) * 3).astype(int), 0, 2)


def found(rows: np.ndarray) -> float:
    """Return the share of measurements (versions, participants, features) whose nearest one is their own."""
    z, n = (rows - rows.mean(axis=(0, 1))) / rows.mean(axis=0).std(axis=0), rows.shape[1]
    pairs = [(u, v) for u in range(3) for v in range(3) if u != v]
    nearest = [((z[u][:, None] - z[v][None]) ** 2).sum(axis=-1).argmin(axis=1) for u, v in pairs]
    return float(np.mean([some == np.arange(n) for some in nearest]))


def scores(table: np.ndarray, age: np.ndarray, overlap: float, seed: int) -> pd.DataFrame:
    version, result = dealt(age, overlap, np.random.default_rng(seed)), []
    for train, test in KFold(5, shuffle=True, random_state=seed).split(age):
        a = rows_of(table, age, train, version[train])
        b = rows_of(table, age, np.tile(test, 3), np.repeat(np.arange(3), len(test)))
        truth, sd = table[:, train].mean(axis=0), table.mean(axis=0).std(axis=0)
        for name, method in METHODS.items():
            x, y = (np.asarray(values) for values in method(a, b))
            error = slopes(x, age[train], sd) - slopes(truth, age[train], sd)
            y = y.reshape(3, len(test), -1)
            row = {"apart": apart(y), "found": found(y), "slope": np.sqrt((error**2).mean())}
            result.append({"method": name, "overlap": overlap, "seed": seed, **row})
    return pd.DataFrame(result)


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return mean and half width of the interval over seeds."""
    each = runs.groupby(["overlap", "method", "seed"], sort=False).mean()
    by = each.groupby(["overlap", "method"], sort=False)
    half = by.std() / np.sqrt(by.count()) * stats.t.ppf(0.975, by.count() - 1)
    return by.mean().join(half, rsuffix="_half")


def draw(table: np.ndarray, age: np.ndarray, result: pd.DataFrame, path: str) -> None:
    """Draw who was measured by which version at overlap 0, and two scores against the overlap."""
    from pathlib import Path

    from matplotlib.figure import Figure

    from equipool.report.style import COLOURS, LIGHT, save_figure, styled

    @styled
    def drawn() -> Figure:
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.1, 1.1))
        version = dealt(age, 0.0, np.random.default_rng(0))
        for k in range(3):
            some = version == k
            mean = table[k, some].mean(axis=1)
            left.plot(age[some], mean, "os^"[k], ms=2.5, color=COLOURS[k], label=f"version {k + 1}")
        left.set(title="Each version measured other ages", xlabel="age (years)", ylabel="mean thickness (mm)")
        left.legend(handletextpad=0.1)
        colours = LIGHT["c6"], LIGHT["c5"], LIGHT["c4"], LIGHT["c0"]
        for panel, name in ((middle, "apart"), (right, "found")):
            for k, (method, colour) in enumerate(zip(METHODS, colours, strict=True)):
                rows = result.xs(method, level="method").loc[list(OVERLAPS)]
                factor = 100 if name == "found" else 1
                panel.errorbar(
                    np.arange(3) + 0.04 * (k - 1.5), factor * rows[name], factor * rows[f"{name}_half"],
                    marker="os^D"[k], ms=5, lw=2.5 if k == 3 else 1.3, color=colour, label=method,
                )  # fmt: skip
            panel.set_xticks(range(3), OVERLAPS.values())
            panel.set_xlabel("ages of the three versions")
        middle.set(title="Within-person difference (0 is perfect)", ylabel="in SDs between participants")
        right.set(title="Same person found (100 % is perfect)", ylabel="% of measurements")
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return figure

    save_figure(drawn(), Path(path))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--figure", metavar="FILE")
    call = parser.parse_args()
    warnings.simplefilter("ignore")
    table, age = read(call.table)
    runs = [scores(table, age, overlap, seed) for overlap in OVERLAPS for seed in range(call.seeds)]
    result = summary(pd.concat(runs))
    print(result.round(3).to_string())
    if call.figure:
        draw(table, age, result, call.figure)


if __name__ == "__main__":
    main()
