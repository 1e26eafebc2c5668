r"""Each site's covariance of residuals, relative to the pool's.

With the pooled covariance :math:`\Sigma = C^\top C` and whitened residuals :math:`w = W e`, a site makes

.. math:: T_s(m + e) = m + C^\top A_s^{1/2} W e, \qquad
          A_s = \frac{n_s}{n_s + k}\,\hat A_s + \frac{k}{n_s + k}\,I,

where :math:`\hat A_s` is the covariance of the site's whitened residuals and :math:`k`, in equivalent
participants, shrinks it to the pool's. The larger :math:`k`, the less is removed. The value with which held-out
participants are most likely is taken, and none (:math:`k = \infty`) where no covariance helps them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from equipool.sites.design import Design
from equipool.sites.effect import Context, SiteEffect, array, choose
from equipool.sites.passes import gram, site_rows

__all__ = ["Covariance"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

SHRINKAGES = (np.inf, 10000.0, 3000.0, 1000.0, 300.0, 100.0, 30.0)  # k, the simplest first
MAX_FEATURES = 2000  # beyond, covariances are left as they are
CLIP_AT = 4.0  # standard deviations; a failed value does not change a participant's other features


@dataclass(frozen=True, eq=False)
class Covariance(SiteEffect):
    """The map above, with a site's covariance as principal directions in whitened residuals.

    Attributes
    ----------
    whiten, colour
        W (features, dimensions) and C (dimensions, features), each the other's inverse on its range.
    vectors, values
        The sites' directions (directions, dimensions) and the shrunk variances along them (directions,).
    start
        (sites+1,): where each site's directions begin.
    rest
        (sites,): the variance in all directions off these.
    deviation
        (features,): standard deviation of residuals.
    shrinkage
        k.
    """

    name: ClassVar[str] = "covariance"

    whiten: FloatArray = array("features", "dimensions")
    colour: FloatArray = array("dimensions", "features")
    vectors: FloatArray = array("directions", "dimensions")
    values: FloatArray = array("directions", positive=True)
    start: IntArray = array("sites+1", integer=True)
    rest: FloatArray = array("sites", positive=True)
    deviation: FloatArray = array("features")
    shrinkage: float

    @classmethod
    def identity(cls, n_sites: int, n_features: int) -> Self:
        """Return sites whose covariances are the pool's."""
        none = np.empty((0, 0))
        start = np.zeros(n_sites + 1, dtype=np.intp)
        empty = np.empty((n_features, 0))
        return cls(empty, empty.T, none, np.empty(0), start, np.ones(n_sites), np.ones(n_features), np.inf)

    @property
    def is_identity(self) -> bool:
        """Whether no site's covariance differs."""
        return not np.isfinite(self.shrinkage)

    @classmethod
    def fit(cls, residuals: FloatArray, design: Design, *, shrinkage: float | None = None) -> Self:
        """Estimate it from residuals (rows, features); ``shrinkage=None``: chosen on held-out participants."""
        n_sites, p = design.n_sites, residuals.shape[1]
        identity = cls.identity(n_sites, p)
        if n_sites < 2 or not 2 <= p <= MAX_FEATURES or shrinkage == np.inf:
            return identity
        deviation = np.sqrt(np.maximum(design.weight @ residuals**2 / design.weight.sum(), 1e-12))
        clipped = np.clip(residuals, -CLIP_AT * deviation, CLIP_AT * deviation)
        if shrinkage is None:
            shrinkage = _chosen_shrinkage(clipped, design)
        if not np.isfinite(shrinkage):
            return identity
        whiten, colour = _roots(clipped, design.weight)
        white, n, parts = clipped @ whiten, design.n_participants, []
        for s, rows in enumerate(site_rows(design.site, n_sites)):
            parts.append(_directions(white[rows], design.weight[rows], n[s], shrinkage))
        return cls(
            whiten,
            colour,
            np.vstack([vectors for vectors, _ in parts]),
            np.concatenate([values for _, values in parts]),
            np.cumsum([0, *(len(values) for _, values in parts)]).astype(np.intp),
            shrinkage / (n + shrinkage),
            deviation,
            float(shrinkage),
        )

    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values with the pool's covariance."""
        return self._multiplied(rows, at, -0.5)

    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values with the site's covariance."""
        return self._multiplied(rows, at, 0.5)

    def log_det(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return − ½ log |A_s|."""
        log_values, length = np.log(self.values), np.diff(self.start)
        along = np.array([log_values[a:b].sum() for a, b in zip(self.start, self.start[1:], strict=False)])
        determinant = along + (self.whiten.shape[1] - length) * np.log(self.rest)
        total: FloatArray = -0.5 * determinant[at.site]
        return total

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Estimate a site's covariance from its rows."""
        if self.is_identity:
            return replace(self, start=np.append(self.start, self.start[-1]), rest=np.append(self.rest, 1.0))
        n, residuals = len(rows), self._clipped(np.nan_to_num(rows - at.predicted))
        vectors, values = np.empty((0, self.whiten.shape[1])), np.empty(0)
        rest = 1.0
        if n > 2:
            white = (residuals - residuals.mean(axis=0)) @ self.whiten
            vectors, values = _directions(white, np.ones(n), n, self.shrinkage)
            rest = self.shrinkage / (n + self.shrinkage)
        return replace(
            self,
            vectors=np.vstack([self.vectors, vectors]),
            values=np.append(self.values, values),
            start=np.append(self.start, self.start[-1] + len(values)),
            rest=np.append(self.rest, rest),
        )

    def _clipped(self, residuals: FloatArray) -> FloatArray:
        return np.clip(residuals, -CLIP_AT * self.deviation, CLIP_AT * self.deviation)

    def _multiplied(self, rows: FloatArray, at: Context, power: float) -> FloatArray:
        """Multiply clipped residuals by A_s to a power; what was clipped is added again."""
        if self.is_identity:
            return rows
        clipped = self._clipped(rows - at.predicted)
        white, result = clipped @ self.whiten, rows.copy()
        for s in np.unique(at.site):
            some, part = at.site == s, slice(self.start[s], self.start[s + 1])
            vectors, rest = self.vectors[part], self.rest[s] ** power
            factors = self.values[part] ** power - rest
            change = (rest - 1) * white[some] + ((white[some] @ vectors.T) * factors) @ vectors
            result[some] += change @ self.colour
        return result


def _roots(residuals: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return W and C of the pooled covariance, its correlations shrunk after Ledoit and Wolf."""
    from sklearn.covariance import ledoit_wolf_shrinkage

    covariance = gram(residuals, residuals, weight) / weight.sum()
    deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-12))
    alpha = max(float(ledoit_wolf_shrinkage(residuals / deviation, assume_centered=True)), 0.02)
    correlation = (1 - alpha) * covariance / np.outer(deviation, deviation)
    values, vectors = np.linalg.eigh(correlation + alpha * np.eye(len(deviation)))
    values = np.maximum(values, 1e-6)
    colour = (vectors * np.sqrt(values)) @ vectors.T * deviation
    whiten = ((vectors / np.sqrt(values)) @ vectors.T) / deviation[:, None]
    return whiten, colour


def _directions(
    white: FloatArray, weight: FloatArray, n: float, shrinkage: float
) -> tuple[FloatArray, FloatArray]:
    """Return a site's principal directions (r, dimensions) and the shrunk variances along them (r,)."""
    vectors, squares = _principal(white * np.sqrt(weight)[:, None])
    return vectors, (squares + shrinkage) / (n + shrinkage)


def _principal(rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the right singular vectors of rows and the squared singular values, by the smaller Gram matrix."""
    wide = len(rows) < rows.shape[1]
    squares, vectors = np.linalg.eigh(rows @ rows.T if wide else rows.T @ rows)
    kept = squares > 1e-12 * max(squares.max(initial=0.0), 1e-300)
    squares, vectors = squares[kept], vectors[:, kept]
    return (rows.T @ vectors / np.sqrt(squares)).T if wide else vectors.T, squares


def _chosen_shrinkage(residuals: FloatArray, design: Design) -> float:
    """Return k by the log-likelihood of held-out participants of each site."""
    likelihoods: list[list[float]] = []
    for train, held in design.folds():
        whiten, _ = _roots(residuals[train], design.weight[train])
        sites = [site_rows(design.site[rows], design.n_sites) for rows in (train, held)]
        for fitted, judged in zip(*sites, strict=True):
            if not len(judged):
                continue
            a, b = train[fitted], held[judged]
            n, white = design.weight[a].sum(), residuals[b] @ whiten
            vectors, squares = _principal((residuals[a] @ whiten) * np.sqrt(design.weight[a])[:, None])
            along, total = (
                design.weight[b] @ (white @ vectors.T) ** 2,
                design.weight[b] @ (white**2).sum(axis=1),
            )
            count, dimensions = design.weight[b].sum(), white.shape[1]
            part = [-0.5 * float(total)]
            for k in SHRINKAGES[1:]:
                values, rest = (squares + k) / (n + k), k / (n + k)
                determinant = np.log(values).sum() + (dimensions - len(values)) * np.log(rest)
                distance = along @ (1 / values) + (total - along.sum()) / rest
                part.append(-0.5 * float(distance + count * determinant))
            likelihoods.append(part)
    return SHRINKAGES[choose(np.array(likelihoods).T)] if likelihoods else float(np.inf)
