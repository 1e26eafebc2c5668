"""Harmonized volumes of held-out participants, and t-maps of the disease, against raw scans and ComBat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.benchmark.cohorts import load_brains, scanned_by_all, simulated_folder, whole_cohort
from equipool.benchmark.harmonizers import best_accuracy
from equipool.benchmark.layout import markdown_table
from equipool.benchmark.methods import METHODS, Settings, make_method, settings_of
from equipool.benchmark.runs import file_stem, fingerprint, run_all
from equipool.data.nifti import read_volume
from equipool.data.pooled import PooledDataset
from equipool.data.volumes import Volumes
from equipool.estimators.image_harmonizer import ImageHarmonizer
from equipool.estimators.peers import ComBatPeer
from equipool.files import write_whole
from equipool.judge.blocks import block_means
from equipool.judge.classifiers import BALANCED, UNWEIGHTED, fit_classifiers, shuffled_sites
from equipool.judge.heldout import Fold
from equipool.judge.scores import correlation_with_clean
from equipool.judge.statmaps import StatMap, detection, stat_map
from equipool.progress import say
from equipool.sites.scans import gains, mean_volume

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
Harmonizer = Callable[[Volumes, IntArray, IntArray], Volumes]
HARMONIZED = ("raw", "gain", "combat", "combat-gain", "ours")
FALSE_RATES = (0.01, 0.001)
SHUFFLES = 3  # of the scanners in each split, for the chance level of the best of three classifiers


@dataclass(frozen=True, eq=False)
class Truth:
    """The simulator's truth: clean volumes, and the voxels that the disease changes, with the sign."""

    clean: Volumes
    affected: NDArray[np.bool_]
    unaffected: NDArray[np.bool_]
    direction: FloatArray


@dataclass(frozen=True, eq=False)
class VolumeResult:
    """The result of :func:`run_volumes`."""

    name: str
    splits: pd.DataFrame  # a row for each split and method
    detected: pd.DataFrame  # a row for each t-map
    maps: dict[str, StatMap]
    pool: PooledDataset
    volumes: Volumes
    harmonized: Volumes
    truth: Truth | None

    @property
    def text(self) -> str:
        """Both tables as Markdown."""
        scores = self.splits.drop(columns="split").groupby("method", sort=False)
        spread = scores.std().map(lambda sd: "" if np.isnan(sd) else f" ({sd:.2g})")
        cells = scores.mean().map("{:.4g}".format) + spread
        maps = self.detected.set_index("map").map(lambda x: f"{x:.4g}" if isinstance(x, float) else str(x))
        return (
            f"## {self.name}: harmonized volumes, held-out participants\n\n{markdown_table(cells)}\n\n"
            f"## {self.name}: t-maps of the disease, all participants\n\n{markdown_table(maps, 'map')}\n"
        )


def run_volumes(
    name: str,
    out: Path,
    *,
    splits: int = 5,
    jobs: int | None = None,
    settings: Settings | None = None,
    fresh: bool = False,
) -> VolumeResult:
    """Evaluate harmonized volumes on several splits, and t-maps of the whole cohort; write both tables.

    Each split is a file under ``runs`` (:func:`.run_all`), so a killed comparison resumes.
    """
    stem = file_stem(name)
    pool, volumes = whole_cohort(name)
    key = fingerprint(name, HARMONIZED, pool.sites, pool.C, pool.site, volumes.mask, volumes.scales)
    wanted = {out / "runs" / f"{stem}-volumes-{key}-{k}.json": (name, k) for k in range(splits)}
    say(f"{name}: harmonized volumes of {splits} splits")
    scores = run_all(judge_split, wanted, what="splits", jobs=jobs, fresh=fresh)
    truth = known_truth(name, volumes)
    say(f"{name}: t-maps")
    maps, harmonized = disease_maps(name, pool, volumes, settings)
    rows, detected = pd.DataFrame(list(chain.from_iterable(scores))), _detected(maps, truth)
    result = VolumeResult(name, rows, detected, maps, pool, volumes, harmonized, truth)
    write_whole(out / f"{stem}-volumes.csv", result.splits.to_csv(index=False))
    write_whole(out / f"{stem}-tmaps.csv", result.detected.to_csv(index=False))
    write_whole(out / f"{stem}-volumes.md", result.text)
    return result


def judge_split(name: str, seed: int) -> list[dict[str, Any]]:
    """Fit harmonizers on the training participants of a split and evaluate volumes of the held-out ones."""
    data = load_brains(name, seed)
    pool, volumes = whole_cohort(name)
    train, test = data.rows(data.train), data.rows(data.test)
    fold = Fold(pool, train, test, np.arange(len(pool)))
    truth = known_truth(name, volumes)
    clean, by_all = None, None
    if truth is not None:
        clean, by_all = truth.clean.read(), scanned_by_all(name, pool.ids[test], pool.sites, volumes.mask)
    from_age = best_accuracy(fold.site_scores(pool.C, BALANCED))
    rows = []
    for method in HARMONIZED:
        harmonize = harmonizer(method, pool, volumes, train)
        values = harmonize(volumes, np.arange(len(pool)), pool.site).read()
        blocks = block_means(values, volumes.mask)
        fitted = fit_classifiers(blocks[train], pool.site[train], classifiers=BALANCED)
        scores, plain = fitted.score(blocks[test], pool.site[test]), fold.site_scores(blocks, UNWEIGHTED)
        among_test = fold.site_scores_among_test(blocks, BALANCED[:2])  # a perceptron needs more rows
        row: dict[str, Any] = {"split": seed, "method": method, "scanner": best_accuracy(scores)}
        row |= {score.classifier: score.balanced_accuracy for score in scores}
        row |= {
            "scanner_from_age": from_age,
            "scanner_accuracy": max(score.accuracy for score in plain),
            "largest_scanner": plain[0].chance,  # the chance level of the accuracy
            "scanner_auc": max(score.auc for score in plain),
            "scanner_within": max(among_test.values(), default=float("nan")),
        }
        if clean is not None and by_all is not None:
            scans = _blocks_by_all(by_all, harmonize, volumes[test], test)
            row["scanner_same_people"] = best_accuracy(fitted.score(*scans))
            row["like_clean"] = correlation_with_clean(values[test], clean[test])
            deviations = (z[test] - z[train].mean(axis=0, dtype=np.float64) for z in (values, clean))
            row["deviation_like_clean"] = correlation_with_clean(*deviations)
        rows.append(row)
    # Of the last method's volumes; the chance level is the same for all.
    chance = []
    for k in range(SHUFFLES):
        site = shuffled_sites(pool.site, train, np.random.default_rng((seed, k)))
        plain = fold.site_scores(blocks, UNWEIGHTED, site=site)
        best = best_accuracy(fold.site_scores(blocks, BALANCED, site=site))
        chance.append((best, max(score.accuracy for score in plain)))
    names = ("scanner_shuffled", "accuracy_shuffled")
    return [row | dict(zip(names, np.mean(chance, axis=0).tolist(), strict=True)) for row in rows]


def _blocks_by_all(
    by_all: NDArray[np.float32], harmonize: Harmonizer, volumes: Volumes, participants: IntArray
) -> tuple[FloatArray, IntArray]:
    """Return block means of participants harmonized from every scanner's scan of them, and the scanners.

    All scanners have the same participants, so that age does not predict the scanner.
    """
    blocks = []
    for site, scans in enumerate(by_all):
        clean = harmonize(volumes.with_values(scans), participants, np.full(len(participants), site))
        blocks.append(block_means(clean.read(), volumes.mask))
    return np.concatenate(blocks), np.repeat(np.arange(len(by_all)), len(participants))


def harmonizer(method: str, pool: PooledDataset, volumes: Volumes, train: IntArray) -> Harmonizer:
    """Return a method, fitted on training rows, as a function of volumes, their rows in the pool, and sites.

    The covariates are given to all methods, the target to none.
    """
    if method == "ours":
        model = ImageHarmonizer().fit(volumes[train], site=pool.site[train], covariates=pool.C[train])
        return lambda scans, rows, site: model.transform(scans, site=site, covariates=pool.C[rows])
    # The same gains as for ours, so that ComBat does not suffer from another normalisation.
    template = mean_volume(volumes[train])[0] if method.endswith("gain") else None

    def normalised(scans: Volumes) -> Volumes:
        if template is None:
            return scans
        values = scans.read()
        return scans.with_values(values / gains(values, template)[:, None])

    if method in ("raw", "gain"):
        return lambda scans, rows, site: normalised(scans)
    combat = ComBatPeer("combat").fit(
        normalised(volumes[train]).read(), site=pool.site[train], covariates=pool.C[train]
    )
    return lambda scans, rows, site: scans.with_values(
        combat.transform(normalised(scans).read(), site=site, covariates=pool.C[rows])
    )


def disease_maps(
    name: str, pool: PooledDataset, volumes: Volumes, settings: Settings | None
) -> tuple[dict[str, StatMap], Volumes]:
    """Return t-maps of the target, adjusted for age: of each scanner, each method and each baseline."""
    all_rows = np.arange(len(pool))
    y = np.asarray(pool.y)
    positive = "AD" if "AD" in set(y) else sorted(set(y))[-1]

    def mapped(values: Any, rows: NDArray[Any]) -> StatMap:
        return stat_map(values, y[rows], covariates=pool.C[rows], positive=positive)

    maps = {}
    for k, site in enumerate(pool.sites):
        rows = np.flatnonzero(pool.site == k)
        maps[f"{site} alone"] = mapped(volumes[rows], rows)
    for method in HARMONIZED:
        harmonized = harmonizer(method, pool, volumes, all_rows)(volumes, all_rows, pool.site)
        label = {"raw": "naive pool", "gain": "pool, gain normalised"}.get(method, method)
        maps[label] = mapped(harmonized, all_rows)
    for method in METHODS[:5]:
        estimator = make_method(method, 0, settings_of(name, method, settings))
        estimator.fit(volumes, pool.y, site=pool.site_labels, covariates=pool.C)
        maps[f"{method} rebuilt"] = mapped(estimator.reconstruct(volumes), all_rows)
    return maps, harmonized


def known_truth(name: str, volumes: Volumes) -> Truth | None:
    """Return the simulator's truth for a simulated cohort."""
    if ":" in name:
        return None
    folder = simulated_folder(name.removesuffix("-hard").removesuffix("-sim")) / "derivatives" / "truth"
    scans = [folder.joinpath(*path.parts[-3:]) for path in volumes.paths]
    scans = [path.with_name(path.name.replace("desc-brain", "desc-clean")) for path in scans]
    return Truth(Volumes.build(scans, mask=volumes.mask), *disease_truth(folder, volumes.mask))


def disease_truth(
    folder: Path, mask: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], FloatArray]:
    """Read which voxels a simulated disease changes, which it does not, and the sign of the change."""
    affected, unaffected, effect = (
        read_volume(folder / f"{part}.nii.gz")[mask] for part in ("affected", "unaffected", "disease_effect")
    )
    direction = np.where(affected > 0, np.sign(effect), 0.0)
    return affected > 0, unaffected > 0, direction.astype(np.float64)


def _detected(maps: dict[str, StatMap], truth: Truth | None) -> pd.DataFrame:
    rows = []
    for label, one in maps.items():
        row: dict[str, Any] = {"map": label, "people": one.n, "significant": int(one.significant().sum())}
        if truth is not None:
            detect = partial(detection, one, truth.affected, truth.unaffected, direction=truth.direction)
            usual = detect()
            row |= {"found": usual.found, "false": usual.false, "auc": usual.auc}
            row |= {f"found_at_{rate:g}": detect(false_rate=rate).found for rate in FALSE_RATES}
        rows.append(row)
    return pd.DataFrame(rows)
