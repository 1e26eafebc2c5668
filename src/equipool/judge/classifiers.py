"""Readers of the site: the paper's adversary, and three that are hard to fool, always beside chance."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from equipool.nn import adversary_network, site_batches
from equipool.randomness import seed_for, seeded

__all__ = ["SiteReading", "paper_adversary", "permuted_band", "site_readers"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


@dataclass(frozen=True)
class SiteReading:
    """How well a reader finds the site of people it was not fitted on.

    Attributes
    ----------
    accuracy, balanced_accuracy, auc
        ``auc`` is the area under the ROC curve, averaged over sites where there are more than two.
    chance
        The share of the largest site, which is the accuracy of always saying its name.
    """

    reader: str
    accuracy: float
    balanced_accuracy: float
    auc: float
    chance: float


def paper_adversary(
    train: ArrayLike, train_site: ArrayLike, test: ArrayLike, test_site: ArrayLike, *, seed: int = 0
) -> SiteReading:
    """Adv of the paper: a three-layer network with batch normalisation, 150 epochs, on codes.

    Learning rate 1e-3, batches of a fortieth of the rows from 32 to 512; every row is seen and the last
    epoch is read, since a reader has nothing to tune on.
    """
    z, codes, z_test, codes_test = _numbered(train, train_site, test, test_site)
    centre, scale = z.mean(axis=0), z.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    x = torch.from_numpy(((z - centre) / scale).astype(np.float32))
    y = torch.from_numpy(codes.astype(np.int64))
    with seeded(seed, "paper adversary") as generator:
        network = adversary_network(x.shape[1], int(codes.max()) + 1)
        optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
        batch = min(max(len(x) // 40, 32), 512)
        for _ in range(150):
            for rows in site_batches(y, batch, generator):
                loss = nn.functional.cross_entropy(network(x[rows]), y[rows])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
        network.eval()
        with torch.no_grad():
            held = torch.from_numpy(((z_test - centre) / scale).astype(np.float32))
            probability = torch.softmax(network(held).double(), dim=1).numpy()
    return _reading("paper", probability, codes_test)


def site_readers(
    train: ArrayLike, train_site: ArrayLike, test: ArrayLike, test_site: ArrayLike, *, seed: int = 0
) -> list[SiteReading]:
    """Read the site with logistic regression, boosted trees and a multi-layer perceptron.

    All are fitted on ``train`` and judged on ``test``; the area under the ROC curve does not depend on the
    sites' sizes.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    z, codes, z_test, codes_test = _numbered(train, train_site, test, test_site)
    state = seed_for(seed, "readers") % 2**32
    early = len(z) >= 2000  # a tenth of fewer people is no guide to stop by
    readers = {
        "logistic": make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=500)),
        "trees": HistGradientBoostingClassifier(max_iter=60, random_state=state),
        "mlp": make_pipeline(
            StandardScaler(),
            MLPClassifier(
                (64, 64), max_iter=200, early_stopping=early, n_iter_no_change=5, random_state=state
            ),
        ),
    }
    with _quiet():
        return [
            _reading(name, reader.fit(z, codes).predict_proba(z_test), codes_test)
            for name, reader in readers.items()
        ]


def permuted_band(
    train: ArrayLike,
    train_site: ArrayLike,
    test: ArrayLike,
    test_site: ArrayLike,
    *,
    draws: int = 20,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 5 % and 95 % quantiles of a logistic reader's AUC where the sites were shuffled.

    What a reader finds when there is nothing to find: with few people of a site it is far from 0.5.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    z, codes, z_test, codes_test = _numbered(train, train_site, test, test_site)
    rng = np.random.default_rng(seed_for(seed, "permuted"))
    found = []
    with _quiet():
        for _ in range(draws):
            reader = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
            reader.fit(z, rng.permutation(codes))
            found.append(_reading("permuted", reader.predict_proba(z_test), rng.permutation(codes_test)).auc)
    low, high = np.quantile(found, [0.05, 0.95])
    return float(low), float(high)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep scikit-learn's remarks on convergence out of the user's terminal."""
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _numbered(
    train: ArrayLike, train_site: ArrayLike, test: ArrayLike, test_site: ArrayLike
) -> tuple[FloatArray, IntArray, FloatArray, IntArray]:
    """Give the sites of train their numbers; people of other sites in test are left out."""
    names, codes = np.unique(np.asarray(train_site).astype(str), return_inverse=True)
    held = np.asarray(test_site).astype(str)
    known = np.isin(held, names)
    place = np.searchsorted(names, held[known])
    return (
        np.asarray(train, dtype=np.float64),
        codes.astype(np.intp),
        np.asarray(test, dtype=np.float64)[known],
        place.astype(np.intp),
    )


def _reading(name: str, probability: FloatArray, codes: IntArray) -> SiteReading:
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    said = probability.argmax(axis=1)
    present = np.unique(codes)
    areas = [roc_auc_score(codes == k, probability[:, k]) for k in present] if len(present) > 1 else [0.5]
    return SiteReading(
        reader=name,
        accuracy=float((said == codes).mean()),
        balanced_accuracy=float(balanced_accuracy_score(codes, said)),
        auc=float(np.mean(areas)),
        chance=float(np.bincount(codes).max() / len(codes)),
    )
