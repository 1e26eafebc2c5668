"""Scanners' part of the differences between mean brains: against literal sums and planted truths."""

import numpy as np
import pytest
from volume_fits import fitted, volumes_of
from volume_fits import smooth_field as smooth_field_of

from equipool.sites import scanner_patterns as scanners
from equipool.sites import scans, volume_model
from equipool.sites.scanner_patterns import (
    PeoplePatterns,
    ScannersAndPeople,
    intensity_terms,
    scanner_patterns,
)
from equipool.sites.scans import Box

MASK = np.zeros((20, 22, 19), dtype=bool)
MASK[2:18, 2:20, 2:17] = True


def smooth_field(rng, width=1.0):
    return smooth_field_of(rng, MASK, width)


# -- formulas --------------------------------------------------------------------------------------------


def test_slow_fields_against_a_loop():
    mask = MASK[:8, 3:9, 5:9]
    found = scanners.slow_fields(np.pad(mask, ((0, 3), (2, 0), (1, 1))))  # air around the brain is no matter
    place = np.argwhere(mask) - np.argwhere(mask).min(axis=0)
    shape = place.max(axis=0) + 1
    k = 0
    for order in np.ndindex(4, 4, 4):
        if sum(order) >= 4:
            continue
        for v, voxel in enumerate(place):
            waves = [
                np.cos(np.pi * n * (x + 0.5) / size) for n, x, size in zip(order, voxel, shape, strict=True)
            ]
            assert found[k, v] == pytest.approx(np.prod(waves), abs=1e-12)
        k += 1
    assert len(found) == k == 20


def test_intensity_terms_are_sums_over_participants():
    rng = np.random.default_rng(0)
    rows, smooth = rng.normal(size=(2, 5, 3))
    found = intensity_terms(rows, smooth)
    for v in range(3):
        x, d = rows[:, v], smooth[:, v] - rows[:, v]
        sums = [sum(x), sum(x**2), sum(x**3), sum(d), sum(d**2), sum(d * x)]
        np.testing.assert_allclose(found[:, v], sums)
    assert len(found) == len(sums)


def naive_patterns(rows):
    """Half as many patterns as participants; variances of each tenth along the others' patterns."""
    n, voxels = rows.shape
    most = n // 2
    variances, off = np.zeros(most), 0.0
    for k in range(10):
        others = np.array([row for i, row in enumerate(rows) if i % 10 != k])
        patterns = np.linalg.svd(others, full_matrices=False)[2][:most]
        for i, row in enumerate(rows):
            if i % 10 == k:
                variances += (patterns @ row) ** 2 / n
                off += (row @ row - ((patterns @ row) ** 2).sum()) / n
    return np.linalg.svd(rows, full_matrices=False)[2][:most], variances, off / (voxels - most)


def naive_part(shift, count, scanner, rows):
    """Generalised least squares with the covariance written out, and a loop over participants' patterns."""
    voxels = rows.shape[1]
    patterns, variances, rest = naive_patterns(rows)
    most = len(patterns)
    covariance = patterns.T @ np.diag(variances - rest) @ patterns + rest * np.eye(voxels)
    inverse = np.linalg.inv(covariance)
    cross = np.linalg.inv(scanner @ inverse @ scanner.T)
    unexplained = shift - (cross @ scanner @ inverse @ shift.T).T @ scanner
    # What chance leaves unexplained has the covariance of participants less that of the fit.
    by_chance = np.diag(patterns @ (covariance - scanner.T @ cross @ scanner) @ patterns.T)
    typical = (count.sum() - (count**2).sum() / count.sum()) / (len(count) - 1)
    result, start, width = shift.copy(), 0, 10.0
    while start < most:
        window = range(start, min(start + int(width), most))
        along = {k: [patterns[k] @ row for row in unexplained] for k in window}
        ratio = np.mean(
            [sum(m * a**2 for m, a in zip(count, along[k], strict=True)) / by_chance[k] for k in window]
        ) / (len(count) - 1)
        between = max(ratio - 1, 0) / typical  # a variance, in units of that between people
        for k in window:
            for s, m in enumerate(count):
                result[s] -= along[k][s] / m / (1 / m + between) * patterns[k]
        start, width = window[-1] + 1, 1.5 * width
    return result


def part(apart, shift, count):
    return apart.scanners_part(shift, count, apart.beyond_chance(shift, count))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [0.05, 1.0])
def test_the_scanners_part_against_its_definition(seed, size):
    rng, voxels = np.random.default_rng(seed), 500
    rows = np.stack([smooth_field(rng)[:voxels] for _ in range(40)]) + 0.2 * rng.normal(size=(40, voxels))
    scanner = rng.normal(size=(6, voxels))
    count = np.array([20.0, 12.0, 8.0])
    shift = size * np.stack([smooth_field(rng)[:voxels] for _ in count])
    shift -= count / count.sum() @ shift
    rows = rows.astype(np.float32)
    found = part(ScannersAndPeople(scanner.astype(np.float32), PeoplePatterns.of(rows)), shift, count)
    expected = naive_part(shift, count, scanner.astype(np.float32).astype(float), rows.astype(float))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(shift).max())


# -- what it is for --------------------------------------------------------------------------------------


def brains(rng, n):
    """Participants who differ along twelve patterns, around a brain with dark and bright parts, and noise."""
    everyone = np.random.default_rng(5)
    brain = np.clip(1.0 + 0.3 * smooth_field(everyone), 0.4, 1.6)
    patterns = np.stack([smooth_field(everyone) for _ in range(12)])
    own = 0.05 * rng.normal(size=(n, 12)) @ patterns
    return np.maximum(brain + own + 0.02 * rng.normal(size=own.shape), 0.05)


def parts(rows, site):
    """The patterns as a fit has them, and the distances of sites' means."""
    box = Box(MASK)
    means = np.stack([rows[site == s].mean(axis=0) for s in range(site.max() + 1)])
    terms = intensity_terms(rows, box.smooth(rows)) / len(rows)
    own = (rows - means[site]).astype(np.float32)
    count = np.bincount(site).astype(float)
    people = PeoplePatterns.of(own, len(rows) / (len(rows) - len(count)))
    apart = ScannersAndPeople(scanner_patterns(terms, box.inside, MASK), people)
    shift = means - count / count.sum() @ means
    return part(apart, shift, count), shift


@pytest.mark.parametrize("seed", range(3))
def test_a_scanners_curve_and_field_stay_and_sampling_error_goes(seed):
    rng = np.random.default_rng(seed)
    site = np.repeat([0, 1], 60)
    rows = brains(rng, 120)
    field = 1 + 0.15 * scanners.slow_fields(MASK)[3]
    seen = np.where(site[:, None] == 1, field * rows**1.2, rows)
    everybody = brains(np.random.default_rng(100 + seed), 4000)
    truth = (field * everybody**1.2 - everybody).mean(axis=0)
    found, means = parts(seen, site)
    nearer, as_measured = (np.square(shift[1] - shift[0] - truth).sum() for shift in (found, means))
    assert nearer < 0.7 * as_measured
    assert nearer < 0.02 * np.square(truth).sum()


@pytest.mark.parametrize("seed", range(3))
def test_where_scanners_are_alike_participants_stay_what_they_are(seed):
    site = np.repeat([0, 1], 60)
    found, means = parts(brains(np.random.default_rng(seed), 120), site)
    assert np.square(found).sum() < 0.6 * np.square(means).sum()


@pytest.mark.parametrize("seed", range(3))
def test_a_large_difference_is_the_scanners_whatever_its_pattern(seed):
    rng = np.random.default_rng(seed)
    site = np.repeat([0, 1], 60)
    rows = brains(rng, 120)
    # Along a pattern of participants, and several times what they differ by: no chance makes that.
    pattern = 6 * (rows - rows.mean(axis=0))[0]
    found, _ = parts(rows + site[:, None] * pattern, site)
    assert np.square(found[1] - found[0] - pattern).sum() < 0.02 * np.square(pattern).sum()


@pytest.mark.parametrize("n", [60, 240])
def test_variances_are_those_of_held_out_participants(n):
    rng = np.random.default_rng(n)
    rows, others = (brains(rng, size).astype(np.float32) for size in (n, 2000))
    centre = others.mean(axis=0)
    found = PeoplePatterns.of(rows - centre)
    along = ((others - centre) @ found.patterns.T).var(axis=0)
    for window in found.windows():
        assert found.variances[window].mean() == pytest.approx(along[window].mean(), rel=0.25)
    off = ((others - centre).var(axis=0).sum() - along.sum()) / (MASK.sum() - len(along))
    assert found.rest == pytest.approx(off, rel=0.1)


def test_the_mean_of_a_small_site_is_shrunk_more_than_that_of_a_large_one():
    """Scanners shift participants along their patterns, where a mean of five is mostly sampling error."""
    rng, errors = np.random.default_rng(0), np.zeros(2)
    site = np.repeat([0, 1, 2], [80, 80, 5])
    count = np.bincount(site) / len(site)
    for _ in range(6):
        rows = brains(rng, len(site))
        moved = 0.2 * rng.normal(size=(3, 40)) / np.sqrt(40) @ (rows - rows.mean(axis=0))[:40]
        found, means = parts(rows + moved[site], site)
        errors += [np.square(shift[2] - (moved - count @ moved)[2]).sum() for shift in (found, means)]
    assert errors[0] < 0.5 * errors[1]  # 0.33; 0.63 if all sites are judged alike


@pytest.mark.parametrize("factor", [1.1, 1e-6, 1e6])
def test_units_make_no_difference_though_the_brain_fills_its_box(factor):
    """Without a dark edge some of the maps are equal, and what rounding leaves between them is no pattern."""
    rng, mask = np.random.default_rng(1), np.ones((10, 10, 10), dtype=bool)
    site = np.repeat([0, 1], 30)
    rows = 1 + 0.1 * rng.normal(size=(60, 1000)) + 0.1 * site[:, None]

    def shift(rows):
        return fitted(volumes_of(rows, mask), site).composition["shift and scale"].shift

    once = shift(rows)
    assert np.abs(once).max() > 0
    np.testing.assert_allclose(shift(factor * rows), once, atol=1e-4 * np.abs(once).max())


def test_patterns_are_estimated_from_participants_of_all_sites():
    """Of six hundred who come from two sites in turn."""
    some = scans.rows_of_some(iter([(slice(0, 600), np.arange(600.0)[:, None])]), 600, 1)
    assert len(some) == scans.MAX_PARTICIPANTS
    assert 100 < (some % 2).sum() < 200


@pytest.mark.parametrize("seed", range(3))
def test_disjoint_ages_the_trend_is_nearer_to_the_truth(seed, monkeypatch):
    """A trend that no scanner can make is separated from the sites' shifts though no age is shared."""
    monkeypatch.setattr(volume_model, "_intensity_enters", lambda scans: False)
    rng = np.random.default_rng(seed)
    site = np.repeat([0, 1], 60)
    age = np.where(site == 0, rng.uniform(-1.2, -0.1, 120), rng.uniform(0.1, 1.2, 120))
    slope = 0.1 * smooth_field(np.random.default_rng(50 + seed), 1.0)
    rows = np.maximum(brains(rng, 120) + age[:, None] * slope, 0.05)
    rows = np.where(site[:, None] == 1, 0.9 * rows**1.1, rows)

    def error():
        trend = fitted(volumes_of(100 * rows, MASK), site, age).trend
        change = (trend(np.array([[1.0]])) - trend(np.array([[-1.0]])))[0] / 2
        return np.square(change - slope).sum()

    nearer = error()
    monkeypatch.setattr(volume_model, "TURNS", 0)
    assert nearer < 0.8 * error()


@pytest.mark.parametrize("participants", [(1, 30), (2, 2), (30,), (1, 1)])
def test_tiny_sites_and_a_single_one(participants):
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(len(participants)), participants)
    rows = 100 * brains(rng, len(site))
    model = fitted(volumes_of(rows, MASK), site, rng.normal(size=len(site)))
    clean = model.undo(rows, np.zeros((len(site), 1)), site, Box(MASK))
    assert np.isfinite(clean).all()
    if len(participants) == 1:
        np.testing.assert_allclose(model.composition["shift and scale"].shift, 0, atol=1e-9)
