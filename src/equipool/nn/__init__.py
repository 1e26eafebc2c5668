"""Networks, losses and the training loop."""

from equipool.nn.losses import (
    correlation_loss,
    equivariance_loss,
    equivariance_loss_cayley,
    grouped_mmd,
    match_loss,
    mmd,
    prediction_loss,
    reconstruction_loss,
)
from equipool.nn.networks import Components, EncoderKind, adversary_network, coders, mlp
from equipool.nn.training import History, site_batches, train

__all__ = [
    "Components",
    "EncoderKind",
    "History",
    "adversary_network",
    "coders",
    "correlation_loss",
    "equivariance_loss",
    "equivariance_loss_cayley",
    "grouped_mmd",
    "match_loss",
    "mlp",
    "mmd",
    "prediction_loss",
    "reconstruction_loss",
    "site_batches",
    "train",
]
