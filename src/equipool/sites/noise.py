r"""Noise of each scanner, reduced by a Wiener filter on the finest detail.

A site measures :math:`m(c) + \gamma_s + e + n_s` with white noise :math:`n_s` of variance :math:`\sigma_s^2`.
Of the residual r, with S smoothing within the brain, the best linear estimate of what is no noise is

.. math:: Sr + k_{sv} (r - Sr), \qquad k_{sv} = 1 - \frac{c\,\sigma_s^2}{\operatorname{var}_s (r - Sr)_v},

where c is the variance that white noise of variance 1 has in r − Sr. The noise is estimated where the finest
pattern varies least between participants (after Donoho, who takes it from the finest wavelets).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipool import distributed
from equipool.sites.effect import SiteEffect, array
from equipool.sites.scans import Box

__all__ = ["DetailSums", "Noise"]

FloatArray = NDArray[np.float64]

QUIET = 0.1  # quantile of voxels that have next to no anatomy in the finest pattern
MIN_KEPT = 0.1  # least share of the detail that stays
MAX_ROUNDS = 500  # of the fixed-point iteration of redo, which gains a digit in at most 22


@dataclass(frozen=True, eq=False)
class DetailSums:
    """Sums over scans of one site or several, (sites, ...): what noise is estimated from."""

    n: FloatArray  # (sites,)
    finest: FloatArray  # (sites, voxels in the middle), squares of the finest pattern
    detail: FloatArray  # (sites, voxels), squares of what smoothing takes away

    @classmethod
    def of(cls, residuals: FloatArray, detail: FloatArray, dummies: FloatArray, box: Box) -> Self:
        """Return the sums over some scans; ``dummies`` (rows, sites) say which site each is of."""
        return cls(dummies.sum(axis=0), dummies.T @ box.finest(residuals) ** 2, dummies.T @ detail**2)

    @classmethod
    def total(cls, parts: Sequence[Self], n_sites: int, box: Box) -> Self:
        """Return the sums over parts and processes."""
        nothing = np.zeros((1, len(box.inside)))
        none = cls.of(nothing, nothing, np.zeros((1, n_sites)), box)
        each = zip(*((one.n, one.finest, one.detail) for one in (none, *parts)), strict=True)
        return cls(*(distributed.summed(sum(values)) for values in each))


@dataclass(frozen=True, eq=False)
class Noise(SiteEffect):
    """The noise of each site; the equation is that of this module.

    Like the gain it is a property of every scan. Held-out likelihood tells noise from anatomy only where
    sites differ in it, so it is no choice of the rule: it is reduced, or with ``denoise=False`` it is not.
    """

    name: ClassVar[str] = "noise"

    level: FloatArray = array("sites")  # σ, standard deviation at gain 1
    kept: FloatArray = array("sites", "features", positive=True)  # k

    @classmethod
    def identity(cls, n_sites: int, n_features: int) -> Self:
        """Return sites without noise."""
        return cls(np.zeros(n_sites), np.ones((n_sites, n_features)))

    @property
    def is_identity(self) -> bool:
        """Whether all detail is kept."""
        return bool((self.kept == 1).all())

    @classmethod
    def fit(cls, sums: DetailSums, box: Box) -> Self:
        """Estimate the noise of each site; of a single participant none can be told from anatomy."""
        n = np.maximum(sums.n, 1.0)[:, None]
        # A mask so thin that no two voxels lie side by side in all directions tells nothing of the noise.
        finest = sums.finest / n if sums.finest.shape[1] else np.zeros((len(n), 1))
        variance = np.where(n > 1, np.quantile(finest, QUIET, axis=1, keepdims=True), 0.0)
        # Variances of one site's voxels are rough; neighbours have much the same.
        detail = np.maximum(box.smooth(sums.detail / n), 1e-300)
        kept = np.clip(1 - variance * box.detail_of_noise() / detail, MIN_KEPT, 1.0)
        return cls(np.sqrt(variance[:, 0]), kept)

    def undo(self, rows: FloatArray, at: Any) -> FloatArray:
        """Return what of the scans is no noise."""
        residuals = rows - at.predicted
        smooth = at.box.smooth(residuals)
        return at.predicted + smooth + self.kept[at.site] * (residuals - smooth)

    def redo(self, rows: FloatArray, at: Any) -> FloatArray:
        """Return scans whose detail was not reduced."""
        goal, kept = rows - at.predicted, self.kept[at.site]
        residuals = goal
        for _ in range(MAX_ROUNDS):
            before = residuals
            residuals = goal + (1 - kept) * (residuals - at.box.smooth(residuals))
            if np.abs(residuals - before).max(initial=0.0) < 1e-12:
                break
        return at.predicted + residuals

    def log_det(self, rows: FloatArray, at: Any) -> FloatArray:
        """Return log |∂ undo(rows) / ∂ rows|, the approximation for a brain without edges."""
        total: FloatArray = at.box.log_det_of_detail(self.kept).sum(axis=1)[at.site]
        return total

    def add_site(self, rows: FloatArray, at: Any) -> Self:
        """Return the effect with a site whose noise is estimated from its rows."""
        if self.is_identity:
            return type(self).identity(len(self.level) + 1, self.kept.shape[1])
        residuals = rows - at.predicted
        detail = residuals - at.box.smooth(residuals)
        one = Noise.fit(DetailSums.of(residuals, detail, np.ones((len(rows), 1)), at.box), at.box)
        return replace(self, level=np.append(self.level, one.level), kept=np.vstack([self.kept, one.kept]))
