"""Stage two: a code that keeps the equivariance of stage one and does not depend on the site."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipool.groups import CovariateAction
from equipool.nn import mlp, mmd, prediction_loss, reconstruction_loss

__all__ = ["StageTwo"]


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
        Length of every code before noise of unit variance is added to each of its numbers; ``None``: no
        channel, the code is released as it is.
    """

    def __init__(
        self, out: CovariateAction, n_latent: int, n_outputs: int, *, hidden: int, power: float | None
    ) -> None:
        super().__init__()
        self.out = out
        self.b = mlp(n_latent, out.n, hidden=hidden)
        self.psi = mlp(out.n, n_latent, hidden=hidden)
        self.predictor = mlp(out.n, n_outputs, hidden=hidden) if n_outputs else None
        self.power = power

    def reference_code(self, latent: Tensor) -> Tensor:
        """Return b(τ(ℓ)⁻¹ℓ), the code at the reference covariates."""
        code = self.b(latent)
        return code if self.power is None else self.power * nn.functional.normalize(code, dim=-1)

    def phi(self, latent: Tensor, c: Tensor) -> Tensor:
        """Return Φ(ℓ) = τ(ℓ)·b(τ(ℓ)⁻¹ℓ) for latents at the reference; it has the length of b."""
        return self.out(c).apply(self.reference_code(latent))

    def through_channel(self, code: Tensor) -> Tensor:
        """Add the channel's noise, drawn anew at each call: for training."""
        if self.power is None:
            return code
        # Drawn on the CPU, from the generator that was seeded: the same in every process.
        return code + torch.randn(code.shape, dtype=code.dtype).to(code.device)

    def losses(
        self,
        latent: Tensor,
        at_reference: Tensor,
        c: Tensor,
        y: Tensor | None,
        site: Tensor | None,
        *,
        bounded: bool,
        class_weights: Tensor | None,
        transported: bool,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the terms of L_stage2 + MMD, without the MMD where ``site`` is ``None``, and the codes."""
        reference = self.reference_code(at_reference)
        code = self.through_channel(self.out(c).apply(reference))
        terms = {"latent reconstruction": reconstruction_loss(latent.detach(), self.psi(code))}
        if y is not None and self.predictor is not None:
            output = self.predictor(code)
            terms["prediction"] = prediction_loss(output, y, bounded=bounded, class_weights=class_weights)
        if site is not None:
            terms["mmd"] = mmd(self.through_channel(reference) if transported else code, site)
        return terms, code
