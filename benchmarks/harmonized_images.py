"""Harmonized volumes of held-out participants, and t-maps of the disease, against raw scans and ComBat.

    python benchmarks/harmonized_images.py adni-sim --out DIR [--splits 5] [--jobs 2] [--fresh]

The cohort is adni-sim, adcp-sim, adni:FOLDER or adcp:FOLDER. DIR gets the scores of each split and of the
t-maps as tables, the t-maps as NIfTI files, and two figures. Each split is kept, so a killed run goes on.
With --settings FILE, as for `equipool benchmark`, the networks of the baselines' maps are trained by these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from equipool.benchmark.datasets import simulated_cohort, simulated_folder, split_cohort, whole_cohort
from equipool.benchmark.harmonizers import ComBatPeer, best_accuracy
from equipool.benchmark.methods import METHODS, Settings, make_method, read_settings, settings_of
from equipool.benchmark.runs import file_stem, fingerprint, markdown_table, run_all
from equipool.data.nifti import read_volume
from equipool.data.pooled import PooledDataset
from equipool.data.volumes import Volumes, block_means
from equipool.estimators.image_harmonizer import ImageHarmonizer
from equipool.files import write_whole
from equipool.judge.classifiers import BALANCED, UNWEIGHTED, fit_classifiers, shuffled_sites
from equipool.judge.heldout import Fold
from equipool.judge.statmaps import StatMap, detection, stat_map
from equipool.progress import say
from equipool.report.statmap_figures import statmap_figure, write_statmap
from equipool.report.style import save_figure, shortened, styled
from equipool.sites.scans import gains, mean_volume

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
Harmonizer = Callable[[Volumes, IntArray, IntArray], Volumes]
HARMONIZED = ("raw", "gain", "combat", "combat-gain", "ours")
FALSE_RATES = (0.01, 0.001)
SHOWN_MAPS = ("naive pool", "combat-gain", "ours")
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
    maps: dict[str, StatMap]
    pool: PooledDataset
    volumes: Volumes
    harmonized: Volumes
    truth: Truth | None
    text: str  # tables of the splits and of the t-maps, as Markdown


def run_volumes(
    name: str, out: Path, *, splits: int = 5, settings: Settings | None = None, **how: Any
) -> VolumeResult:
    """Evaluate harmonized volumes on several splits, and t-maps of the whole cohort; write both tables.

    Each split is a file under ``runs``, so a killed comparison resumes; ``how`` (``jobs``, ``fresh``) as in
    :func:`.run_all`.
    """
    stem = file_stem(name)
    pool, volumes = whole_cohort(name)
    key = fingerprint(name, HARMONIZED, pool.sites, pool.C, pool.site, volumes.mask, volumes.scales)
    wanted = {out / "runs" / f"{stem}-volumes-{key}-{k}.json": (name, k) for k in range(splits)}
    say(f"{name}: harmonized volumes of {splits} splits")
    scores = run_all(judge_split, wanted, what="splits", **how)
    truth = known_truth(name, volumes)
    say(f"{name}: t-maps")
    maps, harmonized = disease_maps(name, pool, volumes, settings)
    rows, detected = pd.DataFrame(list(chain.from_iterable(scores))), _detected(maps, truth)
    scores_by = rows.drop(columns="split").groupby("method", sort=False)
    spread = scores_by.std().map(lambda sd: "" if np.isnan(sd) else f" ({sd:.2g})")
    cells = scores_by.mean().map("{:.4g}".format) + spread
    shown = detected.set_index("map").map(lambda x: f"{x:.4g}" if isinstance(x, float) else str(x))
    text = (
        f"## {name}: harmonized volumes, held-out participants\n\n{markdown_table(cells)}\n\n"
        f"## {name}: t-maps of the disease, all participants\n\n{markdown_table(shown, 'map')}\n"
    )
    write_whole(out / f"{stem}-volumes.csv", rows.to_csv(index=False))
    write_whole(out / f"{stem}-tmaps.csv", detected.to_csv(index=False))
    write_whole(out / f"{stem}-volumes.md", text)
    return VolumeResult(name, maps, pool, volumes, harmonized, truth, text)


def judge_split(name: str, seed: int) -> list[dict[str, Any]]:
    """Fit harmonizers on the training participants of a split and evaluate volumes of the held-out ones."""
    pool, volumes = whole_cohort(name)
    train, test = split_cohort(pool, seed)
    fold = Fold(pool, train, test, np.arange(len(pool)))
    truth = known_truth(name, volumes)
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
        if truth is not None:
            # All scanners have the same participants, so that age does not predict the scanner.
            seen = (volumes[test].with_values(scans) for scans in by_all)
            after = [harmonize(scans, test, np.full(len(test), k)).read() for k, scans in enumerate(seen)]
            same = np.concatenate([block_means(scans, volumes.mask) for scans in after])
            scores = fitted.score(same, np.repeat(np.arange(len(by_all)), len(test)))
            row["scanner_same_people"] = best_accuracy(scores)
            row["like_clean"] = correlation_with_clean(values[test], clean[test])
            deviations = (z[test] - z[train].mean(axis=0, dtype=np.float64) for z in (values, clean))
            row["deviation_like_clean"] = correlation_with_clean(*deviations)
        rows.append(row)
    # Of the last method's volumes; the chance level is the same for all.
    chance = []
    for k in range(SHUFFLES):
        site = shuffled_sites(pool.site, train, np.random.default_rng((seed, k)))
        best = best_accuracy(fold.site_scores(blocks, BALANCED, site=site))
        accuracy = max(score.accuracy for score in fold.site_scores(blocks, UNWEIGHTED, site=site))
        chance.append({"scanner_shuffled": best, "accuracy_shuffled": accuracy})
    mean: dict[Any, float] = pd.DataFrame(chance).mean().to_dict()
    return [{**row, **mean} for row in rows]


def correlation_with_clean(x: FloatArray, clean: FloatArray) -> float:
    """Return the mean over rows of the correlation of a row with the clean one."""
    x, clean = (z.astype(np.float64) - z.mean(axis=1, keepdims=True, dtype=np.float64) for z in (x, clean))
    products = (x * clean).sum(axis=1) / np.sqrt((x**2).sum(axis=1) * (clean**2).sum(axis=1))
    return float(products.mean())


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
    combat, given = ComBatPeer("combat"), {"site": pool.site[train], "covariates": pool.C[train]}
    combat.fit(normalised(volumes[train]).read(), **given)
    return lambda scans, rows, site: scans.with_values(
        combat.transform(normalised(scans).read(), site=site, covariates=pool.C[rows])
    )


def disease_maps(
    name: str, pool: PooledDataset, volumes: Volumes, settings: Settings | None
) -> tuple[dict[str, StatMap], Volumes]:
    """Return t-maps of the target, adjusted for age: of each scanner, each method and each baseline."""
    all_rows, y, maps = np.arange(len(pool)), np.asarray(pool.y), {}
    positive = "AD" if "AD" in set(y) else sorted(set(y))[-1]

    def mapped(values: Any, rows: NDArray[Any]) -> StatMap:
        return stat_map(values, y[rows], covariates=pool.C[rows], positive=positive)

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
    folder = simulated_folder(name) / "derivatives" / "truth"
    parts = ((*path.parts[-3:-1], path.name.replace("desc-brain", "desc-clean")) for path in volumes.paths)
    scans = [folder.joinpath(*names) for names in parts]
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


def scanned_by_all(
    name: str, ids: Sequence[str], sites: Sequence[str], mask: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return scans of simulated participants by every scanner, (sites, participants, voxels)."""
    brains = simulated_cohort(name)
    scanners = {scanner.name: scanner for scanner in brains.cohort.scanners}
    scans = []
    for participant in pd.Index(brains.people["participant_id"]).get_indexer(list(ids)):
        tissues = brains.tissues(participant)
        scans.append([brains.image(tissues, scanners[site], participant)[mask] for site in sites])
    return np.stack(scans, axis=1)


def volume_figures(result: VolumeResult, out: Path) -> list[Path]:
    """Draw a cohort before and after harmonization; write t-maps as NIfTI files. Return the figures."""
    stem, volumes, truth = file_stem(result.name), result.volumes, result.truth
    largest = max((m for m in result.maps if m.endswith(" alone")), key=lambda m: result.maps[m].n)
    mean = sum(rows.sum(axis=0, dtype=np.float64) for rows in result.harmonized.blocks()) / len(volumes)
    for name, statistics in result.maps.items():
        label = name.replace(" ", "_").replace(",", "")
        write_statmap(out / f"{stem}-tmaps", label, statistics, volumes.mask, volumes.affine, mni=True)
    shown = {name: result.maps[name] for name in (largest, *SHOWN_MAPS)}
    brain = volumes.mask, volumes.affine, volumes.unmask(np.asarray(mean))
    sides: dict[str, Any] = (
        {} if truth is None else {"truth": truth.direction, "unaffected": truth.unaffected}
    )
    figures = {"harmonized": harmonized_figure(result), "tmaps": statmap_figure(shown, *brain, **sides)}
    return [save_figure(figure, out / f"{stem}-{name}.png") for name, figure in figures.items()]


@styled
def harmonized_figure(result: VolumeResult) -> Figure:
    """Draw one participant of each scanner: raw, harmonized, their difference, and clean if known.

    Each is an axial slice at the ventricles and a coronal one at the hippocampus.
    """
    pool, volumes = result.pool, result.volumes
    clean = [] if result.truth is None else [result.truth.clean]
    names = ["raw", "harmonized", "raw − harmonized", *["clean"] * len(clean)]
    size = len(pool.sites), 2 * len(names)
    figure = Figure(figsize=(2.15 * size[1], 2.6 * size[0]), layout="constrained")
    for k, line in enumerate(figure.subplots(*size, squeeze=False)):
        here = np.flatnonzero(pool.site == k)
        one = here[np.argsort(pool.C[here, 0])[len(here) // 2]]
        images = [some.read([one])[0] for some in (volumes, result.harmonized, *clean)]
        raw, harmonized, *others = (image / np.median(image) for image in images)
        stages = zip(names, (raw, harmonized, raw - harmonized, *others), strict=True)
        for pair, (name, values) in zip(line.reshape(-1, 2), stages, strict=True):
            limits = {"cmap": "gray", "vmin": 0.0, "vmax": 1.6}
            if "−" in name:
                limits = {"cmap": "RdBu_r", "vmin": -0.3, "vmax": 0.3}
            box = volumes.unmask(values)
            slices = box[:, :, box.shape[2] // 2], box[:, int(0.48 * box.shape[1]), :]
            for axes, part in zip(pair, slices, strict=True):
                axes.imshow(part.T, origin="lower", **limits)
                axes.set_axis_off()
            pair[0].set_title(shortened(f"{pool.sites[k]}: {name}"), fontsize=8, loc="left")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cohort")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--settings", type=Path)
    call = parser.parse_args(argv)
    settings = read_settings(call.settings) if call.settings else None
    how = {"jobs": call.jobs, "fresh": call.fresh}
    result = run_volumes(call.cohort, call.out, splits=call.splits, settings=settings, **how)
    print(result.text)
    figures = volume_figures(result, call.out)
    print(json.dumps({"cohort": call.cohort, "splits": call.splits, "figures": list(map(str, figures))}))


if __name__ == "__main__":
    main()
