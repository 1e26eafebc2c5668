"""Simulated brains: the MNI152 tissue maps, deformed, aged, and thinned by Alzheimer's disease."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn.functional import avg_pool3d, grid_sample, interpolate

from equipool.data.nifti import CORNER, mni_grid
from equipool.exceptions import InputError

FloatArray = NDArray[np.float64]

# Where Alzheimer's disease reduces grey matter: centre and width in mm, strength. Right side; mirrored.
AD_REGIONS = (
    ((27.0, -20.0, -15.0), 9.0, 1.0),  # hippocampus
    ((24.0, -4.0, -28.0), 8.0, 0.9),  # amygdala, entorhinal cortex
    ((54.0, -18.0, -20.0), 12.0, 0.6),  # temporal gyri
    ((46.0, -60.0, 34.0), 10.0, 0.4),  # parietal
    ((4.0, -52.0, 28.0), 8.0, 0.4),  # posterior cingulate
)
# Knots of the random deformations and their size in mm.
DEFORMATIONS = (((6, 7, 6), 2.2), ((11, 13, 11), 0.9))


class Anatomy:
    """The template and its displacement fields, on a grid with voxels of ``resolution`` mm.

    From 3 mm on, brains are made at half the voxel size and averaged, for partial volumes at tissue borders.
    """

    def __init__(self, resolution: float = 4.0) -> None:
        if not 1 <= resolution <= 8:
            raise InputError(f"resolution must lie between 1 and 8 mm. Got {resolution}.")
        self.shape, self.affine = mni_grid(resolution)
        self.finer = 2 if resolution >= 3 else 1
        self.step = resolution / self.finer
        self.fine = tuple(n * self.finer for n in self.shape)
        self.corner = np.array(CORNER) - (self.finer - 1) * self.step / 2
        tissues, self.source_corner, self.source_step = _tissues(self.finer if self.step >= 2 else 1)
        self.tissues = torch.from_numpy(tissues)
        axes = [torch.arange(n) * self.step + c for n, c in zip(self.fine, self.corner, strict=True)]
        self.points = torch.stack(torch.meshgrid(*axes, indexing="ij"))
        template = self._sample(self.points)
        self.mask = avg_pool3d(template[None], self.finer)[0].sum(dim=0).numpy() > 0.5
        # Maps of ventricular growth, of widening sulci and of the disease's atrophy.
        x, y, z = self.points
        csf = template[2] * (template.sum(dim=0) > 0.9)
        deep = torch.exp(-((x / 24) ** 2 + ((y + 8) / 40) ** 2 + ((z - 12) / 18) ** 2))
        ventricles = self._smooth(csf * (deep > 0.37), 4.0)
        self.push = self._gradient(ventricles / ventricles.max())
        self.sulci = 0.35 + self._smooth(csf * (deep < 0.2), 5.0).clamp_max(0.5) * 1.5
        self.disease = torch.zeros_like(x)
        for (cx, cy, cz), width, strength in AD_REGIONS:
            for side in (-1, 1):
                squared = (x - side * cx) ** 2 + (y - cy) ** 2 + (z - cz) ** 2
                self.disease += strength * torch.exp(-squared / (2 * width**2))
        self.disease.clamp_max_(1.0)
        self.horns = self._gradient(self._smooth(self.disease * (csf > 0.3), 4.0))

    def brain(self, seed: tuple[int, ...], age: float, atrophy: float = 0.0, size: float = 0.0) -> Tensor:
        """Return the shares of grey matter, white matter and fluid of one brain, (3, x, y, z).

        The seed determines its shape; ``age`` is the brain age. ``atrophy`` is 0 for a healthy participant,
        about 1 for one with Alzheimer's disease; ``size`` the share by which the head exceeds the template's.
        """
        rng = np.random.default_rng(seed)
        displacement = torch.zeros_like(self.points)
        for knots, strength in DEFORMATIONS:
            draws = torch.from_numpy(rng.normal(0, strength, (1, 3, *knots)).astype(np.float32))
            displacement += interpolate(draws, size=self.fine, mode="trilinear", align_corners=True)[0]
        displacement -= size * (self.points - self.points.mean(dim=(1, 2, 3), keepdim=True))
        years = (age - 50.0) / 45.0
        moved = self.points + displacement
        moved = moved + (0.3 + 3.2 * years + 0.7 * atrophy) * self.push + atrophy * self.horns
        grey, white, fluid = self._sample(moved)
        loss = 0.32 * years * self.sulci + 0.26 * atrophy * self.disease
        lost = grey * loss.clamp(0, 0.9)
        return avg_pool3d(torch.stack([grey - lost, white, fluid + lost])[None], self.finer)[0]

    def _sample(self, points: Tensor) -> Tensor:
        """Return the tissues at points (3, …) in mm."""
        corner = torch.tensor(self.source_corner, dtype=torch.float32).view(3, 1, 1, 1)
        size = torch.tensor(self.tissues.shape[1:], dtype=torch.float32).view(3, 1, 1, 1)
        unit = 2 * (points - corner) / self.source_step / (size - 1) - 1
        grid = unit.flip(0).permute(1, 2, 3, 0)[None]  # grid_sample counts z, y, x
        return grid_sample(self.tissues[None], grid, mode="bilinear", align_corners=True)[0]

    def _smooth(self, volume: Tensor, width: float) -> Tensor:
        """Return a volume smoothed by a Gaussian of a width (standard deviation) in mm."""
        return torch.from_numpy(gaussian_filter(volume.numpy(), width / self.step))

    def _gradient(self, volume: Tensor) -> Tensor:
        """Return the gradient, scaled to a greatest length of 1."""
        field = torch.stack(torch.gradient(volume))
        return field / field.norm(dim=0).max().clamp_min(1e-12)


@cache
def _tissues(average: int) -> tuple[NDArray[np.float32], FloatArray, float]:
    """Return grey matter, white matter and fluid of the template, their corner and voxel size in mm."""
    from nilearn.datasets import load_mni152_gm_template, load_mni152_template, load_mni152_wm_template

    head = load_mni152_template(resolution=1)
    grey, white = (
        np.asarray(load(resolution=1).dataobj, dtype=np.float32)
        for load in (load_mni152_gm_template, load_mni152_wm_template)
    )
    inside = np.asarray(head.dataobj) > 0.05
    grey, white = np.clip(grey, 0, 1) * inside, np.clip(white, 0, 1) * inside
    total = np.maximum(grey + white, 1.0)
    grey, white = grey / total, white / total
    maps = np.stack([grey, white, inside - grey - white]).astype(np.float32)
    corner = head.affine[:3, 3].astype(np.float64)
    x, y, z = (n // average * average for n in maps.shape[1:])
    cut = maps[:, :x, :y, :z].reshape(3, x // average, average, y // average, average, z // average, average)
    return cut.mean(axis=(2, 4, 6)), corner + (average - 1) / 2, float(average)
