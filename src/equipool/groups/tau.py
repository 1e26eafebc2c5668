"""τ, which predicts the covariates from a latent, and Φ of Lemma 5.

Φ(ℓ) = τ(ℓ)·b(τ(ℓ)⁻¹ℓ) is equivariant for any b, not under the whole of SO(n) as the paper states, but under
the covariates' group, with τ(ℓ) = ρ(ĉ(ℓ)) and a prediction ĉ that obeys ĉ(ρ(t)ℓ) = ĉ(ℓ) + t: docs/groups.md.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipool.exceptions import InputError
from equipool.groups.action import CovariateAction, PlaneRotation


class FrameTau(nn.Module):
    """τ from the phases of designated planes, one for each covariate: exact by construction.

    If the designated planes D of a latent have the phases φ, then ĉ = Ω_D⁻¹ φ. This needs no training and
    holds in every dtype to rounding, as long as no phase crosses ±π, or for every rotation where
    :attr:`exact_everywhere` is true.

    ``action`` is ρ on the latents, and ``planes`` are the K designated ones; default: those that predict the
    covariates best while the training range [−1, 1] stays within half a turn (or, failing that, within one
    turn). ``orbit`` is the action that makes a vector of τ(ℓ), see :meth:`vector`; default: ``action``. Where
    most planes of the latents stand still, take one in which all turn.

    Examples
    --------
    >>> rho = CovariateAction.spread(6)
    >>> tau = FrameTau(rho)
    >>> latent = tau.to_sphere(torch.eye(6, dtype=torch.float64)[:1])
    >>> moved = rho(0.5) @ latent
    >>> (tau.covariate(moved) - tau.covariate(latent)).item()
    0.5
    """

    inverse_frequencies: Tensor
    offset: Tensor
    columns: Tensor

    def __init__(
        self,
        action: CovariateAction,
        planes: Sequence[int] | None = None,
        *,
        orbit: CovariateAction | None = None,
    ) -> None:
        super().__init__()
        self.action, self.orbit = action, action if orbit is None else orbit
        self.planes = tuple(_choose_planes(action.frequencies) if planes is None else planes)
        omega = action.frequencies[list(self.planes)]
        if omega.shape[0] != action.n_covariates or torch.linalg.matrix_rank(omega) < action.n_covariates:
            raise InputError(
                f"planes must name {action.n_covariates} plane(s) whose frequencies distinguish the "
                f"covariates. Got {list(self.planes)} with frequencies {omega.tolist()}; leave planes=None."
            )
        self.register_buffer("inverse_frequencies", torch.linalg.inv(omega).contiguous())
        self.register_buffer("offset", torch.zeros(len(self.planes), dtype=omega.dtype))
        columns = [2 * plane + k for plane in self.planes for k in (0, 1)]  # coordinates of designated planes
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    @property
    def exact_everywhere(self) -> bool:
        """Whether all planes turn by whole multiples of the designated ones.

        Then a phase that wraps around leaves ρ(ĉ) unchanged; otherwise equivariance holds until one wraps.
        """
        ratio = self.action.frequencies @ self.inverse_frequencies
        return bool((ratio - ratio.round()).abs().max() < 1e-9)

    def phase_vector(self, latent: Tensor) -> Tensor:
        """Return the vectors (..., n) whose phases give ĉ: here the latents themselves."""
        return latent

    def vector(self, latent: Tensor) -> Tensor:
        """Return τ(ℓ) as a point of the sphere, the vector that equation (4) compares.

        Here ρ(ĉ(ℓ)) applied to one base point, which has the same length in every plane.
        """
        orbit, n_planes = self.orbit, len(self.orbit.frequencies)
        base = latent.new_zeros(orbit.n)
        base[0 : 2 * n_planes : 2] = n_planes**-0.5
        return orbit(self.covariate(latent)).apply(base.expand(*latent.shape[:-1], orbit.n))

    def covariate(self, latent: Tensor) -> Tensor:
        """Return ĉ(ℓ), the covariates predicted from the latents, shape (..., K)."""
        first, second = self._designated(self.phase_vector(latent)).unbind(-1)
        phase = torch.atan2(second, first) - self.offset
        # Back to (−π, π], so that the offset adds no wrap.
        phase = torch.remainder(phase + math.pi, 2 * math.pi) - math.pi
        return phase @ self.inverse_frequencies.to(phase.dtype).mT

    def at_reference(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents at the reference covariates, τ(ℓ)⁻¹ℓ, and ĉ(ℓ)."""
        c = self.covariate(latent)
        return self.action(c).inverse.apply(latent), c

    def forward(self, latent: Tensor) -> PlaneRotation:
        """Return τ(ℓ) = ρ(ĉ(ℓ)), one rotation for each latent."""
        return self.action(self.covariate(latent))

    def to_sphere(self, x: Tensor, *, floor: float = 0.25) -> Tensor:
        """Project x (..., n) onto the unit sphere with at least length ``floor`` in each designated plane.

        A plane of length 0 has no phase. Directions within planes stay, so the projection is equivariant.
        """
        share = len(self.planes) * floor**2
        if share >= 1:
            what = f"floor={floor} in {len(self.planes)} plane(s) leaves nothing of the unit norm"
            raise InputError(f"{what}; take floor < {len(self.planes) ** -0.5:.2f}.")
        unit = nn.functional.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny) * math.sqrt(1 - share)
        pairs = unit[..., self.columns].unflatten(-1, (-1, 2))
        radius = torch.linalg.vector_norm(pairs, dim=-1, keepdim=True)
        empty = radius == 0
        direction = torch.where(empty, pairs.new_tensor([1.0, 0.0]), pairs / radius.masked_fill(empty, 1))
        longer = direction * torch.sqrt(floor**2 + radius**2)
        return nn.functional.normalize(unit.index_copy(-1, self.columns, longer.flatten(-2)), dim=-1)

    @torch.no_grad()
    def calibrate(self, latent: Tensor, c: Any) -> None:
        """Set the zero of ĉ, which equation (4) leaves free, so that ĉ is unbiased for the covariates c."""
        turned_back = self.action(c).inverse.apply(self.phase_vector(latent))
        first, second = self._designated(turned_back).mean(dim=0).unbind(-1)
        self.offset.copy_(torch.atan2(second, first))

    def _designated(self, x: Tensor) -> Tensor:
        """Return the designated planes' coordinates of x, (..., K, 2), in the action's dtype if wider."""
        # An error of the phase is multiplied by the ratio of the fastest to the designated frequency.
        x = x.to(torch.promote_types(x.dtype, self.action.frequencies.dtype))
        return x[..., self.columns].unflatten(-1, (-1, 2))


class LearnedTau(FrameTau):
    """The paper's τ: a network ℓ ↦ S^{n−1} trained with equation (4), ĉ from the phases of its output.

    Nothing forces a network to be equivariant; :func:`equipool.groups.testing.equivariance_error` measures
    how far it is. ``network`` is any module from (N, n) to (N, n).
    """

    def __init__(self, action: CovariateAction, network: nn.Module) -> None:
        super().__init__(action)
        self.network = network

    @property
    def exact_everywhere(self) -> bool:
        """Never: a network is equivariant only as far as it was trained to be."""
        return False

    def vector(self, latent: Tensor) -> Tensor:
        """Return the network's point of the sphere: the paper's τ(ℓ)."""
        return self.to_sphere(self.network(latent))

    phase_vector = vector


class Phi(nn.Module):
    """Φ(ℓ) = τ(ℓ)·b(τ(ℓ)⁻¹ℓ): equivariant to the covariates for any b (Lemma 5, where it holds).

    ``tau`` is a :class:`FrameTau` (exact) or :class:`LearnedTau`, and b any map from (N, n) to (N, m),
    trained or not. ``out`` is the action on R^m; default: that of ``tau``, and m = n.

    Examples
    --------
    >>> from equipool.groups.testing import equivariance_error
    >>> rho = CovariateAction.spread(6)
    >>> phi = Phi(FrameTau(rho), b=torch.sin)
    >>> equivariance_error(phi, rho) < 1e-12
    True
    """

    def __init__(
        self, tau: FrameTau, b: Callable[[Tensor], Tensor], *, out: CovariateAction | None = None
    ) -> None:
        super().__init__()
        if out is not None and out.n_covariates != tau.action.n_covariates:
            raise InputError(
                f"out must act by the {tau.action.n_covariates} covariate(s) of tau. "
                f"Got {out.n_covariates}; build it with n_covariates={tau.action.n_covariates}."
            )
        self.tau, self.b, self.out = tau, b, tau.action if out is None else out

    def forward(self, latent: Tensor) -> Tensor:
        """Return Φ(ℓ), shape (N, m)."""
        reference, c = self.tau.at_reference(latent)
        return self.out(c).apply(self.b(reference))


def _choose_planes(omega: Tensor) -> list[int]:
    """Choose K planes whose phases determine the covariates without ambiguity over [−1, 1].

    Plane p sweeps phases ±Σ_k ``|Ω_pk|``: within ±π/2 is safe (half a turn remains for covariates outside
    the training range), within ±π still unambiguous. Planes are chosen by pivoted Gram–Schmidt.
    """
    sweep = omega.abs().sum(dim=1)
    for limit in (math.pi / 2, math.pi):
        rest = torch.where((sweep <= limit * (1 + 1e-9)).unsqueeze(-1), omega, 0)
        chosen: list[int] = []
        while (norms := torch.linalg.vector_norm(rest, dim=1)).max() >= 1e-6 and len(chosen) < omega.shape[1]:
            chosen.append(int(norms.argmax()))
            direction = nn.functional.normalize(rest[chosen[-1]], dim=0)
            rest = rest - torch.outer(rest @ direction, direction)
        if len(chosen) == omega.shape[1]:
            return chosen
    raise InputError(
        "No set of planes determines every covariate without ambiguity: over the range [-1, 1] the phases "
        f"sweep more than one turn (slowest plane: ±{sweep.min():.2f} rad, allowed ±3.14). "
        "Lower the frequencies or scale the covariates down."
    )
