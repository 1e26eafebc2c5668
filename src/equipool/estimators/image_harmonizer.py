"""ImageHarmonizer: volumes without what their scanners did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from equipool.checks import Inputs, check_for_fit
from equipool.checks.errors import warn_of_small_sites
from equipool.checks.findings import listed
from equipool.checks.inputs import parse_covariates
from equipool.data.covariates import Covariate, covariates_of
from equipool.data.splits import deal
from equipool.data.volumes import Volumes
from equipool.estimators.harmonizer import (
    FOLDS,
    Harmonizer,
    chosen_rows,
    given_sites,
    learned_from,
    target_columns,
)
from equipool.estimators.training_data import as_volumes, check_grid
from equipool.exceptions import InputError
from equipool.randomness import seed_for
from equipool.sites.design import Design
from equipool.sites.effect import array
from equipool.sites.scans import BLOCK, Box
from equipool.sites.volume_model import VolumeModel, fit_volume_model

__all__ = ["ImageHarmonizer"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a fitted harmonizer has learned, for persistence."""

    n_features_in_: int = field(metadata={"least": 1, "counts": "features"})
    sites_: NDArray[np.str_] = array("sites")
    covariates_: tuple[Covariate, ...]
    mask_: NDArray[np.bool_] = array("x", "y", "z")
    affine_mm_: FloatArray = array("4", "4")
    model_: VolumeModel


@dataclass(kw_only=True, eq=False, repr=False)
class ImageHarmonizer(Harmonizer):
    """Remove site effects from brain volumes: the same grid and header, without the scanner.

    The interface is that of :class:`SiteHarmonizer`; each participant is a volume. Every scan is brought to
    gain 1. What each scanner does to intensities, and its shift, are estimated beside a smooth trend
    in the covariates that all scanners share. Intensities are undone only where held-out participants have
    a higher likelihood with it. Volumes are read block by block, and no network is trained.

    Parameters
    ----------
    unseen_site
        What ``transform`` does with a site that was not there at fit: ``"error"``; ``"pooled"``, leave its
        volumes as they are; ``"adapt"``, estimate the site from the volumes given, with everything else as it
        is.
    random_state
        Of the folds; ``None`` is 0.

    Attributes
    ----------
    sites_, covariates_
        The sites and covariates of the fit.
    mask_, affine_mm_
        The grid.
    choices_
        What was chosen on held-out participants: the trend's ``curvature`` penalty, and whether what
        scanners do to ``intensity`` is undone.
    model_
        The fitted :class:`~equipool.sites.volume_model.VolumeModel`.
    """

    _learned: ClassVar[type] = Learned
    _advice: ClassVar[str] = (
        'Use unseen_site="adapt" (--unseen-site adapt) to estimate it from its volumes, or "pooled" to leave '
        "them as they are."
    )

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
        design = Design(
            site=index.astype(np.intp),
            covariates=self._scaled(inputs.covariates),
            target=target_columns(inputs),
            weight=np.ones(len(index)),
            fold=deal([index], [], min(FOLDS, len(index)), seed_for(self.random_state or 0, "folds")),
            n_sites=len(self.sites_),
        )
        self.model_ = fit_volume_model(volumes, design)
        return self

    @property
    def choices_(self) -> dict[str, Any]:
        """What was chosen on held-out participants."""
        intensity = not self.model_.composition["intensity"].is_identity
        return {"curvature": self.model_.curvature, "intensity": intensity}

    def transform(self, X: Any, *, site: Any, covariates: Any = None) -> Volumes:
        """Return volumes without the site effects, their covariates' trend kept."""
        check_is_fitted(self, "model_")
        volumes = _volumes(X, self.mask_, self.affine_mm_)
        check_grid(volumes, self.mask_, self.affine_mm_)
        self.check_settings()
        labels, c = given_sites(site, len(volumes)), self._covariates(covariates, len(volumes))
        box, clean = Box(volumes.mask), np.empty(volumes.shape, dtype=np.float32)

        def add(model: VolumeModel, rows: NDArray[np.bool_]) -> VolumeModel:
            return model.add_site(volumes[np.flatnonzero(rows)].read(), c[rows], box)

        model, index = self._with_new_sites(labels, self._site_index(labels), add)
        for start in range(0, len(volumes), BLOCK):
            part = slice(start, start + BLOCK)
            values, known = volumes.read(part), index[part] >= 0
            clean[part] = values
            if known.any():
                clean[part][known] = model.undo(values[known], c[part][known], index[part][known], box)
        return volumes.with_values(clean)

    def check_settings(self) -> None:
        """Refuse settings that mean nothing."""
        if self.unseen_site not in ("error", "pooled", "adapt"):
            raise InputError(f"unseen_site must be one of error, pooled, adapt. Got {self.unseen_site!r}.")

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


def _volumes(X: Any, *grid: Any) -> Volumes:
    volumes = as_volumes(X, *grid)
    if volumes is None:
        raise InputError(
            "ImageHarmonizer takes Volumes or paths of NIfTI files; use SiteHarmonizer for a table."
        )
    return volumes
