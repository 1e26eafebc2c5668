"""Networks. For tables: fully connected, one hidden layer of 64, as in the paper's appendix."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from equipool.exceptions import InputError
from equipool.nn.resnet import ResNet3d, VolumeDecoder, VolumeEncoder, voxel_decoder

__all__ = ["Components", "EncoderKind", "adversary_network", "coders", "mlp", "require_width"]

EncoderKind = Literal["auto", "mlp", "linear", "components", "resnet"] | nn.Module

N_COMPONENTS = 100


class Components(nn.Module):
    """Principal components of the training rows, not whitened: what varies most is learned first.

    With few rows and many voxels they keep a linear encoder from overfitting.
    """

    def __init__(self, n_features: int, count: int = N_COMPONENTS) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(n_features, count))
        self.register_buffer("scale", torch.ones(()))
        self.basis: Tensor
        self.scale: Tensor

    @torch.no_grad()
    def start(self, rows: Tensor) -> None:
        """Take the components of these rows, from their inner products."""
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

    def block(a: int, b: int) -> list[nn.Module]:
        middle: list[nn.Module] = [nn.BatchNorm1d(b)] if normalise else []
        return [nn.Linear(a, b), *middle, nn.ReLU()]

    return nn.Sequential(*block(n_in, hidden), *block(hidden, hidden), nn.Linear(hidden, n_out))


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

    Parameters
    ----------
    kind
        ``"auto"``: ``"mlp"`` for tables and ``"resnet"`` for volumes; ``"linear"``; ``"components"``; or a
        module.
    n_features, n_latent, hidden
        Widths.
    mask
        Brain voxels of the box, for volumes; ``None`` for tables.
    decoder
        A module in place of ours.
    """
    of_boxes = mask is not None and (isinstance(kind, nn.Module) or kind in ("auto", "resnet"))
    components = Components(n_features) if kind == "components" else None
    if isinstance(kind, nn.Module):
        encoder: nn.Module = copy.deepcopy(kind)
    elif components is not None:
        encoder = nn.Sequential(components, nn.Linear(N_COMPONENTS, n_latent))
    else:
        encoder = ResNet3d(n_latent, hidden=hidden) if of_boxes else _flat(kind, n_features, n_latent, hidden)
    if decoder is not None:
        body = copy.deepcopy(decoder)
    elif components is not None:
        return encoder, ComponentsDecoder(components, n_latent)
    elif mask is not None:
        body = voxel_decoder(n_latent, n_features, hidden=hidden)
    else:
        body = _flat("mlp" if isinstance(kind, nn.Module) else kind, n_latent, n_features, hidden)
    if mask is None:
        return encoder, body
    return VolumeEncoder(mask, encoder) if of_boxes else encoder, VolumeDecoder(mask, body)


def _flat(kind: str, n_in: int, n_out: int, hidden: int) -> nn.Module:
    """Return an encoder or a decoder of rows: ``"mlp"``, or ``"linear"`` where rows are few."""
    if kind == "linear":
        return nn.Linear(n_in, n_out)
    if kind not in ("auto", "mlp"):
        raise InputError(
            "encoder must be 'auto', 'mlp', 'linear', 'components', for images also 'resnet', or a torch "
            f"module. Got {kind!r}."
        )
    return mlp(n_in, n_out, hidden=hidden)


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
