"""The one training loop: batches in which every site appears, early stopping, the best state kept.

It runs in one process or in several (:mod:`equipool.distributed`), and goes on from a checkpoint.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.nn.checkpoints import Checkpoint
from equipool.progress import duration, replace_line

__all__ = ["History", "site_batches", "train"]

Step = Callable[[Tensor, int], dict[str, Tensor]]
Trained = tuple[nn.Module, torch.optim.Optimizer]


@dataclass
class History:
    """What happened: one dict of losses for each epoch, and the epoch whose state was kept."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int = 0


def site_batches(
    site: Tensor, batch_size: int, generator: torch.Generator, *, at_least: int = 2
) -> Iterator[Tensor]:
    """Yield row positions such that every row comes once and every site appears in every batch.

    Each site's rows are spread evenly over the epoch. Where that still leaves a batch with fewer than
    ``at_least`` rows of a site, rows of that site are drawn again: small sites are seen more often.
    """
    rows = len(site)
    place = torch.rand(rows, generator=generator)
    order = torch.argsort(site.double() + 0.999 * place)
    counts = torch.bincount(site)
    first = torch.cumsum(counts, 0) - counts
    within = torch.arange(rows) - first[site[order]]
    # The k-th of a site's m rows belongs at (k + jitter) / m of the epoch.
    position = (within + torch.rand(rows, generator=generator)) / counts[site[order]]
    spread = order[torch.argsort(position)]
    for batch in spread.split(batch_size):
        have = torch.bincount(site[batch], minlength=len(counts))
        short = torch.nonzero((counts > 0) & (have < at_least)).flatten().tolist()
        extra = [
            order[first[s] + torch.randint(int(counts[s]), (at_least - int(have[s]),), generator=generator)]
            for s in short
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
    progress: str | None = None,
    checkpoint: Checkpoint | None = None,
    generator: torch.Generator | None = None,
    beside: Sequence[Trained] = (),
) -> History:
    """Minimise the sum of the terms that ``step`` returns, with Adam (weights decay apart from it).

    Parameters
    ----------
    modules
        What is trained.
    step
        Takes row positions and the epoch, returns the named, already scaled terms of the loss.
    batches
        Gives the batches of one epoch.
    validate
        Returns a number to be small on held-out rows; training stops after ``patience`` epochs without a new
        best one and goes back to it. Without it, the last state is kept.
    epochs, learning_rate, weight_decay, patience
        As they say.
    progress
        What to call it on the terminal; ``None``: nothing is said.
    checkpoint
        Where to keep the state, to go on from.
    generator, beside
        What the state also consists of: the generator that batches are drawn from, and other modules with
        optimisers that ``step`` trains.
    """
    optimiser = torch.optim.AdamW(modules.parameters(), lr=learning_rate, weight_decay=weight_decay)
    state = _State([(modules, optimiser), *beside], generator, checkpoint)
    finished = state.resume()
    distributed.synchronise(modules)
    start, begun = time.perf_counter(), state.epoch
    while not finished:
        for group in optimiser.param_groups:
            # A rate that falls to nothing along half a cosine: the last state is then also a settled one.
            group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * state.epoch / epochs))
        losses = _one_epoch(state, step, batches)
        if progress and distributed.leads():
            done = state.epoch + 1
            left = (time.perf_counter() - start) / (done - begun) * (epochs - done)
            text = f"{progress}: epoch {done} of at most {epochs}, about {duration(left)} left"
            replace_line(text, last=done == epochs)
        finished = state.close_epoch(losses, validate, patience) or state.epoch >= epochs
    state.go_back()
    modules.eval()
    return state.history


def _one_epoch(state: _State, step: Step, batches: Callable[[], Iterator[Tensor]]) -> dict[str, float]:
    """Go through the batches that are left and return the mean of each term; leave the modules to be read."""
    modules, optimiser = state.trained[0]
    modules.train()
    for rows in state.batches_left(batches):
        with distributed.sharded(len(rows)):
            terms = step(rows, state.epoch)
        optimiser.zero_grad(set_to_none=True)
        torch.stack(list(terms.values())).sum().backward()
        distributed.average_gradients(modules)
        optimiser.step()
        state.count(terms)
    modules.eval()
    distributed.synchronise(modules)
    return {name: total.item() / state.batch for name, total in state.sums.items()}


class _State:
    """All that decides how training goes on: parameters, optimisers, random numbers, and how far it is."""

    def __init__(
        self, trained: Sequence[Trained], generator: torch.Generator | None, checkpoint: Checkpoint | None
    ) -> None:
        self.trained, self.generator, self.checkpoint = trained, generator, checkpoint
        self.history, self.best = History(), float("inf")
        self.kept: dict[str, Tensor] | None = None
        self.epoch = self.batch = 0
        self.done = False
        self.sums: dict[str, Tensor] = {}
        self.drawn_from = torch.empty(0, dtype=torch.uint8)  # the generator as the epoch began

    def batches_left(self, batches: Callable[[], Iterator[Tensor]]) -> Iterator[Tensor]:
        """Give the epoch's batches; those before the checkpoint are drawn again, and passed over."""
        if self.generator is not None:
            if self.batch:
                self.generator.set_state(self.drawn_from)
            self.drawn_from = self.generator.get_state()
        return islice(batches(), self.batch, None)

    def count(self, terms: dict[str, Tensor]) -> None:
        """Note a step, and write the state where that is due."""
        self.batch += 1
        for name, term in terms.items():
            self.sums[name] = self.sums.get(name, 0.0) + term.detach()
        if self.checkpoint is not None and self.checkpoint.due():
            self._write()

    def close_epoch(
        self, losses: dict[str, float], validate: Callable[[], float] | None, patience: int
    ) -> bool:
        """Note an epoch; return whether there was no new best one for so long that training ends."""
        self.history.epochs.append(losses)
        epoch = self.epoch
        self.epoch, self.batch, self.sums = epoch + 1, 0, {}
        if validate is None:
            return False
        losses["validation"] = distributed.agree(validate())
        if losses["validation"] < self.best:
            self.best, self.history.best_epoch = losses["validation"], epoch
            self.kept = copy.deepcopy(self.trained[0][0].state_dict())
        return epoch - self.history.best_epoch >= patience

    def go_back(self) -> None:
        """Return to the best state, and write that this is the end."""
        if self.kept is not None:
            self.trained[0][0].load_state_dict(self.kept)
        if self.checkpoint is not None and not self.done:
            self.done = True
            self._write()

    # -- checkpoints ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        assert self.checkpoint is not None
        numbers = {"random": torch.get_rng_state(), "batches": self.drawn_from}
        for k, (module, optimiser) in enumerate(self.trained):
            numbers |= {f"module.{k}.{name}": value for name, value in module.state_dict().items()}
            for place, moments in optimiser.state_dict()["state"].items():
                numbers |= {f"optimiser.{k}.{place}.{name}": value for name, value in moments.items()}
        numbers |= {f"kept.{name}": value for name, value in (self.kept or {}).items()}
        numbers |= {f"sum.{name}": value for name, value in self.sums.items()}
        facts: dict[str, Any] = {
            "done": self.done,
            "epoch": self.epoch,
            "batch": self.batch,
            "best": self.best,
        }
        facts |= {"best_epoch": self.history.best_epoch, "history": self.history.epochs}
        self.checkpoint.write(numbers, facts)

    def resume(self) -> bool:
        """Go to where the checkpoint is, if there is one; return whether training had come to its end."""
        found = None if self.checkpoint is None else self.checkpoint.read()
        if found is None:
            return False
        numbers, facts = found
        for k, (module, optimiser) in enumerate(self.trained):
            module.load_state_dict(_under(f"module.{k}.", numbers))
            moments: dict[int, dict[str, Tensor]] = {}
            for name, value in _under(f"optimiser.{k}.", numbers).items():
                place, _, kind = name.partition(".")
                moments.setdefault(int(place), {})[kind] = value
            known: dict[str, Any] = optimiser.state_dict()
            optimiser.load_state_dict({**known, "state": moments})
        self.kept = _under("kept.", numbers) or None
        self.sums = {name: value.to(distributed.device()) for name, value in _under("sum.", numbers).items()}
        self.epoch, self.batch, self.best = facts["epoch"], facts["batch"], facts["best"]
        self.history = History(facts["history"], facts["best_epoch"])
        self.drawn_from = numbers["batches"]
        torch.set_rng_state(numbers["random"])
        self.done = bool(facts["done"])
        return self.done


def _under(prefix: str, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers whose names begin so, named by the rest."""
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
