"""The model of volumes: the trend that all sites share, and the composition of what each scanner does."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from equipool import distributed
from equipool.data.volumes import Volumes
from equipool.groups.trend import Trend
from equipool.sites import scanner_patterns as patterns
from equipool.sites import scans as reading
from equipool.sites.design import FEW, MAX_FEATURES, TINY, Design
from equipool.sites.effect import Composition, FloatArray, IntArray, array, choose
from equipool.sites.intensity import RANGE, Intensity
from equipool.sites.scans import Box, ScanContext, gains, normalised
from equipool.sites.shift_scale import PRIOR_SITES, SharedTrend, ShiftScale, shrunken_scales
from equipool.sites.table_model import with_target_if_likely

DARK = 0.05  # of the brain's bright end: harmonized scans approach 0 below it, and stay positive
TURNS = 10  # of fitting trend and shifts, each given the other


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
        return softmax(-0.5 * distance, axis=1)

    def expected(self, rows: FloatArray) -> FloatArray:
        """Return the mean scan of each row's site, averaged over the sites' probabilities."""
        return self.centre + self.posterior(rows) @ self.shift


@dataclass(frozen=True, eq=False)
class VolumeModel:
    r"""A scanner's image of a participant, at gain 1.

    .. math:: z = T_s(m(c) + e), \qquad T_s = \text{intensity} \circ \text{shift and scale}
    """

    unit: float = field(metadata={"above": 0.0})  # the typical gain, in which volumes are given back
    curvature: float = field(metadata={"least": 0.0})  # the penalty on the trend's curvature
    trend: Trend  # m
    composition: Composition  # T_s
    discriminant: SiteDiscriminant
    allowed_for_target: bool
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
        """Return scans as the pool would show them, in its unit; voxels of exactly 0 stay.

        Scans that are nowhere below 0 stay above it: what is darker than DARK approaches 0 without reaching
        it, in the same order.
        """
        values, _ = normalised(rows, self.template)
        values = self.composition.undo(values, self.at(c, site, box))
        floored = (np.asarray(rows).min(axis=1) >= 0)[:, None] & (values < DARK)
        values = np.where(floored, DARK * np.exp((np.minimum(values, DARK) - DARK) / DARK), values)
        return np.where(np.asarray(rows) == 0, 0.0, values * self.unit)

    def add_site(self, rows: NDArray[np.floating], c: FloatArray, box: Box) -> Self:
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

    def only(self, rows: IntArray) -> Self:
        """Return some of them."""
        volumes, design = self.volumes[rows], self.design.only(rows)
        return replace(self, volumes=volumes, design=design, columns=self.columns[rows])

    def parts(self) -> Iterator[tuple[slice, FloatArray, NDArray[np.bool_], ScanContext]]:
        """Yield some scans at a time at gain 1, what is absent, and their context without a prediction."""
        for part, rows in reading.blocks(self.volumes):
            about = self.design.site[part], self.design.covariates[part], np.empty((0, 0))
            yield part, *normalised(rows, self.template), ScanContext(*about, self.box, self.template)


class VolumeRegression:
    """Levels of sites and slopes of the trend by penalised least squares, intensities undone."""

    def __init__(self, scans: Scans, intensity: Intensity | None = None) -> None:
        self.scans, self.intensity, n_sites = scans, intensity, scans.design.n_sites
        self.dummies = np.eye(n_sites)[scans.design.site]
        self.n = self.dummies.sum(axis=0)
        self.columns = np.hstack([self.dummies, scans.columns])
        gram = self.columns.T @ self.columns
        ridge = np.append(np.full(n_sites, TINY), scans.penalty) * len(scans.columns)
        self.normal = gram + np.diag(ridge)
        for again in range(1 if scans.whole else 2):  # at first, what is absent has the template's value
            moments = np.zeros((len(gram), len(scans.template)))
            for part, rows in self.parts(filled=again > 0):
                moments += self.columns[part].T @ rows
            self.moments = distributed.summed(moments)
            self.solution: FloatArray = np.linalg.solve(self.normal, self.moments)
        total, levels = self.n.sum(), self.solution[:n_sites]
        self.level: FloatArray = self.n @ levels / total  # of the pool at the mean covariates, (voxels,)
        self.shift = np.where(self.n[:, None] > 0, levels - self.level, 0.0)  # (sites, voxels)
        # The factor by which a trend estimated beside the shifts increases their variance; 1 without one.
        inverse, away = np.linalg.inv(self.normal), np.eye(n_sites) - self.n / total
        rough = (inverse @ gram @ inverse)[:n_sites, :n_sites]
        self.inflation = float(self.n @ np.diag(away @ rough @ away.T)) / max(n_sites - 1, 1)
        # How much shifts vary by chance, (sites,), in units of the variance between participants.
        self.shift_variance = (1 / np.maximum(self.n, 1.0) - 1 / total) * self.inflation

    def parts(self, *, filled: bool = True) -> Iterator[tuple[slice, FloatArray]]:
        """Yield some scans at a time, intensities undone; what is absent has the value that is predicted."""
        for part, rows, absent, at in self.scans.parts():
            rows = rows if self.intensity is None else self.intensity.undo(rows, at)
            if filled and not self.scans.whole:
                np.copyto(rows, self.columns[part] @ self.solution, where=absent)
            yield part, rows

    def survey(self) -> patterns.Survey:
        """Look at intensities and residuals, in one pass."""
        scans, (n, used) = self.scans, self.columns.shape
        voxels = len(scans.template)
        terms, ends, squares = np.zeros((6, voxels)), np.zeros(2), np.zeros((len(self.n), voxels))

        def residuals() -> Iterator[tuple[slice, FloatArray]]:
            for part, rows in self.parts():
                np.add(terms, patterns.intensity_terms(rows, scans.box.smooth(rows)), out=terms)
                np.add(ends, np.quantile(rows, RANGE, axis=1).sum(axis=1), out=ends)
                rest = rows - self.columns[part] @ self.solution
                np.add(squares, self.dummies[part].T @ rest**2, out=squares)
                yield part, rest

        rows = reading.rows_of_some(residuals(), n, voxels)
        scale = n / max(n - used, 1)
        return patterns.Survey(
            n,
            terms=distributed.summed(terms) / n,
            ends=distributed.summed(ends) / n,
            people=patterns.PeoplePatterns.of(rows, scale),
            squares=distributed.summed(squares),
            freedom=scale,
        )

    def fit_intensity(self, survey: patterns.Survey) -> Intensity:
        """Return what sites do to intensities."""
        return Intensity.fit(survey, self.apart(survey)[0], self.shift_variance, self.scans.box)

    def apart(self, survey: patterns.Survey) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the sites' shifts, the pool's level and the slopes, shifts told from whom a site scanned.

        Trend and shifts explain each other where sites' ages differ, so they are fitted in turns: the sites'
        means given the trend, of these the scanners' part, and given that the pool's level and the trend.
        """
        n, count, box, people = np.maximum(self.n, TINY), len(self.n), self.scans.box, survey.people
        scanner = patterns.scanner_patterns(survey.terms, box.inside, box.mask)
        apart = patterns.ScannersAndPeople(scanner, people)
        # Judged once: with every turn the trend takes more of the shifts, and they would seem ever smaller.
        beyond = apart.beyond_chance(self.shift, n, self.inflation)
        # Of small sites' shifts the reliable part is kept, by how far large sites are from the pool, beside
        # how far participants are from each other.
        large = self.n >= min(FEW, self.n.max())
        size = (self.shift[large] ** 2).sum(axis=1) / people.total(len(self.level))
        ratio = self.n * max(float((size - self.shift_variance[large]).mean()), 0.0)
        kept = np.where(self.n >= FEW, 1.0, np.where(self.n > 1, ratio / (1 + ratio), 0.0))[:, None]
        pool = np.eye(len(self.normal))[count - 1 :]
        pool[0, :count] = 1.0  # one level for all sites instead of one for each
        shift, level, slopes = self.shift, self.level, self.solution[count:]
        for _ in range(TURNS):
            means = (self.moments[:count] - self.normal[:count, count:] @ slopes) / n[:, None]
            shift = kept * apart.scanners_part(means - n @ means / n.sum(), n, beyond)
            shift -= n @ shift / n.sum()
            given = pool @ (self.moments - self.normal[:, :count] @ shift)
            solution = np.linalg.solve(pool @ self.normal @ pool.T, given)
            level, slopes = solution[0], solution[1:]
        return shift, level, slopes

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

    def held_out(self, scans: Scans, survey: patterns.Survey) -> float:
        """Return the log-likelihood of other scans, up to a constant, with the covariance of a survey."""
        shift, level, slopes = self.apart(survey)
        total = np.zeros(1)
        effect = Composition(() if self.intensity is None else (self.intensity,))
        for part, rows, absent, at in scans.parts():
            rest = effect.undo(rows, at) - level - scans.columns[part] @ slopes - shift[at.site]
            total += effect.log_det(rows, at).sum()
            total += survey.people.log_likelihood(np.where(absent, 0.0, rest)).sum()
        return float(distributed.summed(total)[0])


def fit_volume_model(volumes: Volumes, design: Design) -> VolumeModel:
    """Fit the model in a few passes over the volumes, which processes share."""
    template, unit, whole = reading.mean_volume(volumes)
    # On some voxels, the curvature of the trend is chosen.
    some = np.sort(np.random.default_rng(0).permutation(volumes.shape[1])[:MAX_FEATURES])
    sample = np.zeros((len(volumes), len(some)))
    for part, rows in reading.blocks(volumes):
        sample[part] = normalised(rows, template)[0][:, some]
    sample = distributed.summed(sample)
    design = with_target_if_likely(sample, design)
    shared = SharedTrend.fit(sample, design)
    scans = Scans(volumes, design, shared.columns, shared.penalty, template, whole, Box(volumes.mask))
    fit = VolumeRegression(scans)
    survey = fit.survey()
    discriminant = fit.discriminant(survey.variance)
    nothing = design.n_sites, volumes.shape[1]
    if _intensity_enters(scans):
        fit = VolumeRegression(scans, fit.fit_intensity(survey))
        survey = fit.survey()
    shift, level, slopes = fit.apart(survey)
    between, count = (shift**2).mean(axis=0), design.n_sites
    scale, scale_weight = shrunken_scales(survey.squares, fit.n[:, None])
    affine = replace(
        ShiftScale.identity(*nothing),
        shift=shift,
        error=np.sqrt(np.outer(fit.shift_variance, survey.variance)),
        # Few sites say little about one voxel; all voxels together say more.
        between=(count * between + PRIOR_SITES * between.mean()) / (count + PRIOR_SITES),
        scale=scale,
        scale_weight=scale_weight,
        variance=survey.variance,
    )
    return VolumeModel(
        template=template,
        unit=unit,
        curvature=shared.curvature,
        trend=Trend(shared.basis, slopes[: shared.basis.width], level),
        composition=Composition((fit.intensity or Intensity.identity(*nothing), affine)),
        allowed_for_target=design.target.shape[1] > 0,
        n_participants=design.n_participants,
        discriminant=discriminant,
    )


def _intensity_enters(scans: Scans) -> bool:
    """Say whether held-out participants have a higher likelihood with intensities undone than as they are.

    Parts of the rule are folds: a pool of images has few sites, in which the gains differ systematically. Of
    many participants some are drawn.
    """
    some = np.sort(np.random.default_rng(0).permutation(len(scans.columns))[: reading.MAX_PARTICIPANTS])
    scans, likelihoods = scans.only(some), []
    for train, held in scans.design.folds() if scans.design.n_sites > 1 else ():
        fit = VolumeRegression(scans.only(train))
        survey = fit.survey()
        straight = VolumeRegression(fit.scans, fit.fit_intensity(survey))
        both = (fit, survey), (straight, straight.survey())
        likelihoods.append([each.held_out(scans.only(held), of_each) for each, of_each in both])
    return bool(likelihoods) and bool(choose(np.array(likelihoods).T))
