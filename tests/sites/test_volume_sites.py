"""The model of volumes, against literal transcriptions and planted truths."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from volume_fits import ellipsoid, fitted, smooth_field, volumes_of

from equipool.data.volumes import Volumes
from equipool.sites import scans, volume_model
from equipool.sites.effect import Composition
from equipool.sites.intensity import Intensity
from equipool.sites.scans import Box, gains, normalised
from equipool.sites.shift_scale import ShiftScale

PARTICIPANTS = 40  # at each of two sites


@pytest.fixture(autouse=True)
def intensities_stay(monkeypatch):
    """They have tests of their own (test_intensity.py)."""
    monkeypatch.setattr(volume_model, "_intensity_enters", lambda scans: False)


@pytest.fixture(scope="module")
def pool():
    """Two sites that differ in shift and noise, a trend in age and in a diagnosis."""
    rng = np.random.default_rng(7)
    mask = np.zeros((12, 13, 11), dtype=bool)
    mask[2:10, 2:11, 2:9] = True

    def smooth(size, width=1.5):
        field = gaussian_filter(rng.normal(size=mask.shape), width)
        return size * field / field.std()

    brain, slope, illness, away = smooth(20.0) + 200, smooth(6.0), smooth(5.0), smooth(8.0)
    site = np.repeat([0, 1], PARTICIPANTS)
    age = rng.uniform(-1, 0.4, 2 * PARTICIPANTS) + 0.6 * site
    ill = rng.integers(0, 2, 2 * PARTICIPANTS).astype(float)
    images = []
    for s, a, d in zip(site, age, ill, strict=True):
        volume = brain + a * slope + d * illness + (away if s else -away) + smooth(4.0)
        gain = np.exp(0.3 * rng.normal())
        images.append(gain * (volume + (2.0, 5.0)[s] * rng.normal(size=mask.shape)))
    volumes = Volumes.from_array(np.array(images), np.diag([4.0, 4, 4, 1]), mask)
    truth = {"slope": slope[mask], "away": away[mask], "unit": 200.0}
    return volumes, site, age, ill, truth


@pytest.fixture
def model(pool):
    volumes, site, age, ill, _ = pool
    return fitted(volumes, site, age, ill)


def at_gain_1(model, rows):
    return normalised(rows, model.template)[0]


def undone(model, pool, unit=None):
    """Return the pool's volumes without site effects."""
    volumes, site, age, *_ = pool
    clean = model.undo(volumes.read(), age[:, None], site, Box(volumes.mask))
    return clean * (1.0 if unit is None else unit / model.unit)


# -- formulas ----------------------------------------------------------------------------------------------


def naive_gain(row, template):
    bright = template >= sorted(template)[int(np.ceil(scans.BRIGHT * (len(template) - 1)))]
    return np.median([row[v] / template[v] for v in np.flatnonzero(bright)])


def naive_regression(rows, columns, penalty):
    """One penalised regression a voxel, as least squares with the penalty as further rows."""
    solution = np.empty((columns.shape[1], rows.shape[1]))
    further = np.sqrt(np.diag(penalty * len(rows)))
    for v in range(rows.shape[1]):
        goal = np.append(rows[:, v], np.zeros(len(penalty)))
        solution[:, v] = np.linalg.lstsq(np.vstack([columns, further]), goal, rcond=None)[0]
    return solution, rows - columns @ solution


def test_the_model_against_a_loop_over_voxels(pool, monkeypatch):
    volumes, site, age, ill, _ = pool
    monkeypatch.setattr(volume_model, "TURNS", 0)  # all of a mean's difference is the scanner's
    model = fitted(volumes, site, age, ill)
    rows = volumes.read().astype(np.float64)
    template = np.mean([row / np.quantile(row, scans.BRIGHT) for row in rows], axis=0)
    normal = np.array([row / naive_gain(row, template) for row in rows])

    basis = model.trend.basis(age[:, None])
    target = (ill - ill.mean()) / ill.std()
    target -= basis @ np.linalg.lstsq(basis, target, rcond=None)[0]
    columns = np.column_stack([site == 0, site == 1, basis, target]).astype(float)
    penalty = np.full(columns.shape[1], 1e-9)
    penalty[:2], penalty[3:-1] = 1e-12, model.curvature
    solution, residuals = naive_regression(normal, columns, penalty)
    centre = solution[:2].mean(axis=0)  # the sites have as many participants
    affine = model.composition["shift and scale"]
    np.testing.assert_allclose(model.trend.centre, centre, atol=1e-8)
    np.testing.assert_allclose(model.trend.coefficients, solution[2:-1], atol=1e-8)
    np.testing.assert_allclose(affine.shift, solution[:2] - centre, atol=1e-8)
    variance = (residuals**2).sum(axis=0) / (len(rows) - columns.shape[1])
    np.testing.assert_allclose(affine.variance, variance, rtol=1e-6)

    pooled, k = (residuals**2).mean(axis=0), affine.scale_weight
    scale = np.array(
        [
            [
                np.sqrt(
                    ((residuals[site == s, v] ** 2).sum() + k[v] * pooled[v]) / ((site == s).sum() + k[v])
                )
                for v in range(len(k))
            ]
            for s in (0, 1)
        ]
    )
    scale /= np.sqrt(scale[0] * scale[1])
    np.testing.assert_allclose(affine.scale, scale, rtol=1e-6)
    assert np.abs(np.log(scale)).max() > 0.01

    predicted = centre + basis @ solution[2:-1]
    clean = undone(model, pool) / model.unit
    wanted = predicted + (normal - predicted - (solution[:2] - centre)[site]) / scale[site]
    np.testing.assert_allclose(clean, wanted, atol=1e-7)


# -- effects are maps with an inverse ----------------------------------------------------------------------

MASK = ellipsoid(12, 13, 11)


def some_intensity(rng):
    curves = np.array([[0.02, 0.15, -0.08, 0.3, -0.1], [-0.03, -0.1, 0.05, -0.2, 0.1]])
    return Intensity(np.array([0.3, 1.4]), curves, rng.uniform(-0.1, 0.1, (2, MASK.sum())))


def some_shift(rng):
    affine = ShiftScale.identity(2, int(MASK.sum()))
    return replace(affine, shift=rng.normal(0, 0.05, affine.shift.shape))


@pytest.mark.parametrize(
    "makers",
    [[some_intensity], [some_intensity, some_shift]],
    ids=["intensity", "all"],
)
def test_redo_inverts_undo(makers):
    rng = np.random.default_rng(0)
    template = np.clip(0.8 + 0.2 * smooth_field(rng, MASK), 0.1, None)
    rows = template + 0.1 * np.stack([smooth_field(rng, MASK) for _ in range(6)])
    rows /= gains(rows, template)[:, None]
    site = np.arange(6) % 2
    at = scans.ScanContext(site, np.empty((6, 0)), np.tile(template, (6, 1)), Box(MASK), template)
    composition = Composition(tuple(make(rng) for make in makers))
    clean = composition.undo(rows, at)
    assert np.abs(clean - rows).max() > 0.05
    np.testing.assert_allclose(composition.redo(clean, at), rows, atol=1e-8)


def jacobian(function, row, step=1e-6):
    """Return the derivatives of a function of one row, by central differences."""
    size = len(row)
    result = np.empty((size, size))
    for v in range(size):
        moved = np.tile(row, (2, 1))
        moved[:, v] += [step, -step]
        up, down = function(moved)
        result[:, v] = (up - down) / (2 * step)
    return result


def test_the_log_determinant_of_curves(monkeypatch):
    rng, mask = np.random.default_rng(1), np.ones((3, 4, 3), dtype=bool)
    curves = np.array([[0.05, 0.2, -0.1, 0, 0], [-0.1, -0.2, 0.05, 0, 0]])
    effect = Intensity(np.array([0.2, 1.1]), curves, rng.uniform(-0.2, 0.2, (2, 36)))
    # The gain is a number of the whole scan, and given here.
    monkeypatch.setattr("equipool.sites.intensity.gains", lambda rows, template: np.full(len(rows), 1.3))
    for s, row in enumerate(rng.uniform(0.0, 1.5, (2, 36))):
        at = scans.ScanContext(np.array([s]), np.empty((1, 0)), row[None], Box(mask), np.ones(36))
        matrix, step = np.empty((36, 36)), 1e-6
        for v in range(36):
            moved = step * (np.arange(36) == v)
            up, down = (effect.undo(row[None] + change, at)[0] for change in (moved, -moved))
            matrix[:, v] = (up - down) / (2 * step)
        assert effect.log_det(row[None], at)[0] == pytest.approx(np.linalg.slogdet(matrix)[1], abs=1e-5)


@pytest.mark.parametrize(("edges", "tolerance"), [(False, 1e-3), (True, 0.08)])
@pytest.mark.parametrize("blur", [0.4, -0.3])
def test_the_log_determinant_of_blur(blur, edges, tolerance):
    """It is that of a brain without edges, which most voxels of a real one are far from."""
    mask = np.zeros((16, 16, 16), dtype=bool)
    mask[3:-3, 3:-3, 3:-3] = True
    box, size = Box(mask), int(mask.sum())
    smooth, rows = box.smooth(np.eye(size)).T, np.ones((1, size))
    if not edges:
        points = np.eye(size).reshape(size, 10, 10, 10)
        smooth = np.stack([gaussian_filter(each, scans.SMOOTH, mode="wrap").ravel() for each in points]).T
    at = scans.ScanContext(np.array([0]), np.empty((1, 0)), rows, box, rows[0])
    effect = Intensity(np.array([0.0, 2.0]), np.array([[0, 0, 0, blur, 0]]), np.zeros((1, size)))
    exact = np.linalg.slogdet(np.eye(size) - blur * (smooth - np.eye(size)))[1]
    assert abs(exact) > 50
    assert effect.log_det(rows, at)[0] == pytest.approx(exact, rel=tolerance)


# -- planted truths ----------------------------------------------------------------------------------------


def test_the_planted_shift_is_removed(pool, model):
    volumes, site, _, _, truth = pool
    removed = at_gain_1(model, volumes.read()) - undone(model, pool) / model.unit
    estimated = (removed[site == 1].mean(axis=0) - removed[site == 0].mean(axis=0)) / 2 * truth["unit"]
    assert np.corrcoef(estimated, truth["away"])[0, 1] > 0.97


def test_a_gain_changes_nothing(pool, model):
    volumes, site, age, *_ = pool
    rows, box = volumes.read()[:6].astype(np.float64), Box(volumes.mask)
    once, thrice = (model.undo(scale * rows, age[:6, None], site[:6], box) for scale in (1, 3))
    np.testing.assert_allclose(thrice, once, rtol=1e-10)
    np.testing.assert_allclose(model.without_site(3 * rows), model.without_site(rows), atol=1e-10)
    np.testing.assert_allclose(gains(3 * rows, model.template), 3 * gains(rows, model.template))


def test_the_site_is_predicted_from_a_scan(pool, model):
    volumes, site, *_ = pool
    share = model.discriminant.posterior(at_gain_1(model, volumes.read()))
    np.testing.assert_allclose(share.sum(axis=1), 1.0)
    assert (share.argmax(axis=1) == site).mean() > 0.95


def test_networks_see_scans_without_the_shift_of_their_probable_site(pool, model):
    volumes, site, *_ = pool
    rows = volumes.read().astype(np.float64)
    residuals = model.without_site(rows)
    values, discriminant = at_gain_1(model, rows), model.discriminant
    for k in (3, 60):
        shift = sum(p * d for p, d in zip(discriminant.posterior(values)[k], discriminant.shift, strict=True))
        np.testing.assert_allclose(residuals[k], values[k] - discriminant.centre - shift, atol=1e-12)
    np.testing.assert_allclose(model.with_site(residuals, rows), rows, rtol=1e-10)

    def apart(values):
        return np.abs(values[site == 1].mean(axis=0) - values[site == 0].mean(axis=0)).mean()

    assert apart(residuals) < 0.3 * apart(values)  # the second site's participants are older


def test_the_site_goes_and_the_trend_stays(pool, model, monkeypatch):
    volumes, site, age, ill, truth = pool

    def regression(rows):
        columns = np.column_stack([np.ones(len(site)), site, age, ill - ill.mean()])
        return np.linalg.lstsq(columns, rows, rcond=None)[0]

    clean = undone(model, pool, truth["unit"])
    before, after = regression(truth["unit"] * at_gain_1(model, volumes.read())), regression(clean)
    assert np.corrcoef(after[2], truth["slope"])[0, 1] > 0.9
    np.testing.assert_allclose(after[2], before[2], atol=2.0)  # the trend is a dozen in the pool
    # Sites' means end as far apart as those of participants drawn at random, and no farther.
    assert np.abs(after[1]).mean() < 0.1 * np.abs(before[1]).mean()
    variances = [clean[site == s].var(axis=0) / PARTICIPANTS for s in (0, 1)]
    assert np.sqrt((after[1] ** 2 / sum(variances)).mean()) < 1.3
    # Where all of a mean's difference is taken for the scanner's, they end equal.
    monkeypatch.setattr(volume_model, "TURNS", 0)
    equal = regression(undone(fitted(volumes, site, age, ill), pool, truth["unit"]))
    assert np.abs(equal[1]).mean() < 0.05 * np.abs(before[1]).mean()


@pytest.mark.parametrize("n_sites", [1, 2])
def test_volumes_of_sites_that_do_nothing_stay_nearly_as_they_are(n_sites):
    rng = np.random.default_rng(n_sites)
    brain, patterns = 1 + 0.2 * smooth_field(rng, MASK), [smooth_field(rng, MASK) for _ in range(12)]
    rows = np.maximum(brain + 0.03 * rng.normal(size=(120, 12)) @ patterns, 0.1)
    site, age = np.arange(120) % n_sites, rng.normal(size=120)
    model = fitted(volumes_of(rows, MASK), site, age)
    normal = at_gain_1(model, rows)
    change = model.undo(rows, age[:, None], site, Box(MASK)) / model.unit - normal
    assert np.sqrt((change**2).mean()) < 0.1 * normal.std(axis=0).mean()


def test_a_new_site_is_estimated_with_everything_else_as_it_is(pool):
    volumes, site, age, ill, truth = pool
    model, box, c = fitted(volumes, site, age, ill), Box(volumes.mask), age[:, None]
    rng = np.random.default_rng(0)
    planted, of_noise = 10 * smooth_field(rng, volumes.mask), 4.0
    rows = volumes.read() * (truth["unit"] / gains(volumes.read(), model.template))[:, None]
    new = 1.7 * (rows + planted + of_noise * rng.normal(size=rows.shape))
    adapted = model.add_site(new, c, box)
    assert adapted.n_participants[-1] == len(new)
    kept = adapted.undo(volumes.read(), c, site, box)
    np.testing.assert_array_equal(kept, undone(model, pool))
    index = np.full(len(new), 2)
    clean = adapted.undo(new, c, index, box)
    assert np.isfinite(clean).all()
    # The two sites scanned half of the participants each: the mean of their shifts is 0.
    error = clean.mean(axis=0) / model.unit - at_gain_1(model, rows).mean(axis=0)
    assert np.abs(error).mean() < 0.2 * np.abs(planted / truth["unit"]).mean()
