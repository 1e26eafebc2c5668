"""``equipool harmonize``: images or a table without what the sites did, and the model that does it."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.cli import options
from equipool.cli.options import roles
from equipool.cli.outputs import announce, check_out, content_hash, whole_or_nothing
from equipool.cli.participants import preset_roles, read_participants
from equipool.cli.report import report_on_images, report_on_table
from equipool.cli.statmap_option import require_a_map, write_statmaps
from equipool.exceptions import InputError
from equipool.files import write_json
from equipool.progress import duration, say

if TYPE_CHECKING:
    import pandas as pd

    from equipool.checks import Inputs
    from equipool.data import PooledDataset, Volumes
    from equipool.estimators import EquivariantPooler

# Of the time a run takes (seconds on one core of 2020): torch's import; a step of training; the rest of a run
# on images, beside reading them once.
STARTING, SECONDS_PER_STEP, TIMES_READING = 4.0, 0.04, 4.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "harmonize",
        help="remove site effects from a table or images; keep a model",
        description="Fit on all rows, and write harmonized images as a BIDS derivative, or the harmonized "
        "table; `equipool apply` applies the model to new rows.",
    )
    option = command.add_argument
    option("table", metavar="SOURCE", type=Path, help="a folder of images, or a .csv, .tsv or .parquet table")
    options.add_common(command, "out")
    options.add_roles(command)
    options.add_images(command)
    options.add_common(command, "missing")
    option(
        "--statmap",
        metavar="COLUMN",
        help="images: also t-maps of this column, covariates adjusted, before and after",
    )
    option("--codes", action="store_true", help="images: also train the codes of EquivariantPooler")
    option(
        "--encoder",
        choices=("components", "linear", "resnet"),
        default="components",
        help="of --codes; resnet, the paper's, takes hours without a GPU (default: components)",
    )
    option("--steps", type=int, default=1500, help="of training for --codes (default: 1500)")
    options.add_common(command, "seed")
    option("--jobs", type=int, default=1, metavar="N", help="images read at a time (default: 1)")
    option("--no-report", action="store_true", help="leave out the report, which takes a while")
    option("--fresh", action="store_true", help="of --codes: train anew, whatever a killed run has done")
    options.add_common(command, "dry-run", "json")
    command.set_defaults(
        command=run,
        go_on="What was half written is taken away again; the same command goes on with the training.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Harmonize images or a table, whichever the source is."""
    preset_roles(arguments)
    if arguments.steps < 1 or arguments.jobs < 1 or arguments.seed < 0:
        raise InputError(
            f"--steps and --jobs must be at least 1, --seed at least 0. Got "
            f"{arguments.steps}, {arguments.jobs} and {arguments.seed}."
        )
    frame, images = read_participants(arguments)
    facts = {**_call(arguments), "content": content_hash(frame)}
    check_out(arguments.out, "harmonize", facts)
    if images is None:
        return _harmonize_table(arguments, frame, facts)
    return _harmonize_images(arguments, frame, images, facts)


def _call(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what makes a run the same as an earlier one."""
    beside = "command name go_on config no_guess table out jobs dry_run fresh json no_report".split()
    call = {name: value for name, value in vars(arguments).items() if name not in beside}
    call = {name: str(value) if isinstance(value, Path) else value for name, value in call.items()}
    return {"source": str(arguments.table.resolve()), **call}


# -- tables ------------------------------------------------------------------------------------------------


def _harmonize_table(arguments: argparse.Namespace, frame: pd.DataFrame, facts: dict[str, Any]) -> int:
    from equipool.checks import Inputs
    from equipool.checks.findings import listed
    from equipool.cli.derivative import FILES, write_harmonized
    from equipool.data import PooledDataset
    from equipool.estimators import SiteHarmonizer

    if arguments.statmap:
        raise InputError(
            f"--statmap is for images, and {arguments.table} is a table of features; leave it out."
        )
    inputs = Inputs.from_frame(frame, site=arguments.site, **roles(arguments))
    pool = PooledDataset.from_inputs(inputs, missing=arguments.missing)
    if arguments.dry_run:
        return _say_pool(
            arguments, pool, f"{len(pool.feature_names)} features", _table_seconds(pool, arguments.no_report)
        )
    _say_outliers(inputs)
    features = list(pool.feature_names)
    given = {"site": frame[arguments.site], "covariates": _columns(frame, arguments.covariates)}
    model = SiteHarmonizer(missing=arguments.missing, random_state=arguments.seed)
    subject = frame[arguments.subject] if arguments.subject else None
    clean = model.fit_transform(frame[features], pool.y, **given, subject=subject)
    out: Path = arguments.out
    with whole_or_nothing(out, "harmonize", facts, FILES) as new:
        model.save(new / "model")
        harmonized = frame.assign(**{name: clean[name] for name in features})
        written = write_harmonized(new, arguments.table, harmonized)
        write_json(new / "summary.json", {**facts, **_counts(pool), "features": features})
    made = {"harmonized": out / written.name, "features": listed(features, shown=3), "model": out / "model"}
    if not arguments.no_report:
        made["report"] = report_on_table(arguments, inputs, pool, clean.to_numpy(), subject)
    announce(arguments.json, made, **{**_counts(pool), "features": features})
    return 0


# -- images ------------------------------------------------------------------------------------------------


def _harmonize_images(
    arguments: argparse.Namespace, frame: pd.DataFrame, images: str, facts: dict[str, Any]
) -> int:
    from equipool.checks import Inputs
    from equipool.cli import derivative
    from equipool.data import PooledDataset, Volumes
    from equipool.data.bids import write_description
    from equipool.data.tables import image_paths
    from equipool.estimators import ImageHarmonizer

    frame = frame.reset_index(drop=True)
    paths = image_paths(frame, images)
    inputs = Inputs.from_frame(frame, site=arguments.site, images=images, **roles(arguments))
    pool = PooledDataset.from_inputs(inputs, images=paths)
    places = derivative.places_of(frame, images, arguments.id or arguments.subject)
    if arguments.statmap:
        require_a_map(frame, arguments.statmap, arguments.covariates, arguments.subject)
    if arguments.dry_run:
        return _dry_run_images(arguments, pool)
    _say_outliers(inputs)
    volumes = Volumes.build(paths, mask=arguments.mask, jobs=arguments.jobs, progress=True)
    given = {"site": frame[arguments.site], "covariates": _columns(frame, arguments.covariates)}
    harmonizer = ImageHarmonizer(random_state=arguments.seed).fit(volumes, pool.y, **given)
    pooler = _fitted_pooler(arguments, volumes, pool, facts, given) if arguments.codes else None
    out: Path = arguments.out
    with whole_or_nothing(out, "harmonize", facts, derivative.FILES) as new:
        write_description(new, "Harmonized brains", "harmonize")
        harmonizer.save(new / "model")
        derivative.write_volumes(new, places, volumes, harmonizer, **given)
        if pooler is not None:
            pooler.save(new / "pooler")
            derivative.write_codes(new, places, volumes, pooler)
        derivative.write_participants(new, places, frame, [arguments.site, *_kept(arguments)])
        maps = write_statmaps(arguments, new, frame, volumes, places) if arguments.statmap else ({}, None)
        grid = {"grid": list(volumes.mask.shape), "voxels": volumes.shape[1]}
        write_json(new / "summary.json", {**facts, **_counts(pool), **grid, **maps[0]})
    if pooler is not None:
        shutil.rmtree(str(pooler.checkpoint), ignore_errors=True)
    codes = {"codes": out / "codes.tsv", "model of the codes": out / "pooler"} if arguments.codes else {}
    made = {"harmonized": out / "sub-…" / "anat", "model": out / "model", **codes}
    made |= {"t-maps": out / "statmaps"} if arguments.statmap else {}
    if not arguments.no_report:
        beside = (harmonizer, pooler), places["participant_id"].to_numpy(), maps[1]
        made["report"] = report_on_images(arguments, inputs, pool, volumes, *beside)
    announce(arguments.json, made, **_counts(pool))
    return 0


def _kept(arguments: argparse.Namespace) -> list[str | None]:
    """Return the columns that are written beside the site."""
    return [*arguments.covariates, arguments.target, arguments.statmap]


def _fitted_pooler(
    arguments: argparse.Namespace,
    volumes: Volumes,
    pool: PooledDataset,
    facts: dict[str, Any],
    given: dict[str, Any],
) -> EquivariantPooler:
    """Train the codes; a run that was killed goes on."""
    from equipool.estimators import EquivariantPooler

    pooler = EquivariantPooler(
        encoder=arguments.encoder,
        steps=arguments.steps,
        random_state=arguments.seed,
        task=pool.task,
        checkpoint=_training_folder(volumes, facts, fresh=arguments.fresh),
        verbose=True,
    )
    pooler.fit(volumes, pool.y, **given)
    return pooler


def _say_outliers(inputs: Inputs) -> None:
    """Warn of values that no measurement gives before they go into a fit; `equipool check` looks at more."""
    from equipool.checks.cautions import feature_cautions, outlier_cautions

    for finding in (*outlier_cautions(inputs), *feature_cautions(inputs)):
        say(f"Warning: {finding.text}")


def _training_folder(volumes: Volumes, facts: dict[str, Any], *, fresh: bool) -> Path:
    """Return where training is kept until the results are written, named by all that decides it."""
    from equipool.files import cache_folder
    from equipool.nn.checkpoints import locked

    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in volumes.paths]
    name = hashlib.sha256(repr((facts, files)).encode()).hexdigest()[:32]
    folder = cache_folder() / "training" / name
    if fresh and folder.is_dir():
        with locked(folder):  # not from under a run that is still at it
            shutil.rmtree(folder, ignore_errors=True)
    return folder


def _dry_run_images(arguments: argparse.Namespace, pool: PooledDataset) -> int:
    from equipool.data import check_volumes

    start = time.perf_counter()
    grid = check_volumes(pool.images or (), mask=arguments.mask, jobs=arguments.jobs, progress=True)
    reading = time.perf_counter() - start
    size = 4 * len(pool) * grid.present.size / 2**20
    what = f"images of {grid}; writes at most {size:.0f} MiB, and reads through a cache"
    if arguments.codes and arguments.encoder != "components":
        return _say_pool(arguments, pool, what, None)
    # As 203 brains of 4 mm took; steps cost the same for all, the rest goes with reading.
    training = SECONDS_PER_STEP * arguments.steps if arguments.codes else 0.0
    return _say_pool(arguments, pool, what, training + TIMES_READING * reading)


def _say_pool(arguments: argparse.Namespace, pool: PooledDataset, what: str, seconds: float | None) -> int:
    """Say what a run would do, and how long it takes, give or take a factor of two."""
    counts = ", ".join(f"{site} {n}" for site, n in _counts(pool)["sites"].items())
    time_needed = "hours without a GPU" if seconds is None else f"{duration(seconds)} (half to double)"
    if arguments.json:
        print(json.dumps({**_counts(pool), "what": what, "seconds": seconds}, ensure_ascii=False))
    else:
        print(f"{len(pool)} rows ({counts}), {what}.\nTo {arguments.out}, in about {time_needed}.")
    return 0


def _table_seconds(pool: PooledDataset, no_report: bool) -> float:
    """Return what a table takes on one core, as measured on 200 to 4 000 rows and 20 to 1 000 features.

    The report's share is a line through two tables, of 180 rows with 12 features and of 1 078 with 218.
    """
    rows, features = pool.features.shape
    fit = STARTING + 2.5e-6 * rows * features + 5e-10 * features**3
    return fit if no_report else fit + 5 + 5e-5 * rows * features


def _counts(pool: PooledDataset) -> dict[str, Any]:
    return {
        "people": len(pool),
        "sites": {site: int((pool.site == k).sum()) for k, site in enumerate(pool.sites)},
    }


def _columns(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame | None:
    return frame[list(names)] if names else None
