"""Stage two: a code that keeps the equivariance of stage one and does not know the site."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipool.groups import CovariateAction
from equipool.nn import mlp, mmd, prediction_loss, reconstruction_loss

__all__ = ["Objective", "StageTwo"]


@dataclass(frozen=True)
class Objective:
    """Factors and choices of L_stage2 + MMD."""

    prediction: float = 1.0
    reconstruction: float = 0.1
    mmd: float = 0.1
    bounded: bool = False
    class_weights: Tensor | None = None
    transported: bool = False


class StageTwo(nn.Module):
    """b, Ψ and h of Algorithm 1, with an optional channel of limited power for the code.

    Parameters
    ----------
    out
        The covariates' action on the codes.
    n_latent
        Width of the latents of stage one.
    n_outputs
        Classes, 1 for a number, 0 without a target.
    hidden
        Width of the hidden layers.
    power
        Length to which every code is brought before noise of unit variance is added to each of its numbers;
        ``None``: no channel, the code is released as it is.
    """

    def __init__(
        self,
        out: CovariateAction,
        n_latent: int,
        n_outputs: int,
        *,
        hidden: int = 64,
        power: float | None = 4.0,
    ) -> None:
        super().__init__()
        self.out = out
        self.b = mlp(n_latent, out.n, hidden=hidden)
        self.psi = mlp(out.n, n_latent, hidden=hidden)
        self.predictor = mlp(out.n, n_outputs, hidden=hidden) if n_outputs else None
        self.power = power

    def upright_code(self, upright: Tensor) -> Tensor:
        """Return b(τ(ℓ)⁻¹ℓ), everybody's code at the reference value of the covariates."""
        code = self.b(upright)
        return code if self.power is None else self.power * nn.functional.normalize(code, dim=-1)

    def phi(self, upright: Tensor, c: Tensor) -> Tensor:
        """Return Φ(ℓ) = τ(ℓ)·b(τ(ℓ)⁻¹ℓ); a length that is fixed for b is fixed for Φ."""
        return self.out(c).apply(self.upright_code(upright))

    def through_channel(self, code: Tensor) -> Tensor:
        """Add the channel's noise, drawn anew at each call: for training."""
        if self.power is None:
            return code
        # Drawn on the CPU, from the generator that was seeded: the same in every process.
        return code + torch.randn(code.shape, dtype=code.dtype).to(code.device)

    def losses(
        self, latent: Tensor, upright: Tensor, c: Tensor, y: Tensor | None, site: Tensor, how: Objective
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the terms of L_stage2 + MMD, scaled, and the code as an adversary would see it."""
        still = self.upright_code(upright)
        turned = self.through_channel(self.out(c).apply(still))
        recovered = reconstruction_loss(latent.detach(), self.psi(turned))
        terms = {"latent reconstruction": how.reconstruction * recovered}
        if y is not None and self.predictor is not None:
            missed = prediction_loss(
                self.predictor(turned), y, bounded=how.bounded, class_weights=how.class_weights
            )
            terms["prediction"] = how.prediction * missed
        if how.mmd:
            terms["mmd"] = how.mmd * mmd(self.through_channel(still) if how.transported else turned, site)
        return terms, turned
