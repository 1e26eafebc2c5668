"""T-maps of ``equipool harmonize``: before and after, by both corrections, beside a simulation's truth."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.exceptions import InputError
from equipool.progress import say

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

    from equipool.data import Volumes
    from equipool.judge.statmaps import StatMap

FDR: dict[str, Any] = {"alpha": 0.05, "correction": "fdr"}


def write_statmaps(
    arguments: argparse.Namespace, new: Path, frame: pd.DataFrame, volumes: Volumes, places: pd.DataFrame
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write t-maps before and after with their picture; return their counts of voxels, and views."""
    from equipool.data.tables import write_table
    from equipool.judge.statmaps import clusters
    from equipool.report.statmap_figures import statmap_figure, statmap_pictures, write_statmap
    from equipool.report.style import save_figure

    out, column = new / "statmaps", arguments.statmap
    file_name = re.sub(r'[\\/:*?"<>|]', "-", column)  # what no file's name may have
    mni = all("space-MNI" in path.name for path in volumes.paths)
    maps, background = _before_and_after(arguments, new, frame, volumes, places)
    for name, one in maps.items():
        stem = f"{file_name}_{name.replace(' ', '-')}"
        write_statmap(out, stem, one, volumes.mask, volumes.affine, mni=mni)
        table = clusters(one, volumes.mask, volumes.affine, keep=one.significant(**FDR))
        write_table(out / f"{stem}_clusters-fdr.tsv", table, float_format="%.6g")
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
    import tempfile

    from equipool.checks.findings import plural
    from equipool.data import Volumes
    from equipool.judge.statmaps import stat_map

    column, present = arguments.statmap, _present(frame, arguments.statmap)
    if not present.all():
        say(f"t-map of {column}: {plural(int((~present).sum()), 'row')} without a value left out.")
    rows = frame[present]
    given = _adjusted(rows, column, arguments.covariates, arguments.subject)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        files = [new / file for file in places["file"][present]]
        clean = Volumes.build(files, mask=volumes.mask, cache=work, jobs=arguments.jobs)
        maps = {
            name: stat_map(values, rows[column], **given, name=name)
            for name, values in (("as measured", volumes[present]), ("harmonized", clean))
        }
        mean = sum(block.sum(axis=0) for block in clean.blocks()) / len(clean)
        del clean  # its files are about to go
    return maps, volumes.unmask(mean)


def _counts(maps: dict[str, StatMap], truth: dict[str, Any]) -> dict[str, Any]:
    """Return and say how many voxels are significant by either correction, and which shares of the truth."""
    from equipool.judge.statmaps import detection

    result: dict[str, Any] = {"significant": {}, "significant_fdr": {}}
    for name, one in maps.items():
        counts = int(one.significant().sum()), int(one.significant(**FDR).sum())
        result["significant"][name], result["significant_fdr"][name] = counts
        text = f"t-map {name}: {one.n} participants, {counts[0]} voxels (Bonferroni, 0.001), "
        text += f"{counts[1]} (FDR, 5 %)"
        if truth:
            sides = truth["truth"] != 0, truth["unaffected"]
            shares = [detection(one, *sides, direction=truth["truth"], **how) for how in ({}, FDR)]
            result.setdefault("detection", {})[name] = {
                how: {"found": share.found, "false": share.false}
                for how, share in zip(("bonferroni", "fdr"), shares, strict=True)
            }
            text += f"; of truly affected ones {shares[0].found:.1%} and {shares[1].found:.1%}"
        say(f"{text}.")
    return result


def _simulated_truth(arguments: argparse.Namespace, volumes: Volumes, contrast: str) -> dict[str, Any]:
    """Return the true effect of the disease, if these are simulated brains and the map is of it."""
    from equipool.benchmark.harmonized_images import disease_truth

    folder = Path(arguments.table) / "derivatives" / "truth"
    if arguments.statmap != "dx" or not (folder / "affected.nii.gz").is_file():
        return {}
    _, unaffected, direction = disease_truth(folder, volumes.mask)
    return {"truth": -direction if contrast.endswith(" AD") else direction, "unaffected": unaffected}


def _present(frame: pd.DataFrame, column: str) -> NDArray[np.bool_]:
    """Return which rows have a value."""
    import numpy as np

    from equipool.checks.inputs import parse_labels

    return np.array([label is not None for label in parse_labels(frame[column])], dtype=bool)


def _adjusted(frame: pd.DataFrame, column: str, covariates: list[str], subject: str | None) -> dict[str, Any]:
    """Return what a map allows for: the other covariates, and the participants, if some have several rows."""
    others = [name for name in covariates if name != column]
    visits = bool(subject) and not frame[subject].is_unique
    return {"covariates": frame[others] if others else None, "subject": frame[subject] if visits else None}


def require_a_map(frame: pd.DataFrame, column: str, covariates: list[str], subject: str | None) -> None:
    """Refuse a column that no t-map can be of, before hours of training."""
    from equipool.checks import require_columns
    from equipool.judge.statmaps import stat_map

    require_columns(frame, [column])
    rows = frame[_present(frame, column)]
    if rows.empty:
        raise InputError(f"--statmap {column}: no row has a value there; name another column.")
    try:
        given = _adjusted(rows, column, covariates, subject)
        stat_map(rows.index.to_numpy()[:, None], rows[column], **given)
    except InputError as error:
        raise InputError(f"--statmap {column}: {error}") from error
