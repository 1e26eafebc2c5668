"""``equipool preprocess``: T1-weighted heads of a BIDS folder to brains on the MNI grid."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from equipool.cli.scheduler import add_scheduler
from equipool.exceptions import InputError

if TYPE_CHECKING:
    import pandas as pd

    from equipool.preprocess.heads import Steps

__all__ = ["add", "run"]

EPILOG = """\
A killed run goes on where it stopped. Look at OUT/qc.html when it is done.
exit codes: 0 fine, 1 some heads failed (they are named), 2 the call or a file is wrong, 130 interrupted"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "preprocess",
        help="heads of a BIDS folder to brains on the MNI grid, with a QC page",
        description="Brain mask (deepbet), bias field (N4), affine registration to MNI152 (greedy), "
        "resampling and intensity normalisation of every T1-weighted image, in parallel.",
        epilog=EPILOG,
    )
    command.add_argument("bids", metavar="BIDS", type=Path, help="the folder with sub-… folders")
    command.add_argument(
        "--preset", choices=("adni", "adcp"), help="how the folder is laid out (default: BIDS)"
    )
    command.add_argument("out", metavar="OUT", type=Path, help="where the derivative is written")
    command.add_argument(
        "--resolution", type=float, default=2.0, metavar="MM", help="voxel size of the result (default: 2)"
    )
    command.add_argument(
        "--skip",
        nargs="+",
        action="extend",
        default=[],
        choices=("n4", "register", "normalize"),
        metavar="STEP",
        help="leave out n4 (bias field), register (images are in MNI space) or normalize (intensities)",
    )
    command.add_argument(
        "--brain-extracted",
        action="store_true",
        help="the images have no skull: the brain is where they are not 0",
    )
    for part in ("session", "run", "acq", "desc"):
        command.add_argument(
            f"--{part}", metavar="LABEL", help=f"only images with this {part} in their names"
        )
    command.add_argument("--jobs", type=int, metavar="N", help="heads at a time (default: all cores)")
    add_scheduler(command)
    command.add_argument("--fresh", action="store_true", help="do heads again that are there already")
    command.add_argument(
        "--dry-run", action="store_true", help="list what would be done and how long it takes"
    )
    command.set_defaults(command=run, go_on="What is done is kept; run the same command again to go on.")


def run(arguments: argparse.Namespace) -> int:
    """Preprocess, write the page for quality control, and say what became of the heads."""
    from equipool.data.presets import read_adcp, read_adni
    from equipool.preprocess.folder import preprocess_folder
    from equipool.preprocess.heads import Steps
    from equipool.report.quality_page import write_quality

    steps = Steps(arguments.resolution, tuple(arguments.skip), arguments.brain_extracted)
    entities = {
        part: getattr(arguments, part)
        for part in ("session", "run", "acq", "desc")
        if getattr(arguments, part) is not None
    }
    people = None
    if arguments.preset:
        if entities:
            raise InputError(f"--{next(iter(entities))} goes with BIDS names, not with --preset.")
        people = read_adni(arguments.bids) if arguments.preset == "adni" else read_adcp(arguments.bids)
    if arguments.dry_run:
        return _dry_run(arguments, steps, people, entities)
    outcome = preprocess_folder(
        arguments.bids,
        arguments.out,
        steps,
        people=people,
        jobs=arguments.jobs,
        fresh=arguments.fresh,
        **entities,
    )
    quality = {name: facts["quality"] for name, facts in outcome.facts.items()}
    table = write_quality(arguments.out, quality, outcome.pictures, outcome.failed)
    odd = table[table["flags"] != ""]
    print(f"{len(table)} heads in {arguments.out}, {len(odd)} flagged, {len(outcome.failed)} failed.")
    for name, flags in odd["flags"].items():
        print(f"flagged {name}: {flags}")
    for name, reason in outcome.failed.items():
        print(f"failed {name}: {reason}")
    print(f"Look at {arguments.out / 'qc.html'}")
    if people is not None and people["participant_id"].duplicated().any():
        print(f"Visits are told in {arguments.out / 'people.tsv'}; go on with that table and --images path.")
    return 1 if outcome.failed else 0


def _dry_run(
    arguments: argparse.Namespace, steps: Steps, people: pd.DataFrame | None, entities: dict[str, str]
) -> int:
    from equipool.preprocess.folder import find_heads, seconds_per_head

    heads = find_heads(arguments.bids, arguments.out, steps, people=people, **entities)
    facts = {head.name: None if arguments.fresh else head.read_facts() for head in heads}
    for head in heads:
        print(f"{'to do' if facts[head.name] is None else 'done '}  {head.name}  {head.source}")
    known = [found for found in facts.values() if found is not None]
    jobs = arguments.jobs or os.cpu_count() or 1
    todo = len(heads) - len(known)
    minutes = seconds_per_head(known) * -(-todo // jobs) / 60
    print(f"{len(known)} done, {todo} to do: about {minutes:.0f} min with {jobs} at a time.")
    return 0
