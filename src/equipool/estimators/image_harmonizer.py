"""ImageHarmonizer: volumes without what their scanners did."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from equipool.checks import Inputs, check_for_fit
from equipool.checks.errors import warn_of_small_sites
from equipool.checks.findings import listed
from equipool.checks.inputs import parse_covariates
from equipool.data.covariates import Covariate, covariates_of
from equipool.data.volumes import Volumes
from equipool.estimators.harmonizer import chosen_rows, given_sites, learned_from, target_columns
from equipool.estimators.training_data import as_volumes, check_grid
from equipool.exceptions import InputError
from equipool.sites.effect import array
from equipool.sites.scans import Box
from equipool.sites.volume_model import VolumeModel, fit_volume_model

__all__ = ["ImageHarmonizer"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

BLOCK = 16  # volumes in memory at a time


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a fitted harmonizer has learned, for persistence."""

    n_features_in_: int = field(metadata={"least": 1, "counts": "features"})
    sites_: NDArray[np.str_] = array("sites")
    covariates_: tuple[Covariate, ...]
    mask_: NDArray[np.bool_] = array("x", "y", "z")
    affine_mm_: FloatArray = array("4", "4")
    model_: VolumeModel


class ImageHarmonizer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Remove site effects from brain volumes: the same grid and header, without the scanner.

    The interface is that of :class:`SiteHarmonizer`; each participant is a volume. Gain, intensities, shift,
    noise, scale and covariance of each scanner are estimated beside a trend in the covariates that all
    scanners share, in a few passes over volumes that are read block by block. No network is trained.

    Parameters
    ----------
    unseen_site
        What ``transform`` does with a site that was not there at fit: ``"error"``, or ``"pooled"``: leave its
        volumes as they are.
    random_state
        For the common interface; the fit draws nothing.

    Attributes
    ----------
    sites_, covariates_
        What was seen at fit.
    mask_, affine_mm_
        The grid.
    model_
        What was learned, a :class:`~equipool.sites.volume_model.VolumeModel`.
    """

    _learned: ClassVar[type] = Learned

    def __init__(
        self, *, unseen_site: Literal["error", "pooled"] = "error", random_state: int | None = None
    ) -> None:
        self.unseen_site = unseen_site
        self.random_state = random_state

    def fit(
        self, X: Any, y: Any = None, *, site: Any = None, covariates: Any = None, fit_on: Any = None
    ) -> ImageHarmonizer:
        """Estimate the site effects.

        Parameters
        ----------
        X
            :class:`equipool.data.Volumes`, paths of NIfTI files, or a :class:`PooledDataset` of images.
        y
            A target to allow for where sites differ in it; never needed by ``transform``.
        site, covariates
            The site of each volume, and what is to be kept.
        fit_on
            A mask of the volumes to estimate from, such as the controls; all can be transformed.
        """
        self.check_settings()
        volumes = _volumes(X)
        rows = learned_from(fit_on, len(volumes))
        volumes = volumes if rows.all() else volumes[rows]
        inputs = Inputs.from_arrays(
            None,
            site=np.zeros(len(volumes), dtype=int) if site is None else chosen_rows(site, rows, "site"),
            covariates=None if covariates is None else chosen_rows(covariates, rows, "covariates"),
            y=None if y is None else chosen_rows(y, rows, "y"),
        )
        check_for_fit(inputs, site_given=site is not None)
        self.mask_, self.affine_mm_ = volumes.mask, volumes.affine
        self.n_features_in_ = volumes.shape[1]
        self.sites_, index = np.unique(inputs.site.astype(str), return_inverse=True)
        self.covariates_ = covariates_of(inputs)
        warn_of_small_sites(self.sites_, np.bincount(index))
        c = self._scaled(inputs.covariates)
        self.model_ = fit_volume_sites(volumes, c, index, target_columns(inputs))
        return self

    def transform(self, X: Any, *, site: Any, covariates: Any = None) -> Volumes:
        """Return volumes without the site effects, their covariates' trend kept."""
        check_is_fitted(self, "model_")
        volumes = _volumes(X, self.mask_, self.affine_mm_)
        check_grid(volumes, self.mask_, self.affine_mm_)
        index, c = self._index(site, len(volumes)), self._covariates(covariates, len(volumes))
        box, clean = Box(volumes.mask), np.empty(volumes.shape, dtype=np.float32)
        for start in range(0, len(volumes), BLOCK):
            part = slice(start, start + BLOCK)
            values, seen = volumes.read(part), index[part] >= 0
            clean[part] = values
            if seen.any():
                clean[part][seen] = self.model_.remove(values[seen], c[part][seen], index[part][seen], box)
        return volumes.with_values(clean)

    def fit_transform(
        self, X: Any, y: Any = None, *, site: Any = None, covariates: Any = None, fit_on: Any = None
    ) -> Volumes:
        """Fit, and transform the same volumes."""
        self.fit(X, y, site=site, covariates=covariates, fit_on=fit_on)
        return self.transform(X, site=site, covariates=covariates)

    def save(self, folder: str | Path) -> Path:
        """Write the fitted harmonizer as safetensors and JSON; :func:`equipool.load` reads it."""
        from equipool.estimators.persistence import save

        return save(self, folder)

    def check_settings(self) -> None:
        """Refuse settings that mean nothing."""
        if self.unseen_site not in ("error", "pooled"):
            raise InputError(
                f"unseen_site must be 'error' or 'pooled' for images. Got {self.unseen_site!r}; fit again "
                "with images of that site."
            )

    def _covariates(self, covariates: Any, rows: int) -> FloatArray:
        if not self.covariates_:
            return np.empty((rows, 0))
        names = [covariate.name for covariate in self.covariates_]
        if covariates is None:
            raise InputError(
                f"This harmonizer keeps {listed(names)}; give covariates to transform, as to fit."
            )
        values = parse_covariates(covariates, names, [covariate.levels for covariate in self.covariates_])
        if len(values) != rows:
            raise InputError(
                f"covariates must have one row for each of the {rows} volumes. Got {len(values)}."
            )
        return self._scaled(values)

    def _scaled(self, values: FloatArray) -> FloatArray:
        columns = [covariate.scaled(values[:, k]) for k, covariate in enumerate(self.covariates_)]
        return np.column_stack(columns) if columns else np.empty((len(values), 0))

    def _index(self, site: Any, rows: int) -> IntArray:
        """Return site indices; −1 for a site that was not seen at fit, if that is allowed."""
        self.check_settings()
        labels = [str(label) for label in given_sites(site, rows)]
        place = {str(name): k for k, name in enumerate(self.sites_)}
        unseen = sorted(set(labels) - set(place))
        if unseen and self.unseen_site == "error":
            raise InputError(
                f"Site {unseen[0]!r} was not seen at fit; there were {listed(self.sites_, shown=8)}. Fit "
                'again with volumes of that site, or leave them as they are: unseen_site="pooled" '
                "(--unseen-site pooled)."
            )
        return np.array([place.get(label, -1) for label in labels], dtype=np.intp)


def _volumes(X: Any, *grid: Any) -> Volumes:
    volumes = as_volumes(X, *grid)
    if volumes is None:
        raise InputError(
            "ImageHarmonizer takes Volumes or paths of NIfTI files; use SiteHarmonizer for a table."
        )
    return volumes
