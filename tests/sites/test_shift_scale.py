"""The regression on sites and trend against plain transcriptions, and what outlying values must not do."""

import numpy as np
import pytest
import random_effects as draw

import equipool as ep
from equipool.groups.trend import Trend
from equipool.sites.shift_scale import (
    Moments,
    SharedTrend,
    regress,
    regression_columns,
    sums_of,
    variance_between,
    winsorise,
)


def _design(rng, sites=4, n=30, target=0):
    site = np.repeat(np.arange(sites), n)
    c, y = rng.uniform(20, 80, (len(site), 1)), rng.standard_normal((len(site), target))
    return draw.design_of(site, c, weight=rng.uniform(0.5, 1.5, len(site)), target=y)


def _table(rng, design, features=3, scales=0.0):
    """Return what sites measure that shift and scale residuals, and the scales."""
    scale = np.exp(scales * rng.standard_normal((design.n_sites, features)))
    shift = rng.standard_normal((design.n_sites, features))
    residuals = rng.standard_normal((len(design.site), features))
    return shift[design.site] + scale[design.site] * residuals + design.covariates / 30, scale


def _penalty(design, columns, curvature):
    """Return the penalty on each column: of the age's spline the last three are curved."""
    return np.where(np.isin(np.arange(columns.shape[1]), [1, 2, 3]), curvature, 1e-9)


def _least_squares(y, design, columns, penalty):
    """Return the coefficients of one indicator a site and of the columns."""
    matrix = np.hstack([np.eye(design.n_sites)[design.site], columns])
    ridge = np.diag(np.append(np.zeros(design.n_sites), penalty * design.weight.sum()))
    weighted = matrix.T * design.weight
    return matrix, np.linalg.solve(weighted @ matrix + ridge, weighted @ y)


def _every(n_folds=1):
    return np.ones(n_folds, dtype=bool)


def _weighted(values, weight):
    return sum(w * v for w, v in zip(weight, values, strict=True)) / weight.sum()


# -- moments -----------------------------------------------------------------------------------------------


def test_moments_are_those_of_each_sites_rows_over_any_folds():
    rng = np.random.default_rng(0)
    design = _design(rng, n=13)
    z, b = rng.standard_normal((len(design.site), 3)), rng.standard_normal((len(design.site), 2))
    sums = sums_of(z, b, design, design.n_folds)
    for folds in ([0], [1, 2], [0, 1, 2]):
        moments = Moments.of(sums, np.isin(np.arange(3), folds))
        for s in range(design.n_sites):
            rows = (design.site == s) & np.isin(design.fold, folds)
            w, mean_b, mean_z = (
                design.weight[rows],
                *(_weighted(x[rows], design.weight[rows]) for x in (b, z)),
            )
            assert moments.n[s, 0] == pytest.approx(w.sum())
            np.testing.assert_allclose(moments.b[s, :, 0], mean_b)
            np.testing.assert_allclose(moments.z[s], mean_z)
            away = list(zip(w, b[rows] - mean_b, z[rows] - mean_z, strict=True))
            np.testing.assert_allclose(moments.bb[s, :, :, 0], sum(v * np.outer(d, d) for v, d, _ in away))
            np.testing.assert_allclose(moments.bz[s], sum(v * np.outer(d, e) for v, d, e in away))
            np.testing.assert_allclose(moments.zz[s], sum(v * e**2 for v, _, e in away))


def test_sums_of_squares_are_those_of_the_residuals():
    rng = np.random.default_rng(0)
    design = _design(rng, n=13)
    z, b = rng.standard_normal((len(design.site), 3)), rng.standard_normal((len(design.site), 2))
    level, slopes, factor = rng.normal(size=(4, 3)), rng.normal(size=(2, 3)), rng.uniform(1, 2, (4, 3))
    squares = np.zeros((4, 3))
    for i, s in enumerate(design.site):
        squares[s] += design.weight[i] * (z[i] - level[s] - factor[s] * (b[i] @ slopes)) ** 2
    moments = Moments.of(sums_of(z, b, design), _every())
    np.testing.assert_allclose(moments.squares(level, slopes, factor), squares)


# -- the regression ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0, 2])
def test_the_regression_is_that_of_a_design_matrix(target):
    rng = np.random.default_rng(0)
    design = _design(rng, target=target)
    z, _ = _table(rng, design)
    _, columns = regression_columns(design)
    assert columns.shape[1] == 4 + target
    penalty = _penalty(design, columns, 0.01)
    matrix, solved = _least_squares(z, design, columns, penalty)
    fit = regress(Moments.of(sums_of(z, columns, design), _every()), penalty)
    np.testing.assert_allclose(fit.level, solved[:4])
    np.testing.assert_allclose(fit.slopes, solved[4:], atol=1e-9)
    np.testing.assert_allclose(fit.centre, _weighted(solved[:4], design.n_participants))
    for part, predicted in fit.predicted(columns, design.site):
        np.testing.assert_allclose(predicted, (matrix @ solved)[part], atol=1e-9)


def test_where_sites_scale_the_trend_features_over_scale_follow_a_plain_regression():
    rng = np.random.default_rng(0)
    design = _design(rng)
    z, _ = _table(rng, design, scales=0.3)
    _, columns = regression_columns(design)
    penalty, n = _penalty(design, columns, 0.01), design.n_participants
    scale = np.ones((4, 3))
    for _ in range(3):
        factor = scale[design.site]
        # One feature at a time: its sites' levels and its trend.
        solved = np.column_stack(
            [_least_squares((z / factor)[:, j], design, columns, penalty)[1] for j in range(3)]
        )
        residuals = z - factor * (solved[:4][design.site] + columns @ solved[4:])
        squares = np.array(
            [(design.weight[:, None] * residuals**2)[design.site == s].sum(axis=0) for s in range(4)]
        )
        fit = regress(Moments.of(sums_of(z, columns, design), _every()), penalty, scales_trend=True)
        weight = fit.effect.scale_weight  # has a test of its own
        variance = squares.sum(axis=0) / n.sum()
        scale = np.sqrt((squares + weight * variance) / (n[:, None] + weight) / variance)
        scale /= np.exp(_weighted(np.log(scale), n))
    np.testing.assert_allclose(fit.slopes, solved[4:], atol=2e-3)  # the weight changes from turn to turn
    np.testing.assert_allclose(fit.effect.scale, scale, rtol=2e-3)


def test_scales_are_those_of_the_shrunk_variances_with_a_geometric_mean_of_1():
    rng = np.random.default_rng(0)
    design = _design(rng)
    z, _ = _table(rng, design, scales=0.4)
    _, columns = regression_columns(design)
    penalty, n = _penalty(design, columns, 0.01), design.n_participants
    matrix, solved = _least_squares(z, design, columns, penalty)
    fit = regress(Moments.of(sums_of(z, columns, design), _every()), penalty)
    squares = [
        (design.weight[:, None] * (z - matrix @ solved) ** 2)[design.site == s].sum(axis=0) for s in range(4)
    ]
    for j in range(3):
        k, pooled = fit.effect.scale_weight[j], sum(square[j] for square in squares) / n.sum()
        scale = [np.sqrt((squares[s][j] + k * pooled) / (n[s] + k) / pooled) for s in range(4)]
        mean = np.exp(sum(n[s] * np.log(scale[s]) for s in range(4)) / n.sum())
        np.testing.assert_allclose(fit.effect.scale[:, j], np.array(scale) / mean)
        variance = sum(squares[s][j] / fit.effect.scale[s, j] ** 2 for s in range(4)) / n.sum()
        assert fit.effect.variance[j] == pytest.approx(variance)


def test_the_weight_of_the_pools_scale_is_that_of_a_meta_analysis():
    """Against the formulas, feature by feature and site by site."""
    rng = np.random.default_rng(0)
    design = _design(rng, sites=6)
    z, _ = _table(rng, design, scales=0.5)
    shared = SharedTrend.fit(z, design, curvature=0.01)
    columns, n = shared.columns, design.n_participants
    matrix, solved = _least_squares(z, design, columns, _penalty(design, columns, 0.01))
    residuals, between = z - matrix @ solved, []
    for j in range(3):
        rows = [design.site == s for s in range(6)]
        variance = [np.average(residuals[r, j] ** 2, weights=design.weight[r]) for r in rows]
        logs = [np.log(variance[s]) + 1 / (n[s] - 1) for s in range(6)]
        weight = [(n[s] - 1) / 2 for s in range(6)]
        mean = np.average(logs, weights=weight)
        q = sum(w * (value - mean) ** 2 for w, value in zip(weight, logs, strict=True))
        total = sum(weight)
        between.append(max(q - 5, 0) / (total - sum(w**2 for w in weight) / total))
    prior = sum(between) / 3
    fit = regress(Moments.of(shared.sums, _every(3)), _penalty(design, columns, 0.01))
    for j in range(3):
        mixed = (6 * between[j] + 4 * prior) / (6 + 4)
        assert fit.effect.scale_weight[j] == pytest.approx(2 / mixed, rel=1e-9)


def test_the_variance_between_sites_is_that_of_dersimonian_and_laird():
    rng = np.random.default_rng(0)
    values, error = rng.normal(size=(9, 4)) * [2.0, 1.0, 0.3, 0.0], rng.uniform(0.2, 1.0, (9, 4))
    between = []
    for y, v in zip(values.T, error.T**2, strict=True):
        weight = [1 / one for one in v]
        mean = sum(w * one for w, one in zip(weight, y, strict=True)) / sum(weight)
        q = sum(w * (one - mean) ** 2 for w, one in zip(weight, y, strict=True))
        c = sum(weight) - sum(w**2 for w in weight) / sum(weight)
        between.append(max(0.0, (q - (len(y) - 1)) / c))
    shrunk = [(9 * one + 4 * np.mean(between)) / (9 + 4) for one in between]
    np.testing.assert_allclose(variance_between(values, error), shrunk)
    assert between[0] > between[2] >= 0
    assert between[3] == 0


def test_shifts_are_shrunk_by_the_variance_between_sites_and_their_errors():
    rng = np.random.default_rng(0)
    design = _design(rng, sites=5)
    z, _ = _table(rng, design)
    _, columns = regression_columns(design)
    fit = regress(Moments.of(sums_of(z, columns, design), _every()), _penalty(design, columns, 0.01))
    raw, error = fit.level - fit.centre, fit.effect.error
    for j, between in enumerate(variance_between(raw, error)):
        assert fit.effect.between[j] == pytest.approx(between)
        for s in range(5):
            assert fit.effect.shift[s, j] == pytest.approx(raw[s, j] * between / (between + error[s, j] ** 2))


@pytest.mark.parametrize("scales_trend", [False, True])
def test_standard_errors_are_those_of_repeated_tables(scales_trend):
    """Each of many features without a site effect is one more table."""
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(3), [20, 50, 100])
    c = rng.normal(size=(len(site), 1)) + site[:, None]  # ages differ between sites
    design = draw.design_of(site, c)
    z = rng.normal(size=(len(site), 4000)) + 2 * c
    _, columns = regression_columns(design)
    fit = regress(
        Moments.of(sums_of(z, columns, design), _every()),
        _penalty(design, columns, 1.0),
        scales_trend=scales_trend,
    )
    raw = fit.level / fit.effect.trend_scale - fit.centre
    # Beside the mean of the sites, which the formula takes for known.
    np.testing.assert_allclose(raw.std(axis=1), fit.effect.error.mean(axis=1), rtol=0.35)
    assert (np.diff(fit.effect.error.mean(axis=1)) < 0).all()


def test_sites_without_rows_have_no_effect_and_change_nothing():
    rng = np.random.default_rng(0)
    design = _design(rng)
    z, _ = _table(rng, design)
    _, columns = regression_columns(design)
    sums = sums_of(z, columns, design)
    with_empty = tuple(np.insert(each, 2, 0.0, axis=0) for each in sums)
    a, b = (
        regress(Moments.of(each, _every()), _penalty(design, columns, 0.01)) for each in (sums, with_empty)
    )
    rest = [0, 1, 3, 4]
    for name in ("shift", "error", "scale"):
        np.testing.assert_allclose(getattr(b.effect, name)[rest], getattr(a.effect, name))
    for name in ("between", "scale_weight", "variance"):
        np.testing.assert_allclose(getattr(b.effect, name), getattr(a.effect, name))
    np.testing.assert_array_equal(b.effect.shift[2], 0.0)
    assert np.isfinite(b.effect.error).all()


# -- choices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales_trend", [False, True])
def test_the_likelihood_of_held_out_participants_is_a_sum_over_them(scales_trend):
    rng = np.random.default_rng(0)
    design = _design(rng, n=20)
    z, _ = _table(rng, design, scales=0.3)
    fitted = SharedTrend.fit(z, design, curvature=0.1)
    shared = SharedTrend(fitted.basis, fitted.columns, fitted.sums, 0.1, scales_trend)
    variance = np.zeros(3)
    for s in range(4):
        rows = design.site == s
        away = z[rows] - _weighted(z[rows], design.weight[rows])
        variance += design.weight[rows] @ away**2 / design.weight.sum()
    parts = np.zeros((3, 4))
    for fold in range(3):
        rows = np.flatnonzero(design.fold != fold)
        train = design.only(rows)
        moments = Moments.of(sums_of(z[rows], shared.columns[rows], train), _every())
        penalty = _penalty(design, shared.columns, 0.1)
        fit = regress(moments, penalty, scales_trend=scales_trend)
        for i in np.flatnonzero(design.fold == fold):
            s = design.site[i]
            factor = fit.effect.scale[s] if scales_trend else 1.0
            residual = z[i] - fit.level[s] - factor * (shared.columns[i] @ fit.slopes)
            parts[fold, s] -= 0.5 * design.weight[i] * (residual**2 / variance).sum()
    np.testing.assert_allclose(shared.held_out(), parts.ravel())


def test_curved_trends_are_curved_and_straight_ones_straight():
    curvature = {"straight": [], "curved": []}
    for seed in range(6):
        rng = np.random.default_rng(seed)
        design = _design(rng, n=80)
        age = (design.covariates - 50) / 30
        for name, trend in (("straight", age), ("curved", age + 2 * np.maximum(age, 0) ** 2)):
            z = trend + rng.standard_normal((len(age), 5))
            curvature[name].append(SharedTrend.fit(z, design).curvature)
    assert np.median(curvature["straight"]) >= 1.0 > 0.1 >= np.median(curvature["curved"])


def test_a_trend_without_covariates_has_no_curvature():
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(3), 20)
    z = rng.standard_normal((60, 2)) + site[:, None]
    shared = SharedTrend.fit(z, draw.design_of(site))
    assert shared.curvature == 0.0
    assert not shared.scales_trend
    trend = Trend(shared.basis, shared.whole.slopes, shared.whole.centre)
    assert trend(np.empty((5, 0))).shape == (5, 2)


def test_a_target_is_allowed_for_beside_the_trend():
    """Sites differ in the share of patients: their effect is no shift, and stays in the residuals."""
    errors = {False: [], True: []}
    for seed in range(5):
        rng = np.random.default_rng(seed)
        site = np.repeat(np.arange(3), 150)
        c, patient = rng.normal(size=(450, 1)), rng.random(450) < np.array([0.1, 0.5, 0.9])[site]
        z = c + 1.5 * patient[:, None] + rng.normal(size=(450, 4))
        for allowed, values in errors.items():
            target = patient[:, None].astype(float) if allowed else None
            shift = SharedTrend.fit(z, draw.design_of(site, c, target=target)).whole.effect.shift
            values.append(np.abs(shift).mean())
    assert np.mean(errors[True]) < 0.3 * np.mean(errors[False])


def test_scales_are_shrunk_less_where_they_differ_more():
    weights = {}
    for scales in (0.0, 0.2, 0.6):
        values = []
        for seed in range(10):
            rng = np.random.default_rng(seed)
            design = _design(rng, sites=10)
            z, _ = _table(rng, design, features=10, scales=scales)
            values.append(np.median(SharedTrend.fit(z, design).whole.effect.scale_weight))
        weights[scales] = np.median(values)
    assert weights[0.0] > 3 * weights[0.2] > 3 * weights[0.6]


# -- outlying values ---------------------------------------------------------------------------------------


def _naively_winsorised(z, design, columns, penalty):
    result, before = z.copy(), np.full((design.n_sites, z.shape[1]), np.inf)
    for _ in range(30):
        limits = np.empty_like(before)
        for j in range(z.shape[1]):
            matrix, solved = _least_squares(result[:, j], design, columns, penalty)
            predicted = matrix @ solved
            lengths, n = np.zeros(design.n_sites), np.zeros(design.n_sites)
            for i, s in enumerate(design.site):
                lengths[s] += design.weight[i] * abs(result[i, j] - predicted[i])
                n[s] += design.weight[i]
            pooled = lengths.sum() / n.sum()
            limit = limits[:, j] = 4 * np.sqrt(np.pi / 2) * (lengths + 10 * pooled) / (n + 10)
            for i, s in enumerate(design.site):
                result[i, j] = min(max(z[i, j], predicted[i] - limit[s]), predicted[i] + limit[s])
        if (limits >= 0.99 * before).all():
            break
        before = limits
    return result


def test_winsorising_is_rounds_of_clipping():
    rng = np.random.default_rng(0)
    design = _design(rng)
    z, _ = _table(rng, design)
    z[rng.integers(0, len(z), 5), [0, 0, 0, 2, 2]] += 30.0
    _, columns = regression_columns(design)
    result, count = winsorise(z, design)
    naive = _naively_winsorised(z, design, columns, _penalty(design, columns, 1e-4))
    np.testing.assert_allclose(result, naive, rtol=1e-9, atol=1e-9)
    changed = result != z
    assert changed.any(axis=0).tolist() == [True, False, True]
    for s in range(4):
        rows = design.site == s
        np.testing.assert_allclose(count[s], design.weight[rows] @ changed[rows])


def test_a_table_without_outlying_values_is_estimated_from_as_it_is():
    rng = np.random.default_rng(0)
    design = _design(rng)
    z = rng.uniform(-1, 1, (len(design.site), 3)) + design.site[:, None]
    result, count = winsorise(z, design)
    np.testing.assert_array_equal(result, z)
    assert not count.any()


@pytest.mark.parametrize("size", [20.0, 1e3, 1e9])
@pytest.mark.parametrize("n", [20, 30, 200])
def test_however_far_a_failure_is_the_others_stay(n, size):
    """Those of the same site and feature, and the same participant's other features."""
    rng = np.random.default_rng(0)
    design = _design(rng, sites=6, n=n)
    z, _ = _table(rng, design, features=8)
    odd = z.copy()
    odd[0, 0] += size
    given = {"site": design.site, "covariates": design.covariates}
    settings = {"network": False}  # the others come from here, whatever is chosen
    before, after = (ep.SiteHarmonizer(**settings).fit(x, **given).transform(x, **given) for x in (z, odd))
    changed = np.abs(after - before)
    changed[0, 0] = 0.0
    assert changed.max() < 1.0  # standard deviation, of the farthest
    assert after[0, 0] - before[0, 0] > 0.5 * size


def test_counts_are_not_warped():
    warped = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        design = _design(rng, sites=5, n=60)
        z = rng.poisson(1.0, (len(design.site), 4)).astype(float)
        given = {"site": design.site, "covariates": design.covariates}
        warped += ep.SiteHarmonizer(network=False).fit(z, **given).choices_["warped"]
    assert not warped


def test_one_failed_segmentation_moves_no_other_participant():
    """A cell of 50 standard deviations changes others of its site by little, and itself stays far."""
    moved = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        design = _design(rng)
        z, _ = _table(rng, design)
        odd = z.copy()
        odd[0, 0] += 50.0
        given = {"site": design.site, "covariates": design.covariates}
        before, after = (
            ep.SiteHarmonizer(bending=False).fit(x, **given).transform(x, **given) for x in (z, odd)
        )
        moved.append(np.abs(after - before)[1:].max())
        assert after[0, 0] - before[0, 0] > 30.0
    assert np.median(moved) < 0.5  # the mean of 30 moves by 1.7, their scale by a factor of 9


def test_failures_cost_hardly_anything_of_the_truth():
    r2 = {"whole": [], "with failures": []}
    for seed in range(5):
        rng = np.random.default_rng(seed)
        design = _design(rng, n=60)
        clean = rng.standard_normal((len(design.site), 8)) + design.covariates / 30
        measured = np.exp(0.2 * rng.standard_normal((4, 8)))[design.site] * clean
        measured += rng.standard_normal((4, 8))[design.site]
        failed = rng.random(measured.shape) < 0.005
        broken = np.where(failed, 20 * rng.standard_normal(measured.shape), measured)
        for name, x in (("whole", measured), ("with failures", broken)):
            given = {"site": design.site, "covariates": design.covariates}
            harmonized = ep.SiteHarmonizer(network=False).fit(x, **given).transform(x, **given)
            good = ~failed.any(axis=1)
            a, b = (v[good] - v[good].mean(axis=0) for v in (harmonized, clean))
            r2[name].append(1 - ((a - b) ** 2).sum() / (b**2).sum())
    assert np.mean(r2["with failures"]) > np.mean(r2["whole"]) - 0.01


def test_a_new_site_is_not_misled_by_one_failure():
    rng = np.random.default_rng(0)
    design = _design(rng, sites=5)
    z, _ = _table(rng, design)
    new = design.site == 4
    harmonizer = ep.SiteHarmonizer(unseen_site="adapt", bending=False)
    harmonizer.fit(z[~new], site=design.site[~new], covariates=design.covariates[~new])
    odd = z.copy()
    odd[np.flatnonzero(new)[0], 0] += 50.0
    given = {"site": design.site[new], "covariates": design.covariates[new]}
    before, after = (harmonizer.transform(x[new], **given) for x in (z, odd))
    assert np.abs(after - before)[1:].max() < 0.5
