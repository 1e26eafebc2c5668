"""Scans as rows of brain voxels: read in blocks, brought to gain 1, smoothed within the brain.

Everything that is estimated from scans is a sum over participants. Several processes share each pass out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from equipool import distributed
from equipool.checks.findings import listed
from equipool.data.volumes import Volumes
from equipool.exceptions import InputError
from equipool.sites.effect import Context, FloatArray

Mask = NDArray[np.bool_]

BLOCK = 16  # volumes in memory at a time
SMOOTH = 0.6  # voxels, standard deviation of the Gaussian by which blur is described
BRIGHT = 0.85  # quantile of the template beyond which tissue is white matter in a T1 image
FAILED = 10.0  # times the bright end of the brain: brighter is no tissue but a failure of the scan
MAX_PARTICIPANTS = 300  # drawn for patterns and for choices, so that memory and time stay bounded


@dataclass(frozen=True, eq=False)
class Box:
    """Where the rows of brain voxels stand in the image."""

    mask: Mask

    def smooth(self, rows: NDArray[np.floating]) -> FloatArray:
        """Return rows smoothed by a Gaussian within the brain."""
        result = np.empty(rows.shape)
        for k, row in enumerate(rows):
            box = np.zeros(self._cropped.shape)
            box[self._cropped] = row
            result[k] = gaussian_filter(box, SMOOTH)[self._cropped] / self.inside
        return result

    @cached_property
    def inside(self) -> FloatArray:
        """How much of the smoothing kernel lies within the brain, (voxels,)."""
        share: FloatArray = gaussian_filter(self._cropped.astype(np.float64), SMOOTH)[self._cropped]
        return np.maximum(share, 1e-6)

    def log_det_of_detail(self, factor: FloatArray) -> FloatArray:
        """Return the mean of log(ŝ + k (1 − ŝ)) over frequencies, for a factor k of the detail of each row.

        Times the voxels, that is the log-determinant of rows ↦ S rows + k (rows − S rows) far from edges.
        """
        # Of the sampled kernel; that of a continuous Gaussian is half of it at the finest detail.
        waves = np.fft.fft(gaussian_filter(np.eye(1, 16)[0], SMOOTH, mode="wrap")).real
        smooth = np.einsum("i,j,k->ijk", waves, waves, waves).ravel()
        return np.log(np.maximum(smooth + factor[:, None] * (1 - smooth), 0.05)).mean(axis=1)

    @cached_property
    def _cropped(self) -> Mask:
        """The mask without the air that no kernel reaches."""
        margin = int(4 * SMOOTH + 0.5)
        near = [slice(max(at.min() - margin, 0), at.max() + 1 + margin) for at in np.nonzero(self.mask)]
        return self.mask[tuple(near)]


@dataclass(frozen=True, eq=False)
class ScanContext(Context):
    """The context of scans at gain 1: beside site, covariates and prediction, the image they stand in."""

    box: Box
    template: FloatArray  # (voxels,), the mean volume that gains are estimated by


def gains(rows: NDArray[np.floating], template: FloatArray) -> FloatArray:
    r"""Return each scan's gain: its median ratio to the template over the brightest part of the brain.

    .. math:: g_i = \operatorname{median}_{v:\,t_v \ge q_{0.85}(t)} z_{iv} / t_v

    In a T1 image that is white matter, which age and disease thin least; the whole brain's median would fall
    with the grey matter that a patient has lost.
    """
    bright = template >= np.quantile(template, BRIGHT)
    ratio = np.median(np.asarray(rows, dtype=np.float64)[:, bright] / template[bright], axis=1)
    return np.where(ratio > 0, ratio, 1.0)


def normalised(rows: NDArray[np.floating], template: FloatArray) -> tuple[FloatArray, Mask]:
    """Return scans at gain 1, and where nothing was measured: cut off with the skull, or failed.

    There they have the template's value.
    """
    values: FloatArray = np.asarray(rows, dtype=np.float64) / gains(rows, template)[:, None]
    absent = (np.asarray(rows) == 0) | (np.abs(values) > FAILED)
    np.copyto(values, template, where=absent)
    return values, absent


def mean_volume(volumes: Volumes) -> tuple[FloatArray, float, bool]:
    """Return the mean of scans whose bright end is 1, the scans' typical brightness, and if all was measured.

    The mean is over what was measured, (voxels,).
    """
    total, measured = np.zeros(volumes.shape[1]), np.zeros(volumes.shape[1])
    logs, dark = np.zeros(1), np.zeros(len(volumes))
    for part, rows in blocks(volumes):
        # The bright end of a scan, where even scans with a mean of 0 are far from it.
        bright = np.quantile(rows, BRIGHT, axis=1)
        dark[part] = bright <= 0
        bright = np.where(bright > 0, bright, 1.0)
        values = rows / bright[:, None]
        present = (rows != 0) & (np.abs(values) <= FAILED)
        total += np.where(present, values, 0.0).sum(axis=0)
        measured += present.sum(axis=0)
        logs += np.log(bright).sum()
    refused = np.flatnonzero(distributed.summed(dark))
    if len(refused):  # by all processes, or some would wait
        names = listed(volumes.paths[k].name if volumes.paths else f"volume {k}" for k in refused)
        raise InputError(
            f"0 or below in almost all of the brain, so that no gain can be estimated: {len(refused)} of "
            f"{len(volumes)} images ({names}); give images whose brain is brighter than its surroundings."
        )
    total, measured, logs = (distributed.summed(values) for values in (total, measured, logs))
    mean = np.maximum(total / np.maximum(measured, 1.0), 1e-6)
    return mean, float(np.exp(logs[0] / len(volumes))), bool((measured == len(volumes)).all())


def blocks(volumes: Volumes) -> Iterator[tuple[slice, FloatArray]]:
    """Yield this process's blocks of volumes and which rows they are."""
    for start in distributed.turns(range(0, len(volumes), BLOCK)):
        rows = volumes.read(slice(start, start + BLOCK)).astype(np.float64)
        yield slice(start, start + len(rows)), rows


def rows_of_some(parts: Iterator[tuple[slice, FloatArray]], n: int, voxels: int) -> NDArray[np.float32]:
    """Return rows drawn at random, the same in all processes, so that memory stays bounded."""
    some = np.sort(np.random.default_rng(0).permutation(n)[:MAX_PARTICIPANTS])
    rows = np.zeros((len(some), voxels), dtype=np.float32)
    for part, values in parts:
        here = (some >= part.start) & (some < part.stop)
        rows[here] = values[some[here] - part.start]
    return distributed.summed(rows)
