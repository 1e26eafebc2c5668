"""The training loop: batches in which every site appears, early stopping, the best state kept.

It runs in one process or in several (:mod:`equipool.distributed`), and resumes from a checkpoint.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.nn.checkpoints import Checkpoints, History, Trained
from equipool.progress import Progress

Step = Callable[[Tensor, int], dict[str, Tensor]]


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
            if checkpoints is not None and checkpoints.due():
                checkpoints.write(stage, trained, history, drawn_from)
        modules.eval()
        distributed.synchronise(modules)
        losses = history.close_epoch()
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
