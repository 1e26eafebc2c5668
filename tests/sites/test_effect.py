"""What every site effect must keep to, and the rule by which effects are chosen."""

from dataclasses import replace

import numpy as np
import pytest
import random_effects as draw
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import norm

from equipool.sites.coupling import Coupling
from equipool.sites.covariance import Covariance
from equipool.sites.effect import Composition, choose, exceeds
from equipool.sites.shift_scale import ShiftScale
from equipool.sites.warp import Warp

SITES, P, COVARIATES = 3, 4, 2
KINDS = {
    "shift and scale": draw.shift_scale,
    "shift and scale of the trend": lambda rng: draw.shift_scale(rng, scales_trend=True),
    "covariance": draw.covariance,
    "warp": draw.warp,
    "warp of some features": lambda rng: draw.warp(rng, columns=[0, 2]),
    "coupling": draw.coupling,
    "composition": draw.composition,
}
NEAR = 1.5  # residuals that nothing winsorises


def drawn(kind, seed, n=20):
    """Return an effect, rows and their context."""
    rng = np.random.default_rng(seed)
    effect, predicted = KINDS[kind](rng), rng.normal(size=(n, P))
    if kind == "composition":  # whose later effects see large residuals of the earlier ones
        parts = [replace(e, deviation=100 * e.deviation) if hasattr(e, "deviation") else e for e in effect]
        effect = Composition(tuple(parts))
    rows = predicted + rng.uniform(-NEAR, NEAR, (n, P))
    site, c = rng.integers(0, SITES, n), rng.normal(size=(n, COVARIATES))
    return effect, rows, draw.context(site, rows, predicted=predicted, covariates=c)


# -- the protocol ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_redo_is_the_inverse_of_undo_and_undo_that_of_redo(kind, seed):
    effect, rows, at = drawn(kind, seed)
    undone, redone = effect.undo(rows, at), effect.redo(rows, at)
    assert np.abs(undone - rows).max() > 0.1
    np.testing.assert_allclose(effect.redo(undone, at), rows, atol=1e-8)
    np.testing.assert_allclose(effect.undo(redone, at), rows, atol=1e-8)


@given(
    kind=st.sampled_from([kind for kind in KINDS if kind not in ("covariance", "coupling", "composition")]),
    rows=arrays(np.float64, (3, P), elements=st.floats(-1e3, 1e3, width=32)),
    seed=st.integers(0, 10),
)
def test_effects_of_single_features_have_an_inverse_however_far_a_value_is(kind, rows, seed):
    effect, _, at = drawn(kind, seed, n=3)
    np.testing.assert_allclose(effect.redo(effect.undo(rows, at), at), rows, rtol=1e-7, atol=1e-7)


@given(
    kind=st.sampled_from(["covariance", "coupling"]),
    residuals=arrays(np.float64, (3, P), elements=st.floats(-NEAR, NEAR, width=32)),
    far=st.floats(1e2, 1e6),
    seed=st.integers(0, 10),
)
def test_an_outlying_value_moves_the_other_features_no_further_than_the_limit_of_winsorising(
    kind, residuals, far, seed
):
    effect, _, at = drawn(kind, seed, n=3)
    at, limit = replace(at, predicted=np.zeros((3, P))), 4 * effect.deviation[0]
    moved = [
        effect.undo(np.column_stack([np.full(3, value), residuals[:, 1:]]), at)[:, 1:]
        for value in (limit, far)
    ]
    np.testing.assert_allclose(moved[0], moved[1], atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_log_det_is_that_of_the_numerical_jacobian(kind, seed):
    effect, rows, at = drawn(kind, seed, n=6)
    step, jacobian = 1e-6, np.empty((len(rows), P, P))
    for k in range(P):
        nudge = step * np.eye(P)[k]
        jacobian[:, :, k] = (effect.undo(rows + nudge, at) - effect.undo(rows - nudge, at)) / (2 * step)
    np.testing.assert_allclose(effect.log_det(rows, at), np.linalg.slogdet(jacobian)[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_mapped_one_by_one(kind):
    effect, rows, at = drawn(kind, 0)
    whole = effect.undo(rows, at)
    parts = [effect.undo(rows[[i]], at[[i]])[0] for i in range(len(rows))]
    np.testing.assert_allclose(parts, whole, atol=1e-12)


@pytest.mark.parametrize("kind", [ShiftScale, Covariance, Warp, Coupling])
def test_the_identity_does_nothing(kind):
    _, rows, at = drawn("coupling", 0)
    effect = kind.identity(SITES, P)
    assert effect.is_identity
    for added in (effect, effect.add_site(rows, at)):
        np.testing.assert_array_equal(effect.undo(rows, at), rows)
        np.testing.assert_array_equal(effect.redo(rows, at), rows)
        np.testing.assert_array_equal(effect.log_det(rows, at), 0.0)
        assert added.is_identity or kind is ShiftScale
    assert not any(effect.is_identity for effect in draw.composition(np.random.default_rng(0)))


def test_a_composition_leaves_identities_out_and_undoes_the_outermost_effect_first():
    rng = np.random.default_rng(0)
    outer, inner = draw.shift_scale(rng, scales_trend=True), draw.warp(rng)
    effects = Composition((outer, inner, Covariance.identity(SITES, P)))
    rows = rng.normal(size=(5, P))
    at = draw.context(1, rows)
    assert effects.active == [outer, inner]
    np.testing.assert_array_equal(effects.undo(rows, at), inner.undo(outer.undo(rows, at), at))
    np.testing.assert_array_equal(effects.redo(rows, at), outer.redo(inner.redo(rows, at), at))
    assert effects["warp"] is inner


# -- new sites ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_site_changes_nothing_for_the_others(kind):
    effect, rows, at = drawn(kind, 0)
    added = effect.add_site(rows, replace(at, site=np.full(len(rows), SITES)))
    for name in ("undo", "redo", "log_det"):
        np.testing.assert_array_equal(getattr(added, name)(rows, at), getattr(effect, name)(rows, at))
    new = replace(at, site=np.full(len(rows), SITES))
    np.testing.assert_allclose(added.redo(added.undo(rows, new), new), rows, atol=1e-8)


@pytest.mark.parametrize("kind", ["warp", "warp of some features", "coupling"])
def test_a_new_site_is_neither_warped_nor_coupled(kind):
    effect, rows, at = drawn(kind, 0)
    new = replace(at, site=np.full(len(rows), SITES))
    np.testing.assert_allclose(effect.add_site(rows, new).undo(rows, new), rows, atol=1e-9)


@pytest.mark.parametrize("scales_trend", [False, True])
def test_shift_and_scale_of_a_new_site_are_estimated(scales_trend):
    rng = np.random.default_rng(0)
    effect, n = draw.shift_scale(rng, scales_trend=scales_trend), 4000
    predicted = rng.normal(size=(n, P))
    clean = predicted + np.sqrt(effect.variance) * rng.normal(size=(n, P))
    shift, scale = rng.normal(size=P), np.exp(0.3 * rng.normal(size=P))
    plain = predicted + shift + scale * (clean - predicted)
    rows = scale * (clean + shift) if scales_trend else plain
    added = effect.add_site(rows, draw.context(SITES, rows, predicted=predicted))
    np.testing.assert_allclose(added.shift[-1], shift, atol=0.1)
    np.testing.assert_allclose(added.scale[-1], scale, rtol=0.1)
    np.testing.assert_allclose(added.error[-1], np.sqrt(effect.variance / n))


@pytest.mark.parametrize("scales_trend", [False, True])
def test_a_new_site_of_few_rows_is_shrunk_to_the_pool(scales_trend):
    rng = np.random.default_rng(0)
    effect = draw.shift_scale(rng, scales_trend=scales_trend)
    rows = 2.0 + rng.normal(size=(2, P))
    at = draw.context(SITES, rows)
    few, one = effect.add_site(rows, at), effect.add_site(rows[:1], at[:1])
    mean = (rows / few.scale[-1] if scales_trend else rows).mean(axis=0)
    expected = mean * effect.between / (effect.between + effect.variance / 2)
    assert (np.abs(few.shift[-1]) < np.abs(mean)).all()
    np.testing.assert_allclose(few.shift[-1], expected, rtol=0.2)  # the scale is estimated in turns
    assert (np.abs(few.scale[-1] - 1) < 0.5).all()
    np.testing.assert_allclose(one.scale[-1], 1.0)  # one row does not vary


def test_missing_cells_of_a_new_site_are_left_out():
    rng = np.random.default_rng(0)
    effect = draw.shift_scale(rng)
    rows = rng.normal(size=(60, P))
    gaps = rows.copy()
    gaps[20:, 0] = np.nan
    gaps[:, 1] = np.nan
    at = draw.context(SITES, rows)
    whole, part, few = (
        effect.add_site(rows, at),
        effect.add_site(gaps, at),
        effect.add_site(rows[:20], at[:20]),
    )
    for name in ("shift", "scale", "error"):
        new, wanted = getattr(part, name)[-1], getattr(whole, name)[-1].copy()
        wanted[0] = getattr(few, name)[-1][0]
        np.testing.assert_allclose(new[[0, 2, 3]], wanted[[0, 2, 3]])
    assert (part.shift[-1, 1], part.scale[-1, 1]) == (0.0, 1.0)


def test_the_covariance_of_a_new_site_is_estimated():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        effect, n = draw.covariance(rng, shrinkage=30.0, n=400), 4000
        rotation = np.linalg.qr(rng.normal(size=(P, P)))[0]
        rows = rng.normal(size=(n, P)) * [0.5, 0.8, 1.2, 1.5] @ rotation
        at = draw.context(SITES, rows)
        undone, pooled = effect.add_site(rows, at).undo(rows, at), effect.colour.T @ effect.colour
        before, after = (np.abs(np.cov(x.T) - pooled).max() for x in (rows, undone))
        assert after < 0.15 * before


def test_missing_cells_of_a_new_site_do_not_enter_its_covariance():
    rng = np.random.default_rng(0)
    effect = draw.covariance(rng)
    rows = 0.3 + rng.uniform(-NEAR, NEAR, (50, P))
    gaps = np.where(rng.random(rows.shape) < 0.2, np.nan, rows)
    mean, filled = np.nanmean(gaps, axis=0), gaps.copy()
    for row in filled:  # expected given the measured cells, under the pool's covariance
        missing = np.isnan(row)
        if missing.any():
            covariance = np.linalg.inv(effect.whiten @ effect.whiten.T)
            across = covariance[np.ix_(missing, ~missing)]
            inner = covariance[np.ix_(~missing, ~missing)]
            row[missing] = mean[missing] + across @ np.linalg.solve(inner, (row - mean)[~missing])
    at = draw.context(SITES, rows)
    a, b = (effect.add_site(values, at) for values in (gaps, filled))
    # Filled cells move the site's mean a little; filled with the mean alone, the difference is 0.24.
    np.testing.assert_allclose(a.undo(rows, at), b.undo(rows, at), atol=1e-3)


# -- the rule of selection ---------------------------------------------------------------------------------


def test_gains_beyond_two_standard_errors_exceed():
    rng = np.random.default_rng(0)
    gains = rng.normal(size=(200, 3, 8)) + 0.5
    z = gains.sum(axis=-1) / (gains.std(axis=-1, ddof=1) * np.sqrt(8))
    np.testing.assert_array_equal(exceeds(gains), z > 2)
    np.testing.assert_array_equal(exceeds(gains, standard_errors=1.0), z > 1)
    assert 0 < exceeds(gains).mean() < 1
    bonferroni = norm.isf(norm.sf(2) / 100)
    np.testing.assert_array_equal(exceeds(gains, tests=100), z > bonferroni)
    assert not exceeds(np.ones((4, 1))).any()  # one part has no standard error
    assert not exceeds(np.zeros((4, 5))).any()
    assert exceeds(np.ones((4, 5))).all()


@given(
    planted=st.integers(0, 4),
    seed=st.integers(0, 50),
    offset=st.floats(-1e3, 1e3),
    parts=st.integers(10, 60),
)
def test_the_simplest_candidate_near_the_best_is_chosen(planted, seed, offset, parts):
    """Candidates gain up to the planted one, by far more than noise, and lose a little after."""
    rng = np.random.default_rng(seed)
    steps = np.where(np.arange(5) <= planted, np.arange(5), planted - 0.1 * (np.arange(5) - planted))
    likelihoods = offset + 10.0 * steps[:, None] + 1e-3 * rng.normal(size=(5, parts))
    assert choose(likelihoods) == planted
    assert choose(likelihoods[:, :1]) == 0


def test_candidates_that_are_not_better_are_chosen_seldom():
    rng = np.random.default_rng(0)
    chosen = [choose(np.vstack([np.zeros(25), 0.3 * rng.standard_t(4, (1, 25))])) for _ in range(400)]
    assert np.mean(chosen) < 0.06
    # Nor are several that go together, as strengths of one effect do.
    noise = rng.normal(size=(400, 1, 25))
    chosen = [choose(np.arange(5)[:, None] * (each - 0.1)) > 0 for each in noise]
    assert np.mean(chosen) < 0.06


def test_a_tie_goes_to_the_simpler():
    likelihoods = np.tile(np.random.default_rng(0).normal(size=12), (4, 1))
    assert choose(likelihoods) == 0
    assert choose(likelihoods + np.array([0.0, 5.0, 5.0, 5.0])[:, None]) == 1
