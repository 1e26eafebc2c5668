"""``equipool preprocess``: T1-weighted heads of a BIDS folder to brains on the MNI grid."""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from equipool.cli.source import READERS
from equipool.exceptions import InputError
from equipool.preprocess.folder import USUAL_SECONDS, find_heads, preprocess_folder
from equipool.preprocess.heads import Steps
from equipool.report.page import write_quality

ENTITIES = ("session", "run", "acq", "desc")


def run(arguments: argparse.Namespace) -> int:
    """Preprocess, write the page for quality control, and say what became of the heads."""
    steps = Steps(arguments.resolution, tuple(arguments.skip), arguments.brain_extracted)
    entities = {name: value for name in ENTITIES if (value := getattr(arguments, name)) is not None}
    participants = None
    if arguments.preset:
        if entities:
            raise InputError(f"--{next(iter(entities))} goes with BIDS names, not with --preset.")
        participants = READERS[arguments.preset](arguments.bids)
    what: dict[str, Any] = {"participants": participants, **entities}
    if arguments.dry_run:
        return _dry_run(arguments, steps, what)
    done, pictures, failed = preprocess_folder(
        arguments.bids, arguments.out, steps, jobs=arguments.jobs, fresh=arguments.fresh, **what
    )
    quality = {name: facts["quality"] for name, facts in done.items()}
    table = write_quality(arguments.out, quality, pictures, failed)
    odd = table[table["flags"] != ""]
    print(f"{len(table)} heads in {arguments.out}, {len(odd)} flagged, {len(failed)} failed.")
    for name, flags in odd["flags"].items():
        print(f"flagged {name}: {flags}")
    for name, reason in failed.items():
        print(f"failed {name}: {reason}")
    print(f"Look at {arguments.out / 'qc.html'}")
    if participants is not None and participants["participant_id"].duplicated().any():
        print(
            f"Visits are listed in {arguments.out / 'people.tsv'}; go on with that table and --images path."
        )
    return 1 if failed else 0


def _dry_run(arguments: argparse.Namespace, steps: Steps, what: dict[str, Any]) -> int:
    heads = find_heads(arguments.bids, arguments.out, steps, **what)
    facts = {head.name: None if arguments.fresh else head.read_facts() for head in heads}
    for head in heads:
        print(f"{'to do' if facts[head.name] is None else 'done '}  {head.name}  {head.source}")
    done = [one for one in facts.values() if one is not None]
    jobs = arguments.jobs or os.cpu_count() or 1
    todo = len(heads) - len(done)
    seconds = statistics.median([one["seconds"]["all"] for one in done] or [USUAL_SECONDS])
    minutes = seconds * -(-todo // jobs) / 60
    print(f"{len(done)} done, {todo} to do: about {minutes:.0f} min with {jobs} at a time.")
    return 0
