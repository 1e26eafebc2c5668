import numpy as np
import pytest

import equipool as ep
from equipool.groups.trend import fit_trend
from equipool.sites.design import Design
from equipool.sites.shift_scale import fit_regression, tamed


def _design(rng, sites=4, people=30):
    site = np.repeat(np.arange(sites), people)
    c = rng.uniform(20, 80, (len(site), 1))
    fold = rng.integers(0, 3, len(site))
    return Design(site, c, np.empty((len(site), 0)), rng.uniform(0.5, 1.5, len(site)), fold, sites)


def _table(rng, design, features=3, spreads=0.0):
    """Return sites that shift and stretch what is people's own, and the spreads."""
    spread = np.exp(spreads * rng.standard_normal((design.n_sites, features)))
    shift = rng.standard_normal((design.n_sites, features))
    own = rng.standard_normal((len(design.site), features))
    return shift[design.site] + spread[design.site] * own + design.c / 30, spread


def _least_squares(y, design, basis, bends, curvature):
    """Return what a plain design matrix tells of one feature."""
    columns = np.hstack([np.eye(design.n_sites)[design.site], basis])
    penalty = np.append(np.zeros(design.n_sites), np.where(bends, curvature, 1e-9) * design.weight.sum())
    w = design.weight[:, None]
    return columns @ np.linalg.solve(columns.T @ (columns * w) + np.diag(penalty), columns.T @ (w[:, 0] * y))


def _naively_tamed(z, design, basis, bends):
    result = z.copy()
    for j in range(z.shape[1]):
        before = np.full(design.n_sites, np.inf)
        for _ in range(30):
            told = _least_squares(result[:, j], design, basis, bends, 1e-4)
            lengths, people = np.zeros(design.n_sites), np.zeros(design.n_sites)
            for i, s in enumerate(design.site):
                lengths[s] += design.weight[i] * abs(result[i, j] - told[i])
                people[s] += design.weight[i]
            pooled = lengths.sum() / people.sum()
            limit = 4 * np.sqrt(np.pi / 2) * (lengths + 10 * pooled) / (people + 10)
            if (np.abs(result[:, j] - told) <= limit[design.site]).all() or (limit >= 0.99 * before).all():
                break
            before = limit
            for i, s in enumerate(design.site):
                result[i, j] = told[i] + min(max(z[i, j] - told[i], -limit[s]), limit[s])
    return result


def test_taming_is_rounds_of_clipping():
    rng = np.random.default_rng(0)
    design = _design(rng)
    z, _ = _table(rng, design)
    z[rng.integers(0, len(z), 5), [0, 0, 0, 2, 2]] += 30.0
    trend = fit_trend(design.c, design.weight)
    found = tamed(z, design, trend(design.c), trend.bends)
    np.testing.assert_allclose(
        found, _naively_tamed(z, design, trend(design.c), trend.bends), rtol=1e-9, atol=1e-9
    )
    assert (found != z).any(axis=0).tolist() == [True, False, True]


def test_a_table_without_far_values_is_learned_from_as_it_is():
    rng = np.random.default_rng(0)
    design = _design(rng)
    z = rng.uniform(-1, 1, (len(design.site), 3)) + design.site[:, None]
    trend = fit_trend(design.c, design.weight)
    assert tamed(z, design, trend(design.c), trend.bends) is z


def test_the_weight_of_the_pools_spread_is_that_of_a_meta_analysis():
    """Against the formulas, feature by feature and site by site."""
    rng = np.random.default_rng(0)
    design = _design(rng, sites=6)
    z, _ = _table(rng, design, spreads=0.5)
    trend = fit_trend(design.c, design.weight)
    basis, bends = trend(design.c), trend.bends
    fit = fit_regression(z, design, basis, bends, 0.01, design.everybody, gain=False)
    between, kurtosis = [], []
    people = design.people
    for j in range(3):
        left = z[:, j] - _least_squares(z[:, j], design, basis, bends, 0.01)
        variance = [
            np.average(left[design.site == s] ** 2, weights=design.weight[design.site == s]) for s in range(6)
        ]
        fourth = sum((design.weight * left**4)[design.site == s].sum() / variance[s] ** 2 for s in range(6))
        kurtosis.append(min(max(fourth / people.sum(), 2), 20))
        logs = [np.log(variance[s]) + 1 / (people[s] - 1) for s in range(6)]
        weight = [(people[s] - 1) / (kurtosis[-1] - 1) for s in range(6)]
        mean = np.average(logs, weights=weight)
        q = sum(w * (value - mean) ** 2 for w, value in zip(weight, logs, strict=True))
        total = sum(weight)
        between.append(max(q - 5, 0) / (total - sum(w**2 for w in weight) / total))
    prior = (sum(between) + 2 * 0.2) / (3 + 2)
    for j in range(3):
        mixed = (6 * between[j] + 4 * prior) / (6 + 4)
        assert fit.spread_people[j] == pytest.approx((kurtosis[j] - 1) / mixed, rel=1e-9)


def test_spreads_are_shrunk_less_where_they_differ_more():
    weights = {}
    for spreads in (0.0, 0.2, 0.6):
        found = []
        for seed in range(10):
            rng = np.random.default_rng(seed)
            design = _design(rng, sites=10)
            z, _ = _table(rng, design, features=10, spreads=spreads)
            given = {"site": design.site, "covariates": design.c}
            found.append(np.median(ep.SiteHarmonizer().fit(z, **given).model_.spread_people))
        weights[spreads] = np.median(found)
    assert weights[0.0] > 3 * weights[0.2] > 3 * weights[0.6]


@pytest.mark.parametrize("size", [20.0, 1e3, 1e9])
@pytest.mark.parametrize("people", [20, 30, 200])
def test_however_far_a_failure_is_the_others_stay(people, size):
    """Those of the same site and feature, and the same person's other features."""
    rng = np.random.default_rng(0)
    design = _design(rng, sites=6, people=people)
    z, _ = _table(rng, design, features=8)
    odd = z.copy()
    odd[0, 0] += size
    given = {"site": design.site, "covariates": design.c}
    before, after = (ep.SiteHarmonizer().fit(x, **given).transform(x, **given) for x in (z, odd))
    changed = np.abs(after - before)
    changed[0, 0] = 0.0
    assert changed.max() < 1.0  # deviation, of the farthest
    assert after[0, 0] - before[0, 0] > 0.5 * size


def test_counts_are_not_bent():
    bent = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        design = _design(rng, sites=5, people=60)
        z = rng.poisson(1.0, (len(design.site), 4)).astype(float)
        given = {"site": design.site, "covariates": design.c}
        bent.append(ep.SiteHarmonizer().fit(z, **given).model_.bend.active)
    assert not any(bent)


def test_one_failed_segmentation_moves_nobody_else():
    """A cell of 50 deviations changes what others of its site become by little, and itself stays far."""
    moved = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        design = _design(rng)
        z, _ = _table(rng, design)
        odd = z.copy()
        odd[0, 0] += 50.0
        given = {"site": design.site, "covariates": design.c}
        before, after = (
            ep.SiteHarmonizer(bending=False).fit(x, **given).transform(x, **given) for x in (z, odd)
        )
        moved.append(np.abs(after - before)[1:].max())
        assert after[0, 0] - before[0, 0] > 30.0
    assert np.median(moved) < 0.5  # the mean of 30 people moves by 1.7, their spread by a factor of 9


def test_failures_cost_hardly_anything_of_the_truth():
    rng = np.random.default_rng(0)
    r2 = {"whole": [], "with failures": []}
    for seed in range(5):
        rng = np.random.default_rng(seed)
        design = _design(rng, people=60)
        own = rng.standard_normal((len(design.site), 8)) + design.c / 30
        seen = (
            np.exp(0.2 * rng.standard_normal((4, 8)))[design.site] * own
            + rng.standard_normal((4, 8))[design.site]
        )
        failed = rng.random(seen.shape) < 0.005
        for name, x in (
            ("whole", seen),
            ("with failures", np.where(failed, 20 * rng.standard_normal(seen.shape), seen)),
        ):
            given = {"site": design.site, "covariates": design.c}
            found = ep.SiteHarmonizer().fit(x, **given).transform(x, **given)
            people = ~failed.any(axis=1)
            a, b = (v[people] - v[people].mean(axis=0) for v in (found, own))
            r2[name].append(1 - ((a - b) ** 2).sum() / (b**2).sum())
    assert np.mean(r2["with failures"]) > np.mean(r2["whole"]) - 0.01


def test_a_new_site_is_not_misled_by_one_failure():
    rng = np.random.default_rng(0)
    design = _design(rng, sites=5)
    z, _ = _table(rng, design)
    new = design.site == 4
    harmonizer = ep.SiteHarmonizer(unseen_site="adapt", bending=False)
    harmonizer.fit(z[~new], site=design.site[~new], covariates=design.c[~new])
    odd = z.copy()
    odd[np.flatnonzero(new)[0], 0] += 50.0
    given = {"site": design.site[new], "covariates": design.c[new]}
    before, after = (harmonizer.transform(x[new], **given) for x in (z, odd))
    assert np.abs(after - before)[1:].max() < 0.5
