from __future__ import annotations

import numpy as np
import pytest

from equipool.data.images import Volumes
from equipool.models.scans import Box, Scans, mean_volume
from equipool.models.volumes import fit_volume_sites


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
