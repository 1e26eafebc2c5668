import numpy as np
import pytest
import torch

from equipool.simulate import simulate_table
from equipool.sites.affine import fit_affine_sites


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_known_shifts_and_scales_are_recovered(overlap):
    agreement = []
    for seed in range(3):
        truth = simulate_table(overlap=overlap, people=200, random_state=seed)
        pool = truth.pool
        x, c, site = (torch.tensor(values) for values in (pool.X, pool.scaled, pool.site))
        clean = fit_affine_sites(x, c, site).remove(x, c, site).numpy()
        a, b = clean - clean.mean(axis=0), truth.clean - truth.clean.mean(axis=0)
        agreement.append((1 - ((a - b) ** 2).mean(axis=0) / b.var(axis=0)).mean())
    assert np.mean(agreement) > 0.9


def test_nothing_is_changed_where_there_is_no_site_effect():
    """Two halves of one site: what is removed is of the size of chance."""
    rng = np.random.default_rng()
    x, c = torch.from_numpy(rng.normal(size=(400, 5))), torch.from_numpy(rng.uniform(-1, 1, (400, 1)))
    site = torch.arange(400) % 2
    changed = fit_affine_sites(x, c, site).remove(x, c, site)
    assert (changed - x).square().mean().sqrt() < 0.25


def test_a_site_of_one_person_keeps_the_pooled_scale():
    x, c = torch.randn(51, 3, dtype=torch.float64), torch.rand(51, 1, dtype=torch.float64)
    site = torch.tensor([0] * 25 + [1] * 25 + [2])
    model = fit_affine_sites(x, c, site)
    assert (model.scale[2] > 0.8).all()
    assert torch.isfinite(model.remove(x, c, site)).all()


def test_constant_columns_stay_as_they_are():
    x, c = torch.full((10, 1), 3.0, dtype=torch.float64), torch.rand(10, 1, dtype=torch.float64)
    site = torch.arange(10) % 2
    torch.testing.assert_close(fit_affine_sites(x, c, site).remove(x, c, site), x)
