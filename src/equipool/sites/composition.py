"""Whom a site scanned: what of the sites' differences is more likely their people's than their scanners'.

People differ along a few factors that run through many features, head size above all. Where one site scans
more men than another and nobody says so, its shift has a part along that factor. A scanner shifts each
feature in its own way, which hardly adds up to a factor of people; and where it does (thickness, by its
contrast), it moves everybody by as much as people differ. So a difference between sites along a factor of
people that is beyond what their features' own shifts add up to, and small beside how people of one site
differ, is left to the people.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipool.sites.covariance import WIDEST_MIXING
from equipool.sites.design import Design
from equipool.sites.passes import gram
from equipool.sites.shift_scale import Regression, variance_between

__all__ = ["Composition", "fit_composition", "no_composition", "people_factors"]

FloatArray = NDArray[np.float64]

LARGE = 0.05  # of the variance of all features: a factor that runs through many of them
FACTORS = 5  # at most
SITES = 6  # fewer do not tell how far sites differ along a factor
LIKE_PEOPLE = (0.4, 0.6)  # deviations of people of one site; sites that differ more do so by their scanners
FEATURES = 20  # different ones that a factor must run through; fewer a scanner may well move together
ALIKE = 0.9  # correlation of features that are one
SURE = 0.99  # that sites differ along a factor beyond their features' own shifts


def people_factors(residuals: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the loadings (factors, p) along which people of one site differ most, at a variance of 1.

    And how many features are as good as each one, (p,).
    """
    from scipy.linalg import eigh

    covariance = gram(residuals, residuals, weight) / weight.sum()
    deviation, p = np.sqrt(np.maximum(np.diag(covariance), 1e-12)), len(covariance)
    correlation = covariance / np.outer(deviation, deviation)
    values, vectors = eigh(correlation, subset_by_index=[max(p - FACTORS, 0), p - 1])
    values, vectors = values[::-1], vectors[:, ::-1]
    # How many features are as good as each one, itself among them: these count as one.
    copies = (np.abs(correlation) > ALIKE).sum(axis=1).clip(1).astype(np.float64)
    large = (values > max(LARGE * p, 1.0)) & (_runs_through(vectors, copies) >= FEATURES)
    return (vectors[:, large] * np.sqrt(values[large])).T * deviation, copies


def _runs_through(vectors: FloatArray, copies: FloatArray) -> FloatArray:
    """Return through how many different features a factor runs: its participation ratio."""
    part = vectors**2 / copies[:, None]
    result: FloatArray = part.sum(axis=0) ** 2 / (part * vectors**2).sum(axis=0)
    return result


@dataclass(frozen=True, eq=False)
class Composition:
    """Factors of people, and how far sites' people differ along them.

    Attributes
    ----------
    loadings
        (factors, p).
    beyond, believed
        (factors,): the variance of sites' places, and the share of a place that is taken for the people's, 0
        where sites differ by nothing, or by too much for their people.
    between
        (p,): the variance of sites' shifts, times how many features are as good as this one.
    """

    loadings: FloatArray
    beyond: FloatArray
    believed: FloatArray
    between: FloatArray

    def kept(self, shift: FloatArray, error: FloatArray, people: FloatArray) -> FloatArray:
        """Return the part of sites' shifts (sites, p), known to so much, that is their people's.

        ``people`` is the squared error of a site's mean for a feature of variance 1, (sites,).
        """
        if not self.believed.any():
            return np.zeros_like(shift)
        place, noise = _places(self.loadings, shift, error, self.between, people)
        share = self.believed * self.beyond / np.maximum(self.beyond + noise, 1e-300)
        result: FloatArray = (place * share) @ self.loadings
        return result


def no_composition(p: int) -> Composition:
    """Return that sites' people do not differ."""
    return Composition(np.empty((0, p)), np.empty(0), np.empty(0), np.zeros(p))


def fit_composition(fit: Regression, residuals: FloatArray, design: Design) -> tuple[Composition, FloatArray]:
    """Find the factors, how far sites truly differ along them, and what of their shifts is kept.

    How far is the estimate of a meta-analysis, as for shifts and spreads.
    """
    p = fit.shift.shape[1]
    nothing = no_composition(p), np.zeros_like(fit.shift)
    if np.count_nonzero(fit.people) < SITES or not FEATURES <= p <= WIDEST_MIXING:
        return nothing
    loadings, copies = people_factors(residuals, design.weight)
    if not len(loadings):
        return nothing
    between = variance_between(fit.shift, fit.error) * copies
    place, noise = _places(loadings, fit.shift, fit.error, between, fit.inverse)
    beyond = variance_between(place, np.sqrt(noise))
    all_of_it, nothing_of_it = LIKE_PEOPLE
    believed = np.clip((nothing_of_it - np.sqrt(beyond)) / (nothing_of_it - all_of_it), 0, 1)
    found = Composition(loadings, beyond, np.where(_differ(place, noise), believed, 0.0), between)
    return found, found.kept(fit.shift, fit.error, fit.inverse)


def _places(
    loadings: FloatArray, shift: FloatArray, error: FloatArray, between: FloatArray, people: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return where sites' people stand along the factors, and the variance of its error, (sites, factors).

    By generalised least squares, features that sites shift much weighing little; the error is what the
    features' own shifts, and the few people, make of it.
    """
    place, noise = np.empty((2, len(shift), len(loadings)))
    for s, own in enumerate(shift):
        weighted = loadings / np.maximum(between + error[s] ** 2, 1e-12)
        inverse = np.linalg.pinv(weighted @ loadings.T)
        place[s] = inverse @ weighted @ own
        noise[s] = np.diag(inverse) + people[s]
    return place, noise


def _differ(place: FloatArray, noise: FloatArray) -> NDArray[np.bool_]:
    """Say along which factors sites differ more than their noise lets expect (Cochran's test)."""
    from scipy.stats import chi2

    mean = (place / noise).sum(axis=0) / (1 / noise).sum(axis=0)
    return np.asarray(((place - mean) ** 2 / noise).sum(axis=0) > chi2.ppf(SURE, len(place) - 1))
