"""Networks for volumes: the paper's 3-D ResNet, and a decoder back to the volume, which its code lacks.

Estimators hold a volume as the row of its brain voxels; a network for volumes takes boxes (rows, 1, x, y, z).
:class:`VolumeEncoder` and :class:`VolumeDecoder` convert between the two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from equipool import distributed

STAGES = (16, 16, 32, 64)
STRIDES = (2, 2, 2, 1)  # the stem halves the box too
POOLED = 3  # cells of the last average along each axis: one would forget where in the brain something is


class BatchNorm(_BatchNorm):
    """Batch normalisation with the statistics of the whole batch, where several processes share it.

    torch.nn.SyncBatchNorm refuses CPUs. In one process this is plain batch normalisation.
    """

    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

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
            self.num_batches_tracked += 1
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
        rows = distributed.batch_rows(len(x))
        kept = torch.empty(rows, *x.shape[1:]).bernoulli_(1 - self.p)[distributed.local_rows()]
        return x * kept.to(x) / (1 - self.p)


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
