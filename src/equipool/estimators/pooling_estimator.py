"""What the pooler and the baselines share: parameters, training data, scaling, training, predictions."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

import joblib
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from equipool import distributed
from equipool.checks import Inputs, Task, check_for_fit, refuse_text
from equipool.data.covariates import Covariate, covariates_of, scaled
from equipool.data.splits import systematic
from equipool.data.volumes import Volumes
from equipool.estimators.harmonizer import as_volumes, inputs_of
from equipool.estimators.image_harmonizer import ImageHarmonizer
from equipool.estimators.persistence import save
from equipool.estimators.site_harmonizer import SiteHarmonizer
from equipool.exceptions import InputError
from equipool.nn import coders, reconstruction_loss, site_batches, train
from equipool.nn.networks import Components, EncoderKind, require_width
from equipool.nn.training import Checkpoints, locked
from equipool.randomness import seed_for
from equipool.sites.effect import FloatArray, array
from equipool.sites.scans import BLOCK, blocks
from equipool.version import __version__

Front: TypeAlias = BaseEstimator | Literal["auto"] | bool | None

COMPONENT_ROWS, COMPONENT_BYTES = 1000, 2**30  # at most so many are in memory to find components
LIKE_FEATURES = 100.0  # a volume weighs as much in the reconstruction as a table of so many features
HELD_OUT = 0.15  # share of the rows, for early stopping
IN_MEMORY = 2**28  # bytes of scaled volumes that are kept while training
VALIDATION_ROWS = 1024  # the cost of the MMD grows with the square of this


def without_site(front: Any, rows: NDArray[np.floating]) -> Any:
    """Return volumes as a network sees them: residuals, or without a front each scan with mean 0 and SD 1."""
    if front is not None:
        return front.model_.without_site(rows)
    values = np.asarray(rows, dtype=np.float64)
    deviation = values.std(axis=1, keepdims=True)
    return (values - values.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0)


def with_site(front: Any, values: FloatArray, rows: NDArray[np.floating]) -> Any:
    """Return such values in the units of the scans that they belong to: the inverse."""
    if front is not None:
        return front.model_.with_site(values, rows)
    rows = np.asarray(rows, dtype=np.float64)
    return values * rows.std(axis=1, keepdims=True) + rows.mean(axis=1, keepdims=True)


@dataclass(frozen=True, eq=False)
class ScaledVolumes:
    """Volumes as the input of a network, read block by block; ``scaled`` corrects and standardises them."""

    volumes: Volumes
    scaled: Callable[[NDArray[np.floating]], Tensor]
    ready: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and voxels."""
        return self.volumes.shape

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, rows: Any) -> Self:
        positions = rows.numpy() if isinstance(rows, Tensor) else rows
        ready = None if self.ready is None else self.ready[rows]
        return replace(self, volumes=self.volumes[positions], ready=ready)

    def tensor(self) -> Tensor:
        """Read them all."""
        if self.ready is not None:
            return self.ready
        # In blocks: on the way they are several times as large, in double precision.
        result = torch.empty(self.shape)
        for start in range(0, len(self), BLOCK):
            part = slice(start, start + BLOCK)
            result[part] = self.scaled(self.volumes.read(part))
        return result


Rows = Tensor | ScaledVolumes


@dataclass(frozen=True)
class TrainingData:
    """The pool as tensors: scaled features, coded target, site index, scaled covariates."""

    x: Rows
    y: Tensor | None
    site: Tensor
    c: Tensor

    def rows(self, index: Tensor) -> Self:
        """Select rows; volumes are not read yet."""
        y = None if self.y is None else self.y[index]
        return replace(self, x=self.x[index], y=y, site=self.site[index], c=self.c[index])

    def ready(self) -> Self:
        """Return a batch as this process computes it: its part of the features, read, and all labels."""
        to, x = distributed.device(), dense(self.x[distributed.local_rows()])
        y = None if self.y is None else self.y.to(to)
        return replace(self, x=x.to(to), y=y, site=self.site.to(to), c=self.c.to(to))


def dense(x: Rows) -> Tensor:
    """Return rows as a tensor."""
    return x if isinstance(x, Tensor) else x.tensor()


def parts(x: Rows) -> Iterable[Tensor]:
    """Return a table as one tensor, and volumes one at a time, so that memory does not grow with the rows."""
    if isinstance(x, Tensor):
        return [x]
    starts = range(0, len(x), BLOCK)
    return (scan for start in starts for scan in x[start : start + BLOCK].tensor().split(1))


def through(network: Callable[[Tensor], Tensor], x: Rows) -> Tensor:
    """Apply a network in double precision, so that a code does not depend on the other rows of the batch."""
    if not isinstance(x, Tensor) and not len(x):
        raise InputError("There is no image among these volumes; give at least one.")
    return torch.cat([network(part.double()) for part in parts(x)])


def voxel_scales(
    volumes: Volumes, corrected: Callable[[FloatArray], FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard deviation of each voxel over rows, read in blocks that processes share out."""
    total, squares = np.zeros(volumes.shape[1]), np.zeros(volumes.shape[1])
    for _, rows in blocks(volumes):
        values = corrected(rows)
        total += values.sum(axis=0)
        squares += (values**2).sum(axis=0)
    mean = distributed.summed(total) / len(volumes)
    variance = distributed.summed(squares) / len(volumes) - mean**2
    return mean, np.sqrt(np.maximum(variance, 0.0))


def manifest_of(estimator: Any, data: TrainingData) -> dict[str, dict[str, Any]]:
    """Return settings, hashes of the data, and versions: a checkpoint is resumed with the same."""

    def hash_of(*values: Any) -> str:
        plain = [np.ascontiguousarray(v) if isinstance(v, Tensor | np.ndarray) else v for v in values]
        return str(joblib.hash(plain))

    def plain(value: Any) -> Any:
        """Return a parameter as JSON can hold it: a module by its form and a hash of its first weights."""
        if isinstance(value, nn.Module):
            return f"{value!r} {hash_of(*value.state_dict().values())}"
        value = value.tolist() if hasattr(value, "tolist") else value
        return value if isinstance(value, bool | int | float | str | list | None) else repr(value)

    x: list[Any] = [data.x]
    if isinstance(data.x, ScaledVolumes):
        x = [data.x.volumes.mask, *map(hash_of, data.x.volumes.blocks(BLOCK))]
    # Numbers as they are trained on, and the scales that brought them there.
    hashed = {
        "X": [*x, estimator.feature_mean_, estimator.feature_scale_],
        "y": [data.y, getattr(estimator, "classes_", None), getattr(estimator, "target_scale_", None)],
        "site": [data.site, estimator.sites_],
        "covariates": [data.c, estimator.covariates_],
    }
    settings = {name: plain(value) for name, value in estimator.get_params(deep=False).items()}
    del settings["checkpoint"], settings["verbose"]  # they do not change the result
    return {
        "settings": {"estimator": type(estimator).__name__, **settings},
        "data": {name: hash_of(*values) for name, values in hashed.items()},
        "software": {"equipool": __version__, "torch": torch.__version__},
    }


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
class PoolingEstimator(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Base of the pooler and of the baselines, with the parameters that all of them have.

    A subclass gives ``_build``, which returns a module with ``code`` (scaled features to codes), ``tau`` (to
    vectors τ(ℓ)), ``rebuilt`` and ``predictor``, and ``_fit_networks``, which returns it trained.
    """

    n_latent: int = 30
    encoder: EncoderKind = "auto"
    decoder: nn.Module | None = None
    hidden: int = 64
    reconstruction: float = 0.02
    front: Front = None
    task: Task | None = None
    steps: int = 1500
    batch_size: int | None = None
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    patience: int = 8
    checkpoint: str | Path | None = None
    verbose: bool = False
    random_state: int | None = None

    _learned: ClassVar[type] = Learned
    save = save
    mask_ = affine_mm_ = front_ = cast(Any, None)  # of tables, and without a front

    def fit(self, X: Any, y: Any = None, *, site: Any = None, covariates: Any = None) -> Self:
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
        table = None if isinstance(features, Volumes) else X if hasattr(X, "columns") else features
        rows = np.ones(len(features), dtype=bool)
        inputs = inputs_of(table, rows, site=site, covariates=covariates, y=y, task=self.task)
        check_for_fit(inputs, site_given=site is not None)
        self._require_widths()
        self._require_fitting_modules(features.shape[1])
        self._seed = 0 if self.random_state is None else int(self.random_state)
        self.front_ = self._fitted_front(features, y, site=site, covariates=covariates)
        data = self._prepare(inputs, features, y)
        fitted, held = self._split(data)
        folder = None if self.checkpoint is None else Path(self.checkpoint)
        with nullcontext() if folder is None else locked(folder):
            self._checkpoints = Checkpoints(folder, manifest_of(self, data)) if folder else None
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
        x = self._scaled(self._features(X))
        return through(self.network_.tau, x).double().numpy()

    @torch.no_grad()
    def reconstruct(self, X: Any) -> Any:
        """Return X as the decoder reconstructs it from the codes, in units of X; volumes give volumes.

        The noise of a release channel is left out. Voxels of 0 stay 0. Behind a front, a table is
        reconstructed without its site.
        """
        features = self._features(X)
        values = through(self.network_.rebuilt, self._scaled(features)).numpy() * self.feature_scale_
        values += self.feature_mean_
        if not isinstance(features, Volumes):
            return values
        rows = features.read()
        return features.with_values(np.where(rows == 0, 0.0, with_site(self.front_, values, rows)))

    @property
    def _n_features_out(self) -> int:
        return self.n_latent

    def predict(self, X: Any) -> Any:
        """Return the predicted class or number for each row."""
        output = self._output(X)
        if self.task_ == "class":
            return self.classes_[output.argmax(dim=1).numpy()]
        centre, scale = self.target_scale_
        return output.squeeze(-1).numpy().astype(np.float64) * scale + centre

    def predict_proba(self, X: Any) -> FloatArray:
        """Return the probability of each class, in the order of ``classes_``."""
        output = self._output(X)
        if self.task_ != "class":
            raise InputError("predict_proba() is for classes; this target is a number: use predict().")
        return torch.softmax(output.double(), dim=1).numpy()

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy for classes, R² for numbers."""
        measure = accuracy_score if self.task_ == "class" else r2_score
        return float(measure(y, self.predict(X), sample_weight=sample_weight))

    def require_consistent(self) -> None:
        """Refuse, by a ValueError, learned values that do not belong together."""
        targets = {None: (False, False), "class": (True, False), "number": (False, True)}
        if targets[self.task_] != (hasattr(self, "classes_"), hasattr(self, "target_scale_")):
            raise ValueError("the target")
        if self.front_ is not None and self.front_.n_features_in_ != self.n_features_in_:
            raise ValueError("the front")

    _fit_networks: ClassVar[Callable[..., nn.Module]]
    _build: ClassVar[Callable[..., nn.Module]]

    def _new_network(self) -> nn.Module:
        """Return the network of this fit before it is trained, in the precision of its use."""
        self._require_widths()
        return self._build(self.n_features_in_, len(self.covariates_), self._n_outputs()).double()

    def _coders(self, n_features: int) -> tuple[nn.Module, nn.Module]:
        mask = None if self.mask_ is None else torch.from_numpy(self.mask_.copy())
        widths = n_features, self.n_latent
        return coders(self.encoder, *widths, hidden=self.hidden, mask=mask, decoder=self.decoder)

    def _start_components(self, network: nn.Module, data: TrainingData) -> None:
        """Give an encoder on principal components its components, from at most a thousand rows."""
        count = min(len(data.x), COMPONENT_ROWS, max(COMPONENT_BYTES // (4 * data.x.shape[1]), 2))
        for module in network.modules():
            if isinstance(module, Components):
                module.start(dense(data.x[torch.linspace(0, len(data.x) - 1, count).long()]))

    def _train(
        self, stage: str, modules: nn.Module, step: Any, data: TrainingData, generator: Any, **more: Any
    ) -> list[dict[str, float]]:
        """Train a stage by ``step(batch, rows, epoch)``, and return the losses of each epoch."""
        size, epochs = self._schedule(len(data.x))
        return train(
            modules,
            lambda rows, epoch: step(data.rows(rows).ready(), rows, epoch),
            lambda: site_batches(data.site, size, generator),
            epochs=epochs,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            patience=self.patience,
            stage=stage,
            verbose=self.verbose,
            checkpoints=self._checkpoints,
            generator=generator,
            **more,
        ).epochs

    @torch.no_grad()
    def _mean_loss(self, terms: Callable[[TrainingData], dict[str, Tensor]], data: TrainingData) -> float:
        """Return the mean of the sum of terms over rows."""
        total, n = 0.0, len(data.x)
        size = n if isinstance(data.x, Tensor) else self._schedule(n)[0]  # volumes are read in batches
        for rows in torch.arange(n).split(size):
            with distributed.sharded(len(rows)):
                losses = terms(data.rows(rows).ready())
            total += len(rows) / n * sum(term.item() for term in losses.values())
        return total

    def _reconstruction(self, x: Tensor, rebuilt: Tensor) -> Tensor:
        """Return the reconstruction's term, a voxel weighted so that a volume is like a table."""
        share = 1.0 if self.mask_ is None else LIKE_FEATURES / float(self.mask_.sum())
        mean = distributed.average(reconstruction_loss(x, rebuilt), len(x))
        return share * self.reconstruction * mean

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

    def _features(self, X: Any, *, reset: bool = False) -> Any:
        """Return a checked table or volumes; with ``reset``, learn what kind they must be of."""
        if not reset:
            check_is_fitted(self, "network_")
        volumes = as_volumes(X, self.mask_, self.affine_mm_)
        if volumes is not None:
            if reset:
                self.mask_, self.affine_mm_ = volumes.mask, volumes.affine
                self.n_features_in_ = volumes.shape[1]
            if self.mask_ is None:
                raise InputError("This estimator was fitted on a table; give features, not images.")
            return volumes
        if self.mask_ is not None:
            raise InputError("This estimator was fitted on volumes; give paths of NIfTI files or Volumes.")
        refuse_text(X)
        return validate_data(
            self, X, reset=reset, dtype=np.float64, ensure_all_finite=not reset, ensure_min_samples=1 + reset
        )

    def _require_widths(self) -> None:
        for name in ("n_latent", "hidden"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1. Got {getattr(self, name)}.")

    def _require_fitting_modules(self, n_features: int) -> None:
        """Refuse modules of the user that do not fit the data and n_latent."""
        n = self.n_latent
        with torch.random.fork_rng(devices=[]):
            encoder, decoder = self._coders(n_features)
            if isinstance(self.encoder, nn.Module):
                require_width("encoder", encoder, n_features, n, f"numbers a row (n_latent={n})")
            if self.decoder is not None:
                require_width("decoder", decoder, n, n_features, f"values a row, given n_latent={n}")

    def _fitted_front(self, X: FloatArray | Volumes, y: Any, **given: Any) -> Any:
        """Return a fitted harmonizer of the kind of data, or ``None``.

        It is given X alone to transform, at fit as later: the site is inferred, so a participant has the same
        code in training and after, and new ones need no label.
        """
        kind: Any = ImageHarmonizer if isinstance(X, Volumes) else SiteHarmonizer
        front = isinstance(X, Volumes) if self.front == "auto" else self.front
        if front is None or front is False:
            return None
        if front is not True and not isinstance(front, kind):
            raise InputError(
                f"front must be {kind.__name__}() for {'volumes' if isinstance(X, Volumes) else 'tables'}, "
                f"True, 'auto' or None. Got {front!r}."
            )
        made = kind() if front is True else clone(front)
        if isinstance(made, SiteHarmonizer):
            made.set_params(infer=True)
        return made.fit(X, y, **given)

    def _prepare(self, inputs: Inputs, features: FloatArray | Volumes, y: Any) -> TrainingData:
        """Learn scales and levels, and return the pool as tensors."""
        self.sites_, index = np.unique(inputs.site.astype(str), return_inverse=True)
        self.covariates_ = covariates_of(inputs)
        if isinstance(features, Volumes):  # the site is taken out when they are read
            self.feature_mean_, deviation = voxel_scales(features, partial(without_site, self.front_))
        else:
            features = features if self.front_ is None else self.front_.transform(features)
            self.feature_mean_, deviation = features.mean(axis=0), features.std(axis=0)
        # Features that never vary (up to rounding) pass through with the scale 1.
        self.feature_varies_ = deviation > 1e-9 * np.maximum(np.abs(self.feature_mean_), 1e-300)
        self.feature_scale_ = np.where(self.feature_varies_, deviation, 1.0)
        x = self._standardised(features)
        if isinstance(x, ScaledVolumes) and 4 * x.shape[0] * x.shape[1] <= IN_MEMORY:
            x = replace(x, ready=x.tensor())  # training reads them once
        return TrainingData(
            x,
            self._coded_target(inputs, y),
            torch.from_numpy(index.astype(np.int64)),
            torch.from_numpy(scaled(inputs.covariates, self.covariates_).astype(np.float32)),
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

    def _standardised(self, features: FloatArray | Volumes) -> Rows:
        def standardised(rows: FloatArray) -> Tensor:
            # What never varied at fit has no trained weights; it must not move a code afterwards.
            values = np.where(self.feature_varies_, (rows - self.feature_mean_) / self.feature_scale_, 0.0)
            return torch.from_numpy(values.astype(np.float32))

        if isinstance(features, Volumes):
            return ScaledVolumes(features, lambda rows: standardised(without_site(self.front_, rows)))
        return standardised(features)

    def _scaled(self, features: FloatArray | Volumes) -> Rows:
        """Return checked features as the input of the network."""
        if self.front_ is not None and not isinstance(features, Volumes):
            features = self.front_.transform(features)
        return self._standardised(features)

    def _split(self, data: TrainingData) -> tuple[Tensor, Tensor]:
        """Hold rows out for early stopping, in proportion of site and class."""
        y = [] if data.y is None else [data.y.numpy()]
        labels, numbers = ([], y) if self.task_ == "number" else (y, [])
        seed = seed_for(self._seed, "split")
        held = systematic([data.site.numpy(), *labels], numbers, HELD_OUT, seed)
        if held.all() or not held.any():
            held = np.arange(len(held)) < min(len(held) - 1, 1)
        return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))

    @torch.no_grad()
    def _codes(self, X: Any) -> Tensor:
        x = self._scaled(self._features(X))
        return self._release(through(self.network_.code, x), x)

    @torch.no_grad()
    def _output(self, X: Any) -> Any:
        code = self._codes(X)
        if self.task_ is None:
            raise InputError("This estimator was fitted without a target; to predict, fit it with y.")
        return self.network_.predictor(code)
