"""T-maps of ``equipool harmonize``: before and after, by both corrections, beside a simulation's truth."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.benchmark.harmonized_images import disease_truth
from equipool.checks import require_columns
from equipool.checks.findings import plural
from equipool.checks.inputs import parse_labels
from equipool.cli.source import chosen
from equipool.data import Volumes
from equipool.exceptions import InputError
from equipool.judge.statmaps import StatMap, detection, stat_map
from equipool.progress import say
from equipool.report.statmap_figures import FDR, statmap_figure, statmap_pictures, write_statmap
from equipool.report.style import save_figure

CORRECTIONS: dict[str, dict[str, Any]] = {"bonferroni": {}, "fdr": FDR}


def write_statmaps(
    arguments: argparse.Namespace, new: Path, frame: pd.DataFrame, volumes: Volumes, places: pd.DataFrame
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write t-maps before and after with their picture; return their counts of voxels, and views."""
    out, column = new / "statmaps", arguments.statmap
    file_name = re.sub(r'[\\/:*?"<>|]', "-", column)  # what no file's name may have
    mni = all("space-MNI" in path.name for path in volumes.paths)
    maps, background = _before_and_after(arguments, new, frame, volumes, places)
    for name, one in maps.items():
        stem = f"{file_name}_{name.replace(' ', '-')}"
        write_statmap(out, stem, one, volumes.mask, volumes.affine, mni=mni)
    truth = _simulated_truth(arguments, volumes, maps["harmonized"].contrast)
    # The cautious picture, unless there is nothing in it.
    how = {} if any(one.significant().any() for one in maps.values()) else FDR
    figure = statmap_figure(maps, volumes.mask, volumes.affine, background, **truth, **how)
    save_figure(figure, out / f"{file_name}.png")
    pictures = statmap_pictures(maps, volumes.mask, volumes.affine, background, column)
    return _counts(maps, truth), pictures


def _before_and_after(
    arguments: argparse.Namespace, new: Path, frame: pd.DataFrame, volumes: Volumes, places: pd.DataFrame
) -> tuple[dict[str, StatMap], NDArray[np.floating]]:
    """Return the maps of scans as measured and as written, and the mean brain to draw them over."""
    rows, column = _with_value(frame, arguments.statmap), arguments.statmap
    if len(rows) < len(frame):
        say(f"t-map of {column}: {plural(len(frame) - len(rows), 'row')} without a value left out.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        files = [new / file for file in places["file"][rows.index]]
        harmonized = Volumes.build(files, mask=volumes.mask, cache=work, jobs=arguments.jobs)
        scans = {"as measured": volumes[rows.index.to_numpy()], "harmonized": harmonized}
        maps = {name: _map(arguments, rows, values) for name, values in scans.items()}
        mean = sum(block.sum(axis=0) for block in harmonized.blocks()) / len(harmonized)
        del harmonized, scans  # their files are about to go
    return maps, volumes.unmask(mean)


def _counts(maps: dict[str, StatMap], truth: dict[str, Any]) -> dict[str, Any]:
    """Return and say how many voxels are significant by either correction, and which shares of the truth."""
    result: dict[str, Any] = {"significant": {}, "significant_fdr": {}}
    for name, one in maps.items():
        strict, fdr = (int(one.significant(**how).sum()) for how in CORRECTIONS.values())
        result["significant"][name], result["significant_fdr"][name] = strict, fdr
        text = f"t-map {name}: {one.n} participants, {strict} voxels (Bonferroni, 0.001), {fdr} (FDR, 5 %)"
        if truth:
            sides = truth["truth"] != 0, truth["unaffected"]
            shares = {
                correction: detection(one, *sides, direction=truth["truth"], **how)
                for correction, how in CORRECTIONS.items()
            }
            result.setdefault("detection", {})[name] = {
                correction: {"found": share.found, "false": share.false}
                for correction, share in shares.items()
            }
            detected = " and ".join(f"{share.found:.1%}" for share in shares.values())
            text += f"; of truly affected ones {detected}"
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
        _map(arguments, rows, rows.index.to_numpy()[:, None])
    except InputError as error:
        raise InputError(f"--statmap {arguments.statmap}: {error}") from error


def _with_value(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the rows that have a value in a column."""
    return frame[[label is not None for label in parse_labels(frame[column])]]


def _map(arguments: argparse.Namespace, rows: pd.DataFrame, values: Any) -> StatMap:
    """Return the map of some rows; the other covariates are adjusted, and each participant counts once."""
    covariates = [one for one in arguments.covariates if one != arguments.statmap]
    subject = chosen(rows, arguments.subject)
    if subject is not None and subject.is_unique:
        subject = None
    adjusted = {"covariates": chosen(rows, covariates), "subject": subject}
    return stat_map(values, rows[arguments.statmap], **adjusted)
