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

# Names in our tables and in combatlearn.
PEERS = {"combat-nocov": "johnson", "combat": "fortin", "combat-gam": "gam"}
PEERS |= {"covbat": "chen", "covbat-gam": "covbat_gam"}
LINEAR = {"combat-gam": "combat", "covbat-gam": "covbat"}
SPLINE_VALUES = 10  # distinct values of a covariate that combatlearn requires for a spline


class ComBatPeer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A member of the ComBat family (one of :data:`PEERS`), with covariates where it takes them."""

    def __init__(self, method: str = "combat") -> None:
        self.method = method

    def fit(self, X: Any, y: Any = None, *, site: Any, covariates: Any = None) -> ComBatPeer:
        """Fit combatlearn's estimator, whose metadata belong to its constructor."""
        try:
            from combatlearn import ComBat
        except ImportError:
            needed = "The ComBat family needs combatlearn: pip install 'equipool[peers]'."
            raise MissingExtraError(needed) from None
        if self.method not in PEERS:
            raise InputError(f"There is no peer {self.method!r}; there are {', '.join(PEERS)}.")
        metadata, method = self._metadata(site, covariates), self.method
        settings: dict[str, Any] = {}
        if method in LINEAR:  # splines only where a covariate has enough values
            numbers = metadata.get("continuous_covariates", pd.DataFrame())
            smooth = [name for name in numbers if numbers[name].nunique() >= SPLINE_VALUES]
            method, settings = (method, {"smooth_terms": smooth}) if smooth else (LINEAR[method], {})
        self.combat_ = ComBat(**metadata, method=PEERS[method], **settings)
        try:
            self.combat_.fit(pd.DataFrame(np.asarray(X, dtype=np.float64)))
        except (ValueError, np.linalg.LinAlgError) as error:
            raise InputError(
                f"combatlearn's {self.method} cannot be fitted here ({str(error).splitlines()[0]}); name the "
                "methods to compare without it, with --methods."
            ) from error
        return self

    def transform(self, X: Any, *, site: Any, covariates: Any = None) -> NDArray[np.float64]:
        """Return the harmonized features."""
        self.combat_.set_params(**self._metadata(site, covariates))
        return np.asarray(self.combat_.transform(pd.DataFrame(np.asarray(X, dtype=np.float64))))

    def _metadata(self, site: Any, covariates: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = {"batch": pd.Series(np.asarray(site).astype(str))}
        if covariates is not None and self.method != "combat-nocov":
            values = np.asarray(covariates, dtype=np.float64).reshape(len(metadata["batch"]), -1)
            metadata["continuous_covariates"] = pd.DataFrame(values).add_prefix("c")
        return metadata
