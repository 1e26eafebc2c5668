"""The closed form of sites in volumes, against literal transcriptions and planted truths."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from equipool.data.volumes import Volumes
from equipool.sites import scans
from equipool.sites import volume_covariance as covariances
from equipool.sites import volume_model as closed_form
from equipool.sites.intensity import Intensities
from equipool.sites.scans import Box
from equipool.sites.volume_model import fit_volume_sites

PEOPLE = 40  # at each of two sites


def fitted(volumes, age, site, ill):
    return fit_volume_sites(volumes, age[:, None], site, ill[:, None])


@pytest.fixture(scope="module")
def pool():
    """Two sites with a shift, a spread and noise of their own, a trend in age and in a diagnosis."""
    rng = np.random.default_rng(7)
    mask = np.zeros((12, 13, 11), dtype=bool)
    mask[2:10, 2:11, 2:9] = True

    def smooth(size, width=1.5):
        field = gaussian_filter(rng.normal(size=mask.shape), width)
        return size * field / field.std()

    brain, slope, illness, away = smooth(20.0) + 200, smooth(6.0), smooth(5.0), smooth(8.0)
    site = np.repeat([0, 1], PEOPLE)
    age = rng.uniform(-1, 0.4, 2 * PEOPLE) + 0.6 * site
    ill = rng.integers(0, 2, 2 * PEOPLE).astype(float)
    images = []
    for s, a, d in zip(site, age, ill, strict=True):
        own = smooth(4.0) * (1.0, 1.6)[s]
        volume = brain + a * slope + d * illness + (away if s else -away) + own
        gain = np.exp(0.3 * rng.normal())
        images.append(gain * (volume + (2.0, 5.0)[s] * rng.normal(size=mask.shape)))
    volumes = Volumes.from_array(np.array(images), np.diag([4.0, 4, 4, 1]), mask)
    sites = fitted(volumes, age, site, ill)
    truth = {"slope": slope[mask], "away": away[mask], "unit": 200.0}
    return volumes, site, age, ill, sites, truth


def as_they_are(monkeypatch):
    """Leave intensities as the scanners made them."""

    def nothing(means, ends, people, shift, *rest):
        return Intensities(ends, np.zeros((len(shift), 5)), np.zeros_like(shift))

    monkeypatch.setattr(closed_form, "fit_intensities", nothing)


def naive_gain(row, template):
    bright = template >= sorted(template)[int(np.ceil(scans.BRIGHT * (len(template) - 1)))]
    return np.median([row[v] / template[v] for v in np.flatnonzero(bright)])


def naive_residuals(rows, site, age, ill):
    """One ridge regression a voxel, as least squares with the penalty as further rows."""
    n = len(rows)
    columns = [site == 0, site == 1, age, age**2 - (age**2).mean(), ill - ill.mean()]
    design = np.column_stack(columns).astype(float)
    penalty = np.sqrt(np.diag([0, 0, 1e-9 * n, closed_form.CURVATURE * n, 1e-9 * n]))
    solution = np.empty((5, rows.shape[1]))
    for v in range(rows.shape[1]):
        goal = np.append(rows[:, v], np.zeros(5))
        solution[:, v] = np.linalg.lstsq(np.vstack([design, penalty]), goal, rcond=None)[0]
    return solution, rows - design @ solution


def naive_smooth(row, mask):
    box = np.zeros(mask.shape)
    box[mask] = row
    width = scans.SMOOTH
    return (gaussian_filter(box, width) / np.maximum(gaussian_filter(mask.astype(float), width), 1e-6))[mask]


def test_shift_and_spread_against_a_loop_over_voxels(pool, monkeypatch):
    volumes, site, age, ill, _, _ = pool
    monkeypatch.setattr(scans, "TURNS", 0)  # all of a mean's distance is the scanner's
    as_they_are(monkeypatch)
    sites = fitted(volumes, age, site, ill)
    rows = volumes.read().astype(np.float64)
    template = np.mean([row / np.quantile(row, scans.BRIGHT) for row in rows], axis=0)
    normal = np.array([row / naive_gain(row, template) for row in rows])
    solution, left = naive_residuals(normal, site, age, ill)
    centre = solution[:2].mean(axis=0)  # the sites have as many people
    np.testing.assert_allclose(sites.shift, solution[:2] - centre, atol=1e-8)
    np.testing.assert_allclose(sites.coefficients, solution[2:4], atol=1e-8)
    quiet = np.empty_like(left)
    for k, row in enumerate(left):
        smooth = naive_smooth(row, volumes.mask)
        quiet[k] = smooth + sites.kept[site[k]] * (row - smooth)
    pooled = (quiet**2).mean(axis=0)
    for s in (0, 1):
        own = ((quiet[site == s] ** 2).sum(axis=0) + scans.SPREAD_PEOPLE * pooled) / (
            PEOPLE + scans.SPREAD_PEOPLE
        )
        np.testing.assert_allclose(sites.spread[s], np.sqrt(own / pooled), rtol=1e-6)


def test_the_planted_shift_is_taken_out(pool):
    volumes, site, age, _, sites, truth = pool
    clean = sites.remove(volumes.read(), age[:, None], site, Box(volumes.mask)) / float(sites.unit)
    taken = sites.normalised(volumes.read()) - clean
    found = (taken[site == 1].mean(axis=0) - taken[site == 0].mean(axis=0)) / 2 * truth["unit"]
    assert np.corrcoef(found, truth["away"])[0, 1] > 0.97


@pytest.mark.parametrize("seed", [0, 1])
def test_the_planted_noise_is_found(seed):
    people, rng = 100, np.random.default_rng(seed)
    mask = np.zeros((14, 14, 14), dtype=bool)
    mask[1:13, 1:13, 1:13] = True
    site, level = np.repeat([0, 1], people), np.array([2.0, 6.0])
    brain = 100 + 20 * gaussian_filter(rng.normal(size=mask.shape), 2)
    images = [
        brain + 40 * gaussian_filter(rng.normal(size=mask.shape), 2) + level[s] * rng.normal(size=mask.shape)
        for s in site
    ]
    volumes = Volumes.from_array(np.array(images), np.eye(4), mask)
    sites = fit_volume_sites(volumes, rng.normal(size=(len(site), 1)), site, np.empty((len(site), 0)))
    np.testing.assert_allclose(sites.noise * float(sites.unit), level, rtol=0.15)


def test_a_gain_changes_nothing(pool):
    volumes, site, age, _, sites, _ = pool
    rows, box = volumes.read()[:6].astype(np.float64), Box(volumes.mask)
    once = sites.remove(rows, age[:6, None], site[:6], box)
    thrice = sites.remove(3 * rows, age[:6, None], site[:6], box)
    np.testing.assert_allclose(thrice, once, rtol=1e-10)
    np.testing.assert_allclose(sites.without_site(3 * rows), sites.without_site(rows), atol=1e-10)
    np.testing.assert_allclose(sites.gains(3 * rows), 3 * sites.gains(rows))


def test_the_site_is_read_from_a_scan(pool):
    volumes, site, _, _, sites, _ = pool
    share = sites.posterior(sites.normalised(volumes.read()))
    np.testing.assert_allclose(share.sum(axis=1), 1.0)
    assert (share.argmax(axis=1) == site).mean() > 0.95


def test_the_site_goes_and_the_trend_stays(pool, monkeypatch):
    volumes, site, age, ill, sites, truth = pool
    clean = sites.remove(volumes.read(), age[:, None], site, Box(volumes.mask))
    clean *= truth["unit"] / float(sites.unit)

    def regression(rows):
        design = np.column_stack([np.ones(len(site)), site, age, ill - ill.mean()])
        return np.linalg.lstsq(design, rows, rcond=None)[0]

    before, after = (regression(rows) for rows in (200 * sites.normalised(volumes.read()), clean))
    assert np.corrcoef(after[2], truth["slope"])[0, 1] > 0.9
    np.testing.assert_allclose(after[2], before[2], atol=2.0)  # the trend is a dozen in the pool
    # Sites' means end as far apart as those of people drawn at random, and no farther.
    assert np.abs(after[1]).mean() < 0.1 * np.abs(before[1]).mean()
    variances = [clean[site == s].var(axis=0) / PEOPLE for s in (0, 1)]
    assert np.sqrt((after[1] ** 2 / sum(variances)).mean()) < 1.3
    # Where all of a mean's distance is taken for the scanner's, they end equal.
    monkeypatch.setattr(scans, "TURNS", 0)
    sites = fitted(volumes, age, site, ill)
    clean = sites.remove(volumes.read(), age[:, None], site, Box(volumes.mask))
    equal = regression(clean * truth["unit"] / float(sites.unit))
    assert np.abs(equal[1]).mean() < 0.05 * np.abs(before[1]).mean()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("people", [(300, 300), (450, 100, 50)])
def test_variances_by_chance_against_draws(seed, people):
    rng, width = np.random.default_rng(seed), 40
    site = np.repeat(np.arange(len(people)), people)
    rows = rng.normal(size=(len(site), width))
    root = np.linalg.inv(np.linalg.cholesky(rows.T @ rows / len(rows))).T
    for s, n in enumerate(people):
        own = (rows @ root)[site == s]
        found = np.linalg.eigvalsh(own.T @ own / n)
        low, high = covariances.by_chance(width, n, len(rows))
        assert found[-1] == pytest.approx(high, rel=0.25)
        assert np.sqrt(found[0]) == pytest.approx(np.sqrt(low), abs=0.15)


def test_variances_of_few_people_tell_no_lower_end():
    assert covariances.by_chance(40, 14, 200)[0] == 0.0
    assert covariances.by_chance(40, 0, 200) == (0.0, np.inf)
    assert covariances.by_chance(1, 1, 1) == (0.0, np.inf)


def matched(rows, site):
    """Return the rows with their covariance along the directions brought to the pool's."""
    everybody = slice(0, len(rows))
    dummies = np.eye(site.max() + 1)[site]
    directions, mixing = closed_form._matched(lambda: iter([(everybody, rows)]), dummies, rows.shape[1])
    scores = rows @ directions.T
    return rows + (np.einsum("nd,nde->ne", scores, mixing[site]) - scores) @ directions


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_varies_more_at_one_site_is_evened_and_the_rest_left(seed):
    rng = np.random.default_rng(seed)
    site = np.repeat([0, 1], 300)
    pattern = rng.normal(size=300)
    pattern /= np.linalg.norm(pattern)
    common = rng.normal(size=(600, 300)) * np.linspace(3, 0.3, 300)
    along = 12 * rng.normal(size=600) * np.array([0.5, 1.5])[site]
    rows = common + along[:, None] * pattern
    after = matched(rows, site)
    before, now = (
        (values @ pattern)[site == 1].std() / (values @ pattern)[site == 0].std() for values in (rows, after)
    )
    assert before > 2
    assert 0.75 < now < 1.33
    # Of forty directions, one is the site's: the others stay nearly as they are.
    rest = rows - np.outer(rows @ pattern, pattern)
    moved = (after - rows) - np.outer((after - rows) @ pattern, pattern)
    assert (moved**2).sum() < 0.1 * (rest**2).sum()


@pytest.mark.parametrize("people", [(300, 300), (200, 100, 60)])
def test_along_axes_of_others_a_site_varies_as_it_does(people):
    rng, width = np.random.default_rng(people[-1]), 40
    member = np.repeat(np.arange(len(people)), people) == len(people) - 1
    scores = rng.normal(size=(20, len(member), width)) * np.linspace(3, 0.3, width)

    def variances():
        return np.mean([covariances.variances_of_others(draw, member) for draw in scores], axis=0)

    # Alike, though along its own people's axes a site's variances run from almost 0 to 2.
    for few in (variances()[:8], variances()[-8:]):
        assert few.mean() == pytest.approx(1.0, abs=0.15)
    scores[:, member, 5] *= 4
    assert variances()[-1] == pytest.approx(scores[:, member, 5].var() / scores[:, :, 5].var(), rel=0.25)
    assert variances()[:8].mean() == pytest.approx(1.0, abs=0.15)


def test_no_direction_is_stretched_far():
    rng = np.random.default_rng(0)
    site = np.repeat([0, 1], 100)
    rows = rng.normal(size=(200, 300))
    rows[:, 0] = 30 * rng.normal(size=200) * site  # still at the first site
    rows[site == 0, 0] = 1e-3 * rng.normal(size=100)
    after = matched(rows, site)
    grown = np.linalg.norm(after[site == 0], axis=1) / np.linalg.norm(rows[site == 0], axis=1)
    assert grown.max() <= covariances.STRETCH * 1.01


def test_a_site_of_few_people_is_not_stretched():
    rng = np.random.default_rng(0)
    site = np.repeat([0, 1, 2], [100, 90, 10])  # ten people, forty directions: most have no variance there
    rows = rng.normal(size=(200, 300)) * np.linspace(3, 0.3, 300)
    before, after = (np.linalg.norm(values[site == 2], axis=1) for values in (rows, matched(rows, site)))
    assert (after <= 1.001 * before).all()
