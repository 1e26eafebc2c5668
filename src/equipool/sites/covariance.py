"""Each site's covariance of residuals, relative to the pool's."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np

from equipool.sites.design import MAX_FEATURES, TINY, Design, gram, site_rows, site_sums, winsorised
from equipool.sites.effect import Context, FloatArray, IntArray, SiteEffect, array, choose
from equipool.sites.missing import completed
from equipool.sites.shift_scale import shrunken_scales

SHRINKAGES = (np.inf, 1000.0, 300.0, 100.0, 30.0, 10.0)  # k, the simplest first
POOLED_SHRINKAGES = np.geomspace(0.5, 1e-4, 9)  # of the pool's correlations to none


@dataclass(frozen=True, eq=False)
class Covariance(SiteEffect):
    r"""The covariance of a site's residuals, shrunk to the pool's.

    The pooled covariance is :math:`\Sigma = C^\top C`, and :math:`W = C^{-1}` turns residuals into scores on
    its principal components, of variance 1. With :math:`n_s + 1` participants,

    .. math:: T_s(m + e) = m + C^\top S_s B_s^{1/2} W e, \qquad
              B_s = \frac{n_s}{n_s + k}\,\hat B_s + \frac{k}{n_s + k}\,I.

    :math:`S_s` is diagonal: the site's standard deviation of each score, shrunk by empirical Bayes as the
    scales of features are, such that the pool's variance of a score is the same before and after.
    :math:`\hat B_s` is the covariance of the site's scores divided by it, kept as its principal directions;
    the larger the shrinkage :math:`k`, the less of it is removed.

    Participants from whom covariances are estimated lose more variance by it than others do. What is kept
    beside their residuals, like the effect of a covariate, would then be tested against too little noise.
    Whether there is an effect, and k, are therefore chosen by the likelihood that scores of held-out
    participants have under the variance that is left in the others.
    What winsorising cuts off a residual is added again; where that is nothing, the inverse is exact.
    """

    name: ClassVar[str] = "covariance"
    acts: ClassVar[tuple[str, ...]] = ("scale", "rest")

    shrinkage: float = field(metadata={"above": 0.0, "most": math.inf, "neutral": math.inf})  # k
    scale: FloatArray = array("sites", "dimensions", positive=True)  # S
    scale_weight: FloatArray = array("dimensions", positive=True)  # k of its shrinkage
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
        share, k = _chosen_shrinkages(residuals, design, shrinkage)
        if k is None:
            return identity
        whiten, colour = _Pool.of(residuals, design).roots(share)
        white = residuals @ whiten
        return next(cls._of_scores(white, design, (k,), whiten=whiten, colour=colour, deviation=deviation))

    @classmethod
    def _of_scores(
        cls, white: FloatArray, design: Design, shrinkages: Sequence[float], **others: FloatArray
    ) -> Iterator[Self]:
        """Estimate it from scores (rows, dimensions), with each of the shrinkages."""
        n = np.maximum(design.n_participants - 1, 0.0)
        squares = site_sums(white**2, design.site, design.n_sites, design.weight)
        scale, others["scale_weight"] = shrunken_scales(squares, n[:, None])
        scale = scale * np.sqrt(_ratio((squares / scale**2).sum(axis=0), squares.sum(axis=0), n.sum()))
        start, vectors, squares = np.zeros(design.n_sites + 1, dtype=np.intp), white[:0], np.empty(0)
        for k in shrinkages:
            if np.isfinite(k) and not len(squares):
                members = zip(site_rows(design.site, design.n_sites), scale, strict=True)
                sites = [_principal(white[rows] / of_site, design.weight[rows]) for rows, of_site in members]
                start = np.cumsum([0, *(len(squares) for _, squares in sites)]).astype(np.intp)
                vectors, squares = (np.concatenate(parts) for parts in zip(*sites, strict=True))
            values, rest = (squares + k) / (np.repeat(n, np.diff(start)) + k), 1 / (1 + n / k)
            yield cls(k, scale, vectors=vectors, values=values, start=start, rest=rest, **others)

    def _undone_squares(self, white: FloatArray, design: Design) -> FloatArray:
        """Return the sums of squares of undone scores, (sites, dimensions)."""
        members = site_rows(design.site, design.n_sites)
        return np.array([design.weight[i] @ self._pooled(white[i], design.site[i]) ** 2 for i in members])

    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values with the pool's covariance."""
        return self._changed(rows, at, self._pooled)

    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return the values with the site's covariance."""
        return self._changed(rows, at, self._of_site)

    def log_det(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return − log |S_s| − ½ log |B_s|."""
        return self._log_dets[at.site]

    @property
    def _log_dets(self) -> FloatArray:
        length = np.diff(self.start)
        along = np.add.reduceat(np.append(np.log(self.values), 0.0), self.start[:-1]) * (length > 0)
        directions = along + (self.whiten.shape[1] - length) * np.log(self.rest)
        return -(np.log(self.scale).sum(axis=1) + 0.5 * directions)

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Estimate a site's covariance from its rows."""
        if self.is_identity:
            return self.identity(len(self.rest) + 1, len(self.deviation))
        n, k, residuals = len(rows) - 1, self.shrinkage, winsorised(rows - at.predicted, self.deviation)
        measured = ~np.isnan(residuals)
        mean = np.where(measured, residuals, 0.0).sum(axis=0) / np.maximum(measured.sum(axis=0), 1)
        white = completed(residuals - mean, self.precision) @ self.whiten
        scale = np.sqrt(((white**2).sum(axis=0) + self.scale_weight) / (n + self.scale_weight))
        vectors, squares = white[:0], np.empty(0)
        if np.isfinite(k):
            vectors, squares = _principal(white / scale, np.ones(len(rows)))
        return replace(
            self,
            scale=np.vstack([self.scale, scale]),
            vectors=np.vstack([self.vectors, vectors]),
            values=np.append(self.values, (squares + k) / (n + k)),
            start=np.append(self.start, self.start[-1] + len(squares)),
            rest=np.append(self.rest, 1 / (1 + n / k)),
        )

    @cached_property
    def precision(self) -> FloatArray:
        """The inverse of the pooled covariance, Σ⁻¹."""
        return np.asarray(self.whiten @ self.whiten.T)

    def _changed(
        self, rows: FloatArray, at: Context, change: Callable[[FloatArray, IntArray], FloatArray]
    ) -> FloatArray:
        """Return rows whose scores, of winsorised residuals, are changed."""
        residuals = winsorised(rows - at.predicted, self.deviation)
        if np.isnan(residuals).any():
            residuals = completed(residuals, self.precision)
        white = residuals @ self.whiten
        return rows + (change(white, at.site) - white) @ self.colour

    def _pooled(self, white: FloatArray, site: IntArray) -> FloatArray:
        """Return scores without the site's covariance."""
        return self._multiplied(white / self.scale[site], site, -0.5)

    def _of_site(self, white: FloatArray, site: IntArray) -> FloatArray:
        """Return scores with the site's covariance."""
        return self._multiplied(white, site, 0.5) * self.scale[site]

    def _multiplied(self, white: FloatArray, site: IntArray, power: float) -> FloatArray:
        """Return scores multiplied by B_s to a power."""
        result = self.rest[site, None] ** power * white
        for s in np.unique(site[np.diff(self.start)[site] > 0]):
            some, part = site == s, slice(self.start[s], self.start[s + 1])
            vectors, change = self.vectors[part], self.values[part] ** power - self.rest[s] ** power
            result[some] += ((white[some] @ vectors.T) * change) @ vectors
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
        root = np.sqrt(self.values[chosen])
        return self.vectors / root / self.deviation[:, None], (self.vectors * root).T * self.deviation

    def log_likelihoods(self, residuals: FloatArray, weight: FloatArray) -> FloatArray:
        """Return the log-likelihood of residuals up to a constant, (shares,)."""
        squares = weight @ (residuals / self.deviation @ self.vectors) ** 2
        return -0.5 * (squares / self.values + weight.sum() * np.log(self.values)).sum(axis=1)


def _ratio(after: FloatArray, before: FloatArray, total: float) -> FloatArray:
    """Return the ratio of sums of squares; 1 where there are none, as features depend on each other."""
    varies = np.minimum(before, after) > TINY * total
    return np.asarray(np.where(varies, after, 1.0) / np.where(varies, before, 1.0))


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


def _chosen_shrinkages(residuals: FloatArray, design: Design, k: float | None) -> tuple[int, float | None]:
    """Return which of the pool's shrinkages, and k, by the log-likelihood of held-out participants.

    The pool's comes first: what too much or too little of it costs would be taken for the sites'. It removes
    nothing, so the most likely one is taken; only the second says whether there is an effect. ``None``: there
    is none. Infinite: sites differ in the variances of scores alone.
    """
    pools, total = [], np.zeros(len(POOLED_SHRINKAGES))
    for fold in design.folds():
        fitted, a, judged, b = _around_training_means(residuals, design, *fold)
        pools.append(_Pool.of(a, fitted))
        total += pools[-1].log_likelihoods(b, judged.weight)
        del a, b  # as long as the table
    share = int(total.argmax())
    if k is not None or not pools:
        return share, k
    likelihoods = []
    for fold, pool in zip(design.folds(), pools, strict=True):
        fitted, a, judged, b = _around_training_means(residuals, design, *fold)
        whiten, colour = pool.roots(share)
        a, b, site = a @ whiten, b @ whiten, judged.site
        # Where features are many, these vary more than the scores fitted on, whatever their site.
        variance = judged.weight @ b**2 / max(judged.weight.sum(), TINY)
        b /= np.sqrt(np.where(variance > TINY, variance, 1.0))
        held, before = judged.n_participants, fitted.weight @ a**2
        candidates = [-0.5 * site_sums(b**2, site, judged.n_sites, judged.weight).sum(axis=1)]
        others = {"whiten": whiten, "colour": colour, "deviation": pool.deviation}
        for effect in Covariance._of_scores(a, fitted, SHRINKAGES, **others):
            left = _ratio(effect._undone_squares(a, fitted).sum(axis=0), before, fitted.weight.sum())
            lengths = (effect._undone_squares(b, judged) / left).sum(axis=1)
            candidates.append(held * effect._log_dets - 0.5 * (held * np.log(left).sum() + lengths))
        likelihoods.append(np.array(candidates)[:, np.unique(site)])
        del a, b
    chosen = choose(np.concatenate(likelihoods, axis=1))
    return share, SHRINKAGES[chosen - 1] if chosen else None


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
