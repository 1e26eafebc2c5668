"""The one training loop: batches in which every site appears, early stopping, the best state kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

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
    step: Callable[[Tensor], dict[str, Tensor]],
    batches: Callable[[], Iterator[Tensor]],
    *,
    validate: Callable[[], float] | None = None,
    epochs: int = 30,
    learning_rate: float = 1e-3,
    patience: int = 5,
    on_epoch: Callable[[int, dict[str, float]], None] | None = None,
) -> History:
    """Minimise the sum of the terms that ``step`` returns, with Adam.

    Parameters
    ----------
    modules
        What is trained.
    step
        Takes row positions, returns the named, already scaled terms of the loss.
    batches
        Gives the batches of one epoch.
    validate
        Returns a number to be small on held-out rows; training stops after ``patience`` epochs without a new
        best one and goes back to it. Without it, the last state is kept.
    epochs, learning_rate, patience
        As they say.
    on_epoch
        Called with the epoch and its mean losses, for progress.
    """
    optimiser = torch.optim.Adam(modules.parameters(), lr=learning_rate)
    history, best, kept = History(), float("inf"), None
    for epoch in range(epochs):
        modules.train()
        sums: dict[str, float] = {}
        count = 0
        for rows in batches():
            terms = step(rows)
            loss = torch.stack(list(terms.values())).sum()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            count += 1
            for name, term in terms.items():
                sums[name] = sums.get(name, 0.0) + term.item()
        losses = {name: total / count for name, total in sums.items()}
        modules.eval()
        if validate is not None:
            losses["validation"] = validate()
            if losses["validation"] < best:
                best, history.best_epoch = losses["validation"], epoch
                kept = copy.deepcopy(modules.state_dict())
        history.epochs.append(losses)
        if on_epoch is not None:
            on_epoch(epoch, losses)
        if validate is not None and epoch - history.best_epoch >= patience:
            break
    if kept is not None:
        modules.load_state_dict(kept)
    modules.eval()
    return history
