import numpy as np
import pytest

from equipool.checks.overlap import nine_tenths, support_overlap


@pytest.mark.parametrize("rows", [1, 2, 7, 100, 1001])
def test_quantiles_are_those_of_numpy(rows):
    rng = np.random.default_rng(rows)
    values = rng.normal(size=(rows, 6))
    values[:, 1] = 3.0
    whole = nine_tenths(values)
    np.testing.assert_allclose(whole, np.quantile(values, (0.05, 0.5, 0.95), axis=0), rtol=1e-12)
    values[rng.random(values.shape) < 0.3] = np.nan
    values[:, 2] = np.nan  # a column of nothing else
    expected = np.nanquantile(np.where(np.isnan(values).all(axis=0), 0, values), (0.05, 0.5, 0.95), axis=0)
    np.testing.assert_allclose(nine_tenths(values), expected, rtol=1e-12)


def test_half_of_the_participants_are_in_the_common_range():
    shares = support_overlap(np.array([20.0, 40, 30, 50, 90, 99]), np.array([0, 0, 1, 1, 2, 2]))
    np.testing.assert_array_equal(shares, [[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]])
