import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipool.exceptions import InputError
from equipool.groups import CovariateAction
from oracles import all_ones_basis, all_ones_generator, assert_rotation

KINDS = {
    "spread": CovariateAction.spread,
    "all-ones": CovariateAction.all_ones,
    "given": lambda n, k: CovariateAction(torch.randn(n // 2, k, dtype=torch.float64), n=n),
}
kinds = st.sampled_from(sorted(KINDS))


@given(kinds, st.integers(1, 5), st.integers(0, 13), st.integers(0, 2**31))
def test_group_laws(kind, covariates, extra, seed):
    """ρ(a)ρ(b) = ρ(a + b), ρ(0) = 1, ρ(−a) is the inverse, Γ composes and returns."""
    torch.manual_seed(seed)
    n = 2 * covariates + extra
    rho = KINDS[kind](n, covariates)
    a, b = torch.randn(2, 3, covariates, dtype=torch.float64)
    x = torch.randn(3, n, dtype=torch.float64)
    close = {"atol": 1e-11, "rtol": 0}
    torch.testing.assert_close(rho(a) @ (rho(b) @ x), rho(a + b) @ x, **close)
    torch.testing.assert_close((rho(a) @ rho(b)) @ x, rho(a + b) @ x, **close)
    torch.testing.assert_close(rho(torch.zeros_like(a)) @ x, x, **close)
    torch.testing.assert_close(rho(a).inverse @ x, rho(-a) @ x, **close)
    torch.testing.assert_close(rho.transport(rho.transport(x, a, b), b, a), x, **close)
    torch.testing.assert_close(rho.transport(rho(a) @ x, a, b), rho(b) @ x, **close)
    torch.testing.assert_close((rho(a) @ x).norm(dim=-1), x.norm(dim=-1), **close)
    assert_rotation(rho(a).matrix(), atol=1e-10)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("n", "covariates"), [(2, 1), (3, 1), (7, 2), (12, 3), (11, 5)])
def test_the_action_is_the_matrix_exponential_of_its_generators(kind, n, covariates):
    rho = KINDS[kind](n, covariates)
    A = rho.generators()
    c = torch.randn(4, covariates, dtype=torch.float64)
    expected = torch.matrix_exp(torch.einsum("bk,kij->bij", c, A))
    torch.testing.assert_close(rho(c).matrix(), expected, atol=1e-10, rtol=0)
    for first in A:
        for second in A:
            torch.testing.assert_close(first @ second, second @ first, atol=1e-10, rtol=0)


@pytest.mark.parametrize("n", [2, 3, 30, 31])
def test_the_all_ones_action_is_the_papers_in_the_basis_of_its_planes(n):
    rho, Q = CovariateAction.all_ones(n), all_ones_basis(n)
    c = torch.tensor([0.37], dtype=torch.float64)
    expected = torch.matrix_exp(c * all_ones_generator(n))
    torch.testing.assert_close(Q @ rho(c).matrix()[0] @ Q.mT, expected, atol=1e-10, rtol=0)


def test_spread_frequencies_are_whole_multiples_evenly_spread():
    omega = CovariateAction.spread(16, base=0.5, harmonics=4).frequencies[:, 0]
    multiples = omega / 0.5
    torch.testing.assert_close(multiples, multiples.round())
    assert multiples.min() == 1
    assert multiples.max() == 4
    assert multiples.unique().numel() == 4


def test_gradients_reach_vectors_and_covariates():
    rho = CovariateAction.spread(5)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    c = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, c: rho(c) @ x, (x, c))


def test_one_covariate_may_come_without_its_axis():
    rho = CovariateAction.spread(4)
    c = torch.tensor([0.1, 0.2, 0.3])
    torch.testing.assert_close(rho(c).angles, rho(c.unsqueeze(-1)).angles)
    assert rho(0.5).angles.shape == (2,)
    assert rho([1, 2]).angles.shape == (2, 2)


def test_angles_are_exact_for_narrow_covariates():
    """A covariate in half precision is widened first: it is no reason to round Ω c."""
    rho = CovariateAction.all_ones(512)
    c = torch.tensor([0.5], dtype=torch.float16)
    torch.testing.assert_close(rho(c).angles, rho(c.double()).angles, atol=0, rtol=0)


def test_the_state_moves_with_the_module():
    rho = CovariateAction.all_ones(6).float()
    assert rho.frequencies.dtype == torch.float32
    copy = CovariateAction.all_ones(6).float()
    copy.load_state_dict(rho.state_dict())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CovariateAction.spread(4, 5), "5 covariate.* need n >= 10. Got n=4"),
        (lambda: CovariateAction.all_ones(1), "need n >= 2. Got n=1"),
        (lambda: CovariateAction(torch.ones(3), n=8), r"must have shape .* = \(4, K\). Got \(3, 1\)"),
        (lambda: CovariateAction([float("nan")]), "finite"),
        (lambda: CovariateAction.spread(8, 2)(torch.zeros(3)), r"2 covariate.*Got shape \(3,\)"),
    ],
)
def test_impossible_actions_are_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()
