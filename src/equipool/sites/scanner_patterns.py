r"""What of the differences between sites' mean brains is due to the scanners, and what to whom they scanned.

With a hundred participants, a site's mean brain is off by a tenth of the standard deviation between
participants, along the very patterns in which brains vary (larger ventricles, wider heads). That sampling
error must not be taken for the scanner's. But scanners cannot do everything: they change intensities, blur,
and add slow fields. A site's difference d from the pool is modelled as

.. math:: d = A b + P^\top u + \varepsilon, \qquad \operatorname{cov}(\varepsilon + P^\top u) = \Sigma / n

with scanner patterns A, fitted by generalised least squares, the covariance Σ between participants, and its
patterns P. What A explains is the scanner's. The rest is shrunk along P, fully unless a group of patterns
varies between sites beyond chance, and kept off P.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from equipool.sites.design import pieces
from equipool.sites.effect import FloatArray

Single = NDArray[np.float32]
Mask = NDArray[np.bool_]

FIELD_ORDER = 4  # slow fields are cosines whose half waves along the three axes are fewer than this in all


@dataclass(frozen=True, eq=False)
class PeoplePatterns:
    """How participants differ: orthonormal patterns (K, voxels), variances along them, per voxel off them.

    The variances are those of held-out participants; those from whom patterns were estimated vary two to six
    times as much along them.
    """

    patterns: Single
    variances: FloatArray
    rest: float

    @classmethod
    def of(cls, rows: Single, scale: float = 1.0) -> Self:
        """Estimate them from residuals (participants, voxels).

        ``scale`` corrects for the degrees of freedom of the regression that left these residuals.
        """
        gram, n = products(rows, rows), len(rows)
        # Patterns beyond half as many as participants cannot be distinguished from noise.
        values, vectors = _largest(gram, max(n // 2, 1))
        patterns = (vectors / np.sqrt(values)).T.astype(np.float32) @ rows
        variances, tenth = np.zeros(len(values)), np.arange(n) % 10
        for k in range(min(10, n) if n > 1 else 0):  # each tenth is judged by the patterns of the others
            others, these = np.flatnonzero(tenth != k), np.flatnonzero(tenth == k)
            sizes, axes = _largest(gram[np.ix_(others, others)], len(values))
            along = gram[np.ix_(these, others)] @ axes / np.sqrt(sizes)
            variances[: len(sizes)] += (along**2).sum(axis=0) / n
        rest = max(float(np.trace(gram) / n - variances.sum()), 0.0) / max(rows.shape[1] - len(values), 1)
        # The least, for scans at gain 1, keeps weights finite where participants differ along few patterns.
        least = max(1e-6 * float(variances.max(initial=0.0)), 1e-12)
        return cls(patterns, scale * np.maximum(variances, least), scale * max(rest, least))

    def total(self, n_voxels: int) -> float:
        """Return the variance over all voxels."""
        return float(self.variances.sum()) + self.rest * (n_voxels - len(self.variances))

    def log_likelihood(self, rows: FloatArray) -> FloatArray:
        """Return the Gaussian log-likelihood of residuals, (rows,), up to a constant."""
        scores, rest = rows @ self.patterns.T, rows.shape[1] - len(self.variances)
        along = (scores**2 / self.variances).sum(axis=1) + np.log(self.variances).sum()
        off = ((rows**2).sum(axis=1) - (scores**2).sum(axis=1)) / self.rest + rest * np.log(self.rest)
        return -0.5 * (along + off)

    def windows(self) -> list[slice]:
        """Return patterns in groups of growing size, the largest variances first."""
        ends, size = [0], 10.0  # the first patterns whose sizes are judged together
        while ends[-1] < len(self.variances):
            ends.append(min(ends[-1] + int(size), len(self.variances)))
            size *= 1.5
        return [slice(low, high) for low, high in pairwise(ends)]


@dataclass(frozen=True, eq=False)
class Survey:
    """What one pass over scans and their residuals tells."""

    n: int  # scans
    terms: FloatArray  # (6, voxels), means of the intensity terms
    ends: FloatArray  # (2,), mean quantiles of intensities
    people: PeoplePatterns
    squares: FloatArray  # (sites, voxels), of residuals, summed over the scans of each site
    freedom: float  # scans over degrees of freedom of the regression that left these residuals

    @property
    def variance(self) -> FloatArray:
        """The variance of residuals, (voxels,)."""
        return self.freedom * self.squares.sum(axis=0) / self.n


def _largest(gram: FloatArray, most: int) -> tuple[FloatArray, FloatArray]:
    """Return the largest eigenvalues that are no rounding, the greatest first, and their vectors."""
    values, vectors = np.linalg.eigh(gram)
    top = (values > 1e-5 * values[-1]) & (np.arange(len(values)) >= len(values) - most)
    return values[top][::-1], vectors[:, top][:, ::-1]


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
    """Return sums over scans at gain 1 (rows, voxels), and the same smoothed, (6, voxels).

    They are those of the intensity x, x², x³, and with the change d by smoothing, of d, d² and dx.
    """
    change, square = smooth - rows, rows * rows  # a product of three is many times quicker than a power
    pairs = ((square, rows), (change, change), (change, rows))
    cube, blur, both = (np.einsum("nv,nv->v", *pair) for pair in pairs)
    return np.stack([rows.sum(axis=0), square.sum(axis=0), cube, change.sum(axis=0), blur, both])


def scanner_patterns(means: FloatArray, inside: FloatArray, mask: Mask) -> Single:
    """Return what scanners can add to a mean brain: intensity terms times slow fields, (patterns, voxels).

    ``means`` are those of the :func:`intensity_terms`, ``inside`` the share of a smoothing kernel around each
    voxel that lies within the brain.
    """
    dark = (means[0] + means[3]) * inside - means[0]
    maps = np.vstack([np.ones_like(dark), means, dark])
    maps /= np.maximum(np.linalg.norm(maps, axis=1, keepdims=True), 1e-300)
    _, sizes, maps = np.linalg.svd(maps, full_matrices=False)
    # Without a dark edge two maps are equal, and their difference is rounding.
    maps = maps[sizes > 1e-6 * sizes[0]]
    fields = slow_fields(mask)
    return np.concatenate([(one * fields).astype(np.float32) for one in maps])


class ScannersAndPeople:
    """Separates what scanners did to sites' mean brains from whom they scanned.

    ``scanner`` are the patterns of what scanners can do, (patterns, voxels).
    """

    def __init__(self, scanner: Single, people: PeoplePatterns) -> None:
        self.scanner, self.people = scanner, people
        self._along = products(scanner, people.patterns)
        # The inverse covariance along participants' patterns, less the 1/rest that it is off them.
        self._extra = 1.0 / people.variances - 1.0 / people.rest
        gram = products(scanner, scanner) / people.rest
        self._information: FloatArray = gram + (self._along * self._extra) @ self._along.T  # A Σ⁻¹ Aᵀ
        self._inverse = np.linalg.pinv(self._information, rcond=1e-8, hermitian=True)

    def beyond_chance(self, shift: FloatArray, count: FloatArray, chance: float = 1.0) -> FloatArray:
        """Return the variance between sites along each pattern of participants, beyond chance.

        In units of the variance between participants, of what scanners' patterns do not explain of the
        sites' ``shift`` (sites, voxels) with ``count`` participants. Patterns are judged in groups, as a
        single one says little. ``chance`` is the factor by which the variance by chance exceeds that of plain
        means.
        """
        # Without what scanners' patterns explain by chance.
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
        """Return the scanners' part of sites' shifts, (sites, voxels), given :meth:`beyond_chance`.

        The fewer participants, the more of a mean is chance; all of it where ``beyond`` is 0.
        """
        chance = 1.0 / (1.0 + count[:, None] * beyond)
        return shift - (self._unexplained(shift) * chance).astype(np.float32) @ self.people.patterns

    def coefficients(self, shift: FloatArray, ridge: FloatArray) -> tuple[FloatArray, float]:
        """Return the coefficients of the scanners' patterns for one site, (patterns,), and what they explain.

        The latter as a squared Mahalanobis length; ``ridge`` is the penalty.
        """
        right = self._right(shift[None], products(shift[None], self.people.patterns))[0]
        b = right @ np.linalg.inv(self._information + np.diag(ridge))
        return b, float(b @ self._information @ b)

    def _right(self, shift: FloatArray, seen: FloatArray) -> FloatArray:
        """Return A Σ⁻¹ d."""
        return products(shift, self.scanner) / self.people.rest + (seen * self._extra) @ self._along.T

    def _unexplained(self, shift: FloatArray) -> FloatArray:
        """Return P (d − A b), (sites, K)."""
        seen = products(shift, self.people.patterns)
        return seen - self._right(shift, seen) @ self._inverse @ self._along


def products(first: NDArray[np.floating], second: NDArray[np.floating]) -> FloatArray:
    """Return first @ second.T in double precision, some voxels at a time."""
    total = np.zeros((len(first), len(second)))
    for part in pieces(first.shape[1], len(first) + len(second)):
        total += first[:, part].astype(np.float64) @ second[:, part].astype(np.float64).T
    return total
