"""``equipool apply``: a saved model on new participants."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from equipool.checks import require_columns
from equipool.cli import derivative
from equipool.cli.outputs import announce, check_out, facts_of, whole_or_nothing
from equipool.cli.source import read_rows
from equipool.data.bids import write_description
from equipool.data.tables import image_paths
from equipool.estimators import ImageHarmonizer, SiteHarmonizer, load
from equipool.estimators.harmonizer import as_volumes
from equipool.exceptions import InputError
from equipool.files import file_sha256, read_json, write_json
from equipool.progress import say


def run(arguments: argparse.Namespace) -> int:
    """Apply a model of images to images, and one of tables to tables."""
    inner = arguments.model / "model"
    folder = inner if inner.is_dir() else arguments.model
    model = load(folder)
    pooler = model if hasattr(model, "network_") else None
    if arguments.codes and pooler is None:
        if not (arguments.model / "pooler").is_dir():
            raise InputError(
                f"{arguments.model} has no model of codes; run `equipool harmonize` with --codes, or leave "
                "it out."
            )
        pooler = load(arguments.model / "pooler")
    # The column that `harmonize` had for the site, if its summary is still beside the model.
    summary = read_json(folder.resolve().parent / "summary.json")
    fitted_site = summary.get("site") if isinstance(summary, dict) else None
    frame, images = read_rows(arguments, fits=False, fitted_site=fitted_site)
    facts = facts_of(arguments, frame) | {"model_json": file_sha256(folder / "model.json")}
    check_out(arguments, facts)
    of_images = getattr(model, "mask_", None) is not None
    if of_images != (images is not None):
        raise InputError(
            f"The model in {arguments.model} is of {'images' if of_images else 'tables'}, and "
            f"{arguments.table} is read as {'images' if images else 'a table'}; give what it was fitted on."
        )
    require_columns(frame, [arguments.site] if arguments.site else [])
    if images is not None:
        return _apply_to_images(arguments, model, pooler, frame, image_paths(frame, images), facts)
    return _apply_to_table(arguments, model, frame, facts)


def _apply_to_table(
    arguments: argparse.Namespace, model: Any, frame: pd.DataFrame, facts: dict[str, Any]
) -> int:
    features = list(getattr(model, "feature_names_in_", ()))
    if not isinstance(model, SiteHarmonizer) or not features:
        raise InputError(
            f"{arguments.model} holds a {type(model).__name__} {'with' if features else 'without'} names of "
            "columns; use its Python interface, or fit a SiteHarmonizer on a data frame."
        )
    require_columns(frame, features)
    names = list(model.encoding_.columns)
    lacking = [name for name in names if name not in frame]
    if lacking:
        say(f"equipool: there is no column {', '.join(lacking)}; covariates are estimated from the data.")
    site = frame[arguments.site] if arguments.site else None
    covariates = frame[names] if names and not lacking else None
    model.set_params(unseen_site=arguments.unseen_site)
    clean = model.transform(frame[features], site=site, covariates=covariates)
    if arguments.dry_run:
        what = f"{len(frame)} rows, {len(features)} features, in seconds"
        announce(arguments, {"would write": what, "to": arguments.out})
        return 0
    with whole_or_nothing(arguments, facts) as new:
        written = derivative.write_harmonized(new, arguments.table, frame, clean)
        write_json(new / "summary.json", {**facts, "rows": len(frame)})
    announce(arguments, {"harmonized": arguments.out / written}, rows=len(frame))
    return 0


def _apply_to_images(
    arguments: argparse.Namespace,
    model: Any,
    pooler: Any,
    frame: pd.DataFrame,
    paths: tuple[Path, ...],
    facts: dict[str, Any],
) -> int:
    out: Path = arguments.out
    places = derivative.places_of(frame, paths, arguments.id or arguments.subject)
    volumes: Any = as_volumes(paths, model.mask_, model.affine_mm_)
    names: list[str] = []
    harmonizes = isinstance(model, ImageHarmonizer) and bool(arguments.site)
    if not harmonizes and pooler is None:
        raise InputError(
            "Images are harmonized given their site; name its column with --site, or ask for --codes, which "
            "need none."
        )
    if harmonizes:
        names = [covariate.name for covariate in model.covariates_]
        require_columns(frame, names)
        site, covariates = frame[arguments.site], frame[names]
        model.set_params(unseen_site=arguments.unseen_site)
        if arguments.unseen_site == "error":  # found before anything is written, in one image of each site
            first = site.drop_duplicates().index.to_numpy()
            model.transform(volumes[first], site=site[first], covariates=covariates.loc[first])
    if arguments.dry_run:
        size = 4 * len(volumes) * model.mask_.size / 2**20 if harmonizes else 0
        what = f"{len(volumes)} images, at most {size:.0f} MiB, in twice the time to read them"
        announce(arguments, {"would write": what, "to": out})
        return 0
    made: dict[str, Any] = {}
    with whole_or_nothing(arguments, facts) as new:
        write_description(new, "Harmonized brains", "apply")
        if harmonizes:
            made["harmonized"] = out / "sub-…" / "anat"
            derivative.write_volumes(new, places, volumes, model, site, covariates)
        if pooler is not None:
            predict = pooler.task_ is not None
            derivative.write_codes(new, places, volumes, pooler, predict=predict)
            made["codes"] = out / "codes.tsv"
            made |= {"predictions": out / "predictions.tsv"} if predict else {}
        derivative.write_participants(new, places, frame, [arguments.site, *names])
        write_json(new / "summary.json", {**facts, "people": len(volumes)})
    announce(arguments, made, people=len(volumes))
    return 0
