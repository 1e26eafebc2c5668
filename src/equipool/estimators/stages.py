"""The networks of Algorithm 1: stage one with E, D and τ; stage two with b, Ψ and h."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from equipool.estimators.training_data import Rows, parts
from equipool.groups import CovariateAction, FrameTau
from equipool.nn import mlp

START_LENGTH = 3.0  # of the designated plane, beside coordinates of about 0.5
FLOOR = 0.25  # least length of the designated planes, see FrameTau.to_sphere


class StageOne(nn.Module):
    """An autoencoder on the sphere, and τ, which predicts the covariates from a latent."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, tau: FrameTau) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.tau = tau

    def latent(self, x: Tensor) -> Tensor:
        """Return ℓ = E(x), a point of the sphere."""
        return self.tau.to_sphere(self.encoder(x), floor=FLOOR)

    @torch.no_grad()
    def calibrate(self, x: Rows, c: Tensor) -> None:
        """Set the zero of ĉ, with latents in training precision."""
        if c.shape[1]:
            self.tau.calibrate(torch.cat([self.latent(part) for part in parts(x)]), c)

    @torch.no_grad()
    def start_at_ridge(self, x: Rows, c: Tensor) -> None:
        """Let a linear encoder on components start where a ridge regression predicts the covariates' phases.

        With few participants, gradient descent on equation (4) overfits before it gets there.
        """
        if self.tau.action.basis is not None or not isinstance(self.encoder, nn.Sequential):
            return
        from sklearn.linear_model import RidgeCV

        components, linear = self.encoder
        assert isinstance(linear, nn.Linear)
        planes = list(self.tau.planes)
        phase = (c.double() @ self.tau.action.frequencies[planes].double().mT).numpy()
        wanted = np.stack([np.cos(phase), np.sin(phase)], axis=-1).reshape(len(phase), -1)
        scores = torch.cat([components(part) for part in parts(x)]).double().numpy()
        ridge = RidgeCV(np.logspace(-2, 5, 15)).fit(scores, START_LENGTH * wanted)
        columns = [2 * plane + k for plane in planes for k in (0, 1)]
        linear.weight[columns] = torch.as_tensor(ridge.coef_, dtype=linear.weight.dtype)
        linear.bias[columns] = torch.as_tensor(ridge.intercept_, dtype=linear.bias.dtype)


class StageTwo(nn.Module):
    """A code that is equivariant by construction, Ψ back to the latents, and h from the code to the target.

    ``out`` is the covariates' action on the codes. With ``power``, codes pass a channel: each has this length
    before noise of unit variance is added to each of its numbers.
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


class TwoStages(nn.Module):
    """Both stages after training: from scaled features to the code."""

    def __init__(self, one: StageOne, two: StageTwo) -> None:
        super().__init__()
        self.one, self.two = one, two

    def code(self, x: Tensor) -> Tensor:
        """Return Φ(E(x))."""
        return self.two.phi(*self.one.tau.at_reference(self.one.latent(x)))

    def tau(self, x: Tensor) -> Tensor:
        """Return τ(E(x)) as a vector."""
        return self.one.tau.vector(self.one.latent(x))

    def rebuilt(self, x: Tensor) -> Tensor:
        """Return D(Ψ(Φ(E(x))))."""
        features: Tensor = self.one.decoder(self.two.psi(self.code(x)))
        return features

    @property
    def predictor(self) -> nn.Module | None:
        """The module h, from Φ to the target."""
        return self.two.predictor
