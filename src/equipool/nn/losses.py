"""The losses, one pure function for each equation of the paper."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from equipool.exceptions import InputError
from equipool.groups import CovariateAction

__all__ = ["equivariance_loss", "equivariance_loss_cayley"]

Reduction = Literal["sum", "mean"]


def equivariance_loss(
    tau: Tensor,
    c: Any,
    action: CovariateAction,
    *,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Equation (4), L_stage1, over all pairs in linear time.

    .. math::
        \sum_{i<j} \|G(i,j)\,\tau_i - \tau_j\|^2 + \|G(i,j)^{-1}\tau_j - \tau_i\|^2,
        \qquad G(i,j) = \rho(c_j - c_i)

    Rotations keep lengths and those of one torus commute, so with u_i = ρ(−c_i)τ_i both terms equal
    ‖u_i − u_j‖², and the sum over pairs is N Σ_i‖u_i − ū‖²: O(N n) in time and memory where the literal
    form takes N² matrix exponentials. Across processes only ū and the count have to be shared.

    (The paper writes expm((i − j)·1_m) and leaves the sign of its basis of so(n) open; ours is the one for
    which G(i, j) is the transport Γ from c_i to c_j.)

    Parameters
    ----------
    tau
        The vectors τ(ℓ_i), shape (N, n), in the coordinates of ``action``.
    c
        The covariates, (N, K), or (N,) for one.
    action
        The covariates' action ρ.
    weights
        w_i ≥ 0, shape (N,); pair (i, j) then counts w_i w_j times.
    reduction
        ``"sum"`` over the pairs as in the paper, or their (weighted) ``"mean"``, which does not
        change its scale with the batch.

    Examples
    --------
    >>> import torch
    >>> rho = CovariateAction.spread(4)
    >>> age = torch.tensor([-0.5, 0.1, 0.9])
    >>> tau = rho(age) @ torch.ones(3, 4)
    >>> equivariance_loss(tau, age, rho).item() < 1e-9
    True
    """
    _check_rows(tau, weights)
    u = action(c).inverse.apply(tau)
    if weights is None:
        rows = len(tau)
        pairs = 1 if reduction == "sum" else max(rows * (rows - 1) / 2, 1)
        return (u - u.mean(dim=0)).square().sum() * (2 * rows / pairs)
    total = weights.sum()
    mean = weights @ u / total
    spread = weights @ (u - mean).square().sum(dim=1)
    if reduction == "sum":
        return 2 * total * spread
    return 2 * total * spread / ((total**2 - weights.square().sum()) / 2).clamp_min(1e-12)


def equivariance_loss_cayley(
    tau: Tensor,
    c: Any,
    action: CovariateAction,
    *,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    block: int = 256,
) -> Tensor:
    """Equation (4) with the paper's Cayley map in place of expm: G(i, j) = cay(Σ_k (c_j − c_i)_k A_k).

    In its planes the Cayley map of tA is the turn by −2·arctan(tω). That is not a homomorphism: G(i, j) does
    not split into a part of i and a part of j, the pairs do not collapse, and the cost stays O(N² n) in time.
    Memory is bounded by ``block`` rows against all others, also in the backward pass. The two terms of (4)
    are still equal, since G is orthogonal. Arguments as for :func:`equivariance_loss`.
    """
    _check_rows(tau, weights)
    vectors = tau if action.basis is None else tau @ action.basis.to(tau.dtype)
    angles = action.angles(c).to(tau.dtype)  # Ω c, used as a rate: the turn is −2·arctan of differences
    w = tau.new_ones(len(tau)) if weights is None else weights
    total = tau.new_zeros(())
    for start in range(0, len(tau), block):
        rows = slice(start, start + block)
        total = total + checkpoint(
            _cayley_block, vectors[rows], angles[rows], w[rows], vectors, angles, w, use_reentrant=False
        )
    # Each unordered pair was met twice, once for each of the two equal terms; i = j adds nothing.
    if reduction == "sum":
        return total
    return total / ((w.sum() ** 2 - w.square().sum()) / 2).clamp_min(1e-12)


def _cayley_block(a: Tensor, rate_a: Tensor, w_a: Tensor, b: Tensor, rate_b: Tensor, w_b: Tensor) -> Tensor:
    """Sum w_i w_j ‖G(i, j)τ_i − τ_j‖² over rows i of a and all rows j of b, in plane coordinates."""
    planes = rate_a.shape[-1]
    rate = rate_b.unsqueeze(0) - rate_a.unsqueeze(1)  # (rows, N, planes)
    scale = 1 / (1 + rate.square())
    cos, sin = (1 - rate.square()) * scale, -2 * rate * scale
    a1, a2 = (a[:, None, k : 2 * planes : 2] for k in (0, 1))
    b1, b2 = (b[None, :, k : 2 * planes : 2] for k in (0, 1))
    squared = (cos * a1 - sin * a2 - b1).square() + (sin * a1 + cos * a2 - b2).square()
    distances = squared.sum(dim=-1)
    if a.shape[-1] > 2 * planes:
        distances = distances + (a[:, None, -1] - b[None, :, -1]).square()
    return w_a @ distances @ w_b


def _check_rows(tau: Tensor, weights: Tensor | None) -> None:
    """Refuse shapes that would broadcast silently."""
    if tau.dim() != 2:
        raise InputError(f"tau must have shape (N, n). Got {tuple(tau.shape)}.")
    if weights is not None and weights.shape != tau.shape[:1]:
        raise InputError(f"weights must have shape ({len(tau)},). Got {tuple(weights.shape)}.")
