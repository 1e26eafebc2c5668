"""Rotations of SO(n): the exponential and Cayley maps, and rotations of orthogonal planes.

Conventions, fixed here for the whole package:

- ``skew`` fills the lower triangle with the given numbers and the upper one with their negatives, so that
  ``skew([1])`` for n = 2 is the generator of the counter-clockwise turn;
- in *plane coordinates* the coordinates 2p and 2p + 1 span plane p; for odd n the last coordinate is fixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equipool.exceptions import InputError


def skew(values: Tensor) -> Tensor:
    """Arrange m = n(n-1)/2 numbers (..., m), row by row below the diagonal, as skew matrices (..., n, n).

    Examples
    --------
    >>> skew(torch.tensor([1.0]))
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """
    m = values.shape[-1]
    n = (1 + math.isqrt(1 + 8 * m)) // 2
    if n * (n - 1) // 2 != m:
        raise InputError(
            f"skew() needs n(n-1)/2 numbers (1, 3, 6, 10, ...) in its last axis. Got {m}; "
            f"the nearest are {n * (n - 1) // 2} (n={n}) and {n * (n + 1) // 2} (n={n + 1})."
        )
    rows, columns = torch.tril_indices(n, n, offset=-1, device=values.device)
    lower = values.new_zeros(*values.shape[:-1], n, n)
    lower[..., rows, columns] = values
    return lower - lower.mT


def exp(generator: Tensor) -> Tensor:
    """Map skew matrices (..., n, n) to rotations by the matrix exponential; batched and differentiable.

    torch takes too low a degree for matrices of norm just below 0.05 and is off by 1e-11 there in float64.
    A further plane that turns by 2 rad lifts every matrix above that, to an error of 1e-15.
    """
    n = generator.shape[-1]
    lifted = nn.functional.pad(generator, (0, 2, 0, 2))
    lifted[..., n + 1, n], lifted[..., n, n + 1] = 2.0, -2.0
    return torch.linalg.matrix_exp(lifted)[..., :n, :n]


def cayley(generator: Tensor) -> Tensor:
    """Map skew matrices (..., n, n) to rotations by A ↦ (I − A)(I + A)⁻¹, the paper's cheaper map.

    For small A this is close to exp(−2A): it turns the other way and twice as far. Along one generator,
    ``cayley(s A) @ cayley(t A)`` is not ``cayley((s + t) A)``: the map is not a homomorphism, so sums over
    pairs do not collapse as they do for :func:`exp`.
    """
    identity = torch.eye(generator.shape[-1], dtype=generator.dtype, device=generator.device)
    # (I − A) and (I + A)⁻¹ commute, so the inverse may stand on the left and become a solve.
    return torch.linalg.solve(identity + generator, identity - generator)


def is_rotation(matrix: Tensor, *, atol: float | None = None) -> tuple[bool, str]:
    """Return whether matrices (..., n, n) are in SO(n): (True, "") or (False, the reason)."""
    atol = 1e3 * torch.finfo(matrix.dtype).eps if atol is None else atol
    gap = (matrix.mT @ matrix - torch.eye(matrix.shape[-1]).to(matrix)).abs().max().item()
    if not gap <= atol:
        return False, f"RᵀR differs from the identity by {gap:.2e} (allowed: {atol:.0e})"
    if (torch.linalg.det(matrix) < 0).any():
        return False, "the determinant is −1: a reflection, not a rotation"
    return True, ""


def all_ones_generator(n: int) -> Tensor:
    """Return the paper's generator 1_m of so(n), m = n(n-1)/2: ones below the diagonal, −1 above."""
    return skew(torch.ones(n * (n - 1) // 2, dtype=torch.float64))


def all_ones_frequencies(n: int) -> Tensor:
    """Return how fast each plane of the all-ones generator turns: cot((2k − 1)π / 2n), k = 1 … ⌊n/2⌋.

    Examples
    --------
    >>> all_ones_frequencies(4)
    tensor([2.4142, 0.4142], dtype=torch.float64)
    """
    k = torch.arange(1, n // 2 + 1, dtype=torch.float64)
    return 1 / torch.tan((2 * k - 1) * (math.pi / (2 * n)))


def all_ones_basis(n: int) -> Tensor:
    """Return the orthonormal basis Q (n, n) in which the all-ones generator is a set of plane rotations.

    The generator is the sum of the powers of the shift that brings the last coordinate back with a minus
    sign, so its eigenvectors have a closed form, exp(iπ(2k − 1)j/n). Columns 2p and 2p + 1 span plane p; for
    odd n the last column is the fixed axis.
    """
    planes = n // 2
    k, j = torch.arange(1, planes + 1), torch.arange(n)
    # Reduce (2k − 1)j modulo 2n in integers first: the angles stay exact for any n.
    angle = (torch.outer(j, 2 * k - 1) % (2 * n)).to(torch.float64) * (math.pi / n)
    # This order of cos and sin makes every frequency positive (counter-clockwise).
    pairs = torch.stack([torch.cos(angle), torch.sin(angle)], dim=-1) * math.sqrt(2 / n)
    basis = torch.zeros(n, n, dtype=torch.float64)
    basis[:, : 2 * planes] = pairs.reshape(n, 2 * planes)
    if n % 2:
        basis[:, -1] = (1 - 2 * (j % 2)).to(torch.float64) / math.sqrt(n)
    return basis


@dataclass(frozen=True, eq=False)
class PlaneRotation:
    """A batch of rotations that share their planes: elements of one maximal torus of SO(n).

    They multiply vectors and one another with ``@``; the group is commutative, so composing adds angles,
    which are in radians, (..., ⌊n/2⌋). n and ``basis`` are as for :class:`~equipool.groups.CovariateAction`.

    Examples
    --------
    >>> quarter = PlaneRotation(torch.tensor([torch.pi / 2]), n=2)
    >>> (quarter @ torch.tensor([1.0, 0.0])).round()
    tensor([-0., 1.])
    >>> (quarter @ quarter).angles
    tensor([3.1416])
    """

    angles: Tensor
    n: int
    basis: Tensor | None = None

    @property
    def inverse(self) -> PlaneRotation:
        """The same planes turned back."""
        return replace(self, angles=-self.angles)

    def __matmul__(self, other: Tensor | PlaneRotation) -> Tensor | PlaneRotation:
        """Compose with another rotation of the same torus, or turn the vectors (..., n)."""
        if isinstance(other, Tensor):
            return self.apply(other)
        if other.n != self.n:
            raise InputError(f"Rotations of R^{self.n} and R^{other.n} cannot be composed.")
        bases = [basis for basis in (self.basis, other.basis) if basis is not None]
        if len(bases) == 1 or (bases and not torch.equal(*bases)):
            raise InputError("Rotations of different planes do not form one torus; multiply their matrices.")
        return replace(self, angles=self.angles + other.angles)

    def apply(self, x: Tensor) -> Tensor:
        """Turn the vectors x (..., n); the result has the dtype of x."""
        if x.shape[-1] != self.n:
            raise InputError(f"This rotation acts on vectors of length {self.n}. Got length {x.shape[-1]}.")
        basis, planes = None if self.basis is None else self.basis.to(x.dtype), self.n // 2
        x = x if basis is None else x @ basis
        wide = torch.promote_types(x.dtype, torch.float32)
        pairs = x[..., : 2 * planes].to(wide).unflatten(-1, (planes, 2)).contiguous()
        # One complex product makes a single pass over memory: 1.7 times as fast as the four real ones.
        turn = torch.polar(torch.ones_like(self.angles), self.angles).to(wide.to_complex())
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2).to(x.dtype)
        if self.n % 2:
            turned = torch.cat([turned, x[..., -1:].expand(*turned.shape[:-1], 1)], dim=-1)
        return turned if basis is None else turned @ basis.mT

    def matrix(self) -> Tensor:
        """Return the rotation matrices (..., n, n)."""
        columns = torch.eye(self.n, dtype=self.angles.dtype, device=self.angles.device)
        return replace(self, angles=self.angles.unsqueeze(-2)).apply(columns).mT
