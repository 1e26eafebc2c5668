"""Time, memory and reading of volumes: what a training step takes, what training holds, what a batch takes.

    python benchmarks/volumes_speed.py [network] [memory] [reading]

Without arguments all three. Memory is measured in processes of their own, on volumes of random blocks that
lie in a file of about a gigabyte.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from equipool import EquivariantPooler
from equipool.data.volumes import Volumes
from equipool.nn.networks import ResNet3d, VolumeDecoder, VolumeEncoder, voxel_decoder
from equipool.simulate.brains import Anatomy

PEOPLE = 2000
PARTS = ("network", "memory", "reading")


@cache
def anatomy(resolution: float) -> Anatomy:
    return Anatomy(resolution)


def best(run: Callable[[], object], times: int = 4) -> float:
    """Return the seconds of the quickest run, after one that is not counted."""
    spent = []
    for _ in range(times + 1):
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return min(spent[1:])


# -- the network -------------------------------------------------------------------------------------------


class PlainEncoder(VolumeEncoder):
    """The same network as anyone would write it: contiguous boxes, contiguous weights."""

    def __init__(self, mask: torch.Tensor, body: nn.Module) -> None:
        super().__init__(mask, body.to(memory_format=torch.contiguous_format))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (people, n) for (people, voxels)."""
        box = rows.new_zeros(len(rows), int(np.prod(self.shape)))
        box[:, self.voxels] = rows
        return self.body(box.view(len(rows), 1, *self.shape))


def step_seconds(kind: type[VolumeEncoder], mask: torch.Tensor, batch: int) -> float:
    """Return the seconds for one volume, there and back."""
    torch.manual_seed(0)
    voxels = int(mask.sum())
    encoder = kind(mask, ResNet3d(16))
    network = nn.Sequential(encoder, VolumeDecoder(mask, voxel_decoder(16, voxels)))
    rows = torch.randn(batch, voxels)

    def step() -> None:
        network.zero_grad()
        ((network(rows) - rows) ** 2).mean().backward()

    return best(step) / batch


def network_table(resolutions: list[float], batches: list[int]) -> None:
    print("| mm | batch | threads | plain, s/volume | ours, s/volume | plain / ours |\n" + "|---" * 6 + "|")
    for resolution in resolutions:
        mask = torch.from_numpy(anatomy(resolution).mask.copy())
        for batch in batches:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                plain, ours = (step_seconds(kind, mask, batch) for kind in (PlainEncoder, VolumeEncoder))
                row = f"{resolution:g} | {batch} | {threads} | {plain:.4f} | {ours:.4f} | {plain / ours:.2f}"
                print(f"| {row} |", flush=True)


# -- memory ------------------------------------------------------------------------------------------------


def fill(path: Path) -> None:
    """Write people cheaply: a smooth head, the site's shift, and noise that comes again in other orders."""
    from scipy.ndimage import gaussian_filter

    rng = np.random.default_rng(0)
    mask = anatomy(2.0).mask
    head = 1000 * gaussian_filter(mask.astype(np.float32), 4)[mask]
    noise = rng.normal(0, 80, (50, len(head))).astype(np.float32)
    with path.open("wb") as stream:
        for k in range(PEOPLE):
            row = head * (1 + 0.1 * (k % 3)) + np.roll(noise[k % 50], 97 * k)
            stream.write(row.astype(np.int16).tobytes())


def on_disk(path: Path, people: int) -> Volumes:
    mask, affine = anatomy(2.0).mask, anatomy(2.0).affine
    store = np.memmap(path, dtype=np.int16, mode="r", shape=(PEOPLE, int(mask.sum())))
    scales = np.tile(np.array([[1, 0]], dtype=np.float32), (PEOPLE, 1))
    return Volumes(mask, affine, (), store, np.arange(people), scales)


def anonymous() -> float:
    """Return the memory of this process in MiB that is no file."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return float("nan")


@contextmanager
def sampled() -> Iterator[list[float]]:
    """Give a list whose first number is the most anonymous memory so far."""
    most, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def train(path: Path, encoder: str, people: int) -> None:
    """Fit, and print what it took as JSON."""
    torch.set_num_threads(1)
    volumes = on_disk(path, people)
    rng = np.random.default_rng(0)
    site, sex = np.arange(people) % 3, rng.integers(0, 2, people)
    before, start = anonymous(), time.perf_counter()
    pooler = EquivariantPooler(encoder=encoder, steps=12, batch_size=8)
    with sampled() as most:
        pooler.fit(volumes, sex, site=site, covariates=rng.uniform(50, 90, people))
    unit = 1 if sys.platform == "darwin" else 1024
    found = {
        "encoder": encoder,
        "people": people,
        "model": sum(p.numel() * 4 for p in pooler.network_.parameters()) / 2**20,
        "before": before,
        "peak": most[0],
        "beyond": most[0] - before,
        "after": anonymous(),
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20,
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps({name: round(v) if isinstance(v, float) else v for name, v in found.items()}))


def memory_table(path: Path, people: list[int]) -> None:
    print(f"\nTraining on volumes of {int(anatomy(2.0).mask.sum())} voxels in a file; MiB")
    print("| encoder | people | weights | before | peak, no files | peak − before | after | peak RSS | s |")
    print("|" + "---|" * 9)
    for encoder in ("components", "auto"):
        for count in people:
            command = [sys.executable, __file__, "--train", str(path), encoder, str(count)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print("| " + " | ".join(map(str, json.loads(done.stdout).values())) + " |", flush=True)


# -- reading -----------------------------------------------------------------------------------------------


def reading_table(path: Path) -> None:
    torch.set_num_threads(1)
    volumes, rng = on_disk(path, PEOPLE), np.random.default_rng(0)
    spent = [best(lambda: volumes.read(rng.integers(0, PEOPLE, 16)), times=1) for _ in range(30)]
    step = 16 * step_seconds(VolumeEncoder, torch.from_numpy(anatomy(2.0).mask.copy()), 16)
    print(
        f"\nA random batch of 16 at 2 mm is read in {1000 * np.median(spent):.0f} ms (at most "
        f"{1000 * max(spent):.0f}); a step on it takes {step:.2f} s."
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--mm", type=float, nargs="+", default=[4.0, 2.0])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--people", type=int, nargs="+", default=[500, PEOPLE])
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        path, encoder, people = arguments.train
        train(Path(path), encoder, int(people))
        return
    parts = arguments.parts or PARTS
    if "network" in parts:
        network_table(arguments.mm, arguments.batches)
    if "memory" in parts or "reading" in parts:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "volumes"
            fill(path)
            if "reading" in parts:
                reading_table(path)
            if "memory" in parts:
                memory_table(path, arguments.people)


if __name__ == "__main__":
    main()
