"""The paper's formulas written down literally and slowly: the oracles of the tests and benchmarks."""

import torch
from torch import Tensor


def expm(generator: Tensor) -> Tensor:
    """torch.matrix_exp at its full degree.

    On its own it takes too low a degree for norms just below 0.05 and is off by 1e-11; a further block of
    norm 2 makes it take the highest.
    """
    n = len(generator)
    block = torch.tensor([[0.0, -2.0], [2.0, 0.0]], dtype=generator.dtype)
    return torch.matrix_exp(torch.block_diag(generator, block))[:n, :n]


def assert_rotation(matrix: Tensor, *, atol: float) -> None:
    """RᵀR = 1, and no reflection."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    torch.testing.assert_close(matrix.mT @ matrix, identity.expand_as(matrix), atol=atol, rtol=0)
    assert (torch.linalg.det(matrix) > 0).all()


def equation_4(tau: Tensor, c: Tensor, generators: Tensor) -> Tensor:
    """L_stage1 as printed, with one matrix exponential for each pair and direction.

    ``generators`` (K, n, n): the A_k with ρ(c) = exp(Σ c_k A_k). G(i, j) moves τ_i to τ_j.
    """
    total = tau.new_zeros(())
    for i in range(len(tau)):
        for j in range(i + 1, len(tau)):
            generator = torch.einsum("k,kab->ab", c[j] - c[i], generators)
            there, back = expm(generator), expm(-generator)
            total = total + (there @ tau[i] - tau[j]).square().sum() + (back @ tau[j] - tau[i]).square().sum()
    return total


def equation_4_cayley(tau: Tensor, c: Tensor, generators: Tensor) -> Tensor:
    """The same with the Cayley map A ↦ (I − A)(I + A)⁻¹ in place of expm."""
    identity = torch.eye(tau.shape[1], dtype=tau.dtype)
    total = tau.new_zeros(())
    for i in range(len(tau)):
        for j in range(i + 1, len(tau)):
            generator = torch.einsum("k,kab->ab", c[j] - c[i], generators)
            there = (identity - generator) @ torch.linalg.inv(identity + generator)
            back = torch.linalg.inv(there)
            total = total + (there @ tau[i] - tau[j]).square().sum() + (back @ tau[j] - tau[i]).square().sum()
    return total


def delta_eq(tau, covariate) -> float:
    """ΔEq: |c_i − c_j| ‖τ̃_i − τ̃_j‖² over all pairs, averaged; covariates scaled to a range of 1."""
    low, high = min(covariate), max(covariate)
    rows = [[(v - min(row)) / (max(row) - min(row)) for v in row] for row in tau]
    total = pairs = 0.0
    for i in range(len(rows)):
        for j in range(i + 1, len(rows)):
            distance = sum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True))
            total += abs(covariate[i] - covariate[j]) / (high - low) * distance
            pairs += 1
    return total / pairs


def mmd(z, site, unbiased: bool) -> float:
    """Squared MMD of equation (7) of each two sites, averaged; kernel exp(−6 d²/n) on normalised rows."""
    rows = [[(v - min(row)) / (max(row) - min(row)) for v in row] for row in z]
    n = len(rows[0])

    def mean_kernel(first, second, same):
        values = []
        for i, a in enumerate(first):
            for j, b in enumerate(second):
                if not (same and unbiased and i == j):
                    d2 = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
                    values.append(torch.exp(torch.tensor(-6 * d2 / n, dtype=torch.float64)).item())
        return sum(values) / len(values)

    groups = [[row for row, s in zip(rows, site, strict=True) if s == name] for name in sorted(set(site))]
    gaps = []
    for s in range(len(groups)):
        for t in range(s + 1, len(groups)):
            a, b = groups[s], groups[t]
            gaps.append(mean_kernel(a, a, True) + mean_kernel(b, b, True) - 2 * mean_kernel(a, b, False))
    return sum(gaps) / len(gaps)
