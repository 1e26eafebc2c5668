"""The model of a table: the trend that all sites share, and the composition of what each site does."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from equipool.groups.trend import Trend
from equipool.randomness import seed_for
from equipool.sites.coupling import Coupling
from equipool.sites.covariance import Covariance
from equipool.sites.design import TINY, Design, pieces, site_rows
from equipool.sites.effect import Composition, Context, FloatArray, IntArray, array, choose
from equipool.sites.missing import completed, pooled_precision
from equipool.sites.shift_scale import SharedTrend, ShiftScale, winsorise
from equipool.sites.warp import Warp


@dataclass(frozen=True, eq=False)
class SiteModel:
    r"""A site's measurement of a participant, in standardised features.

    .. math:: z = T_s(m(c) + e), \qquad T_s = \text{warp} \circ \text{shift and scale} \circ
              \text{covariance} \circ \text{coupling}
    """

    curvature: float = field(metadata={"least": 0.0})  # the penalty on the trend's curvature
    trend: Trend  # m
    composition: Composition  # T_s
    allowed_for_target: bool
    n_participants: FloatArray = array("sites")
    winsorised: FloatArray = array("sites", "features")  # how many participants' values, for estimation

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, effects that do not fit the trend or each other."""
        if [type(effect) for effect in self.composition] != [Warp, ShiftScale, Covariance, Coupling]:
            raise ValueError("composition")
        columns, coupling = self.composition["warp"].columns, self.composition["coupling"]
        if len(columns) and columns[-1] >= len(self.trend.centre):
            raise ValueError("columns")
        if not coupling.is_identity and len(coupling.middle) != len(self.trend.basis.knots):
            raise ValueError("coupling")

    def at(self, c: FloatArray, site: IntArray | int, predicted: FloatArray | None = None) -> Context:
        """Return the context of rows at covariates c and a site."""
        predicted = self.trend(c) if predicted is None else predicted
        return Context(np.broadcast_to(np.asarray(site, dtype=np.intp), len(c)), c, predicted)

    def undo(self, z: FloatArray, at: Context) -> FloatArray:
        """Return the rows as the pool would have measured them, some rows at a time."""
        return _in_pieces(self.composition.undo, z, at, len(self.n_participants))

    def redo(self, values: FloatArray, at: Context) -> FloatArray:
        """Return the rows as their site would have measured them."""
        return _in_pieces(self.composition.redo, values, at, len(self.n_participants))

    @property
    def effects(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What each site does at the mean covariates, each (sites, features), in measured units.

        Its shift from the mean of all sites, the shift's standard error before shrinkage (one that leans on a
        prior of few sites would be too narrow), and its scale.
        """
        n, warp, affine = self.n_participants, self.composition["warp"], self.composition["shift and scale"]
        centre = np.repeat(self.trend.centre[None], len(n), axis=0)
        at = Context(np.arange(len(n)), np.zeros((len(n), len(self.trend.basis.knots))), centre)
        level = Composition((warp, affine)).redo(centre, at)
        slope = np.vstack([warp.slope(level[[s]], s) for s in range(len(n))])
        scale = affine.scale / slope
        error = affine.error * (scale if affine.scales_trend else 1 / slope)
        return level - n @ level / max(n.sum(), TINY), error, scale

    def log_likelihood(self, z: FloatArray, c: FloatArray) -> FloatArray:
        """Return the log-likelihood of each row at each site, (rows, sites), up to a constant."""
        predicted, covariance = self.trend(c), self.composition["covariance"]
        deviation = np.sqrt(np.maximum(self.composition["shift and scale"].variance, TINY))
        result = np.empty((len(z), len(self.n_participants)))
        for s in range(result.shape[1]):
            at = self.at(c, s, predicted)
            known = np.where(np.isnan(z), self.composition.redo(predicted, at), z)
            residuals = self.composition.undo(known, at) - predicted
            white = residuals / deviation if covariance.is_identity else residuals @ covariance.whiten
            result[:, s] = self.composition.log_det(known, at) - 0.5 * (white**2).sum(axis=1)
        return result

    def add_site(self, z: FloatArray, c: FloatArray) -> Self:
        """Return a model with one more site, estimated from its own rows; NaN cells were not measured."""
        at = self.at(c, len(self.n_participants))
        return replace(
            self,
            composition=self.composition.add_site(z, at),
            n_participants=np.append(self.n_participants, float(len(z))),
            winsorised=np.vstack([self.winsorised, np.zeros(z.shape[1])]),
        )


def fit_site_model(
    z: FloatArray,
    design: Design,
    *,
    shrinkage: float | None = None,
    warp: bool | None = None,
    coupling: bool | None = None,
    seed: int = 0,
) -> SiteModel:
    """Fit the model to standardised features; ``None``: chosen by the likelihood of held-out participants.

    Each effect is estimated from values out of which the outer ones are undone. The trend is fitted together
    with shift and scale. A target is allowed for there alone, and if held-out participants have a higher
    likelihood with it: residuals keep its effect, or their covariance would be too small along it, and
    dividing by that covariance would make chance associations grow.

    Cells of z that are NaN were not measured: trend, shifts and scales are estimated without them, joint
    effects with draws in their place that tell nothing of a site (:mod:`equipool.sites.missing`).
    """
    design = with_target_if_likely(z, design)
    rng = np.random.default_rng(seed_for(seed, "missing cells"))
    z, count = winsorise(z, design)
    shared = SharedTrend.fit(z, design)
    affine = shared.whole.effect
    residuals = _residuals(z, design, shared, affine, rng)
    at = shared.at(slice(None), design, shared.whole)
    whole = (
        z if not np.isnan(z).any() else _in_pieces(affine.redo, at.predicted + residuals, at, design.n_sites)
    )
    warping = Warp.fit(whole, design, shared, wanted=warp)
    if not warping.is_identity:
        z = _in_pieces(warping.undo, z, at, design.n_sites)
        shared = SharedTrend.fit(z, design)
        # A warp takes shift and scale out. A new site has none, and is shrunk as the others were before.
        affine = replace(shared.whole.effect, between=affine.between, scale_weight=affine.scale_weight)
        residuals = _residuals(z, design, shared, affine, rng)
    residuals -= design.site_means(residuals)[design.site]  # what shrinkage of the shifts leaves of them
    del z, at, whole  # as long as the table
    covariance = Covariance.fit(residuals, design, shrinkage=shrinkage)
    at = Context(design.site, design.covariates, np.broadcast_to(0.0, residuals.shape))
    residuals = _in_pieces(covariance.undo, residuals, at, design.n_sites)
    return SiteModel(
        curvature=shared.curvature,
        trend=Trend(shared.basis, shared.whole.slopes[: shared.basis.width], shared.whole.centre),
        composition=Composition(
            (warping, affine, covariance, Coupling.fit(residuals, design, wanted=coupling, seed=seed))
        ),
        allowed_for_target=design.target.shape[1] > 0,
        n_participants=design.n_participants,
        winsorised=count,
    )


def with_target_if_likely(z: FloatArray, design: Design) -> Design:
    """Return the design without its target, unless held-out participants have a higher likelihood with it.

    A target that means nothing has an effect by chance. Sites that are aligned with the target held constant
    repeat that effect in the differences between sites, where it would count as more evidence.
    """
    if not design.target.shape[1]:
        return design
    without = replace(design, target=design.target[:, :0])
    shared = SharedTrend.fit(winsorise(z, without)[0], without)
    z = winsorise(z, design)[0]
    forms = [replace(SharedTrend.of(z, one), curvature=shared.curvature) for one in (without, design)]
    return design if choose(np.array([form.held_out() for form in forms])) else without


def _residuals(
    z: FloatArray, design: Design, shared: SharedTrend, affine: ShiftScale, rng: np.random.Generator
) -> FloatArray:
    """Return residuals without shift and scale; missing ones are drawn given the others of their row."""
    at = shared.at(slice(None), design, shared.whole)
    residuals = _in_pieces(affine.undo, z, at, design.n_sites)
    residuals -= at.predicted
    if np.isnan(residuals).any():
        precision = pooled_precision(residuals, design.weight)
        residuals = completed(residuals, precision, rng.standard_normal(residuals.shape))
    return residuals


def _in_pieces(
    function: Callable[[FloatArray, Context], FloatArray], rows: FloatArray, at: Context, n_sites: int
) -> FloatArray:
    """Apply an effect's map to some rows at a time; those of sites that were not seen at fit, −1, stay."""
    result = rows.copy()
    for some in site_rows(at.site + 1, n_sites + 1)[1:]:
        for part in pieces(len(some), rows.shape[1]):
            result[some[part]] = function(rows[some[part]], at[some[part]])
    return result
