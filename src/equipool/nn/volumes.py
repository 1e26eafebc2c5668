"""Networks for volumes: the paper's 3-D ResNet, and a decoder back to the volume, which its code lacks.

Both speak of a volume as a row of the brain's voxels, as the cache holds it: the encoder puts the row into
the box, the decoder takes the brain out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

__all__ = ["VolumeDecoder", "VolumeEncoder"]

STAGES = (16, 16, 32, 64)
POOLED = 3  # cells of the last average along each axis: one would forget where in the brain something is


class ResidualBlock(nn.Module):
    """BatchNorm–Swish–Conv twice, before the sum, as in the paper's appendix."""

    def __init__(self, n_in: int, n_out: int, *, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm3d(n_in),
            nn.SiLU(),
            nn.Conv3d(n_in, n_out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm3d(n_out),
            nn.SiLU(),
            nn.Conv3d(n_out, n_out, 3, padding=1),
        )
        same = n_in == n_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv3d(n_in, n_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut plus what the block adds."""
        return self.shortcut(x) + self.body(x)


class SingleModule(nn.Module):
    """A module that stays in single precision: convolutions in double have no fast form on CPUs."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.dtype == torch.float64:
                tensor.data = tensor.data.float()
        return self


class VolumeEncoder(SingleModule):
    """The paper's 3-D ResNet: stages of 16, 16, 32 and 64 channels, then its fully connected block.

    Parameters
    ----------
    mask
        Brain voxels of the box, boolean (x, y, z).
    n_out
        Numbers that come out.
    hidden
        Width of the fully connected block.
    dropout
        Its share of numbers left out in training.
    """

    def __init__(self, mask: Tensor, n_out: int, *, hidden: int = 64, dropout: float = 0.2) -> None:
        super().__init__()
        self.shape = tuple(mask.shape)
        self.register_buffer("voxels", mask.flatten().nonzero().flatten(), persistent=False)
        self.voxels: Tensor
        widths = (STAGES[0], *STAGES)
        self.stem = nn.Conv3d(1, widths[0], 3, stride=2, padding=1)
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(a, b, stride=1 if k == 0 else 2)
                for k, (a, b) in enumerate(zip(widths[:-1], widths[1:], strict=True))
            )
        )
        self.head = nn.Sequential(
            nn.BatchNorm3d(widths[-1]),
            nn.SiLU(),
            nn.AdaptiveAvgPool3d(POOLED),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(widths[-1] * POOLED**3, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, n_out),
        )
        self.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, rows: Tensor) -> Tensor:
        """Return (people, n_out) for (people, voxels), in the dtype of the rows."""
        box = rows.new_zeros(len(rows), self.shape[0] * self.shape[1] * self.shape[2], dtype=torch.float32)
        box[:, self.voxels] = rows.float()
        volume = box.view(len(rows), 1, *self.shape).contiguous(memory_format=torch.channels_last_3d)
        out: Tensor = self.head(self.blocks(self.stem(volume)))
        return out.to(rows.dtype)


class VolumeDecoder(SingleModule):
    """From a latent back to the brain's voxels: the encoder's stages upwards.

    It gives the deviation from the mean brain in each voxel's own scale, so folds and borders come with the
    mean and the network learns what differs between people.

    Parameters
    ----------
    mask
        Brain voxels of the box.
    n_in
        Width of the latent.
    widths
        Channels from the coarsest stage to the finest.
    """

    def __init__(self, mask: Tensor, n_in: int, *, widths: Sequence[int] = (64, 32, 16, 16)) -> None:
        super().__init__()
        self.register_buffer("voxels", mask.flatten().nonzero().flatten(), persistent=False)
        self.voxels: Tensor
        sizes = [tuple(mask.shape)]
        for _ in widths:
            sizes.append(tuple(-(-n // 2) for n in sizes[-1]))
        self.sizes = sizes[::-1]
        x, y, z = self.sizes[0]
        self.start = nn.Linear(n_in, widths[0] * x * y * z)
        self.blocks = nn.ModuleList(ResidualBlock(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True))
        self.last = nn.Sequential(nn.BatchNorm3d(widths[-1]), nn.SiLU(), nn.Conv3d(widths[-1], 1, 3, padding=1))
        self.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, latent: Tensor) -> Tensor:
        """Return (people, voxels) in the dtype of the latent."""
        volume = self.start(latent.float()).view(len(latent), -1, *self.sizes[0])
        for block, size in zip(self.blocks, self.sizes[1:], strict=False):
            volume = interpolate(block(volume), size=size, mode="trilinear")
        volume = interpolate(self.last(volume), size=self.sizes[-1], mode="trilinear")
        return volume.flatten(1)[:, self.voxels].to(latent.dtype)
