"""The trend's basis: natural cubic splines of the covariates."""

import numpy as np
import pytest
from scipy.interpolate import CubicSpline

from equipool.groups.trend import fit_basis


def _natural_spline(knots, heights, x):
    """Return scipy's natural cubic spline, straight beyond the outer knots."""
    spline = CubicSpline(knots, heights, bc_type="natural")
    inside = spline(np.clip(x, knots[0], knots[-1]))
    below, above = spline(knots[[0, -1]], 1)
    return inside + below * np.minimum(x - knots[0], 0) + above * np.maximum(x - knots[-1], 0)


@pytest.mark.parametrize("seed", range(3))
def test_the_basis_spans_the_natural_cubic_splines_on_its_knots(seed):
    rng = np.random.default_rng(seed)
    c, weight = rng.uniform(20, 80, (300, 1)), rng.uniform(0.5, 1.5, 300)
    basis = fit_basis(c, weight)
    assert basis.width == 4
    assert basis.curved.tolist() == [False, True, True, True]
    x = np.linspace(0, 100, 400)
    columns = np.column_stack([np.ones(400), basis(x[:, None])])
    for heights in rng.normal(size=(5, 5)):
        target = _natural_spline(basis.knots[0], heights, x)
        solved = np.linalg.lstsq(columns, target, rcond=None)[0]
        np.testing.assert_allclose(columns @ solved, target, atol=1e-8)


def test_knots_are_quantiles_over_participants():
    rng = np.random.default_rng(0)
    c = rng.normal(size=(2000, 1))
    quantiles = [0.05, 0.275, 0.5, 0.725, 0.95]
    np.testing.assert_allclose(fit_basis(c, np.ones(2000)).knots[0], np.quantile(c, quantiles), atol=0.02)
    # A participant of ten visits counts once.
    often = np.concatenate([c, *9 * [c[:200] + 5.0]])
    weight = np.concatenate([np.full(200, 0.1), np.ones(1800), np.full(1800, 0.1)])
    mixed = fit_basis(often, weight).knots[0]
    assert mixed[-1] > np.quantile(c, 0.95) + 0.5
    assert mixed[2] < np.quantile(often, 0.5) - 0.5


def test_columns_are_centred_scaled_and_curved_ones_orthogonal_to_straight_ones():
    rng = np.random.default_rng(0)
    c, weight = rng.normal(size=(200, 2)) * [10, 0.1] + [50, 3], rng.uniform(0.5, 1.5, 200)
    columns = fit_basis(c, weight)(c)
    assert columns.shape == (200, 8)
    np.testing.assert_allclose(weight @ columns, 0.0, atol=1e-9)
    np.testing.assert_allclose(weight @ columns**2 / weight.sum(), 1.0)
    for covariate, curved in ((0, [2, 3, 4]), (1, [5, 6, 7])):
        np.testing.assert_allclose((weight * columns[:, covariate]) @ columns[:, curved], 0.0, atol=1e-9)


def test_the_trend_is_straight_beyond_the_participants():
    rng = np.random.default_rng(0)
    basis = fit_basis(rng.uniform(20, 60, (300, 1)), np.ones(300))
    for far in ([70.0, 80.0, 90.0], [-10.0, 0.0, 10.0]):
        a, b, c = basis(np.array(far)[:, None])
        np.testing.assert_allclose(b - a, c - b, atol=1e-9)


@pytest.mark.parametrize("values", [[0.0, 1.0], range(9), [1.0]])
def test_few_values_get_no_spline(values):
    c = np.resize(np.array(values, dtype=float), 90)[:, None]
    basis = fit_basis(c, np.ones(90))
    assert basis.width == 1
    assert np.isfinite(basis(c)).all()
    assert fit_basis(np.empty((5, 0)), np.ones(5))(np.empty((3, 0))).shape == (3, 0)
