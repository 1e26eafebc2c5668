"""Passes over the rows of a table, some rows at a time: what is made on the way fits into a cache.

Arrays as long as the table, made and given back for every operation, took most of the time beyond 10⁵ rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["gram", "members", "pieces", "site_rows", "site_sums"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

PIECE = 2**17  # numbers at a time: a megabyte


def pieces(rows: int, width: int) -> Iterator[slice]:
    """Cut so many rows of so many numbers into parts of about ``PIECE`` numbers."""
    step = max(PIECE // max(width, 1), 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def site_rows(site: IntArray, n_sites: int) -> list[IntArray]:
    """Return the rows of each site, found for all sites at once."""
    ends = np.cumsum(np.bincount(site, minlength=n_sites))[:-1]
    return np.split(np.argsort(site, kind="stable"), ends)


def members(site: IntArray, n_sites: int, weight: FloatArray) -> Any:
    """Return the sparse matrix (sites, rows) that adds weighted rows up by site: ``members(…) @ values``."""
    from scipy.sparse import csc_array

    return csc_array((weight, site, np.arange(len(site) + 1)), shape=(n_sites, len(site)))


def site_sums(values: FloatArray, site: IntArray, n_sites: int, weight: FloatArray) -> FloatArray:
    """Add weighted rows up by site, (sites, columns)."""
    result: FloatArray = members(site, n_sites, weight) @ values
    return result


def gram(a: FloatArray, b: FloatArray, weight: FloatArray) -> FloatArray:
    """Return Σ_i w_i a_i b_iᵀ, (columns of a, columns of b)."""
    total = np.zeros((a.shape[1], b.shape[1]))
    for part in pieces(len(a), a.shape[1] + b.shape[1]):
        total += (a[part] * weight[part, None]).T @ b[part]
    return total
