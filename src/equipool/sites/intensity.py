r"""What a scanner does to intensities, undone in each scan: a curve, a slow gain, and blur.

Subtracting a site's mean difference corrects its mean brain and leaves the contrast between participants
distorted: a scanner that brightens dark voxels also makes participants differ less there. But what scanners
do is simple. Of a scan C as the pool would show it, at gain 1, a scanner makes

.. math:: N = C + b_0 + g(v) K + b_1 K^2 + b_2 K^3 + b_3 (SN - N) + b_4 (s(v)\, SN - N),

K being C within the range of what scans show, g a slow field over the brain, S smoothing within the brain and
s(v) the share of its kernel that lies there, so that the last term sees the dark around the brain. The
coefficients are those with which the pool's mean terms explain a site's mean difference, by generalised
least squares (:mod:`equipool.sites.scanner_patterns`), shrunk by what chance alone explains.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from equipool.sites.design import MAX_ITERATIONS, MAX_SLOPE_RATIO
from equipool.sites.effect import FloatArray, SiteEffect, array
from equipool.sites.scanner_patterns import ScannersAndPeople, Survey, slow_fields
from equipool.sites.scans import Box, gains

RANGE = (0.001, 0.999)  # quantiles of a scan's voxels, beyond which a curve is constant
USUAL_SIZE = 0.5  # prior standard deviation of a coefficient at gain 1
MAX_CHANCE = 0.05  # largest share of the mean brain's contrast that may be chance for a curve to be fitted


@dataclass(frozen=True, eq=False)
class Intensity(SiteEffect):
    """A curve, a slow gain and blur of each site; the equation is that of this module."""

    name: ClassVar[str] = "intensity"
    acts: ClassVar[tuple[str, ...]] = ("curves", "fields")

    range: FloatArray = array("2", neutral=(0.0, 1.0))  # where curves end
    curves: FloatArray = array("sites", "5")  # b
    fields: FloatArray = array("sites", "features")  # g

    def undo(self, rows: FloatArray, at: Any) -> FloatArray:
        """Return scans at gain 1 as the pool would show them.

        The gain is estimated anew, because that of a distorted scan depends on who is scanned.
        """
        straight = self._inverted(self._without_blur(rows, at), at)
        return straight / gains(straight, at.template)[:, None]

    def redo(self, rows: FloatArray, at: Any) -> FloatArray:
        """Return scans at gain 1 as their site would show them."""
        gain = np.ones((len(rows), 1))
        for _ in range(MAX_ITERATIONS):
            result = self._with_blur(self._curved(rows * gain, at), at)
            change = gains(result, at.template)[:, None]
            gain /= change
            if np.abs(change - 1).max(initial=0.0) < 1e-13:
                break
        return result

    def log_det(self, rows: FloatArray, at: Any) -> FloatArray:
        """Return log |∂ undo(rows) / ∂ rows|; of blur, the approximation for a brain without edges."""
        straight = self._inverted(self._without_blur(rows, at), at)
        total = -np.log(self._slope(straight, at)).sum(axis=1)
        total -= rows.shape[1] * np.log(gains(straight, at.template))
        blur = self.curves[:, 3:].sum(axis=1)[at.site]
        return total + rows.shape[1] * at.box.log_det_of_detail(1 + blur)

    def _without_blur(self, rows: FloatArray, at: Any) -> FloatArray:
        b = self.curves[at.site]
        smooth = at.box.smooth(rows)
        return rows - b[:, :1] - b[:, 3:4] * (smooth - rows) - b[:, 4:] * (smooth * at.box.inside - rows)

    def _with_blur(self, goal: FloatArray, at: Any) -> FloatArray:
        b, rows = self.curves[at.site], goal
        for _ in range(MAX_ITERATIONS):
            blurred = (b[:, 3:4] + b[:, 4:] * at.box.inside) * at.box.smooth(rows)
            after = (goal + b[:, :1] + blurred) / (1 + b[:, 3:4] + b[:, 4:])
            change, rows = np.abs(after - rows).max(initial=0.0), after
            if change < 1e-13:
                break
        return rows

    def _curved(self, rows: FloatArray, at: Any) -> FloatArray:
        inner, (square, cube) = np.clip(rows, *self.range), self.curves[at.site, 1:3].T[..., None]
        return rows + inner * (self.fields[at.site] + inner * (square + inner * cube))

    def _slope(self, rows: FloatArray, at: Any) -> FloatArray:
        """Return the curve's slope, 1 beyond its ends, and nowhere so small that it could not be inverted."""
        inner, (square, cube) = np.clip(rows, *self.range), self.curves[at.site, 1:3].T[..., None]
        slope = 1 + self.fields[at.site] + inner * (2 * square + 3 * cube * inner)
        return np.maximum(np.where(inner == rows, slope, 1.0), 1 / MAX_SLOPE_RATIO)

    def _inverted(self, goal: FloatArray, at: Any) -> FloatArray:
        """Return C whose curve is the goal, by Newton's method."""
        rows = goal.copy()
        for _ in range(4):  # to rounding: curves are nearly straight
            rows -= (self._curved(rows, at) - goal) / self._slope(rows, at)
        return rows

    @classmethod
    def fit(cls, survey: Survey, shift: FloatArray, error: FloatArray, box: Box) -> Self:
        """Find what explains each site's mean difference from the pool, ``shift`` (sites, voxels).

        ``error`` (sites,) is the variance of such a difference by chance, in units of the variance between
        participants.
        """
        means, people = survey.terms, survey.people
        effect = replace(cls.identity(*shift.shape), range=survey.ends)
        if people.total(len(box.inside)) / survey.n > MAX_CHANCE * len(box.inside) * means[0].var():
            return effect  # a curve could not be told from whom a site scanned
        slow, dark = slow_fields(box.mask), (means[0] + means[3]) * box.inside - means[0]
        maps = np.vstack([np.ones_like(dark), means[1:4], dark, means[0] * slow])
        size = np.maximum(np.linalg.norm(maps, axis=1), 1e-12)
        apart = ScannersAndPeople((maps / size[:, None]).astype(np.float32), people)
        for s in np.flatnonzero(error > 0):
            # A ridge: maps that are nearly equal would get large coefficients of opposite signs.
            b, explained = apart.coefficients(shift[s], error[s] / (USUAL_SIZE * size) ** 2)
            # James and Stein: by chance, what is explained has as many units as there are coefficients.
            b *= max(1.0 - len(b) / max(explained / error[s], 1e-300), 0.0) / size
            effect.curves[s], effect.fields[s] = b[: -len(slow)], b[-len(slow) :] @ slow
        return effect
