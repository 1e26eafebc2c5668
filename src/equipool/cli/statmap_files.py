"""T-maps of ``equipool harmonize``: before and after, by both corrections, beside a simulation's truth."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from equipool.benchmark.harmonized_images import disease_truth
from equipool.checks import require_columns
from equipool.checks.findings import plural
from equipool.checks.inputs import parse_labels
from equipool.cli.source import chosen
from equipool.data import Volumes
from equipool.data.tables import write_table
from equipool.exceptions import InputError
from equipool.judge.statmaps import StatMap, clusters, detection, stat_map
from equipool.progress import say
from equipool.report.statmap_figures import statmap_figure, statmap_pictures, write_statmap
from equipool.report.style import save_figure

FDR: dict[str, Any] = {"alpha": 0.05, "correction": "fdr"}
CORRECTIONS: dict[str, dict[str, Any]] = {"bonferroni": {}, "fdr": FDR}


def write_statmaps(
    arguments: argparse.Namespace, new: Path, frame: pd.DataFrame, volumes: Volumes, places: pd.DataFrame
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write t-maps before and after with their picture; return their counts of voxels, and views."""
    out, column = new / "statmaps", arguments.statmap
    rows = _with_value(frame, column)
    if len(rows) < len(frame):
        say(f"t-map of {column}: {plural(len(frame) - len(rows), 'row')} without a value left out.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        files = [new / file for file in places["file"][rows.index]]
        harmonized = Volumes.build(files, mask=volumes.mask, cache=work, jobs=arguments.jobs)
        scans = {"as measured": volumes[rows.index.to_numpy()], "harmonized": harmonized}
        maps = {name: _map(arguments, rows, values, name) for name, values in scans.items()}
        mean = sum(block.sum(axis=0) for block in harmonized.blocks()) / len(harmonized)
        del harmonized, scans  # their files are about to go
    file_name = re.sub(r'[\\/:*?"<>|]', "-", column)  # what no file's name may have
    mni = all("space-MNI" in path.name for path in volumes.paths)
    for name, one in maps.items():
        stem = f"{file_name}_{name.replace(' ', '-')}"
        write_statmap(out, stem, one, volumes.mask, volumes.affine, mni=mni)
        table = clusters(one, volumes.mask, volumes.affine, keep=one.significant(**FDR))
        write_table(out / f"{stem}_clusters-fdr.tsv", table, float_format="%.6g")
    truth = _simulated_truth(arguments, volumes, maps["harmonized"].contrast)
    # The cautious picture, unless there is nothing in it.
    how = {} if any(one.significant().any() for one in maps.values()) else FDR
    drawn = maps, volumes.mask, volumes.affine, volumes.unmask(mean)
    save_figure(statmap_figure(*drawn, **truth, **how), out / f"{file_name}.png")
    return _counts(maps, truth), statmap_pictures(*drawn, column)


def _counts(maps: dict[str, StatMap], truth: dict[str, Any]) -> dict[str, Any]:
    """Return and say how many voxels are significant by either correction, and which shares of the truth."""
    result: dict[str, Any] = {"significant": {}, "significant_fdr": {}}
    for name, one in maps.items():
        strict, fdr = (int(one.significant(**how).sum()) for how in CORRECTIONS.values())
        result["significant"][name], result["significant_fdr"][name] = strict, fdr
        text = f"t-map {name}: {one.n} participants, {strict} voxels (Bonferroni, 0.001), {fdr} (FDR, 5 %)"
        if truth:
            direction = truth["truth"]
            shares = {
                correction: detection(one, direction != 0, truth["unaffected"], direction=direction, **how)
                for correction, how in CORRECTIONS.items()
            }
            detected = {key: {"found": share.found, "false": share.false} for key, share in shares.items()}
            result.setdefault("detection", {})[name] = detected
            text += "; of truly affected ones " + " and ".join(
                f"{share.found:.1%}" for share in shares.values()
            )
        say(f"{text}.")
    return result


def _simulated_truth(arguments: argparse.Namespace, volumes: Volumes, contrast: str) -> dict[str, Any]:
    """Return the true effect of the disease, if these are simulated brains and the map is of it."""
    folder = Path(arguments.table) / "derivatives" / "truth"
    if arguments.statmap != "dx" or not (folder / "affected.nii.gz").is_file():
        return {}
    _, unaffected, direction = disease_truth(folder, volumes.mask)
    return {"truth": -direction if contrast.endswith(" AD") else direction, "unaffected": unaffected}


def require_a_map(arguments: argparse.Namespace, frame: pd.DataFrame) -> None:
    """Refuse a column that no t-map can be of, before hours of training."""
    require_columns(frame, [arguments.statmap])
    rows = _with_value(frame, arguments.statmap)
    if rows.empty:
        raise InputError(f"--statmap {arguments.statmap}: no row has a value there; name another column.")
    try:
        _map(arguments, rows, rows.index.to_numpy()[:, None], "")
    except InputError as error:
        raise InputError(f"--statmap {arguments.statmap}: {error}") from error


def _with_value(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the rows that have a value in a column."""
    return frame[[label is not None for label in parse_labels(frame[column])]]


def _map(arguments: argparse.Namespace, rows: pd.DataFrame, values: Any, name: str) -> StatMap:
    """Return the map of some rows; the other covariates are adjusted, and each participant counts once."""
    covariates = rows[[column for column in arguments.covariates if column != arguments.statmap]]
    subject = chosen(rows, arguments.subject)
    if subject is not None and subject.is_unique:
        subject = None
    return stat_map(values, rows[arguments.statmap], covariates=covariates, subject=subject, name=name)
