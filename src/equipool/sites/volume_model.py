"""What sites do to volumes, in closed form: gain, shift, noise and spread, voxel by voxel.

A scan is gain · (trend(covariates) + the site's shift + what is the person's own, stretched by the site), its
intensities bent and blurred by the scanner, plus the site's noise. The gain is each scan's own. What the
scanner does to intensities is undone scan by scan (:mod:`equipool.sites.intensity`). Trend and shift come
from one regression, the shift without the chance of whom a site scanned (`sites.scanner_patterns`).
The noise is estimated from the finest pattern of what is left and taken out of the detail by a Wiener filter,
so that a noisy scanner's detail ends as the quiet one's. The spread is what then remains different between
sites, voxel by voxel and along the directions in which brains vary most. A voxel of exactly 0 was cut off
with the skull: it is no measurement and stays 0, for a shifted 0 would tell the site. Where a scan is many
times brighter than any tissue it failed, and what the pool shows there is put in its place. Everything is a
sum over people: volumes are read in blocks, a few times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipool.data.volumes import Volumes
from equipool.sites.effect import array
from equipool.sites.intensity import Intensities, fit_intensities
from equipool.sites.scanner_patterns import largest, mixtures, products
from equipool.sites.scans import (
    Box,
    Parts,
    QuietScans,
    Scans,
    gains,
    mean_volume,
    normalised,
    of_everybody,
    rows_of_some,
)
from equipool.sites.volume_covariance import evened

__all__ = ["VolumeSites", "fit_volume_sites"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

DIRECTIONS = 40  # in which brains vary most; a site's covariance along them is brought to the pool's
DIRECTION_SHARE = 0.25  # directions a person, at most: covariances of more are too rough to be compared
DARK = 0.05  # of the brain's bright end: harmonized scans are bent below, so as not to fall below 0
CURVATURE = 1e-2  # ridge on squared covariates, so that the trend is straight where the sites' do not overlap


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
        What scanners do to intensities, see :class:`~equipool.sites.intensity.Intensities`; all of the
        above but the template are of scans without it.
    seen_centre, seen_shift, seen_spread
        Centre, shift and spread of scans as they are, for networks.
    axes, places, precision
        For reading the site from a scan: (sites, voxels) directions, (sites, sites) where each site's people
        lie along them on average, and the inverse of their covariance within sites.
    """

    template: FloatArray = array("features")
    unit: FloatArray = array()
    coefficients: FloatArray = array("powers", "features")
    square_means: FloatArray = array("covariates")
    centre: FloatArray = array("features")
    shift: FloatArray = array("sites", "features")
    noise: FloatArray = array("sites")
    kept: FloatArray = array("sites", "features")
    spread: FloatArray = array("sites", "features", positive=True)
    directions: FloatArray = array("directions", "features")
    mixing: FloatArray = array("sites", "directions", "directions")
    ends: FloatArray = array("2")
    curves: FloatArray = array("sites", "curves")
    fields: FloatArray = array("sites", "features")
    seen_centre: FloatArray = array("features")
    seen_shift: FloatArray = array("sites", "features")
    seen_spread: FloatArray = array("sites", "features", positive=True)
    axes: FloatArray = array("sites", "features")
    places: FloatArray = array("sites", "sites")
    precision: FloatArray = array("sites", "sites")

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
        return np.where(absent, 0.0, _above_zero(trend + own, rows) * float(self.unit))

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


def _above_zero(normal: FloatArray, rows: NDArray[np.floating]) -> FloatArray:
    """Return harmonized scans at gain 1, above 0 where the measured ones nowhere are below.

    What is darker than DARK approaches 0 without reaching it, in the same order.
    """
    floored = (np.asarray(rows).min(axis=1) >= 0)[:, None] & (normal < DARK)
    return np.where(floored, DARK * np.exp((np.minimum(normal, DARK) - DARK) / DARK), normal)


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
    """Fit in fourteen passes over the volumes, twelve if all was measured; processes share each pass out.

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
    template, unit, whole = mean_volume(volumes)
    count = int(site.max()) + 1
    dummies = np.eye(count)[site]
    people = dummies.sum(axis=0)
    square_means = (c**2).mean(axis=0) if len(c) else np.zeros(c.shape[1])
    powers = _powers(c, square_means)
    design = np.hstack([dummies, powers, extra - extra.mean(axis=0)])
    ridge = np.zeros(design.shape[1])
    ridge[count:] = 1e-9 * len(c)
    ridge[count + c.shape[1] : count + powers.shape[1]] = CURVATURE * len(c)

    seen = Scans(volumes, template, design, ridge, people, whole)
    intensities = _of_intensities(seen, box)
    seen_spread, variance = QuietScans(seen, dummies, box).spread()
    scans = Scans(
        volumes,
        template,
        design,
        ridge,
        people,
        whole,
        lambda normal, part: straightened(normal, intensities, dummies[part], box, template),
    )
    scans.regress()
    scans.leave_people_to_themselves(scans.contents(box).scanners_and_people(box))
    quiet = QuietScans(scans, dummies, box)
    spread, _ = quiet.spread()
    directions, mixing = _matched(
        lambda: ((part, rows / spread[site[part]]) for part, rows in quiet.residuals()),
        dummies,
        volumes.shape[1],
    )
    axes, places, precision = _discriminant(seen, variance, dummies)
    return VolumeSites(
        template=template,
        unit=np.asarray(unit),
        coefficients=scans.solution[count : count + powers.shape[1]],
        square_means=square_means,
        centre=scans.centre,
        shift=scans.shift,
        noise=quiet.noise,
        kept=quiet.kept,
        spread=spread,
        directions=directions,
        mixing=mixing,
        ends=intensities.ends,
        curves=intensities.curves,
        fields=intensities.fields,
        seen_centre=seen.centre,
        seen_shift=seen.shift,
        seen_spread=seen_spread,
        axes=axes,
        places=places,
        precision=precision,
    )


def _of_intensities(scans: Scans, box: Box) -> Intensities:
    """Fit scans as they are, and return what scanners did to their intensities."""
    scans.regress()
    contents = scans.contents(box)
    scans.leave_people_to_themselves(contents.scanners_and_people(box))
    return fit_intensities(
        contents.terms,
        contents.ends,
        scans.people,
        scans.shift,
        scans.shift_variance,
        contents.people,
        box.inside,
        box.mask,
    )


def _discriminant(
    scans: Scans, variance: FloatArray, dummies: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return what :meth:`VolumeSites.posterior` reads the site by: axes, places and precision."""
    centre, shift = scans.centre, scans.shift
    axes = shift / np.maximum(variance, 1e-3 * variance.mean() + 1e-12) / np.sqrt(len(variance))
    parts = ((part, (rows - centre) @ axes.T) for part, rows in scans.at_gain_one())
    away = of_everybody(parts, len(dummies), len(axes))
    places = (dummies.T @ away) / dummies.sum(axis=0)[:, None]
    within = away - dummies @ places
    covariance = within.T @ within / len(away)
    # Sites' shifts add up to nothing, so one direction is empty: a small ridge keeps it out.
    ridge = (1e-3 * np.trace(covariance) / len(shift) + 1e-12) * np.eye(len(shift))
    return axes, places, np.linalg.inv(covariance + ridge)


def _matched(owns: Callable[[], Parts], dummies: FloatArray, n_voxels: int) -> tuple[FloatArray, FloatArray]:
    """Return the directions of greatest variance, and for each site what makes its covariance the pool's.

    Voxels of one spread may still move together more on one scanner than on another, and means over regions
    then vary more.
    """
    rows = rows_of_some(owns(), len(dummies), n_voxels)
    most = min(DIRECTIONS, int(np.ceil(DIRECTION_SHARE * len(dummies))))
    values, vectors = largest(products(rows, rows), most)
    directions = mixtures((vectors / np.sqrt(values)).T, rows)
    del rows
    scores = of_everybody(((part, own @ directions.T) for part, own in owns()), len(dummies), len(directions))
    return directions, evened(scores, dummies > 0)


def _powers(c: FloatArray, square_means: FloatArray) -> FloatArray:
    return np.hstack([c, c**2 - square_means])
