"""The adversary: a classifier that predicts the site from codes, which are trained to prevent it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.nn.networks import adversary_network
from equipool.nn.training import Trained

__all__ = ["Adversary"]


class Adversary:
    """A site classifier with its optimiser, for minimax training (CAI, Xie et al.).

    Sites are weighted so that each counts the same, whatever its size.
    """

    def __init__(self, n_code: int, site: Tensor, n_sites: int, *, learning_rate: float = 2e-3) -> None:
        self.network = adversary_network(n_code, n_sites, normalise=False).to(distributed.device())
        self.optimiser = torch.optim.Adam(self.network.parameters(), lr=learning_rate)
        counts = torch.bincount(site, minlength=n_sites).clamp_min(1)
        self.weights = (counts.sum() / (n_sites * counts)).to(distributed.device())

    @property
    def trained(self) -> Trained:
        """The network and its optimiser, for checkpoints."""
        return self.network, self.optimiser

    def play(self, code: Tensor, site: Tensor) -> Tensor:
        """Learn from this batch, then return minus the cross-entropy, which the encoder minimises."""
        self.optimiser.zero_grad(set_to_none=True)
        self._cross_entropy(code.detach(), site).backward()
        self.optimiser.step()
        return -self._cross_entropy(code, site)

    def _cross_entropy(self, code: Tensor, site: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(code), site, weight=self.weights)
