"""Harmonized volumes judged on held-out people, and t-maps of the disease, beside raw and ComBat."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.benchmark.cohorts import load_brains, scanned_by_all, simulated_folder, whole_cohort
from equipool.benchmark.harmonizers import READERS, site_readers
from equipool.benchmark.methods import METHODS, Settings, code_hash, make_method, settings_of
from equipool.benchmark.table1 import file_stem
from equipool.data.nifti import read_volume
from equipool.data.pooled import PooledDataset
from equipool.data.volumes import Volumes
from equipool.files import write_whole
from equipool.judge import classifiers
from equipool.judge.blocks import block_means
from equipool.judge.statmaps import StatMap, detection, detection_at, stat_map
from equipool.parallel import fan_out
from equipool.progress import duration, say

__all__ = ["VolumeResult", "block_means", "harmonizer", "run_volumes"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
Rows = NDArray[np.float32]
Harmonizer = Callable[[Rows, IntArray, IntArray], Rows]
HARMONIZED = ("raw", "gain", "combat", "combat-gain", "ours")
FALSE_RATES = (0.01, 0.001)
SHUFFLES = 3  # of the scanners in each split, to say what the best of three reads where there is nothing


@dataclass(frozen=True, eq=False)
class Truth:
    """What the simulator knows: clean volumes, and what the disease changes."""

    clean: Volumes
    affected: NDArray[np.bool_]
    unaffected: NDArray[np.bool_]
    direction: FloatArray


@dataclass(frozen=True, eq=False)
class VolumeResult:
    """What :func:`run_volumes` found: one row a split and method, one a t-map, and the maps themselves."""

    name: str
    splits: pd.DataFrame
    detected: pd.DataFrame
    maps: dict[str, StatMap]
    pool: PooledDataset
    volumes: Volumes
    harmonized: Volumes
    truth: Truth | None

    @property
    def text(self) -> str:
        """Both tables as Markdown."""
        means = self.splits.groupby("method", sort=False).agg(["mean", "std"])
        lines = [f"## {self.name}: harmonized volumes, held-out people", ""]
        columns = [c for c in self.splits.columns if c not in ("method", "split")]
        lines += ["| method | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for method in means.index:
            cells = [_cell(means.loc[method, (c, "mean")], means.loc[method, (c, "std")]) for c in columns]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        lines += ["", f"## {self.name}: t-maps of the disease, everybody", "", _markdown(self.detected)]
        return "\n".join(lines) + "\n"


def run_volumes(
    name: str,
    out: Path,
    *,
    splits: int = 5,
    jobs: int | None = None,
    settings: Settings | None = None,
    fresh: bool = False,
) -> VolumeResult:
    """Judge harmonized volumes of a cohort on several splits, and t-maps on the whole; write both tables.

    Each split is kept as a file of its own under ``runs``, so a killed comparison goes on; ``fresh`` judges
    all of them anew.
    """
    stem = file_stem(name)
    rows = _judged_splits(name, out / "runs", splits, jobs, fresh)
    pool, volumes = whole_cohort(name)
    truth = known_truth(name, volumes)
    say(f"{name}: t-maps")
    maps, harmonized = disease_maps(name, pool, volumes, settings)
    result = VolumeResult(
        name, pd.DataFrame(rows), _detected(maps, truth), maps, pool, volumes, harmonized, truth
    )
    write_whole(out / f"{stem}-volumes.csv", result.splits.to_csv(index=False))
    write_whole(out / f"{stem}-tmaps.csv", result.detected.to_csv(index=False))
    write_whole(out / f"{stem}-volumes.md", result.text)
    return result


def _judged_splits(
    name: str, folder: Path, splits: int, jobs: int | None, fresh: bool
) -> list[dict[str, Any]]:
    """Return the rows of all splits, and judge those that are not there yet."""
    key = _split_key(*whole_cohort(name))
    kept = {k: folder / f"{file_stem(name)}-volumes-{key}-{k}.json" for k in range(splits)}
    known = {k: None if fresh else _read_split(path) for k, path in kept.items()}
    todo = [k for k, rows in known.items() if rows is None]
    if len(todo) < splits:
        say(f"{splits - len(todo)} of {splits} splits of {name} are there already")
    say(f"{name}: harmonized volumes of {len(todo)} splits")
    start = time.perf_counter()
    for done, rows in enumerate(fan_out(judge_split, ((name, k) for k in todo), jobs=jobs), start=1):
        k = rows[0]["split"]
        known[k] = rows
        write_whole(kept[k], json.dumps(rows))
        left = (time.perf_counter() - start) / done * (len(todo) - done)
        say(f"[{done}/{len(todo)}] splits; about {duration(left)} left")
    return [row for k in range(splits) for row in known[k] or ()]


def _split_key(pool: PooledDataset, volumes: Volumes) -> str:
    """Return a name for the splits of a cohort that no other people, images or code share."""
    digest = hashlib.sha256(repr((code_hash(), pool.sites, HARMONIZED)).encode())
    for part in (pool.C, pool.site, volumes.mask, volumes.scales):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:16]


def _read_split(path: Path) -> list[dict[str, Any]] | None:
    """Return the rows of an earlier run; a file that holds none is made anew."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return rows if [row["method"] for row in rows] == list(HARMONIZED) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def judge_split(name: str, seed: int) -> list[dict[str, Any]]:
    """Fit harmonizers on the training people of a split and judge their volumes on the held-out ones."""
    data = load_brains(name, seed)
    pool, volumes = whole_cohort(name)
    place = {path: k for k, path in enumerate(volumes.paths)}
    train, test = (np.array([place[path] for path in part.images or ()]) for part in (data.train, data.test))
    truth = known_truth(name, volumes)
    clean, by_all = None, None
    if truth is not None:
        clean, by_all = truth.clean.read(), scanned_by_all(name, pool.ids[test], pool.sites, volumes.mask)
    rows = []
    alone = max(_read(_fitted(pool.C[train], pool.site[train]), pool.C[test], pool.site[test]))
    for method in HARMONIZED:
        harmonize = harmonizer(method, pool, volumes, train)
        values = harmonize(volumes.read(), np.arange(len(pool)), pool.site)
        blocks = block_means(values, volumes.mask)
        readers = _fitted(blocks[train], pool.site[train])
        readings = _read(readers, blocks[test], pool.site[test])
        row: dict[str, Any] = {"split": seed, "method": method, "scanner": max(readings)}
        row |= dict(zip(READERS, readings, strict=True)) | {"scanner_from_age": alone}
        row |= _read_as_codes(blocks, pool.site, train, test)
        row["scanner_within"] = _reader_within(blocks, pool, test)
        if clean is not None and by_all is not None:
            same = _blocks_by_all(by_all, harmonize, test, volumes.mask)
            row["scanner_same_people"] = max(_read(readers, *same))
            row |= _likeness(values, clean, train, test)
        rows.append(row)
    # Of the last method's volumes: with shuffled scanners nothing is to be read from any.
    shuffled = [np.random.default_rng((seed, k)).permutation(pool.site) for k in range(SHUFFLES)]
    levels = [max(_read(_fitted(blocks[train], s[train]), blocks[test], s[test])) for s in shuffled]
    as_codes = [_read_as_codes(blocks, s, train, test)["scanner_accuracy"] for s in shuffled]
    level = {"scanner_shuffled": float(np.mean(levels)), "accuracy_shuffled": float(np.mean(as_codes))}
    return [row | level for row in rows]


def harmonizer(method: str, pool: PooledDataset, volumes: Volumes, train: IntArray) -> Harmonizer:
    """Return what harmonizes scans by one method, fitted on some people; all are told the age alone.

    It takes scans, (rows, voxels), whose they are, as rows of the pool, and of which site.
    """
    if method == "ours":
        return _ours(pool, volumes, train)
    # The same gains as ours has, so that ComBat is not judged by a worse normalisation.
    even = _at_gain_one(volumes[train]) if method.endswith("gain") else _as_they_are
    if method.startswith("combat"):
        return _combat(pool, volumes, train, even)
    return lambda rows, people, site: even(rows)


def _ours(pool: PooledDataset, volumes: Volumes, train: IntArray) -> Harmonizer:
    from equipool.sites.scans import Box
    from equipool.sites.volume_model import fit_volume_sites

    c, box = pool.scaled, Box(volumes.mask)
    model = fit_volume_sites(volumes[train], c[train], pool.site[train], np.empty((len(train), 0)))

    def harmonize(rows: Rows, people: IntArray, site: IntArray) -> Rows:
        clean = np.empty_like(rows)
        for k in range(0, len(rows), 32):
            part = slice(k, k + 32)
            clean[part] = model.remove(rows[part], c[people[part]], site[part], box)
        return clean

    return harmonize


def _combat(
    pool: PooledDataset, volumes: Volumes, train: IntArray, even: Callable[[Rows], Rows]
) -> Harmonizer:
    from equipool.estimators.peers import ComBatPeer

    fitted = even(volumes[train].read())
    combat = ComBatPeer("combat").fit(fitted, site=pool.site[train], covariates=pool.C[train])

    def harmonize(rows: Rows, people: IntArray, site: IntArray) -> Rows:
        return combat.transform(even(rows), site=site, covariates=pool.C[people]).astype(np.float32)

    return harmonize


def _at_gain_one(volumes: Volumes) -> Callable[[Rows], Rows]:
    from equipool.sites.scans import gains, mean_volume

    template = mean_volume(volumes)[0]
    return lambda rows: (rows / gains(rows, template)[:, None]).astype(np.float32)


def _as_they_are(rows: Rows) -> Rows:
    return rows


def disease_maps(
    name: str, pool: PooledDataset, volumes: Volumes, settings: Settings | None
) -> tuple[dict[str, StatMap], Volumes]:
    """Return t-maps of the target, age adjusted: scanners alone, pools, ours, baselines' rebuilt volumes."""
    everyone = np.arange(len(pool))
    y = np.asarray(pool.y)
    positive = "AD" if "AD" in set(y) else sorted(set(y))[-1]

    def mapped(values: Any, rows: NDArray[Any], label: str) -> StatMap:
        return stat_map(values, y[rows], covariates=pool.C[rows], positive=positive, name=label)

    maps = {}
    for k, site in enumerate(pool.sites):
        rows = np.flatnonzero(pool.site == k)
        maps[f"{site} alone"] = mapped(volumes[rows].read(), rows, f"{site} alone")
    for method in HARMONIZED:
        values = harmonizer(method, pool, volumes, everyone)(volumes.read(), everyone, pool.site)
        label = {"raw": "naive pool", "gain": "pool, gain normalised"}.get(method, method)
        maps[label] = mapped(values, everyone, label)
    harmonized = volumes.with_values(values)
    for method in METHODS[:5]:
        estimator = make_method(method, 0, settings_of(name, method, settings))
        estimator.fit(volumes, pool.y, site=pool.site_labels, covariates=pool.C)
        label = f"{method} rebuilt"
        maps[label] = mapped(estimator.reconstruct(volumes).read(), everyone, label)
    return maps, harmonized


def known_truth(name: str, volumes: Volumes) -> Truth | None:
    """Return the simulator's truth for a simulated cohort."""
    if ":" in name:
        return None
    folder = simulated_folder(name.removesuffix("-hard").removesuffix("-sim")) / "derivatives" / "truth"
    paths = []
    for path in volumes.paths:
        stem = path.name.replace("desc-brain", "desc-clean")
        paths.append(folder / path.parent.parent.name / "anat" / stem)
    clean = Volumes.build(paths, mask=volumes.mask)
    return Truth(clean, *disease_truth(folder, volumes.mask))


def disease_truth(
    folder: Path, mask: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], FloatArray]:
    """Read from a simulation's truth which voxels the disease changes, which it does not, and which way."""
    affected, unaffected, effect = (
        read_volume(folder / f"{part}.nii.gz")[mask] for part in ("affected", "unaffected", "disease_effect")
    )
    direction = np.where(affected > 0, np.sign(effect), 0.0)
    return affected > 0, unaffected > 0, direction.astype(np.float64)


def _fitted(x: FloatArray, site: IntArray) -> list[Any]:
    """Return the three readers of the scanner, fitted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a reader that has not settled reads worse, no more
        return [reader.fit(x, site) for reader in site_readers()]


def _read(readers: list[Any], x: FloatArray, site: IntArray) -> list[float]:
    """Return the balanced accuracy of each of the readers."""
    from sklearn.metrics import balanced_accuracy_score

    return [float(balanced_accuracy_score(site, reader.predict(x))) for reader in readers]


def _read_as_codes(x: FloatArray, site: IntArray, train: IntArray, test: IntArray) -> dict[str, float]:
    """Return what Table 1's site readers find: the best accuracy and AUC, and the share of the largest site.

    They are fitted for accuracy, as codes are read; the three others weigh sites alike and are judged by
    balanced accuracy, whose chance is one in so many sites.
    """
    found = classifiers.site_readers(x[train], site[train], x[test], site[test])
    return {
        "scanner_accuracy": max(reading.accuracy for reading in found),
        "largest_scanner": found[0].chance,
        "scanner_auc": max(reading.auc for reading in found),
    }


def _blocks_by_all(
    by_all: Rows, harmonize: Harmonizer, people: IntArray, mask: NDArray[np.bool_]
) -> tuple[FloatArray, IntArray]:
    """Return block means of people harmonized from every scanner's scan of them, and which it was.

    The same people lie before a reader as each scanner's, so neither age nor whom a scanner happened to scan
    can tell it: where nothing is left of the scanner, the reader is right once in so many scanners.
    """
    blocks = [
        block_means(harmonize(scans, people, np.full(len(people), site)), mask)
        for site, scans in enumerate(by_all)
    ]
    return np.concatenate(blocks), np.repeat(np.arange(len(by_all)), len(people))


def _reader_within(x: FloatArray, pool: PooledDataset, test: Any) -> float:
    """Return the best reader's balanced accuracy when readers are fitted on held-out people too, in folds.

    A harmonizer makes its training people's sites alike by construction, so readers fitted on them may miss
    how far those of new people are apart.
    """
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    site = pool.site[test]
    fewest = int(np.bincount(site)[np.unique(site)].min())
    if fewest < 2:
        return float("nan")
    folds = StratifiedKFold(min(5, fewest), shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        readers = islice(site_readers(), 2)  # the perceptron needs more people
        said = [cross_val_predict(reader, x[test], site, cv=folds) for reader in readers]
    return max(float(balanced_accuracy_score(site, one)) for one in said)


def _likeness(values: Any, clean: Any, train: Any, test: Any) -> dict[str, float]:
    """Return held-out volumes' correlation with the clean ones: as they are, and without the mean brain."""

    def mean_correlation(a: FloatArray, b: FloatArray) -> float:
        a, b = (z - z.mean(axis=1, keepdims=True) for z in (a, b))
        products = (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
        return float(products.mean())

    own, true = (np.asarray(z, dtype=np.float64) for z in (values, clean))
    return {
        "like_clean": mean_correlation(own[test], true[test]),
        "deviation_like_clean": mean_correlation(
            own[test] - own[train].mean(axis=0), true[test] - true[train].mean(axis=0)
        ),
    }


def _detected(maps: dict[str, StatMap], truth: Truth | None) -> pd.DataFrame:
    rows = []
    for label, found in maps.items():
        row: dict[str, Any] = {
            "map": label,
            "people": found.n,
            "significant": int(found.significant().sum()),
        }
        if truth is not None:
            sides = truth.affected, truth.unaffected
            here = detection(found, *sides, direction=truth.direction)
            row |= {"found": here.found, "false": here.false, "auc": here.auc}
            for rate in FALSE_RATES:
                at = detection_at(found, *sides, false_rate=rate, direction=truth.direction)
                row[f"found_at_{rate:g}"] = at.found
        rows.append(row)
    return pd.DataFrame(rows)


def _cell(mean: float, deviation: float) -> str:
    """Return mean (standard deviation), the mean alone of a single split."""
    return f"{mean:.4g}" if np.isnan(deviation) else f"{mean:.4g} ({deviation:.2g})"


def _markdown(frame: pd.DataFrame) -> str:
    lines = ["| " + " | ".join(frame.columns) + " |", "|---" * len(frame.columns) + "|"]
    for row in frame.itertuples(index=False):
        cells = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
