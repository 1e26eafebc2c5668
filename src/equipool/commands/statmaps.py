"""T-maps of ``equipool harmonize``: before and after, by both corrections, beside a simulation's truth."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.progress import say

if TYPE_CHECKING:
    import pandas as pd

    from equipool.data import Volumes
    from equipool.evaluate.statmaps import StatMap

__all__ = ["require_a_map", "write_statmaps"]

FDR: dict[str, Any] = {"alpha": 0.05, "correction": "fdr"}


def write_statmaps(
    arguments: argparse.Namespace, new: Path, frame: pd.DataFrame, volumes: Volumes, people: pd.DataFrame
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write t-maps before and after with their picture; return what they found, and views."""
    import tempfile

    from equipool.data import Volumes
    from equipool.evaluate.statmaps import clusters, stat_map
    from equipool.report.brains import statmap_pictures
    from equipool.report.figures import save_figure
    from equipool.report.statmaps import statmap_figure, write_statmap

    out, column = new / "statmaps", arguments.statmap
    called = re.sub(r'[\\/:*?"<>|]', "-", column)  # what no file's name may have
    others = [name for name in arguments.covariates if name != column]
    mni = all("space-MNI" in path.name for path in volumes.paths)
    given = {"covariates": frame[others] if others else None, "subject": _visitors(frame, arguments.subject)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        files = [new / file for file in people["file"]]
        clean = Volumes.build(files, mask=volumes.mask, cache=work, jobs=arguments.jobs)
        maps = {
            name: stat_map(values, frame[column], **given, name=name)
            for name, values in (("as measured", volumes), ("harmonized", clean))
        }
        mean = sum(rows.sum(axis=0) for rows in clean.blocks()) / len(clean)
        background = volumes.unmask(mean)
        del clean  # its files are about to go
    for name, found in maps.items():
        stem = f"{called}_{name.replace(' ', '-')}"
        write_statmap(out, stem, found, volumes.mask, volumes.affine, mni=mni)
        table = clusters(found, volumes.mask, volumes.affine, keep=found.significant(**FDR))
        text = table.to_csv(sep="\t", index=False, float_format="%.6g", lineterminator="\n")
        write_whole(out / f"{stem}_clusters-fdr.tsv", text)
    truth = _simulated_truth(arguments, volumes, maps["harmonized"].contrast)
    # The cautious picture, unless there is nothing in it.
    how = {} if any(found.significant().any() for found in maps.values()) else FDR
    figure = statmap_figure(maps, volumes.mask, volumes.affine, background, **truth, **how)
    save_figure(figure, out / f"{called}.png")
    pictures = statmap_pictures(maps, volumes.mask, volumes.affine, background, column)
    return _found(maps, truth), pictures


def _found(maps: dict[str, StatMap], truth: dict[str, Any]) -> dict[str, Any]:
    """Return and say how many voxels are significant by either correction, and of a known truth how many."""
    from equipool.evaluate.statmaps import detection

    found: dict[str, Any] = {"significant": {}, "significant_fdr": {}}
    for name, one in maps.items():
        counts = int(one.significant().sum()), int(one.significant(**FDR).sum())
        found["significant"][name], found["significant_fdr"][name] = counts
        text = f"t-map {name}: {one.n} people, {counts[0]} voxels (Bonferroni, 0.001), {counts[1]} (FDR, 5 %)"
        if truth:
            sides = truth["truth"] != 0, truth["unaffected"]
            shares = [detection(one, *sides, direction=truth["truth"], **how) for how in ({}, FDR)]
            found.setdefault("detection", {})[name] = {
                how: {"found": share.found, "false": share.false}
                for how, share in zip(("bonferroni", "fdr"), shares, strict=True)
            }
            text += f"; of truly affected ones {shares[0].found:.1%} and {shares[1].found:.1%}"
        say(f"{text}.")
    return found


def _simulated_truth(arguments: argparse.Namespace, volumes: Volumes, contrast: str) -> dict[str, Any]:
    """Return what a simulation knows of the disease, if these are simulated people and the map is of it."""
    from equipool.evaluate.volumes import disease_truth

    folder = Path(arguments.table) / "derivatives" / "truth"
    if arguments.statmap != "dx" or not (folder / "affected.nii.gz").is_file():
        return {}
    _, unaffected, direction = disease_truth(folder, volumes.mask)
    return {"truth": -direction if contrast.endswith(" AD") else direction, "unaffected": unaffected}


def _visitors(frame: pd.DataFrame, subject: str | None) -> pd.Series | None:
    """Return whose each row is, where anybody has more than one."""
    if not subject or frame[subject].is_unique:
        return None
    return frame[subject]


def require_a_map(frame: pd.DataFrame, column: str, covariates: list[str], subject: str | None) -> None:
    """Refuse a column that no t-map can be of, before hours of training."""
    from equipool.evaluate.statmaps import stat_map
    from equipool.validation import require_columns

    require_columns(frame, [column])
    others = [name for name in covariates if name != column]
    try:
        stat_map(
            frame.index.to_numpy()[:, None],
            frame[column],
            covariates=frame[others] if others else None,
            subject=_visitors(frame, subject),
        )
    except InputError as error:
        raise InputError(f"--statmap {column}: {error}") from error
