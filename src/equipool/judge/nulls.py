"""What scores are by chance: the same computation with shuffled sites."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equipool.judge.classifiers import classify_site
from equipool.randomness import seed_for

__all__ = ["shuffled_band", "shuffled_sites"]


def shuffled_sites(site: NDArray[Any], rows: NDArray[np.intp], rng: np.random.Generator) -> NDArray[Any]:
    """Return the sites with those of some rows permuted among these."""
    shuffled = np.array(site)
    shuffled[rows] = rng.permutation(shuffled[rows])
    return shuffled


def shuffled_band(
    train: ArrayLike,
    train_site: ArrayLike,
    test: ArrayLike,
    test_site: ArrayLike,
    *,
    draws: int = 20,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 5 % and 95 % quantiles of a logistic regression's AUC where the sites were shuffled.

    With few rows of a site, chance reaches far from 0.5.
    """
    rng = np.random.default_rng(seed_for(seed, "permuted"))
    train_site, test_site = np.asarray(train_site), np.asarray(test_site)
    areas = [
        classify_site(
            train,
            rng.permutation(train_site),
            test,
            rng.permutation(test_site),
            classifiers=["unweighted logistic"],
        )[0].auc
        for _ in range(draws)
    ]
    low, high = np.quantile(areas, [0.05, 0.95])
    return float(low), float(high)
