"""The training loop: batches in which every site appears, early stopping, the best state kept.

It runs in one process or in several (:mod:`equipool.distributed`), and resumes from a checkpoint.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.nn.checkpoints import Checkpoint
from equipool.progress import Progress

Step = Callable[[Tensor, int], dict[str, Tensor]]
Trained = tuple[nn.Module, torch.optim.Optimizer]

FACTS = ("done", "epoch", "batch", "best")  # of the state, beside numbers and losses


@dataclass
class History:
    """One dict of losses for each epoch, and the epoch whose state was kept."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int = 0


def site_batches(
    site: Tensor, batch_size: int, generator: torch.Generator, *, at_least: int = 2
) -> Iterator[Tensor]:
    """Yield row positions such that every row comes once and every site appears in every batch.

    Each site's rows are spread evenly over the epoch. Where that still gives a batch fewer than ``at_least``
    rows of a site, rows of that site are drawn again: small sites are trained on more often.
    """
    rows = len(site)
    order = torch.argsort(site.double() + 0.999 * torch.rand(rows, generator=generator))
    counts = torch.bincount(site)
    first = torch.cumsum(counts, 0) - counts
    within = torch.arange(rows) - first[site[order]]
    # The k-th of a site's m rows belongs at (k + jitter) / m of the epoch.
    position = (within + torch.rand(rows, generator=generator)) / counts[site[order]]
    for batch in order[torch.argsort(position)].split(batch_size):
        lacking = (at_least - torch.bincount(site[batch], minlength=len(counts))).clamp_min(0) * (counts > 0)
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
    progress: str | None = None,
    checkpoint: Checkpoint | None = None,
    generator: torch.Generator | None = None,
    beside: Sequence[Trained] = (),
) -> History:
    """Minimise the sum of the terms that ``step`` returns, with Adam and decoupled weight decay.

    Parameters
    ----------
    modules
        What is trained.
    step
        Takes row positions and the epoch, returns the named, already scaled terms of the loss.
    batches
        Gives the batches of one epoch.
    validate
        Returns a loss on held-out rows; training stops after ``patience`` epochs without a new minimum and
        goes back to it. Without it, the last state is kept.
    epochs, learning_rate, weight_decay, patience
        Settings of AdamW and of early stopping; the learning rate falls to 0 along half a cosine.
    progress
        The name of the training on the terminal; ``None``: no progress is shown.
    checkpoint, generator, beside
        Where the state is kept, to resume from, and what else it consists of: the generator that batches are
        drawn from, and other modules with optimisers that ``step`` trains.
    """
    optimiser = torch.optim.AdamW(modules.parameters(), lr=learning_rate, weight_decay=weight_decay)
    state = _State([(modules, optimiser), *beside], generator, checkpoint)
    finished = state.resume()
    distributed.synchronise(modules)
    begun, line = state.epoch, Progress(f"{progress}: epoch", epochs - state.epoch)
    while not finished:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * state.epoch / epochs))
        losses = _one_epoch(state, step, batches)
        finished = state.close_epoch(losses, validate, patience) or state.epoch >= epochs
        if progress and distributed.leads():
            line(state.epoch - begun)
    state.go_back()
    modules.eval()
    return state.history


def _one_epoch(state: _State, step: Step, batches: Callable[[], Iterator[Tensor]]) -> dict[str, float]:
    """Train on the epoch's remaining batches and return the mean of each term; leave modules in eval mode."""
    modules, optimiser = state.trained[0]
    modules.train()
    for rows in state.remaining(batches):
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
    """All that decides how training continues: parameters, optimisers, random numbers, epoch and batch."""

    def __init__(
        self, trained: Sequence[Trained], generator: torch.Generator | None, checkpoint: Checkpoint | None
    ) -> None:
        self.trained, self.generator, self.checkpoint = trained, generator, checkpoint
        self.history, self.best = History(), float("inf")
        self.best_state: dict[str, Tensor] = {}
        self.epoch = self.batch = 0
        self.done = False
        self.sums: dict[str, Tensor] = {}
        self.drawn_from = torch.empty(0, dtype=torch.uint8)  # the generator as the epoch began

    def remaining(self, batches: Callable[[], Iterator[Tensor]]) -> Iterator[Tensor]:
        """Give the epoch's batches; those before the checkpoint are drawn again and skipped."""
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
        """Note an epoch; return whether training ends because ``patience`` epochs brought no new minimum."""
        self.history.epochs.append(losses)
        epoch = self.epoch
        self.epoch, self.batch, self.sums = epoch + 1, 0, {}
        if validate is None:
            return False
        losses["validation"] = distributed.share(validate())
        if losses["validation"] < self.best:
            self.best, self.history.best_epoch = losses["validation"], epoch
            self.best_state = copy.deepcopy(self.trained[0][0].state_dict())
        return epoch - self.history.best_epoch >= patience

    def go_back(self) -> None:
        """Return to the best state, and write that this is the end."""
        if self.best_state:
            self.trained[0][0].load_state_dict(self.best_state)
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
        numbers |= {f"best.{name}": value for name, value in self.best_state.items()}
        numbers |= {f"sum.{name}": value for name, value in self.sums.items()}
        facts = {name: getattr(self, name) for name in FACTS} | vars(self.history)
        self.checkpoint.write(numbers, facts)

    def resume(self) -> bool:
        """Load the checkpoint, if there is one; return whether training had come to its end."""
        content = None if self.checkpoint is None else self.checkpoint.read()
        if content is None:
            return False
        numbers, facts = content
        for k, (module, optimiser) in enumerate(self.trained):
            module.load_state_dict(_under(f"module.{k}.", numbers))
            moments: dict[int, dict[str, Tensor]] = {}
            for name, value in _under(f"optimiser.{k}.", numbers).items():
                place, _, kind = name.partition(".")
                moments.setdefault(int(place), {})[kind] = value
            optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
        self.best_state = _under("best.", numbers)
        self.sums = {name: value.to(distributed.device()) for name, value in _under("sum.", numbers).items()}
        for name in FACTS:
            setattr(self, name, facts[name])
        self.history = History(facts["epochs"], facts["best_epoch"])
        self.drawn_from = numbers["batches"]
        torch.set_rng_state(numbers["random"])
        return self.done


def _under(prefix: str, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers whose names begin so, named by the rest."""
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
