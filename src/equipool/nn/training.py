"""The training loop: batches in which every site appears, early stopping, the best state kept.

It runs in one process or in several (:mod:`equipool.distributed`), and resumes from a checkpoint: a killed
run ends with the bits of one that was not killed. A checkpoint's folder holds ``checkpoint.json``, with the
settings and hashes of the data, and for each stage a safetensors file with its numbers, its progress and a
checksum. Files are replaced in one go, so each is always whole.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.exceptions import InputError
from equipool.files import write_whole
from equipool.progress import Progress

Step = Callable[[Tensor, int], dict[str, Tensor]]
Trained = tuple[nn.Module, torch.optim.Optimizer]

MANIFEST, ENDING = "checkpoint.json", ".checkpoint.safetensors"
SECONDS = 30.0  # between two checkpoints
ANEW = "start anew: give another folder, remove this one, or say --fresh on the command line"


def site_batches(site: Tensor, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield row positions such that every row comes once and every site appears in every batch.

    Each site's rows are spread evenly over the epoch. Where that still gives a batch fewer than two rows of a
    site, rows of that site are drawn again: small sites are trained on more often.
    """
    rows = len(site)
    order = torch.argsort(site.double() + 0.999 * torch.rand(rows, generator=generator))
    counts = torch.bincount(site)
    first = torch.cumsum(counts, 0) - counts
    within = torch.arange(rows) - first[site[order]]
    # The k-th of a site's m rows belongs at (k + jitter) / m of the epoch.
    position = (within + torch.rand(rows, generator=generator)) / counts[site[order]]
    for batch in order[torch.argsort(position)].split(batch_size):
        lacking = (2 - torch.bincount(site[batch], minlength=len(counts))).clamp_min(0) * (counts > 0)
        extra = [
            order[first[s] + torch.randint(int(counts[s]), (int(lacking[s]),), generator=generator)]
            for s in lacking.nonzero().flatten().tolist()
        ]
        yield torch.cat([batch, *extra])


def train(
    modules: nn.Module,
    step: Step,
    batches: Callable[[], Iterator[Tensor]],
    *,
    epochs: int,
    validate: Callable[[], float] | None = None,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.0,
    patience: int = 8,
    stage: str = "training",
    verbose: bool = False,
    checkpoints: Checkpoints | None = None,
    generator: torch.Generator | None = None,
    beside: Sequence[Trained] = (),
) -> History:
    """Minimise the sum of the terms that ``step`` returns, with Adam and decoupled weight decay.

    ``step`` takes row positions and the epoch, and returns the named, already scaled terms of the loss;
    ``batches`` gives the batches of one epoch. The learning rate falls to 0 along half a cosine. ``validate``
    returns a loss on held-out rows: training stops after ``patience`` epochs without a new minimum and goes
    back to it. Without it, the last state is kept. The state is kept in ``checkpoints``, under the name of
    the ``stage``, to resume from. To it belong the ``generator`` that batches are drawn from, and modules
    with optimisers that ``step`` trains ``beside``. With ``verbose`` the terminal shows how far training is.
    """
    optimiser = torch.optim.AdamW(modules.parameters(), lr=learning_rate, weight_decay=weight_decay)
    trained, generator = [(modules, optimiser), *beside], generator or torch.Generator()
    history = History() if checkpoints is None else checkpoints.resume(stage, trained, generator)
    distributed.synchronise(modules)
    begun = len(history.epochs)
    line = Progress(f"{stage}: epoch", epochs - begun)
    while not history.done:
        epoch = len(history.epochs)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        modules.train()
        drawn_from = generator.get_state()
        for rows in islice(batches(), history.batch, None):  # those before the checkpoint are skipped
            with distributed.sharded(len(rows)):
                terms = step(rows, epoch)
            optimiser.zero_grad(set_to_none=True)
            torch.stack(list(terms.values())).sum().backward()
            distributed.average_gradients(modules)
            optimiser.step()
            history.count(terms)
            if checkpoints is not None and time.monotonic() - checkpoints.written >= SECONDS:
                checkpoints.write(stage, trained, history, drawn_from)
        modules.eval()
        distributed.synchronise(modules)
        losses = {name: total / history.batch for name, total in history.sums.items()}
        history.epochs.append(losses)
        history.batch, history.sums = 0, {}
        if validate is not None:
            losses["validation"] = distributed.share(validate())
            if losses["validation"] < history.best:
                history.best, history.best_epoch = losses["validation"], epoch
                history.best_state = copy.deepcopy(modules.state_dict())
        if verbose and distributed.leads():
            line(epoch + 1 - begun)
        waited = 0 if validate is None else epoch - history.best_epoch
        history.done = epoch + 1 >= epochs or waited >= patience
    if history.best_state:
        modules.load_state_dict(history.best_state)
    if checkpoints is not None:
        checkpoints.write(stage, trained, history, generator.get_state())
    modules.eval()
    return history


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
            what = f"{folder / MANIFEST} is damaged or no checkpoint"
            raise InputError(f"{what}; remove it to start anew.") from error
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
            what = f"The checkpoint {path} is damaged ({error})"
            raise InputError(f"{what}. Remove the folder to start anew.") from error
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
