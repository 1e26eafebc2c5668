"""The losses, one pure function for each equation of the paper."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.exceptions import InputError
from equipool.groups import CovariateAction

Reduction = Literal["sum", "mean"]


def equivariance_loss(
    tau: Tensor, c: Any, action: CovariateAction, *, reduction: Reduction = "mean"
) -> Tensor:
    """Equation (4), L_stage1, over all pairs in linear time.

    Σ_{i<j} ‖G(i,j) τ_i − τ_j‖² + ‖G(i,j)⁻¹ τ_j − τ_i‖², where G(i,j) = ρ(c_j − c_i).

    Rotations keep lengths and those of one torus commute, so with u_i = ρ(−c_i)τ_i both terms equal
    ‖u_i − u_j‖², and the sum over pairs is N Σ_i‖u_i − ū‖²: O(N n) in time and memory where the literal
    form takes N² matrix exponentials. (The paper writes expm((i − j)·1_m) and leaves the sign of its basis of
    so(n) open; ours is the one for which G(i, j) is the transport Γ from c_i to c_j.)

    The vectors ``tau``, τ(ℓ_i), (N, n), are in the coordinates of ``action``, ρ; covariates c are (N, K), or
    (N,) for one. The pairs are added up as in the paper (``"sum"``), or averaged, so that N does not matter.

    Examples
    --------
    >>> import torch
    >>> rho = CovariateAction.spread(4)
    >>> age = torch.tensor([-0.5, 0.1, 0.9])
    >>> tau = rho(age) @ torch.ones(3, 4)
    >>> equivariance_loss(tau, age, rho).item() < 1e-9
    True
    """
    rows = len(tau)
    if tau.dim() != 2:
        raise InputError(f"tau must have shape (N, n). Got {tuple(tau.shape)}.")
    if reduction not in ("sum", "mean"):
        raise InputError(f"reduction must be 'sum' or 'mean'. Got {reduction!r}.")
    c = action.covariates(c)
    if c.shape != (rows, action.n_covariates):  # it would broadcast silently
        raise InputError(
            f"c must have one row for each of the {rows} rows of tau, shape "
            f"({rows}, {action.n_covariates}). Got {tuple(c.shape)}."
        )
    # A single row has no pairs and no loss.
    divisor = 1 if reduction == "sum" else max(rows * (rows - 1) / 2, 1)
    u = action(-c).apply(tau)
    return (u - u.mean(dim=0)).square().sum() * (2 * rows / divisor)


def reconstruction_loss(x: Tensor, reconstructed: Tensor) -> Tensor:
    """‖x − x̂‖² of Algorithm 1 and equation (5), averaged over rows."""
    return (x - reconstructed).square().sum(dim=-1).mean()


def prediction_loss(
    output: Tensor, y: Tensor, *, bounded: bool = False, class_weights: Tensor | None = None
) -> Tensor:
    """Return the prediction term of equation (5): cross-entropy for classes, squares for numbers.

    The paper writes ‖Y − h(Φ(ℓ))‖² for both; its classes are trained with cross-entropy. ``bounded`` takes
    1 − p(y) for classes instead, which asks for the right class and not for a calibrated probability: degrees
    of certainty in a code would let a classifier predict the site.
    """
    if y.is_floating_point():
        return (output.squeeze(-1) - y).square().mean()
    of_class = None if class_weights is None else class_weights.to(output.device)
    if not bounded:
        return nn.functional.cross_entropy(output, y, weight=of_class)
    missed = 1 - torch.softmax(output, dim=1).gather(1, y.unsqueeze(1)).squeeze(1)
    weights = torch.ones_like(missed) if of_class is None else of_class[y]
    return weights @ missed / weights.sum()


def correlation_loss(z: Tensor, c: Tensor) -> Tensor:
    """Return the shares of the variance of z that covariates and their squares explain, added up."""
    powers = torch.cat([c, c.square()], dim=1)
    powers = (powers - powers.mean(dim=0)) / powers.std(dim=0, correction=0).clamp_min(1e-6)
    centred = z - z.mean(dim=0)
    covariance = centred.mT @ powers.to(z.dtype) / len(z)
    # Divided by the total variance: numbers that hardly vary must not count as much as those that do.
    return covariance.square().sum() / centred.square().mean(dim=0).sum().clamp_min(1e-12)


def mmd(z: Tensor, site: Tensor, *, scales: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)) -> Tensor:
    """Equation (7), squared: the discrepancy between sites' codes, averaged over pairs of sites.

    ‖μ_s − μ_t‖²_H as a V-statistic with a sum of Gaussian kernels exp(−d²/(a·m)), m the median squared
    distance in the batch (no gradient goes through it) and a the ``scales``. O(N²) in the batch.
    """
    rows = distributed.paired_rows(len(z))
    squared = torch.cdist(z[rows], z).square()
    every = squared.detach() if rows == slice(None) else torch.cdist(z.detach(), z.detach()).square()
    median = every.median()
    if median == 0:
        # Two rows, or many with the same code: the median of the positive distances.
        positive = every[every > 0]
        median = positive.median() if len(positive) else torch.ones_like(median)
    kernel = torch.stack([torch.exp(-squared / (a * median)) for a in scales]).mean(dim=0)
    membership = nn.functional.one_hot(torch.unique(site, return_inverse=True)[1]).to(z.dtype)
    mean = membership / membership.sum(dim=0)
    gram = mean[rows].mT @ kernel @ mean  # inner products of the sites' mean embeddings
    gram = gram if rows == slice(None) else distributed.total(gram)
    count = len(gram)
    if count < 2:
        return z.sum() * 0
    # Σ_{s<t} ‖μ_s − μ_t‖² = S Σ_s ‖μ_s‖² − ‖Σ_s μ_s‖²
    return (count * gram.diagonal().sum() - gram.sum()) / (count * (count - 1) / 2)


def grouped_mmd(z: Tensor, site: Tensor, group: Tensor) -> Tensor:
    """SS, sub-sampling (Zhou et al.): the MMD within each group of like covariates, averaged.

    Groups with rows of a single site are dropped.
    """
    groups = [group == g for g in torch.unique(group)]
    terms = [mmd(z[rows], site[rows]) for rows in groups if len(torch.unique(site[rows])) > 1]
    return torch.stack(terms).mean() if terms else z.sum() * 0


def match_loss(z: Tensor, partner: Tensor) -> Tensor:
    """RM, RandMatch (Motiian et al.): ‖z_i − z_j‖² for random matches across sites; partner −1 means none."""
    matched = partner >= 0
    return (z[matched] - z[partner[matched]]).square().sum() / matched.sum().clamp_min(1)
