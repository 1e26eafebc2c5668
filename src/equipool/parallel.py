"""Tasks in parallel, over the cores of this machine or over a Dask cluster, by the same call of joblib.

Several machines need caches and results on a shared disk.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from equipool.exceptions import EquipoolError, MissingExtraError

Result = TypeVar("Result")

SECONDS = 15  # to wait for a scheduler


def fan_out(
    task: Callable[..., Result], items: Iterable[tuple[Any, ...]], *, jobs: int | None = None
) -> Iterator[Result]:
    """Run a task, a function of a module, once for each tuple of arguments; yield results as they come.

    Each run has one thread. ``jobs`` runs at a time; default: that of the joblib context
    (``joblib.parallel_config``, or :func:`cluster`), else one for each core.
    """
    from joblib import Parallel, delayed
    from joblib.parallel import get_active_backend

    from_context = get_active_backend()[1]
    parallel = Parallel(n_jobs=jobs or from_context or os.cpu_count(), return_as="generator_unordered")
    try:
        yield from parallel(delayed(_on_one_thread)(task, *item) for item in items)
    except Exception as error:
        if not isinstance(error, BrokenExecutor) and type(error).__name__ != "KilledWorker":
            raise
        raise EquipoolError(
            "A worker was ended from outside, most likely because memory ran out; run the same command with "
            "fewer --jobs, or give each worker more memory. What is done is kept."
        ) from error


@contextmanager
def cluster(scheduler: str | None) -> Iterator[None]:
    """Run the tasks of this context on the Dask cluster at an address; ``None``: on this machine's cores."""
    if scheduler is None:
        yield
        return
    import joblib

    try:
        from distributed import Client
    except ImportError:
        raise MissingExtraError("A cluster needs Dask: pip install 'equipool[cluster]'.") from None
    try:
        client: Any = Client(scheduler, timeout=SECONDS)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise EquipoolError(
            f"There is no Dask scheduler at {scheduler} ({type(error).__name__}); start one with "
            "`dask scheduler`, and give the address that it prints."
        ) from error
    with client:
        if not client.ncores():
            what = f"The scheduler at {scheduler} has no workers"
            raise EquipoolError(f"{what}; start some with `dask worker {scheduler}`.")
        with joblib.parallel_config("dask"):
            yield


def _on_one_thread(task: Callable[..., Result], *arguments: Any) -> Result:
    """Run a task with one thread: parallel workers that each use all cores slow each other down."""
    from threadpoolctl import threadpool_limits

    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 1
    with threadpool_limits(1):
        if torch:
            torch.set_num_threads(1)
        try:
            return task(*arguments)
        finally:
            if torch:
                torch.set_num_threads(threads)
