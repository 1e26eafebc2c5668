"""The model of a table: the trend that all sites share, and the composition of what each site does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipool.groups.trend import Trend
from equipool.sites.coupling import Coupling
from equipool.sites.covariance import Covariance
from equipool.sites.design import Design
from equipool.sites.effect import Composition, Context, array
from equipool.sites.passes import pieces, site_rows
from equipool.sites.shift_scale import SharedTrend, winsorise
from equipool.sites.warp import Warp

__all__ = ["SiteModel", "fit_site_model"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class SiteModel:
    """z = T_s(m(c) + e), in standardised features.

    Attributes
    ----------
    trend
        m.
    composition
        T_s: warp ∘ shift and scale ∘ covariance ∘ coupling.
    n_participants
        (sites,).
    winsorised
        (sites, features): how many participants' values were winsorised when effects were estimated.
    curvature
        The penalty on the trend's curvature.
    """

    trend: Trend
    composition: Composition
    n_participants: FloatArray = array("sites")
    winsorised: FloatArray = array("sites", "features")
    curvature: float

    def at(self, c: FloatArray, site: IntArray | int, predicted: FloatArray | None = None) -> Context:
        """Return the context of rows at covariates c and a site."""
        predicted = self.trend(c) if predicted is None else predicted
        return Context(np.broadcast_to(np.asarray(site, dtype=np.intp), len(c)), c, predicted)

    def undo(self, z: FloatArray, at: Context) -> FloatArray:
        """Return the rows as the pool would have measured them, some rows at a time."""
        return self._in_pieces(z, at, self.composition.undo)

    def redo(self, values: FloatArray, at: Context) -> FloatArray:
        """Return the rows as their site would have measured them."""
        return self._in_pieces(values, at, self.composition.redo)

    @property
    def effects(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What each site does at the mean covariates, each (sites, features), in measured units.

        Its shift from the mean of all sites, the shift's standard error before shrinkage (one that leans on a
        prior of few sites would be too narrow), and its scale.
        """
        n_sites, warp, affine = (
            len(self.n_participants),
            self.composition["warp"],
            self.composition["shift and scale"],
        )
        centre = np.repeat(self.trend.centre[None], n_sites, axis=0)
        covariates = np.zeros((n_sites, len(self.trend.basis.knots)))
        at = Context(np.arange(n_sites), covariates, centre)
        level = Composition((warp, affine)).redo(centre, at)
        slope = np.vstack([warp.slope(level[[s]], s) for s in range(n_sites)])
        scale = affine.scale / slope
        error = affine.error * (scale if affine.scales_trend else 1 / slope)
        weight = self.n_participants / max(self.n_participants.sum(), 1e-12)
        return level - weight @ level, error, scale

    def log_likelihood(self, z: FloatArray, c: FloatArray) -> FloatArray:
        """Return the log-likelihood of each row at each site, (rows, sites), up to a constant."""
        predicted, covariance = self.trend(c), self.composition["covariance"]
        result = np.empty((len(z), len(self.n_participants)))
        deviation = np.sqrt(np.maximum(self.composition["shift and scale"].variance, 1e-12))
        whiten = np.diag(1 / deviation) if covariance.is_identity else covariance.whiten
        for s in range(result.shape[1]):
            at = self.at(c, s, predicted)
            white = (self.composition.undo(z, at) - predicted) @ whiten
            result[:, s] = self.composition.log_det(z, at) - 0.5 * (white**2).sum(axis=1)
        return result

    def add_site(self, z: FloatArray, c: FloatArray) -> SiteModel:
        """Return a model with one more site, estimated from its own rows; NaN cells were not measured."""
        at = self.at(c, len(self.n_participants))
        return replace(
            self,
            composition=self.composition.add_site(z, at),
            n_participants=np.append(self.n_participants, float(len(z))),
            winsorised=np.vstack([self.winsorised, np.zeros(z.shape[1])]),
        )

    def _in_pieces(self, rows: FloatArray, at: Context, function: Any) -> FloatArray:
        result = rows.copy()
        # Sites that were not seen at fit have a negative index, and stay as they are.
        for some in site_rows(at.site + 1, len(self.n_participants) + 1)[1:]:
            for part in pieces(len(some), rows.shape[1]):
                result[some[part]] = function(rows[some[part]], at[some[part]])
        return result


def fit_site_model(
    z: FloatArray,
    design: Design,
    *,
    shrinkage: float | None = None,
    warp: bool | None = None,
    coupling: bool | None = None,
    curvature: float | None = None,
    seed: int = 0,
) -> SiteModel:
    """Fit the model to standardised features; ``None``: chosen by the log-likelihood of held-out participants.

    Each effect is estimated from values out of which the outer ones are undone. The trend is fitted together with
    shift and scale. A target is allowed for there alone: residuals keep its effect, or their covariance would be
    too small along it, and dividing by that covariance would make chance associations grow.
    """
    n_sites, p = design.n_sites, z.shape[1]
    winsorised = winsorise(z, design)
    z = winsorised.z
    shared = SharedTrend.fit(z, design, curvature=curvature)
    warping = Warp.fit(z, design, shared, wanted=warp)
    if not warping.is_identity:
        z = Composition((warping,)).undo(z, Context(design.site, design.covariates, z[:, :0]))
        shared = SharedTrend.fit(z, design, curvature=curvature)
    affine = shared.whole.effect()
    model = SiteModel(
        shared.trend,
        Composition((warping, affine, Covariance.identity(n_sites, p), Coupling.identity(n_sites, p))),
        design.n_participants,
        winsorised.count,
        shared.curvature,
    )
    at = shared.at(slice(None), design)
    residuals = _centred_by_site(affine.undo(z, at) - at.predicted, design)
    covariance = Covariance.fit(residuals, design, shrinkage=shrinkage)
    model = replace(model, composition=model.composition.with_effect(covariance))
    residuals = covariance.undo(at.predicted + residuals, at) - at.predicted
    found = Coupling.fit(residuals, design, wanted=coupling, seed=seed)
    return replace(model, composition=model.composition.with_effect(found))


def _centred_by_site(residuals: FloatArray, design: Design) -> FloatArray:
    """Return residuals without what shrinkage of the shifts leaves of a site's mean."""
    for rows in site_rows(design.site, design.n_sites):
        if len(rows):
            residuals[rows] -= np.average(residuals[rows], axis=0, weights=design.weight[rows])
    return residuals
