"""What sites do to volumes, in closed form: gain, shift, noise and spread, voxel by voxel.

A scan is gain · (trend(covariates) + the site's shift + what is the person's own, stretched by the site), its
intensities bent and blurred by the scanner, plus the site's noise. The gain is each scan's own. What the
scanner does to intensities is undone scan by scan (:mod:`equipool.models.intensities`). Trend and shift come
from one regression, the shift without the chance of whom a site scanned (:mod:`equipool.models.scanners`).
The noise is estimated from the finest pattern of what is left and taken out of the detail by a Wiener filter,
so that a noisy scanner's detail ends as the quiet one's. The spread is what then remains different between
sites, voxel by voxel and along the directions in which brains vary most. A voxel of exactly 0 was cut off
with the skull: it is no measurement and stays 0, for a shifted 0 would tell the site. Everything is a sum
over people: volumes are read in blocks, a few times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from equipool.data.images import Volumes
from equipool.exceptions import InputError
from equipool.models.covariances import evened
from equipool.models.intensities import ENDS, Intensities, fit_intensities
from equipool.models.scanners import (
    TERMS,
    PeoplePatterns,
    ScannersAndPeople,
    intensity_terms,
    largest,
    products,
    scanner_patterns,
)
from equipool.nn import distributed

__all__ = ["Box", "VolumeSites", "fit_volume_sites", "gains", "mean_volume"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
Mask = NDArray[np.bool_]

BLOCK = 16  # volumes at a time
SMOOTH = 0.6  # voxels: what is finer is detail, in which noise is looked for
QUIET = 0.1  # the quantile of voxels that have next to no anatomy of their own in the finest pattern
BRIGHT = 0.85  # quantile of the template
KEPT = 0.1  # least share of the detail that stays
SPREAD_PEOPLE = 10.0  # people's worth of the pooled spread that a site's own is mixed with
DIRECTIONS = 40  # in which brains vary most; a site's covariance along them is brought to the pool's
DIRECTION_SHARE = 0.25  # directions a person, at most: covariances of more are too rough to be compared
DIRECTION_PEOPLE = 300  # of whom the directions are found, so that memory does not grow with people
TURNS = 10  # of fitting the trend and what scanners do, each beside the other
CURVATURE = 1e-2  # ridge on squared covariates, so that the trend is straight where the sites' do not overlap


@dataclass(frozen=True, eq=False)
class Box:
    """Rows of brain voxels and the box they stand in."""

    mask: Mask

    def smooth(self, rows: NDArray[np.floating]) -> FloatArray:
        """Return rows smoothed within the brain."""
        from scipy.ndimage import gaussian_filter

        result, inside = np.empty(rows.shape), self.inside
        for k, row in enumerate(rows):
            result[k] = gaussian_filter(self._filled(row), SMOOTH)[self._near] / inside
        return result

    @cached_property
    def inside(self) -> FloatArray:
        """How much of the kernel that smooths lies within the brain, (voxels,)."""
        from scipy.ndimage import gaussian_filter

        share: FloatArray = gaussian_filter(self._near.astype(np.float64), SMOOTH)[self._near]
        return np.maximum(share, 1e-6)

    def finest(self, rows: NDArray[np.floating]) -> FloatArray:
        """Return the difference of neighbours along all three axes: white noise keeps its variance in it."""
        inside = self._all_inside()
        return np.stack([_differences(self._filled(row))[inside] for row in rows]) / np.sqrt(8.0)

    def detail_of_noise(self) -> float:
        """Return the variance that white noise of variance 1 has in what :meth:`smooth` takes away."""
        from scipy.ndimage import gaussian_filter

        point = np.zeros((9, 9, 9))
        point[4, 4, 4] = 1.0
        return float(((point - gaussian_filter(point, SMOOTH)) ** 2).sum())

    def _filled(self, row: NDArray[np.floating]) -> FloatArray:
        box = np.zeros(self._near.shape)
        box[self._near] = row
        return box

    @cached_property
    def _near(self) -> Mask:
        """The mask without the air that no kernel reaches."""
        margin = int(4 * SMOOTH + 0.5)
        near = [slice(max(at.min() - margin, 0), at.max() + 1 + margin) for at in np.nonzero(self.mask)]
        return self.mask[tuple(near)]

    def _all_inside(self) -> Mask:
        inside = self._near
        for axis in range(3):
            first = np.take(inside, range(inside.shape[axis] - 1), axis)
            inside = first & np.take(inside, range(1, inside.shape[axis]), axis)
        return inside


@dataclass(frozen=True, eq=False)
class VolumeSites:
    """What was learned of the sites.

    Attributes
    ----------
    template
        (voxels,): the mean volume, each scan having its bright end at 1.
    unit
        The typical gain, in which harmonized volumes are given back.
    coefficients, square_means
        Of the covariates and their squares, (2K, voxels); means of the squares, (K,).
    centre, shift
        (voxels,) and (sites, voxels): the pool's value at covariates 0, and each site's distance from it.
    noise, kept
        (sites,) and (sites, voxels): standard deviation of the noise at gain 1, and the share of the detail
        that is none.
    spread
        (sites, voxels): ratio of a site's spread to the pooled one.
    directions, mixing
        (D, voxels) in which brains vary most, and (sites, D, D): what to multiply the scores along them by.
    ends, curves, fields
        What scanners do to intensities, see :class:`~equipool.models.intensities.Intensities`; all of the
        above but the template are of scans without it.
    seen_centre, seen_shift, seen_spread
        Centre, shift and spread of scans as they are, for networks.
    axes, places, precision
        For reading the site from a scan: (sites, voxels) directions, (sites, sites) where each site's people
        lie along them on average, and the inverse of their covariance within sites.
    """

    template: FloatArray
    unit: FloatArray
    coefficients: FloatArray
    square_means: FloatArray
    centre: FloatArray
    shift: FloatArray
    noise: FloatArray
    kept: FloatArray
    spread: FloatArray
    directions: FloatArray
    mixing: FloatArray
    ends: FloatArray
    curves: FloatArray
    fields: FloatArray
    seen_centre: FloatArray
    seen_shift: FloatArray
    seen_spread: FloatArray
    axes: FloatArray
    places: FloatArray
    precision: FloatArray

    def remove(self, rows: NDArray[np.floating], c: FloatArray, site: IntArray, box: Box) -> FloatArray:
        """Return volumes without their site, the covariates' trend kept, in units of the pool."""
        trend = self.expected(c)
        absent = np.asarray(rows) == 0
        known = Intensities(self.ends, self.curves, self.fields)
        share = np.eye(len(self.shift))[site]
        own = straightened(self.normalised(rows), known, share, box, self.template)
        own -= trend + self.shift[site]
        own[absent] = 0.0
        own = self._quiet(own, site, box) / self.spread[site]
        scores = own @ self.directions.T
        own += (np.einsum("nd,nde->ne", scores, self.mixing[site]) - scores) @ self.directions
        return np.where(absent, 0.0, (trend + own) * float(self.unit))

    def expected(self, c: FloatArray) -> FloatArray:
        """Return the trend at covariates (rows, K)."""
        return self.centre + _powers(c, self.square_means) @ self.coefficients

    def normalised(self, rows: NDArray[np.floating]) -> FloatArray:
        """Return volumes at gain 1; voxels that were cut off have the template's value."""
        return normalised(rows, self.template)

    def gains(self, rows: NDArray[np.floating]) -> FloatArray:
        """Return each scan's gain."""
        return gains(rows, self.template)

    def posterior(self, normal: FloatArray) -> FloatArray:
        """Return how likely each scan at gain 1 is of each site, (rows, sites), all sites alike before.

        A linear discriminant along the sites' shifts: scans of one scanner lie close together there.
        """
        away = (normal - self.seen_centre) @ self.axes.T
        apart = away[:, None] - self.places
        distance = np.einsum("nsi,ij,nsj->ns", apart, self.precision, apart)
        weight = np.exp(-0.5 * (distance - distance.min(axis=1, keepdims=True)))
        share: FloatArray = weight / weight.sum(axis=1, keepdims=True)
        return share

    def without_site(self, rows: NDArray[np.floating]) -> FloatArray:
        """Return what is left of volumes beside the pool's mean when the site that they show is taken out.

        Needs neither site nor covariates, so a network may stand behind it: the site is read from the scan.
        Intensities stay as they are bent: straightened ones are no better for networks (docs/experiments.md).
        """
        normal = self.normalised(rows)
        share = self.posterior(normal)
        own: FloatArray = (normal - self.seen_centre - share @ self.seen_shift) / (share @ self.seen_spread)
        own[np.asarray(rows) == 0] = 0.0
        return own

    def with_site(self, own: FloatArray, rows: NDArray[np.floating]) -> FloatArray:
        """Return what the scanner that scans show would have made of people: undoes :meth:`without_site`."""
        share = self.posterior(self.normalised(rows))
        normal: FloatArray = self.seen_centre + share @ self.seen_shift + own * (share @ self.seen_spread)
        return normal * self.gains(rows)[:, None]

    def _quiet(self, own: FloatArray, site: IntArray, box: Box) -> FloatArray:
        smooth = box.smooth(own)
        return smooth + self.kept[site] * (own - smooth)


def gains(rows: NDArray[np.floating], template: FloatArray) -> FloatArray:
    """Return each scan's median ratio to the template over the brightest part of the brain.

    In a T1 image that is white matter, which age and disease thin least; the whole brain's median would fall
    with the grey matter that a patient has lost.
    """
    bright = template >= np.quantile(template, BRIGHT)
    ratio = np.median(np.asarray(rows, dtype=np.float64)[:, bright] / template[bright], axis=1)
    return np.where(ratio > 0, ratio, 1.0)


def normalised(rows: NDArray[np.floating], template: FloatArray) -> FloatArray:
    """Return volumes at gain 1, with the template's value where they were cut off."""
    values = np.asarray(rows, dtype=np.float64) / gains(rows, template)[:, None]
    return np.where(np.asarray(rows) == 0, template, values)


def straightened(
    normal: FloatArray, known: Intensities, share: FloatArray, box: Box, template: FloatArray
) -> FloatArray:
    """Return scans at gain 1 without what scanners do to intensities, where each has a share in sites.

    The gain is told anew, for that of a bent scan depends on who is scanned.
    """
    if known.nothing:
        return normal
    straight = known.straightened(normal, share, box)
    return straight / gains(straight, template)[:, None]


def fit_volume_sites(volumes: Volumes, c: FloatArray, site: IntArray, extra: FloatArray) -> VolumeSites:
    """Fit in fifteen passes over the volumes; several processes share each pass out.

    Parameters
    ----------
    volumes
        The training scans.
    c, site
        Scaled covariates (people, K) and site numbers.
    extra
        What else explains volumes and is not the site's, such as the diagnosis, (people, E); it is allowed
        for when shifts are estimated, and stays in the volumes.
    """
    box = Box(volumes.mask)
    template, unit = mean_volume(volumes)
    count = int(site.max()) + 1
    dummies = np.eye(count)[site]
    people = dummies.sum(axis=0)
    square_means = (c**2).mean(axis=0) if len(c) else np.zeros(c.shape[1])
    powers = _powers(c, square_means)
    design = np.hstack([dummies, powers, extra - extra.mean(axis=0)])
    ridge = np.zeros(design.shape[1])
    ridge[count:] = 1e-9 * len(c)
    ridge[count + c.shape[1] : count + powers.shape[1]] = CURVATURE * len(c)

    seen = _Scans(volumes, template, design, np.diag(ridge))
    seen.regress()
    intensities = seen.leave_people_to_themselves(people, box)
    seen_spread, variance = _Quiet(seen, dummies, box).spread()
    scans = _Scans(
        volumes,
        template,
        design,
        np.diag(ridge),
        lambda normal, part: straightened(normal, intensities, dummies[part], box, template),
    )
    scans.regress()
    scans.leave_people_to_themselves(people, box)
    quiet = _Quiet(scans, dummies, box)
    spread, _ = quiet.spread()
    directions, mixing = _matched(
        lambda: ((part, rows / spread[site[part]]) for part, rows in quiet.residuals()),
        dummies,
        volumes.shape[1],
    )
    axes, places, precision = _discriminant(
        seen.at_gain_one, seen.centre(people), seen.shift(people), variance, dummies
    )
    return VolumeSites(
        template=template,
        unit=np.asarray(unit),
        coefficients=scans.solution[count : count + powers.shape[1]],
        square_means=square_means,
        centre=scans.centre(people),
        shift=scans.shift(people),
        noise=quiet.noise,
        kept=quiet.kept,
        spread=spread,
        directions=directions,
        mixing=mixing,
        ends=intensities.ends,
        curves=intensities.curves,
        fields=intensities.fields,
        seen_centre=seen.centre(people),
        seen_shift=seen.shift(people),
        seen_spread=seen_spread,
        axes=axes,
        places=places,
        precision=precision,
    )


class _Scans:
    """Scans at gain 1, and the regression that says what to expect of them.

    Columns of the design are the sites first, then covariates and what else explains volumes.
    """

    def __init__(
        self,
        volumes: Volumes,
        template: FloatArray,
        design: FloatArray,
        ridge: FloatArray,
        straighten: Callable[[FloatArray, slice], FloatArray] | None = None,
    ) -> None:
        self.volumes, self.template, self.design = volumes, template, design
        self.straighten = straighten
        self.normal_matrix = design.T @ design + ridge
        self.moments: FloatArray = np.zeros((design.shape[1], volumes.shape[1]))
        self.solution: FloatArray = np.zeros_like(self.moments)
        self.ends: FloatArray = np.zeros(2)
        self.fitted = False

    def at_gain_one(self) -> Iterator[tuple[slice, FloatArray]]:
        for start, rows in _blocks(self.volumes):
            part = slice(start, start + len(rows))
            normal = normalised(rows, self.template)
            if self.straighten is not None:
                normal = self.straighten(normal, part)
            # What was cut off is no measurement: once there is a fit, it is what the fit lets expect.
            yield part, np.where(rows == 0, self.expected(part), normal) if self.fitted else normal

    def expected(self, part: slice) -> FloatArray:
        expected: FloatArray = self.design[part] @ self.solution
        return expected

    def residuals(self) -> Iterator[tuple[slice, FloatArray]]:
        for part, rows in self.at_gain_one():
            yield part, rows - self.expected(part)

    def regress(self) -> None:
        for _ in range(2):
            moments, ends = np.zeros_like(self.moments), np.zeros(2)
            for part, rows in self.at_gain_one():
                moments += self.design[part].T @ rows
                ends += np.quantile(rows, ENDS, axis=1).sum(axis=1)
            self.moments, self.ends = distributed.summed(moments), distributed.summed(ends) / len(self.design)
            self.solution = np.linalg.inv(self.normal_matrix) @ self.moments
            self.fitted = True

    def centre(self, people: FloatArray) -> FloatArray:
        """Return the pool's value at covariates 0, (voxels,)."""
        level: FloatArray = (people / people.sum()) @ self.solution[: len(people)]
        return level

    def shift(self, people: FloatArray) -> FloatArray:
        """Return sites' distances from the pool, (sites, voxels)."""
        return self.solution[: len(people)] - self.centre(people)

    def leave_people_to_themselves(self, people: FloatArray, box: Box) -> Intensities:
        """Let sites differ by what their scanners do, and not by whom they happened to scan.

        Trend and shifts explain each other where sites' ages differ, so they are fitted in turns: the sites'
        means beside the trend, of these the scanners' part, and beside that the pool's level and the trend.
        Returns what explains the scanners' part if it is done to every scan's intensities.
        """
        apart, means_of_terms = self._scanners_and_people(box)
        count, share = len(people), people / people.sum()
        pool = np.eye(len(self.solution))[count - 1 :]
        pool[0, :count] = 1.0  # one level for all sites instead of one for each
        normal, moments, solution = self.normal_matrix, self.moments, self.solution
        # Judged once: with every turn the trend takes more of the shifts, and they would seem ever smaller.
        beyond = apart.beyond_chance(self.shift(people), people, self._chance(people))
        for _ in range(TURNS):
            means = (moments[:count] - normal[:count, count:] @ solution[count:]) / people[:, None]
            shift = apart.scanners_part(means - share @ means, people, beyond)
            shift -= share @ shift
            given = pool @ (moments - normal[:, :count] @ shift)
            level_and_trend = np.linalg.inv(pool @ normal @ pool.T) @ given
            solution = np.vstack([level_and_trend[0] + shift, level_and_trend[1:]])
        self.solution = solution
        error = (1 / people - 1 / people.sum()) * self._chance(people)
        shift = self.shift(people)
        return fit_intensities(
            means_of_terms, self.ends, people, shift, error, apart.people, box.inside, box.mask
        )

    def _chance(self, people: FloatArray) -> float:
        """Return how much larger sites' distances are by chance than those of plain means.

        1 where the sites' people are of one age, more where a trend is estimated beside the shifts.
        """
        count, inverse = len(people), np.linalg.inv(self.normal_matrix)
        rough = (inverse @ self.design.T @ self.design @ inverse)[:count, :count]
        away = np.eye(count) - people / people.sum()
        return float(people @ np.diag(away @ rough @ away.T)) / max(count - 1, 1)

    def _scanners_and_people(self, box: Box) -> tuple[ScannersAndPeople, FloatArray]:
        terms = np.zeros((TERMS, self.volumes.shape[1]))

        def residuals() -> Iterator[tuple[slice, FloatArray]]:
            for part, rows in self.at_gain_one():
                np.add(terms, intensity_terms(rows, box.smooth(rows)), out=terms)  # on the way, in one pass
                yield part, rows - self.expected(part)

        n, used = self.design.shape
        rows = _rows_of_some(residuals(), n, self.volumes.shape[1])
        patterns = PeoplePatterns.of(rows, n / max(n - used, 1))
        means = distributed.summed(terms) / n
        return ScannersAndPeople(scanner_patterns(means, box.inside, box.mask), patterns), means


class _Quiet:
    """What is people's own in scans, without the noise of their sites."""

    def __init__(self, scans: _Scans, dummies: FloatArray, box: Box) -> None:
        self.scans, self.dummies, self.box = scans, dummies, box
        self.noise, self.kept = _kept_detail(scans.residuals, dummies, box)

    def residuals(self) -> Iterator[tuple[slice, FloatArray]]:
        for part, rows in self.scans.residuals():
            smooth = self.box.smooth(rows)
            kept = self.kept[self.dummies[part].argmax(axis=1)]
            yield part, smooth + kept * (rows - smooth)

    def spread(self) -> tuple[FloatArray, FloatArray]:
        """Return each site's spread beside the pooled one, (sites, voxels), and the pooled variance."""
        squares = np.zeros_like(self.kept)
        for part, rows in self.residuals():
            squares += self.dummies[part].T @ rows**2
        squares, people = distributed.summed(squares), self.dummies.sum(axis=0)
        pooled = squares.sum(axis=0) / people.sum()
        own = (squares + SPREAD_PEOPLE * pooled) / (people[:, None] + SPREAD_PEOPLE)
        still = pooled <= 1e-12
        return np.where(still, 1.0, np.sqrt(own / np.where(still, 1.0, pooled))), pooled


def _discriminant(
    scans: Callable[[], Iterator[tuple[slice, FloatArray]]],
    centre: FloatArray,
    shift: FloatArray,
    variance: FloatArray,
    dummies: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return what :meth:`VolumeSites.posterior` reads the site by: axes, places and precision."""
    axes = shift / np.maximum(variance, 1e-3 * variance.mean() + 1e-12) / np.sqrt(len(variance))
    away = _of_everybody(
        ((part, (rows - centre) @ axes.T) for part, rows in scans()), len(dummies), len(axes)
    )
    places = (dummies.T @ away) / dummies.sum(axis=0)[:, None]
    within = away - dummies @ places
    covariance = within.T @ within / len(away)
    # Sites' shifts add up to nothing, so one direction is empty: a small ridge keeps it out.
    ridge = (1e-3 * np.trace(covariance) / len(shift) + 1e-12) * np.eye(len(shift))
    return axes, places, np.linalg.inv(covariance + ridge)


def _kept_detail(
    residuals: Callable[[], Iterator[tuple[slice, FloatArray]]], dummies: FloatArray, box: Box
) -> tuple[FloatArray, FloatArray]:
    """Return each site's noise, and for each voxel the share of the detail that is none.

    The noise of a site is read where the finest pattern varies least between people (after Donoho, who reads
    it from the finest wavelets).
    """
    voxels = int(box.mask.sum())
    finest = np.zeros((dummies.shape[1], box.finest(np.zeros((1, voxels))).shape[1]))
    details = np.zeros((dummies.shape[1], voxels))
    for part, rows in residuals():
        finest += dummies[part].T @ box.finest(rows) ** 2
        details += dummies[part].T @ (rows - box.smooth(rows)) ** 2
    finest, details = distributed.summed(finest), distributed.summed(details)
    people = np.maximum(dummies.sum(axis=0), 1.0)[:, None]
    # A mask so thin that no two voxels lie side by side in all directions tells nothing of the noise.
    seen = finest / people if finest.shape[1] else np.zeros((len(people), 1))
    variance = np.quantile(seen, QUIET, axis=1, keepdims=True)
    noise = variance * box.detail_of_noise()
    # Variances of one site's voxels are rough; neighbours have much the same.
    detail = box.smooth(details / people)
    share: FloatArray = np.clip(1 - noise / np.maximum(detail, 1e-300), KEPT, 1.0)
    return np.sqrt(variance[:, 0]), share


def _of_everybody(parts: Iterator[tuple[slice, FloatArray]], people: int, width: int) -> FloatArray:
    """Return the rows of all people, of which each process has some parts."""
    rows = np.zeros((people, width))
    for part, values in parts:
        rows[part] = values
    return distributed.summed(rows)


def _rows_of_some(
    parts: Iterator[tuple[slice, FloatArray]], people: int, n_voxels: int
) -> NDArray[np.float32]:
    """Return the rows of some people, so that memory does not grow with all.

    Drawn, and the same in all processes: every other person may be every other site's.
    """
    some = np.sort(np.random.default_rng(0).permutation(people)[:DIRECTION_PEOPLE])
    rows = np.zeros((len(some), n_voxels), dtype=np.float32)
    for part, own in parts:
        inside = (some >= part.start) & (some < part.stop)
        rows[inside] = own[some[inside] - part.start]
    return distributed.summed(rows)


def _matched(
    owns: Callable[[], Iterator[tuple[slice, FloatArray]]], dummies: FloatArray, n_voxels: int
) -> tuple[FloatArray, FloatArray]:
    """Return the directions of greatest variance, and for each site what makes its covariance the pool's.

    Voxels of one spread may still move together more on one scanner than on another, and means over regions
    then vary more.
    """
    rows = _rows_of_some(owns(), len(dummies), n_voxels)
    most = min(DIRECTIONS, int(np.ceil(DIRECTION_SHARE * len(dummies))))
    values, vectors = largest(products(rows, rows), most)
    directions = (vectors / np.sqrt(values)).T @ rows
    del rows
    scores = _of_everybody(
        ((part, own @ directions.T) for part, own in owns()), len(dummies), len(directions)
    )
    return directions, evened(scores, dummies > 0)


def mean_volume(volumes: Volumes) -> tuple[FloatArray, float]:
    """Return the mean of scans whose bright end is 1, cut-off voxels left out, and their brightness."""
    total, measured = np.zeros(volumes.shape[1]), np.zeros(volumes.shape[1])
    logs, dark = np.zeros(1), np.zeros(1)
    for _, rows in _blocks(volumes):
        # The bright end of a scan, where even scans with a mean of 0 are far from it.
        bright = np.quantile(rows, BRIGHT, axis=1)
        dark += (bright <= 0).sum()
        bright = np.where(bright > 0, bright, 1.0)
        total += (rows / bright[:, None]).sum(axis=0)
        measured += (rows != 0).sum(axis=0)
        logs += np.log(bright).sum()
    if distributed.summed(dark)[0]:  # seen by all processes, or some would wait for the others
        raise InputError(
            "A scan is 0 or below in almost all of the brain, so its gain cannot be told; give images "
            "whose brain is brighter than its surroundings."
        )
    total, measured, logs = (distributed.summed(values) for values in (total, measured, logs))
    return np.maximum(total / np.maximum(measured, 1.0), 1e-6), float(np.exp(logs[0] / len(volumes)))


def _blocks(volumes: Volumes) -> Iterator[tuple[int, FloatArray]]:
    """Give this process's blocks of volumes and where they start."""
    for start in distributed.turns(range(0, len(volumes), BLOCK)):
        yield start, volumes.read(slice(start, start + BLOCK)).astype(np.float64)


def _powers(c: FloatArray, square_means: FloatArray) -> FloatArray:
    return np.hstack([c, c**2 - square_means])


def _differences(box: FloatArray) -> FloatArray:
    for axis in range(3):
        box = np.diff(box, axis=axis)
    return box
