"""Checkpoints of training: a killed run resumes, and ends with the bits of one that was not killed.

A folder holds ``checkpoint.json``, with the settings and hashes of the data, and for each stage a safetensors
file with its numbers, its progress and a checksum. Files are replaced in one go, so each is always whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.exceptions import InputError
from equipool.files import write_whole

MANIFEST, ENDING = "checkpoint.json", ".checkpoint.safetensors"
SECONDS = 30.0  # between two checkpoints
ANEW = "start anew: give another folder, remove this one, or say --fresh on the command line"


Trained = tuple[nn.Module, torch.optim.Optimizer]


@dataclass
class History:
    """The losses of each epoch, the epoch whose state was kept, and how far the present epoch is."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int = 0
    best: float = math.inf  # the validation loss of the best epoch
    best_state: dict[str, Tensor] = field(default_factory=dict)
    batch: int = 0  # of the present epoch, as the sums of its losses
    sums: dict[str, float] = field(default_factory=dict)
    done: bool = False

    def count(self, terms: dict[str, Tensor]) -> None:
        """Note a step."""
        self.batch += 1
        for name, term in terms.items():
            self.sums[name] = self.sums.get(name, 0.0) + term.item()

    def close_epoch(self) -> dict[str, float]:
        """Note an epoch, and return the mean of each term."""
        self.epochs.append({name: total / self.batch for name, total in self.sums.items()})
        self.batch, self.sums = 0, {}
        return self.epochs[-1]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one fit at a time use a folder, by a lock of the operating system, which ends with the process."""
    with ExitStack() as lock:
        free = True
        # No locks there, or nothing can be written, which a checkpoint reports.
        with suppress(ImportError, OSError):
            if distributed.leads():
                import fcntl

                folder.mkdir(parents=True, exist_ok=True)
                handle = os.open(folder, os.O_RDONLY)
                lock.callback(os.close, handle)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    free = False
        if not distributed.share(free):
            raise InputError(
                f"Another run is training with the checkpoint {folder}, on the same data with the same "
                "settings; wait for it, or give another folder."
            )
        yield


class Checkpoints:
    """The checkpoints of one fit in a folder, one for each stage; a folder of another fit is refused.

    ``manifest`` says what is trained: settings and hashes of the data, by name. Other files there stay.
    """

    def __init__(self, folder: Path, manifest: dict[str, dict[str, Any]]) -> None:
        self.folder, self.written = folder, time.monotonic()
        self.record = json.dumps(manifest, indent=1, ensure_ascii=False)
        for partial in folder.glob(".*checkpoint.*") if distributed.leads() else ():
            with suppress(OSError):  # of a run killed while it wrote
                partial.unlink()
        content = _read(folder / MANIFEST)
        self.begun = content is not None
        if content is None:
            return
        try:
            earlier = {**json.loads(content)}
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{folder / MANIFEST} is damaged or no checkpoint; remove it to start anew."
            ) from error
        for kind, values in json.loads(self.record).items():
            for name, value in values.items():
                before = earlier.get(kind, {}).get(name)
                if before != value:
                    what = "is not the same" if kind == "data" else f"was {before!r} and is {value!r}"
                    raise InputError(
                        f"{folder} holds a checkpoint with other {kind}: {name} {what}. Go on with the same, "
                        f"or {ANEW}."
                    )

    def resume(self, stage: str, trained: Sequence[Trained], generator: torch.Generator) -> History:
        """Load a stage, if it was begun before: parameters, optimisers, and the states of random numbers."""
        from safetensors import SafetensorError
        from safetensors.torch import load, save

        path = self._path(stage)
        content = _read(path) if self.begun else None
        if content is None:
            return History()
        try:
            numbers = load(content)
            facts = json.loads(bytes(numbers.pop("facts").tolist()))
            if facts.pop("sha256") != hashlib.sha256(save(numbers)).hexdigest():
                raise ValueError("another checksum")
        except (SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise InputError(
                f"The checkpoint {path} is damaged ({error}). Remove the folder to start anew."
            ) from error
        for k, (module, optimiser) in enumerate(trained):
            module.load_state_dict(_under(f"module.{k}.", numbers))
            moments: dict[int, dict[str, Tensor]] = {}
            for name, value in _under(f"optimiser.{k}.", numbers).items():
                place, _, kind = name.partition(".")
                moments.setdefault(int(place), {})[kind] = value
            optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
        generator.set_state(numbers["batches"])
        torch.set_rng_state(numbers["random"])
        return History(**facts, best_state=_under("best.", numbers))

    def write(self, stage: str, trained: Sequence[Trained], history: History, drawn_from: Tensor) -> None:
        """Write a stage, in one process of several; batches are ``drawn_from`` this state of a generator."""
        from safetensors.torch import save

        if distributed.leads():
            if not self.begun:
                write_whole(self.folder / MANIFEST, self.record)
                self.begun = True
            numbers = {"random": torch.get_rng_state(), "batches": drawn_from}
            for k, (module, optimiser) in enumerate(trained):
                numbers |= {f"module.{k}.{name}": value for name, value in module.state_dict().items()}
                for place, moments in optimiser.state_dict()["state"].items():
                    numbers |= {f"optimiser.{k}.{place}.{name}": value for name, value in moments.items()}
            facts = dict(vars(history))
            numbers |= {f"best.{name}": value for name, value in facts.pop("best_state").items()}
            numbers = {name: tensor.cpu().contiguous().clone() for name, tensor in numbers.items()}
            facts["sha256"] = hashlib.sha256(save(numbers)).hexdigest()
            numbers["facts"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
            write_whole(self._path(stage), save(numbers))
        self.written = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() - self.written >= SECONDS

    def _path(self, stage: str) -> Path:
        return self.folder / f"{stage.replace(' ', '-')}{ENDING}"


def _read(path: Path) -> bytes | None:
    """Return a file's content as the leading process reads it; ``None`` where there is no file."""
    try:
        return distributed.share(path.read_bytes() if distributed.leads() else None)
    except FileNotFoundError:
        return distributed.share(None)
    except OSError as error:
        raise InputError(f"The checkpoint {path} cannot be read: {error.strerror}.") from error


def _under(prefix: str, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers whose names begin so, named by the rest."""
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
