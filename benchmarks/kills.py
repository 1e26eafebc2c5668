"""Kill commands at random moments, run them again, and compare with what nobody disturbed.

    python benchmarks/kills.py --kills 30

Four jobs in turn: training with a checkpoint, `benchmark`, `preprocess`, `harmonize` of images. Each is run
once in peace; then again and again in a new folder, killed (SIGKILL, the whole process group) at a random
moment, once or twice, and run to its end. Every file of the result must be the same, byte for byte, and no
other may be there. Times, which no two runs share, are left out of the comparison (`SECONDS`, `seconds`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

COMMAND = [sys.executable, "-m", "equipool"]
TRAINING = """
import sys
import torch
import equipool as ep
from equipool.nn import training
torch.set_num_threads(1)
training.SECONDS = 0.2
pool = ep.simulate_table(people=200).pool
pooler = ep.EquivariantPooler(steps=400, random_state=0, checkpoint=sys.argv[1] + "/checkpoint")
pooler.fit(pool.X, pool.y, site=pool.site_labels, covariates=pool.C).save(sys.argv[1] + "/model")
"""


def jobs(work: Path) -> dict[str, list[str]]:
    """Return the commands, without their output folder, which comes last."""
    small, heads = work / "small", work / "heads"
    for folder, people in ((small, "8"), (heads, "1")):
        simulate = ["simulate", str(folder), "--like", "custom", "--people", people, people]
        subprocess.run([*COMMAND, *simulate], check=True, capture_output=True)
    harmonize = ["harmonize", str(small), "--site", "site", "--covariate", "age", "--target", "dx"]
    harmonize += ["--steps", "150", "--no-report", "--out"]
    benchmark = ["benchmark", "german", "--methods", "naive", "mmd", "--quick", "--jobs", "1", "--out"]
    preprocess = ["preprocess", str(heads), "--brain-extracted", "--resolution", "4", "--jobs", "1"]
    return {
        "training": [sys.executable, "-c", TRAINING],
        "benchmark": [*COMMAND, *benchmark],
        "preprocess": [*COMMAND, *preprocess],
        "harmonize": [*COMMAND, *harmonize],
    }


def run(call: list[str], out: Path, *, seconds: float | None = None) -> bool:
    """Run a call, or kill it and all that it started after some seconds; return whether it ended."""
    process = subprocess.Popen(
        [*call, str(out)],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False
    if process.returncode:
        raise SystemExit(f"{' '.join(call[:6])} … failed: {said.strip()[-500:]}")
    return True


def contents(out: Path) -> dict[str, str]:
    """Return the hash of every file, hidden ones too."""
    return {str(path.relative_to(out)): _hash(path, out) for path in sorted(out.rglob("*")) if path.is_file()}


def _hash(path: Path, out: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".json":
        content = json.dumps(_timeless(json.loads(content)), sort_keys=True).encode()
    elif path.suffix == ".npz":
        with np.load(path) as arrays:  # a zip holds the time of writing
            content = b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays))
    elif path.name in ("runs.csv", "table.md", "qc.html") or path.suffix == ".tsv":
        content = "\n".join(_columns(content.decode())).encode()
    return hashlib.sha256(content.replace(str(out).encode(), b"OUT")).hexdigest()


def _timeless(value):
    """Return JSON without what tells the time."""
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if "seconds" not in k and k != "checksum"}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def _columns(text: str):
    """Give lines of a table without columns of times."""
    mark = "|" if text.startswith(("|", "#")) else "\t" if "\t" in text else ","
    drop: set[int] = set()
    for line in text.splitlines():
        cells = line.split(mark)
        found = {k for k, cell in enumerate(cells) if cell.strip() in ("seconds", "s", "cpu_seconds")}
        drop = found or drop
        yield mark.join(cell for k, cell in enumerate(cells) if k not in drop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--jobs", nargs="+", help="of training, benchmark, preprocess, harmonize")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, work = random.Random(arguments.seed), Path(tempfile.mkdtemp())
    calls = {name: call for name, call in jobs(work).items() if name in (arguments.jobs or jobs_all())}
    truth, took = {}, {}
    for name, call in calls.items():
        start = time.monotonic()
        run(call, work / name)
        truth[name], took[name] = contents(work / name), time.monotonic() - start
        print(f"{name}: {len(truth[name])} files in {took[name]:.0f} s", flush=True)
    done, wrong, turn = dict.fromkeys(calls, 0), 0, 0
    while sum(done.values()) < arguments.kills:
        name = list(calls)[turn % len(calls)]
        turn += 1
        out = work / f"{name}-{turn}"
        moments = []
        for _ in range(rng.choice((1, 2))):
            moment = rng.uniform(0.05, 0.95) * took[name]
            if run(calls[name], out, seconds=moment):
                break
            done[name] += 1
            moments.append(f"{moment:.1f}")
        run(calls[name], out)
        found = contents(out)
        other = sorted(k for k in truth[name].keys() | found.keys() if truth[name].get(k) != found.get(k))
        wrong += bool(other)
        verdict = "same" if not other else f"DIFFERS in {', '.join(other[:5])}"
        print(f"{name} killed after {' and '.join(moments) or 'its end'} s: {verdict}", flush=True)
        if not other:
            shutil.rmtree(out)
    print(f"{sum(done.values())} kills ({done}), {wrong} results differ")
    sys.exit(bool(wrong))


def jobs_all() -> tuple[str, ...]:
    return "training", "benchmark", "preprocess", "harmonize"


if __name__ == "__main__":
    main()
