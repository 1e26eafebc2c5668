"""``equipool harmonize``: images or a table without site effects, and the model that removes them."""

import hashlib
import json
import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pandas as pd

from equipool.checks.cautions import feature_cautions, outlier_cautions
from equipool.checks.findings import listed
from equipool.cli import derivative
from equipool.cli.outputs import announce, check_out, facts_of, whole_or_nothing
from equipool.cli.source import Source, read_source
from equipool.data import PooledDataset, Volumes, check_volumes
from equipool.data.bids import write_description
from equipool.estimators import EquivariantPooler, ImageHarmonizer, SiteHarmonizer
from equipool.exceptions import InputError
from equipool.files import cache_folder, write_json
from equipool.nn.training import locked
from equipool.progress import duration, say

# Of the time a run takes (seconds on one core of 2020): torch's import; a step of training; the rest of a run
# on images, beside reading them once.
STARTING, SECONDS_PER_STEP, TIMES_READING = 4.0, 0.04, 4.0


def run(arguments: Namespace) -> int:
    """Harmonize images or a table, whichever the source is."""
    source = read_source(arguments)
    frame, inputs, pool, _ = source
    sites = {site: int((pool.site == k).sum()) for k, site in enumerate(pool.sites)}
    counts = {"people": len(pool), "sites": sites, "features": list(pool.feature_names)}
    facts = facts_of(arguments, frame) | counts
    check_out(arguments, facts)
    if arguments.keep_target and pool.y is None:
        raise InputError("--keep-target needs a target; name its column with --target.")
    places, mapped = pd.DataFrame(), pd.DataFrame()
    if pool.images is not None:
        places = derivative.places_of(frame, pool.images, arguments.id or arguments.subject)
        if arguments.statmap:
            mapped = derivative.rows_of_map(arguments, frame)
    elif arguments.statmap:
        what = f"--statmap is for images, and {arguments.table} is a table of features"
        raise InputError(f"{what}; leave it out.")
    if arguments.dry_run:
        return _dry_run(arguments, pool, counts)
    for finding in (*outlier_cautions(inputs), *feature_cautions(inputs)):  # `equipool check` looks at more
        say(f"Warning: {finding.text}")
    if pool.images is None:
        made = _harmonize_table(arguments, source, facts)
    else:
        made = _harmonize_images(arguments, source, facts, places, mapped)
    announce(arguments, made, **counts)
    return 0


def _harmonize_table(arguments: Namespace, source: Source, facts: dict[str, Any]) -> dict[str, Any]:
    """Harmonize and write a table; return what was written."""
    frame, _, pool, subject = source
    out, features = arguments.out, list(pool.feature_names)
    settings = {"keep_target": arguments.keep_target, "random_state": arguments.seed}
    model = SiteHarmonizer(missing=arguments.missing, **settings)
    given = {"site": frame[arguments.site], "covariates": frame[arguments.covariates]}
    y = pool.y if arguments.keep_target else None
    clean = model.fit_transform(frame[features], y, **given, subject=subject)
    on_target = derivative.say_of_target(arguments, model)
    with whole_or_nothing(arguments, facts) as new:
        model.save(new / "model")
        written, cells = derivative.write_harmonized(arguments, new, frame, clean)
        write_json(new / "summary.json", {**facts, "target_allowed_for": model.choices_["target"], **cells})
    made = {"harmonized": out / written, "features": listed(features, shown=3), "model": out / "model"}
    if not arguments.no_report:
        from equipool.cli.commands.report import report_on_table

        made["report"] = report_on_table(arguments, source, clean, on_target)
    return made


def _harmonize_images(
    arguments: Namespace, source: Source, facts: dict[str, Any], places: pd.DataFrame, mapped: pd.DataFrame
) -> dict[str, Any]:
    """Harmonize and write images, perhaps with codes, and t-maps of some rows; return what was written."""
    frame, _, pool, _ = source
    out: Path = arguments.out
    volumes = Volumes.build(pool.images or (), mask=arguments.mask, jobs=arguments.jobs, progress=True)
    given = {"site": frame[arguments.site], "covariates": frame[arguments.covariates]}
    harmonizer = ImageHarmonizer(keep_target=arguments.keep_target, random_state=arguments.seed)
    harmonizer.fit(volumes, pool.y if arguments.keep_target else None, **given)
    on_target = derivative.say_of_target(arguments, harmonizer)
    pooler = _fitted_pooler(arguments, volumes, pool, facts, **given) if arguments.codes else None
    made = {"harmonized": out / "sub-…" / "anat", "model": out / "model"}
    summary, views = {**facts, "grid": list(volumes.mask.shape), "voxels": volumes.shape[1]}, None
    summary["target_allowed_for"] = allowed = harmonizer.choices_["target"]
    with whole_or_nothing(arguments, facts) as new:
        write_description(new, "Harmonized brains", "harmonize")
        harmonizer.save(new / "model")
        derivative.write_volumes(new, places, volumes, harmonizer, **given)
        if pooler is not None:
            pooler.save(new / "pooler")
            derivative.write_codes(new, places, volumes, pooler)
            made |= {"codes": out / "codes.tsv", "model of the codes": out / "pooler"}
        columns = [arguments.site, *arguments.covariates, arguments.target, arguments.statmap]
        derivative.write_participants(new, places, frame, columns)
        if arguments.statmap:
            voxels, views = derivative.write_statmaps(arguments, new, mapped, volumes, places, allowed)
            summary |= voxels
            made["t-maps"] = out / "statmaps"
        write_json(new / "summary.json", summary)
    if pooler is not None:
        shutil.rmtree(str(pooler.checkpoint), ignore_errors=True)
    if not arguments.no_report:
        from equipool.cli.commands.report import report_on_images

        more: dict[str, Any] = {"subject": places["participant_id"].to_numpy(), "statmap": views}
        made["report"] = report_on_images(arguments, source, volumes, harmonizer, pooler, on_target, **more)
    return made


def _fitted_pooler(
    arguments: Namespace, volumes: Volumes, pool: PooledDataset, call: dict[str, Any], **given: Any
) -> EquivariantPooler:
    """Train the codes. An interrupted run of the same call goes on: its training is kept until the end."""
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in volumes.paths]
    name = hashlib.sha256(repr((call, files)).encode()).hexdigest()[:32]
    checkpoint = cache_folder() / "training" / name
    if arguments.fresh and checkpoint.is_dir():
        with locked(checkpoint):  # not from under a run that is still at it
            shutil.rmtree(checkpoint, ignore_errors=True)
    settings = {"encoder": arguments.encoder, "steps": arguments.steps, "random_state": arguments.seed}
    pooler = EquivariantPooler(**settings, task=pool.task, checkpoint=checkpoint, verbose=True)
    return pooler.fit(volumes, pool.y, **given)


def _dry_run(arguments: Namespace, pool: PooledDataset, counts: dict[str, Any]) -> int:
    """Say what a run would do, and how long it takes, give or take a factor of two."""
    seconds: float | None
    if pool.images is None:
        rows, features = pool.features.shape
        what = f"{features} features"
        # On one core, as measured on 200 to 4 000 rows and 20 to 1 000 features. The report's share is a line
        # through two tables, of 180 rows with 12 features and of 1 078 with 218.
        seconds = STARTING + 2.5e-6 * rows * features + 5e-10 * features**3
        seconds += 0 if arguments.no_report else 5 + 5e-5 * rows * features
    else:
        start = time.perf_counter()
        grid = check_volumes(pool.images, mask=arguments.mask, jobs=arguments.jobs, progress=True)
        size = 4 * len(pool) * grid.present.size / 2**20
        what = f"images of {grid}; writes at most {size:.0f} MiB, and reads through a cache"
        # As 203 brains of 4 mm took; steps cost the same for all, the rest goes with reading.
        seconds = TIMES_READING * (time.perf_counter() - start)
        seconds += SECONDS_PER_STEP * arguments.steps if arguments.codes else 0
        if arguments.codes and arguments.encoder != "components":
            seconds = None
    if arguments.json:
        print(json.dumps({**counts, "what": what, "seconds": seconds}, ensure_ascii=False))
        return 0
    sites = ", ".join(f"{site} {n}" for site, n in counts["sites"].items())
    time_needed = "hours without a GPU" if seconds is None else f"{duration(seconds)} (half to double)"
    print(f"{len(pool)} rows ({sites}), {what}.\nTo {arguments.out}, in about {time_needed}.")
    return 0
