"""Stage one: an autoencoder on the sphere whose τ turns with the covariates."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.estimators.training_data import Rows
from equipool.groups import CovariateAction, FrameTau
from equipool.nn import correlation_loss, equivariance_loss, reconstruction_loss

__all__ = ["StageOne"]

START_LENGTH = 3.0  # of the plane that is read, beside coordinates of about 0.5


class StageOne(nn.Module):
    """E, D and τ of Algorithm 1.

    Parameters
    ----------
    encoder, decoder
        E and D.
    tau
        How the covariates are read from a latent.
    floor
        Least length of the planes that τ reads, see :meth:`FrameTau.to_sphere`.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, tau: FrameTau, *, floor: float = 0.25) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.tau = tau
        self.floor = floor

    @property
    def action(self) -> CovariateAction:
        """The covariates' action on the latents."""
        return self.tau.action

    def latent(self, x: Tensor) -> Tensor:
        """Return ℓ = E(x), a point of the sphere."""
        return self.tau.to_sphere(self.encoder(x), floor=self.floor)

    def losses(
        self, x: Tensor, c: Tensor, *, equivariance: float, reconstruction: float, independence: float
    ) -> dict[str, Tensor]:
        """Return the terms of L_stage1 + ‖x − D(E(x))‖², scaled by their factors.

        The third term is ours: what is left of a latent at the reference covariate must not depend on the
        covariate, or turning a person would not be all of moving that person to another age. Of several
        processes each gives its own rows of x, and the covariates of all.
        """
        own = self.latent(x)
        rebuilt = distributed.average(reconstruction_loss(x, self.decoder(own)), len(x))
        terms = {"reconstruction": reconstruction * rebuilt}
        if c.shape[1]:
            latent = distributed.gather(own)
            pairs = equivariance_loss(self.tau.vector(latent), c, self.tau.orbit)
            terms["equivariance"] = equivariance * pairs.to(x.dtype)
            if independence:
                upright, _ = self.upright(latent)
                terms["independence"] = independence * correlation_loss(upright, c)
        return terms

    @torch.no_grad()
    def start_reading(self, x: Rows, c: Tensor) -> None:
        """Let a linear encoder on components start where a ridge regression reads the covariates' phases.

        With few people, descent on equation (4) learns these by heart before it learns what a ridge knows.
        """
        if self.tau.action.basis is not None or not isinstance(self.encoder, nn.Sequential):
            return
        from sklearn.linear_model import RidgeCV

        components, linear = self.encoder
        assert isinstance(linear, nn.Linear)

        phase = (c.double() @ self.action.frequencies[list(self.tau.planes)].double().mT).numpy()
        wanted = np.stack([np.cos(phase), np.sin(phase)], axis=-1).reshape(len(phase), -1)
        rows = [x] if isinstance(x, Tensor) else x.singles()
        scores = torch.cat([components(part) for part in rows]).double().numpy()
        ridge = RidgeCV(np.logspace(-2, 5, 15)).fit(scores, START_LENGTH * wanted)
        columns = [2 * plane + k for plane in self.tau.planes for k in (0, 1)]
        linear.weight[columns] = torch.as_tensor(ridge.coef_, dtype=linear.weight.dtype)
        linear.bias[columns] = torch.as_tensor(ridge.intercept_, dtype=linear.bias.dtype)

    def upright(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return τ(ℓ)⁻¹ℓ and ĉ(ℓ)."""
        c = self.tau.covariate(latent)
        return self.action(c).inverse.apply(latent), c
