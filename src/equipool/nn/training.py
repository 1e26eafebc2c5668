"""The one training loop: batches in which every site appears, early stopping, the best state kept."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipool.progress import duration

__all__ = ["History", "site_batches", "train"]


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
    present = torch.nonzero(counts).flatten()
    for batch in spread.split(batch_size):
        have = torch.bincount(site[batch], minlength=len(counts))
        short = [s for s in present.tolist() if have[s] < at_least]
        extra = [
            order[first[s] + torch.randint(int(counts[s]), (at_least - int(have[s]),), generator=generator)]
            for s in short
        ]
        yield torch.cat([batch, *extra])


def train(
    modules: nn.Module,
    step: Callable[[Tensor, int], dict[str, Tensor]],
    batches: Callable[[], Iterator[Tensor]],
    *,
    epochs: int,
    validate: Callable[[], float] | None = None,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.0,
    patience: int = 8,
    progress: str | None = None,
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
    """
    optimiser = torch.optim.AdamW(modules.parameters(), lr=learning_rate, weight_decay=weight_decay)
    history, best, kept, start = History(), float("inf"), None, time.perf_counter()
    for epoch in range(epochs):
        for group in optimiser.param_groups:
            # A rate that falls to nothing along half a cosine: the last state is then also a settled one.
            group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        losses = _one_epoch(modules, optimiser, step, batches(), epoch)
        history.epochs.append(losses)
        if progress:
            left = (time.perf_counter() - start) / (epoch + 1) * (epochs - epoch - 1)
            say_progress(
                f"{progress}: epoch {epoch + 1} of at most {epochs}, about {duration(left)} left",
                epoch + 1 == epochs,
            )
        if validate is None:
            continue
        losses["validation"] = validate()
        if losses["validation"] < best:
            best, history.best_epoch = losses["validation"], epoch
            kept = copy.deepcopy(modules.state_dict())
        if epoch - history.best_epoch >= patience:
            break
    if kept is not None:
        modules.load_state_dict(kept)
    modules.eval()
    return history


def say_progress(text: str, last: bool) -> None:
    """Write one line that replaces itself on a terminal; nothing in a pipe or a log."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)


def _one_epoch(
    modules: nn.Module,
    optimiser: torch.optim.Optimizer,
    step: Callable[[Tensor, int], dict[str, Tensor]],
    batches: Iterator[Tensor],
    epoch: int,
) -> dict[str, float]:
    """Go once through the batches and return the mean of each term; leave the modules ready to be read."""
    modules.train()
    sums: dict[str, Tensor] = {}
    count = 0
    for rows in batches:
        terms = step(rows, epoch)
        optimiser.zero_grad(set_to_none=True)
        torch.stack(list(terms.values())).sum().backward()
        optimiser.step()
        count += 1
        for name, term in terms.items():
            sums[name] = sums.get(name, 0.0) + term.detach()
    modules.eval()
    return {name: total.item() / count for name, total in sums.items()}
