"""Equation (4): the literal double loop against the linear-time form, and how the latter grows with N.

    python benchmarks/pair_loss.py            # about a minute and a half on one core

Prints a table and ends with one line of JSON: ratio_n30, ratio_n64 (time of the literal form over ours at
N=128), max_rel_diff (values and gradients), time_slope and memory_slope (log-log, N=1 000 to 1 000 000).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from equipool.groups import CovariateAction
from equipool.nn import equivariance_loss
from oracles import equation_4

SIZES = (1_000, 10_000, 100_000, 1_000_000)
# Freed memory is kept by the process: we time arithmetic, not the page faults of getting it again.
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)}


def sample(rows: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tau = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    c = 2 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) - 1
    return tau / torch.linalg.vector_norm(tau, dim=1, keepdim=True), c


def seconds(call: object, repeats: int) -> float:
    """Median time of one call after a warm-up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def ratio(n: int, rows: int = 128) -> dict[str, float]:
    """Time the literal form once and ours many times on the same input; compare values and gradients."""
    action = CovariateAction.all_ones(n)
    generators = action.generators()
    tau, c = sample(rows, n)
    ours = seconds(lambda: equivariance_loss(tau, c, action, reduction="sum"), repeats=2_000)
    start = time.perf_counter()
    slow = equation_4(tau, c, generators)
    literal = time.perf_counter() - start
    fast = equivariance_loss(tau, c, action, reduction="sum")
    difference = max(((fast - slow) / slow).abs().item(), gradient_difference(n, rows=24))
    return {"literal": literal, "ours": ours, "ratio": literal / ours, "rel_diff": difference}


def gradient_difference(n: int, rows: int) -> float:
    action = CovariateAction.all_ones(n)
    generators = action.generators()
    tau, c = sample(rows, n)
    a, b = tau.clone().requires_grad_(), tau.clone().requires_grad_()
    equivariance_loss(a, c, action, reduction="sum").backward()
    equation_4(b, c, generators).backward()
    return (torch.linalg.vector_norm(a.grad - b.grad) / torch.linalg.vector_norm(b.grad)).item()


def resident() -> tuple[int, int]:
    """Return the resident memory now and at its peak since the last reset, in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(1024 * int(fields[key].split()[0]) for key in ("VmRSS", "VmHWM"))


def grow(rows: int, n: int = 30) -> None:
    """Measure forward + backward at one N in this fresh process; print the numbers as JSON."""
    torch.set_num_threads(1)
    action = CovariateAction.all_ones(n)

    def step(tau: torch.Tensor, c: torch.Tensor) -> None:
        tau.grad = None
        equivariance_loss(tau, c, action).backward()

    tau, c = sample(64, n)
    step(tau.requires_grad_(), c)
    tau, c = sample(rows, n)
    tau.requires_grad_()
    Path("/proc/self/clear_refs").write_text("5")
    before, _ = resident()
    step(tau, c)
    _, peak = resident()
    spent = seconds(lambda: step(tau, c), repeats=max(5, 100_000 // rows))
    print(json.dumps({"rows": rows, "seconds": spent, "bytes": peak - before}))


def growth() -> list[dict[str, float]]:
    runs = []
    for rows in SIZES:
        # Memory: big blocks come straight from the system and go straight back, so that resident memory
        # follows what is alive. Time: freed memory is kept, so that we time our work, not page faults.
        memory = fresh_process("--grow", rows, {"MALLOC_MMAP_THRESHOLD_": "65536"})
        runs.append(fresh_process("--grow", rows, KEEP) | {"bytes": memory["bytes"]})
    return runs


def fresh_process(task: str, size: int, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, task, str(size)]
    out = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


def slope(runs: list[dict[str, float]], key: str) -> float:
    logs = np.log([[run["rows"], run[key]] for run in runs])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--grow", type=int, metavar="N", help="measure one N in this process (used by itself)"
    )
    parser.add_argument(
        "--ratio", type=int, metavar="n", help="both forms at one n in this process (likewise)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.grow:
        return grow(arguments.grow)
    if arguments.ratio:
        return print(json.dumps(ratio(arguments.ratio)))
    ratios = {n: fresh_process("--ratio", n, KEEP) for n in (30, 64)}
    for n, r in ratios.items():
        print(
            f"N=128 n={n}: literal {r['literal']:.2f} s, ours {1e6 * r['ours']:.0f} µs, "
            f"ratio {r['ratio']:,.0f}, relative difference {r['rel_diff']:.1e}"
        )
    runs = growth()
    for run in runs:
        print(f"N={run['rows']:>9,}: {1e3 * run['seconds']:9.2f} ms, {run['bytes'] / 2**20:8.1f} MiB above")
    figures = {f"ratio_n{n}": round(r["ratio"]) for n, r in ratios.items()}
    figures["max_rel_diff"] = max(r["rel_diff"] for r in ratios.values())
    figures["time_slope"] = round(slope(runs, "seconds"), 3)
    figures["memory_slope"] = round(slope(runs, "bytes"), 3)
    print(json.dumps(figures))
    return None


if __name__ == "__main__":
    main()
