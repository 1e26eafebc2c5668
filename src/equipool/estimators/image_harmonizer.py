"""ImageHarmonizer: volumes without what their scanners did."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from equipool.checks import check_for_fit
from equipool.checks.errors import warn_of_small_sites
from equipool.checks.inputs import covariate_frame
from equipool.data.covariates import Covariate, covariates_of, scaled
from equipool.data.volumes import Volumes
from equipool.estimators.harmonizer import (
    Harmonizer,
    as_volumes,
    given_covariates,
    given_sites,
    inputs_of,
    learned_from,
)
from equipool.exceptions import InputError
from equipool.sites.effect import FloatArray, array
from equipool.sites.scans import BLOCK, Box
from equipool.sites.volume_model import VolumeModel, fit_volume_model


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
    gain 1. What each scanner does to intensities, and a shift and a scale of each voxel, are estimated beside
    a smooth trend in the covariates that all scanners share. Intensities are undone only where held-out
    participants have a higher likelihood with it. Volumes are read block by block, and no network is trained.

    Parameters
    ----------
    unseen_site
        What ``transform`` does with a site that was not there at fit: ``"error"``; ``"pooled"``, leave its
        volumes as they are; ``"adapt"``, estimate its shift and scale from the volumes given, with everything
        else as it is.
    keep_target
        Whether the target given to ``fit`` is allowed for when site effects are estimated, if held-out
        participants have a higher likelihood with it. By default a target is not looked at.
    random_state
        Of the folds; ``None`` is 0.

    Attributes
    ----------
    sites_, covariates_, mask_, affine_mm_
        The sites, covariates and grid of the fit.
    choices_
        What was chosen on held-out participants: the trend's ``curvature`` penalty, whether what scanners do
        to ``intensity`` is undone, and whether a ``target`` was allowed for.
    model_
        The fitted :class:`~equipool.sites.volume_model.VolumeModel`.
    """

    _learned: ClassVar[type] = Learned

    def fit(
        self, X: Any, y: Any = None, *, site: Any = None, covariates: Any = None, fit_on: Any = None
    ) -> Self:
        """Estimate the site effects.

        Parameters
        ----------
        X
            :class:`equipool.data.Volumes`, paths of NIfTI files, or a :class:`PooledDataset` of images.
        y
            A target in which sites may differ; looked at with ``keep_target`` alone, never by ``transform``.
        site, covariates, fit_on
            The site of each volume, what is to be kept, and a mask of the volumes to estimate from, such as
            the controls; all can be transformed.
        """
        self._require_choices()
        volumes = _volumes(X)
        rows = learned_from(fit_on, len(volumes))
        frame = covariate_frame(covariates, len(volumes))[rows]
        volumes = volumes if rows.all() else volumes[rows]
        y = y if self.keep_target else None
        inputs = inputs_of(None, rows, site=site, covariates=frame, y=y)
        check_for_fit(inputs, site_given=site is not None)
        self.mask_, self.affine_mm_, self.n_features_in_ = volumes.mask, volumes.affine, volumes.shape[1]
        self.covariates_ = covariates_of(inputs)
        design = self._design(inputs, scaled(inputs.covariates, self.covariates_))
        warn_of_small_sites(self.sites_, design.n_participants)
        self.model_ = fit_volume_model(volumes, design)
        return self

    @property
    def choices_(self) -> dict[str, Any]:
        """What was chosen on held-out participants."""
        model, intensity = self.model_, not self.model_.composition["intensity"].is_identity
        return {"curvature": model.curvature, "intensity": intensity, "target": model.allowed_for_target}

    def transform(self, X: Any, *, site: Any = None, covariates: Any = None) -> Volumes:
        """Return volumes without the site effects, their covariates' trend kept; nothing is inferred."""
        check_is_fitted(self, "model_")
        volumes = _volumes(X, self.mask_, self.affine_mm_)
        self._require_choices()
        labels = given_sites(site, len(volumes), "use EquivariantPooler, whose codes need no site")
        c = given_covariates(covariates, self.covariates_, len(volumes))
        box, clean = Box(volumes.mask), np.empty(volumes.shape, dtype=np.float32)

        def add(model: VolumeModel, rows: NDArray[np.bool_]) -> VolumeModel:
            return model.add_site(volumes[np.flatnonzero(rows)].read(), c[rows], box)

        model, index = self._with_new_sites(labels, self._site_index(labels), add)
        for start in range(0, len(volumes), BLOCK):
            part = slice(start, start + BLOCK)
            clean[part], known = volumes.read(part), start + np.flatnonzero(index[part] >= 0)
            if len(known):
                clean[known] = model.undo(clean[known], c[known], index[known], box)
        return volumes.with_values(clean)


def _volumes(X: Any, *grid: Any) -> Volumes:
    volumes = as_volumes(X, *grid)
    if volumes is None:
        what = "ImageHarmonizer takes Volumes or paths of NIfTI files"
        raise InputError(f"{what}; use SiteHarmonizer for tables.")
    return volumes
