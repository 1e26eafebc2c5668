"""Several processes train one model, on one machine or many; in a single process, nothing here has an effect.

Every process draws the same batches. It encodes and decodes its share of each; :func:`gather` then gives all
processes the latents of the whole batch, and every process computes every loss from these. So equation (4),
the MMD and the means are those of the whole batch, and noise that is added to the latents is the same as in
one process. :func:`average_gradients` averages the gradients afterwards.
"""

import atexit
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as processes

from equipool.exceptions import EquipoolError, EquipoolWarning

Number = TypeVar("Number", np.float32, np.float64)
Value = TypeVar("Value")

LEAST = 2  # rows of a process: batch normalisation needs two
SHARED_PAIRS = 1024  # rows from which on the pairs of a batch are shared out; for fewer, messages take longer

_parts: tuple[int, ...] = ()  # rows of each process in the batch that is being computed; none outside of one


def start() -> tuple[int, int]:
    """Join the processes that ``torchrun`` or ``srun`` started; return this one's number and how many.

    Processes with a GPU each train there and exchange messages by NCCL, others by gloo. Call it once, before
    anything is fitted. A script that neither has started is a single process.
    """
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        job = int(os.environ.get("SLURM_JOB_ID", "0"))
        names = {
            "RANK": os.environ["SLURM_PROCID"],
            "WORLD_SIZE": os.environ["SLURM_NTASKS"],
            "LOCAL_RANK": os.environ.get("SLURM_LOCALID", "0"),
            "MASTER_ADDR": os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost"),
            "MASTER_PORT": str(20000 + job % 20000),  # two jobs on one node must not meet
        }
        os.environ.update({name: os.environ.get(name, value) for name, value in names.items()})
    if processes.is_initialized() or "RANK" not in os.environ:
        return world()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.is_available() and local < torch.cuda.device_count()
    if on_gpus:
        torch.cuda.set_device(local)
    try:
        processes.init_process_group("nccl" if on_gpus else "gloo")
    except (RuntimeError, ValueError) as error:
        raise EquipoolError(
            f"The processes did not find each other at MASTER_ADDR={os.environ.get('MASTER_ADDR')!r}, "
            f"MASTER_PORT={os.environ.get('MASTER_PORT')!r}: {error}"
        ) from error
    atexit.register(processes.destroy_process_group)
    return world()


def warn_unless_started() -> None:
    """Warn where several processes are about to do the same work, because :func:`start` was not called."""
    count = os.environ.get("WORLD_SIZE", "1")
    if not processes.is_initialized() and "RANK" in os.environ and count != "1":
        warnings.warn(
            f"{count} processes were started, and each fits on its own; call equipool.distributed.start() "
            "first to let them share the work.",
            EquipoolWarning,
            stacklevel=3,
        )


def world() -> tuple[int, int]:
    """Return this process's number and how many there are."""
    return (processes.get_rank(), processes.get_world_size()) if processes.is_initialized() else (0, 1)


def leads() -> bool:
    """Say whether this is the process that writes files and shows progress."""
    return world()[0] == 0


def device() -> torch.device:
    """Return where this process trains: its GPU under NCCL, else the CPU."""
    on_gpu = processes.is_initialized() and processes.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextmanager
def sharded(rows: int) -> Iterator[None]:
    """Share out a batch of so many rows within a block; every process computes a batch that is too small."""
    global _parts
    size = world()[1]
    cut = size > 1 and rows >= LEAST * size
    _parts = tuple(rows // size + (k < rows % size) for k in range(size)) if cut else ()
    try:
        yield
    finally:
        _parts = ()


def local_rows() -> slice:
    """Return this process's rows of the batch: all of them outside of :func:`sharded`."""
    rank = world()[0]
    return slice(sum(_parts[:rank]), sum(_parts[: rank + 1])) if _parts else slice(None)


def gather(x: Tensor) -> Tensor:
    """Return the whole batch, of which x holds this process's rows."""
    if not _parts:
        return x
    rows = local_rows()
    return total(nn.functional.pad(x, [0, 0] * (x.ndim - 1) + [rows.start, sum(_parts) - rows.stop]))


def average(mean: Tensor, rows: int) -> Tensor:
    """Return the mean over the whole batch, given the mean over this process's rows."""
    return gather(mean.expand(rows)).mean() if _parts else mean


def batch_rows(rows: int) -> int:
    """Return how many rows the whole batch has, given how many this process has."""
    return sum(_parts) or rows


def total(x: Tensor) -> Tensor:
    """Return the sum over processes of what each has of its rows."""
    return _Sum.apply(x) if _parts else x  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """The sum of the processes' tensors; backwards, of their gradients."""

    # Every process takes the gradient of the loss, which all of them compute. So the gradients behind a sum
    # are as many times too large as there are processes, by which average_gradients divides.

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        summed = x.clone(memory_format=torch.contiguous_format)
        processes.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _Sum.forward(ctx, gradients[0])


def paired_rows(rows: int) -> slice:
    """Return the rows of a large batch that this process compares with all others; of a small batch, all."""
    rank, size = world()
    shared = _parts and rows >= SHARED_PAIRS
    return slice(rows * rank // size, rows * (rank + 1) // size) if shared else slice(None)


def average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its mean over the processes, in one message, in the widest precision."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    size = world()[1]
    if size > 1 and gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        processes.all_reduce(flat)
        parts = flat.div_(size).split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, parts, strict=True):
            gradient.copy_(mean.view_as(gradient))


def synchronise(module: nn.Module) -> None:
    """Give every process the leader's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()) if world()[1] > 1 else ():
        processes.broadcast(tensor.data, 0)


def turns(work: range) -> range:
    """Return this process's part of work that is shared out in turns."""
    rank, size = world()
    return work[rank::size]


def summed(array: NDArray[Number]) -> NDArray[Number]:
    """Return the sum of the processes' arrays: the same in all of them."""
    if world()[1] == 1:
        return array
    tensor = torch.from_numpy(array).to(device())
    processes.all_reduce(tensor)
    result: NDArray[Number] = tensor.cpu().numpy()
    return result


def share(value: Value) -> Value:
    """Return the leader's value in all processes: a decision must be the same everywhere."""
    values = [value]
    if world()[1] > 1:
        processes.broadcast_object_list(values, 0)
    return values[0]


@contextmanager
def leader_first() -> Iterator[None]:
    """Let the leader run a block before the others, which then use the cache that it has filled."""
    if not leads():
        processes.barrier()
    try:
        yield
    finally:
        if world()[1] > 1 and leads():
            processes.barrier()
