"""τ, which predicts the covariates from a latent, and Φ of Lemma 5.

The paper states that Φ(ℓ) = τ(ℓ)·b(τ(ℓ)⁻¹ℓ) is equivariant for any b under the whole of SO(n). It is not:
for n ≥ 3 the only such maps into R^n are ℓ ↦ λℓ, because τ gives a coset gH and b may move along H
(``tests/groups/test_tau.py`` shows it by numbers). For the covariates' own group it is true, with
τ(ℓ) = ρ(ĉ(ℓ)) and a prediction ĉ that obeys ĉ(ρ(t)ℓ) = ĉ(ℓ) + t. This module has two such predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipool.exceptions import InputError
from equipool.groups.action import CovariateAction
from equipool.groups.rotations import PlaneRotation

__all__ = ["FrameTau", "LearnedTau", "Phi"]


class FrameTau(nn.Module):
    """τ from the phases of designated planes, one for each covariate: exact by construction.

    Where the designated plane of a covariate points at phase φ, the latent is taken to have been turned
    there from phase 0, so ĉ = Ω_D⁻¹ φ. This needs no training and holds in every dtype to rounding, as long
    as no phase crosses ±π, or for every rotation at all where :attr:`exact_everywhere` is true.

    Parameters
    ----------
    action
        The action ρ on the latents.
    planes
        The designated planes, K of them; default: the planes that tell the covariates best while the
        training range [−1, 1] stays within half a turn (or, failing that, within one turn).
    orbit
        The action that makes a vector of τ(ℓ), see :meth:`vector`; default: ``action``. Where most planes of
        the latents stand still, take one in which all turn.

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

    def __init__(
        self,
        action: CovariateAction,
        planes: Sequence[int] | None = None,
        *,
        orbit: CovariateAction | None = None,
    ) -> None:
        super().__init__()
        self.action = action
        self.orbit = action if orbit is None else orbit
        self.planes = tuple(_choose_planes(action.frequencies) if planes is None else planes)
        omega = action.frequencies[list(self.planes)]
        if omega.shape[0] != action.n_covariates or torch.linalg.matrix_rank(omega) < action.n_covariates:
            raise InputError(
                f"planes must name {action.n_covariates} plane(s) whose frequencies tell the covariates "
                f"apart. Got {list(self.planes)} with frequencies {omega.tolist()}; leave planes=None."
            )
        self.register_buffer("inverse_frequencies", torch.linalg.inv(omega).contiguous())
        self.register_buffer("offset", torch.zeros(len(self.planes), dtype=omega.dtype))

    @property
    def exact_everywhere(self) -> bool:
        """Whether all planes turn by whole multiples of the designated ones.

        Then a phase that wraps around leaves ρ(ĉ) unchanged and equivariance holds for every rotation.
        Otherwise it holds until a phase wraps. For frequencies without a common period no continuous reading
        does better: they bring a latent back arbitrarily close to itself, while ĉ would have to keep growing.
        """
        ratio = self.action.frequencies @ self.inverse_frequencies
        return bool((ratio - ratio.round()).abs().max() < 1e-9)

    def reading(self, latent: Tensor) -> Tensor:
        """Return the vectors (..., n) whose phases are read: here the latents themselves."""
        return latent

    def vector(self, latent: Tensor) -> Tensor:
        """Return τ(ℓ) as a point of the sphere, the vector that equation (4) compares.

        Here the group element ρ(ĉ(ℓ)) applied to one base point, which has the same length in every plane:
        all of τ(ℓ) and nothing else of ℓ.
        """
        orbit = self.orbit
        base = torch.zeros(orbit.n, dtype=latent.dtype, device=latent.device)
        base[0 : 2 * orbit.n_planes : 2] = orbit.n_planes**-0.5
        base = base if orbit.basis is None else orbit.basis.to(base.dtype) @ base
        return orbit(self.covariate(latent)).apply(base.expand(*latent.shape[:-1], orbit.n))

    def covariate(self, latent: Tensor) -> Tensor:
        """Return ĉ(ℓ), the covariates predicted from the latents, shape (..., K)."""
        first, second = self._designated(self.reading(latent)).unbind(-1)
        phase = torch.atan2(second, first)
        # Differences are brought back to (−π, π] so that the offset adds no wrap of its own.
        centred = phase - self.offset
        centred = torch.remainder(centred + math.pi, 2 * math.pi) - math.pi
        return centred @ self.inverse_frequencies.to(centred.dtype).mT

    def at_reference(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents at the reference covariates, τ(ℓ)⁻¹ℓ, and ĉ(ℓ)."""
        c = self.covariate(latent)
        return self.action(c).inverse.apply(latent), c

    def forward(self, latent: Tensor) -> PlaneRotation:
        """Return τ(ℓ) = ρ(ĉ(ℓ)), one rotation for each latent."""
        rotation: PlaneRotation = self.action(self.covariate(latent))
        return rotation

    def to_sphere(self, x: Tensor, *, floor: float = 0.25) -> Tensor:
        """Project x (..., n) onto the unit sphere with at least length ``floor`` in each designated plane.

        A plane without length has no phase to read. The share that is reserved keeps every direction, so the
        projection is itself equivariant.
        """
        share = len(self.planes) * floor**2
        if share >= 1:
            raise InputError(
                f"floor={floor} in {len(self.planes)} plane(s) leaves nothing of the unit norm; "
                f"take floor < {len(self.planes) ** -0.5:.2f}."
            )
        basis = None if self.action.basis is None else self.action.basis.to(x.dtype)
        x = x if basis is None else x @ basis
        columns = self._columns(x.device)
        pairs = x[..., columns].unflatten(-1, (-1, 2))
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        length = length.clamp_min(torch.finfo(x.dtype).tiny)
        unit = x / length * math.sqrt(1 - share)
        unit = unit.index_copy(-1, columns, _lengthen(pairs, length.unsqueeze(-1), share, floor).flatten(-2))
        unit = nn.functional.normalize(unit, dim=-1)
        return unit if basis is None else unit @ basis.mT

    @torch.no_grad()
    def calibrate(self, latent: Tensor, c: Any) -> None:
        """Set the zero of ĉ so that it is unbiased for the covariates c; equation (4) leaves it free."""
        turned_back = self.action(c).inverse.apply(self.reading(latent))
        first, second = self._designated(turned_back).mean(dim=0).unbind(-1)
        self.offset.copy_(torch.atan2(second, first))

    def _columns(self, device: torch.device) -> Tensor:
        """Return the plane coordinates that belong to the designated planes."""
        first = 2 * torch.tensor(self.planes, device=device)
        return torch.stack([first, first + 1], dim=-1).flatten()

    def _designated(self, x: Tensor) -> Tensor:
        """Return the designated planes' coordinates of x, shape (..., K, 2), in the action's dtype if wider.

        An error of the phase is multiplied by the ratio of the fastest to the designated frequency, so these
        few numbers are worth float64.
        """
        columns = self._columns(x.device)
        x = x.to(torch.promote_types(x.dtype, self.action.frequencies.dtype))
        basis = self.action.basis
        chosen = x[..., columns] if basis is None else x @ basis[:, columns].to(x.dtype)
        return chosen.unflatten(-1, (-1, 2))


class LearnedTau(FrameTau):
    """The paper's τ: a network ℓ ↦ S^{n−1} trained with equation (4), its covariates predicted by phase.

    Nothing forces a network to be equivariant; :func:`equipool.groups.testing.equivariance_error` measures
    how far it is.

    Parameters
    ----------
    action, planes
        As for :class:`FrameTau`.
    network
        Any module from (N, n) to (N, n).
    floor
        Least length of the designated planes, see :meth:`FrameTau.to_sphere`.
    """

    def __init__(
        self,
        action: CovariateAction,
        network: nn.Module,
        planes: Sequence[int] | None = None,
        *,
        floor: float = 0.25,
    ) -> None:
        super().__init__(action, planes)
        self.network = network
        self.floor = floor

    @property
    def exact_everywhere(self) -> bool:
        """Never: a network is equivariant only as far as it was trained to be."""
        return False

    def reading(self, latent: Tensor) -> Tensor:
        """Return the network's point of the sphere."""
        return self.to_sphere(self.network(latent), floor=self.floor)

    def vector(self, latent: Tensor) -> Tensor:
        """Return the network's point of the sphere: the paper's τ(ℓ)."""
        return self.reading(latent)


class Phi(nn.Module):
    """Φ(ℓ) = τ(ℓ)·b(τ(ℓ)⁻¹ℓ): equivariant to the covariates for any b (Lemma 5, where it holds).

    Parameters
    ----------
    tau
        A :class:`FrameTau` (exact) or :class:`LearnedTau`.
    b
        Any map from (N, n) to (N, m), trained or not.
    out
        The action on R^m; default: that of ``tau``, and m = n.

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
        self.tau = tau
        self.b = b
        self.out = tau.action if out is None else out

    def forward(self, latent: Tensor) -> Tensor:
        """Return Φ(ℓ), shape (N, m)."""
        reference, c = self.tau.at_reference(latent)
        code: Tensor = self.out(c).apply(self.b(reference))
        return code


def _lengthen(pairs: Tensor, length: Tensor, share: float, floor: float) -> Tensor:
    """Give each plane the squared length floor² + (1 − share)·(its part of the norm), direction kept."""
    radius = torch.linalg.vector_norm(pairs, dim=-1, keepdim=True)
    empty = radius == 0
    ahead = torch.tensor([1.0, 0.0], dtype=pairs.dtype, device=pairs.device)
    direction = torch.where(empty, ahead, pairs / radius.masked_fill(empty, 1))
    return direction * torch.sqrt(floor**2 + (1 - share) * (radius / length) ** 2)


def _choose_planes(omega: Tensor) -> list[int]:
    """Choose K planes that tell the covariates best without ambiguity over [−1, 1].

    Plane p sweeps phases ±Σ_k ``|Ω_pk|``: within ±π/2 is safe (half a turn remains for participants outside
    the training range), within ±π is still unambiguous. Among the allowed planes, take greedily the one whose
    frequencies point furthest away from those taken before: pivoted Gram–Schmidt.
    """
    sweep = omega.abs().sum(dim=1)
    for limit in (math.pi / 2, math.pi):
        rest = torch.where((sweep <= limit * (1 + 1e-9)).unsqueeze(-1), omega, 0)
        chosen: list[int] = []
        for _ in range(omega.shape[1]):
            norms = torch.linalg.vector_norm(rest, dim=1)
            best = int(norms.argmax())
            if norms[best] < 1e-6:
                break
            direction = rest[best] / norms[best]
            rest = rest - torch.outer(rest @ direction, direction)
            chosen.append(best)
        if len(chosen) == omega.shape[1]:
            return chosen
    raise InputError(
        "No set of planes tells every covariate without ambiguity: over the range [-1, 1] the phases "
        f"sweep more than one turn (slowest plane: ±{sweep.min():.2f} rad, allowed ±3.14). "
        "Lower the frequencies or scale the covariates down."
    )
