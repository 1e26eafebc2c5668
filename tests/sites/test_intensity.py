"""What scanners do to intensities, undone scan by scan: against a loop, and on scans bent on purpose."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from equipool.data.volumes import Volumes
from equipool.sites import intensity as intensities
from equipool.sites.intensity import Intensities, fit_intensities
from equipool.sites.scanner_patterns import PeoplePatterns, intensity_terms, slow_fields
from equipool.sites.scans import SMOOTH, Box
from equipool.sites.volume_model import fit_volume_sites

MASK = np.zeros((20, 22, 19), dtype=bool)
MASK[2:18, 2:20, 2:17] = True
SITE = np.repeat([0, 1, 2], [70, 50, 50])
NOTHING = np.empty((len(SITE), 0))


def smooth_field(rng, width=1.5):
    field = gaussian_filter(rng.normal(size=MASK.shape), width)[MASK]
    return field / field.std()


def brains(seed):
    """Brains between dark and bright whose people differ smoothly, (people, voxels)."""
    rng = np.random.default_rng(seed)
    base = 0.7 + 0.18 * smooth_field(rng, 2.0)
    patterns = np.stack([smooth_field(rng) for _ in range(25)])
    return np.clip(base + 0.02 * rng.normal(size=(len(SITE), 25)) @ patterns, 0.05, None)


def scanned(rows, scanner):
    """Return scans by one of three scanners: as they are; bent; bent the other way, blurred, a slow gain."""
    if scanner == 0:
        return rows
    if scanner == 1:
        return rows**0.75
    field = 1 + 0.1 * slow_fields(MASK)[1]
    return 0.8 * Box(MASK).smooth(rows**1.25) * field + 0.2 * rows**1.25 * field


def volumes_of(rows):
    boxes = np.zeros((len(rows), *MASK.shape))
    boxes[:, MASK] = 100 * rows
    return Volumes.from_array(boxes, np.eye(4), MASK)


def as_scanned(rows):
    return np.stack([scanned(rows[k : k + 1], s)[0] for k, s in enumerate(SITE)])


def test_a_curve_is_turned_round():
    rng = np.random.default_rng(0)
    mask = np.ones((3, 4, 3), dtype=bool)
    box, clean = Box(mask), rng.uniform(0, 1.5, size=(4, 36))
    known = Intensities(
        np.array([0.2, 1.1]),
        np.array([[0.05, 0.2, -0.1, 0, 0], [-0.1, -0.2, 0.05, 0, 0]]),
        rng.uniform(-0.2, 0.2, (2, 36)),
    )
    share = np.array([[1, 0], [0, 1], [0.3, 0.7], [0.5, 0.5]])
    scans = np.empty_like(clean)
    for k, row in enumerate(clean):
        b, g = share[k] @ known.curves, share[k] @ known.fields
        for v, x in enumerate(row):
            inner = min(max(x, 0.2), 1.1)
            scans[k, v] = x + b[0] + g[v] * inner + b[1] * inner**2 + b[2] * inner**3
    np.testing.assert_allclose(known.straightened(scans, share, box), clean, atol=1e-6)


def test_blur_is_that_of_the_scan():
    rng = np.random.default_rng(1)
    box, scans = Box(MASK), brains(1)[:4]
    known = Intensities(np.array([0.0, 2.0]), np.array([[0, 0, 0, 0.3, -0.2]]), np.zeros((1, MASK.sum())))
    found = known.straightened(scans, np.ones((4, 1)), box)
    for k in rng.integers(0, 4, 2):
        image = np.zeros(MASK.shape)
        image[MASK] = scans[k]
        dark = gaussian_filter(image, SMOOTH)
        smooth = dark / gaussian_filter(MASK.astype(float), SMOOTH)
        expected = image - 0.3 * (smooth - image) + 0.2 * (dark - image)
        np.testing.assert_allclose(found[k], expected[MASK], atol=1e-10)


def test_coefficients_against_generalised_least_squares():
    """One site's, with people's covariance written out, and before what chance explains is taken off."""
    rng, mask = np.random.default_rng(2), np.zeros((7, 7, 7), dtype=bool)
    mask[1:6, 1:6, 1:6] = True
    box, voxels = Box(mask), int(mask.sum())
    rows = 0.7 + 0.2 * rng.normal(size=voxels) + 0.05 * rng.normal(size=(40, voxels))
    patterns = PeoplePatterns.of((rows - rows.mean(axis=0)).astype(np.float32))
    means = intensity_terms(rows, box.smooth(rows)) / len(rows)
    shift = 0.1 * np.stack([means[1] - 0.4, 0.4 - means[1]])
    error = np.array([0.05, 0.05])
    known = fit_intensities(
        means, np.array([0.0, 2.0]), np.array([20.0, 20.0]), shift, error, patterns, box.inside, mask
    )
    maps = [np.ones(voxels), means[1], means[2], means[3], (means[0] + means[3]) * box.inside - means[0]]
    maps += [means[0] * field for field in slow_fields(mask)]
    design = np.array(maps).T
    along = patterns.patterns.astype(float)
    covariance = (
        patterns.rest * np.eye(voxels) + along.T @ np.diag(patterns.variances - patterns.rest) @ along
    )
    weight = np.linalg.inv(covariance)
    known_of = design.T @ weight @ design
    for s in (0, 1):
        ridge = error[s] / intensities.USUAL**2 * np.eye(len(maps))
        found = np.linalg.solve(known_of + ridge, design.T @ weight @ shift[s])
        units = found @ known_of @ found / error[s]
        assert units > 2 * len(maps)
        found *= 1 - len(maps) / units
        expected = np.append(found[:5], found[5:] @ slow_fields(mask))
        got = np.append(known.curves[s], known.fields[s])
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("seed", range(3))
def test_the_same_people_differ_alike_whoever_scans_them(seed):
    """What is people's own is nearer to what the first scanner shows, before any spread is evened."""
    rows, box = brains(seed), Box(MASK)
    sites = fit_volume_sites(volumes_of(as_scanned(rows)), NOTHING, SITE, NOTHING)
    known = Intensities(sites.ends, sites.curves, sites.fields)

    def own(scanner, straight):
        normal = sites.normalised(100 * scanned(rows, scanner))
        if straight:
            normal = known.straightened(normal, np.eye(3)[np.full(len(rows), scanner)], box)
        return normal - normal.mean(axis=0)

    for scanner in (1, 2):
        before, after = (
            ((own(scanner, straight) - own(0, straight)) ** 2).mean() for straight in (False, True)
        )
        assert after < 0.5 * before


@pytest.mark.parametrize("seed", range(3))
def test_scanners_that_do_nothing_are_left_alone(seed):
    rows = brains(seed)
    sites = fit_volume_sites(volumes_of(rows), NOTHING, SITE, NOTHING)
    normal = sites.normalised(100 * rows)
    known = Intensities(sites.ends, sites.curves, sites.fields)
    change = known.straightened(normal, np.eye(3)[SITE], Box(MASK)) - normal
    people = normal.std(axis=0)
    assert np.sqrt((change**2).mean() / (people**2).mean()) < 0.1


def test_where_people_differ_more_than_the_brain_has_contrast_no_curve_is_told():
    rng = np.random.default_rng(0)
    rows = 1 + 0.3 * rng.normal(size=(len(SITE), MASK.sum())) + 0.05 * SITE[:, None]
    sites = fit_volume_sites(volumes_of(np.maximum(rows, 0.05)), NOTHING, SITE, NOTHING)
    assert not sites.curves.any()
    assert not sites.fields.any()


def test_a_voxel_far_outside_is_moved_no_farther_than_the_ends_are():
    rows = as_scanned(brains(0))
    sites = fit_volume_sites(volumes_of(rows), NOTHING, SITE, NOTHING)
    known, box = Intensities(sites.ends, sites.curves, sites.fields), Box(MASK)
    normal = sites.normalised(100 * rows[-2:])
    bright, brighter = normal.copy(), normal.copy()
    bright[:, 700], brighter[:, 700] = 5.0, 50.0
    share = np.eye(3)[[2, 2]]
    moved = known.straightened(brighter, share, box) - known.straightened(bright, share, box)
    # Curves are level out there; only blur, which is linear, goes on.
    most = 45 * (1 + np.abs(sites.curves[2, 3:]).sum())
    assert 0.5 * 45 < np.abs(moved).max() <= most * (1 + 1e-9)


def test_networks_see_scans_as_bent_as_they_are_and_can_put_the_scanner_back():
    rows = 100 * as_scanned(brains(0))
    sites = fit_volume_sites(volumes_of(rows / 100), NOTHING, SITE, NOTHING)
    assert np.abs(sites.curves).max() > 0.01  # there is something to undo
    own = sites.without_site(rows)
    np.testing.assert_allclose(sites.with_site(own, rows), rows, rtol=1e-9)
    straight = sites.remove(rows, NOTHING, SITE, Box(MASK))
    assert np.isfinite(straight).all()
