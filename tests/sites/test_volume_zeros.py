"""Voxels that were cut off or failed, negative values, and sites of few participants."""

import numpy as np
import pytest
from volume_fits import design_of, fitted, smooth_field, volumes_of

from equipool.sites.scans import Box, mean_volume
from equipool.sites.volume_model import Scans, VolumeRegression

SITE = np.arange(60) % 2
MASK = np.zeros((12, 14, 12), dtype=bool)
MASK[2:-2, 2:-2, 2:-2] = True


def harmonized(rows, site=SITE, mask=MASK):
    """Return rows without site effects, by a model of the same rows."""
    model = fitted(volumes_of(rows, mask), site)
    return model.undo(rows, np.empty((len(rows), 0)), site, Box(mask))


@pytest.fixture
def rows():
    """Sixty brains of two scanners, of which the second adds a pattern; some voxels are cut off."""
    rng = np.random.default_rng(3)
    base, pattern = rng.uniform(1, 3, MASK.sum()), rng.normal(0, 0.3, MASK.sum())
    values = base + SITE[:, None] * pattern + rng.normal(0, 0.1, (60, MASK.sum()))
    values[rng.random(values.shape) < 0.02] = 0.0
    return values.astype(np.float32)


def test_cut_off_voxels_stay_zero_and_the_others_lose_their_site(rows):
    clean = harmonized(rows)
    assert ((clean == 0) == (rows == 0)).all()

    def apart(values):
        means = [np.where(values == 0, np.nan, values)[k == SITE] for k in (0, 1)]
        return np.abs(np.nanmean(means[0], axis=0) - np.nanmean(means[1], axis=0)).mean()

    assert apart(clean) < 0.2 * apart(rows)


def test_a_single_site_loses_its_gain_alone(rows):
    one = np.zeros(60, dtype=int)
    model = fitted(volumes_of(rows, MASK), one)
    assert not model.composition.active
    assert model.undo(rows, np.empty((60, 0)), one, Box(MASK))[:, 0].std() > 0


@pytest.mark.parametrize("cut_off", [False, True])
def test_levels_of_sites_are_those_of_measured_voxels(rows, cut_off):
    if not cut_off:
        rows[rows == 0] = 2.0
    volumes, design = volumes_of(rows, MASK), design_of(SITE)
    template, _, whole = mean_volume(volumes)
    assert whole is not cut_off
    fit = VolumeRegression(Scans(volumes, design, np.empty((60, 0)), np.empty(0), template, whole, Box(MASK)))
    bright = template >= np.quantile(template, 0.85)
    gain = np.array([np.median(row[bright] / template[bright]) for row in rows])
    measured = np.where(rows == 0, np.nan, rows / gain[:, None])
    levels = np.array([np.nanmean(measured[k == SITE], axis=0) for k in (0, 1)])
    # Two passes come close to what is measured, and need no more where every voxel is.
    np.testing.assert_allclose(fit.solution, levels, atol=5e-3 if cut_off else 1e-10)


def test_a_voxel_that_failed_in_one_scan_changes_no_other_scan(rows):
    broken, gap = rows.copy(), rows.copy()
    broken[3, 50], gap[3, 50] = 1e6, 0.0
    clean, expected = harmonized(broken), harmonized(gap)
    np.testing.assert_allclose(np.delete(clean, 3, axis=0), np.delete(expected, 3, axis=0), atol=0.1)
    assert abs(clean[3, 50] - clean[:, 50].mean()) < 1.0  # what the pool shows there


def test_harmonized_scans_are_above_zero_where_measured_ones_are(rows):
    rows = np.abs(rows)
    dark = np.random.default_rng(0).exponential(0.05, (60, 200)) * (1 + 7 * SITE[:, None])
    rows[:, :200] = np.where(rows[:, :200] == 0, 0, dark)
    assert (harmonized(rows)[rows > 0] > 0).all()
    # Scans that are below 0 somewhere, as standardised ones are, stay as the sum says.
    below = rows.copy()
    below[:, 0] = -1.0
    assert harmonized(below)[:, 1:200].min() < 0


@pytest.mark.parametrize("few", [1, 2, 4])
def test_residuals_of_a_small_site_are_kept(few):
    rng = np.random.default_rng(few)
    site = np.append(SITE, np.full(few, 2))
    residuals = 0.3 * np.stack([smooth_field(rng, MASK) for _ in site])
    residuals -= residuals.mean(axis=0)
    rows = rng.uniform(1, 3, MASK.sum()) + residuals + 0.1 * site[:, None] * rng.normal(size=MASK.sum())
    clean = harmonized(rows, site)
    after = clean - clean[:60].mean(axis=0)
    kept = [np.polyfit(a, b, 1)[0] for a, b in zip(residuals, after, strict=True)]
    assert np.mean(kept[60:]) > 0.7 * np.mean(kept)
