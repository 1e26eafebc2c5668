"""``equipool preprocess``: T1-weighted heads of a BIDS folder to brains on the MNI grid."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from equipool.cli import options
from equipool.exceptions import InputError

ENTITIES = ("session", "run", "acq", "desc")
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
    option = command.add_argument
    option("bids", metavar="BIDS", type=Path, help="the folder with sub-… folders")
    options.add_common(command, "preset")
    option("out", metavar="OUT", type=Path, help="where the derivative is written")
    option(
        "--resolution", type=float, default=2.0, metavar="MM", help="voxel size of the result (default: 2)"
    )
    option(
        "--skip",
        nargs="+",
        action="extend",
        default=[],
        choices=("n4", "register", "normalize"),
        metavar="STEP",
        help="leave out n4 (bias field), register (images are in MNI space) or normalize (intensities)",
    )
    option(
        "--brain-extracted",
        action="store_true",
        help="the images have no skull: the brain is where they are not 0",
    )
    for name in ENTITIES:
        option(f"--{name}", metavar="LABEL", help=f"only images with this {name} in their names")
    options.add_common(command, "jobs", "scheduler")
    option("--fresh", action="store_true", help="do heads again that are there already")
    options.add_common(command, "dry-run")
    command.set_defaults(command=run, go_on="What is done is kept; run the same command again to go on.")


def run(arguments: argparse.Namespace) -> int:
    """Preprocess, write the page for quality control, and say what became of the heads."""
    from equipool.data.presets import read_adcp, read_adni
    from equipool.preprocess.folder import preprocess_folder
    from equipool.preprocess.heads import Steps
    from equipool.report.quality_page import write_quality

    steps = Steps(arguments.resolution, tuple(arguments.skip), arguments.brain_extracted)
    entities = {name: value for name in ENTITIES if (value := getattr(arguments, name)) is not None}
    participants = None
    if arguments.preset:
        if entities:
            raise InputError(f"--{next(iter(entities))} goes with BIDS names, not with --preset.")
        participants = (read_adni if arguments.preset == "adni" else read_adcp)(arguments.bids)
    what: dict[str, Any] = {"participants": participants, **entities}
    if arguments.dry_run:
        return _dry_run(arguments, steps, what)
    outcome = preprocess_folder(
        arguments.bids, arguments.out, steps, jobs=arguments.jobs, fresh=arguments.fresh, **what
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
    if participants is not None and participants["participant_id"].duplicated().any():
        print(
            f"Visits are listed in {arguments.out / 'people.tsv'}; go on with that table and --images path."
        )
    return 1 if outcome.failed else 0


def _dry_run(arguments: argparse.Namespace, steps: Any, what: dict[str, Any]) -> int:
    from equipool.preprocess.folder import find_heads, seconds_per_head

    heads = find_heads(arguments.bids, arguments.out, steps, **what)
    facts = {head.name: None if arguments.fresh else head.read_facts() for head in heads}
    for head in heads:
        print(f"{'to do' if facts[head.name] is None else 'done '}  {head.name}  {head.source}")
    done = [one for one in facts.values() if one is not None]
    jobs = arguments.jobs or os.cpu_count() or 1
    todo = len(heads) - len(done)
    minutes = seconds_per_head(done) * -(-todo // jobs) / 60
    print(f"{len(done)} done, {todo} to do: about {minutes:.0f} min with {jobs} at a time.")
    return 0
