"""Two processes train what one trains: the same losses, gradients and parameters, and one writes."""

import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import together
import torch

import equipool as ep
from equipool import distributed
from equipool.estimators import NaivePooler
from equipool.exceptions import EquipoolWarning

SCRIPT = Path(__file__).with_name("together.py")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launched(out, size, names=LAUNCHER[:3], **more):
    """Start so many processes as torchrun would, or with SLURM's names, and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(out)],
            env={**plain, "OMP_NUM_THREADS": "1", **place, **dict(zip(names, numbers, strict=True)), **more},
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in range(size)
        for numbers in [(str(k), str(size), str(k))]
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("together")
    slurm = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    processes = launched(out, 2, slurm)
    with torch.random.fork_rng():
        together.main(out)  # alone, in this process
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return {path.stem: np.load(path) for path in out.glob("*.npz")}, out


def test_losses_and_gradients_are_those_of_the_whole_batch(runs):
    results, _ = runs
    for name in (name for name in results["0-of-1"].files if name.startswith("loss")):
        for process in ("0-of-2", "1-of-2"):
            np.testing.assert_allclose(results[process][name], results["0-of-1"][name], rtol=1e-4, atol=1e-5)


def test_training_ends_with_the_same_parameters(runs):
    results, _ = runs
    for name in (name for name in results["0-of-1"].files if name.startswith(("parameters", "history"))):
        np.testing.assert_allclose(results["0-of-2"][name], results["0-of-1"][name], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(results["1-of-2"][name], results["0-of-2"][name])


def test_closed_forms_of_volumes_are_shared_out(runs):
    results, _ = runs
    names = [name for name in results["0-of-1"].files if name.startswith("closed form")]
    assert len(names) > 10
    for name in names:
        given, other = results["0-of-1"][name], results["0-of-2"][name]
        np.testing.assert_allclose(other, given, rtol=1e-6, atol=1e-6 * np.abs(given).max(initial=0.0))
        np.testing.assert_array_equal(results["1-of-2"][name], results["0-of-2"][name])
    read = [int(results[f"{k}-of-2"][f"scans read by {k}"]) for k in range(2)]
    assert sum(read) == int(results["0-of-1"]["scans read by 0"])
    assert max(read) < 0.75 * sum(read)


def test_one_of_them_writes_the_model(runs):
    _, out = runs
    pool = ep.simulate_table(overlap=0.5, people=70, features=8).pool
    one, two = (ep.load(out / f"model-{size}") for size in (1, 2))
    np.testing.assert_allclose(two.transform(pool.X), one.transform(pool.X), atol=1e-4)
    assert sorted(path.name for path in (out / "model-2").iterdir()) == ["model.json", "model.safetensors"]


def test_a_process_on_its_own_has_the_whole_batch(monkeypatch):
    for name in (*LAUNCHER, "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.start() == (0, 1)
    with distributed.sharded(10):
        assert distributed.local_rows() == slice(None)
    assert distributed.share(b"bytes") == b"bytes"


def test_processes_without_start_get_a_warning(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    pool = ep.simulate_table(people=20, features=4).pool
    estimator = NaivePooler(steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(EquipoolWarning, match=r"2 processes were started.*call equipool\.distributed"):
            estimator.fit(pool.X, pool.y, site=pool.site_labels)
