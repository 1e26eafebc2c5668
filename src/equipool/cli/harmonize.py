"""``equipool harmonize``: images or a table without what the sites did, and the model that does it."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipool.cli.outputs import add_json, announce, check_out, content_hash, whole_or_nothing
from equipool.cli.participants import add_images, add_roles, preset_roles, read_people, roles
from equipool.cli.progress_line import reported
from equipool.cli.report import report_on_images, report_on_table
from equipool.cli.statmap_option import require_a_map, write_statmaps
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.progress import duration, say

if TYPE_CHECKING:
    import pandas as pd

    from equipool.data import PooledDataset, Volumes

__all__ = ["add", "run"]

# Of the time a run takes (seconds on one core of 2020): torch's import; a step of training; the rest of a run
# on images, beside reading them once.
STARTING, SECONDS_PER_STEP, TIMES_READING = 4.0, 0.04, 4.0


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "harmonize",
        help="take out of a table or images what the sites did; keep a model",
        description="Fit on all people, and write harmonized images as a BIDS derivative with codes that do "
        "not know the site, or the harmonized table; `equipool apply` takes the model to new people.",
    )
    command.add_argument(
        "table", metavar="SOURCE", type=Path, help="a folder of images, or a .csv, .tsv or .parquet table"
    )
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    add_roles(command)
    add_images(command)
    command.add_argument(
        "--missing",
        choices=("error", "impute"),
        default="error",
        help="tables: refuse missing features, or fill them in (default: error)",
    )
    command.add_argument(
        "--statmap",
        metavar="COLUMN",
        help="images: also t-maps of this column, covariates adjusted, before and after",
    )
    command.add_argument(
        "--encoder",
        choices=("components", "linear", "resnet"),
        default="components",
        help="images: what learns the codes; resnet, the paper's, takes hours without a GPU "
        "(default: components)",
    )
    command.add_argument("--steps", type=int, default=1500, help="images: of training (default: 1500)")
    command.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")
    command.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="images read at a time (default: 1)"
    )
    command.add_argument("--no-report", action="store_true", help="leave out the report, which takes a while")
    command.add_argument(
        "--fresh", action="store_true", help="images: train anew, whatever a killed run has done"
    )
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")
    add_json(command)
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
    frame, images = read_people(arguments)
    facts = {**_call(arguments), "content": content_hash(frame)}
    check_out(arguments.out, "harmonize", facts)
    if images is None:
        return _harmonize_table(arguments, frame, facts)
    return _harmonize_images(arguments, frame, images, facts)


def _call(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what makes a run the same as an earlier one."""
    beside = (
        "command",
        "name",
        "go_on",
        "config",
        "no_guess",
        "table",
        "out",
        "jobs",
        "dry_run",
        "fresh",
        "json",
        "no_report",
    )
    call = {name: value for name, value in vars(arguments).items() if name not in beside}
    call = {name: str(value) if isinstance(value, Path) else value for name, value in call.items()}
    return {"source": str(arguments.table.resolve()), **call}


# -- tables ------------------------------------------------------------------------------------------------


def _harmonize_table(arguments: argparse.Namespace, frame: pd.DataFrame, facts: dict[str, Any]) -> int:
    from equipool.checks.findings import listed
    from equipool.cli.derivative import OWN
    from equipool.cli.outcome_tables import write_like
    from equipool.data import PooledDataset
    from equipool.estimators import SiteHarmonizer

    if arguments.statmap:
        raise InputError(
            f"--statmap is for images, and {arguments.table} is a table of features; leave it out."
        )
    pool = PooledDataset.from_frame(frame, site=arguments.site, missing=arguments.missing, **roles(arguments))
    if arguments.dry_run:
        return _say_pool(
            arguments, pool, f"{len(pool.feature_names)} features", _table_seconds(pool, arguments.no_report)
        )
    _say_outliers(frame, arguments.site, roles(arguments))
    features = list(pool.feature_names)
    given = {"site": frame[arguments.site], "covariates": _columns(frame, arguments.covariates)}
    model = SiteHarmonizer(missing=arguments.missing, random_state=arguments.seed)
    subject = frame[arguments.subject] if arguments.subject else None
    clean = model.fit_transform(frame[features], pool.y, **given, subject=subject)
    out: Path = arguments.out
    with whole_or_nothing(out, "harmonize", facts, OWN) as new:
        model.save(new / "model")
        written = write_like(arguments.table, new, frame.assign(**{name: clean[name] for name in features}))
        summary = {**facts, **_counts(pool), "features": features}
        write_whole(new / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False))
    made = {"harmonized": out / written.name, "features": listed(features, shown=3), "model": out / "model"}
    if not arguments.no_report:
        made["report"] = report_on_table(arguments, frame, pool, clean.to_numpy())
    announce(arguments.json, made, **{**_counts(pool), "features": features})
    return 0


# -- images ------------------------------------------------------------------------------------------------


def _harmonize_images(
    arguments: argparse.Namespace, frame: pd.DataFrame, images: str, facts: dict[str, Any]
) -> int:
    from equipool.cli import derivative
    from equipool.data import PooledDataset, Volumes
    from equipool.estimators import EquivariantPooler

    frame = frame.reset_index(drop=True)
    pool = PooledDataset.from_frame(
        frame, site=arguments.site, images=images, **{**roles(arguments), "features": None}
    )
    people = derivative.people_of(frame, images, arguments.id or arguments.subject)
    if arguments.statmap:
        require_a_map(frame, arguments.statmap, arguments.covariates, arguments.subject)
    if arguments.dry_run:
        return _dry_run_images(arguments, pool)
    _say_outliers(frame, arguments.site, {**roles(arguments), "features": []})
    volumes = Volumes.build(pool.images or (), mask=arguments.mask, jobs=arguments.jobs, progress=True)
    covariates = _columns(frame, arguments.covariates)
    pooler = EquivariantPooler(
        encoder=arguments.encoder,
        steps=arguments.steps,
        random_state=arguments.seed,
        task=pool.task,
        checkpoint=_training_folder(frame, volumes, facts, fresh=arguments.fresh),
        verbose=True,
    )
    pooler.fit(volumes, pool.y, site=frame[arguments.site], covariates=covariates)
    out: Path = arguments.out
    with whole_or_nothing(out, "harmonize", facts, derivative.OWN) as new:
        derivative.write_description(new, "harmonize")
        pooler.save(new / "model")
        written = derivative.write_volumes(new, people, volumes, pooler, frame[arguments.site], covariates)
        for _ in reported(written, len(volumes), "Harmonized"):
            pass
        derivative.write_codes(new, people, volumes, pooler)
        used = [arguments.site, *arguments.covariates, arguments.target, arguments.statmap]
        derivative.write_people(new, people, frame[list(dict.fromkeys(name for name in used if name))])
        summary = {**facts, **_counts(pool), "grid": list(volumes.mask.shape), "voxels": volumes.shape[1]}
        pictures = None
        if arguments.statmap:
            found, pictures = write_statmaps(arguments, new, frame, volumes, people)
            summary |= found
        write_whole(new / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False))
    shutil.rmtree(str(pooler.checkpoint), ignore_errors=True)
    made = {"harmonized": out / "sub-…" / "anat", "codes": out / "codes.tsv", "model": out / "model"}
    if arguments.statmap:
        made["t-maps"] = out / "statmaps"
    if not arguments.no_report:
        made["report"] = report_on_images(arguments, frame, pool, volumes, pooler, people, pictures)
    announce(arguments.json, made, **_counts(pool))
    return 0


def _say_outliers(frame: pd.DataFrame, site: str, given: dict[str, Any]) -> None:
    """Warn of values that no measurement gives before they go into a fit; `equipool check` looks at more."""
    from equipool.checks.cautions import feature_cautions, outlier_cautions
    from equipool.checks.inputs import Inputs

    inputs = Inputs.from_frame(frame, site=site, **given)
    for finding in (*outlier_cautions(inputs), *feature_cautions(inputs)):
        say(f"Warning: {finding.text}")


def _training_folder(frame: pd.DataFrame, volumes: Volumes, facts: dict[str, Any], *, fresh: bool) -> Path:
    """Return where training is kept until the results are written, named by all that decides it."""
    from equipool.files import cache_folder
    from equipool.nn.checkpoints import held

    read = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in volumes.paths]
    name = hashlib.sha256(repr((facts, frame.to_csv(), read)).encode()).hexdigest()[:32]
    folder = cache_folder() / "training" / name
    if fresh and folder.is_dir():
        with held(folder):  # not from under a run that is still at it
            shutil.rmtree(folder, ignore_errors=True)
    return folder


def _dry_run_images(arguments: argparse.Namespace, pool: PooledDataset) -> int:
    from equipool.data import check_volumes

    start = time.perf_counter()
    grid = check_volumes(pool.images or (), mask=arguments.mask, jobs=arguments.jobs, progress=True)
    reading = time.perf_counter() - start
    size = 4 * len(pool) * grid.present.size / 2**20
    what = f"images of {grid}; writes at most {size:.0f} MiB, and reads through a cache"
    if arguments.encoder != "components":
        return _say_pool(arguments, pool, what, None)
    # As 203 brains of 4 mm took; steps cost the same for all, the rest goes with reading.
    return _say_pool(arguments, pool, what, SECONDS_PER_STEP * arguments.steps + TIMES_READING * reading)


def _say_pool(arguments: argparse.Namespace, pool: PooledDataset, what: str, seconds: float | None) -> int:
    """Say what a dry run found, and how long the real one takes, give or take a factor of two."""
    counts = ", ".join(f"{site} {n}" for site, n in _counts(pool)["sites"].items())
    time_needed = "hours without a GPU" if seconds is None else f"{duration(seconds)} (half to double)"
    if arguments.json:
        print(json.dumps({**_counts(pool), "what": what, "seconds": seconds}, ensure_ascii=False))
    else:
        print(f"{len(pool)} people ({counts}), {what}.\nTo {arguments.out}, in about {time_needed}.")
    return 0


def _table_seconds(pool: PooledDataset, no_report: bool) -> float:
    """Return what a table takes on one core, as measured on 200 to 4 000 people and 20 to 1 000 features.

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
