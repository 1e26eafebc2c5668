"""``equipool apply``: a saved model on new people."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.cli.outputs import add_json, announce, check_out, content_hash, whole_or_nothing
from equipool.cli.participants import add_images, preset_roles, read_people
from equipool.cli.progress_line import reported
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.progress import say

if TYPE_CHECKING:
    import pandas as pd

    from equipool.data import Volumes

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "apply",
        help="take a saved model to new people",
        description="Harmonize new images or rows of a table with a model of `equipool harmonize`; images "
        "also give codes, and predictions where the model was fitted with a target. Covariates are taken "
        "from the columns that the model knows, and read from the data where there are none.",
    )
    command.add_argument(
        "model", metavar="MODEL", type=Path, help="a saved model, or the folder that `harmonize` wrote"
    )
    command.add_argument(
        "table", metavar="SOURCE", type=Path, help="a folder of images, or a .csv, .tsv or .parquet table"
    )
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    command.add_argument(
        "--site",
        metavar="COLUMN",
        help="the site (default: guessed); with none, images give codes and predictions alone",
    )
    command.add_argument("--id", metavar="COLUMN", help="one value for each row (default: guessed)")
    command.add_argument(
        "--unseen-site",
        choices=("error", "pooled", "adapt"),
        default="error",
        help="tables, a site that the model has not seen: refuse, leave its rows as they are, or estimate it "
        "from them (default: error)",
    )
    add_images(command)
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")
    add_json(command)
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
    frame, images = read_people(
        arguments, guess=("site", "id"), site_needed=False, fitted_site=_fitted_site(folder)
    )
    facts = {
        "model": str(arguments.model.resolve()),
        "source": str(arguments.table.resolve()),
        "site": arguments.site,
        "id": arguments.id,
        "unseen_site": arguments.unseen_site,
        "model_json": hashlib.sha256((folder / "model.json").read_bytes()).hexdigest(),
        "content": content_hash(frame),
    }
    check_out(arguments.out, "apply", facts)
    of_images = getattr(model, "mask_", None) is not None
    if of_images != (images is not None):
        raise InputError(
            f"The model in {arguments.model} is of {'images' if of_images else 'tables'}, and "
            f"{arguments.table} is read as {'images' if images else 'a table'}; give what the model knows."
        )
    require_columns(frame, [arguments.site] if arguments.site else [])
    if images is not None:
        return _apply_to_images(arguments, model, frame.reset_index(drop=True), images, facts)
    if not isinstance(model, SiteHarmonizer):
        raise InputError(
            f"{arguments.model} holds a {type(model).__name__}, which `apply` does not take to tables; "
            "use its Python interface."
        )
    return _apply_to_table(arguments, model, frame, facts)


def _apply_to_table(
    arguments: argparse.Namespace, model: Any, frame: pd.DataFrame, facts: dict[str, Any]
) -> int:
    from equipool.checks import require_columns
    from equipool.cli.derivative import OWN
    from equipool.cli.outcome_tables import write_like

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
    with whole_or_nothing(arguments.out, "apply", facts, OWN) as new:
        table = frame.assign(**{name: clean[name] for name in features})
        written = arguments.out / write_like(arguments.table, new, table).name
        write_whole(new / "summary.json", json.dumps({**facts, "rows": len(frame)}, indent=1))
    announce(arguments.json, {"harmonized": written}, rows=len(frame))
    return 0


def _why_none(arguments: argparse.Namespace, model: Any) -> str:
    if arguments.site:
        return f"a {type(model).__name__} gives codes alone (in Python, reconstruct() gives volumes)"
    return "name the sites with --site"


def _apply_to_images(
    arguments: argparse.Namespace, model: Any, frame: pd.DataFrame, images: str, facts: dict[str, Any]
) -> int:
    from equipool.cli import derivative
    from equipool.data.tables import image_paths
    from equipool.estimators.training_data import volumes_for

    out: Path = arguments.out
    people = derivative.people_of(frame, images, arguments.id or arguments.subject)
    volumes = volumes_for(image_paths(frame, images), model.mask_, model.affine_mm_)
    covariates = _known_covariates(frame, [covariate.name for covariate in model.covariates_])
    if arguments.unseen_site != "error":
        raise InputError(
            f"--unseen-site {arguments.unseen_site} is for tables: a scanner must have been there at fit; "
            "fit again with its images, or leave --site out (--site none) for codes alone."
        )
    wanted = bool(arguments.site) and model.front_ is not None
    if wanted:
        _try(model, volumes, frame[arguments.site], covariates)
    if arguments.dry_run:
        size = 4 * len(volumes) * model.mask_.size / 2**20 if wanted else 0
        return _say_dry(
            arguments, f"{len(volumes)} images, at most {size:.0f} MiB, in twice the time to read them"
        )
    with whole_or_nothing(out, "apply", facts, derivative.OWN) as new:
        derivative.write_description(new, "apply")
        if wanted:
            written = derivative.write_volumes(new, people, volumes, model, frame[arguments.site], covariates)
            for _ in reported(written, len(volumes), "Harmonized"):
                pass
        derivative.write_codes(new, people, volumes, model)
        if model.task_ is not None:
            derivative.write_predictions(new, people, volumes, model)
        used = [arguments.site, *(covariates.columns if covariates is not None else ())]
        derivative.write_people(new, people, frame[list(dict.fromkeys(name for name in used if name))])
        write_whole(new / "summary.json", json.dumps({**facts, "people": len(volumes)}, indent=1))
    made = {"codes": out / "codes.tsv"}
    if model.task_ is not None:
        made["predictions"] = out / "predictions.tsv"
    if wanted:
        made["harmonized"] = out / "sub-…" / "anat"
    else:
        say(f"equipool: no images were harmonized; {_why_none(arguments, model)}.")
    announce(arguments.json, made, people=len(volumes))
    return 0


def _fitted_site(model: Path) -> str | None:
    """Return the column that `harmonize` had for the site, if its summary is still beside the model."""
    try:
        site = json.loads((model.resolve().parent / "summary.json").read_text(encoding="utf-8"))["site"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return site if isinstance(site, str) else None


def _say_dry(arguments: argparse.Namespace, what: str) -> int:
    announce(arguments.json, {"would write": what, "to": arguments.out})
    return 0


def _try(model: Any, volumes: Volumes, site: pd.Series[Any], covariates: pd.DataFrame | None) -> None:
    """Meet unknown sites and covariates before anything is written: harmonize one person of each site."""
    from equipool.checks.inputs import parse_covariates

    if covariates is not None:
        known = model.covariates_
        parse_covariates(covariates, [c.name for c in known], [c.levels for c in known])
    rows = site.drop_duplicates().index
    own = None if covariates is None else covariates.loc[rows]
    model.front_.transform(volumes[rows.to_numpy()], site=site.loc[rows], covariates=own)


def _known_covariates(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame | None:
    """Return the model's covariates, or ``None`` if the table lacks one: they are then read from the data."""
    lacking = [name for name in names if name not in frame]
    if lacking:
        print(
            f"equipool: there is no column {', '.join(lacking)}; covariates are read from the data.",
            file=sys.stderr,
        )
    return None if lacking or not names else frame[names]
