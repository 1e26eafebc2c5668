"""ΔEq and M as the paper's text defines them, exact on any number of rows in bounded memory.

Both take the row-wise normalisation z̃ of the paper's appendix. One kernel and one normalisation for all
methods; nothing is sub-sampled.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from equipool.exceptions import InputError

__all__ = ["delta_eq", "mmd_measure", "normalise_rows"]

BLOCK = 2048  # rows at a time: a block of 2048 × 2048 numbers is 32 MiB


def normalise_rows(z: ArrayLike) -> NDArray[np.float64]:
    """Return z̃ = (z − min z) / (max z − min z), row by row; a row that never varies becomes 0.

    Examples
    --------
    >>> normalise_rows([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0]])
    array([[0. , 1. , 0.5],
           [0. , 0. , 0. ]])
    """
    z = np.asarray(z, dtype=np.float64)
    low = z.min(axis=1, keepdims=True)
    spread = z.max(axis=1, keepdims=True) - low
    return np.divide(z - low, spread, out=np.zeros_like(z), where=spread > 0)


def delta_eq(tau: ArrayLike, covariate: ArrayLike) -> float:
    """ΔEq: the mean over all pairs of ``|c_i − c_j|`` ‖τ̃_i − τ̃_j‖².

    The paper sums over pairs; the mean does not grow with the number of people. Covariates are scaled to a
    range of 1 here, so that the unit does not matter either. With several covariates, ``|·|`` is the length.
    """
    vectors = torch.from_numpy(normalise_rows(tau))
    c = np.asarray(covariate, dtype=np.float64).reshape(len(vectors), -1)
    ages = torch.from_numpy((c - c.min(axis=0)) / np.where(np.ptp(c, axis=0) > 0, np.ptp(c, axis=0), 1))
    if len(vectors) < 2:
        raise InputError(f"ΔEq compares pairs; give at least 2 rows. Got {len(vectors)}.")
    total = 0.0
    for a, b in _blocks(len(vectors)):
        distance = torch.cdist(vectors[a], vectors[b]).square()
        total += (torch.cdist(ages[a], ages[b]) * distance).sum().item()
    return total / (len(vectors) * (len(vectors) - 1))


def mmd_measure(z: ArrayLike, site: ArrayLike, *, unbiased: bool = True) -> float:
    """M: the squared MMD of equation (7) between sites, averaged over pairs of sites.

    The kernel is exp(−6‖z̃ − z̃'‖²/n) on rows normalised to [0, 1]: n/6 is the expected squared distance of two
    points of the unit cube, so the width needs no choice and is the same for all methods. ``unbiased`` leaves
    a person's distance to itself out, so that M is 0 on average where sites do not differ, however few people
    they have, and may come out slightly negative; the V-statistic (``unbiased=False``) adds about
    1/people of the smallest site, more for codes that spread.
    """
    rows = torch.from_numpy(normalise_rows(z))
    names, codes = np.unique(np.asarray(site).astype(str), return_inverse=True)
    if len(names) < 2:
        raise InputError(f"M compares sites; give at least 2. Got {len(names)}.")
    membership = torch.zeros(len(rows), len(names), dtype=torch.float64)
    membership[torch.arange(len(rows)), torch.from_numpy(codes)] = 1
    sizes = membership.sum(dim=0)
    gram = torch.zeros(len(names), len(names), dtype=torch.float64)
    for a, b in _blocks(len(rows)):
        gram += membership[a].mT @ _kernel(rows[a], rows[b]) @ membership[b]
    within = gram.diagonal() / sizes**2
    if unbiased:
        # k(z, z) = 1 for each person; a site of one person has nobody to compare it with.
        within = torch.where(sizes > 1, (gram.diagonal() - sizes) / (sizes * (sizes - 1)), 1.0)
    between = gram / torch.outer(sizes, sizes)
    count = len(names)
    total = (count - 1) * within.sum() - (between.sum() - between.diagonal().sum())
    return (total / (count * (count - 1) / 2)).item()


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-6 / a.shape[1] * torch.cdist(a, b).square())


def _blocks(rows: int) -> list[tuple[slice, slice]]:
    starts = range(0, rows, BLOCK)
    return [(slice(a, a + BLOCK), slice(b, b + BLOCK)) for a in starts for b in starts]
