"""Other harmonizers behind the interface of :class:`SiteHarmonizer`, to be compared with.

They come from the package combatlearn, the extra ``peers``; nothing else in equipool needs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin

from equipool.exceptions import InputError, MissingExtraError

__all__ = ["PEERS", "ComBatPeer", "Raw"]

# The names in our tables, and combatlearn's.
PEERS = {
    "combat-nocov": "johnson",
    "combat": "fortin",
    "combat-gam": "gam",
    "covbat": "chen",
    "covbat-gam": "covbat_gam",
}


class Raw(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Does nothing: the features as measured."""

    def fit(self, X: Any, y: Any = None, *, site: Any = None, covariates: Any = None) -> Raw:
        """Learn nothing."""
        return self

    def transform(self, X: Any, *, site: Any = None, covariates: Any = None) -> NDArray[np.float64]:
        """Return X."""
        return np.asarray(X, dtype=np.float64)


class ComBatPeer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A member of the ComBat family, fitted on train and applied to test, covariates kept where it can.

    Parameters
    ----------
    method
        One of :data:`PEERS`.
    """

    def __init__(self, method: str = "combat") -> None:
        self.method = method

    def fit(self, X: Any, y: Any = None, *, site: Any, covariates: Any = None) -> ComBatPeer:
        """Fit combatlearn's estimator, whose metadata belong to its constructor."""
        try:
            from combatlearn import ComBat
        except ImportError:
            raise MissingExtraError(
                "The ComBat family needs combatlearn: pip install 'equipool[peers]'."
            ) from None
        if self.method not in PEERS:
            raise InputError(f"There is no peer {self.method!r}; there are {', '.join(PEERS)}.")
        self.combat_ = ComBat(**self._metadata(site, covariates), method=PEERS[self.method])
        self.combat_.fit(pd.DataFrame(np.asarray(X, dtype=np.float64)))
        return self

    def transform(self, X: Any, *, site: Any, covariates: Any = None) -> NDArray[np.float64]:
        """Return the harmonized features."""
        self.combat_.set_params(**self._metadata(site, covariates))
        return np.asarray(self.combat_.transform(pd.DataFrame(np.asarray(X, dtype=np.float64))))

    def _metadata(self, site: Any, covariates: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"batch": pd.Series(np.asarray(site).astype(str))}
        if covariates is not None and self.method != "combat-nocov":
            values = np.asarray(covariates, dtype=np.float64).reshape(len(given["batch"]), -1)
            given["continuous_covariates"] = pd.DataFrame(
                values, columns=[f"c{k}" for k in range(values.shape[1])]
            )
        return given
