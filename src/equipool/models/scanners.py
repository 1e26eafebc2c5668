"""Sites' mean brains differ: how much of that is the scanners', and how much whom they happened to scan?

With a hundred people a site, its mean brain is off by a tenth of the spread between people, along the very
patterns in which people differ: larger ventricles, wider heads. Taken for the scanner's, that error would be
put into every new scan. But scanners cannot do everything: they bend intensities, blur, and lay slow fields
over the brain. What such patterns explain of a difference is the scanner's. Of the rest, what lies along
the patterns of people is left to the people, unless it is larger than chance makes it; what does not,
they cannot explain, and it is the scanner's again.

The patterns are fitted by generalised least squares, with the covariance between people as the error's: a
difference counts where people are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "TERMS",
    "PeoplePatterns",
    "ScannersAndPeople",
    "intensity_terms",
    "products",
    "scanner_patterns",
    "slow_fields",
]

FloatArray = NDArray[np.float64]
Single = NDArray[np.float32]
Mask = NDArray[np.bool_]

FIELD_ORDER = 4  # slow fields are cosines whose half waves along the three axes are fewer than this in all
PATTERN_SHARE = 0.5  # of as many patterns as there are people; the others are too small to be told from noise
FIRST_WINDOW, GROWTH = 10, 1.5  # patterns whose sizes are judged together, and how windows grow
TERMS = 6  # of intensities
CHUNK = 1 << 14  # voxels at a time, in double precision


@dataclass(frozen=True, eq=False)
class PeoplePatterns:
    """How people differ: (K, voxels) orthonormal patterns, variances along them, and off them a voxel."""

    patterns: Single
    variances: FloatArray
    rest: float

    @classmethod
    def of(cls, rows: Single) -> PeoplePatterns:
        """Find them in what is people's own, (people, voxels)."""
        values, vectors = np.linalg.eigh(products(rows, rows))
        most = max(int(PATTERN_SHARE * len(rows)), 1)
        top = (values > 1e-5 * values[-1]) & (np.arange(len(values)) >= len(values) - most)
        values, vectors, others = values[top][::-1], vectors[:, top][:, ::-1], values[~top]
        patterns = (vectors / np.sqrt(values)).T.astype(np.float32) @ rows
        free = max(len(rows) - len(values), 1) * max(rows.shape[1] - len(values), 1)
        variances = values / len(rows)
        # The least keeps the weights finite where people differ along few patterns only.
        rest = max(float(np.maximum(others, 0.0).sum()) / free, 1e-6 * float(variances.max(initial=1e-300)))
        return cls(patterns, variances, rest)

    def windows(self) -> list[slice]:
        """Return patterns in groups of growing size, the largest variances first."""
        ends, size = [0], float(FIRST_WINDOW)
        while ends[-1] < len(self.variances):
            ends.append(min(ends[-1] + int(size), len(self.variances)))
            size *= GROWTH
        return [slice(low, high) for low, high in pairwise(ends)]


def slow_fields(mask: Mask) -> FloatArray:
    """Return products of cosines over the box, (fields, voxels); the first is constant."""
    waves = [np.cos(np.pi * np.outer(range(FIELD_ORDER), (np.arange(n) + 0.5) / n)) for n in mask.shape]
    order = range(FIELD_ORDER)
    orders = [(i, j, k) for i in order for j in order for k in order if i + j + k < FIELD_ORDER]
    place = np.nonzero(mask)
    fields = [np.prod([waves[a][n][place[a]] for a, n in enumerate(each)], axis=0) for each in orders]
    return np.stack(fields)


def intensity_terms(rows: FloatArray, smooth: FloatArray) -> FloatArray:
    """Return sums over scans at gain 1, (people, voxels), and the same smoothed: (TERMS, voxels).

    Of the intensity and its powers, and of what smoothing changes. The mean brain of a scanner that bends
    intensities differs from another's by the mean of the bent intensities, which the mean intensity alone
    does not tell where people differ.
    """
    change = smooth - rows
    terms = (rows, rows**2, rows**3, change, change**2, change * rows)
    return np.stack([term.sum(axis=0) for term in terms])


def scanner_patterns(means: FloatArray, inside: FloatArray, mask: Mask) -> Single:
    """Return what scanners can add to a mean brain, (patterns, voxels).

    Curves of the intensity (its powers), blur (what smoothing changes, with and without the dark around the
    brain, and together with curves), each as a slow field has it.

    Parameters
    ----------
    means
        Of the :func:`intensity_terms` over training people.
    inside
        (voxels,): how much of a smoothing kernel around each voxel lies within the brain.
    """
    dark = (means[0] + means[3]) * inside - means[0]
    maps = np.linalg.qr(np.vstack([np.ones_like(dark), means, dark]).T)[0].T
    fields = slow_fields(mask)
    result = np.empty((len(maps) * len(fields), len(dark)), dtype=np.float32)
    for k, one in enumerate(maps):
        result[k * len(fields) : (k + 1) * len(fields)] = one * fields
    return result


@dataclass(frozen=True, eq=False)
class ScannersAndPeople:
    """Tells what scanners did to sites' mean brains from whom they scanned.

    Attributes
    ----------
    scanner
        (patterns, voxels): what scanners can do.
    people
        How people differ.
    """

    scanner: Single
    people: PeoplePatterns

    def scanners_part(self, shift: FloatArray, count: FloatArray) -> FloatArray:
        """Return what of sites' distances from the pool, (sites, voxels), is their scanners'.

        ``count`` says of how many people each site's mean is.
        """
        people = self.people
        seen = products(shift, people.patterns)
        right = products(shift, self.scanner) / people.rest + (seen * self._extra) @ self._along.T
        left = seen - right @ self._inverse @ self._along
        size = count @ left**2 / people.variances / max(len(count) - 1, 1)
        chance = np.ones(len(size))
        for window in people.windows():
            # Of what is as large as chance makes it, all is chance; of what is twice as large, half.
            chance[window] = min(1.0, 1.0 / max(float(size[window].mean()), 1e-300))
        return shift - (left * chance).astype(np.float32) @ people.patterns

    @cached_property
    def _along(self) -> FloatArray:
        return products(self.scanner, self.people.patterns)

    @cached_property
    def _extra(self) -> FloatArray:
        """The inverse covariance between people along their patterns, less the 1/rest that it is off them."""
        return 1.0 / self.people.variances - 1.0 / self.people.rest

    @cached_property
    def _inverse(self) -> FloatArray:
        gram = products(self.scanner, self.scanner) / self.people.rest
        gram += (self._along * self._extra) @ self._along.T
        inverse: FloatArray = np.linalg.pinv(gram, rcond=1e-8, hermitian=True).astype(np.float64)
        return inverse


def products(first: NDArray[np.floating], second: NDArray[np.floating]) -> FloatArray:
    """Return first @ second.T in double precision, some voxels at a time."""
    total = np.zeros((len(first), len(second)))
    for start in range(0, first.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        total += first[:, part].astype(np.float64) @ second[:, part].astype(np.float64).T
    return total
