"""What scanners do to intensities, undone scan by scan: against a loop, and on scans distorted on purpose."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from volume_fits import ellipsoid, fitted, smooth_field, volumes_of

from equipool.sites import intensity as intensities
from equipool.sites import volume_model
from equipool.sites.intensity import Intensity
from equipool.sites.scanner_patterns import PeoplePatterns, Survey, intensity_terms, slow_fields
from equipool.sites.scans import SMOOTH, Box, ScanContext, gains, normalised

MASK = ellipsoid(16, 18, 15)
BOX = Box(MASK)
SITE = np.repeat([0, 1, 2], [50, 40, 40])


def brains(seed):
    """Brains with dark and bright parts whose differences are smooth, (participants, voxels)."""
    rng = np.random.default_rng(seed)
    base = 0.7 + 0.18 * smooth_field(rng, MASK, 2.0)
    patterns = np.stack([smooth_field(rng, MASK) for _ in range(25)])
    return np.clip(base + 0.02 * rng.normal(size=(len(SITE), 25)) @ patterns, 0.05, None)


def scanned(rows, scanner):
    """Return scans by one of three scanners: the first as they are, the third with blur and a slow gain."""
    if scanner == 0:
        return rows
    if scanner == 1:
        return rows**0.75
    field = 1 + 0.1 * slow_fields(MASK)[1]
    return 0.8 * BOX.smooth(rows**1.25) * field + 0.2 * rows**1.25 * field


def as_scanned(rows):
    return np.stack([scanned(rows[k : k + 1], s)[0] for k, s in enumerate(SITE)])


def context(site, box, template):
    return ScanContext(np.asarray(site), np.empty((len(site), 0)), np.empty((0, 0)), box, template)


# -- formulas ----------------------------------------------------------------------------------------------


def test_a_curve_is_inverted(monkeypatch):
    monkeypatch.setattr(intensities, "gains", lambda rows, template: np.ones(len(rows)))
    rng = np.random.default_rng(0)
    mask = np.ones((3, 4, 3), dtype=bool)
    clean, site = rng.uniform(0, 1.5, size=(4, 36)), [0, 1, 1, 0]
    effect = Intensity(
        np.array([0.2, 1.1]),
        np.array([[0.05, 0.2, -0.1, 0, 0], [-0.1, -0.2, 0.05, 0, 0]]),
        rng.uniform(-0.2, 0.2, (2, 36)),
    )
    scans = np.empty_like(clean)
    for k, row in enumerate(clean):
        b, g = effect.curves[site[k]], effect.fields[site[k]]
        for v, x in enumerate(row):
            inner = min(max(x, 0.2), 1.1)
            scans[k, v] = x + b[0] + g[v] * inner + b[1] * inner**2 + b[2] * inner**3
    at = context(site, Box(mask), np.ones(36))
    np.testing.assert_allclose(effect.undo(scans, at), clean, atol=1e-6)
    np.testing.assert_allclose(effect.redo(clean, at), scans, atol=1e-12)


def test_blur_is_that_of_the_scan():
    rng = np.random.default_rng(1)
    scans = brains(1)[:4]
    effect = Intensity(np.array([0.0, 2.0]), np.array([[0, 0, 0, 0.3, -0.2]]), np.zeros((1, MASK.sum())))
    template = scans.mean(axis=0)
    clean = effect.undo(scans, context([0] * 4, BOX, template))
    for k in rng.integers(0, 4, 2):
        image = np.zeros(MASK.shape)
        image[MASK] = scans[k]
        dark = gaussian_filter(image, SMOOTH)
        smooth = dark / np.maximum(gaussian_filter(MASK.astype(float), SMOOTH), 1e-6)
        expected = (image - 0.3 * (smooth - image) + 0.2 * (dark - image))[MASK]
        bright = template >= np.quantile(template, 0.85)
        gain = np.median([expected[v] / template[v] for v in np.flatnonzero(bright)])
        np.testing.assert_allclose(clean[k], expected / gain, atol=1e-10)


def test_coefficients_against_generalised_least_squares():
    """One site's, with the covariance between participants written out, before shrinkage."""
    rng, mask = np.random.default_rng(2), np.zeros((7, 7, 7), dtype=bool)
    mask[1:6, 1:6, 1:6] = True
    box, voxels = Box(mask), int(mask.sum())
    rows = 0.7 + 0.2 * rng.normal(size=voxels) + 0.05 * rng.normal(size=(40, voxels))
    patterns = PeoplePatterns.of((rows - rows.mean(axis=0)).astype(np.float32))
    means = intensity_terms(rows, box.smooth(rows)) / len(rows)
    shift = 0.1 * np.stack([means[1] - 0.4, 0.4 - means[1]])
    error = np.array([0.05, 0.05])
    survey = Survey(40, means, np.array([0.0, 2.0]), patterns, len(rows) * rows.var(axis=0)[None], 1.0)
    effect = Intensity.fit(survey, shift, error, box)
    maps = [np.ones(voxels), means[1], means[2], means[3], (means[0] + means[3]) * box.inside - means[0]]
    maps += [means[0] * field for field in slow_fields(mask)]
    columns = np.array(maps).T
    along = patterns.patterns.astype(float)
    covariance = (
        patterns.rest * np.eye(voxels) + along.T @ np.diag(patterns.variances - patterns.rest) @ along
    )
    weight = np.linalg.inv(covariance)
    information = columns.T @ weight @ columns
    for s in (0, 1):
        ridge = error[s] / intensities.USUAL_SIZE**2 * np.eye(len(maps))
        b = np.linalg.solve(information + ridge, columns.T @ weight @ shift[s])
        units = b @ information @ b / error[s]
        assert units > 2 * len(maps)
        b *= 1 - len(maps) / units
        expected = np.append(b[:5], b[5:] @ slow_fields(mask))
        estimated = np.append(effect.curves[s], effect.fields[s])
        np.testing.assert_allclose(estimated, expected, rtol=1e-2, atol=1e-3 * np.abs(expected).max())


# -- planted truths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_same_participants_differ_alike_on_all_scanners(seed, monkeypatch):
    """Residuals are nearer to what the first scanner shows."""
    monkeypatch.setattr(volume_model, "_intensity_enters", lambda scans: True)
    rows = brains(seed)
    model = fitted(volumes_of(100 * as_scanned(rows), MASK), SITE)
    effect = model.composition["intensity"]

    def residuals(scanner, undo):
        values, _ = normalised(100 * scanned(rows, scanner), model.template)
        if undo:
            values = effect.undo(values, context([scanner] * len(rows), BOX, model.template))
        return values - values.mean(axis=0)

    for scanner in (1, 2):
        before, after = (
            ((residuals(scanner, undo) - residuals(0, undo)) ** 2).mean() for undo in (False, True)
        )
        assert after < 0.5 * before


def test_intensities_enter_where_scanners_change_them(strong):
    rows, _ = strong
    assert not fitted(volumes_of(rows, MASK), SITE).composition["intensity"].is_identity


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_scanners_that_do_nothing_keep_their_intensities(seed, always, monkeypatch):
    if always:
        monkeypatch.setattr(volume_model, "_intensity_enters", lambda scans: True)
    rows = brains(seed)
    model = fitted(volumes_of(100 * rows, MASK), SITE)
    effect, (normal, _) = model.composition["intensity"], normalised(100 * rows, model.template)
    if not always:
        assert effect.is_identity
        return
    change = effect.undo(normal, context(SITE, BOX, model.template)) - normal
    assert np.sqrt((change**2).mean() / (normal.std(axis=0) ** 2).mean()) < 0.1


def test_where_participants_differ_more_than_the_brain_has_contrast_no_curve_is_fitted(monkeypatch):
    monkeypatch.setattr(volume_model, "_intensity_enters", lambda scans: True)
    rng = np.random.default_rng(0)
    rows = 1 + 0.3 * rng.normal(size=(len(SITE), MASK.sum())) + 0.05 * SITE[:, None]
    model = fitted(volumes_of(100 * np.maximum(rows, 0.05), MASK), SITE)
    assert model.composition["intensity"].is_identity


@pytest.fixture(scope="module")
def strong():
    """Volumes of three scanners, and their model with intensities."""
    rows = 100 * as_scanned(brains(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(volume_model, "_intensity_enters", lambda scans: True)
        return rows, fitted(volumes_of(rows, MASK), SITE)


def test_a_voxel_outside_the_range_is_moved_no_farther_than_the_ends_are(strong):
    rows, model = strong
    effect = model.composition["intensity"]
    normal, _ = normalised(rows[-2:], model.template)
    voxel = int(model.template.argmin())  # without influence on the gain
    bright, brighter = normal.copy(), normal.copy()
    bright[:, voxel], brighter[:, voxel] = 5.0, 50.0
    at = context([2, 2], BOX, model.template)
    moved = effect.undo(brighter, at) - effect.undo(bright, at)
    # Curves are level out there; only blur, which is linear, goes on.
    most = 45 * (1 + np.abs(effect.curves[2, 3:]).sum()) / gains(effect.undo(bright, at), model.template)
    assert 0.5 * 45 < np.abs(moved).max() <= 1.1 * most.max()


def test_residuals_for_networks_can_be_taken_back(strong):
    rows, model = strong
    residuals = model.without_site(rows)
    np.testing.assert_allclose(model.with_site(residuals, rows), rows, rtol=1e-9)
    clean = model.undo(rows, np.empty((len(rows), 0)), SITE, BOX)
    assert np.isfinite(clean).all()


def test_means_of_sites_end_closer_together(strong):
    rows, model = strong
    clean = model.undo(rows, np.empty((len(rows), 0)), SITE, BOX) / model.unit

    def apart(values):
        return np.std([values[s == SITE].mean(axis=0) for s in range(3)], axis=0).mean()

    # As far apart as means of 40 participants are by chance.
    assert apart(clean) < 0.3 * apart(normalised(rows, model.template)[0])
