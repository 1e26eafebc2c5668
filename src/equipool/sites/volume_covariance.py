"""Sites' covariances brought to the pool's, where they are farther from it than chance makes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equipool.sites.scanner_patterns import tenths

__all__ = ["by_chance", "evened", "variances_of_others"]

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]

CHANCE = 1.05  # times what chance makes of sites alike: nearer to the pool, a site's variance is left
STRETCH = 4.0  # the most that a direction is stretched by; a variance next to 0 may be its few people's


def evened(scores: FloatArray, members: Mask) -> FloatArray:
    """Return for each site what to multiply its people's scores by, (sites, D, D).

    A site's covariance has too many numbers to be known from its people, and most of what it shows is chance:
    only where a variance is beyond that is it brought to the pool's. Those whom the axis was found in
    exaggerate it; others show too little, as the axis is a little off; the truth lies between.

    Parameters
    ----------
    scores
        Of everybody along the directions, (people, D).
    members
        Who is of which site, (people, sites).
    """
    pooled = scores.T @ scores / len(scores)
    whiten, colour = _power(pooled, -0.5), _power(pooled, 0.5)
    mixing = np.tile(np.eye(scores.shape[1]), (members.shape[1], 1, 1))
    for site, member in enumerate(members.T):
        if member.sum() == 1:
            continue  # one person shows no covariance
        white = scores[member] @ whiten
        variances, axes = np.linalg.eigh(white.T @ white / max(len(white), 1))
        variances = np.maximum(variances, 0.0)  # what rounding leaves of 0 must not be below it
        low, high = by_chance(scores.shape[1], len(white), len(scores))
        beyond = (variances < low / CHANCE) | (variances > CHANCE * high)
        if beyond.any():
            others = variances_of_others(scores, member)
            others = np.where(variances > 1, np.maximum(others, 1.0), np.minimum(others, 1.0))
            between = np.maximum(np.sqrt(variances * others), STRETCH**-2)
            factor = np.where(beyond, between**-0.5, 1.0)
            mixing[site] = whiten @ (axes * factor) @ axes.T @ colour
    return mixing


def variances_of_others(scores: FloatArray, member: Mask) -> FloatArray:
    """Return a site's variances along axes found without the people who vary, by rank, the least first.

    In units of the pool's, from which these people are left out as well: whoever is in a pool of variance 1
    varies the more where the others of the site vary less.
    """
    people, total = np.flatnonzero(member), np.zeros(scores.shape[1])
    for others, these in tenths(len(people)):
        rest = np.delete(scores, people[these], axis=0)
        white = _power(rest.T @ rest / len(rest), -0.5)
        found = scores[people[others]] @ white
        _, axes = np.linalg.eigh(found.T @ found)
        # The variance of people in units of others' is too large by the roughness of these.
        fair = max(1 - scores.shape[1] / len(rest), 0.0)
        total += fair * ((scores[people[these]] @ white @ axes) ** 2).sum(axis=0)
    return total / max(len(people), 1)


def by_chance(directions: int, people: int, everybody: int) -> tuple[float, float]:
    """Return the least and the greatest variance of a site that chance makes where all sites are alike.

    Along the axes of its covariance, in units of the pool's, to which the site belongs: Wachter's law (1980),
    for many directions and people. A site of no more people than directions has variances of 0 by necessity,
    a single site variances of 1.
    """
    if people < 1 or people == everybody or everybody <= directions:
        return 0.0, np.inf
    own = np.sqrt(people * (everybody - directions))
    others = np.sqrt((everybody - people) * directions)
    low, high = ((own + sign * others) ** 2 / (everybody * people) for sign in (-1, 1))
    return float(low) if people > directions else 0.0, float(high)


def _power(matrix: FloatArray, exponent: float) -> FloatArray:
    """Return a power of a symmetric positive matrix."""
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, 1e-9 * max(values.max(initial=0.0), 1e-300))
    result: FloatArray = (vectors * values**exponent) @ vectors.T
    return result
