"""The paper's formulas written down literally and slowly: the oracles of the tests and benchmarks."""

import math

import numpy as np
import torch
from torch import Tensor

from equipool.groups import CovariateAction, PlaneRotation


def expm(generator: Tensor) -> Tensor:
    """torch's matrix exponential of skew matrices (..., n, n) at its full degree.

    torch takes too low a degree for matrices of norm just below 0.05 and is off by 1e-11 there in float64.
    A further plane that turns by 2 rad lifts every matrix above that, to an error of 1e-15.
    """
    n = generator.shape[-1]
    lifted = torch.nn.functional.pad(generator, (0, 2, 0, 2))
    lifted[..., n + 1, n], lifted[..., n, n + 1] = 2.0, -2.0
    return torch.linalg.matrix_exp(lifted)[..., :n, :n]


def skew(values: Tensor) -> Tensor:
    """Arrange m = n(n-1)/2 numbers (..., m), row by row below the diagonal, as skew matrices (..., n, n)."""
    n = (1 + math.isqrt(1 + 8 * values.shape[-1])) // 2
    rows, columns = torch.tril_indices(n, n, offset=-1)
    lower = values.new_zeros(*values.shape[:-1], n, n)
    lower[..., rows, columns] = values
    return lower - lower.mT


def cayley(generator: Tensor) -> Tensor:
    """Map skew matrices (..., n, n) to rotations by A ↦ (I − A)(I + A)⁻¹, the paper's cheaper map."""
    identity = torch.eye(generator.shape[-1], dtype=generator.dtype)
    # (I − A) and (I + A)⁻¹ commute, so the inverse may stand on the left and become a solve.
    return torch.linalg.solve(identity + generator, identity - generator)


def all_ones_generator(n: int) -> Tensor:
    """Return the paper's generator 1_m of so(n), m = n(n-1)/2: ones below the diagonal, −1 above."""
    return skew(torch.ones(n * (n - 1) // 2, dtype=torch.float64))


def all_ones_basis(n: int) -> Tensor:
    """Return the orthonormal basis Q (n, n) in which the all-ones generator is a set of plane rotations.

    The generator is the sum of the powers of the shift that brings the last coordinate back with a minus
    sign, so its eigenvectors have a closed form, exp(iπ(2k − 1)j/n).
    """
    k, j = torch.arange(1, (n + 1) // 2 + 1), torch.arange(n)
    # Reduce (2k − 1)j modulo 2n in integers first: the angles stay exact for any n.
    angle = (torch.outer(j, 2 * k - 1) % (2 * n)).to(torch.float64) * (math.pi / n)
    # This order of cos and sin makes every frequency positive (counter-clockwise).
    columns = torch.stack([torch.cos(angle), torch.sin(angle)], dim=-1).reshape(n, -1)[:, :n]
    return columns / torch.linalg.vector_norm(columns, dim=0)


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


def equation_4_cayley_in_planes(tau: Tensor, c: Tensor, action: CovariateAction) -> Tensor:
    """The same in the coordinates of an action: the Cayley map of tA turns a plane by −2·arctan(tω)."""
    rate = action.angles(c)
    turns = -2 * torch.atan(rate - rate.unsqueeze(1))
    # Each unordered pair is met twice, once for each of the two equal terms; i = j adds nothing.
    return (PlaneRotation(turns, action.n).apply(tau.unsqueeze(1)) - tau).square().sum()


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


def added_to_features(x, z, v, site):
    """What v adds to z beyond a cubic in x, feature by feature, every column within sites; NaN left out."""
    result = np.zeros((x.shape[1], v.shape[1]))
    for j in range(x.shape[1]):
        rows = [i for i in range(len(x)) if not np.isnan(x[i, j])]

        def within(values, scaled, rows=rows):
            out = np.zeros(len(rows))
            for a, i in enumerate(rows):
                same = [values[b] for b, k in enumerate(rows) if site[k] == site[i]]
                out[a] = (values[a] - np.mean(same)) / (np.std(same) if scaled else 1.0)
            return out

        one = np.clip(within([x[i, j] for i in rows], True), -4, 4)
        columns = [within(one**k, False) for k in (1, 2, 3)]
        columns += [within([v[i, k] for i in rows], True) for k in range(v.shape[1])]
        outcome = within([z[i, j] for i in rows], True)
        result[j] = np.linalg.lstsq(np.stack(columns, axis=1), outcome, rcond=None)[0][3:]
    return result
