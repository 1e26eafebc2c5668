"""``equipool simulate``: a BIDS folder of simulated brains from several scanners, with the truth."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from equipool.cli import options
from equipool.cli.outputs import announce, check_out, whole_or_nothing
from equipool.exceptions import InputError
from equipool.progress import counted

# What an earlier simulation may have written that this one does not.
FILES = (
    "participants.tsv",
    "dataset_description.json",
    "sub-*/anat/sub-*_desc-brain_T1w.nii.gz",
    "derivatives/truth/*.nii.gz",
    "derivatives/truth/traits.tsv",
    "derivatives/truth/sub-*/anat/sub-*_desc-clean_T1w.nii.gz",
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "simulate",
        help="simulated brains of several scanners (BIDS), with the truth",
        description="Write brains that age and fall ill as measured by different scanners, the same brains "
        "without a scanner, and the true effects: something to try methods on.",
    )
    option = command.add_argument
    option("out", metavar="OUT", type=Path, help="the folder to write")
    option(
        "--like",
        choices=("adni", "adcp", "custom"),
        default="adni",
        help="scanners and sample counts of the paper's datasets, or your own counts (default: adni)",
    )
    option("--people", type=int, nargs="+", metavar="N", help="custom: participants of each site")
    option(
        "--patients",
        type=int,
        nargs="+",
        metavar="N",
        help="custom: how many of them are ill (default: 40 %%)",
    )
    option("--overlap", type=float, help="of the sites' ages, 0 to 1 (default: that of the dataset)")
    option("--resolution", type=float, default=4.0, metavar="MM", help="voxel size, 1 to 8 (default: 4)")
    options.add_common(command, "seed", "jobs")
    option("--force", action="store_true", help="overwrite an earlier simulation in OUT")
    options.add_common(command, "json")
    command.set_defaults(
        command=run, go_on="What was half done is deleted again; the same command starts anew."
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate, write, and say what is where."""
    from equipool.simulate.brains import custom_cohort, simulate_brains

    out: Path = arguments.out
    if check_out(out, "simulate") and not arguments.force:
        raise InputError(f"{out} holds an earlier simulation; overwrite it with --force.")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise InputError(f"--jobs must be at least 1. Got {arguments.jobs}.")
    if arguments.seed < 0:
        raise InputError(f"--seed must be 0 or more. Got {arguments.seed}.")
    if (arguments.like == "custom") != (arguments.people is not None):
        raise InputError("--people goes with --like custom: say how many participants each site has.")
    if arguments.patients is not None and arguments.people is None:
        raise InputError("--patients goes with --like custom and --people.")
    like = custom_cohort(arguments.people, arguments.patients) if arguments.people else arguments.like
    brains = simulate_brains(
        like, overlap=arguments.overlap, resolution=arguments.resolution, random_state=arguments.seed
    )
    with whole_or_nothing(out, "simulate", {"like": arguments.like, "seed": arguments.seed}, FILES) as new:
        written = brains.write(new, jobs=arguments.jobs or os.cpu_count() or 1)
        for _ in counted(written, "Brains", len(brains)):
            pass
    counts = {site: int(n) for site, n in sorted(brains.people["site"].value_counts().items())}
    made = {
        "people": out / "participants.tsv",
        "scans": out / "sub-…" / "anat",
        "truth": out / "derivatives" / "truth",
    }
    announce(arguments.json, made, sites=counts)
    if not arguments.json:
        print(f"{len(brains)} participants: {', '.join(f'{site} {n}' for site, n in counts.items())}")
        if len(counts) == 1:
            half = len(brains) // 2 or 1
            print(f"One site leaves nothing to pool; for two say, for example, --people {half} {half}.")
        print(f"Next, try: equipool check {out}")
    return 0
