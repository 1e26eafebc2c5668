"""Classifiers that predict the site, by name, and what they score by chance, where sites are shuffled."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.ensemble import ExtraTreesClassifier, HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import KBinsDiscretizer, StandardScaler
from sklearn.tree import DecisionTreeClassifier
from torch import nn

from equipool.exceptions import InputError
from equipool.judge.scores import FloatArray, auc, standardised
from equipool.nn import adversary_network, site_batches
from equipool.randomness import seed_for, seeded

# Every site weighs the same: for balanced accuracy, whose chance level is one over the number of sites.
BALANCED = ("logistic", "boosted trees", "perceptron")
REPORTED = {  # names and titles in reports
    "logistic": "logistic regression",
    "tree": "decision tree",
    "extra trees": "extremely randomised trees",
    "perceptron": "perceptron with two hidden layers",
}
# Every row weighs the same: for accuracy, whose chance level is the share of the largest site, and for AUC.
UNWEIGHTED = ("unweighted logistic", "unweighted boosted trees", "perceptron")

ROWS_TO_STOP_EARLY = 2000  # a tenth of fewer rows is too few to validate a perceptron on
EXTRA_TREES = 40
BINS = 255  # of each feature, for boosted trees


class SiteScore(NamedTuple):
    """How well a classifier predicts the site of rows that it was not fitted on.

    ``auc`` is the area under the ROC curve of each site against all others, averaged over sites; ``chance``
    the share of the largest site, which is the accuracy of always predicting it.
    """

    classifier: str
    accuracy: float
    balanced_accuracy: float
    auc: float
    chance: float


def classify_site(
    train: ArrayLike,
    train_site: ArrayLike,
    test: ArrayLike,
    test_site: ArrayLike,
    *,
    classifiers: Iterable[str] = UNWEIGHTED,
    seed: int = 0,
) -> list[SiteScore]:
    """Fit classifiers of the site on ``train``, features or codes (rows, columns), and evaluate on ``test``.

    ``classifiers`` are names from :data:`CLASSIFIERS`; default: logistic regression, boosted trees and a
    perceptron.

    Examples
    --------
    >>> x, site = np.arange(40.0)[:, None], np.repeat(["A", "B"], 20)
    >>> [score] = classify_site(x[::2], site[::2], x[1::2], site[1::2], classifiers=["logistic"])
    >>> score.balanced_accuracy, score.auc, score.chance
    (1.0, 1.0, 0.5)
    """
    return fit_classifiers(train, train_site, classifiers=classifiers, seed=seed).score(test, test_site)


class SiteClassifiers(NamedTuple):
    """Fitted classifiers by name, and the sites that they were fitted on."""

    models: Mapping[str, Any]
    sites: NDArray[np.str_]

    def score(self, x: ArrayLike, site: ArrayLike) -> list[SiteScore]:
        """Evaluate each classifier; rows of sites that it was not fitted on do not count."""
        labels = np.asarray(site).astype(str)
        rows = np.isin(labels, self.sites)
        features, true = np.asarray(x, dtype=np.float64)[rows], np.searchsorted(self.sites, labels[rows])
        chance, scores = float(np.bincount(true).max() / len(true)), []
        for name, model in self.models.items():
            probability = model.predict_proba(features)
            predicted, area = probability.argmax(axis=1), auc(true, probability, np.arange(len(self.sites)))
            with warnings.catch_warnings(action="ignore"):  # of sites that are predicted and not present
                balanced = float(balanced_accuracy_score(true, predicted))
            accuracy = float((predicted == true).mean())
            scores.append(SiteScore(name, accuracy, balanced, 0.5 if np.isnan(area) else area, chance))
        return scores


def fit_classifiers(
    x: ArrayLike, site: ArrayLike, *, classifiers: Iterable[str] = UNWEIGHTED, seed: int = 0
) -> SiteClassifiers:
    """Fit classifiers of the site to features or codes, (rows, columns)."""
    for name in classifiers:
        if name not in CLASSIFIERS:
            raise InputError(f"There is no classifier {name!r}; there are {', '.join(CLASSIFIERS)}.")
    features = np.asarray(x, dtype=np.float64)
    sites, codes = np.unique(np.asarray(site).astype(str), return_inverse=True)
    with warnings.catch_warnings(action="ignore"):  # of convergence and small classes
        models = {name: CLASSIFIERS[name](seed, len(features)).fit(features, codes) for name in classifiers}
    return SiteClassifiers(models, sites)


# -- chance ------------------------------------------------------------------------------------------------


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
    rng, areas = np.random.default_rng(seed_for(seed, "permuted")), []
    for _ in range(draws):
        fitted = fit_classifiers(train, rng.permutation(train_site), classifiers=["unweighted logistic"])
        areas.append(fitted.score(test, rng.permutation(test_site))[0].auc)
    low, high = np.quantile(areas, [0.05, 0.95])
    return float(low), float(high)


# -- the registry ------------------------------------------------------------------------------------------


class PaperNetwork(BaseEstimator):  # type: ignore[misc]
    """Adv of the paper: a network of three layers with batch normalisation, 150 epochs, on codes.

    The learning rate is 1e-3; a batch has a fortieth of the rows, between 32 and 512. Every row is used and
    the last epoch is taken, since there is nothing to tune on.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def fit(self, x: FloatArray, y: NDArray[np.intp]) -> Self:
        """Train the network."""
        rows, labels = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))
        with seeded(self.seed, "paper adversary") as generator:
            self.network_ = adversary_network(x.shape[1], int(y.max()) + 1)
            optimiser = torch.optim.Adam(self.network_.parameters(), lr=1e-3)
            for _ in range(150):
                for batch in site_batches(labels, min(max(len(x) // 40, 32), 512), generator):
                    loss = nn.functional.cross_entropy(self.network_(rows[batch]), labels[batch])
                    optimiser.zero_grad(set_to_none=True)
                    loss.backward()
                    optimiser.step()
        self.network_.eval()
        return self

    @torch.no_grad()
    def predict_proba(self, x: FloatArray) -> FloatArray:
        """Return the probability of each class."""
        logits = self.network_(torch.from_numpy(x.astype(np.float32)))
        probability: FloatArray = torch.softmax(logits.double(), dim=1).numpy()
        return probability


def _state(seed: int) -> int:
    return seed_for(seed, "readers") % 2**32


WEIGHTED: dict[str, Any] = {"class_weight": "balanced"}
LEAF: dict[str, Any] = WEIGHTED | {"min_samples_leaf": 2}

# Each makes an unfitted classifier from a seed and the number of rows that it will be fitted on.
CLASSIFIERS: dict[str, Callable[[int, int], Any]] = {
    "logistic": lambda seed, rows: standardised(LogisticRegression(C=0.3, max_iter=300, **WEIGHTED)),
    "unweighted logistic": lambda seed, rows: standardised(LogisticRegression(C=1.0, max_iter=500)),
    # A single tree detects a point mass that each site moves elsewhere.
    "tree": lambda seed, rows: DecisionTreeClassifier(random_state=_state(seed), **LEAF),
    "extra trees": lambda seed, rows: ExtraTreesClassifier(EXTRA_TREES, random_state=_state(seed), **LEAF),
    "boosted trees": lambda seed, rows: make_pipeline(
        StandardScaler(),  # or values of a tiny unit would be one
        # Otherwise trees that weigh rows search weighted quantiles, which takes seven times as long.
        KBinsDiscretizer(BINS, encode="ordinal", subsample=None),
        HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=15, random_state=_state(seed), **WEIGHTED),
    ),
    "unweighted boosted trees": lambda seed, rows: HistGradientBoostingClassifier(
        max_iter=60, random_state=_state(seed)
    ),
    "perceptron": lambda seed, rows: standardised(
        MLPClassifier(
            (64, 64), early_stopping=rows >= ROWS_TO_STOP_EARLY, n_iter_no_change=5, random_state=_state(seed)
        )
    ),
    "paper": lambda seed, rows: standardised(PaperNetwork(seed)),
}
