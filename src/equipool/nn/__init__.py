"""Networks, losses and the training loop."""

from equipool.nn.losses import equivariance_loss, equivariance_loss_cayley

__all__ = ["equivariance_loss", "equivariance_loss_cayley"]
