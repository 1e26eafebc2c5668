"""What sites mix: the covariance of what is people's own, brought from a site's to the pool's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equipool.sites.design import Design
from equipool.sites.passes import gram, site_rows

__all__ = ["WIDEST_MIXING", "choose_mixing", "directions", "roots", "squared_length"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

MIXINGS = (10.0, 30.0, 100.0, 200.0, 400.0, 1000.0, 3000.0, 10000.0)
MARGIN = 0.015  # of the best held-out cost, for the mixing
WIDEST_MIXING = 2000  # features; beyond, covariances are left as they are


def roots(residuals: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the square root and its inverse of the residuals' covariance, shrunk to its diagonal."""
    from sklearn.covariance import ledoit_wolf_shrinkage

    covariance = gram(residuals, residuals, weight) / weight.sum()
    spread = np.sqrt(np.maximum(np.diag(covariance), 1e-12))
    alpha = max(float(ledoit_wolf_shrinkage(residuals / spread, assume_centered=True)), 0.02)
    correlation = covariance / np.outer(spread, spread)
    correlation = (1 - alpha) * correlation + alpha * np.eye(len(spread))
    values, vectors = np.linalg.eigh(correlation)
    values = np.maximum(values, 1e-6)
    # Not symmetric in the features' own units, but each is the other's inverse, which is all that is needed.
    root = (vectors * np.sqrt(values)) @ vectors.T * spread
    unroot = ((vectors / np.sqrt(values)) @ vectors.T) / spread[:, None]
    return root, unroot


def directions(
    white: FloatArray, weight: FloatArray, people: float, mixing: float
) -> tuple[FloatArray, FloatArray]:
    """Return a site's principal directions in whitened residuals and their shrunk variances."""
    rows = white * np.sqrt(weight)[:, None]
    # The smaller of the two Gram matrices: people by people, or features by features.
    if len(rows) < rows.shape[1]:
        own, left = np.linalg.eigh(rows @ rows.T)
        kept = own > 1e-12 * max(own.max(initial=0.0), 1e-300)
        vectors = (rows.T @ left[:, kept] / np.sqrt(own[kept])).T
    else:
        own, right = np.linalg.eigh(rows.T @ rows)
        kept = own > 1e-12 * max(own.max(initial=0.0), 1e-300)
        vectors = right.T[kept]
    share = people / (people + mixing)
    return vectors, share * own[kept] / max(people, 1e-12) + (1 - share)


def choose_mixing(white: FloatArray, design: Design) -> float:
    """Return the least weight of the pool that costs held-out people next to nothing.

    The cost is ‖Σ_s(k) − Σ_held‖², up to a constant, summed over sites: the least k within a margin of the
    best removes as much of the site as the people at hand can bear (docs/experiments.md).
    """
    design = design.thirds
    candidates = np.array([*MIXINGS, np.inf])
    total = np.zeros(len(candidates))
    width = white.shape[1]
    for own in site_rows(design.site, design.n_sites):
        rows, weight, fold = white[own], design.weight[own], design.fold[own]
        rows *= np.sqrt(weight)[:, None]
        for k in range(design.n_folds):
            fit, held = rows[fold != k], rows[fold == k]
            people, judges = weight[fold != k].sum(), weight[fold == k].sum()
            if people < 2 or not judges:
                continue
            size, square, across = _traces(fit, held)
            share = people / (people + candidates)
            rest = 1 - share
            length = share**2 * square / people**2 + 2 * share * rest * size / people + rest**2 * width
            total += judges * length - 2 * (share * across / people + rest * (held**2).sum())
    best = total.min()
    if not total.any():
        return float(np.inf)  # nobody to judge by
    return next(
        k for k, cost in zip(candidates.tolist(), total, strict=True) if cost <= best + MARGIN * abs(best)
    )


def _traces(a: FloatArray, b: FloatArray) -> tuple[float, float, float]:
    """Return tr(AᵀA), tr((AᵀA)²) and tr(AᵀA BᵀB), by whichever Gram matrices are smaller."""
    if len(a) < a.shape[1]:
        return float((a**2).sum()), float(((a @ a.T) ** 2).sum()), float(((a @ b.T) ** 2).sum())
    gram = a.T @ a
    return float(np.trace(gram)), float((gram**2).sum()), float((gram * (b.T @ b)).sum())


def squared_length(
    white: FloatArray, vectors: FloatArray, values: FloatArray, *, rest: float
) -> tuple[FloatArray, float]:
    """Return squared lengths under a covariance of few directions, and its log determinant."""
    along = (white @ vectors.T) ** 2
    apart = np.maximum((white**2).sum(axis=1) - along.sum(axis=1), 0.0)
    determinant = np.log(values).sum() + (white.shape[1] - len(values)) * np.log(rest)
    return along @ (1 / values) + apart / rest, float(determinant)
