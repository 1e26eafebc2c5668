import pytest
import torch

from equipool.exceptions import InputError
from equipool.groups import CovariateAction
from equipool.nn import (
    correlation_loss,
    equivariance_loss,
    grouped_mmd,
    match_loss,
    mmd,
    prediction_loss,
)
from oracles import (
    all_ones_basis,
    all_ones_generator,
    equation_4,
    equation_4_cayley,
    equation_4_cayley_in_planes,
)

ACTIONS = {
    "all-ones": lambda n, k: CovariateAction.all_ones(n, k),
    "spread": lambda n, k: CovariateAction.spread(n, k),
    "given": lambda n, k: CovariateAction(torch.randn(n // 2, k, dtype=torch.float64), n=n),
}


def sample(rows, n, covariates):
    tau = torch.randn(rows, n, dtype=torch.float64)
    return tau / tau.norm(dim=1, keepdim=True), 2 * torch.rand(rows, covariates, dtype=torch.float64) - 1


@pytest.mark.parametrize(("n", "covariates"), [(2, 1), (5, 1), (12, 1), (12, 2), (13, 3)])
@pytest.mark.parametrize("kind", sorted(ACTIONS))
def test_equation_4_equals_the_literal_double_loop(kind, n, covariates):
    action = ACTIONS[kind](n, covariates)
    tau, c = sample(11, n, covariates)
    fast, slow = tau.clone().requires_grad_(), tau.clone().requires_grad_()
    value = equivariance_loss(fast, c, action, reduction="sum")
    expected = equation_4(slow, c, action.generators())
    value.backward()
    expected.backward()
    assert abs((value - expected) / expected) <= 1e-12
    assert torch.linalg.norm(fast.grad - slow.grad) <= 1e-12 * torch.linalg.norm(slow.grad)


@pytest.mark.parametrize("kind", sorted(ACTIONS))
def test_the_cayley_map_turns_planes_by_twice_the_arctangent(kind):
    action = ACTIONS[kind](13, 3)
    tau, c = sample(11, 13, 3)
    expected = equation_4_cayley(tau, c, action.generators())
    torch.testing.assert_close(equation_4_cayley_in_planes(tau, c, action), expected, rtol=1e-12, atol=0)


def test_equation_4_with_the_papers_own_generator_and_sign():
    """G(i, j) = expm((i − j)·1_m), with the paper's 1_m read as ones above the diagonal."""
    tau, c = sample(9, 6, 1)
    above = -all_ones_generator(6)
    expected = equation_4(tau, -c, above.unsqueeze(0))
    value = equivariance_loss(tau @ all_ones_basis(6), c, CovariateAction.all_ones(6), reduction="sum")
    assert abs((value - expected) / expected) <= 1e-12


def test_the_mean_is_the_sum_over_the_number_of_pairs():
    action = CovariateAction.spread(6)
    tau, c = sample(20, 6, 1)
    total = equivariance_loss(tau, c, action, reduction="sum")
    torch.testing.assert_close(equivariance_loss(tau, c, action), total / (20 * 19 / 2))


def test_the_loss_is_zero_exactly_where_tau_turns_with_the_covariate():
    action = CovariateAction.all_ones(8)
    _, c = sample(30, 8, 1)
    turning = action(c) @ torch.randn(8, dtype=torch.float64).expand(30, 8)
    assert equivariance_loss(turning, c, action) < 1e-24
    assert equivariance_loss(turning, -c, action) > 0.1


def test_gradients_reach_the_covariates_too():
    action = CovariateAction.spread(4)
    tau, c = sample(6, 4, 1)
    assert torch.autograd.gradcheck(
        lambda tau, c: equivariance_loss(tau, c, action), (tau.requires_grad_(), c.requires_grad_())
    )


def test_a_single_row_has_no_pairs():
    tau, c = sample(1, 4, 1)
    assert equivariance_loss(tau, c, CovariateAction.spread(4)) == 0


def test_shapes_that_would_broadcast_are_refused():
    tau, c = sample(4, 4, 1)
    loss, action = equivariance_loss, CovariateAction.spread(4)
    for wrong in (c.T, c[:1], 0.3):
        with pytest.raises(InputError, match="c must have one row for each of the 4 rows"):
            loss(tau, wrong, action)
    with pytest.raises(InputError, match="reduction must be"):
        loss(tau, c, action, reduction="Sum")
    with pytest.raises(InputError, match=r"shape \(N, n\)"):
        loss(tau[0], c, CovariateAction.spread(4))


def test_mmd_in_training_equals_the_double_loop():
    """Equation (7), squared: kernels exp(−d²/(a·median)), averaged over scales a and pairs of sites."""
    z = torch.randn(15, 4, dtype=torch.float64, requires_grad=True)
    site = torch.arange(15) % 3
    squared = torch.tensor([[((a - b) ** 2).sum().item() for b in z] for a in z], dtype=torch.float64)
    median = squared.median()
    expected = 0.0
    for scale in (0.25, 0.5, 1.0, 2.0):
        kernel = torch.exp(-squared / (scale * median))
        for s, t in ((0, 1), (0, 2), (1, 2)):
            means = [kernel[site == p][:, site == q].mean() for p, q in ((s, s), (t, t), (s, t))]
            expected += (means[0] + means[1] - 2 * means[2]) / (4 * 3)
    value = mmd(z, site)
    torch.testing.assert_close(value.detach(), expected)
    value.backward()
    assert torch.isfinite(z.grad).all()
    assert mmd(z, torch.zeros(15, dtype=torch.int64)) == 0


def test_sub_sampling_compares_within_groups_alone():
    z = torch.randn(40, 3, dtype=torch.float64)
    group, site = torch.arange(40) // 10, torch.arange(40) % 2
    site[:10] = 0  # the first group has one site only and is dropped
    expected = torch.stack([mmd(z[group == g], site[group == g]) for g in (1, 2, 3)]).mean()
    torch.testing.assert_close(grouped_mmd(z, site, group), expected)
    assert grouped_mmd(z, torch.zeros(40, dtype=torch.int64), group) == 0


def test_matches_are_drawn_together():
    z = torch.tensor([[0.0, 0.0], [3.0, 4.0], [7.0, 7.0]])
    assert match_loss(z, torch.tensor([1, 0, -1])) == 25
    assert match_loss(z, torch.tensor([-1, -1, -1])) == 0


def test_prediction_losses():
    output, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    p = torch.softmax(output, dim=1)[:, 0]
    torch.testing.assert_close(prediction_loss(output, y), -p.log().mean())
    torch.testing.assert_close(prediction_loss(output, y, bounded=True), (1 - p).mean())
    torch.testing.assert_close(
        prediction_loss(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 0.0])), torch.tensor(2.5)
    )
    weights = torch.tensor([1.0, 3.0])
    mixed = torch.tensor([0, 1])
    missed = 1 - torch.softmax(output, dim=1)[[0, 1], [0, 1]]
    expected = (missed * weights).sum() / 4
    torch.testing.assert_close(prediction_loss(output, mixed, bounded=True, class_weights=weights), expected)


def test_correlation_loss_finds_lines_and_parabolas():
    c = torch.linspace(-1, 1, 400, dtype=torch.float64).unsqueeze(1)
    assert correlation_loss(c * torch.ones(1, 3, dtype=torch.float64), c) > 0.9
    assert correlation_loss(c.square(), c) > 0.9
    assert correlation_loss(torch.randn(400, 3, dtype=torch.float64), c) < 0.1


def test_mmd_has_a_gradient_for_two_people_and_for_equal_codes():
    for z, site in (
        (torch.randn(2, 4), [0, 1]),
        (torch.tensor([[0.0], [0], [0], [0], [1]]), [0, 0, 1, 1, 1]),
    ):
        z.requires_grad_()
        mmd(z, torch.tensor(site)).backward()
        assert z.grad.abs().max() > 0
    same = torch.zeros(4, 2, requires_grad=True)
    assert mmd(same, torch.tensor([0, 0, 1, 1])) == 0
