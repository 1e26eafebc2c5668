"""``equipool simulate``: a BIDS folder of simulated brains from several scanners, with the truth."""

import os
from argparse import Namespace

from equipool.cli.outputs import announce, check_out, whole_or_nothing
from equipool.exceptions import InputError
from equipool.progress import counted
from equipool.simulate.brains import custom_cohort, simulate_brains

# What an earlier simulation may have written that this one does not: of other participants and sites.
FILES = ("sub-*/anat/sub-*_desc-brain_T1w.nii.gz", "derivatives/truth/**/*.nii.gz")


def run(arguments: Namespace) -> int:
    """Simulate, write, and say what is where."""
    check_out(arguments)
    custom, patients = arguments.people is not None, arguments.patients is not None
    if (arguments.like == "custom") != custom or (patients and not custom):
        raise InputError("--people and --patients go with --like custom: give the participants of each site.")
    like = custom_cohort(arguments.people, arguments.patients) if arguments.people else arguments.like
    settings = {"overlap": arguments.overlap, "resolution": arguments.resolution}
    brains = simulate_brains(like, **settings, random_state=arguments.seed)
    with whole_or_nothing(arguments, {"like": arguments.like, "seed": arguments.seed}, FILES) as new:
        written = brains.write(new, jobs=arguments.jobs or os.cpu_count() or 1)
        for _ in counted(written, "Brains", len(brains)):
            pass
    counts = {site: int(n) for site, n in sorted(brains.people["site"].value_counts().items())}
    out, truth = arguments.out, arguments.out / "derivatives" / "truth"
    made = {"people": out / "participants.tsv", "scans": out / "sub-…" / "anat", "truth": truth}
    announce(arguments, made, sites=counts)
    if not arguments.json:
        print(f"{len(brains)} participants: {', '.join(f'{site} {n}' for site, n in counts.items())}")
        half = len(brains) // 2 or 1
        if len(counts) == 1:
            print(f"One site leaves nothing to pool; for two say, for example, --people {half} {half}.")
        print(f"Next, try: equipool check {out}")
    return 0
