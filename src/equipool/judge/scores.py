"""ΔEq and M as the paper's text defines them, in bounded memory.

Both take the row-wise normalisation z̃ of the paper's appendix. One kernel and one normalisation for all
methods. ΔEq of one covariate is exact in linear time. M, and ΔEq of several covariates, compare all pairs:
they are exact up to ``MOST`` rows, and of more take as many, drawn with a fixed seed in proportion of the
sites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from equipool.data import PooledDataset
from equipool.exceptions import InputError
from equipool.randomness import seed_for

__all__ = [
    "Columns",
    "Discrepancy",
    "adjusted",
    "delta_eq",
    "discrepancy",
    "mmd_measure",
    "normalise_rows",
    "site_shares",
]

FloatArray = NDArray[np.float64]
Columns = dict[str, list[Any]]
CURVATURE = 0.05

BLOCK = 2048  # rows at a time: a block of 2048 × 2048 numbers is 32 MiB
MOST = 20_000  # rows whose pairs are compared; beyond, a sample of as many


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
    range of 1 here, so that the unit does not matter either. With several covariates, ``|·|`` is the length,
    and of more than 20 000 rows as many are drawn.
    """
    vectors = torch.from_numpy(normalise_rows(tau))
    c = np.asarray(covariate, dtype=np.float64).reshape(len(vectors), -1)
    ages = torch.from_numpy((c - c.min(axis=0)) / np.where(np.ptp(c, axis=0) > 0, np.ptp(c, axis=0), 1))
    if len(vectors) < 2:
        raise InputError(f"ΔEq compares pairs; give at least 2 rows. Got {len(vectors)}.")
    if c.shape[1] == 1:
        return _one_by_one(vectors, ages[:, 0]) / (len(vectors) * (len(vectors) - 1))
    some = _sample(np.zeros(len(vectors), dtype=np.intp))
    vectors, ages = vectors[some], ages[some]
    total = 0.0
    for a, b, times in _blocks(len(vectors)):
        distance = torch.cdist(vectors[a], vectors[b]).square()
        total += times * (torch.cdist(ages[a], ages[b]) * distance).sum().item()
    return total / (len(vectors) * (len(vectors) - 1))


def _one_by_one(vectors: Tensor, age: Tensor) -> float:
    """Return Σ_{i≠j} ``|c_i − c_j|`` ‖v_i − v_j‖² in one pass from the youngest to the oldest.

    There c_j − c_i ≥ 0 for all that came before, and the product of that with s_i + s_j − 2 v_i·v_j, where s
    are squared lengths, needs only sums over these: of 1, c, s, c·s, v and c·v.
    """
    order = torch.argsort(age)
    centre = vectors.mean(dim=0)
    before, total = torch.zeros(2, 2 + vectors.shape[1], dtype=vectors.dtype), 0.0
    for some in order.split(BLOCK):
        c, v = age[some].unsqueeze(1), vectors[some] - centre
        known = torch.cat([torch.ones_like(c), v.square().sum(dim=1, keepdim=True), v], dim=1)
        sums = torch.stack([known, c * known]).cumsum(dim=1) + before.unsqueeze(1)
        moved = c * sums[0] - sums[1]  # Σ_i (c_j − c_i)(1, s_i, v_i)
        total += (known[:, 1] @ moved[:, 0] + moved[:, 1].sum() - 2 * (v * moved[:, 2:]).sum()).item()
        before = sums[:, -1]
    return 2 * total


def mmd_measure(z: ArrayLike, site: ArrayLike, *, unbiased: bool = True) -> float:
    """M: the squared MMD of equation (7) between sites, averaged over pairs of sites.

    The kernel is exp(−6‖z̃ − z̃'‖²/n) on rows normalised to [0, 1]: n/6 is the expected squared distance of two
    points of the unit cube, so the width needs no choice and is the same for all methods. All pairs are
    compared; of more than 20 000 rows as many are drawn, at least 2 of each site. ``unbiased`` leaves
    a person's distance to itself out, so that M is 0 on average where sites do not differ, however few people
    they have, and may come out slightly negative; the V-statistic (``unbiased=False``) adds about
    1/people of the smallest site, more for codes that spread.
    """
    rows, member, count = _compared(z, site)
    return _mean_of_pairs(_sums_by_site(rows, member[None], count)[0], member, count, unbiased)


@dataclass(frozen=True, eq=False)
class Discrepancy:
    """M of some codes, the V-statistic beside, and M where the sites were shuffled: by chance, (draws,)."""

    unbiased: float
    biased: float
    shuffled: NDArray[np.float64]


def discrepancy(z: ArrayLike, site: ArrayLike, *, draws: int = 50, seed: int = 0) -> Discrepancy:
    """Return M both ways (:func:`mmd_measure`) and what it is by chance; the kernel is summed once."""
    rows, member, count = _compared(z, site)
    rng = np.random.default_rng(seed_for(seed, "shuffled"))
    shuffled = [member[torch.from_numpy(rng.permutation(len(member)))] for _ in range(draws)]
    own, *others = _sums_by_site(rows, torch.stack([member, *shuffled]), count)
    return Discrepancy(
        _mean_of_pairs(own, member, count, unbiased=True),
        _mean_of_pairs(own, member, count, unbiased=False),
        np.array([_mean_of_pairs(gram, member, count, unbiased=True) for gram in others]),
    )


def _compared(z: ArrayLike, site: ArrayLike) -> tuple[Tensor, Tensor, int]:
    """Return the normalised rows whose pairs are compared, the numbers of their sites, and how many sites."""
    names, codes = np.unique(np.asarray(site).astype(str), return_inverse=True)
    if len(names) < 2:
        raise InputError(f"M compares sites; give at least 2. Got {len(names)}.")
    some = _sample(codes)
    return torch.from_numpy(normalise_rows(np.asarray(z)[some])), torch.from_numpy(codes[some]), len(names)


def _sums_by_site(rows: Tensor, members: Tensor, count: int) -> Tensor:
    """Return the kernel summed over pairs of people by their sites, (draws, sites, sites).

    Each row of ``members`` is one way to say of which sites people are.
    """
    belongs = torch.nn.functional.one_hot(members.mT, count).to(rows.dtype)  # (rows, draws, sites)
    grams = rows.new_zeros(len(members), count, count)
    for a, b, times in _blocks(len(rows)):
        half = (_kernel(rows[a], rows[b]) @ belongs[b].flatten(1)).unflatten(1, belongs.shape[1:])
        by_site = torch.einsum("rds,rdt->dst", belongs[a], half)
        grams += by_site if times == 1 else by_site + by_site.mT
    return grams


def _mean_of_pairs(gram: Tensor, member: Tensor, count: int, unbiased: bool) -> float:
    """Return equation (7) averaged over pairs of sites, from sums of the kernel."""
    sizes = torch.bincount(member, minlength=count).to(torch.float64)
    within = gram.diagonal() / sizes**2
    if unbiased:
        # k(z, z) = 1 for each person; a site of one person has nobody to compare it with.
        within = torch.where(sizes > 1, (gram.diagonal() - sizes) / (sizes * (sizes - 1)), 1.0)
    between = gram / torch.outer(sizes, sizes)
    total = (count - 1) * within.sum() - (between.sum() - between.diagonal().sum())
    return (total / (count * (count - 1) / 2)).item()


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-6 / a.shape[1] * torch.cdist(a, b).square())


def _blocks(rows: int) -> list[tuple[slice, slice, int]]:
    """Return blocks of pairs and how often each counts: pairs (i, j) and (j, i) are the same."""
    starts = range(0, rows, BLOCK)
    parts = [slice(start, start + BLOCK) for start in starts]
    return [(a, b, 1 if a is b else 2) for k, a in enumerate(parts) for b in parts[k:]]


def _sample(codes: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the rows whose pairs are compared: all, or ``MOST``, of each site its share and at least 2."""
    if len(codes) <= MOST:
        return np.arange(len(codes))
    shuffled = np.random.default_rng(0).permutation(len(codes))
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    counts = np.bincount(codes)
    place = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the site
    share = np.maximum(counts * MOST // len(codes), 2)
    return np.sort(order[place < np.repeat(share, counts)])


# -- how much of each feature is the site's ---------------------------------------------------------------


def site_shares(pool: PooledDataset, x: FloatArray, rows: Any = None) -> FloatArray:
    """Return for each feature the share of its variance that is the site's, covariates taken out.

    ω², which is 0 on average where the site does nothing; below 0 it is given as 0. With ``rows``, in these
    people; the covariates' course is still everybody's.
    """
    rows = np.arange(len(pool)) if rows is None else rows
    site, left = pool.site[rows], adjusted(pool, x)[rows]
    left = left - left.mean(axis=0)
    total = (left**2).sum(axis=0)
    present = np.unique(site)
    between = sum((site == k).sum() * left[site == k].mean(axis=0) ** 2 for k in present)
    error = (total - between) / max(len(rows) - len(present), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (between - (len(present) - 1) * error) / (total + error)
    result: FloatArray = np.where(total > 1e-12 * (x[rows] ** 2).sum(axis=0), np.clip(share, 0.0, 1.0), 0.0)
    return result


def adjusted(pool: PooledDataset, x: FloatArray) -> FloatArray:
    """Return features at the mean covariates: a common course of the covariates, beside sites, taken out."""
    if not pool.C.shape[1]:
        return x
    c = pool.scaled
    course = np.hstack([c, c**2])
    course = course - course.mean(axis=0)
    present = np.unique(pool.site)
    design = np.hstack([(pool.site[:, None] == present).astype(np.float64), course])
    # A ridge on the squares: where sites' covariates do not overlap, the course between them is straight.
    penalty = np.diag(np.repeat([1e-9, CURVATURE], [len(present) + c.shape[1], c.shape[1]]) * len(c))
    coefficients = np.linalg.solve(design.T @ design + penalty, design.T @ x)
    result: FloatArray = x - course @ coefficients[len(present) :]
    return result
