"""``equipool preprocess``: T1-weighted heads of a BIDS folder to brains on the MNI grid."""

import os
import statistics
from argparse import Namespace
from typing import Any

from equipool.cli.source import READERS
from equipool.exceptions import InputError
from equipool.preprocess.folder import USUAL_SECONDS, find_heads, preprocess_folder
from equipool.preprocess.heads import Steps
from equipool.report.page import write_quality

ENTITIES = ("session", "run", "acq", "desc")


def run(arguments: Namespace) -> int:
    """Preprocess, write the page for quality control, and say what became of the heads."""
    steps = Steps(arguments.resolution, tuple(arguments.skip), arguments.brain_extracted)
    entities = {name: value for name in ENTITIES if (value := getattr(arguments, name)) is not None}
    participants = None
    if arguments.preset:
        if entities:
            raise InputError(f"--{next(iter(entities))} goes with BIDS names, not with --preset.")
        participants = READERS[arguments.preset](arguments.bids)
    what: dict[str, Any] = {"participants": participants, **entities}
    out = arguments.out
    if arguments.dry_run:
        return _dry_run(arguments, steps, what)
    done, pictures, failed = preprocess_folder(
        arguments.bids, out, steps, jobs=arguments.jobs, fresh=arguments.fresh, **what
    )
    quality = {name: facts["quality"] for name, facts in done.items()}
    table = write_quality(out, quality, pictures, failed)
    flagged = table.loc[table["flags"] != "", "flags"]
    print(f"{len(table)} heads in {out}, {len(flagged)} flagged, {len(failed)} failed.")
    for result, reasons in (("flagged", dict(flagged)), ("failed", failed)):
        for name, reason in reasons.items():
            print(f"{result} {name}: {reason}")
    print(f"Look at {out / 'qc.html'}")
    if participants is not None and participants["participant_id"].duplicated().any():
        print(f"Visits are listed in {out / 'people.tsv'}; go on with that table and --images path.")
    return 1 if failed else 0


def _dry_run(arguments: Namespace, steps: Steps, what: dict[str, Any]) -> int:
    heads, done = find_heads(arguments.bids, arguments.out, steps, **what), []
    for head in heads:
        facts = None if arguments.fresh else head.read_facts()
        done += [] if facts is None else [facts]
        print(f"{'to do' if facts is None else 'done '}  {head.name}  {head.source}")
    jobs, todo = arguments.jobs or os.cpu_count() or 1, len(heads) - len(done)
    seconds = statistics.median([one["seconds"]["all"] for one in done] or [USUAL_SECONDS])
    minutes = seconds * -(-todo // jobs) / 60
    print(f"{len(done)} done, {todo} to do: about {minutes:.0f} min with {jobs} at a time.")
    return 0
