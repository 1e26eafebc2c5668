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
from equipool.nn.checkpoints import Checkpoints
from equipool.progress import Progress

Step = Callable[[Tensor, int], dict[str, Tensor]]
Trained = tuple[nn.Module, torch.optim.Optimizer]


@dataclass
class History:
    """The losses of each epoch, the epoch whose state was kept, and how far the present epoch is."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    best_epoch: int = 0
    best: float = math.inf  # the validation loss of the best epoch
    batch: int = 0  # of the present epoch, as the sums of its losses
    sums: dict[str, float] = field(default_factory=dict)
    done: bool = False


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
    state = _State([(modules, optimiser), *beside], generator or torch.Generator(), checkpoints, stage)
    state.resume()
    distributed.synchronise(modules)
    history, begun = state.history, len(state.history.epochs)
    line = Progress(f"{stage}: epoch", epochs - begun)
    while not history.done:
        epoch = len(history.epochs)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        modules.train()
        state.drawn_from = state.generator.get_state()
        for rows in islice(batches(), history.batch, None):  # those before the checkpoint are skipped
            with distributed.sharded(len(rows)):
                terms = step(rows, epoch)
            optimiser.zero_grad(set_to_none=True)
            torch.stack(list(terms.values())).sum().backward()
            distributed.average_gradients(modules)
            optimiser.step()
            state.count(terms)
        modules.eval()
        distributed.synchronise(modules)
        losses = {name: total / history.batch for name, total in history.sums.items()}
        history.epochs.append(losses)
        history.batch, history.sums = 0, {}
        if validate is not None:
            losses["validation"] = distributed.share(validate())
            if losses["validation"] < history.best:
                history.best, history.best_epoch = losses["validation"], epoch
                state.best = copy.deepcopy(modules.state_dict())
        if verbose and distributed.leads():
            line(epoch + 1 - begun)
        waited = 0 if validate is None else epoch - history.best_epoch
        history.done = epoch + 1 >= epochs or waited >= patience
        if history.done:
            if state.best:
                modules.load_state_dict(state.best)
            state.write()
    modules.eval()
    return history


@dataclass
class _State:
    """All that decides how training continues: parameters, optimisers, random numbers, epoch and batch."""

    trained: Sequence[Trained]
    generator: torch.Generator
    checkpoints: Checkpoints | None
    stage: str
    history: History = field(default_factory=History)
    best: dict[str, Tensor] = field(default_factory=dict)  # the first module in the best epoch
    drawn_from: Tensor = field(default_factory=lambda: torch.empty(0))  # the generator as the epoch began

    def count(self, terms: dict[str, Tensor]) -> None:
        """Note a step, and write the state where that is due."""
        self.history.batch += 1
        for name, term in terms.items():
            self.history.sums[name] = self.history.sums.get(name, 0.0) + term.item()
        if self.checkpoints is not None and self.checkpoints.due():
            self.write()

    def write(self) -> None:
        """Write the checkpoint, if there is to be one."""
        if self.checkpoints is None:
            return
        numbers = {"random": torch.get_rng_state(), "batches": self.drawn_from}
        for k, (module, optimiser) in enumerate(self.trained):
            numbers |= {f"module.{k}.{name}": value for name, value in module.state_dict().items()}
            for place, moments in optimiser.state_dict()["state"].items():
                numbers |= {f"optimiser.{k}.{place}.{name}": value for name, value in moments.items()}
        numbers |= {f"best.{name}": value for name, value in self.best.items()}
        self.checkpoints.write(self.stage, numbers, vars(self.history))

    def resume(self) -> None:
        """Load the checkpoint, if there is one."""
        content = None if self.checkpoints is None else self.checkpoints.read(self.stage)
        if content is None:
            return
        numbers, facts = content
        for k, (module, optimiser) in enumerate(self.trained):
            module.load_state_dict(_under(f"module.{k}.", numbers))
            moments: dict[int, dict[str, Tensor]] = {}
            for name, value in _under(f"optimiser.{k}.", numbers).items():
                place, _, kind = name.partition(".")
                moments.setdefault(int(place), {})[kind] = value
            optimiser.load_state_dict({**optimiser.state_dict(), "state": moments})
        self.best = _under("best.", numbers)
        self.history = History(**facts)
        self.generator.set_state(numbers["batches"])
        torch.set_rng_state(numbers["random"])


def _under(prefix: str, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers whose names begin so, named by the rest."""
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
