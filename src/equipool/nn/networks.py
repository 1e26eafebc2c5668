"""Networks. For tables: fully connected, one hidden layer of 64, as in the paper's appendix."""

from __future__ import annotations

from typing import Literal

from torch import nn

from equipool.exceptions import InputError

__all__ = ["EncoderKind", "adversary_network", "coder", "mlp"]

EncoderKind = Literal["mlp", "linear"]


def mlp(n_in: int, n_out: int, *, hidden: int = 64) -> nn.Sequential:
    """Return the paper's network for tables: one hidden layer."""
    return nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, n_out))


def coder(kind: EncoderKind, n_in: int, n_out: int, *, hidden: int = 64) -> nn.Module:
    """Return an encoder or a decoder: ``"mlp"``, or ``"linear"`` where people are few."""
    if kind == "linear":
        return nn.Linear(n_in, n_out)
    if kind != "mlp":
        raise InputError(f"encoder must be 'mlp' or 'linear'. Got {kind!r}.")
    return mlp(n_in, n_out, hidden=hidden)


def adversary_network(n_in: int, n_out: int, *, hidden: int = 64, normalise: bool = True) -> nn.Sequential:
    """Return a three-layer network that reads the site: the paper's adversary, with batch normalisation."""

    def block(a: int, b: int) -> list[nn.Module]:
        middle: list[nn.Module] = [nn.BatchNorm1d(b)] if normalise else []
        return [nn.Linear(a, b), *middle, nn.ReLU()]

    return nn.Sequential(*block(n_in, hidden), *block(hidden, hidden), nn.Linear(hidden, n_out))
