import numpy as np
import pytest

import equipool as ep
from equipool.checks import Inputs, find_errors
from equipool.checks.overlap import common_support


@pytest.mark.parametrize("seed", range(3))
def test_the_dial_moves_the_overlap_from_none_to_full(seed):
    shares = []
    for overlap in (0.0, 0.5, 1.0):
        pool = ep.simulate_table(overlap=overlap, random_state=seed).pool
        shares.append(common_support(pool.C[:, 0], pool.site))
        inputs = Inputs.from_frame(pool.to_frame(), site="site", covariates="age", target="dx", id="id")
        assert find_errors(inputs) == []
    assert shares[0] == 0
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_the_truth_explains_the_data(seed):
    """Undoing the stated shift and scale gives the clean features back."""
    truth = ep.simulate_table(sites=("Z", "A"), random_state=seed)
    site, X = truth.pool.site, truth.pool.X
    # feature = mean + shift + scale·(clean − mean): two sites give the same mean, feature by feature.
    residual = X - truth.shift[site] - truth.scale[site] * truth.clean
    mean = residual / (1 - truth.scale[site])
    np.testing.assert_allclose(mean, np.broadcast_to(mean[0], mean.shape), rtol=1e-6)


def test_the_same_seed_gives_the_same_table():
    a, b, c = (ep.simulate_table(random_state=seed).pool.X for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert not np.allclose(a, c)
