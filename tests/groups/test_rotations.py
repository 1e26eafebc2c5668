import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipool.exceptions import InputError
from equipool.groups import PlaneRotation, all_ones_frequencies
from oracles import all_ones_basis, all_ones_generator, assert_rotation, cayley, expm, skew

sizes = st.integers(2, 24)
seeds = st.integers(0, 2**31)


def random_skew(n: int, seed: int, batch: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return skew(torch.randn(batch, n * (n - 1) // 2, generator=generator, dtype=torch.float64))


@given(sizes, seeds)
def test_exp_and_cayley_give_rotations(n, seed):
    for rotation in (expm, cayley):
        assert_rotation(rotation(random_skew(n, seed)), atol=1e-10)


@given(sizes, seeds)
def test_exp_and_cayley_of_the_negative_are_the_inverse(n, seed):
    A = random_skew(n, seed)
    for rotation in (expm, cayley):
        product = rotation(A) @ rotation(-A)
        torch.testing.assert_close(
            product, torch.eye(n, dtype=A.dtype).expand_as(product), atol=1e-10, rtol=0
        )


def test_cayley_is_the_papers_formula():
    A = random_skew(7, seed=1)
    identity = torch.eye(7, dtype=A.dtype)
    torch.testing.assert_close(cayley(A), (identity - A) @ torch.linalg.inv(identity + A))


def test_cayley_is_not_a_homomorphism_but_exp_is():
    A = all_ones_generator(4)
    torch.testing.assert_close(expm(0.3 * A) @ expm(0.4 * A), expm(0.7 * A))
    assert (cayley(0.3 * A) @ cayley(0.4 * A) - cayley(0.7 * A)).abs().max() > 0.01


def test_cayley_is_differentiable():
    values = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: cayley(skew(v)), values)


def test_membership_after_optimiser_steps():
    """A rotation that is parametrised by its generator stays one while it is trained."""
    values = torch.randn(15, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([values], lr=0.1)
    for _ in range(50):
        optimiser.zero_grad()
        cayley(skew(values))[0].sum().backward()
        optimiser.step()
    assert_rotation(cayley(skew(values.detach())), atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 30, 31, 64, 257, 512])
def test_all_ones_frequencies_are_the_cotangents(n):
    """The eigenvalues of the all-ones element of so(n) are ±i cot((2k−1)π/2n)."""
    eigenvalues = torch.linalg.eigvals(all_ones_generator(n)).imag
    cotangents = [1 / math.tan((2 * k - 1) * math.pi / (2 * n)) for k in range(1, n // 2 + 1)]
    expected = torch.tensor(cotangents, dtype=torch.float64)
    positive = eigenvalues[eigenvalues > 1e-9].sort(descending=True).values
    torch.testing.assert_close(positive, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(all_ones_frequencies(n), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 30, 31, 511, 512])
def test_all_ones_basis_turns_the_generator_into_planes(n):
    Q, omega = all_ones_basis(n), all_ones_frequencies(n)
    planes = Q.mT @ all_ones_generator(n) @ Q
    expected = torch.zeros(n, n, dtype=torch.float64)
    for p, frequency in enumerate(omega):
        expected[2 * p + 1, 2 * p], expected[2 * p, 2 * p + 1] = frequency, -frequency
    torch.testing.assert_close(Q.mT @ Q, torch.eye(n, dtype=torch.float64), atol=1e-13, rtol=0)
    torch.testing.assert_close(planes, expected, atol=1e-11, rtol=0)


@given(sizes, seeds)
def test_plane_rotations_form_a_commutative_group(n, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (
        PlaneRotation(torch.randn(4, n // 2, generator=generator, dtype=torch.float64), n) for _ in range(3)
    )
    x = torch.randn(4, n, generator=generator, dtype=torch.float64)
    close = {"atol": 1e-12, "rtol": 0}
    torch.testing.assert_close((a @ b) @ x, a @ (b @ x), **close)
    torch.testing.assert_close((a @ b) @ x, (b @ a) @ x, **close)
    torch.testing.assert_close(((a @ b) @ c) @ x, (a @ (b @ c)) @ x, **close)
    torch.testing.assert_close(a.inverse @ (a @ x), x, **close)
    assert_rotation(a.matrix(), atol=1e-12)
    torch.testing.assert_close((a.matrix() @ x.unsqueeze(-1)).squeeze(-1), a @ x, **close)


@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_agree_with_float64(n, dtype):
    """Vectors in half precision are widened and rounded once; it must be the same rotation."""
    x = torch.randn(6, n, dtype=torch.float64)
    angle = torch.randn(6, n // 2, dtype=torch.float64)
    turn = PlaneRotation(angle, n)
    narrow = turn.apply(x.to(dtype))
    assert narrow.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(narrow.double(), turn.apply(x), atol=tolerance, rtol=tolerance)


def test_wrong_lengths_are_refused():
    turn = PlaneRotation(torch.zeros(2), n=4)
    with pytest.raises(InputError, match=r"length 4\. Got length 3"):
        turn @ torch.zeros(3)
    with pytest.raises(InputError, match="cannot be composed"):
        turn @ PlaneRotation(torch.zeros(3), n=6)
