"""Networks, losses and the training loop."""

from equipool.nn.losses import (
    correlation_loss,
    equivariance_loss,
    grouped_mmd,
    match_loss,
    mmd,
    prediction_loss,
    reconstruction_loss,
)
from equipool.nn.networks import adversary_network, coders, mlp
from equipool.nn.training import site_batches, train

__all__ = [
    "adversary_network",
    "coders",
    "correlation_loss",
    "equivariance_loss",
    "grouped_mmd",
    "match_loss",
    "mlp",
    "mmd",
    "prediction_loss",
    "reconstruction_loss",
    "site_batches",
    "train",
]
