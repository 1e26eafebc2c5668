"""Networks. For tables: fully connected, one hidden layer of 64, as in the paper's appendix."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from equipool.exceptions import InputError
from equipool.nn.resnet import ResNet3d, VolumeDecoder, VolumeEncoder, voxel_decoder

__all__ = ["Components", "EncoderKind", "adversary_network", "coder", "coders", "mlp", "require_width"]

EncoderKind = Literal["auto", "mlp", "linear", "components", "resnet"] | nn.Module

N_COMPONENTS = 100


class Components(nn.Module):
    """Principal components of the training rows, not whitened: what varies most is learned first.

    With few people and many voxels this is what keeps a linear encoder from learning people by heart.
    """

    def __init__(self, n_features: int, count: int = N_COMPONENTS) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(n_features, count))
        self.register_buffer("scale", torch.ones(()))
        self.basis: Tensor
        self.scale: Tensor

    @torch.no_grad()
    def start(self, rows: Tensor) -> None:
        """Take the components of these rows, by the people's inner products."""
        rows = rows.to(self.basis.dtype)
        values, vectors = torch.linalg.eigh(rows @ rows.mT)
        count = min(self.basis.shape[1], len(rows) - 1)
        top = vectors[:, -count:].flip(1)
        directions = rows.mT @ top
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


def coder(kind: EncoderKind, n_in: int, n_out: int, *, hidden: int = 64) -> nn.Module:
    """Return an encoder or a decoder of a table: ``"mlp"``, or ``"linear"`` where people are few."""
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
        raise InputError(f"Your {name} must give {n_out} {what}. It gives shape {shape} for two people.")


def coders(
    kind: EncoderKind,
    n_features: int,
    n_latent: int,
    *,
    hidden: int = 64,
    mask: Tensor | None = None,
    decoder: nn.Module | None = None,
) -> tuple[nn.Module, nn.Module]:
    """Return E and D: for a table, or with a mask for volumes; own modules are copied, not trained in place.

    Parameters
    ----------
    kind
        ``"auto"``: ``"mlp"`` for tables and ``"resnet"`` for volumes; ``"linear"``; or a module.
    n_features, n_latent, hidden
        Widths.
    mask
        Brain voxels of the box, for volumes.
    decoder
        A module in place of ours.
    """
    if kind == "components":
        components = Components(n_features)
        encoder = nn.Sequential(components, nn.Linear(components.basis.shape[1], n_latent))
        back_own = copy.deepcopy(decoder)
        if back_own is not None and mask is not None:
            back_own = VolumeDecoder(mask, back_own)
        return encoder, back_own or ComponentsDecoder(components, n_latent)
    if mask is None:
        own = copy.deepcopy(kind) if isinstance(kind, nn.Module) else None
        forward = own or coder(kind, n_features, n_latent, hidden=hidden)
        back = "mlp" if own else kind
        return forward, copy.deepcopy(decoder) or coder(back, n_latent, n_features, hidden=hidden)
    if isinstance(kind, nn.Module):
        body = copy.deepcopy(kind)
    elif kind in ("auto", "resnet"):
        body = ResNet3d(n_latent, hidden=hidden)
    else:
        # Fully connected networks see the row of voxels itself.
        flat = coder(kind, n_features, n_latent, hidden=hidden)
        return flat, VolumeDecoder(mask, copy.deepcopy(decoder) or voxel_decoder(n_latent, n_features))
    back_body = copy.deepcopy(decoder) or voxel_decoder(n_latent, n_features, hidden=hidden)
    return VolumeEncoder(mask, body), VolumeDecoder(mask, back_body)


def adversary_network(n_in: int, n_out: int, *, hidden: int = 64, normalise: bool = True) -> nn.Sequential:
    """Return a three-layer network that reads the site: the paper's adversary, with batch normalisation."""

    def block(a: int, b: int) -> list[nn.Module]:
        middle: list[nn.Module] = [nn.BatchNorm1d(b)] if normalise else []
        return [nn.Linear(a, b), *middle, nn.ReLU()]

    return nn.Sequential(*block(n_in, hidden), *block(hidden, hidden), nn.Linear(hidden, n_out))
