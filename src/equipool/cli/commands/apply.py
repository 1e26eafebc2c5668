"""``equipool apply``: a saved model on new participants."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from equipool.checks import require_columns
from equipool.checks.findings import SHOWN, listed, plural
from equipool.checks.inputs import as_numbers, parse_labels
from equipool.checks.units import Seen
from equipool.cli import derivative
from equipool.cli.outputs import announce, check_out, facts_of, whole_or_nothing
from equipool.cli.source import read_rows
from equipool.data.bids import write_description
from equipool.data.tables import image_paths
from equipool.estimators import ImageHarmonizer, SiteHarmonizer, load
from equipool.estimators.harmonizer import as_volumes, seen_at_fit
from equipool.exceptions import InputError
from equipool.files import file_sha256, read_json, write_json, write_whole
from equipool.judge.scores import FloatArray
from equipool.progress import say


def run(arguments: Namespace) -> int:
    """Apply a model of images to images, and one of tables to tables."""
    inner = arguments.model / "model"
    folder = inner if inner.is_dir() else arguments.model
    model = load(folder)
    pooler = model if hasattr(model, "network_") else None
    if arguments.codes and pooler is None:
        if not (arguments.model / "pooler").is_dir():
            what = f"{arguments.model} has no model of codes"
            raise InputError(f"{what}; run `equipool harmonize` with --codes, or leave it out.")
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


def _apply_to_table(arguments: Namespace, model: Any, frame: pd.DataFrame, facts: dict[str, Any]) -> int:
    features = list(getattr(model, "feature_names_in_", ()))
    if not isinstance(model, SiteHarmonizer) or not features:
        what = f"a {type(model).__name__} {'with' if features else 'without'} names of columns"
        advice = "use its Python interface, or fit a SiteHarmonizer on a data frame."
        raise InputError(f"{arguments.model} holds {what}; {advice}")
    require_columns(frame, features)
    names = list(model.encoding_.columns)
    lacking = [name for name in names if name not in frame]
    _require_asked_for(arguments, lacking)
    site = frame[arguments.site] if arguments.site else None
    covariates = frame[names] if names and not lacking else None
    model.set_params(unseen_site=arguments.unseen_site, infer=arguments.infer)
    _check_beside_fit(arguments, model, frame)
    clean = model.transform(frame[features], site=site, covariates=covariates)
    if arguments.dry_run:
        what = f"{len(frame)} rows, {len(features)} features, in seconds"
        announce(arguments, {"would write": what, "to": arguments.out})
        return 0
    with whole_or_nothing(arguments, facts) as new:
        written, cells = derivative.write_harmonized(arguments, new, frame, clean)
        write_json(new / "summary.json", {**facts, "rows": len(frame), **cells})
        made = {"harmonized": arguments.out / written}
        if not arguments.no_report:
            stages = frame[features].to_numpy(np.float64), clean.to_numpy(np.float64)
            # Of several covariates, all are estimated where one is lacking.
            inferred = ([] if arguments.site else ["the site"]) + (names if lacking else [])
            made |= _report(arguments, new, model, frame, inferred, *stages)
    announce(arguments, made, rows=len(frame))
    return 0


def _require_asked_for(arguments: Namespace, lacking: list[str]) -> None:
    """Refuse to estimate the site or covariates of a table unless that is asked for; else say it is done."""
    what = [] if arguments.site else ["a site (name its column with --site)"]
    what += [f"{listed(lacking)} (kept at the fit)"] if lacking else []
    if what and not arguments.infer:
        advice = "add it, or have it estimated from the features with --infer, which costs precision."
        raise InputError(f"{arguments.table} lacks {' and '.join(what)}; {advice}")
    if what:
        say(f"Warning: {arguments.table} lacks {' and '.join(what)}; estimated from the features (--infer).")


def _columns_of_fit(model: Any, frame: pd.DataFrame) -> Iterator[tuple[Seen, FloatArray]]:
    """Yield what the fit has seen of each column that is there, and its values here."""
    for seen in seen_at_fit(model):
        if seen.name in frame:
            values = as_numbers(frame[seen.name]).to_numpy(np.float64)
            if np.isfinite(values).any() and not np.isinf(values).any():
                yield seen, values


def _check_beside_fit(arguments: Namespace, model: Any, frame: pd.DataFrame) -> None:
    """Refuse columns in another unit than at the fit; warn of unusual rows, and of sites that are new."""
    columns = _columns_of_fit(model, frame)
    findings = [finding for seen, values in columns for finding in seen.findings(values)]
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        others = [name for finding in errors[1:] for name in finding.columns]
        raise InputError(errors[0].text + (f" The same holds for {listed(others)}." if others else ""))
    for finding in findings[:SHOWN]:
        say(f"Warning: {finding.text}")
    if findings[SHOWN:]:
        say(f"Warning: {plural(len(findings) - SHOWN, 'more column')} outside in some rows; see the report.")
    if arguments.site and arguments.unseen_site != "error":
        counts = pd.Series(parse_labels(frame[arguments.site])).value_counts().sort_index()
        done = {"adapt": "its effects are estimated from its", "pooled": "nothing is changed in its"}
        for name, count in counts.drop([*model.site_index], errors="ignore").items():
            rows = plural(count, "row")
            say(f"Warning: site {name!r} was not seen at fit; {done[arguments.unseen_site]} {rows}.")


def _report(
    arguments: Namespace, new: Path, model: Any, frame: pd.DataFrame, inferred: list[str], *stages: FloatArray
) -> dict[str, Path]:
    """Write the page: which rows of which sites, beside the data of the fit; the site before and after."""
    from equipool.judge.heldout import predicted_among
    from equipool.report.page import render

    participants = zip(model.sites_, model.model_.n_participants, strict=True)
    labels = parse_labels(frame[arguments.site]).astype(str) if arguments.site else np.empty(0, dtype=str)
    columns = [
        (seen, seen.outside(values).mean(), *np.nanquantile(values, [0, 0.5, 1]))
        for seen, values in _columns_of_fit(model, frame)
    ]
    page = render(
        "apply.html",
        model=arguments.model,
        source=arguments.table.name,
        rows=len(frame),
        sites=dict(zip(*np.unique(labels, return_counts=True), strict=True)),
        at_fit={str(name): round(float(count)) for name, count in participants},
        unseen=arguments.unseen_site,
        inferred=inferred,
        columns=sorted(columns, key=lambda one: (not one[0].is_covariate, -one[1])),
        predicted=predicted_among(labels, *stages) if stages and len(labels) else {},
        plural=plural,
    )
    write_whole(new / "report.html", page)
    return {"report": arguments.out / "report.html"}


def _apply_to_images(
    arguments: Namespace,
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
        what = "Images are harmonized given their site"
        raise InputError(f"{what}; name its column with --site, or ask for --codes, which need none.")
    if harmonizes:
        names = [covariate.name for covariate in model.covariates_]
        require_columns(frame, names)
        site, covariates = frame[arguments.site], frame[names]
        _check_beside_fit(arguments, model, frame)
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
        if harmonizes and not arguments.no_report:
            made |= _report(arguments, new, model, frame, [])
    announce(arguments, made, people=len(volumes))
    return 0
