"""Networks. For tables: fully connected, one hidden layer of 64, as in the paper's appendix.

For volumes: the paper's 3-D ResNet, and a decoder back to the volume, which its code lacks. Estimators hold a
volume as the row of its brain voxels; a network for volumes takes boxes (rows, 1, x, y, z).
:class:`VolumeEncoder` and :class:`VolumeDecoder` convert between the two.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipool import distributed
from equipool.exceptions import InputError

EncoderKind = Literal["auto", "mlp", "linear", "components", "resnet"] | nn.Module

N_COMPONENTS = 100
STAGES = (16, 16, 32, 64)
STRIDES = (2, 2, 2, 1)  # the stem halves the box too
POOLED = 3  # cells of the last average along each axis: one would forget where in the brain something is


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
    """Refuse a copy of a user's module that does not give rows of the right width, before it is trained."""
    try:
        shape = tuple(module.cpu().eval()(torch.zeros(2, n_in)).shape)
    except RuntimeError as error:
        raise InputError(f"Your {name} cannot take what it is given: {str(error).splitlines()[0]}") from error
    if shape != (2, n_out):
        raise InputError(f"Your {name} must give {n_out} {what}. It gives shape {shape} for two rows.")


class Components(nn.Module):
    """Principal components of the training rows, not whitened: what varies most is learned first."""

    basis: Tensor
    scale: Tensor

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(n_features, N_COMPONENTS))
        self.register_buffer("scale", torch.ones(()))

    @torch.no_grad()
    def start(self, rows: Tensor) -> None:
        """Estimate the components from the inner products of these rows."""
        rows = rows.to(self.basis.dtype)
        values, vectors = torch.linalg.eigh(rows @ rows.mT)
        count = min(N_COMPONENTS, len(rows) - 1)
        directions = rows.mT @ vectors[:, -count:].flip(1)
        self.basis[:, :count] = directions / directions.norm(dim=0).clamp_min(1e-12)
        self.scale.copy_((values[-count:].mean() / len(rows)).sqrt().clamp_min(1e-12))

    def forward(self, rows: Tensor) -> Tensor:
        """Return (rows, components)."""
        return rows @ self.basis / self.scale


class ComponentsDecoder(nn.Module):
    """From a latent to components and from these to features."""

    def __init__(self, components: Components, n_latent: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_latent, N_COMPONENTS)
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


class BatchNorm(_BatchNorm):
    """Batch normalisation with the statistics of the whole batch, where several processes share it.

    torch.nn.SyncBatchNorm refuses CPUs. In one process this is plain batch normalisation.
    """

    momentum: float
    running_mean: Tensor
    running_var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return x with mean 0 and variance 1 over the batch, scaled and shifted as learned."""
        if not self.training or distributed.local_rows() == slice(None):
            return super().forward(x)
        axes, shape = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
        count = distributed.batch_rows(len(x)) * x[0, 0].numel()
        mean = distributed.total(x.sum(axes)) / count
        centred = x - mean.view(shape)
        variance = distributed.total(centred.square().sum(axes)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return torch.addcmul(self.bias.view(shape), centred, scale.view(shape))

    def _check_input_dim(self, input: Tensor) -> None:
        """Take rows as well as volumes."""


class Dropout(nn.Dropout):
    """Dropout drawn for the whole batch, so that several processes leave out what a single one would."""

    def forward(self, x: Tensor) -> Tensor:
        """In training, set a share of the numbers to 0 and scale the others up."""
        if not self.training:
            return x
        kept = torch.empty(distributed.batch_rows(len(x)), *x.shape[1:]).bernoulli_(1 - self.p)
        return x * kept[distributed.local_rows()].to(x) / (1 - self.p)


class ResidualBlock(nn.Module):
    """BatchNorm–Swish–Conv twice, before the sum."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            BatchNorm(n_in),
            nn.SiLU(),
            nn.Conv3d(n_in, n_out, 3, stride=stride, padding=1, bias=False),
            BatchNorm(n_out),
            nn.SiLU(),
            nn.Conv3d(n_out, n_out, 3, padding=1),
        )
        same = n_in == n_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv3d(n_in, n_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut plus what the block adds."""
        return self.shortcut(x) + self.body(x)


class ResNet3d(nn.Sequential):
    """The paper's 3-D ResNet, (rows, 1, x, y, z) to (rows, n_out), with its fully connected block."""

    def __init__(self, n_out: int, *, hidden: int = 64, dropout: float = 0.2) -> None:
        widths = (STAGES[0], *STAGES)
        super().__init__(
            nn.Conv3d(1, widths[0], 3, stride=2, padding=1),
            *map(ResidualBlock, widths[:-1], widths[1:], STRIDES),
            BatchNorm(widths[-1]),
            nn.SiLU(),
            nn.AdaptiveAvgPool3d(POOLED),
            nn.Flatten(),
            Dropout(dropout),
            nn.Linear(widths[-1] * POOLED**3, hidden, bias=False),
            BatchNorm(hidden),
            nn.SiLU(),
            Dropout(dropout),
            nn.Linear(hidden, n_out),
        )
        self.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]


def voxel_decoder(n_in: int, n_voxels: int, *, hidden: int = 64) -> nn.Sequential:
    """Return a decoder that mixes ``hidden`` learned maps at full resolution.

    It gives the standardised deviation from the mean brain: folds and borders come with the mean, and the
    network learns how participants differ. Transposed convolutions were four times slower and reconstructed
    held-out brains worse (docs/experiments.md).
    """
    return nn.Sequential(nn.Linear(n_in, hidden), nn.SiLU(), nn.Linear(hidden, n_voxels))


class SingleModule(nn.Module):
    """A module for a mask's voxels that stays in single precision: CPUs have no fast double convolution."""

    voxels: Tensor

    def __init__(self, mask: Tensor, body: nn.Module) -> None:
        super().__init__()
        self.shape = tuple(mask.shape)
        self.register_buffer("voxels", mask.flatten().nonzero().flatten(), persistent=False)
        self.body = body

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.dtype == torch.float64:
                tensor.data = tensor.data.float()
        return self


class VolumeEncoder(SingleModule):
    """Put the voxels of a mask (x, y, z) into its box and encode it, by ``body``, in the rows' precision."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return (rows, n) for (rows, voxels)."""
        box = rows.new_zeros(len(rows), math.prod(self.shape), dtype=torch.float32)
        box[:, self.voxels] = rows.float()
        volume = box.view(len(rows), 1, *self.shape).contiguous(memory_format=torch.channels_last_3d)
        out: Tensor = self.body(volume)
        return out.to(rows.dtype)


class VolumeDecoder(SingleModule):
    """Decode latents to rows of voxels, in the latents' precision.

    ``body`` gives (rows, voxels), or boxes (rows, 1, x, y, z), of which the voxels of the mask are taken.
    """

    def forward(self, latent: Tensor) -> Tensor:
        """Return (rows, voxels) for (rows, n)."""
        out: Tensor = self.body(latent.float())
        rows = out if out.ndim == 2 else out.flatten(1)[:, self.voxels]
        return rows.to(latent.dtype)
