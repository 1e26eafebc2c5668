"""How time and memory grow with rows, sites, latent dimensions and images, and with what slope.

    python benchmarks/growth.py --out DIR              # everything, about ten minutes of one core
    python benchmarks/growth.py --out DIR --parts check

Writes ``growth.csv``, ``growth.md`` and ``growth.png``. Every point is a process of its own, forked after all
is imported and its data are made: CPU seconds on one thread, and the peak of resident memory above where it
began. The slope is that of log(time) against log(size) between the last two points, where what does not grow
is smallest beside what does: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROWS = (1_000, 10_000, 100_000, 1_000_000)
SITES = (2, 10, 100, 1_000)
LATENT = (30, 128, 512)
VOXELS = 228_453  # of a 2 mm brain
USUAL = {"rows": 20_000, "sites": 10, "latent": 30, "features": 20}
STEPS = 30  # of each stage


def table(rows: int, sites: int, features: int, **_: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    site = np.arange(rows) % sites
    age = rng.uniform(20, 80, rows)
    X = rng.standard_normal((rows, features))
    X += 0.3 * rng.standard_normal((sites, features))[site]
    X += age[:, None] / 30
    y = (X[:, 0] > X[:, 0].mean()).astype(int)
    return {"X": X, "y": y, "site": site, "covariates": age}


def harmonizer(size: dict[str, int]) -> Callable[[], Any]:
    from equipool.estimators import SiteHarmonizer

    data = table(**size)
    X = data.pop("X")
    del data["y"]
    return lambda: SiteHarmonizer(random_state=0).fit(X, **data).transform(X, **data)


def pooler(size: dict[str, int]) -> Callable[[], Any]:
    from equipool.estimators import EquivariantPooler

    data = table(**size)
    estimator = EquivariantPooler(n_latent=size["latent"], steps=STEPS, batch_size=512, random_state=0)
    return lambda: estimator.fit(data["X"], data["y"], site=data["site"], covariates=data["covariates"])


def check(size: dict[str, int]) -> Callable[[], Any]:
    import equipool as ep

    data = table(**size)
    frame = pd.DataFrame(data["X"], columns=[f"f{k}" for k in range(size["features"])])
    frame = frame.assign(site=np.char.add("s", data["site"].astype(str)), age=data["covariates"])
    return lambda: str(ep.check(frame, site="site", covariates=["age"]))


def classifiers(size: dict[str, int]) -> Callable[[], Any]:
    from equipool.judge import classify_site

    data = table(**size)
    half = size["rows"] // 2
    x, site = data["X"], data["site"].astype(str)
    return lambda: classify_site(x[:half], site[:half], x[half:], site[half:], seed=0)


def equivariance(size: dict[str, int]) -> Callable[[], Any]:
    from equipool.judge.scores import delta_eq

    data = table(**size)
    return lambda: delta_eq(data["X"], data["covariates"])


def discrepancy(size: dict[str, int]) -> Callable[[], Any]:
    from equipool.judge.scores import mmd_measure

    data = table(**size)
    return lambda: mmd_measure(data["X"], data["site"])


def reading(size: dict[str, int]) -> Callable[[], Any]:
    """Read every volume of a cache once, in random batches of 8, with a gigabyte more of memory allowed."""
    from equipool.data import Volumes

    people = size["volumes"]
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.truncate(2 * people * VOXELS)  # holes: as long as the real file, and read like it
    store = np.memmap(file.name, dtype=np.int16, mode="r", shape=(people, VOXELS))
    os.unlink(file.name)
    scales = np.ones((people, 2), dtype=np.float32)
    volumes = Volumes(np.ones((1, 1, VOXELS), bool), np.eye(4), (), store, np.arange(people), scales)
    allowed = int(_status("VmData") * 2**20) + 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))

    def read() -> None:
        for batch in np.array_split(np.random.default_rng(0).permutation(people), max(people // 8, 1)):
            volumes.read(batch)

    return read


PARTS: dict[str, tuple[Callable[[dict[str, int]], Callable[[], Any]], dict[str, tuple[int, ...]]]] = {
    "SiteHarmonizer": (harmonizer, {"rows": ROWS, "sites": SITES}),
    "EquivariantPooler": (pooler, {"rows": ROWS, "sites": SITES, "latent": LATENT}),
    "delta_eq": (equivariance, {"rows": ROWS}),
    "M": (discrepancy, {"rows": ROWS, "sites": SITES}),
    "check": (check, {"rows": ROWS, "sites": SITES}),
    "reading volumes": (reading, {"volumes": (100, 1_000, 10_000)}),
    "site classifiers": (classifiers, {"rows": (1_000, 5_000, 25_000), "sites": (2, 10, 50)}),
}


def measure(make: Callable[[dict[str, int]], Callable[[], Any]], size: dict[str, int]) -> dict[str, float]:
    """Run one point in a child; return CPU seconds, megabytes above the start, and the wall's seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else {"seconds": np.nan, "megabytes": np.nan}
    try:
        run = make(size)
        before, anonymous = _peak(), _anonymous()
        start, wall = time.process_time(), time.perf_counter()
        run()
        seconds, wall = time.process_time() - start, time.perf_counter() - wall
        # Pages of a mapped file are the system's to take back; only the others are ours.
        grown = _anonymous() - anonymous if "volumes" in size else _peak() - before
        found = {"seconds": seconds, "megabytes": max(grown, 0.0), "wall": wall}
        with os.fdopen(writer, "w") as pipe:
            json.dump(found, pipe)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _anonymous() -> float:
    return _status("RssAnon")


def _status(name: str) -> float:
    """Return a figure of this process, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def slope(sizes: np.ndarray, values: np.ndarray) -> float:
    """Return the slope between the last two points, logarithms of both."""
    if len(values) < 2 or not (values[-2:] > 0).all():
        return float("nan")
    return float(np.diff(np.log(values[-2:]))[0] / np.diff(np.log(sizes[-2:]))[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--axes", nargs="+", default=["rows", "sites", "latent", "volumes"])
    parser.add_argument("--most", type=int, default=10**9, help="leave larger sizes out")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for part in arguments.parts:
        make, axes = PARTS[part]
        for axis, sizes in axes.items():
            for size in (n for n in sizes if n <= arguments.most and axis in arguments.axes):
                found = measure(make, {**USUAL, axis: size})
                rows.append({"part": part, "axis": axis, "size": size, **found})
                print(part, axis, size, {k: round(v, 2) for k, v in found.items()}, flush=True)
            write(pd.DataFrame(rows), arguments.out)


def write(frame: pd.DataFrame, out: Path) -> None:
    frame.to_csv(out / "growth.csv", index=False)
    (out / "growth.md").write_text(as_text(frame))
    draw(frame, out / "growth.png")


def as_text(frame: pd.DataFrame) -> str:
    lines = [
        "| what | grows with | sizes | CPU seconds | slope | MB | slope |",
        "|---|---|---|---|---|---|---|",
    ]
    for (part, axis), group in frame.groupby(["part", "axis"], sort=False):
        sizes = group["size"].to_numpy(float)
        cells = [part, axis, " · ".join(f"{s:,.0f}" for s in sizes)]
        for column in ("seconds", "megabytes"):
            values = group[column].to_numpy(float)
            cells += [" · ".join(f"{v:.3g}" for v in values), f"{slope(sizes, values):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(frame: pd.DataFrame, path: Path) -> None:
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(frame["axis"]))
    figure = Figure(figsize=(3.4 * len(axes), 6), layout="constrained")
    grid = figure.subplots(2, len(axes), squeeze=False, sharex="col")
    for column, axis in enumerate(axes):
        for row, (name, unit) in enumerate((("seconds", "CPU seconds"), ("megabytes", "MB above the start"))):
            place = grid[row, column]
            for part, group in frame[frame["axis"] == axis].groupby("part", sort=False):
                sizes, values = group["size"].to_numpy(float), group[name].to_numpy(float)
                place.loglog(sizes, values, "o-", ms=3, label=f"{part} ({slope(sizes, values):.2f})")
            low, high = place.get_ylim()
            place.set_ylim(low / 2, 30 * high)  # never so near that noise looks like growth
            ticks = sorted(set(frame.loc[frame["axis"] == axis, "size"]))[:: 2 if axis == "rows" else 1]
            place.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=7)
            place.set_xticks([], minor=True)
            place.set_xlabel(axis if row else "")
            place.set_ylabel(unit if not column else "")
            place.legend(fontsize=6, title="slope at the end", title_fontsize=6, loc="upper left")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
