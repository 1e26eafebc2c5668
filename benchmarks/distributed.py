"""Two processes against one: the same batches, how far losses and parameters agree, and how fast it goes.

    python benchmarks/distributed.py agree     # every loss, 100 steps, one process and two
    python benchmarks/distributed.py speed     # seconds of a fit at one and two processes

Each run is a process of its own, or two that ``torchrun`` starts; one thread each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEPS = 100
CASES = {
    "ours, classes": ("EquivariantPooler", {}, "class"),
    "ours, number": ("EquivariantPooler", {"match": "transported"}, "number"),
    "ours, no release channel": ("EquivariantPooler", {"power": None}, "class"),
    "paper": ("EquivariantPooler", "paper", "class"),
    "naive": ("NaivePooler", {}, "class"),
    "mmd": ("MMDPooler", {}, "class"),
    "cai": ("CAIPooler", {}, "class"),
    "ss": ("SubsamplingPooler", {}, "class"),
    "rm": ("RandMatchPooler", {}, "class"),
    "volumes, components": ("EquivariantPooler", {"encoder": "components", "batch_size": 16}, "volumes"),
    "volumes, resnet": ("EquivariantPooler", {"encoder": "resnet", "batch_size": 16}, "volumes"),
}
# What is timed: rows of a table are three times the people, volumes are 64.
SPEED = {
    "table, batches of 512": ({"batch_size": 512}, "class", {"people": 7000, "steps": 40}),
    "table, batches of 4096": ({"batch_size": 4096}, "class", {"people": 7000, "steps": 6}),
    "resnet, 8 mm, batches of 32": ({"batch_size": 32}, "volumes", {"resolution": 8.0, "steps": 20}),
    "resnet, 4 mm, batches of 32": ({"batch_size": 32}, "volumes", {"resolution": 4.0, "steps": 10}),
}
CASES_TIMED = {name: ("EquivariantPooler", settings, data) for name, (settings, data, _) in SPEED.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("agree", "speed", "worker"))
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--people", type=int, default=200)
    parser.add_argument("--resolution", type=float, default=8.0, help="mm, of the volumes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each stage")
    parser.add_argument("--nudged", action="store_true", help="features changed in float32's last bit")
    parser.add_argument("--double", action="store_true", help="train in float64")
    arguments = parser.parse_args()
    arguments.cases = arguments.cases or list(SPEED if arguments.what == "speed" else CASES)
    if arguments.what == "worker":
        worker(arguments)
    elif arguments.what == "agree":
        agree(arguments)
    else:
        speed(arguments)


def launch(count: int, out: Path, arguments: argparse.Namespace, cases: list[str]) -> dict[str, np.ndarray]:
    """Run the worker in so many processes; return what the first one wrote."""
    own = [str(Path(__file__)), "worker", "--out", str(out), "--cases", *cases]
    own += ["--people", str(arguments.people), "--steps", str(arguments.steps)]
    own += ["--resolution", str(arguments.resolution)]
    own += ["--nudged"] if arguments.nudged else []
    own += ["--double"] if arguments.double else []
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *run, *own], check=True, env=environment, stderr=subprocess.DEVNULL)
    with np.load(out) as found:
        return dict(found)


def worker(arguments: argparse.Namespace) -> None:
    import torch

    from equipool import distributed
    from equipool import estimators as models

    torch.set_num_threads(1)
    distributed.start()
    if arguments.double:
        train_in_double()
    found: dict[str, np.ndarray] = {}
    for case in arguments.cases:
        kind, settings, data = (CASES | CASES_TIMED)[case]
        X, y, labels = pool_of(data, arguments.people, arguments.resolution)
        if arguments.nudged:
            X = nudged(X)
        make = getattr(models, kind)
        shared = {"random_state": 0, "steps": arguments.steps}
        shared |= {"batch_size": 64} if data != "volumes" else {}
        if settings == "paper":
            estimator = make.from_preset("paper", **shared)
        else:
            estimator = make(**{**shared, **settings})
        start = time.perf_counter(), time.process_time()
        estimator.fit(X, y, **labels)
        found[f"{case}|seconds"] = np.array([time.perf_counter() - start[0], time.process_time() - start[1]])
        epochs = estimator.history_
        epochs = [e for part in epochs.values() for e in part] if isinstance(epochs, dict) else epochs
        for name in sorted({name for epoch in epochs for name in epoch}):
            found[f"{case}|loss|{name}"] = np.array([epoch[name] for epoch in epochs if name in epoch])
        weights = [v.flatten() for v in estimator.network_.state_dict().values() if v.is_floating_point()]
        found[f"{case}|parameters"] = torch.cat([w.double() for w in weights]).numpy()
        found[f"{case}|sum"] = np.array([float(w.sum()) for w in weights])
    same_in_all(found, distributed)
    if distributed.leads():
        np.savez(arguments.out, **found)


def nudged(X):
    """Return features changed in the last bit of float32; of volumes, by way of what is read."""
    import torch

    from equipool.estimators.pooling_estimator import ScaledVolumes

    if not isinstance(X, list):
        return X * (1 + 2.0**-24 * np.random.default_rng(0).choice([-1, 1], X.shape))
    read = ScaledVolumes.tensor
    ScaledVolumes.tensor = lambda rows: torch.nextafter(read(rows), torch.tensor(9.0))
    return X


def train_in_double() -> None:
    """Let everything train in float64, where rounding is a billion times smaller."""
    import torch

    from equipool.estimators.pooling_estimator import PoolingEstimator, ScaledVolumes, TrainingData
    from equipool.nn.networks import SingleModule, VolumeDecoder, VolumeEncoder

    torch.set_default_dtype(torch.float64)
    prepare, read = PoolingEstimator._prepare, ScaledVolumes.tensor

    def prepared(self, *given):
        data = prepare(self, *given)
        x = data.x.double() if isinstance(data.x, torch.Tensor) else data.x
        y = data.y.double() if data.y is not None and data.y.is_floating_point() else data.y
        return TrainingData(x, y, data.site, data.c.double())

    def encoded(self, rows):
        box = rows.new_zeros(len(rows), int(np.prod(self.shape)))
        box[:, self.voxels] = rows
        return self.body(box.view(len(rows), 1, *self.shape))

    PoolingEstimator._prepare = prepared
    SingleModule._apply = torch.nn.Module._apply
    ScaledVolumes.tensor = lambda rows: read(rows).double()
    VolumeEncoder.forward = encoded
    VolumeDecoder.forward = lambda self, latent: self.body(latent)


def same_in_all(found: dict[str, np.ndarray], distributed) -> None:
    """Fail where a process has other parameters than the first."""
    for name, value in found.items():
        if name.endswith("|parameters"):
            first = np.frombuffer(distributed.share(value.tobytes()))
            assert (first == value).all(), name


def pool_of(data: str, people: int, resolution: float):
    import equipool as ep

    if data == "volumes":
        from equipool.simulate.brains import custom_cohort, simulate_brains

        folder = Path(os.environ["EQUIPOOL_CACHE"]) / f"brains-{resolution}"
        if not folder.is_dir():  # in the first run, which is one process
            brains = simulate_brains(custom_cohort([20, 20], [12, 12]), resolution=resolution)
            list(brains.write(folder))
        table = ep.read_bids(folder)
        return list(table["path"]), table["dx"], {"site": table["site"], "covariates": table[["age"]]}
    pool = ep.simulate_table(sites=("GE", "Philips", "Siemens"), people=people, features=40, overlap=0.5).pool
    y = pool.y if data == "class" else pool.X[:, 0] + pool.C[:, 0]
    return pool.X, y, {"site": pool.site_labels, "covariates": pool.C}


def agree(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as work:
        os.environ["EQUIPOOL_CACHE"] = work

        def run(count: int, **how: bool) -> dict[str, np.ndarray]:
            changed = argparse.Namespace(**{**vars(arguments), **how})
            return launch(count, Path(work) / "found.npz", changed, arguments.cases)

        one, two = run(1), run(2)
        # How far one process is from itself when float32 rounds a little otherwise.
        again = run(1, nudged=True)
        exact, exact_two = run(1, double=True), run(2, double=True)
    print(
        "| estimator | terms | loss, relative | parameter | parameter, one process, X nudged | in float64 |"
    )
    print("|---|---|---|---|---|---|")
    for case in arguments.cases:
        terms = [name for name in one if name.startswith(f"{case}|loss|")]
        pairs = [(one[name], two[name]) for name in terms]  # early stopping may fall on another epoch
        off = max(np.abs(a[: len(b)] / b[: len(a)] - 1).max() for a, b in pairs)
        name = f"{case}|parameters"
        apart, own, in_double = (
            np.abs(a[name] - b[name]).max() for a, b in ((one, two), (one, again), (exact, exact_two))
        )
        names = ", ".join(name.split("|")[2] for name in terms)
        print(f"| {case} | {names} | {off:.1e} | {apart:.1e} | {own:.1e} | {in_double:.1e} |", flush=True)


def speed(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as work:
        os.environ["EQUIPOOL_CACHE"] = work
        print("| estimator | one process: s, CPU s | two: s, CPU s of each | wall | CPU |")
        print("|---|---|---|---|---|")
        for case in arguments.cases:
            sized = argparse.Namespace(**{**vars(arguments), **SPEED[case][2]})
            launch(1, Path(work) / "warm.npz", argparse.Namespace(**{**vars(sized), "steps": 1}), [case])
            one, two = (launch(n, Path(work) / f"{n}.npz", sized, [case]) for n in (1, 2))
            a, b = one[f"{case}|seconds"], two[f"{case}|seconds"]
            print(f"| {case} | {a[0]:.1f}, {a[1]:.1f} | {b[0]:.1f}, {b[1]:.1f} ", end="")
            print(f"| {a[0] / b[0]:.2f} × | {a[1] / b[1]:.2f} × |", flush=True)


if __name__ == "__main__":
    main()
