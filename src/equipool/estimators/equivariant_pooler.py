"""EquivariantPooler: Algorithm 1 as a scikit-learn estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from equipool import distributed
from equipool.checks import Task
from equipool.checks.errors import warn_of_small_sites
from equipool.checks.findings import listed
from equipool.checks.inputs import parse_covariates, parse_labels
from equipool.data.volumes import Volumes
from equipool.estimators.pooling_estimator import PoolingEstimator
from equipool.estimators.stage_one import StageOne
from equipool.estimators.stage_two import Objective, StageTwo
from equipool.estimators.training_data import Rows, TrainingData, dense, through
from equipool.exceptions import InputError
from equipool.groups import CovariateAction, FrameTau, LearnedTau
from equipool.nn import EncoderKind, mlp, site_batches, train
from equipool.nn.adversary import Opponent
from equipool.randomness import row_noise, seed_for, seeded
from equipool.sites.affine import fit_affine_sites
from equipool.sites.scans import Box
from equipool.sites.volume_model import fit_volume_sites

__all__ = ["EquivariantPooler"]

FloatArray = NDArray[np.float64]

VALIDATION_ROWS = 1024  # the MMD of early stopping takes the square of this

# What the paper's text says, where it differs from our defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "tau": "learned",
        "generator": "all-ones",
        "match": "phi",
        "power": None,
        "prediction": 1.0,
        "latent_reconstruction": 0.1,
        "mmd": 0.1,
        "adversary": 0.0,
        "turning_planes": None,
        "independence": 0.0,
        "bounded": False,
        "finetune": False,
        "site_free_input": False,
    },
}


class TwoStages(nn.Module):
    """Both stages after training: from scaled features to the code."""

    def __init__(self, one: StageOne, two: StageTwo) -> None:
        super().__init__()
        self.one, self.two = one, two

    def code(self, x: Tensor) -> Tensor:
        """Return Φ(E(x))."""
        return self.two.phi(*self.one.upright(self.one.latent(x)))

    def tau(self, x: Tensor) -> Tensor:
        """Return τ(E(x)) as a vector."""
        return self.one.tau.vector(self.one.latent(x))

    def rebuilt(self, x: Tensor) -> Tensor:
        """Return D(Ψ(Φ(E(x))))."""
        volume: Tensor = self.one.decoder(self.two.psi(self.code(x)))
        return volume

    def predictor(self, code: Tensor) -> Tensor:
        """Return h(Φ)."""
        if self.two.predictor is None:
            raise InputError("There is no predictor without a target.")
        output: Tensor = self.two.predictor(code)
        return output


class EquivariantPooler(PoolingEstimator):
    """Learn a code that turns with the covariates and does not know the site.

    Stage one learns a latent sphere on which the covariates act by rotation; stage two a code on it that is
    equivariant to them by construction and invariant to the site by training. ``site`` and ``covariates`` are
    given to ``fit``; ``transform`` and ``predict`` need X alone.

    Parameters
    ----------
    n_latent
        Dimension of the sphere and of the code.
    encoder
        ``"auto"``: ``"mlp"`` for tables, ``"resnet"`` for volumes, the paper's both; ``"linear"`` encoder and
        decoder overfit less where people are few. Or a torch module of yours, from (rows, features), or for
        volumes from (rows, 1, x, y, z), to (rows, n_latent).
    decoder
        A module of yours for the way back; for volumes it may give boxes or rows of the mask's voxels.
    hidden
        Width of the hidden layers.
    tau
        ``"frame"``: exact by construction; ``"learned"``: the paper's network.
    generator
        ``"spread"``, ``"all-ones"`` (the paper's) or your own Ω (n_latent // 2, K).
    match
        ``"transported"``: sites are compared after everybody is moved to one reference value of the
        covariates; ``"phi"``: as they are, the paper's equation (7).
    turning_planes
        Planes of the latents and of the code that turn with each covariate; the others stand still and hold
        what does not depend on it. ``None``: all turn, as in the paper.
    power
        Of the release channel: codes have this length and are released with noise of unit variance in each
        number, the same for the same row; ``None``: no channel.
    equivariance, reconstruction, independence
        Factors of stage one; ``independence`` keeps what stands still from depending on the covariates.
    prediction, latent_reconstruction, mmd, adversary
        Factors of stage two; ``adversary`` weighs a network that tries to read the site.
    bounded
        Train classes with 1 − p(y) after a short while of cross-entropy, so that the code need not carry
        shades of certainty; see :func:`equipool.nn.prediction_loss`.
    finetune
        Let stage two go on training the encoder, with the losses of stage one kept.
    site_free_input
        Of volumes: let the encoder see scans out of which the shift and spread of the site that they show
        are taken, in closed form; the site is read from the scan, so new scans need none.
    task
        ``"class"`` or ``"number"`` for the target; ``None``: guessed.
    class_weight
        ``"balanced"``: each class counts the same in training, whatever its size.
    stop_early
        Stop stage two on held-out rows too. Off, since a minimax game has no loss to stop at.
    steps, batch_size, learning_rate, weight_decay, patience, validation_fraction
        Of each stage; ``batch_size=None`` is a fortieth of the rows, from 32 to 512. Stage one stops early
        on held-out rows.
    checkpoint
        A folder in which the state of training is kept about twice a minute: the same call goes on from it
        after a kill, and ends with the bits of a run that was not killed. Another call is refused.
    verbose
        Say on the terminal how far training is.
    random_state
        The same number gives the same bits; ``None`` is 0.

    Attributes
    ----------
    sites_, classes_, covariates_
        What was seen at fit.
    history_
        Losses of both stages, epoch by epoch.
    """

    def __init__(
        self,
        *,
        n_latent: int = 30,
        encoder: EncoderKind = "auto",
        decoder: nn.Module | None = None,
        hidden: int = 64,
        tau: Literal["frame", "learned"] = "frame",
        generator: Any = "spread",
        match: Literal["phi", "transported"] = "phi",
        turning_planes: int | None = 1,
        power: float | None = 6.0,
        equivariance: float = 1.0,
        reconstruction: float = 0.02,
        independence: float = 1.0,
        prediction: float = 3.0,
        latent_reconstruction: float = 0.01,
        mmd: float = 3.0,
        adversary: float = 0.5,
        bounded: bool = True,
        finetune: bool = True,
        site_free_input: bool = True,
        task: Task | None = None,
        class_weight: Literal["balanced"] | None = None,
        steps: int = 1500,
        batch_size: int | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        stop_early: bool = False,
        patience: int = 8,
        validation_fraction: float = 0.15,
        checkpoint: str | Path | None = None,
        verbose: bool = False,
        random_state: int | None = None,
    ) -> None:
        self.n_latent = n_latent
        self.encoder = encoder
        self.decoder = decoder
        self.hidden = hidden
        self.tau = tau
        self.generator = generator
        self.match = match
        self.turning_planes = turning_planes
        self.power = power
        self.equivariance = equivariance
        self.reconstruction = reconstruction
        self.independence = independence
        self.prediction = prediction
        self.latent_reconstruction = latent_reconstruction
        self.mmd = mmd
        self.adversary = adversary
        self.bounded = bounded
        self.finetune = finetune
        self.site_free_input = site_free_input
        self.task = task
        self.class_weight = class_weight
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.stop_early = stop_early
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.checkpoint = checkpoint
        self.verbose = verbose
        self.random_state = random_state

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> EquivariantPooler:
        """Return an estimator with the settings of a preset: ``"default"``, or ``"paper"`` for its text."""
        if name not in PRESETS:
            raise InputError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **changes})

    # -- training ------------------------------------------------------------------------------------------

    def _fit_networks(self, data: TrainingData, held: TrainingData, everybody: TrainingData) -> nn.Module:
        self.history_: dict[str, Any] = {}
        one = self._fit_stage_one(data, held)
        two = self._fit_stage_two(one, data if self.stop_early else everybody, held)
        return TwoStages(one, two)

    def _actions(self, n_covariates: int) -> tuple[CovariateAction, CovariateAction]:
        """Return the action on latents and codes, and the one in which all planes turn, for τ as a vector."""
        count = max(n_covariates, 1)
        if not isinstance(self.generator, str):
            own = CovariateAction(self.generator, n=self.n_latent)
            return own, own
        if self.generator == "all-ones":
            paper = CovariateAction.all_ones(self.n_latent, count)
            return paper, paper
        if self.generator != "spread":
            raise InputError(f"generator must be 'spread', 'all-ones' or an array. Got {self.generator!r}.")
        latent = CovariateAction.spread(self.n_latent, count, turning=self.turning_planes)
        return latent, CovariateAction.spread(self.n_latent, count)

    def _build(self, n_features: int, n_covariates: int, n_outputs: int) -> nn.Module:
        one = self._build_stage_one(n_features, n_covariates)
        return TwoStages(one, self._build_stage_two(one, n_outputs))

    def _build_stage_one(self, n_features: int, n_covariates: int) -> StageOne:
        action, orbit = self._actions(n_covariates)
        if self.tau not in ("frame", "learned"):
            raise InputError(f"tau must be 'frame' or 'learned'. Got {self.tau!r}.")
        tau = FrameTau(action, orbit=orbit)
        if self.tau == "learned":
            tau = LearnedTau(orbit, mlp(self.n_latent, self.n_latent, hidden=self.hidden))
        return StageOne(*self._coders(n_features), tau)

    def _build_stage_two(self, one: StageOne, n_outputs: int) -> StageTwo:
        return StageTwo(one.action, self.n_latent, n_outputs, hidden=self.hidden, power=self.power)

    def _fit_stage_one(self, data: TrainingData, held: TrainingData) -> StageOne:
        with seeded(self._seed, "stage one") as generator:
            one = self._build_stage_one(data.x.shape[1], data.c.shape[1])
            self._start_components(one, data)
            if self.encoder == "components" and self.tau == "frame" and data.c.shape[1]:
                one.start_reading(data.x, data.c)
            one.to(distributed.device())
            size, epochs = self._schedule(len(data.x))

            @torch.no_grad()
            def validate() -> float:
                return self._mean_loss(lambda part: self._stage_one_losses(one, part), held)

            self.history_["stage one"] = train(
                one,
                lambda rows, _: self._stage_one_losses(one, data.rows(rows).ready()),
                lambda: site_batches(data.site, size, generator),
                epochs=epochs,
                validate=validate if len(held.x) > 1 else None,
                progress="stage one" if self.verbose else None,
                checkpoint=self._checkpoint("stage one"),
                generator=generator,
                **self._training,
            ).epochs
            self._calibrate(one.cpu(), data)
        return one

    def _stage_one_losses(self, one: StageOne, data: TrainingData) -> dict[str, Tensor]:
        return one.losses(
            dense(data.x),
            data.c,
            equivariance=self.equivariance,
            reconstruction=self._voxel_share * self.reconstruction,
            independence=self.independence,
        )

    @torch.no_grad()
    def _calibrate(self, one: StageOne, data: TrainingData) -> None:
        if data.c.shape[1]:
            one.tau.calibrate(_latents(one, data.x), data.c)

    def _fit_stage_two(self, one: StageOne, data: TrainingData, held: TrainingData) -> StageTwo:
        with seeded(self._seed, "stage two") as generator:
            two = self._build_stage_two(one, self._n_outputs())
            sites = int(data.site.max()) + 1
            opponent = Opponent(self.n_latent, data.site, sites) if self.adversary and sites > 1 else None
            both = nn.ModuleList([one, two]).to(distributed.device())
            size, epochs = self._schedule(len(data.x))
            warm_up = max(epochs // 5, 1)

            def step(rows: Tensor, epoch: int) -> dict[str, Tensor]:
                bounded = self.bounded and epoch >= warm_up
                batch = data.rows(rows).ready()
                terms, code = self._stage_two_losses(one, two, batch, bounded=bounded, sites=sites)
                if opponent is not None:
                    terms["adversary"] = self.adversary * opponent.play(code, batch.site)
                return terms

            @torch.no_grad()
            def validate() -> float:
                with seeded(self._seed, "validation noise"):
                    part = held.rows(torch.arange(min(len(held.x), VALIDATION_ROWS))).ready()
                    terms, _ = self._stage_two_losses(one, two, part, bounded=self.bounded, sites=sites)
                return sum(term.item() for term in terms.values())

            self.history_["stage two"] = train(
                both if self.finetune else two,
                step,
                lambda: site_batches(data.site, size, generator),
                epochs=epochs,
                validate=validate if self.stop_early and len(held.x) > 1 else None,
                progress="stage two" if self.verbose else None,
                checkpoint=self._checkpoint("stage two"),
                generator=generator,
                beside=[] if opponent is None else [opponent.trained],
                **self._training,
            ).epochs
            both.cpu()
            if self.finetune:
                self._calibrate(one, data)
        return two

    def _stage_two_losses(
        self, one: StageOne, two: StageTwo, data: TrainingData, *, bounded: bool, sites: int
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return stage two's terms, with those of stage one if the encoder is trained on, and the code."""
        objective = Objective(
            prediction=self.prediction,
            reconstruction=self.latent_reconstruction,
            mmd=self.mmd if sites > 1 else 0.0,
            bounded=bounded,
            class_weights=None if self._class_weights is None else self._class_weights.to(data.c.device),
            transported=self.match == "transported",
        )
        with torch.set_grad_enabled(self.finetune and torch.is_grad_enabled()):
            latent = distributed.gather(one.latent(dense(data.x)))
            upright, c = one.upright(latent)
        terms, code = two.losses(latent, upright, c, data.y, data.site, objective)
        if self.finetune:
            terms |= self._stage_one_losses(one, data)
        return terms, code

    def _release(self, code: Tensor, x: Rows) -> Tensor:
        if self.power is None:
            return code
        rows = [x] if isinstance(x, Tensor) else x.singles()
        seed = seed_for(self._seed, "release")
        noise = np.concatenate([row_noise(part.float().numpy(), code.shape[1], seed) for part in rows])
        return code + torch.from_numpy(noise).to(code.dtype)

    # -- after training ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _after_fit(self, data: TrainingData) -> None:
        if isinstance(data.x, Tensor):
            c = self._own(data.c.double(), through(self.network_.one.latent, data.x))
            self.affine_ = fit_affine_sites(data.x.double(), c, data.site)

    def _before_fit(self, volumes: Volumes, y: Tensor | None, site: Tensor, c: Tensor) -> None:
        warn_of_small_sites(self.sites_, np.bincount(site.numpy()))
        target = _target_columns(y, len(site))
        self.volume_sites_ = fit_volume_sites(volumes, c.double().numpy(), site.numpy(), target)

    def _evened(self, rows: NDArray[np.floating]) -> FloatArray:
        if not self.site_free_input:
            return super()._evened(rows)
        return self.volume_sites_.without_site(rows)

    def _unevened(self, values: FloatArray, rows: NDArray[np.floating]) -> FloatArray:
        if not self.site_free_input:
            return super()._unevened(values, rows)
        return self.volume_sites_.with_site(values, rows)

    def _own(self, c: Tensor, latent: Tensor) -> Tensor:
        """Return the covariates, or without any the reading, as the value that a latent stands at."""
        return c if c.shape[1] else self.network_.one.tau.covariate(latent)

    @torch.no_grad()
    def read_covariates(self, X: Any) -> FloatArray:
        """Return ĉ(ℓ), the covariates as read from X, in their own units, (rows, K)."""
        check_is_fitted(self, "network_")
        latent = through(self.network_.one.latent, self._scaled(self._features(X)))
        read = self.network_.one.tau.covariate(latent).double().numpy()
        columns = [covariate.unscaled(read[:, k]) for k, covariate in enumerate(self.covariates_)]
        return np.column_stack(columns) if columns else np.empty((len(read), 0))

    @torch.no_grad()
    def harmonize(self, X: Any, *, site: Any, covariates: Any = None) -> Any:
        """Return X in its own units with the site's part removed and the own covariates kept.

        Each site's shift and scale beside a trend in the covariates that all sites share, in closed form:
        decoding moved latents instead was tried and lost more of the clean features than it mended
        (docs/experiments.md). Without ``covariates`` they are read from X by τ. Volumes give volumes, each
        scan's gain and the site's noise taken out too (:mod:`equipool.sites.volume_model`).
        """
        check_is_fitted(self, "network_")
        array = self._features(X)
        codes = self._site_codes(site, len(array))
        x = self._scaled(array)
        c = self._given_covariates(covariates, len(array)).double()
        if (self.covariates_ and not c.shape[1]) or isinstance(x, Tensor):
            c = self._own(c, through(self.network_.one.latent, x))
        if isinstance(array, Volumes):
            return array.with_values(self._without_site(array, c.numpy(), codes.numpy()))
        x = dense(x).double()
        return array + self._in_units(self.affine_.remove(x, c, codes) - x)

    def _without_site(self, volumes: Volumes, c: FloatArray, codes: Any) -> NDArray[np.float32]:
        """Return harmonized volumes, made a block at a time."""
        box, clean = Box(volumes.mask), np.empty(volumes.shape, dtype=np.float32)
        start = 0
        for rows in volumes.blocks(16):
            part = slice(start, start + len(rows))
            clean[part] = self.volume_sites_.remove(rows, c[part], codes[part], box)
            start += len(rows)
        return clean

    @torch.no_grad()
    def transport(self, X: Any, to: Any, *, covariates: Any = None) -> Any:
        """Return the same people at other covariates: Γ applied to their latents, in the units of X.

        Parameters
        ----------
        X
            Features.
        to
            The covariates to move to, in their own units: one value, one for each covariate, or (rows, K).
        covariates
            Where the people are now; default: as read from X.
        """
        check_is_fitted(self, "network_")
        if not self.covariates_:
            raise InputError(
                "This estimator was fitted without covariates, so there is nothing to move along."
            )
        array = self._features(X)
        one = self.network_.one
        latent = through(one.latent, self._scaled(array))
        now = self._given_covariates(covariates, len(array)) if covariates is not None else None
        source = one.tau.covariate(latent) if now is None else now
        wanted = np.asarray(to, dtype=object)
        if wanted.ndim < 2 and wanted.size == len(self.covariates_):
            wanted = np.broadcast_to(wanted.reshape(1, -1), (len(array), wanted.size))
        goal = self._given_covariates(to if hasattr(to, "columns") else wanted, len(array))
        return self._with_change(array, latent, one.action.transport(latent, source, goal))

    def _with_change(self, array: FloatArray | Volumes, latent: Tensor, moved: Tensor) -> Any:
        decoder = self.network_.one.decoder
        change = self._in_units(decoder(moved) - decoder(latent))
        if not isinstance(array, Volumes):
            return array + change
        rows = array.read()
        change = self._unevened(change, rows) - self._unevened(np.zeros_like(change), rows)
        return array.with_values(np.where(rows == 0, 0.0, rows + change))

    def _in_units(self, change: Tensor) -> FloatArray:
        """Return a change of scaled features in the features' own units; those that never vary keep still."""
        result: FloatArray = change.numpy() * np.where(self.feature_varies_, self.feature_scale_, 0.0)
        return result

    def _given_covariates(self, covariates: Any, rows: int) -> Tensor:
        if covariates is None:
            return torch.empty(rows, 0)
        names = [covariate.name for covariate in self.covariates_]
        levels = [covariate.levels for covariate in self.covariates_]
        values = parse_covariates(covariates, names, levels)
        if len(values) != rows:
            raise InputError(
                f"covariates must have one row for each of the {rows} rows of X. Got {len(values)}."
            )
        return self._scaled_covariates(values)

    def _site_codes(self, site: Any, rows: int) -> Tensor:
        labels = parse_labels(site)
        if labels.shape != (rows,):
            raise InputError(
                f"site must have one value for each of the {rows} rows. Got shape {labels.shape}."
            )
        known = {str(name): k for k, name in enumerate(self.sites_)}
        unseen = sorted(set(map(str, labels)) - set(known))
        if unseen:
            raise InputError(
                f"Site {unseen[0]!r} was not seen at fit; known are {listed(self.sites_, shown=8)}. "
                "Fit again with people of that site."
            )
        return torch.tensor([known[label] for label in labels])


def _latents(one: StageOne, x: Rows) -> Tensor:
    """Return latents in training precision: of a table in one go, of volumes in small batches."""
    if isinstance(x, Tensor):
        return one.latent(x)
    return torch.cat([one.latent(part) for part in x.singles()])


def _target_columns(y: Tensor | None, people: int) -> FloatArray:
    """Return the target as regressors, (people, E): classes but the first as 0/1, or the number."""
    if y is None:
        return np.empty((people, 0))
    if y.is_floating_point():
        return y.double().numpy()[:, None]
    classes: FloatArray = np.eye(int(y.max()) + 1)[y.numpy()][:, 1:]
    return classes
