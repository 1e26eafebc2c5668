"""Scans as rows of brain voxels: their gain, their noise, and the regression that says what to expect.

Everything is a sum over people: volumes are read in blocks, a few times, and several processes share each
pass out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from equipool import distributed
from equipool.checks.findings import listed
from equipool.data.volumes import Volumes
from equipool.exceptions import InputError
from equipool.sites.intensity import ENDS
from equipool.sites.scanner_patterns import (
    TERMS,
    PeoplePatterns,
    ScannersAndPeople,
    intensity_terms,
    scanner_patterns,
)

__all__ = [
    "Box",
    "Contents",
    "Parts",
    "QuietScans",
    "Scans",
    "gains",
    "mean_volume",
    "normalised",
    "of_everybody",
    "rows_of_some",
]

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]
Parts = Iterator[tuple[slice, FloatArray]]

BLOCK = 16  # volumes at a time
SMOOTH = 0.6  # voxels: what is finer is detail, in which noise is looked for
QUIET = 0.1  # the quantile of voxels that have next to no anatomy of their own in the finest pattern
BRIGHT = 0.85  # quantile of the template
FAR = 10.0  # times the bright end of the brain: beyond is no tissue but a failure of the scan
KEPT = 0.1  # least share of the detail that stays
SPREAD_PEOPLE = 10.0  # people's worth of the pooled spread that a site's own is mixed with
PATTERN_PEOPLE = 300  # of whom patterns and directions are found, so that memory does not grow with people
SMALL = 5  # people of a site; of fewer, its mean brain is mostly who they are
TURNS = 10  # of fitting the trend and what scanners do, each beside the other


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


def gains(rows: NDArray[np.floating], template: FloatArray) -> FloatArray:
    """Return each scan's median ratio to the template over the brightest part of the brain.

    In a T1 image that is white matter, which age and disease thin least; the whole brain's median would fall
    with the grey matter that a patient has lost.
    """
    bright = template >= np.quantile(template, BRIGHT)
    ratio = np.median(np.asarray(rows, dtype=np.float64)[:, bright] / template[bright], axis=1)
    return np.where(ratio > 0, ratio, 1.0)


def normalised(rows: NDArray[np.floating], template: FloatArray) -> FloatArray:
    """Return volumes at gain 1, with the template's value where nothing was measured."""
    return _normalised(rows, template)[0]


def _normalised(rows: NDArray[np.floating], template: FloatArray) -> tuple[FloatArray, Mask]:
    """Return the same, and where nothing was measured: cut off with the skull, or far from any tissue."""
    values: FloatArray = np.asarray(rows, dtype=np.float64) / gains(rows, template)[:, None]
    absent = (np.asarray(rows) == 0) | (np.abs(values) > FAR)
    np.copyto(values, template, where=absent)
    return values, absent


def mean_volume(volumes: Volumes) -> tuple[FloatArray, float, bool]:
    """Return the mean of scans whose bright end is 1, over what was measured, and the scans' brightness.

    And whether every voxel was measured.
    """
    total, measured = np.zeros(volumes.shape[1]), np.zeros(volumes.shape[1])
    logs, dark = np.zeros(1), np.zeros(len(volumes))
    for start, rows in _blocks(volumes):
        # The bright end of a scan, where even scans with a mean of 0 are far from it.
        bright = np.quantile(rows, BRIGHT, axis=1)
        dark[start : start + len(rows)] = bright <= 0
        bright = np.where(bright > 0, bright, 1.0)
        values = rows / bright[:, None]
        seen = (rows != 0) & (np.abs(values) <= FAR)
        total += np.where(seen, values, 0.0).sum(axis=0)
        measured += seen.sum(axis=0)
        logs += np.log(bright).sum()
    _refuse_dark(volumes, np.flatnonzero(distributed.summed(dark)))  # by all processes, or some would wait
    total, measured, logs = (distributed.summed(values) for values in (total, measured, logs))
    mean = np.maximum(total / np.maximum(measured, 1.0), 1e-6)
    return mean, float(np.exp(logs[0] / len(volumes))), bool((measured == len(volumes)).all())


def _refuse_dark(volumes: Volumes, rows: NDArray[np.intp]) -> None:
    if len(rows):
        names = listed(volumes.paths[k].name if volumes.paths else f"volume {k}" for k in rows)
        raise InputError(
            f"0 or below in almost all of the brain, so that no gain can be told: {len(rows)} of "
            f"{len(volumes)} images ({names}); give images whose brain is brighter than its surroundings."
        )


def _blocks(volumes: Volumes) -> Iterator[tuple[int, FloatArray]]:
    """Give this process's blocks of volumes and where they start."""
    for start in distributed.turns(range(0, len(volumes), BLOCK)):
        yield start, volumes.read(slice(start, start + BLOCK)).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Contents:
    """What scans of the pool show: means of intensity terms, the intensities' ends, how people differ."""

    terms: FloatArray
    ends: FloatArray
    people: PeoplePatterns

    def scanners_and_people(self, box: Box) -> ScannersAndPeople:
        """Return what tells scanners from people in these scans."""
        return ScannersAndPeople(scanner_patterns(self.terms, box.inside, box.mask), self.people)


class Scans:
    """Scans at gain 1, and the regression that says what to expect of them.

    Parameters
    ----------
    volumes, template
        The scans, and the mean volume that their gains are told by.
    design, ridge
        (people, columns): the sites first, then covariates and what else explains volumes; and (columns,).
    people
        (sites,): how many of each.
    whole
        Whether every voxel of every scan was measured.
    straighten
        Takes a scanner's doing out of scans at gain 1, given which rows they are.
    """

    def __init__(
        self,
        volumes: Volumes,
        template: FloatArray,
        design: FloatArray,
        ridge: FloatArray,
        people: FloatArray,
        whole: bool,
        straighten: Callable[[FloatArray, slice], FloatArray] | None = None,
    ) -> None:
        self.volumes, self.template, self.design, self.people = volumes, template, design, people
        self.whole, self.straighten = whole, straighten
        self.normal_matrix = design.T @ design + np.diag(ridge)
        self.moments: FloatArray = np.zeros((design.shape[1], volumes.shape[1]))
        self.solution: FloatArray = np.zeros_like(self.moments)
        self.fitted = False

    def at_gain_one(self) -> Parts:
        """Give scans in parts."""
        for start, rows in _blocks(self.volumes):
            part = slice(start, start + len(rows))
            normal, absent = _normalised(rows, self.template)
            if self.straighten is not None:
                normal = self.straighten(normal, part)
            # What was not measured is, once there is a fit, what the fit lets expect.
            if self.fitted and not self.whole:
                np.copyto(normal, self.expected(part), where=absent)
            yield part, normal

    def expected(self, part: slice) -> FloatArray:
        """Return what the regression says of a part of the scans."""
        expected: FloatArray = self.design[part] @ self.solution
        return expected

    def residuals(self) -> Parts:
        """Give what is people's own in scans, in parts."""
        for part, rows in self.at_gain_one():
            yield part, rows - self.expected(part)

    def regress(self) -> None:
        """Fit sites' levels and the trend, and once more with what to expect where nothing was measured."""
        for _ in range(1 if self.whole else 2):
            moments = np.zeros_like(self.moments)
            for part, rows in self.at_gain_one():
                moments += self.design[part].T @ rows
            self.moments = distributed.summed(moments)
            self.solution = np.linalg.inv(self.normal_matrix) @ self.moments
            self.fitted = True

    @property
    def centre(self) -> FloatArray:
        """The pool's value at covariates 0, (voxels,)."""
        level: FloatArray = (self.people / self.people.sum()) @ self.solution[: len(self.people)]
        return level

    @property
    def shift(self) -> FloatArray:
        """Sites' distances from the pool, (sites, voxels)."""
        return self.solution[: len(self.people)] - self.centre

    @property
    def shift_variance(self) -> FloatArray:
        """How much shifts vary by chance, (sites,), in units of the variance between people."""
        return (1 / self.people - 1 / self.people.sum()) * self._chance()

    def contents(self, box: Box) -> Contents:
        """Look at what scans show: their intensities, and how people differ; in one pass."""
        terms, ends = np.zeros((TERMS, self.volumes.shape[1])), np.zeros(2)

        def residuals() -> Parts:
            for part, rows in self.at_gain_one():
                np.add(terms, intensity_terms(rows, box.smooth(rows)), out=terms)
                np.add(ends, np.quantile(rows, ENDS, axis=1).sum(axis=1), out=ends)
                yield part, rows - self.expected(part)

        n, used = self.design.shape
        rows = rows_of_some(residuals(), n, self.volumes.shape[1])
        patterns = PeoplePatterns.of(rows, n / max(n - used, 1))
        return Contents(distributed.summed(terms) / n, distributed.summed(ends) / n, patterns)

    def leave_people_to_themselves(self, apart: ScannersAndPeople) -> None:
        """Let sites differ by what their scanners do, and not by whom they happened to scan.

        Trend and shifts explain each other where sites' ages differ, so they are fitted in turns: the sites'
        means beside the trend, of these the scanners' part, and beside that the pool's level and the trend.
        """
        people, count, share = self.people, len(self.people), self.people / self.people.sum()
        pool = np.eye(len(self.solution))[count - 1 :]
        pool[0, :count] = 1.0  # one level for all sites instead of one for each
        normal, moments, solution = self.normal_matrix, self.moments, self.solution
        # Judged once: with every turn the trend takes more of the shifts, and they would seem ever smaller.
        beyond = apart.beyond_chance(self.shift, people, self._chance())
        told = self._told(apart.people)
        for _ in range(TURNS):
            means = (moments[:count] - normal[:count, count:] @ solution[count:]) / people[:, None]
            shift = apart.scanners_part(means - share @ means, people, beyond)
            shift *= told[:, None]
            shift -= share @ shift
            given = pool @ (moments - normal[:, :count] @ shift)
            level_and_trend = np.linalg.inv(pool @ normal @ pool.T) @ given
            solution = np.vstack([level_and_trend[0] + shift, level_and_trend[1:]])
        self.solution = solution

    def _told(self, people: PeoplePatterns) -> FloatArray:
        """Return the share of small sites' shifts that is not who their people are; of the others', 1.

        By how far large sites are from the pool, beside how far people are from each other. Of one person
        nothing can be told.
        """
        large = self.people >= SMALL
        if not large.any():
            large = np.ones_like(large)
        between = people.variances.sum() + people.rest * (self.volumes.shape[1] - len(people.variances))
        size = (self.shift[large] ** 2).sum(axis=1) / between - self.shift_variance[large]
        scanners = self.people * max(float(size.mean()), 0.0)
        return np.where(self.people >= SMALL, 1.0, np.where(self.people > 1, scanners / (1 + scanners), 0.0))

    def _chance(self) -> float:
        """Return how much larger sites' distances are by chance than those of plain means.

        1 where the sites' people are of one age, more where a trend is estimated beside the shifts.
        """
        count, inverse = len(self.people), np.linalg.inv(self.normal_matrix)
        rough = (inverse @ self.design.T @ self.design @ inverse)[:count, :count]
        away = np.eye(count) - self.people / self.people.sum()
        return float(self.people @ np.diag(away @ rough @ away.T)) / max(count - 1, 1)


class QuietScans:
    """What is people's own in scans, without the noise of their sites."""

    def __init__(self, scans: Scans, dummies: FloatArray, box: Box) -> None:
        self.scans, self.dummies, self.box = scans, dummies, box
        self.noise, self.kept = _kept_detail(scans.residuals, dummies, box)
        self.alone = scans.people == 1  # of one person neither noise nor spread can be told
        self.kept[self.alone] = 1.0

    def residuals(self) -> Parts:
        """Give it in parts."""
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
        spread = np.where(still, 1.0, np.sqrt(own / np.where(still, 1.0, pooled)))
        spread[self.alone] = 1.0
        return spread, pooled


def _kept_detail(
    residuals: Callable[[], Parts], dummies: FloatArray, box: Box
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


def of_everybody(parts: Parts, people: int, width: int) -> FloatArray:
    """Return the rows of all people, of which each process has some parts."""
    rows = np.zeros((people, width))
    for part, values in parts:
        rows[part] = values
    return distributed.summed(rows)


def rows_of_some(parts: Parts, people: int, n_voxels: int) -> NDArray[np.float32]:
    """Return the rows of some people, so that memory does not grow with all.

    Drawn, and the same in all processes: every other person may be every other site's.
    """
    some = np.sort(np.random.default_rng(0).permutation(people)[:PATTERN_PEOPLE])
    rows = np.zeros((len(some), n_voxels), dtype=np.float32)
    for part, own in parts:
        inside = (some >= part.start) & (some < part.stop)
        rows[inside] = own[some[inside] - part.start]
    return distributed.summed(rows)


def _differences(box: FloatArray) -> FloatArray:
    for axis in range(3):
        box = np.diff(box, axis=axis)
    return box
