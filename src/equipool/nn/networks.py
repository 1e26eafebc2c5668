"""Networks. For tables: fully connected, one hidden layer of 64, as in the paper's appendix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.exceptions import InputError
from equipool.nn.resnet import ResNet3d, VolumeDecoder, VolumeEncoder, voxel_decoder

EncoderKind = Literal["auto", "mlp", "linear", "components", "resnet"] | nn.Module

N_COMPONENTS = 100


class Components(nn.Module):
    """Principal components of the training rows, not whitened: what varies most is learned first."""

    basis: Tensor
    scale: Tensor

    def __init__(self, n_features: int, count: int = N_COMPONENTS) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(n_features, count))
        self.register_buffer("scale", torch.ones(()))

    @torch.no_grad()
    def start(self, rows: Tensor) -> None:
        """Estimate the components from the inner products of these rows."""
        rows = rows.to(self.basis.dtype)
        values, vectors = torch.linalg.eigh(rows @ rows.mT)
        count = min(self.basis.shape[1], len(rows) - 1)
        directions = rows.mT @ vectors[:, -count:].flip(1)
        self.basis.zero_()
        self.basis[:, :count] = directions / directions.norm(dim=0).clamp_min(1e-12)
        self.scale.copy_((values[-count:].mean() / len(rows)).sqrt().clamp_min(1e-12))

    def forward(self, rows: Tensor) -> Tensor:
        """Return (rows, components)."""
        return rows @ self.basis / self.scale


class ComponentsDecoder(nn.Module):
    """From a latent to components and from these to features."""

    def __init__(self, components: Components, n_latent: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_latent, components.basis.shape[1])
        self.components = components

    def forward(self, latent: Tensor) -> Tensor:
        """Return (rows, features)."""
        return self.linear(latent) * self.components.scale @ self.components.basis.mT


def mlp(n_in: int, n_out: int, *, hidden: int = 64) -> nn.Sequential:
    """Return the paper's network for tables: one hidden layer."""
    return nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, n_out))


def adversary_network(n_in: int, n_out: int, *, hidden: int = 64, normalise: bool = True) -> nn.Sequential:
    """Return a three-layer classifier of the site: the paper's adversary, with batch normalisation."""
    layers: list[nn.Module] = []
    for width in (n_in, hidden):
        layers += [nn.Linear(width, hidden), *([nn.BatchNorm1d(hidden)] if normalise else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, n_out))


class Adversary:
    """A site classifier with its optimiser, for minimax training (CAI, Xie et al.).

    Sites are weighted so that each counts the same, whatever its size.
    """

    def __init__(self, n_code: int, site: Tensor, n_sites: int, *, learning_rate: float = 2e-3) -> None:
        self.network = adversary_network(n_code, n_sites, normalise=False).to(distributed.device())
        self.optimiser = torch.optim.Adam(self.network.parameters(), lr=learning_rate)
        counts = torch.bincount(site, minlength=n_sites).clamp_min(1)
        self.cross_entropy = nn.CrossEntropyLoss((counts.sum() / (n_sites * counts)).to(distributed.device()))

    def play(self, code: Tensor, site: Tensor) -> Tensor:
        """Learn from this batch, then return minus the cross-entropy, which the encoder minimises."""
        self.optimiser.zero_grad(set_to_none=True)
        self.cross_entropy(self.network(code.detach()), site).backward()
        self.optimiser.step()
        loss: Tensor = self.cross_entropy(self.network(code), site)
        return -loss


def coders(
    kind: EncoderKind,
    n_features: int,
    n_latent: int,
    *,
    hidden: int = 64,
    mask: Tensor | None = None,
    decoder: nn.Module | None = None,
) -> tuple[nn.Module, nn.Module]:
    """Return E and D; modules of the user are copied, not trained in place.

    ``mask`` has the brain voxels of the box, for volumes; a ``decoder`` takes the place of ours.
    """
    of_boxes = mask is not None and (isinstance(kind, nn.Module) or kind in ("auto", "resnet"))
    flat: Callable[[int, int], nn.Module] = nn.Linear if kind == "linear" else partial(mlp, hidden=hidden)
    if isinstance(kind, nn.Module):
        encoder: nn.Module = copy.deepcopy(kind)
    elif kind == "components":
        components = Components(n_features)
        encoder = nn.Sequential(components, nn.Linear(N_COMPONENTS, n_latent))
        if decoder is None:
            return encoder, ComponentsDecoder(components, n_latent)
    elif of_boxes or kind in ("auto", "mlp", "linear"):
        encoder = ResNet3d(n_latent, hidden=hidden) if of_boxes else flat(n_features, n_latent)
    else:
        raise InputError(
            "encoder must be 'auto', 'mlp', 'linear', 'components', for images also 'resnet', or a torch "
            f"module. Got {kind!r}."
        )
    if decoder is not None:
        body = copy.deepcopy(decoder)
    elif mask is not None:
        body = voxel_decoder(n_latent, n_features, hidden=hidden)
    else:
        body = flat(n_latent, n_features)
    if mask is None:
        return encoder, body
    return VolumeEncoder(mask, encoder) if of_boxes else encoder, VolumeDecoder(mask, body)


@torch.no_grad()
def require_width(name: str, module: nn.Module, n_in: int, n_out: int, what: str) -> None:
    """Refuse a module of the user's that does not give rows of the right width, before it is trained."""
    first = next(module.parameters(), torch.zeros(()))
    rows = torch.zeros(2, n_in, dtype=torch.get_default_dtype(), device=first.device)
    training = module.training
    try:
        shape = tuple(module.eval()(rows).shape)
    except RuntimeError as error:
        raise InputError(f"Your {name} cannot take what it is given: {str(error).splitlines()[0]}") from error
    finally:
        module.train(training)
    if shape != (2, n_out):
        raise InputError(f"Your {name} must give {n_out} {what}. It gives shape {shape} for two rows.")
