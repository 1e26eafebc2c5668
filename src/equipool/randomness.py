"""Randomness: one seed, hashed for each purpose, and noise that is a function of the row."""

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

    So a row gets the same noise in any batch and process.
    """
    noise, salt = np.empty((len(rows), width), dtype=np.float32), seed_for(seed, "row").to_bytes(16, "big")
    for row, content in zip(noise, np.ascontiguousarray(rows, dtype=np.float32), strict=True):
        key = hashlib.blake2b(content.tobytes(), digest_size=16, salt=salt)
        bits = np.random.Philox(key=int.from_bytes(key.digest(), "big"))
        row[:] = np.random.Generator(bits).standard_normal(width)
    return noise
