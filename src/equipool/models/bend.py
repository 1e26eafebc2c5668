"""What sites bend: a site's skewness brought to the pool's, feature by feature, in closed form.

A scanner that compresses large values, as a gamma does, gives its people's residuals another skewness. The
quadratic q − a (q² − 1) takes a skewness of 6a away and leaves the mean; a is shrunk by how little a site's
people tell of a third moment. Beyond 2.5 deviations it is a shift, so the map is monotone and has an inverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipool.models.pieces import pieces, site_rows

__all__ = ["Bend", "fit_bend", "no_bend"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

REACH = 2.5  # deviations within which the map is a quadratic
LARGEST = 0.18  # of a, below 1 / (2 · REACH): beyond, the map would turn back
CLIP = 3.5  # deviations, so that one outlier is not a skewness
SURE = 2.0  # standard errors by which held-out people must show that sites bend


@dataclass(frozen=True, eq=False)
class Bend:
    """The quadratics of sites and features, (sites, p), and the scale of residuals that they act on, (p,).

    ``amount`` is a, 0 for none; ``stretch`` gives back the spread that straightening takes.
    """

    scale: FloatArray
    amount: FloatArray
    stretch: FloatArray

    def straighten(self, r: FloatArray, site: int) -> FloatArray:
        """Return residuals of one site with the pool's skewness."""
        a = self.amount[site]
        if not a.any():
            return r
        q = r / self.scale
        return (q - a * (np.clip(q, -REACH, REACH) ** 2 - 1)) * self.stretch[site] * self.scale

    def bend(self, r: FloatArray, site: int) -> FloatArray:
        """Return residuals as the site shows them: the inverse of :meth:`straighten`."""
        a = self.amount[site]
        if not a.any():
            return r
        y = r / self.scale / self.stretch[site]
        outside = a * (REACH**2 - 1)
        inner = np.clip(y, -REACH - outside, REACH - outside)
        # The root of a q² − q + (y − a) = 0 that is y where a is 0.
        q = 2 * (inner - a) / (1 + np.sqrt(np.maximum(1 - 4 * a * (inner - a), 0.0)))
        return (q + (y - inner)) * self.scale

    def log_slope(self, r: FloatArray, site: int) -> FloatArray:
        """Return how much straightening stretches volumes around each row, as a logarithm."""
        a = self.amount[site]
        if not a.any():
            return np.zeros(len(r))
        q = r / self.scale
        slope = 1 - 2 * a * np.where(np.abs(q) <= REACH, q, 0.0)
        result: FloatArray = np.log(np.maximum(slope, 1e-3) * self.stretch[site]).sum(axis=1)
        return result

    def with_site(self) -> Bend:
        """Return the same with one more site, which bends nothing."""
        p = len(self.scale)
        return Bend(self.scale, np.vstack([self.amount, np.zeros(p)]), np.vstack([self.stretch, np.ones(p)]))


def no_bend(n_sites: int, p: int) -> Bend:
    """Return what leaves everything as it is."""
    return Bend(np.ones(p), np.zeros((n_sites, p)), np.ones((n_sites, p)))


def fit_bend(
    residuals: FloatArray,
    site: IntArray,
    weight: FloatArray,
    fold: IntArray,
    n_sites: int,
    wanted: bool | None = None,
) -> Bend:
    """Fit the quadratics; ``wanted=None``: only where held-out people show that sites bend."""
    p = residuals.shape[1]
    if wanted is False or n_sites < 2:
        return no_bend(n_sites, p)
    squares = sum(weight[part] @ residuals[part] ** 2 for part in pieces(*residuals.shape))
    scale = np.sqrt(np.maximum(squares / weight.sum(), 1e-300))
    # A skewness does not depend on the scale, so residuals need not be divided by it.
    own = site_rows(site, n_sites)
    if wanted is None and not _held_out_agree(residuals, own, weight, fold):
        return no_bend(n_sites, p)
    skewness, pooled = _shrunk(*_cubes(residuals, own, weight))
    a = np.clip(skewness / 6, -LARGEST, LARGEST)
    # The variance of q − a (q² − 1) for a skewness of pooled + 6a and the tails of a Gaussian.
    variance = 1 - 2 * a * (pooled + 6 * a) + 2 * a**2
    return Bend(scale, a, 1 / np.sqrt(np.maximum(variance, 0.25)))


def _cubes(r: FloatArray, own: list[IntArray], weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return each site's skewness of each feature, around its own mean and spread, and its people.

    ``own`` are the rows of each site. Some features at a time: a mean has to be known before a spread.
    """
    skewness, people = np.zeros((len(own), r.shape[1])), np.zeros(len(own))
    for s, rows in enumerate(own):
        if len(rows) < 3:
            continue
        w = weight[rows]
        people[s] = w.sum()
        for part in pieces(r.shape[1], len(rows)):
            q = r[rows, part]
            q -= w @ q / people[s]
            q /= np.maximum(np.sqrt(w @ q**2 / people[s]), 1e-9)
            np.clip(q, -CLIP, CLIP, out=q)
            skewness[s, part] = w @ (q * q * q) / people[s]
    return skewness, people


def _shrunk(skewness: FloatArray, people: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return how far each site's skewness is from the pool's, shrunk by its error, and the pool's."""
    known = people > 0
    pooled = people @ skewness / max(people.sum(), 1e-12)
    apart = np.where(known[:, None], skewness - pooled, 0.0)
    error = np.where(known, 6 / np.maximum(people, 1e-12), np.inf)[:, None]  # variance of a sample's skewness
    excess = (apart[known] ** 2 - error[known]).mean() if known.any() else 0.0
    between = max(float(excess), 0.0)
    return apart * between / (between + error), pooled


def _held_out_agree(r: FloatArray, own: list[IntArray], weight: FloatArray, fold: IntArray) -> bool:
    """Say whether a site's skewness, learned from some of its people, foretells that of the others.

    The gain of each held-out part of a site is how much nearer its third moments are to what the others of
    the site showed than to the pool's. Features go together, so a part of a site counts as one observation.
    """
    gains = []
    for k in range(int(fold.max()) + 1):
        told, pooled = _shrunk(*_cubes(r, [rows[fold[rows] != k] for rows in own], weight))
        seen, people = _cubes(r, [rows[fold[rows] == k] for rows in own], weight)
        apart = seen - pooled
        gain = people * (apart**2 - (apart - told) ** 2).mean(axis=1)
        gains += gain[people > 0].tolist()
    if len(gains) < 3 or not np.any(gains):
        return False
    error = float(np.std(gains, ddof=1)) / np.sqrt(len(gains))
    return float(np.mean(gains)) > SURE * error
