"""What all estimators share: checking, scaling, the split for early stopping, predictions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from equipool import distributed
from equipool.checks import Inputs, Task, check_for_fit, refuse_text
from equipool.data import Covariate
from equipool.data.splits import systematic
from equipool.data.volumes import Volumes
from equipool.estimators.manifest import manifest_of
from equipool.estimators.training_data import (
    Rows,
    ScaledVolumes,
    TrainingData,
    as_volumes,
    check_grid,
    dense,
    even,
    through,
    voxel_scales,
)
from equipool.exceptions import InputError
from equipool.nn import Components, EncoderKind, coders
from equipool.nn.checkpoints import Checkpoint, Checkpoints, held
from equipool.nn.networks import require_width
from equipool.randomness import seed_for

__all__ = ["PoolingEstimator"]

FloatArray = NDArray[np.float64]

COMPONENT_PEOPLE, COMPONENT_BYTES = 1000, 2**30  # at most so many are held at once to find components
LIKE_FEATURES = 100.0  # a volume weighs as much in the reconstruction as a table of so many features


class PoolingEstimator(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Base of the pooler and of the baselines.

    A subclass gives ``_fit_networks``, which returns one trained module with the
    attributes ``code`` (scaled features to codes), ``tau`` (to the vectors that stand for τ) and
    ``predictor``.
    """

    n_latent: int
    encoder: EncoderKind
    decoder: nn.Module | None
    hidden: int
    mask_: NDArray[np.bool_] | None
    affine_mm_: FloatArray | None
    task: Task | None
    class_weight: str | None
    batch_size: int | None
    steps: int
    learning_rate: float
    weight_decay: float
    patience: int
    validation_fraction: float
    checkpoint: str | Path | None
    random_state: int | None
    network_: Any

    def fit(self, X: Any, y: Any = None, *, site: Any = None, covariates: Any = None) -> PoolingEstimator:
        """Learn from a pool.

        Parameters
        ----------
        X
            Features (rows, features): an array or a data frame; or volumes: a list of NIfTI paths, a
            :class:`equipool.data.Volumes`, or a :class:`PooledDataset` of images.
        y
            Target: classes or numbers; without it the code is learned unsupervised.
        site
            The site of each row; without it there is one site and nothing to be invariant to.
        covariates
            Numbers (rows,) or (rows, K) that the latent space turns with.
        """
        for name in ("classes_", "target_scale_", "affine_", "volume_sites_", "dropped_"):
            self.__dict__.pop(name, None)  # of an earlier fit
        distributed.remind()
        with distributed.leader_first():  # it fills the cache of images
            array = self._features(X, reset=True)
        if isinstance(array, Volumes):
            # The validator sees the images as one column that always varies.
            X = np.arange(len(array), dtype=np.float64)[:, None]
        y = np.asarray(y) if y is not None and not hasattr(y, "iloc") else y
        inputs = Inputs.from_arrays(
            X if hasattr(X, "columns") or isinstance(array, Volumes) else array,
            site=np.zeros(len(array), dtype=int) if site is None else site,
            covariates=covariates,
            y=y,
            task=self.task,
        )
        check_for_fit(inputs, site_given=site is not None)
        self._seed = 0 if self.random_state is None else int(self.random_state)
        data = self._prepare(inputs, array, y)
        self._class_weights = self._weigh_classes(data.y)
        train, rest = self._split(data)
        with nullcontext() if self.checkpoint is None else held(Path(self.checkpoint)):
            self._checkpoints = None
            if self.checkpoint is not None:
                self._checkpoints = Checkpoints(Path(self.checkpoint), manifest_of(self, data))
            self.network_ = self._fit_networks(data.rows(train), data.rows(rest), data)
        # Trained in single, used in double precision: a code must not depend on who else is in the batch.
        self.network_.double().eval()
        self._after_fit(data)
        return self

    def transform(self, X: Any) -> FloatArray:
        """Return the codes (rows, n_latent): needs no site, covariate or target."""
        return self._codes(X).numpy()

    @torch.no_grad()
    def tau_vector(self, X: Any) -> FloatArray:
        """Return the vectors (rows, n_latent) that stand for τ(ℓ) in ΔEq."""
        check_is_fitted(self, "network_")
        vector = through(self.network_.tau, self._scaled(self._features(X)))
        return vector.double().numpy()

    @torch.no_grad()
    def reconstruct(self, X: Any) -> Any:
        """Return X as the decoder rebuilds it from the codes, in units of X; volumes give volumes.

        The noise of a release channel is left out. Voxels of 0 stay 0.
        """
        check_is_fitted(self, "network_")
        given = self._features(X)
        values = through(self.network_.rebuilt, self._scaled(given)).numpy() * self.feature_scale_
        values += self.feature_mean_
        if not isinstance(given, Volumes):
            return values
        rows = given.read()
        return given.with_values(np.where(rows == 0, 0.0, self._unevened(values, rows)))

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[np.object_]:
        """Return names for the numbers of the code, for scikit-learn's pandas output."""
        check_is_fitted(self, "network_")
        prefix = type(self).__name__.lower()
        return np.array([f"{prefix}{k}" for k in range(self.n_latent)], dtype=object)

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the predicted class or number for each row."""
        output = self._output(X)
        if self.task_ == "class":
            labels: NDArray[Any] = self.classes_[output.argmax(dim=1).numpy()]
            return labels
        centre, scale = self.target_scale_
        numbers: NDArray[Any] = output.squeeze(-1).numpy().astype(np.float64) * scale + centre
        return numbers

    def predict_proba(self, X: Any) -> FloatArray:
        """Return the probability of each class, in the order of ``classes_``."""
        output = self._output(X)
        if self.task_ != "class":
            raise InputError("predict_proba() is for classes; this target is a number: use predict().")
        return torch.softmax(output.double(), dim=1).numpy()

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy for classes, R² for numbers."""
        from sklearn.metrics import accuracy_score, r2_score

        measure = accuracy_score if self.task_ == "class" else r2_score
        return float(measure(y, self.predict(X), sample_weight=sample_weight))

    def save(self, folder: str | Path) -> Path:
        """Write the fitted estimator as safetensors and JSON; :func:`equipool.load` reads it."""
        from equipool.estimators.persistence import save

        return save(self, folder)

    # -- for subclasses ------------------------------------------------------------------------------------

    def _fit_networks(self, data: TrainingData, held: TrainingData, everybody: TrainingData) -> nn.Module:
        raise NotImplementedError

    def _build(self, n_features: int, n_covariates: int, n_outputs: int) -> nn.Module:
        raise NotImplementedError

    def _coders(self, n_features: int) -> tuple[nn.Module, nn.Module]:
        mask = torch.from_numpy(self.mask_.copy()) if self.mask_ is not None else None
        return coders(
            self.encoder, n_features, self.n_latent, hidden=self.hidden, mask=mask, decoder=self.decoder
        )

    def _require_fitting_modules(self, n_features: int) -> None:
        """Refuse modules of the user's that do not fit the data and n_latent."""
        if not isinstance(self.encoder, nn.Module) and self.decoder is None:
            return
        with torch.random.fork_rng(devices=[]):
            forward, back = self._coders(n_features)
        latent = f"n_latent={self.n_latent}"
        if isinstance(self.encoder, nn.Module):
            require_width("encoder", forward, n_features, self.n_latent, f"numbers a person ({latent})")
        if self.decoder is not None:
            require_width("decoder", back, self.n_latent, n_features, f"values a person, given {latent}")

    def _start_components(self, network: nn.Module, data: TrainingData) -> None:
        """Give an encoder on principal components its components, from at most a thousand people."""
        for module in network.modules():
            if isinstance(module, Components):
                fit_in = max(COMPONENT_BYTES // (4 * data.x.shape[1]), 2)
                count = min(len(data.x), COMPONENT_PEOPLE, fit_in)
                some = torch.linspace(0, len(data.x) - 1, count).long()
                module.start(dense(data.x[some]))

    @property
    def _voxel_share(self) -> float:
        """What a voxel weighs in the reconstruction beside a feature of a table."""
        return 1.0 if self.mask_ is None else LIKE_FEATURES / float(self.mask_.sum())

    def _mean_loss(self, terms: Callable[[TrainingData], dict[str, Tensor]], data: TrainingData) -> float:
        """Return the mean of the sum of terms over people."""
        total = 0.0
        for part in data.batches(self._schedule(len(data.x))[0]):
            with distributed.sharded(len(part.x)):
                found = terms(part.ready())
            total += len(part.x) / len(data.x) * sum(term.item() for term in found.values())
        return total

    @property
    def _training(self) -> dict[str, Any]:
        """The parameters of training that every stage has."""
        return {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "patience": self.patience,
        }

    def _checkpoint(self, stage: str) -> Checkpoint | None:
        return None if self._checkpoints is None else self._checkpoints.stage(stage)

    def _n_outputs(self) -> int:
        """How many numbers the predictor gives: one a class, one for a number, none without a target."""
        return 0 if self.task_ is None else 1 if self.task_ == "number" else len(self.classes_)

    def _after_fit(self, data: TrainingData) -> None:
        """Learn what needs the trained networks; nothing by default."""

    def _evened(self, rows: NDArray[np.floating]) -> FloatArray:
        """Return volumes without what is not the person's: their gain and offset, here."""
        return even(rows)

    def _unevened(self, values: FloatArray, rows: NDArray[np.floating]) -> FloatArray:
        """Return evened values in the units of the scans that they belong to: the inverse of evening."""
        own: FloatArray = np.asarray(rows, dtype=np.float64)
        return values * own.std(axis=1, keepdims=True) + own.mean(axis=1, keepdims=True)

    def _before_fit(self, volumes: Volumes, y: Tensor | None, site: Tensor, c: Tensor) -> None:
        """Learn from volumes what :meth:`_evened` needs; nothing by default."""

    def _release(self, code: Tensor, x: Rows) -> Tensor:
        """Return the code as it leaves the estimator; unchanged by default."""
        return code

    # -- inside --------------------------------------------------------------------------------------------

    def _features(self, X: Any, *, reset: bool = False) -> FloatArray | Volumes:
        known = (None, None) if reset else (self.mask_, self.affine_mm_)
        volumes = as_volumes(X, *known)
        if volumes is not None:
            return self._checked_volumes(volumes, reset=reset)
        if reset:
            self.mask_, self.affine_mm_ = None, None
        elif self.mask_ is not None:
            raise InputError("This estimator was fitted on volumes; give paths of NIfTI files or Volumes.")
        refuse_text(X)
        array: FloatArray = validate_data(
            self, X, reset=reset, dtype=np.float64, ensure_all_finite=not reset, ensure_min_samples=1 + reset
        )
        return array

    def _checked_volumes(self, volumes: Volumes, *, reset: bool) -> Volumes:
        if reset:
            self.mask_, self.affine_mm_ = volumes.mask, volumes.affine
            self.n_features_in_ = volumes.shape[1]
            if hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
        elif self.mask_ is None or self.affine_mm_ is None:
            raise InputError("This estimator was fitted on a table; give features, not images.")
        else:
            check_grid(volumes, self.mask_, self.affine_mm_)
        return volumes

    def _prepare(self, inputs: Inputs, array: FloatArray | Volumes, y: Any) -> TrainingData:
        """Learn scales and levels, and return the pool as tensors."""
        self._require_fitting_modules(array.shape[1])
        self.sites_, codes = np.unique(inputs.site.astype(str), return_inverse=True)
        self.covariates_ = tuple(
            Covariate.of(name, inputs.covariates[:, k], levels=inputs.levels[k])
            for k, name in enumerate(inputs.covariate_names)
        )
        rest = (
            self._coded_target(inputs, y),
            torch.from_numpy(codes.astype(np.int64)),
            self._scaled_covariates(inputs.covariates),
        )
        if isinstance(array, Volumes):
            self._before_fit(array, *rest)
            self.feature_mean_, deviation = voxel_scales(array, self._evened)
        else:
            self.feature_mean_, deviation = array.mean(axis=0), array.std(axis=0)
        # Features that never vary (up to rounding) pass through with the scale 1.
        still = deviation <= 1e-9 * np.maximum(np.abs(self.feature_mean_), 1e-300)
        self.feature_scale_ = np.where(still, 1.0, deviation)
        self.feature_varies_ = ~still
        scaled = self._scaled(array)
        return TrainingData(scaled.loaded() if isinstance(scaled, ScaledVolumes) else scaled, *rest)

    def _coded_target(self, inputs: Inputs, y: Any) -> Tensor | None:
        self.task_: Task | None = inputs.task
        if y is None:
            return None
        if inputs.task == "class":
            self.classes_, codes = np.unique(np.asarray(y).ravel(), return_inverse=True)
            return torch.from_numpy(codes.astype(np.int64))
        values = np.asarray(inputs.target, dtype=np.float64)
        self.target_scale_ = float(values.mean()), float(values.std()) or 1.0
        return torch.from_numpy(((values - self.target_scale_[0]) / self.target_scale_[1]).astype(np.float32))

    def _scaled(self, array: FloatArray | Volumes) -> Rows:
        if isinstance(array, Volumes):
            scales = self.feature_mean_, self.feature_scale_, self.feature_varies_
            return ScaledVolumes(array, *scales, self._evened)
        scaled = (array - self.feature_mean_) / self.feature_scale_
        # What never varied at fit has no trained weights; it must not move a code afterwards.
        return torch.from_numpy(np.where(self.feature_varies_, scaled, 0.0).astype(np.float32))

    def _scaled_covariates(self, values: FloatArray) -> Tensor:
        columns = [covariate.scaled(values[:, k]) for k, covariate in enumerate(self.covariates_)]
        stacked = np.column_stack(columns) if columns else np.empty((len(values), 0))
        return torch.from_numpy(stacked.astype(np.float32))

    def _split(self, data: TrainingData) -> tuple[Tensor, Tensor]:
        """Hold rows out for early stopping, in proportion of site and class."""
        if not 0 < self.validation_fraction < 1:
            raise InputError(f"validation_fraction must lie between 0 and 1. Got {self.validation_fraction}.")
        labels = [data.site.numpy()]
        numbers: list[NDArray[np.float64]] = []
        if data.y is not None:
            (numbers if data.y.is_floating_point() else labels).append(data.y.numpy())
        held = systematic(labels, numbers, self.validation_fraction, seed_for(self._seed, "split"))
        if held.all() or not held.any():
            held = np.zeros(len(held), dtype=bool)
            held[:1] = len(held) > 1
        everything = torch.arange(len(held))
        mask = torch.from_numpy(held)
        return everything[~mask], everything[mask]

    def _weigh_classes(self, y: Tensor | None) -> Tensor | None:
        if self.class_weight not in (None, "balanced"):
            raise InputError(f"class_weight must be None or 'balanced'. Got {self.class_weight!r}.")
        if self.class_weight is None or y is None or y.is_floating_point():
            return None
        counts = torch.bincount(y).float()
        return counts.sum() / (len(counts) * counts)

    def _schedule(self, rows: int) -> tuple[int, int]:
        """Return the batch size and the number of epochs that make up ``steps`` steps."""
        batch = min(max(rows // 40, 32), 512) if self.batch_size is None else self.batch_size
        per_epoch = max(-(-rows // batch), 1)
        return batch, max(-(-self.steps // per_epoch), 1)

    @torch.no_grad()
    def _codes(self, X: Any) -> Tensor:
        check_is_fitted(self, "network_")
        x = self._scaled(self._features(X))
        return self._release(through(self.network_.code, x), x)

    @torch.no_grad()
    def _output(self, X: Any) -> Tensor:
        code = self._codes(X)
        if self.task_ is None:
            raise InputError(
                "This estimator was fitted without a target, so it cannot predict; fit it with y."
            )
        output: Tensor = self.network_.predictor(code)
        return output
