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

START_LENGTH = 3.0  # of the designated plane, beside coordinates of about 0.5
FLOOR = 0.25  # least length of the designated planes, see FrameTau.to_sphere


class StageOne(nn.Module):
    """E, D and τ of Algorithm 1.

    Parameters
    ----------
    encoder, decoder
        E and D.
    tau
        How the covariates are predicted from a latent.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, tau: FrameTau) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.tau = tau

    @property
    def action(self) -> CovariateAction:
        """The covariates' action on the latents."""
        return self.tau.action

    def latent(self, x: Tensor) -> Tensor:
        """Return ℓ = E(x), a point of the sphere."""
        return self.tau.to_sphere(self.encoder(x), floor=FLOOR)

    def losses(self, x: Tensor, c: Tensor, *, independence: bool) -> dict[str, Tensor]:
        """Return the terms of L_stage1 + ‖x − D(E(x))‖².

        The third term is ours: a latent at the reference covariates must not depend on them, or turning it
        would not be all of moving a participant to another age. Of several processes each gives its own rows
        of x, and the covariates of all.
        """
        part = self.latent(x)
        rebuilt = distributed.average(reconstruction_loss(x, self.decoder(part)), len(x))
        terms = {"reconstruction": rebuilt}
        if c.shape[1]:
            latent = distributed.gather(part)
            terms["equivariance"] = equivariance_loss(self.tau.vector(latent), c, self.tau.orbit).to(x.dtype)
            if independence:
                terms["independence"] = correlation_loss(self.tau.at_reference(latent)[0], c)
        return terms

    @torch.no_grad()
    def start_at_ridge(self, x: Rows, c: Tensor) -> None:
        """Let a linear encoder on components start where a ridge regression predicts the covariates' phases.

        With few participants, gradient descent on equation (4) overfits before it finds the ridge's solution.
        """
        if self.tau.action.basis is not None or not isinstance(self.encoder, nn.Sequential):
            return
        from sklearn.linear_model import RidgeCV

        components, linear = self.encoder
        assert isinstance(linear, nn.Linear)
        planes = list(self.tau.planes)
        phase = (c.double() @ self.action.frequencies[planes].double().mT).numpy()
        wanted = np.stack([np.cos(phase), np.sin(phase)], axis=-1).reshape(len(phase), -1)
        rows = [x] if isinstance(x, Tensor) else x.singles()
        scores = torch.cat([components(part) for part in rows]).double().numpy()
        ridge = RidgeCV(np.logspace(-2, 5, 15)).fit(scores, START_LENGTH * wanted)
        columns = [2 * plane + k for plane in planes for k in (0, 1)]
        linear.weight[columns] = torch.as_tensor(ridge.coef_, dtype=linear.weight.dtype)
        linear.bias[columns] = torch.as_tensor(ridge.intercept_, dtype=linear.bias.dtype)
