"""ImageHarmonizer on the closed form of volumes as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from equipool.checks import Inputs
from equipool.checks.errors import warn_of_small_sites
from equipool.checks.findings import listed
from equipool.checks.inputs import parse_covariates, parse_labels
from equipool.data import Covariate
from equipool.data.volumes import Volumes
from equipool.estimators.arguments import target_columns
from equipool.estimators.training_data import as_volumes, check_grid
from equipool.exceptions import InputError
from equipool.sites.effect import array
from equipool.sites.scans import Box
from equipool.sites.volume_model import VolumeSites, fit_volume_sites

__all__ = ["ImageHarmonizer"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _Sites(VolumeSites):
    template: FloatArray = array("features")
    unit: FloatArray = array()
    coefficients: FloatArray = array("powers", "features")
    square_means: FloatArray = array("covariates")
    centre: FloatArray = array("features")
    shift: FloatArray = array("sites", "features")
    noise: FloatArray = array("sites")
    kept: FloatArray = array("sites", "features")
    spread: FloatArray = array("sites", "features", positive=True)
    directions: FloatArray = array("directions", "features")
    mixing: FloatArray = array("sites", "directions", "directions")
    ends: FloatArray = array("2")
    curves: FloatArray = array("sites", "curves")
    fields: FloatArray = array("sites", "features")
    seen_centre: FloatArray = array("features")
    seen_shift: FloatArray = array("sites", "features")
    seen_spread: FloatArray = array("sites", "features", positive=True)
    axes: FloatArray = array("sites", "features")
    places: FloatArray = array("sites", "sites")
    precision: FloatArray = array("sites", "sites")


@dataclass(frozen=True, kw_only=True)
class _Learned:
    n_features_in_: int = field(metadata={"least": 1, "counts": "features"})
    sites_: NDArray[np.str_] = array("sites")
    covariates_: tuple[Covariate, ...]
    mask_: NDArray[np.bool_] = array("x", "y", "z")
    affine_mm_: FloatArray = array("4", "4")
    model_: _Sites


class ImageHarmonizer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Remove what the site did to volumes."""

    _learned = _Learned

    def fit(self, X: Any, y: Any = None, *, site: Any = None, covariates: Any = None) -> ImageHarmonizer:
        """Learn what the sites do."""
        volumes = as_volumes(X)
        assert volumes is not None
        inputs = Inputs.from_arrays(
            None, site=np.zeros(len(volumes)) if site is None else site, covariates=covariates, y=y
        )
        self.mask_, self.affine_mm_ = volumes.mask, volumes.affine
        self.n_features_in_ = volumes.shape[1]
        self.sites_, index = np.unique(inputs.site.astype(str), return_inverse=True)
        self.covariates_ = tuple(
            Covariate.of(name, inputs.covariates[:, k], levels=inputs.levels[k])
            for k, name in enumerate(inputs.covariate_names)
        )
        warn_of_small_sites(self.sites_, np.bincount(index))
        c = self._scaled(inputs.covariates)
        model = fit_volume_sites(volumes, c, index, target_columns(inputs))
        self.model_ = _Sites(**vars(model))
        return self

    def transform(self, X: Any, *, site: Any = None, covariates: Any = None) -> Volumes:
        """Return harmonized volumes."""
        check_is_fitted(self, "model_")
        volumes = as_volumes(X, self.mask_, self.affine_mm_)
        assert volumes is not None
        check_grid(volumes, self.mask_, self.affine_mm_)
        index = self._index(site, len(volumes))
        c = np.zeros((len(volumes), len(self.covariates_)))
        if covariates is not None:
            names, levels = [x.name for x in self.covariates_], [x.levels for x in self.covariates_]
            c = self._scaled(parse_covariates(covariates, names, levels))
        box, clean, start = Box(volumes.mask), np.empty(volumes.shape, dtype=np.float32), 0
        for rows in volumes.blocks(16):
            part = slice(start, start + len(rows))
            clean[part] = self.model_.remove(rows, c[part], index[part], box)
            start += len(rows)
        return volumes.with_values(clean)

    def save(self, folder: str | Path) -> Path:
        """Write the fitted harmonizer."""
        from equipool.estimators.persistence import save

        return save(self, folder)

    def _scaled(self, values: FloatArray) -> FloatArray:
        columns = [one.scaled(values[:, k]) for k, one in enumerate(self.covariates_)]
        return np.column_stack(columns) if columns else np.empty((len(values), 0))

    def _index(self, site: Any, rows: int) -> NDArray[np.intp]:
        labels = parse_labels(site)
        if labels.shape != (rows,):
            raise InputError(
                f"site must have one value for each of the {rows} rows. Got shape {labels.shape}."
            )
        place = {str(name): k for k, name in enumerate(self.sites_)}
        unseen = sorted(set(map(str, labels)) - set(place))
        if unseen:
            raise InputError(
                f"Site {unseen[0]!r} was not seen at fit; known are {listed(self.sites_, shown=8)}. "
                "Fit again with people of that site."
            )
        return np.array([place[label] for label in labels], dtype=np.intp)
