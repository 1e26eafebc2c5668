"""Each site's covariance of residuals, relative to the pool's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from equipool.sites.design import MAX_FEATURES, TINY, Design, gram, site_rows, winsorised
from equipool.sites.effect import Context, FloatArray, IntArray, SiteEffect, array, choose
from equipool.sites.missing import completed

SHRINKAGES = (np.inf, 10000.0, 3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0)  # k, the simplest first
POOLED_SHRINKAGES = np.geomspace(0.5, 1e-4, 9)  # of the pool's correlations to none


@dataclass(frozen=True, eq=False)
class Covariance(SiteEffect):
    r"""The covariance of a site's residuals, shrunk to the pool's.

    With the pooled covariance :math:`\Sigma = C^\top C`, its inverse root :math:`W`, and :math:`n_s + 1`
    participants,

    .. math:: T_s(m + e) = m + C^\top A_s^{1/2} W e, \qquad
              A_s = \frac{n_s}{n_s + k}\,\hat A_s + \frac{k}{n_s + k}\,I,

    where :math:`\hat A_s` is the covariance of the site's whitened residuals :math:`W e`, kept as its
    principal directions. The larger the shrinkage :math:`k`, the less is removed. It is chosen by the
    likelihood of held-out participants, and infinite where no site's covariance raises it. What winsorising
    cuts off a residual is added again; where that is nothing, the inverse is exact.
    """

    name: ClassVar[str] = "covariance"
    acts: ClassVar[tuple[str, ...]] = ("shrinkage",)

    shrinkage: float = field(metadata={"above": 0.0, "most": math.inf, "neutral": math.inf})  # k
    whiten: FloatArray = array("features", "dimensions")  # W
    colour: FloatArray = array("dimensions", "features")  # C, its inverse
    vectors: FloatArray = array("directions", "dimensions")  # of all sites
    values: FloatArray = array("directions", positive=True)  # variances along them
    start: IntArray = array("sites+1", neutral=0)  # where each site's directions begin
    rest: FloatArray = array("sites", positive=True)  # variance in all other directions
    deviation: FloatArray = array("features", neutral=1.0)  # of residuals

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, directions that are not dealt out to the sites in order."""
        if self.start[0] != 0 or self.start[-1] != len(self.values) or (np.diff(self.start) < 0).any():
            raise ValueError("start")

    @classmethod
    def fit(cls, residuals: FloatArray, design: Design, *, shrinkage: float | None = None) -> Self:
        """Estimate it from residuals (rows, features); ``None``: k is chosen on held-out participants."""
        n_sites, p = design.n_sites, residuals.shape[1]
        identity = cls.identity(n_sites, p)
        if n_sites < 2 or not 2 <= p <= MAX_FEATURES or shrinkage == np.inf:
            return identity
        deviation = design.deviation(residuals)
        residuals = winsorised(residuals, deviation)
        chosen, k = _chosen_shrinkages(residuals, design, shrinkage)
        if not np.isfinite(k):
            return identity
        n = np.maximum(design.n_participants - 1, 0.0)
        whiten, colour = _Pool.of(residuals, design).roots(chosen)
        white = residuals @ whiten
        sites = [_principal(white[rows], design.weight[rows]) for rows in site_rows(design.site, n_sites)]
        start = np.cumsum([0, *(len(squares) for _, squares in sites)]).astype(np.intp)
        vectors, squares = (np.concatenate(parts) for parts in zip(*sites, strict=True))
        values = (squares + k) / (np.repeat(n, np.diff(start)) + k)
        return cls(k, whiten, colour, vectors, values, start, k / (n + k), deviation)

    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values with the pool's covariance."""
        return self._multiplied(rows, at, -0.5)

    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values with the site's covariance."""
        return self._multiplied(rows, at, 0.5)

    def log_det(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return − ½ log |A_s|."""
        length = np.diff(self.start)
        along = np.add.reduceat(np.append(np.log(self.values), 0.0), self.start[:-1]) * (length > 0)
        return -0.5 * (along + (self.whiten.shape[1] - length) * np.log(self.rest))[at.site]

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Estimate a site's covariance from its rows."""
        if self.is_identity:
            return self.identity(len(self.rest) + 1, len(self.deviation))
        n, k, residuals = len(rows) - 1, self.shrinkage, winsorised(rows - at.predicted, self.deviation)
        measured = ~np.isnan(residuals)
        mean = np.where(measured, residuals, 0.0).sum(axis=0) / np.maximum(measured.sum(axis=0), 1)
        white = completed(residuals - mean, self.precision) @ self.whiten
        vectors, squares = _principal(white, np.ones(len(rows)))
        return replace(
            self,
            vectors=np.vstack([self.vectors, vectors]),
            values=np.append(self.values, (squares + k) / (n + k)),
            start=np.append(self.start, self.start[-1] + len(squares)),
            rest=np.append(self.rest, 1 / (1 + n / k)),
        )

    @cached_property
    def precision(self) -> FloatArray:
        """The inverse of the pooled covariance, Σ⁻¹."""
        return np.asarray(self.whiten @ self.whiten.T)

    def _multiplied(self, rows: FloatArray, at: Context, power: float) -> FloatArray:
        """Multiply winsorised residuals by A_s to a power."""
        residuals, result = winsorised(rows - at.predicted, self.deviation), rows.copy()
        if np.isnan(residuals).any():
            residuals = completed(residuals, self.precision)
        white = residuals @ self.whiten
        for s in np.unique(at.site):
            some, part = at.site == s, slice(self.start[s], self.start[s + 1])
            vectors, rest = self.vectors[part], self.rest[s] ** power
            along = (white[some] @ vectors.T) * (self.values[part] ** power - rest)
            result[some] += ((rest - 1) * white[some] + along @ vectors) @ self.colour
        return result


@dataclass(frozen=True, eq=False)
class _Pool:
    """The eigenvalues and eigenvectors of the pooled correlation of residuals, and their deviations."""

    deviation: FloatArray
    values: FloatArray  # (shares, p), of the correlation mixed with the identity by POOLED_SHRINKAGES
    vectors: FloatArray

    @classmethod
    def of(cls, residuals: FloatArray, design: Design) -> Self:
        freedom = np.maximum(design.n_participants - 1, 0.0).sum()
        covariance = gram(residuals, design.weight) / max(freedom, 1.0)
        deviation = np.sqrt(np.maximum(np.diag(covariance), TINY))
        values, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
        share = POOLED_SHRINKAGES[:, None]
        return cls(deviation, np.maximum((1 - share) * values + share, TINY), vectors)

    def roots(self, chosen: int) -> tuple[FloatArray, FloatArray]:
        """Return W and C."""
        root, vectors = np.sqrt(self.values[chosen]), self.vectors
        whiten = (vectors / root) @ vectors.T / self.deviation[:, None]
        return whiten, (vectors * root) @ vectors.T * self.deviation

    def log_likelihoods(self, residuals: FloatArray, weight: FloatArray) -> FloatArray:
        """Return the log-likelihood of residuals up to a constant, (shares,)."""
        squares = weight @ (residuals / self.deviation @ self.vectors) ** 2
        return -0.5 * (squares / self.values + weight.sum() * np.log(self.values)).sum(axis=1)


def _principal(white: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return principal directions (r, dimensions) and sums of squares along them (r,).

    By the smaller of the two Gram matrices.
    """
    rows = white * np.sqrt(weight)[:, None]
    wide = len(rows) < rows.shape[1]
    squares, vectors = np.linalg.eigh(rows @ rows.T if wide else rows.T @ rows)
    kept = squares > TINY * squares.max(initial=TINY)
    squares, vectors = squares[kept], vectors[:, kept]
    return (rows.T @ vectors / np.sqrt(squares)).T if wide else vectors.T, squares


def _chosen_shrinkages(residuals: FloatArray, design: Design, k: float | None) -> tuple[int, float]:
    """Return which of the pool's shrinkages, and k, by the log-likelihood of held-out participants.

    The pool's comes first: what too much or too little of it costs would be taken for the sites'. It removes
    nothing, so the most likely one is taken; only k says whether there is an effect.
    """
    pools, total, likelihoods = [], np.zeros(len(POOLED_SHRINKAGES)), []
    for fold in design.folds():
        fitted, a, judged, b = _around_training_means(residuals, design, *fold)
        pools.append(_Pool.of(a, fitted))
        total += pools[-1].log_likelihoods(b, judged.weight)
        del a, b  # as long as the table
    chosen = int(total.argmax())
    if k is not None or not pools:
        return chosen, np.inf if k is None else float(k)
    for fold, pool in zip(design.folds(), pools, strict=True):
        fitted, a, judged, b = _around_training_means(residuals, design, *fold)
        (whiten, _), n = pool.roots(chosen), np.maximum(fitted.n_participants - 1, 0.0)
        for s in np.unique(judged.site):
            of_site, held = fitted.site == s, judged.site == s
            directions = _principal(a[of_site] @ whiten, fitted.weight[of_site])
            likelihoods.append(_log_likelihoods(*directions, n[s], b[held] @ whiten, judged.weight[held]))
        del a, b
    return chosen, SHRINKAGES[choose(np.array(likelihoods).T)]


def _around_training_means(
    residuals: FloatArray, design: Design, train: IntArray, held: IntArray
) -> tuple[Design, FloatArray, Design, FloatArray]:
    """Return designs and residuals of training and held-out participants, around the former's site means.

    The means over all participants depend on the held-out ones.
    """
    fitted, judged, n = design.only(train), design.only(held), design.only(train).n_participants
    a, b = residuals[train], residuals[held]
    means = fitted.site_means(a)
    a -= means[fitted.site]
    b -= means[judged.site]
    b *= np.sqrt(n / (n + 1))[judged.site, None]  # the mean's variance adds to theirs
    return fitted, a, judged, b


def _log_likelihoods(
    vectors: FloatArray, squares: FloatArray, n: float, b: FloatArray, b_weight: FloatArray
) -> FloatArray:
    """Return the log-likelihood of a site's held-out whitened residuals b, by shrinkage."""
    along, total = b_weight @ (b @ vectors.T) ** 2, b_weight @ (b**2).sum(axis=1)
    k, dimensions = np.array(SHRINKAGES[1:])[:, None], b.shape[1] - len(squares)
    values, rest = (squares + k) / (n + k), k[:, 0] / (n + k[:, 0])
    determinants = np.log(values).sum(axis=1) + dimensions * np.log(rest)
    distances = (along / values).sum(axis=1) + (total - along.sum()) / rest
    return -0.5 * np.append(total, distances + b_weight.sum() * determinants)
