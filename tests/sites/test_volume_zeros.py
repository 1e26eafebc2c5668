from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from equipool.data.volumes import Volumes
from equipool.sites.scans import Box, Scans, mean_volume
from equipool.sites.volume_model import fit_volume_sites


@pytest.fixture
def scans():
    """Sixty brains of two scanners, of which the second adds a pattern; some voxels are cut off."""
    rng = np.random.default_rng(3)
    mask = np.zeros((12, 14, 12), dtype=bool)
    mask[2:-2, 2:-2, 2:-2] = True
    site = np.arange(60) % 2
    base, pattern = rng.uniform(1, 3, mask.sum()), rng.normal(0, 0.3, mask.sum())
    rows = base + site[:, None] * pattern + rng.normal(0, 0.1, (60, mask.sum()))
    rows[rng.random(rows.shape) < 0.02] = 0.0
    volumes = Volumes(mask, np.eye(4), (), rows.astype(np.float32), np.arange(60), None)
    return volumes, site


def test_cut_off_voxels_stay_zero_and_the_others_lose_their_site(scans):
    volumes, site = scans
    nothing = np.empty((60, 0))
    sites = fit_volume_sites(volumes, nothing, site, nothing)
    rows = volumes.read()
    clean = sites.remove(rows, nothing, site, Box(volumes.mask))
    assert ((clean == 0) == (rows == 0)).all()

    def apart(values):
        means = [np.where(values == 0, np.nan, values)[site == k] for k in (0, 1)]
        return np.abs(np.nanmean(means[0], axis=0) - np.nanmean(means[1], axis=0)).mean()

    assert apart(clean) < 0.2 * apart(rows)


def test_one_site_keeps_its_directions(scans):
    volumes, _ = scans
    nothing = np.empty((60, 0))
    sites = fit_volume_sites(volumes, nothing, np.zeros(60, dtype=int), nothing)
    np.testing.assert_allclose(sites.mixing[0], np.eye(len(sites.directions)), atol=1e-4)


@pytest.mark.parametrize("cut_off", [False, True])
def test_levels_of_sites_are_those_of_measured_voxels(scans, cut_off):
    volumes, site = scans
    rows = volumes.read()
    if not cut_off:
        rows[rows == 0] = 2.0
        volumes = Volumes(volumes.mask, np.eye(4), (), rows, np.arange(60), None)
    template, _, whole = mean_volume(volumes)
    assert whole is not cut_off
    design = np.eye(2)[site]
    scans = Scans(volumes, template, design, np.zeros(2), design.sum(axis=0), whole)
    scans.regress()
    bright = template >= np.quantile(template, 0.85)
    gain = np.array([np.median(row[bright] / template[bright]) for row in rows])
    measured = np.where(rows == 0, np.nan, rows / gain[:, None])
    levels = np.array([np.nanmean(measured[site == k], axis=0) for k in (0, 1)])
    # Two passes come close to what is measured, and need no more where every voxel is.
    np.testing.assert_allclose(scans.solution, levels, atol=5e-3 if cut_off else 1e-10)


def test_a_voxel_that_failed_in_one_scan_changes_nobody_else(scans):
    volumes, site = scans
    nothing = np.empty((60, 0))

    def harmonized(rows):
        given = Volumes(volumes.mask, np.eye(4), (), rows, np.arange(60), None)
        return fit_volume_sites(given, nothing, site, nothing).remove(rows, nothing, site, Box(volumes.mask))

    rows = volumes.read()
    broken, gap = rows.copy(), rows.copy()
    broken[3, 50], gap[3, 50] = 1e6, 0.0
    found, expected = harmonized(broken), harmonized(gap)
    np.testing.assert_allclose(np.delete(found, 3, axis=0), np.delete(expected, 3, axis=0), atol=0.1)
    assert abs(found[3, 50] - found[:, 50].mean()) < 1.0  # what the pool shows there


def test_harmonized_scans_are_above_zero_where_measured_ones_are(scans):
    volumes, site = scans
    rows = np.abs(volumes.read())
    dark = np.random.default_rng(0).exponential(0.05, (60, 200)) * (1 + 7 * site[:, None])
    rows[:, :200] = np.where(rows[:, :200] == 0, 0, dark)
    nothing, box = np.empty((60, 0)), Box(volumes.mask)

    def harmonized(rows):
        given = Volumes(volumes.mask, np.eye(4), (), rows, np.arange(60), None)
        return fit_volume_sites(given, nothing, site, nothing).remove(rows, nothing, site, box)

    clean = harmonized(rows)
    assert (clean[rows > 0] > 0).all()
    # Scans that are below 0 somewhere, as standardised ones are, stay as the sum says.
    below = rows.copy()
    below[:, 0] = -1.0
    assert harmonized(below)[:, 1:200].min() < 0


@pytest.mark.parametrize("few", [1, 2, 4])
def test_the_few_people_of_a_small_site_stay_who_they_are(few):
    rng = np.random.default_rng(few)
    mask = np.zeros((12, 14, 12), dtype=bool)
    mask[2:-2, 2:-2, 2:-2] = True
    site = np.append(np.arange(60) % 2, np.full(few, 2))
    own = [gaussian_filter(rng.normal(0, 3, mask.shape), 1.5)[mask] for _ in site]
    own = np.stack(own) - np.mean(own, axis=0)
    rows = rng.uniform(1, 3, mask.sum()) + own + 0.1 * site[:, None] * rng.normal(size=mask.sum())
    volumes = Volumes(mask, np.eye(4), (), rows.astype(np.float32), np.arange(60 + few), None)
    nothing = np.empty((60 + few, 0))
    clean = fit_volume_sites(volumes, nothing, site, nothing).remove(rows, nothing, site, Box(mask))
    left = clean - clean[:60].mean(axis=0)
    kept = [np.polyfit(a, b, 1)[0] for a, b in zip(own[60:], left[60:], strict=True)]
    assert np.mean(kept) > 0.7 * np.mean([np.polyfit(a, b, 1)[0] for a, b in zip(own, left, strict=True)])
