"""``equipool apply``: a saved model on new participants."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.cli import options
from equipool.cli.outputs import announce, check_out, content_hash, whole_or_nothing
from equipool.cli.participants import preset_roles, read_participants
from equipool.exceptions import InputError
from equipool.files import file_sha256, read_json, write_json
from equipool.progress import say

if TYPE_CHECKING:
    import pandas as pd

    from equipool.data import Volumes


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "apply",
        help="apply a saved model to new participants",
        description="Harmonize new images or rows of a table with a model of `equipool harmonize`. "
        "Covariates are taken from the columns of the fit; for tables they are estimated where there are "
        "none.",
    )
    option = command.add_argument
    option("model", metavar="MODEL", type=Path, help="a saved model, or the folder that `harmonize` wrote")
    option("table", metavar="SOURCE", type=Path, help="a folder of images, or a .csv, .tsv or .parquet table")
    options.add_common(command, "out")
    option(
        "--site",
        metavar="COLUMN",
        help="the site (default: guessed); with none, it is estimated for tables, and images give --codes",
    )
    option(
        "--codes",
        action="store_true",
        help="images: also codes, and predictions of a target, by a model of `harmonize --codes`",
    )
    option("--id", metavar="COLUMN", help="one value for each row (default: guessed)")
    option(
        "--unseen-site",
        choices=("error", "pooled", "adapt"),
        default="error",
        help="a site that the model has not seen: refuse, leave its rows as they are, or estimate it from "
        "them (default: error)",
    )
    options.add_images(command)
    options.add_common(command, "dry-run", "json")
    command.set_defaults(
        go_on="What was half done is taken away again; the same command starts anew.",
        command=run,
        covariates=[],
        target=None,
        subject=None,
        ignore=[],
        features=None,
        no_guess=False,
    )


def run(arguments: argparse.Namespace) -> int:
    """Apply a model of images to images, and one of tables to tables."""
    from equipool.checks import require_columns
    from equipool.estimators import SiteHarmonizer, load

    preset_roles(arguments)
    inner = arguments.model / "model"
    folder = inner if inner.is_dir() else arguments.model
    model = load(folder)
    pooler = _pooler(arguments, model)
    frame, images = read_participants(
        arguments, guess=("site", "id"), site_needed=False, fitted_site=_fitted_site(folder)
    )
    facts = {
        "model": str(arguments.model.resolve()),
        "source": str(arguments.table.resolve()),
        "site": arguments.site,
        "id": arguments.id,
        "unseen_site": arguments.unseen_site,
        "codes": arguments.codes,
        "model_json": file_sha256(folder / "model.json"),
        "content": content_hash(frame),
    }
    check_out(arguments.out, "apply", facts)
    of_images = getattr(model, "mask_", None) is not None
    if of_images != (images is not None):
        raise InputError(
            f"The model in {arguments.model} is of {'images' if of_images else 'tables'}, and "
            f"{arguments.table} is read as {'images' if images else 'a table'}; give what it was fitted on."
        )
    require_columns(frame, [arguments.site] if arguments.site else [])
    if images is not None:
        return _apply_to_images(arguments, model, pooler, frame.reset_index(drop=True), images, facts)
    if not isinstance(model, SiteHarmonizer):
        raise InputError(
            f"{arguments.model} holds a {type(model).__name__}, which `apply` does not apply to tables; "
            "use its Python interface."
        )
    return _apply_to_table(arguments, model, frame, facts)


def _apply_to_table(
    arguments: argparse.Namespace, model: Any, frame: pd.DataFrame, facts: dict[str, Any]
) -> int:
    from equipool.checks import require_columns
    from equipool.cli.derivative import FILES, write_harmonized

    features = list(getattr(model, "feature_names_in_", ()))
    if not features:
        raise InputError(
            f"{arguments.model} was fitted on an array without names, so a table's columns are unknown; "
            "fit it on a data frame, or with `equipool harmonize`."
        )
    require_columns(frame, features)
    site = frame[arguments.site] if arguments.site else None
    covariates = _known_covariates(frame, list(model.encoding_.columns))
    model.set_params(unseen_site=arguments.unseen_site)
    clean = model.transform(frame[features], site=site, covariates=covariates)
    if arguments.dry_run:
        return _say_dry(arguments, f"{len(frame)} rows, {len(features)} features, in seconds")
    with whole_or_nothing(arguments.out, "apply", facts, FILES) as new:
        table = frame.assign(**{name: clean[name] for name in features})
        written = arguments.out / write_harmonized(new, arguments.table, table).name
        write_json(new / "summary.json", {**facts, "rows": len(frame)})
    announce(arguments.json, {"harmonized": written}, rows=len(frame))
    return 0


def _pooler(arguments: argparse.Namespace, model: Any) -> Any:
    """Return the model of the codes, or ``None`` where none is asked for."""
    from equipool.estimators import load

    if hasattr(model, "network_"):
        return model
    if not arguments.codes:
        return None
    folder = arguments.model / "pooler"
    if not folder.is_dir():
        raise InputError(
            f"{arguments.model} has no model of codes; run `equipool harmonize` with --codes, or leave it "
            "out."
        )
    return load(folder)


def _apply_to_images(
    arguments: argparse.Namespace,
    model: Any,
    pooler: Any,
    frame: pd.DataFrame,
    images: str,
    facts: dict[str, Any],
) -> int:
    from equipool.cli import derivative
    from equipool.data.bids import write_description
    from equipool.data.tables import image_paths
    from equipool.estimators import ImageHarmonizer
    from equipool.estimators.training_data import volumes_for

    out: Path = arguments.out
    places = derivative.places_of(frame, images, arguments.id or arguments.subject)
    volumes = volumes_for(image_paths(frame, images), model.mask_, model.affine_mm_)
    harmonizes = isinstance(model, ImageHarmonizer) and bool(arguments.site)
    if not harmonizes and pooler is None:
        raise InputError(
            "Images are harmonized given their site; name its column with --site, or ask for --codes, which "
            "need none."
        )
    site: Any = frame[arguments.site] if arguments.site else None
    covariates = _covariates(frame, model) if harmonizes else None
    if harmonizes:
        # One image of a new site says nothing of it, so nothing is estimated here.
        model.set_params(unseen_site="error" if arguments.unseen_site == "error" else "pooled")
        _try(model, volumes, site, covariates)
        model.set_params(unseen_site=arguments.unseen_site)
    if arguments.dry_run:
        size = 4 * len(volumes) * model.mask_.size / 2**20 if harmonizes else 0
        return _say_dry(
            arguments, f"{len(volumes)} images, at most {size:.0f} MiB, in twice the time to read them"
        )
    made: dict[str, Any] = {"harmonized": out / "sub-…" / "anat"} if harmonizes else {}
    with whole_or_nothing(out, "apply", facts, derivative.FILES) as new:
        write_description(new, "Harmonized brains", "apply")
        if harmonizes:
            derivative.write_volumes(new, places, volumes, model, site, covariates)
        if pooler is not None:
            made["codes"] = out / "codes.tsv"
            derivative.write_codes(new, places, volumes, pooler)
        if pooler is not None and pooler.task_ is not None:
            made["predictions"] = out / "predictions.tsv"
            derivative.write_predictions(new, places, volumes, pooler)
        used = [arguments.site, *(covariates.columns if covariates is not None else ())]
        derivative.write_participants(new, places, frame, used)
        write_json(new / "summary.json", {**facts, "people": len(volumes)})
    announce(arguments.json, made, people=len(volumes))
    return 0


def _covariates(frame: pd.DataFrame, model: Any) -> pd.DataFrame | None:
    """Return the covariates of an image harmonizer, which cannot do without them."""
    from equipool.checks import require_columns

    names = [covariate.name for covariate in model.covariates_]
    require_columns(frame, names)
    return frame[names] if names else None


def _fitted_site(model: Path) -> str | None:
    """Return the column that `harmonize` had for the site, if its summary is still beside the model."""
    summary = read_json(model.resolve().parent / "summary.json")
    site = summary.get("site") if isinstance(summary, dict) else None
    return site if isinstance(site, str) else None


def _say_dry(arguments: argparse.Namespace, what: str) -> int:
    announce(arguments.json, {"would write": what, "to": arguments.out})
    return 0


def _try(model: Any, volumes: Volumes, site: pd.Series[Any], covariates: pd.DataFrame | None) -> None:
    """Meet unknown sites and covariates before anything is written: harmonize one image of each site."""
    from equipool.checks.inputs import parse_covariates

    if covariates is not None:
        names, levels = zip(*((one.name, one.levels) for one in model.covariates_), strict=True)
        parse_covariates(covariates, names, levels)
    rows = site.drop_duplicates().index
    given = None if covariates is None else covariates.loc[rows]
    model.transform(volumes[rows.to_numpy()], site=site.loc[rows], covariates=given)


def _known_covariates(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame | None:
    """Return the model's covariates, or ``None`` if the table lacks one: they are then estimated."""
    lacking = [name for name in names if name not in frame]
    if lacking:
        say(f"equipool: there is no column {', '.join(lacking)}; covariates are estimated from the data.")
    return None if lacking or not names else frame[names]
