"""Several processes train one model, on one machine or many; a process on its own never notices.

Every process draws the same batches. It encodes and decodes its own part of each; :func:`gather` then gives
all processes the latents of the whole batch, and every loss is computed from these, in every process alike.
So equation (4), the MMD and the means are those of the whole batch, every site of the batch is seen however
it is shared out, and noise that is added to the latents is the same as in one process. Gradients are averaged
afterwards, in :func:`average_gradients`.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as processes

from equipool.exceptions import EquipoolError, EquipoolWarning

__all__ = [
    "Pairs",
    "agree",
    "average",
    "average_gradients",
    "batch_rows",
    "device",
    "gather",
    "leader_first",
    "leads",
    "own",
    "remind",
    "sharded",
    "share",
    "start",
    "summed",
    "synchronise",
    "total",
    "turns",
    "world",
]

Number = TypeVar("Number", np.float32, np.float64)

LEAST = 2  # rows of a process: batch normalisation needs two
SHARED_PAIRS = 1024  # rows from which on the pairs of a batch are shared out too

_parts: tuple[int, ...] = ()  # rows of each process in the batch that is being computed; none outside of one


def start() -> tuple[int, int]:
    """Join the processes that ``torchrun`` or ``srun`` started; return this one's number and how many.

    With a GPU for each process they speak NCCL and train there, otherwise gloo. Call it once, before
    anything is fitted. Started by neither, a script stays on its own.

    Examples
    --------
    >>> start()
    (0, 1)
    """
    if processes.is_initialized():
        return world()
    if not _environment():
        return 0, 1
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


def remind() -> None:
    """Warn where several processes are about to do the same work, because nobody called :func:`start`."""
    count = os.environ.get("WORLD_SIZE", "1")
    if not processes.is_initialized() and "RANK" in os.environ and count != "1":
        warnings.warn(
            f"{count} processes were started, and each fits on its own; call equipool.distributed.start() "
            "first to let them share the work.",
            EquipoolWarning,
            stacklevel=3,
        )


def _environment() -> bool:
    """Whether several processes were started; what SLURM calls its own way is named as torch expects it."""
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        job = int(os.environ.get("SLURM_JOB_ID", "0"))
        told = {
            "RANK": os.environ["SLURM_PROCID"],
            "WORLD_SIZE": os.environ["SLURM_NTASKS"],
            "LOCAL_RANK": os.environ.get("SLURM_LOCALID", "0"),
            "MASTER_ADDR": os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost"),
            "MASTER_PORT": str(20000 + job % 20000),  # two jobs on one node must not meet
        }
        os.environ.update({name: os.environ.get(name, value) for name, value in told.items()})
    return "RANK" in os.environ


def world() -> tuple[int, int]:
    """Return this process's number and how many there are."""
    if not processes.is_initialized():
        return 0, 1
    return processes.get_rank(), processes.get_world_size()


def leads() -> bool:
    """Whether this is the process that writes files and speaks."""
    return world()[0] == 0


def device() -> torch.device:
    """Return where this process trains: its GPU under NCCL, else the CPU."""
    on_gpu = processes.is_initialized() and processes.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextmanager
def sharded(rows: int) -> Iterator[None]:
    """Share a batch of so many rows out, for the time of a block; one that is too small goes to everybody."""
    global _parts
    size = world()[1]
    cut = size > 1 and rows >= LEAST * size
    _parts = tuple(rows // size + (k < rows % size) for k in range(size)) if cut else ()
    try:
        yield
    finally:
        _parts = ()


def own() -> slice:
    """Return the rows of the batch that are this process's: all of them outside of :func:`sharded`."""
    if not _parts:
        return slice(None)
    rank = world()[0]
    return slice(sum(_parts[:rank]), sum(_parts[: rank + 1]))


def gather(x: Tensor) -> Tensor:
    """Return the whole batch, of which x holds this process's rows; the gradient goes back to these.

    What follows must be the same in every process, as a loss of the whole batch is.
    """
    if not _parts:
        return x
    whole: Tensor = _Gather.apply(x, _parts)  # type: ignore[no-untyped-call]
    return whole


def average(mean: Tensor, rows: int) -> Tensor:
    """Return the mean over the whole batch of what is a mean over this process's rows."""
    return gather(mean.expand(rows)).mean() if _parts else mean


def batch_rows(rows: int) -> int:
    """Return how many rows the whole batch has, of which this process has so many."""
    return sum(_parts) or rows


@dataclass(frozen=True)
class Pairs:
    """How the pairs of rows that all processes have are shared out: each takes some rows, with all others.

    Between :meth:`known` and :meth:`summed` processes compute different things; before and after, the same.
    In one process, and for few rows, where messages would take longer, all pairs are everybody's.
    """

    rows: int

    @property
    def shared(self) -> bool:
        """Whether each process takes a part."""
        return bool(_parts) and self.rows >= SHARED_PAIRS

    @property
    def own(self) -> slice:
        """The rows that this process takes."""
        rank, size = world()
        return slice(self.rows * rank // size, self.rows * (rank + 1) // size) if self.shared else slice(None)

    def known(self, x: Tensor) -> Tensor:
        """Return the rows, to which all processes' gradients go."""
        whole: Tensor = _Shared.apply(x) if self.shared else x  # type: ignore[no-untyped-call]
        return whole

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of what each process computed."""
        whole: Tensor = _AddUp.apply(x) if self.shared else x  # type: ignore[no-untyped-call]
        return whole

    def median(self, x: Tensor) -> Tensor:
        """Return the median of all processes' numbers, from 0 upwards; of two the lower, of none 1.

        It lies between the least and the greatest of the processes' own medians, and few numbers do. Among
        these by halving, since numbers from 0 upwards are ordered as their bits are.
        """
        if not self.shared:
            return x.median() if x.numel() else x.new_ones(())
        bits = x.contiguous().view({4: torch.int32, 8: torch.int64}[x.element_size()]).flatten()
        largest = torch.iinfo(bits.dtype).max
        middle = int(bits.median()) if len(bits) else None
        ends = torch.tensor([-largest if middle is None else -middle, -1 if middle is None else middle])
        count, ends = torch.tensor(len(bits)).to(x.device), ends.to(x.device)
        processes.all_reduce(count)
        processes.all_reduce(ends, processes.ReduceOp.MAX)
        if not count:
            return x.new_ones(())
        below, above = -int(ends[0]) - 1, int(ends[1])
        under = (bits <= below).sum()
        bits = bits[(bits > below) & (bits <= above)]
        while above - below > 1:
            middle = (below + above) // 2
            found = under + (bits <= middle).sum()
            processes.all_reduce(found)
            below, above = (below, middle) if 2 * found >= count else (middle, above)
        return torch.tensor(above, dtype=bits.dtype, device=x.device).view(x.dtype)


def _sum_of_all(x: Tensor) -> Tensor:
    summed = x.clone()
    processes.all_reduce(summed)
    return summed


class _Shared(torch.autograd.Function):
    """Nothing forwards; backwards, what the processes' parts say is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _sum_of_all(gradients[0])


class _AddUp(torch.autograd.Function):
    """The sum; backwards nothing, since all processes have the same loss of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum_of_all(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def total(x: Tensor) -> Tensor:
    """Return the sum over processes of what each has of its own rows; gradients are summed likewise."""
    if not _parts:
        return x
    summed: Tensor = _Total.apply(x)  # type: ignore[no-untyped-call]
    return summed


class _Total(torch.autograd.Function):
    """Everybody's rows went into the sum, so each process gets what all have to say about it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum_of_all(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _sum_of_all(gradients[0])


class _Gather(torch.autograd.Function):
    """Collect rows; backwards, each process takes its own.

    Every process computes the same loss L of the whole batch, so the gradient that comes back is the same
    everywhere and nothing need be sent. It is multiplied by the number of processes, since
    :func:`average_gradients` divides by it: networks before the gathering have seen a part of the rows and
    their gradients must be added up, those after it have seen all and must not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: tuple[int, ...]) -> Tensor:
        ctx.own, ctx.size = own(), len(parts)
        padded = x.new_zeros(max(parts), *x.shape[1:])
        padded[: len(x)] = x
        received = [torch.empty_like(padded) for _ in parts]
        processes.all_gather(received, padded)
        return torch.cat([rows[:count] for rows, count in zip(received, parts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.own] * ctx.size, None


def average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its mean over the processes, in one message."""
    size = world()[1]
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if size == 1 or not found:
        return
    for dtype in dict.fromkeys(gradient.dtype for gradient in found):
        some = [gradient for gradient in found if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in some])
        processes.all_reduce(flat)
        for gradient, mean in zip(some, flat.div_(size).split([g.numel() for g in some]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def synchronise(module: nn.Module) -> None:
    """Give every process the leader's numbers, and the mean of what batch normalisation has counted."""
    size = world()[1]
    if size == 1:
        return
    counted = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in counted:
        for buffer in (layer.running_mean, layer.running_var):
            if buffer is not None:
                processes.all_reduce(buffer)
                buffer.div_(size)
    for tensor in (*module.parameters(), *module.buffers()):
        processes.broadcast(tensor.data, 0)


def turns(work: range) -> range:
    """Return this process's part of work that is shared out in turns: everything, if it is alone."""
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


def agree(value: float) -> float:
    """Return the leader's number: a decision must fall the same way everywhere."""
    if world()[1] == 1:
        return value
    number = torch.tensor([value], dtype=torch.float64, device=device())
    processes.broadcast(number, 0)
    return float(number.item())


def share(content: bytes | None) -> bytes | None:
    """Return the leader's bytes; what the others give is not looked at."""
    if world()[1] == 1:
        return content
    length = int(agree(-1 if content is None else len(content)))
    if length < 0:
        return None
    message = torch.zeros(length, dtype=torch.uint8, device=device())
    if leads() and content:
        message = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device())
    processes.broadcast(message, 0)
    return message.cpu().numpy().tobytes()


@contextmanager
def leader_first() -> Iterator[None]:
    """Let the leader run a block before the others: it fills a cache that they then find."""
    if world()[1] > 1 and not leads():
        processes.barrier()
    try:
        yield
    finally:
        if world()[1] > 1 and leads():
            processes.barrier()
