"""What a scanner does to intensities, undone in each scan: a curve, a slow gain and blur.

Taking a site's mean distance away mends its mean brain and leaves people's intensities bent: where a scanner
brightens dark voxels, it also makes people differ less there, and skews how they do. But what scanners do is
simple. Of a scan C as the pool would show it, at gain 1, a scanner makes

    N = C + b₀ + g(v)·K + b₂K² + b₃K³ + b₄·(smooth C − C) + b₅·(dark C − C),

K being C within the ends of what scans show, g a slow field over the brain, "smooth" a Gaussian within the
brain and "dark" one that sees the dark around it. The coefficients are those with which the mean terms of the
pool explain a site's mean distance from it, by generalised least squares
(`sites.scanner_patterns`), shrunk by what chance alone explains. Undoing it, blur is taken for that of
the scan as it is, and the curve is turned round voxel by voxel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from equipool.sites.scanner_patterns import PeoplePatterns, ScannersAndPeople, slow_fields

__all__ = ["ENDS", "Intensities", "Smoothing", "fit_intensities"]

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]

ENDS = (0.001, 0.999)  # quantiles of a scan's voxels, beyond which a curve stays level
CURVE = 5  # coefficients beside the slow gain
USUAL = 0.5  # size of a coefficient that is no surprise at gain 1
BRAIN = 0.05  # most that chance may be of the contrast in the mean brain, for a curve to be told
STEPS, FLATTEST = 4, 0.3  # of turning a curve round by Newton's method, and the least slope for it


class Smoothing(Protocol):
    """Rows of brain voxels that can be smoothed within the brain."""

    @property
    def inside(self) -> FloatArray:
        """How much of the kernel lies within the brain, (voxels,)."""
        ...

    def smooth(self, rows: NDArray[np.floating]) -> FloatArray:
        """Return rows smoothed within the brain."""
        ...


@dataclass(frozen=True, eq=False)
class Intensities:
    """What each site's scanner does to intensities at gain 1.

    Attributes
    ----------
    ends
        (2,): where curves end.
    curves
        (sites, 5): coefficients b of the constant, the square, the cube, and the two kinds of blur.
    fields
        (sites, voxels): the slow gain g.
    """

    ends: FloatArray
    curves: FloatArray
    fields: FloatArray

    @property
    def nothing(self) -> bool:
        """Whether no scanner does anything."""
        return not self.curves.any() and not self.fields.any()

    def straightened(self, normal: FloatArray, share: FloatArray, box: Smoothing) -> FloatArray:
        """Return scans at gain 1 as the pool would show them; each has a share in sites, (rows, sites)."""
        curves, smooth = share @ self.curves, box.smooth(normal)
        straight = np.empty_like(normal)
        for k, (row, blurred) in enumerate(zip(normal, smooth, strict=True)):  # one scan stays in the cache
            constant, square, cube, blur, dark = curves[k]
            goal = row - constant - blur * (blurred - row) - dark * (blurred * box.inside - row)
            straight[k] = self._turned_round(goal, share[k] @ self.fields, square, cube)
        return straight

    def _turned_round(self, goal: FloatArray, gain: FloatArray, square: float, cube: float) -> FloatArray:
        """Return C where C + gain·K + square·K² + cube·K³ is the goal, by Newton's method."""
        low, high = self.ends
        found = goal.copy()
        for _ in range(STEPS):
            inner = np.clip(found, low, high)
            bent = gain + inner * (square + inner * cube)
            slope = 1 + bent + inner * (square + 2 * cube * inner)
            slope[inner != found] = 1.0  # level beyond the ends
            found -= (found + inner * bent - goal) / np.maximum(slope, FLATTEST)
        return found


def fit_intensities(
    means: FloatArray,
    ends: FloatArray,
    people: FloatArray,
    shift: FloatArray,
    error: FloatArray,
    patterns: PeoplePatterns,
    inside: FloatArray,
    mask: Mask,
) -> Intensities:
    """Find what explains each site's mean distance from the pool.

    Parameters
    ----------
    means
        Of the :func:`~equipool.sites.scanner_patterns.intensity_terms` over training people.
    ends
        Where curves are to end.
    people, shift
        (sites,): how many people; and (sites, voxels): sites' distances from the pool at covariates 0.
    error
        (sites,): variance of such a distance by chance, in units of the variance between people.
    patterns
        How people differ.
    inside
        (voxels,): how much of a smoothing kernel around each voxel lies within the brain.
    """
    curves, fields = np.zeros((len(shift), CURVE)), np.zeros_like(shift)
    between = patterns.variances.sum() + patterns.rest * (len(inside) - len(patterns.variances))
    if between / people.sum() > BRAIN * len(inside) * means[0].var():
        return Intensities(ends, curves, fields)  # what bends could not be told from whom a site scanned
    slow, dark = slow_fields(mask), (means[0] + means[3]) * inside - means[0]
    maps = np.vstack([np.ones_like(dark), means[1:4], dark, means[0] * slow])
    size = np.maximum(np.linalg.norm(maps, axis=1), 1e-12)
    apart = ScannersAndPeople((maps / size[:, None]).astype(np.float32), patterns)
    for s in np.flatnonzero(error > 0):
        # Maps that say nearly the same would get large coefficients of opposite signs, which mend the mean
        # and spoil each scan: a ridge.
        found = apart.coefficients(shift[s : s + 1], error[s] / (USUAL * size) ** 2)[0]
        # After James and Stein: by chance the explained part has as many units as there are coefficients.
        explained = apart.explained(found) / error[s]
        found *= max(1.0 - len(found) / max(explained, 1e-300), 0.0) / size
        curves[s], fields[s] = found[:CURVE], found[CURVE:] @ slow
    return Intensities(ends, curves, fields)
