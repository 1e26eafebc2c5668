"""What the pooler and the baselines share: parameters, checks, scaling, training, predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from equipool import distributed
from equipool.checks import Inputs, Task, check_for_fit, refuse_text
from equipool.checks.inputs import require_length
from equipool.data.covariates import Covariate, covariates_of
from equipool.data.splits import systematic
from equipool.data.volumes import Volumes
from equipool.estimators.front import Front, fit_front, with_site, without_site
from equipool.estimators.persistence import save
from equipool.estimators.training_data import (
    Rows,
    ScaledVolumes,
    TrainingData,
    as_volumes,
    check_grid,
    dense,
    manifest_of,
    through,
    voxel_scales,
)
from equipool.exceptions import InputError
from equipool.nn import coders, site_batches, train
from equipool.nn.networks import Components, EncoderKind, require_width
from equipool.nn.training import Checkpoints, Step, Trained, locked
from equipool.randomness import seed_for
from equipool.sites.effect import array

FloatArray = NDArray[np.float64]

COMPONENT_ROWS, COMPONENT_BYTES = 1000, 2**30  # at most so many are in memory to find components
LIKE_FEATURES = 100.0  # a volume weighs as much in the reconstruction as a table of so many features
VALIDATION_ROWS = 1024  # the cost of the MMD grows with the square of this


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a fitted estimator has learned, for persistence; ``None`` where there is nothing."""

    n_features_in_: int = field(metadata={"least": 1, "counts": "inputs"})
    feature_names_in_: NDArray[np.object_] | None = array("inputs")
    sites_: NDArray[np.str_] = array("sites")
    covariates_: tuple[Covariate, ...]
    task_: Task | None
    classes_: NDArray[Any] | None = array("classes")
    target_scale_: tuple[float, float] | None
    mask_: NDArray[np.bool_] | None = field(metadata={"dimensions": ("x", "y", "z"), "counts": "inputs"})
    affine_mm_: FloatArray | None = array("4", "4")
    front_: BaseEstimator | None
    feature_mean_: FloatArray = array("inputs")
    feature_scale_: FloatArray = array("inputs", positive=True)
    feature_varies_: NDArray[np.bool_] = array("inputs")
    dropped_: float | None
    _seed: int
    network_: nn.Module


@dataclass(kw_only=True, eq=False, repr=False)
class PoolingEstimator(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Base of the pooler and of the baselines, with the parameters that all of them have.

    A subclass gives ``_build``, which returns a module with ``code`` (scaled features to codes), ``tau`` (to
    vectors τ(ℓ)), ``rebuilt`` and ``predictor``, and ``_fit_networks``, which returns it trained.
    """

    n_latent: int = 30
    encoder: EncoderKind = "auto"
    decoder: nn.Module | None = None
    hidden: int = 64
    front: Front = None
    task: Task | None = None
    class_weight: Literal["balanced"] | None = None
    steps: int = 1500
    batch_size: int | None = None
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    patience: int = 8
    validation_fraction: float = 0.15
    checkpoint: str | Path | None = None
    verbose: bool = False
    random_state: int | None = None

    _learned: ClassVar[type] = Learned
    save = save
    mask_ = affine_mm_ = front_ = cast(Any, None)  # of tables, and without a front

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
        for name in (one.name for one in fields(self._learned)):
            self.__dict__.pop(name, None)  # of an earlier fit
        distributed.warn_unless_started()
        with distributed.leader_first():  # it fills the cache of images
            features = self._features(X, reset=True)
        rows = len(features)
        y = np.asarray(y) if y is not None and not hasattr(y, "iloc") else y
        if site is not None:
            require_length("site", site, rows)
        inputs = Inputs.from_arrays(
            None if isinstance(features, Volumes) else X if hasattr(X, "columns") else features,
            site=np.zeros(rows, dtype=int) if site is None else site,
            covariates=covariates,
            y=y,
            task=self.task,
        )
        check_for_fit(inputs, site_given=site is not None)
        self._require_widths()
        self._require_fitting_modules(features.shape[1])
        self._seed = 0 if self.random_state is None else int(self.random_state)
        self.front_ = fit_front(self.front, features, y, site=site, covariates=covariates)
        data = self._prepare(inputs, features, y)
        self._class_weights = self._weigh_classes(data.y)
        fitted, held = self._split(data)
        with nullcontext() if self.checkpoint is None else locked(Path(self.checkpoint)):
            self._checkpoints = None
            if self.checkpoint is not None:
                self._checkpoints = Checkpoints(Path(self.checkpoint), manifest_of(self, data))
            self.network_: Any = self._fit_networks(data.rows(fitted), data.rows(held), data)
        # Trained in single, used in double precision: a code must not depend on the rest of the batch.
        self.network_.double().eval()
        return self

    def transform(self, X: Any) -> FloatArray:
        """Return the codes (rows, n_latent): needs no site, covariate or target."""
        return self._codes(X).numpy()

    @torch.no_grad()
    def tau_vector(self, X: Any) -> FloatArray:
        """Return the vectors (rows, n_latent) that stand for τ(ℓ) in ΔEq."""
        check_is_fitted(self, "network_")
        return through(self.network_.tau, self._scaled(self._features(X))).double().numpy()

    @torch.no_grad()
    def reconstruct(self, X: Any) -> Any:
        """Return X as the decoder reconstructs it from the codes, in units of X; volumes give volumes.

        The noise of a release channel is left out. Voxels of 0 stay 0. Behind a front, a table is
        reconstructed without its site.
        """
        check_is_fitted(self, "network_")
        features = self._features(X)
        values = through(self.network_.rebuilt, self._scaled(features)).numpy() * self.feature_scale_
        values += self.feature_mean_
        if not isinstance(features, Volumes):
            return values
        rows = features.read()
        return features.with_values(np.where(rows == 0, 0.0, with_site(self.front_, values, rows)))

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

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, learned values that do not belong together."""
        targets = {None: (False, False), "class": (True, False), "number": (False, True)}
        if targets[self.task_] != (hasattr(self, "classes_"), hasattr(self, "target_scale_")):
            raise ValueError("the target")
        if self.front_ is not None and self.front_.n_features_in_ != self.n_features_in_:
            raise ValueError("the front")

    # -- for subclasses ------------------------------------------------------------------------------------

    def _fit_networks(self, data: TrainingData, held: TrainingData, whole: TrainingData) -> nn.Module:
        raise NotImplementedError

    def _build(self, n_features: int, n_covariates: int, n_outputs: int) -> nn.Module:
        raise NotImplementedError

    def _new_network(self) -> nn.Module:
        """Return the network of this fit before it is trained, in the precision of its use."""
        self._require_widths()
        n_outputs = self._n_outputs()
        return self._build(self.n_features_in_, len(self.covariates_), n_outputs).double()

    def _coders(self, n_features: int) -> tuple[nn.Module, nn.Module]:
        mask = None if self.mask_ is None else torch.from_numpy(self.mask_.copy())
        widths = n_features, self.n_latent
        return coders(self.encoder, *widths, hidden=self.hidden, mask=mask, decoder=self.decoder)

    def _start_components(self, network: nn.Module, data: TrainingData) -> None:
        """Give an encoder on principal components its components, from at most a thousand rows."""
        for module in network.modules():
            if isinstance(module, Components):
                fit_in = max(COMPONENT_BYTES // (4 * data.x.shape[1]), 2)
                count = min(len(data.x), COMPONENT_ROWS, fit_in)
                some = torch.linspace(0, len(data.x) - 1, count).long()
                module.start(dense(data.x[some]))

    def _train(
        self,
        stage: str,
        modules: nn.Module,
        step: Step,
        data: TrainingData,
        generator: torch.Generator,
        *,
        validate: Callable[[], float] | None,
        beside: Sequence[Trained] = (),
    ) -> list[dict[str, float]]:
        """Train a stage, and return the losses of each epoch."""
        size, epochs = self._schedule(len(data.x))
        return train(
            modules,
            step,
            lambda: site_batches(data.site, size, generator),
            epochs=epochs,
            validate=validate,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            patience=self.patience,
            stage=stage,
            verbose=self.verbose,
            checkpoints=self._checkpoints,
            generator=generator,
            beside=beside,
        ).epochs

    @torch.no_grad()
    def _mean_loss(self, terms: Callable[[TrainingData], dict[str, Tensor]], data: TrainingData) -> float:
        """Return the mean of the sum of terms over rows."""
        total = 0.0
        for part in data.batches(self._schedule(len(data.x))[0]):
            with distributed.sharded(len(part.x)):
                losses = terms(part.ready())
            total += len(part.x) / len(data.x) * sum(term.item() for term in losses.values())
        return total

    @property
    def _voxel_share(self) -> float:
        """The weight of a voxel in the reconstruction, relative to a feature of a table."""
        return 1.0 if self.mask_ is None else LIKE_FEATURES / float(self.mask_.sum())

    def _n_outputs(self) -> int:
        """How many numbers the predictor gives: one a class, one for a number, none without a target."""
        return 0 if self.task_ is None else 1 if self.task_ == "number" else len(self.classes_)

    def _schedule(self, rows: int) -> tuple[int, int]:
        """Return the batch size and the number of epochs that make up ``steps`` steps."""
        batch = min(max(rows // 40, 32), 512) if self.batch_size is None else self.batch_size
        per_epoch = max(-(-rows // batch), 1)
        return batch, max(-(-self.steps // per_epoch), 1)

    def _release(self, code: Tensor, x: Rows) -> Tensor:
        """Return the code as it leaves the estimator; unchanged by default."""
        return code

    # -- inside --------------------------------------------------------------------------------------------

    def _features(self, X: Any, *, reset: bool = False) -> FloatArray | Volumes:
        """Return a checked table or volumes; with ``reset``, learn what kind they must be of."""
        volumes = as_volumes(X, self.mask_, self.affine_mm_)
        if volumes is not None:
            if reset:
                self.mask_, self.affine_mm_ = volumes.mask, volumes.affine
                self.n_features_in_ = volumes.shape[1]
            if self.mask_ is None:
                raise InputError("This estimator was fitted on a table; give features, not images.")
            check_grid(volumes, self.mask_, self.affine_mm_)
            return volumes
        if self.mask_ is not None:
            raise InputError("This estimator was fitted on volumes; give paths of NIfTI files or Volumes.")
        refuse_text(X)
        table: FloatArray = validate_data(
            self, X, reset=reset, dtype=np.float64, ensure_all_finite=not reset, ensure_min_samples=1 + reset
        )
        return table

    def _require_widths(self) -> None:
        for name in ("n_latent", "hidden"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1. Got {getattr(self, name)}.")

    def _require_fitting_modules(self, n_features: int) -> None:
        """Refuse modules of the user that do not fit the data and n_latent."""
        with torch.random.fork_rng(devices=[]):
            if isinstance(self.encoder, nn.Module):
                what = f"numbers a row (n_latent={self.n_latent})"
                require_width("encoder", self._coders(n_features)[0], n_features, self.n_latent, what)
            if self.decoder is not None:
                what = f"values a row, given n_latent={self.n_latent}"
                require_width("decoder", self._coders(n_features)[1], self.n_latent, n_features, what)

    def _prepare(self, inputs: Inputs, features: FloatArray | Volumes, y: Any) -> TrainingData:
        """Learn scales and levels, and return the pool as tensors."""
        self.sites_, index = np.unique(inputs.site.astype(str), return_inverse=True)
        self.covariates_ = covariates_of(inputs)
        features = self._without_site(features)
        if isinstance(features, Volumes):
            self.feature_mean_, deviation = voxel_scales(features, partial(without_site, self.front_))
        else:
            self.feature_mean_, deviation = features.mean(axis=0), features.std(axis=0)
        # Features that never vary (up to rounding) pass through with the scale 1.
        self.feature_varies_ = deviation > 1e-9 * np.maximum(np.abs(self.feature_mean_), 1e-300)
        self.feature_scale_ = np.where(self.feature_varies_, deviation, 1.0)
        scaled = self._standardised(features)
        return TrainingData(
            scaled.loaded() if isinstance(scaled, ScaledVolumes) else scaled,
            self._coded_target(inputs, y),
            torch.from_numpy(index.astype(np.int64)),
            self._scaled_covariates(inputs.covariates),
        )

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

    def _without_site(self, features: FloatArray | Volumes) -> FloatArray | Volumes:
        """Return a table behind the front; volumes pass it when they are read."""
        if self.front_ is None or isinstance(features, Volumes):
            return features
        return np.asarray(self.front_.transform(features), dtype=np.float64)

    def _standardised(self, features: FloatArray | Volumes) -> Rows:
        scales = self.feature_mean_, self.feature_scale_, self.feature_varies_
        if isinstance(features, Volumes):
            return ScaledVolumes(features, *scales, partial(without_site, self.front_))
        # What never varied at fit has no trained weights; it must not move a code afterwards.
        scaled = np.where(self.feature_varies_, (features - self.feature_mean_) / self.feature_scale_, 0.0)
        return torch.from_numpy(scaled.astype(np.float32))

    def _scaled(self, features: FloatArray | Volumes) -> Rows:
        """Return checked features as the input of the network."""
        return self._standardised(self._without_site(features))

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
            held[:] = False
            held[:1] = len(held) > 1
        return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))

    def _weigh_classes(self, y: Tensor | None) -> Tensor | None:
        if self.class_weight not in (None, "balanced"):
            raise InputError(f"class_weight must be None or 'balanced'. Got {self.class_weight!r}.")
        if self.class_weight is None or y is None or y.is_floating_point():
            return None
        counts = torch.bincount(y).float()
        return counts.sum() / (len(counts) * counts)

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
