import math

import pytest
import torch
from torch import nn

from equipool.exceptions import InputError
from equipool.groups import CovariateAction, FrameTau, LearnedTau, Phi
from equipool.groups.testing import assert_equivariant, equivariance_error, random_latents
from equipool.nn import equivariance_loss

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
KINDS = {
    "spread": CovariateAction.spread,
    "all-ones": CovariateAction.all_ones,
}


def network(n, m=None, dtype=torch.float64):
    m = n if m is None else m
    return nn.Sequential(nn.Linear(n, 32), nn.Tanh(), nn.Linear(32, m)).to(dtype)


def inputs_for(tau, samples=128):
    """Uniform on the sphere where τ is exact everywhere, else where an encoder would place participants."""
    n = tau.action.n
    if tau.exact_everywhere:
        return tau.to_sphere(random_latents(samples, n))
    return random_latents(samples, n, tau=tau)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("covariates", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("n", [2, 3, 5, 10, 11, 30, 64, 129, 512])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_phi_is_equivariant_for_an_untrained_b(kind, n, covariates, dtype):
    if n // 2 < covariates:
        with pytest.raises(InputError, match="Each covariate needs a plane of its own"):
            KINDS[kind](n, covariates)
        return
    rho = KINDS[kind](n, covariates)
    tau = FrameTau(rho)
    phi = Phi(tau, network(n, dtype=dtype))
    assert equivariance_error(phi, rho, inputs=inputs_for(tau), dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("b", [torch.sin, lambda x: torch.sign(x - 0.1), lambda x: x.roll(1, -1).abs()])
def test_phi_is_equivariant_for_any_b_even_a_discontinuous_one(b):
    rho = CovariateAction.spread(12, 2)
    tau = FrameTau(rho)
    assert_equivariant(Phi(tau, b), rho, inputs=inputs_for(tau))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_phi_stays_equivariant_while_b_is_trained(kind, dtype):
    rho = KINDS[kind](16, 2)
    tau = FrameTau(rho)
    phi = Phi(tau, network(16, dtype=dtype))
    x = inputs_for(tau).to(dtype)
    goal = torch.randn_like(x)
    optimiser = torch.optim.Adam(phi.parameters(), lr=1e-2)
    losses = []
    for _ in range(100):
        loss = (phi(x) - goal).square().mean()
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.9 * losses[0]
    assert equivariance_error(phi, rho, inputs=inputs_for(tau), dtype=dtype) <= TOLERANCE[dtype]


def test_phi_may_map_into_another_space():
    rho, out = CovariateAction.spread(10, 2), CovariateAction.all_ones(7, 2)
    tau = FrameTau(rho)
    phi = Phi(tau, network(10, 7), out=out)
    # The all-ones frequencies have no common period, so the phases must not wrap.
    inputs = random_latents(64, 10, tau=tau, span=0.5)
    assert equivariance_error(phi, rho, out=out, inputs=inputs) <= 1e-12
    with pytest.raises(InputError, match="n_covariates=2"):
        Phi(tau, nn.Identity(), out=CovariateAction.spread(6, 1))


def test_equivariance_of_spread_holds_for_every_rotation():
    """Whole multiples: even turns far beyond the training range, through any wrap of the phases."""
    rho = CovariateAction.spread(20, 2)
    tau = FrameTau(rho)
    assert tau.exact_everywhere
    inputs = tau.to_sphere(random_latents(128, 20))
    elements = 50 * torch.randn(128, 2, dtype=torch.float64)
    phi = Phi(tau, network(20))
    assert equivariance_error(phi, rho, inputs=inputs, elements=elements) <= 1e-11


def test_without_a_common_period_equivariance_ends_where_a_phase_wraps():
    rho = CovariateAction.all_ones(20)
    tau = FrameTau(rho)
    phi = Phi(tau, network(20))
    assert not tau.exact_everywhere
    inputs = random_latents(128, 20, tau=tau)
    assert equivariance_error(phi, rho, inputs=inputs) <= 1e-12
    elements = torch.full((128, 1), 4.0, dtype=torch.float64)
    assert equivariance_error(phi, rho, inputs=inputs, elements=elements) > 0.1


@pytest.mark.parametrize("n", [3, 4, 8])
def test_any_b_fails_for_the_whole_of_so_n(n):
    """Why Lemma 5 cannot hold for SO(n), n ≥ 3, by numbers.

    Let τ(ℓ) be any rotation that takes e₁ to ℓ. Then τ(ℓ)⁻¹ℓ = e₁ for every ℓ, so b is a constant
    v = b(e₁) and Φ(ℓ) = τ(ℓ)v. For a rotation g, τ(gℓ) and gτ(ℓ) take e₁ to the same point but differ by a
    rotation around e₁, which moves v unless v lies along e₁: the error is of the order of v's other part.
    """

    def section(latent):
        """A rotation (N, n, n) with first column ℓ: Gram–Schmidt, sign of the last column fixed."""
        start = torch.eye(n, dtype=latent.dtype).repeat(len(latent), 1, 1)
        start[:, :, 0] = latent
        q, r = torch.linalg.qr(start)
        q = q * torch.sign(torch.diagonal(r, dim1=1, dim2=2)).unsqueeze(1)
        q[:, :, -1] *= torch.sign(torch.linalg.det(q)).unsqueeze(-1)
        return q

    def phi(latent, v):
        return section(latent) @ v

    latent = random_latents(200, n)
    rotations = torch.linalg.qr(torch.randn(200, n, n, dtype=torch.float64)).Q
    rotations[:, :, -1] *= torch.sign(torch.linalg.det(rotations)).unsqueeze(-1)
    moved = (rotations @ latent.unsqueeze(-1)).squeeze(-1)

    def error(v):
        expected = (rotations @ phi(latent, v).unsqueeze(-1)).squeeze(-1)
        return ((phi(moved, v) - expected).norm(dim=-1) / v.norm()).mean().item()

    along, across = torch.zeros(2, n, dtype=torch.float64)
    along[0], across[1] = 2.0, 1.0
    assert error(along) < 1e-12
    assert error(across) > 0.5


def test_the_reading_is_the_covariate_that_was_applied():
    rho = CovariateAction.spread(9, 2)
    tau = FrameTau(rho)
    start = tau.to_sphere(torch.zeros(5, 9, dtype=torch.float64))
    torch.testing.assert_close(tau.covariate(start), torch.zeros(5, 2, dtype=torch.float64))
    c = 2 * torch.rand(5, 2, dtype=torch.float64) - 1
    torch.testing.assert_close(tau.covariate(rho(c) @ start), c)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_sphere_keeps_a_floor_and_is_equivariant(kind):
    rho = KINDS[kind](10, 2)
    tau = FrameTau(rho)
    x = torch.randn(200, 10, dtype=torch.float64) * torch.logspace(-6, 6, 200, dtype=torch.float64)[:, None]
    on_sphere = tau.to_sphere(x, floor=0.3)
    torch.testing.assert_close(on_sphere.norm(dim=-1), torch.ones(200, dtype=torch.float64))
    assert tau._designated(on_sphere).norm(dim=-1).min() > 0.3 - 1e-9
    assert_equivariant(lambda x: tau.to_sphere(x, floor=0.3), rho)


def test_the_sphere_is_finite_with_finite_gradients_where_nothing_is_there():
    tau = FrameTau(CovariateAction.spread(6))
    x = torch.zeros(2, 6, dtype=torch.float64)
    x[1, 4] = 1.0  # all length outside the designated plane
    x.requires_grad_()
    tau.to_sphere(x)[:, 0].sum().backward()
    assert torch.isfinite(tau.to_sphere(x)).all()
    assert torch.isfinite(x.grad).all()
    with pytest.raises(InputError, match=r"take floor < 1\.00"):
        tau.to_sphere(x, floor=1.0)


def test_designated_planes_read_the_training_range_without_ambiguity():
    """Own Ω: of a fast, a slow and a mixed plane, choose those that do not wrap over [−1, 1]."""
    omega = torch.tensor([[9.0, 0.0], [1.0, 0.0], [0.0, 7.0], [0.5, 1.0], [0.1, 0.1]])
    tau = FrameTau(CovariateAction(omega))
    assert set(tau.planes) == {1, 3}
    corners = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    start = tau.to_sphere(torch.zeros(4, 10, dtype=torch.float64))
    torch.testing.assert_close(tau.covariate(tau.action(corners) @ start), corners)
    with pytest.raises(InputError, match="Lower the frequencies or scale the covariates down"):
        FrameTau(CovariateAction([5.0, 9.0]))
    with pytest.raises(InputError, match="distinguish the covariates"):
        FrameTau(CovariateAction(omega), planes=[0, 1])


def test_a_learned_tau_improves_with_equation_4_and_its_error_is_measured():
    rho = CovariateAction.spread(8)
    frame = FrameTau(rho)
    latent = random_latents(256, 8, tau=frame)
    age = frame.covariate(latent)
    tau = LearnedTau(rho, network(8))

    def reading_error(tau):
        tau.calibrate(latent, age)
        return (tau.covariate(latent) - age).abs().mean().item()

    before = reading_error(tau)
    optimiser = torch.optim.Adam(tau.parameters(), lr=1e-2)
    for _ in range(300):
        loss = equivariance_loss(tau.vector(latent), age, rho)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    after = reading_error(tau)
    assert after < 0.25 * before
    assert not tau.exact_everywhere
    error = equivariance_error(Phi(tau, network(8)), rho, inputs=latent, span=0.2)
    assert 1e-6 < error < 0.5
    with pytest.raises(AssertionError, match="Not equivariant: the relative error is"):
        assert_equivariant(Phi(tau, network(8)), rho, inputs=latent)


def test_tau_returns_group_elements_that_undo_the_covariate():
    rho = CovariateAction.spread(6)
    tau = FrameTau(rho)
    latent = random_latents(50, 6, tau=tau)
    reference = tau(latent).inverse @ latent
    torch.testing.assert_close(tau.covariate(reference), torch.zeros(50, 1, dtype=torch.float64))
    torch.testing.assert_close(tau.at_reference(latent), (reference, tau.covariate(latent)))


def test_the_error_is_infinite_where_a_map_gives_nan():
    rho = CovariateAction.spread(4)
    assert equivariance_error(lambda x: x * math.nan, rho) == math.inf


def test_a_map_without_structure_is_far_from_equivariant():
    rho = CovariateAction.spread(30)
    assert equivariance_error(network(30), rho) > 0.3
