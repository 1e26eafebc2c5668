"""Randomness: one seed, hashed for each purpose, and noise that is a function of the row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray


def seed_for(seed: int, *purpose: object) -> int:
    """Return a seed of 63 bits for one purpose, a hash of both."""
    digest = hashlib.sha256(repr((seed, *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def seeded(seed: int, *purpose: object) -> Iterator[torch.Generator]:
    """Seed torch within a context, and restore its global state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, *purpose))
        yield torch.Generator().manual_seed(seed_for(seed, *purpose, "generator"))


def row_noise(rows: NDArray[np.float32], width: int, seed: int) -> NDArray[np.float32]:
    """Return standard normal noise (rows, width) that depends on each row's content and the seed alone.

    A row gets the same noise in any batch and process: the generator is splitmix64, keyed by a hash of the
    row, and the transform Box–Muller.
    """
    rng = np.random.default_rng(seed_for(seed, "row hash"))
    weights = rng.integers(1, 2**63, size=rows.shape[1], dtype=np.uint64)
    bits = np.ascontiguousarray(rows, dtype=np.float32).view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        key = _splitmix(bits + weights).sum(axis=1, dtype=np.uint64)
        half = (width + 1) // 2
        counter = np.arange(1, 2 * half + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        draws = _splitmix(key[:, None] + counter)
    uniform = ((draws >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    radius, angle = np.sqrt(-2 * np.log(uniform[:, :half])), 2 * np.pi * uniform[:, half:]
    pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs[:, :width].astype(np.float32)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
