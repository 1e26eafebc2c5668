"""Sites' mean brains differ: how much of that is the scanners', and how much whom they happened to scan?

With a hundred people a site, its mean brain is off by a tenth of the spread between people, along the very
patterns in which people differ: larger ventricles, wider heads. Taken for the scanner's, that error would be
put into every new scan. But scanners cannot do everything: they bend intensities, blur, and lay slow fields
over the brain. What such patterns explain of a difference is the scanner's. Of the rest, what lies along
the patterns of people is left to the people, unless a group of patterns shows more than chance makes; what
lies off them is kept as the scanner's, though people have some part in it too.

The patterns are fitted by generalised least squares, with the covariance between people as the error's: a
difference counts where people are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    "scanner_patterns",
    "slow_fields",
]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
Single = NDArray[np.float32]
Mask = NDArray[np.bool_]

FIELD_ORDER = 4  # slow fields are cosines whose half waves along the three axes are fewer than this in all
PATTERN_SHARE = 0.5  # of as many patterns as there are people; the others are too small to be told from noise
FIRST_WINDOW, GROWTH = 10, 1.5  # patterns whose sizes are judged together, and how windows grow
TERMS = 6  # of intensities
TENTHS = 10  # parts of people, each judged by the patterns of the others
CHUNK = 1 << 14  # voxels at a time, in double precision


@dataclass(frozen=True, eq=False)
class PeoplePatterns:
    """How people differ: (K, voxels) orthonormal patterns, variances along them, and off them a voxel.

    The variances are those of other people than the patterns were found in: these vary along them twice to
    six times as much, because the patterns were made of them.
    """

    patterns: Single
    variances: FloatArray
    rest: float

    @classmethod
    def of(cls, rows: Single, scale: float = 1.0) -> PeoplePatterns:
        """Find them in what is people's own, (people, voxels).

        ``scale`` makes up for what the regression that left these rows took of their variance.
        """
        gram = products(rows, rows)
        values, vectors = largest(gram, max(int(PATTERN_SHARE * len(rows)), 1))
        patterns = (vectors / np.sqrt(values)).T.astype(np.float32) @ rows
        variances, off = _of_others(gram, len(values))
        # The least, for scans at gain 1, keeps weights finite where people differ along few patterns only.
        least = max(1e-6 * float(variances.max(initial=0.0)), 1e-12)
        rest = off / max(rows.shape[1] - len(values), 1)
        return cls(patterns, scale * np.maximum(variances, least), scale * max(rest, least))

    def total(self, n_voxels: int) -> float:
        """Return the variance over all voxels."""
        return float(self.variances.sum()) + self.rest * (n_voxels - len(self.variances))

    def windows(self) -> list[slice]:
        """Return patterns in groups of growing size, the largest variances first."""
        ends, size = [0], float(FIRST_WINDOW)
        while ends[-1] < len(self.variances):
            ends.append(min(ends[-1] + int(size), len(self.variances)))
            size *= GROWTH
        return [slice(low, high) for low, high in pairwise(ends)]


def largest(gram: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """Return the largest eigenvalues that are no rounding, the greatest first, and their vectors."""
    values, vectors = np.linalg.eigh(gram)
    top = (values > 1e-5 * values[-1]) & (np.arange(len(values)) >= len(values) - most)
    return values[top][::-1], vectors[:, top][:, ::-1]


def _of_others(gram: FloatArray, most: int) -> tuple[FloatArray, float]:
    """Return people's variances along the patterns of others, and in all off them, from inner products."""
    variances = np.zeros(most)
    for others, these in tenths(len(gram)):
        values, vectors = largest(gram[np.ix_(others, others)], most)
        along = gram[np.ix_(these, others)] @ vectors / np.sqrt(values)
        variances[: len(values)] += (along**2).sum(axis=0)
    off = max(float(np.trace(gram) - variances.sum()), 0.0)
    return variances / len(gram), off / len(gram)


def tenths(people: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Give each tenth of people after all others; nothing of a single person."""
    part = np.arange(people) % TENTHS
    for k in range(min(TENTHS, people) if people > 1 else 0):
        yield np.flatnonzero(part != k), np.flatnonzero(part == k)


def slow_fields(mask: Mask) -> FloatArray:
    """Return products of cosines over the brain's own box, (fields, voxels); the first is constant."""
    waves = []
    for at in np.nonzero(mask):
        share = (at - at.min() + 0.5) / (np.ptp(at) + 1)
        waves.append(np.cos(np.pi * np.outer(range(FIELD_ORDER), share)))
    order = range(FIELD_ORDER)
    orders = [(i, j, k) for i in order for j in order for k in order if i + j + k < FIELD_ORDER]
    return np.stack([np.prod([waves[a][n] for a, n in enumerate(each)], axis=0) for each in orders])


def intensity_terms(rows: FloatArray, smooth: FloatArray) -> FloatArray:
    """Return sums over scans at gain 1, (people, voxels), and the same smoothed: (TERMS, voxels).

    Of the intensity and its powers, and of what smoothing changes. The mean brain of a scanner that bends
    intensities differs from another's by the mean of the bent intensities, which the mean intensity alone
    does not tell where people differ.
    """
    change, square = smooth - rows, rows * rows  # a product of three is many times quicker than a power
    pairs = ((square, rows), (change, change), (change, rows))
    cube, blur, both = (np.einsum("nv,nv->v", *pair) for pair in pairs)
    return np.stack([rows.sum(axis=0), square.sum(axis=0), cube, change.sum(axis=0), blur, both])


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
    maps = np.vstack([np.ones_like(dark), means, dark])
    maps /= np.maximum(np.linalg.norm(maps, axis=1, keepdims=True), 1e-300)
    _, sizes, maps = np.linalg.svd(maps, full_matrices=False)
    # Where maps say the same, as two do without a dark edge, what is left between them is rounding.
    maps = maps[sizes > 1e-6 * sizes[0]]
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

    def beyond_chance(self, shift: FloatArray, count: FloatArray, chance: float = 1.0) -> FloatArray:
        """Return how far scanners move sites along each of people's patterns, beyond their own patterns.

        As a variance, in units of the variance between people; 0 where sites' distances from the pool,
        (sites, voxels), are no larger than chance makes them. Patterns are judged in groups, as a single one
        says little.

        Parameters
        ----------
        shift, count
            Sites' distances, and of how many people each site's mean is.
        chance
            How much larger than in plain means of so many people distances are by chance.
        """
        # What scanners' patterns explain by chance is no longer there.
        fitted = ((self._inverse @ self._along) * self._along).sum(axis=0)
        expected = np.maximum(self.people.variances - fitted, 1e-3 * self.people.variances)
        freedom = max(len(count) - 1, 1)
        size = count @ self._unexplained(shift) ** 2 / expected / freedom
        typical = max((count.sum() - (count**2).sum() / count.sum()) / freedom, 1.0)
        beyond = np.zeros(len(size))
        for window in self.people.windows():
            beyond[window] = max(float(size[window].mean()) - chance, 0.0) / typical
        return beyond

    def scanners_part(self, shift: FloatArray, count: FloatArray, beyond: FloatArray) -> FloatArray:
        """Return what of sites' distances from the pool, (sites, voxels), is their scanners'.

        ``count`` says of how many people each site's mean is, ``beyond`` what :meth:`beyond_chance` found.
        """
        # The fewer people, the more of a mean is chance; all of it where scanners do nothing along a pattern.
        chance = 1.0 / (1.0 + count[:, None] * beyond)
        return shift - (self._unexplained(shift) * chance).astype(np.float32) @ self.people.patterns

    def coefficients(self, shift: FloatArray, ridge: FloatArray) -> FloatArray:
        """Return how much of each of the scanners' patterns explains sites' distances, (sites, patterns).

        ``ridge`` is added to what is known of each pattern.
        """
        right = self._right(shift, products(shift, self.people.patterns))
        return right @ np.linalg.inv(self._known + np.diag(ridge))

    def explained(self, coefficients: FloatArray) -> float:
        """Return the squared size of what a scanner's patterns make, a unit being a difference of people."""
        return float(coefficients @ self._known @ coefficients)

    def _right(self, shift: FloatArray, seen: FloatArray) -> FloatArray:
        """Return distances along scanners' patterns, counted where people are alike."""
        return products(shift, self.scanner) / self.people.rest + (seen * self._extra) @ self._along.T

    def _unexplained(self, shift: FloatArray) -> FloatArray:
        """Return what of distances lies along people's patterns and not along scanners', (sites, K)."""
        seen = products(shift, self.people.patterns)
        return seen - self._right(shift, seen) @ self._inverse @ self._along

    @cached_property
    def _along(self) -> FloatArray:
        return products(self.scanner, self.people.patterns)

    @cached_property
    def _extra(self) -> FloatArray:
        """The inverse covariance between people along their patterns, less the 1/rest that it is off them."""
        return 1.0 / self.people.variances - 1.0 / self.people.rest

    @cached_property
    def _known(self) -> FloatArray:
        """What is known of the patterns' coefficients from one person's brain."""
        gram = products(self.scanner, self.scanner) / self.people.rest
        return gram + (self._along * self._extra) @ self._along.T

    @cached_property
    def _inverse(self) -> FloatArray:
        inverse: FloatArray = np.linalg.pinv(self._known, rcond=1e-8, hermitian=True).astype(np.float64)
        return inverse


def products(first: NDArray[np.floating], second: NDArray[np.floating]) -> FloatArray:
    """Return first @ second.T in double precision, some voxels at a time."""
    total = np.zeros((len(first), len(second)))
    for start in range(0, first.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        total += first[:, part].astype(np.float64) @ second[:, part].astype(np.float64).T
    return total
