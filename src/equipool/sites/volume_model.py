"""The model of volumes: the trend that all sites share, and the composition of what each scanner does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from equipool import distributed
from equipool.data.volumes import Volumes
from equipool.groups.trend import Trend
from equipool.sites.design import Design
from equipool.sites.effect import Composition, array, choose
from equipool.sites.intensity import RANGE, Intensity
from equipool.sites.scanner_patterns import (
    TERMS,
    PeoplePatterns,
    ScannersAndPeople,
    intensity_terms,
    scanner_patterns,
)
from equipool.sites.scans import (
    MAX_PARTICIPANTS,
    Box,
    ScanContext,
    blocks,
    gains,
    mean_volume,
    normalised,
    rows_of_some,
)
from equipool.sites.shift_scale import PRIOR_SITES, SharedTrend, ShiftScale

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
Mask = NDArray[np.bool_]

DARK = 0.05  # of the brain's bright end: harmonized scans approach 0 below it, and stay positive
SMALL = 5  # participants of a site; of fewer, its mean brain is mostly who they are
TURNS = 10  # of fitting trend and shifts, each given the other
NO_SCALE = 1e12  # equivalent participants of the pooled scale, so that a new site gets no scale either
SAMPLE = 2000  # voxels drawn at random, on which the trend's curvature is chosen


@dataclass(frozen=True, eq=False)
class SiteDiscriminant:
    """Predicts the site from a scan at gain 1: a linear discriminant along the sites' shifts."""

    centre: FloatArray = array("features")
    shift: FloatArray = array("sites", "features")
    axes: FloatArray = array("sites", "features")
    places: FloatArray = array("sites", "sites")  # where each site's participants lie on average
    precision: FloatArray = array("sites", "sites")  # inverse of their covariance within sites

    def posterior(self, rows: FloatArray) -> FloatArray:
        """Return the probability of each site, (rows, sites), if all are equally probable before."""
        apart = ((rows - self.centre) @ self.axes.T)[:, None] - self.places
        distance = np.einsum("nsi,ij,nsj->ns", apart, self.precision, apart)
        weight = np.exp(-0.5 * (distance - distance.min(axis=1, keepdims=True)))
        result: FloatArray = weight / weight.sum(axis=1, keepdims=True)
        return result

    def expected(self, rows: FloatArray) -> FloatArray:
        """Return the mean scan of each row's site, averaged over the sites' probabilities."""
        result: FloatArray = self.centre + self.posterior(rows) @ self.shift
        return result


@dataclass(frozen=True, eq=False)
class VolumeModel:
    r"""A scanner's image of a participant, at gain 1.

    .. math:: z = T_s(m(c) + e), \qquad T_s = \text{intensity} \circ \text{shift}
    """

    unit: float = field(metadata={"above": 0.0})  # the typical gain, in which volumes are given back
    curvature: float = field(metadata={"least": 0.0})  # the penalty on the trend's curvature
    trend: Trend  # m
    composition: Composition  # T_s
    discriminant: SiteDiscriminant
    template: FloatArray = array("features")  # the mean volume, by which gains are estimated
    n_participants: FloatArray = array("sites")

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, effects that do not fit the trend or each other."""
        if [type(effect) for effect in self.composition] != [Intensity, ShiftScale]:
            raise ValueError("composition")
        if len(self.trend.centre) != len(self.template):
            raise ValueError("trend")

    def at(self, c: FloatArray, site: IntArray, box: Box) -> ScanContext:
        """Return the context of scans at covariates c and a site."""
        return ScanContext(site, c, self.trend(c), box, self.template)

    def undo(self, rows: NDArray[np.floating], c: FloatArray, site: IntArray, box: Box) -> FloatArray:
        """Return scans as the pool would show them, in its unit; voxels of exactly 0 stay."""
        values, _ = normalised(rows, self.template)
        values = self.composition.undo(values, self.at(c, site, box))
        return np.where(np.asarray(rows) == 0, 0.0, _above_zero(values, rows) * self.unit)

    def add_site(self, rows: NDArray[np.floating], c: FloatArray, box: Box) -> VolumeModel:
        """Return a model with one more site, estimated from its scans with everything else as it is."""
        at = self.at(c, np.full(len(rows), len(self.n_participants)), box)
        values, absent = normalised(rows, self.template)
        return replace(
            self,
            composition=self.composition.add_site(np.where(absent, at.predicted, values), at),
            n_participants=np.append(self.n_participants, float(len(rows))),
        )

    def without_site(self, rows: NDArray[np.floating]) -> FloatArray:
        """Return residuals around the pool's mean, for networks; the site is predicted from the scan.

        Only the shift is removed: with intensities undone, networks are no better (docs/experiments.md).
        """
        values, absent = normalised(rows, self.template)
        result = values - self.discriminant.expected(values)
        result[absent] = 0.0
        return result

    def with_site(self, residuals: FloatArray, rows: NDArray[np.floating]) -> FloatArray:
        """Return what the scanner of these scans would have made of residuals: the inverse."""
        values, _ = normalised(rows, self.template)
        return (self.discriminant.expected(values) + residuals) * gains(rows, self.template)[:, None]


def _above_zero(values: FloatArray, rows: NDArray[np.floating]) -> FloatArray:
    """Return harmonized scans at gain 1, above 0 where the measured ones nowhere are below.

    What is darker than DARK approaches 0 without reaching it, in the same order.
    """
    floored = (np.asarray(rows).min(axis=1) >= 0)[:, None] & (values < DARK)
    return np.where(floored, DARK * np.exp((np.minimum(values, DARK) - DARK) / DARK), values)


# -- passes over scans -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scans:
    """The scans that a model is fitted to, and what is known of each."""

    volumes: Volumes
    design: Design
    columns: FloatArray  # (scans, q), of the trend's basis and after them those of a target
    penalty: FloatArray  # (q,), on the slopes, for each participant
    template: FloatArray
    whole: bool  # whether every voxel of every scan was measured
    box: Box

    def only(self, rows: IntArray) -> Scans:
        """Return some of them."""
        return replace(
            self, volumes=self.volumes[rows], design=self.design.only(rows), columns=self.columns[rows]
        )

    def parts(self, intensity: Intensity | None = None) -> Iterator[tuple[slice, FloatArray, Mask]]:
        """Yield scans at gain 1 some at a time, what was done to intensities undone, and what is absent."""
        for part, rows in blocks(self.volumes):
            values, absent = normalised(rows, self.template)
            if intensity is not None:
                values = intensity.undo(values, self.at(part))
            yield part, values, absent

    def at(self, part: slice) -> ScanContext:
        """Return the context of some scans, without a prediction."""
        rows = self.design.site[part], self.design.covariates[part], np.empty((0, 0))
        return ScanContext(*rows, self.box, self.template)


@dataclass(frozen=True, eq=False)
class Survey:
    """What one pass over scans and their residuals tells."""

    terms: FloatArray  # (TERMS, voxels), means of the intensity terms
    ends: FloatArray  # (2,), mean quantiles of intensities
    people: PeoplePatterns
    variance: FloatArray  # (voxels,), of residuals


class VolumeRegression:
    """Levels of sites and slopes of the trend by penalised least squares, intensities undone."""

    def __init__(self, scans: Scans, intensity: Intensity | None = None) -> None:
        self.scans, self.intensity, n_sites = scans, intensity, scans.design.n_sites
        self.dummies = np.eye(n_sites)[scans.design.site]
        self.n = self.dummies.sum(axis=0)
        self.columns = np.hstack([self.dummies, scans.columns])
        ridge = np.append(np.full(n_sites, 1e-12), scans.penalty) * len(scans.columns)
        self.normal = self.columns.T @ self.columns + np.diag(ridge)
        self.moments = self.solution = np.zeros((len(self.normal), len(scans.template)))
        self.fitted = False
        for _ in range(1 if scans.whole else 2):  # at first, what is absent has the template's value
            moments = np.zeros((len(self.normal), len(scans.template)))
            for part, rows in self.parts():
                moments += self.columns[part].T @ rows
            self.moments = distributed.summed(moments)
            self.solution, self.fitted = np.linalg.solve(self.normal, self.moments), True

    def parts(self) -> Iterator[tuple[slice, FloatArray]]:
        """Yield scans some at a time; what is absent has the value that the regression predicts."""
        for part, rows, absent in self.scans.parts(self.intensity):
            if self.fitted and not self.scans.whole:
                np.copyto(rows, self.predicted(part), where=absent)
            yield part, rows

    def predicted(self, part: slice) -> FloatArray:
        """Return the prediction of some scans."""
        result: FloatArray = self.columns[part] @ self.solution
        return result

    @property
    def level(self) -> FloatArray:
        """The pool's value at the mean covariates, (voxels,)."""
        return self.n @ self.solution[: len(self.n)] / self.n.sum()

    @property
    def shift(self) -> FloatArray:
        """Sites' differences from the pool, (sites, voxels)."""
        return np.where(self.n[:, None] > 0, self.solution[: len(self.n)] - self.level, 0.0)

    @property
    def shift_variance(self) -> FloatArray:
        """How much shifts vary by chance, (sites,), in units of the variance between participants."""
        return (1 / np.maximum(self.n, 1.0) - 1 / self.n.sum()) * self.inflation

    @cached_property
    def inflation(self) -> float:
        """The factor by which a trend estimated beside the shifts increases their variance; 1 without one."""
        count, inverse = len(self.n), np.linalg.inv(self.normal)
        rough = (inverse @ self.columns.T @ self.columns @ inverse)[:count, :count]
        away = np.eye(count) - self.n / self.n.sum()
        return float(self.n @ np.diag(away @ rough @ away.T)) / max(count - 1, 1)

    def survey(self) -> Survey:
        """Look at intensities and residuals, in one pass."""
        scans, (n, used) = self.scans, self.columns.shape
        voxels = len(scans.template)
        terms, ends, squares = np.zeros((TERMS, voxels)), np.zeros(2), np.zeros(voxels)

        def residuals() -> Iterator[tuple[slice, FloatArray]]:
            for part, rows in self.parts():
                np.add(terms, intensity_terms(rows, scans.box.smooth(rows)), out=terms)
                np.add(ends, np.quantile(rows, RANGE, axis=1).sum(axis=1), out=ends)
                rest = rows - self.predicted(part)
                np.add(squares, (rest**2).sum(axis=0), out=squares)
                yield part, rest

        rows = rows_of_some(residuals(), n, voxels)
        scale = n / max(n - used, 1)
        return Survey(
            terms=distributed.summed(terms) / n,
            ends=distributed.summed(ends) / n,
            people=PeoplePatterns.of(rows, scale),
            variance=scale * distributed.summed(squares) / n,
        )

    def fit_intensity(self, survey: Survey) -> Intensity:
        """Return what sites do to intensities."""
        n = float(self.n.sum())
        shift, _, _ = self.apart(survey)
        at = self.shift_variance, survey.people, n, self.scans.box
        return Intensity.fit(survey.terms, survey.ends, shift, *at)

    def apart(self, survey: Survey) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the sites' shifts, the pool's level and the slopes, shifts told from whom a site scanned.

        Trend and shifts explain each other where sites' ages differ, so they are fitted in turns: the sites'
        means given the trend, of these the scanners' part, and given that the pool's level and the trend.
        """
        n, count = np.maximum(self.n, 1e-12), len(self.n)
        box = self.scans.box
        apart = ScannersAndPeople(scanner_patterns(survey.terms, box.inside, box.mask), survey.people)
        # Judged once: with every turn the trend takes more of the shifts, and they would seem ever smaller.
        beyond = apart.beyond_chance(self.shift, n, self.inflation)
        kept = self._kept_of_small_sites(survey.people)[:, None]
        shift, slopes = self.shift, self.solution[count:]
        level = self.level
        for _ in range(TURNS):
            means = (self.moments[:count] - self.normal[:count, count:] @ slopes) / n[:, None]
            shift = kept * apart.scanners_part(means - n @ means / n.sum(), n, beyond)
            shift -= n @ shift / n.sum()
            level, slopes = self.level_and_slopes(shift)
        return shift, level, slopes

    def level_and_slopes(self, shift: FloatArray | float) -> tuple[FloatArray, FloatArray]:
        """Return the pool's level and the trend's slopes, given the sites' shifts."""
        count = len(self.n)
        pool = np.eye(len(self.normal))[count - 1 :]
        pool[0, :count] = 1.0  # one level for all sites instead of one for each
        shift = np.broadcast_to(shift, (count, self.moments.shape[1]))
        given = pool @ (self.moments - self.normal[:, :count] @ shift)
        solution = np.linalg.solve(pool @ self.normal @ pool.T, given)
        return solution[0], solution[1:]

    def _kept_of_small_sites(self, people: PeoplePatterns) -> FloatArray:
        """Return the share of a shift that is kept, (sites,): 1, and of small sites the reliable part.

        By how far large sites are from the pool, beside how far participants are from each other.
        """
        large = self.n >= min(SMALL, self.n.max())
        size = (self.shift[large] ** 2).sum(axis=1) / people.total(len(self.scans.template))
        ratio = self.n * max(float((size - self.shift_variance[large]).mean()), 0.0)
        return np.where(self.n >= SMALL, 1.0, np.where(self.n > 1, ratio / (1 + ratio), 0.0))

    def discriminant(self, variance: FloatArray) -> SiteDiscriminant:
        """Return what predicts the site from a scan as it is."""
        axes = self.shift / np.maximum(variance, 1e-3 * variance.mean() + 1e-12) / np.sqrt(len(variance))
        away = np.zeros((len(self.columns), len(axes)))
        for part, rows in self.parts():
            away[part] = (rows - self.level) @ axes.T
        away = distributed.summed(away)
        places = (self.dummies.T @ away) / self.n[:, None]
        within = away - self.dummies @ places
        covariance = within.T @ within / len(away)
        # Sites' shifts add up to 0, so one direction is empty: a small ridge keeps it out.
        ridge = (1e-3 * np.trace(covariance) / len(axes) + 1e-12) * np.eye(len(axes))
        return SiteDiscriminant(self.level, self.shift, axes, places, np.linalg.inv(covariance + ridge))

    def held_out(self, scans: Scans, survey: Survey) -> float:
        """Return the log-likelihood of other scans, up to a constant, with the covariance of a survey."""
        shift, level, slopes = self.apart(survey)
        total = np.zeros(1)
        for part, rows, absent in scans.parts():
            values, at = rows, scans.at(part)
            if self.intensity is not None:
                values = self.intensity.undo(rows, at)
                total += self.intensity.log_det(rows, at).sum()
            expected = level + scans.columns[part] @ slopes + shift[at.site]
            total += survey.people.log_likelihood(np.where(absent, 0.0, values - expected)).sum()
        return float(distributed.summed(total)[0])


# -- fit ---------------------------------------------------------------------------------------------------


def fit_volume_model(volumes: Volumes, design: Design) -> VolumeModel:
    """Fit the model in a few passes over the volumes, which processes share."""
    template, unit, whole = mean_volume(volumes)
    shared = SharedTrend.fit(_sample(volumes, template), design)
    scans = Scans(volumes, design, shared.columns, shared.penalty, template, whole, Box(volumes.mask))
    with_intensity = _intensity_enters(scans)
    fit = VolumeRegression(scans)
    survey = fit.survey()
    discriminant = fit.discriminant(survey.variance)
    nothing = design.n_sites, volumes.shape[1]
    if with_intensity:
        fit = VolumeRegression(scans, fit.fit_intensity(survey))
        survey = fit.survey()
    shift, level, slopes = fit.apart(survey)
    between, count = (shift**2).mean(axis=0), design.n_sites
    affine = replace(
        ShiftScale.identity(*nothing),
        shift=shift,
        error=np.sqrt(np.outer(fit.shift_variance, survey.variance)),
        # Few sites say little about one voxel; all voxels together say more.
        between=(count * between + PRIOR_SITES * between.mean()) / (count + PRIOR_SITES),
        scale_weight=np.full(volumes.shape[1], NO_SCALE),
        variance=survey.variance,
    )
    return VolumeModel(
        template=template,
        unit=unit,
        curvature=shared.curvature,
        trend=Trend(shared.basis, slopes[: shared.basis.width], level),
        composition=Composition((fit.intensity or Intensity.identity(*nothing), affine)),
        n_participants=design.n_participants,
        discriminant=discriminant,
    )


def _sample(volumes: Volumes, template: FloatArray) -> FloatArray:
    """Return some voxels of all scans at gain 1."""
    some = np.sort(np.random.default_rng(0).permutation(volumes.shape[1])[:SAMPLE])
    result = np.zeros((len(volumes), len(some)))
    for part, rows in blocks(volumes):
        result[part] = normalised(rows, template)[0][:, some]
    return distributed.summed(result)


def _intensity_enters(scans: Scans) -> bool:
    """Say whether held-out participants have a higher likelihood with intensities undone than as they are.

    Parts of the rule are folds: a pool of images has few sites, in which the gains differ systematically. Of
    many participants some are drawn.
    """
    some = np.sort(np.random.default_rng(0).permutation(len(scans.columns))[:MAX_PARTICIPANTS])
    scans, likelihoods = scans.only(some), []
    for train, held in scans.design.folds() if scans.design.n_sites > 1 else ():
        fit = VolumeRegression(scans.only(train))
        survey = fit.survey()
        straight = VolumeRegression(fit.scans, fit.fit_intensity(survey))
        both = (fit, survey), (straight, straight.survey())
        likelihoods.append([each.held_out(scans.only(held), of_each) for each, of_each in both])
    return bool(likelihoods) and bool(choose(np.array(likelihoods).T))
