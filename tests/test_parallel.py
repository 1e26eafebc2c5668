"""The same call runs on this machine's cores, in a joblib context and on a Dask cluster."""

import importlib.util
import operator
import os

import joblib
import pytest
import torch

from equipool.exceptions import EquipoolError
from equipool.parallel import cluster, fan_out

needs_dask = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="the extra 'cluster' (Dask) is not installed"
)
ITEMS = [(k, 2) for k in range(7)]


def end_worker():
    os._exit(1)


def test_results_come_from_processes_and_in_any_order():
    assert sorted(fan_out(operator.mul, ITEMS, jobs=2)) == [2 * k for k in range(7)]
    assert set(fan_out(os.getpid, [()] * 3, jobs=1)) == {os.getpid()}


def test_the_joblib_context_is_followed():
    with joblib.parallel_config("threading", n_jobs=2):
        assert set(fan_out(os.getpid, [()] * 3)) == {os.getpid()}


def test_a_task_has_one_thread_and_the_caller_keeps_its_own():
    before = torch.get_num_threads()
    assert list(fan_out(torch.get_num_threads, [()], jobs=1)) == [1]
    assert torch.get_num_threads() == before


def test_a_worker_that_dies_is_one_sentence():
    with pytest.raises(EquipoolError, match=r"A worker was ended.*fewer --jobs"):
        list(fan_out(end_worker, [()] * 2, jobs=2))


def test_an_error_of_a_task_is_the_tasks():
    with pytest.raises(ZeroDivisionError):
        list(fan_out(operator.truediv, [(1, 0)], jobs=1))


@needs_dask
@pytest.mark.filterwarnings("ignore")  # Dask remarks on a slow machine and on its own sockets
def test_a_cluster_runs_the_same_call():
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None, protocol="tcp"
    ) as here:
        with cluster(here.scheduler_address):
            assert sorted(fan_out(operator.mul, ITEMS)) == [2 * k for k in range(7)]
        with cluster(None):
            assert list(fan_out(operator.add, [(1, 2)], jobs=1)) == [3]


@needs_dask
def test_a_scheduler_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr("equipool.parallel.SECONDS", 0.2)
    with (
        pytest.raises(EquipoolError, match=r"no Dask scheduler at tcp://127\.0\.0\.1:9.*dask scheduler"),
        cluster("tcp://127.0.0.1:9"),
    ):
        pass
