"""EquivariantPooler: Algorithm 1 as a scikit-learn estimator."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.linear_model import RidgeCV
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from equipool import distributed
from equipool.data.volumes import Volumes
from equipool.estimators.harmonizer import given_covariates
from equipool.estimators.pooling_estimator import (
    Front,
    PoolingEstimator,
    Rows,
    TrainingData,
    dense,
    parts,
    through,
    with_site,
)
from equipool.exceptions import InputError
from equipool.groups import CovariateAction, FrameTau, LearnedTau
from equipool.nn import correlation_loss, equivariance_loss, mlp, mmd, prediction_loss, reconstruction_loss
from equipool.nn.networks import Adversary
from equipool.randomness import row_noise, seed_for, seeded
from equipool.sites.effect import FloatArray

Losses = dict[str, Tensor]

START_LENGTH = 3.0  # of the designated plane, beside coordinates of about 0.5
FLOOR = 0.25  # least length of the designated planes, see FrameTau.to_sphere

# The settings of the paper's text, where they differ from our defaults.
PAPER: dict[str, Any] = {"tau": "learned", "generator": "all-ones", "match": "phi", "turning_planes": None}
PAPER |= {"power": None, "front": None, "bounded": False, "finetune": False, "adversary": 0.0}
PAPER |= {"prediction": 1.0, "latent_reconstruction": 0.1, "mmd": 0.1, "independence": 0.0}
PRESETS: dict[str, dict[str, Any]] = {"default": {}, "paper": PAPER}


class StageOne(nn.Module):
    """An autoencoder on the sphere, and τ, which predicts the covariates from a latent."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, tau: FrameTau) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.tau = tau

    def latent(self, x: Tensor) -> Tensor:
        """Return ℓ = E(x), a point of the sphere."""
        return self.tau.to_sphere(self.encoder(x), floor=FLOOR)

    @torch.no_grad()
    def calibrate(self, x: Rows, c: Tensor) -> None:
        """Set the zero of ĉ, with latents in training precision."""
        if c.shape[1]:
            self.tau.calibrate(torch.cat([self.latent(part) for part in parts(x)]), c)

    @torch.no_grad()
    def start_at_ridge(self, x: Rows, c: Tensor) -> None:
        """Let a linear encoder on components start where a ridge regression predicts the covariates' phases.

        With few participants, gradient descent on equation (4) overfits before it gets there.
        """
        encoder: Any = self.encoder
        components, linear = encoder
        planes = list(self.tau.planes)
        phase = (c.double() @ self.tau.action.frequencies[planes].double().mT).numpy()
        wanted = np.stack([np.cos(phase), np.sin(phase)], axis=-1).reshape(len(phase), -1)
        scores = torch.cat([components(part) for part in parts(x)]).double().numpy()
        ridge = RidgeCV(np.logspace(-2, 5, 15)).fit(scores, START_LENGTH * wanted)
        columns = [2 * plane + k for plane in planes for k in (0, 1)]
        linear.weight[columns] = torch.as_tensor(ridge.coef_, dtype=linear.weight.dtype)
        linear.bias[columns] = torch.as_tensor(ridge.intercept_, dtype=linear.bias.dtype)


class StageTwo(nn.Module):
    """A code that is equivariant by construction, Ψ back to the latents, and h from the code to the target.

    ``out`` is the covariates' action on the codes. With ``power``, codes pass a channel: each has this length
    before noise of unit variance is added to each of its numbers.
    """

    def __init__(
        self, out: CovariateAction, n_latent: int, n_outputs: int, *, hidden: int, power: float | None
    ) -> None:
        super().__init__()
        self.out = out
        self.b = mlp(n_latent, out.n, hidden=hidden)
        self.psi = mlp(out.n, n_latent, hidden=hidden)
        self.predictor = mlp(out.n, n_outputs, hidden=hidden) if n_outputs else None
        self.power = power

    def reference_code(self, latent: Tensor) -> Tensor:
        """Return b(τ(ℓ)⁻¹ℓ), the code at the reference covariates."""
        code = self.b(latent)
        return code if self.power is None else self.power * nn.functional.normalize(code, dim=-1)

    def phi(self, latent: Tensor, c: Tensor) -> Tensor:
        """Return Φ(ℓ) = τ(ℓ)·b(τ(ℓ)⁻¹ℓ) for latents at the reference; it has the length of b."""
        return self.out(c).apply(self.reference_code(latent))

    def through_channel(self, code: Tensor) -> Tensor:
        """Add the channel's noise, drawn anew at each call: for training."""
        if self.power is None:
            return code
        # Drawn on the CPU, from the generator that was seeded: the same in every process.
        return code + torch.randn(code.shape, dtype=code.dtype).to(code.device)


class TwoStages(nn.Module):
    """Both stages after training: from scaled features to the code."""

    def __init__(self, one: StageOne, two: StageTwo) -> None:
        super().__init__()
        self.one, self.two = one, two

    def code(self, x: Tensor) -> Tensor:
        """Return Φ(E(x))."""
        return self.two.phi(*self.one.tau.at_reference(self.one.latent(x)))

    def tau(self, x: Tensor) -> Tensor:
        """Return τ(E(x)) as a vector."""
        return self.one.tau.vector(self.one.latent(x))

    def rebuilt(self, x: Tensor) -> Any:
        """Return D(Ψ(Φ(E(x))))."""
        return self.one.decoder(self.two.psi(self.code(x)))

    @property
    def predictor(self) -> nn.Module | None:
        """The module h, from Φ to the target."""
        return self.two.predictor


@dataclass(kw_only=True, eq=False, repr=False)
class EquivariantPooler(PoolingEstimator):
    """Learn a code that turns with the covariates and does not depend on the site.

    Stage one learns a latent sphere on which the covariates act by rotation; stage two a code on it that is
    equivariant to them by construction and invariant to the site by training. ``site`` and ``covariates`` are
    given to ``fit``; ``transform`` and ``predict`` need X alone.

    Parameters
    ----------
    n_latent, hidden
        Dimension of the sphere and of the code, and the width of the hidden layers.
    encoder
        ``"auto"``: ``"mlp"`` for tables, ``"resnet"`` for volumes, the paper's both; ``"linear"`` encoder and
        decoder overfit less where participants are few. Or your torch module, from (rows, features), or for
        volumes from (rows, 1, x, y, z), to (rows, n_latent).
    decoder
        Your module for the way back; for volumes it may return boxes or rows of the mask's voxels.
    front
        A harmonizer, not fitted, that infers the site and removes it from the encoder's input. ``"auto"``:
        ``ImageHarmonizer()`` for volumes, none for tables; ``True``: one for both; ``None``: none.
    tau
        ``"frame"``: exact by construction; ``"learned"``: the paper's network.
    generator
        ``"spread"``, ``"all-ones"`` (the paper's) or frequencies Ω (n_latent // 2, K).
    match
        ``"transported"``: sites are compared after every code is moved to one reference value of the
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
        Factors of stage two; ``adversary`` weights a network that predicts the site.
    bounded
        Train classes with 1 − p(y) after a while of cross-entropy; see :func:`equipool.nn.prediction_loss`.
    finetune
        Let stage two go on training the encoder, with the losses of stage one kept.
    task
        ``"class"`` or ``"number"`` for the target; ``None``: guessed.
    steps, batch_size, learning_rate, weight_decay, patience
        Of each stage; ``batch_size=None`` is a fortieth of the rows, from 32 to 512. Stage one stops early
        on held-out rows; stage two does not, since a minimax game has no loss to stop at.
    checkpoint
        A folder in which the state of training is kept about twice a minute: the same call resumes from it
        after a kill, and ends with the bits of a run that was not killed. Another call is refused.
    verbose, random_state
        Show on the terminal how far training is. The same number gives the same bits; ``None`` is 0.

    Attributes
    ----------
    sites_, classes_, covariates_, front_
        The sites, the classes of the target and the covariates of the fit; the fitted harmonizer or ``None``.
    history_
        Losses of both stages, epoch by epoch.
    """

    front: Front = "auto"
    tau: Literal["frame", "learned"] = "frame"
    generator: Any = "spread"
    match: Literal["phi", "transported"] = "phi"
    turning_planes: int | None = 1
    power: float | None = 6.0
    equivariance: float = 1.0
    independence: float = 1.0
    prediction: float = 3.0
    latent_reconstruction: float = 0.01
    mmd: float = 3.0
    adversary: float = 0.5
    bounded: bool = True
    finetune: bool = True

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """Return an estimator with the settings of a preset: ``"default"``, or ``"paper"`` for its text."""
        if name not in PRESETS:
            raise InputError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **changes})

    def _fit_networks(self, data: TrainingData, held: TrainingData, whole: TrainingData) -> nn.Module:
        self.history_: dict[str, Any] = {}
        one = self._fit_stage_one(data, held)
        return TwoStages(one, self._fit_stage_two(one, whole))

    def _actions(self, n_covariates: int) -> tuple[CovariateAction, CovariateAction]:
        """Return the action on latents and codes, and the one in which all planes turn, for τ as a vector."""
        count = max(n_covariates, 1)
        if isinstance(self.generator, str) and self.generator == "spread":
            action = CovariateAction.spread(self.n_latent, count, turning=self.turning_planes)
            return action, CovariateAction.spread(self.n_latent, count)
        if not isinstance(self.generator, str):
            action = CovariateAction(self.generator, n=self.n_latent)
        elif self.generator == "all-ones":
            action = CovariateAction.all_ones(self.n_latent, count)
        else:
            raise InputError(f"generator must be 'spread', 'all-ones' or an array. Got {self.generator!r}.")
        return action, action

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
        return StageTwo(one.tau.action, self.n_latent, n_outputs, hidden=self.hidden, power=self.power)

    def _fit_stage_one(self, data: TrainingData, held: TrainingData) -> StageOne:
        with seeded(self._seed, "stage one") as generator:
            one = self._build_stage_one(data.x.shape[1], data.c.shape[1])
            self._start_components(one, data)
            if self.encoder == "components" and self.tau == "frame" and data.c.shape[1]:
                one.start_at_ridge(data.x, data.c)
            one.to(distributed.device())

            def step(batch: TrainingData, *_: Any) -> Losses:
                return self._stage_one_losses(one, batch)

            more = {"validate": partial(self._mean_loss, step, held) if len(held.x) > 1 else None}
            self.history_["stage one"] = self._train("stage one", one, step, data, generator, **more)
            one.cpu().calibrate(data.x, data.c)
        return one

    def _stage_one_losses(self, one: StageOne, data: TrainingData) -> Losses:
        """Return the terms of L_stage1 + ‖x − D(E(x))‖².

        The third term is ours: a latent at the reference covariates must not depend on them, or turning it
        would not be all of moving a participant to another age. Each process gives its rows of x, and all c.
        """
        x, c = dense(data.x), data.c
        part = one.latent(x)
        terms = {"reconstruction": self._reconstruction(x, one.decoder(part))}
        if c.shape[1]:
            latent = distributed.gather(part)
            turned = equivariance_loss(one.tau.vector(latent), c, one.tau.orbit).to(x.dtype)
            terms["equivariance"] = self.equivariance * turned
            if self.independence != 0:
                explained = correlation_loss(one.tau.at_reference(latent)[0], c)
                terms["independence"] = self.independence * explained
        return terms

    def _fit_stage_two(self, one: StageOne, data: TrainingData) -> StageTwo:
        with seeded(self._seed, "stage two") as generator:
            two = self._build_stage_two(one, self._n_outputs())
            opposed = self.adversary and len(self.sites_) > 1
            adversary = Adversary(self.n_latent, data.site, len(self.sites_)) if opposed else None
            both = nn.ModuleList([one, two]).to(distributed.device())
            warm_up = max(self._schedule(len(data.x))[1] // 5, 1)

            def step(batch: TrainingData, _: Tensor, epoch: int) -> Losses:
                bounded = self.bounded and epoch >= warm_up
                terms, code = self._stage_two_losses(one, two, batch, bounded=bounded)
                if adversary is not None:
                    terms["adversary"] = self.adversary * adversary.play(code, batch.site)
                return terms

            trained = both if self.finetune else two
            more = {"beside": [] if adversary is None else [(adversary.network, adversary.optimiser)]}
            self.history_["stage two"] = self._train("stage two", trained, step, data, generator, **more)
            both.cpu()
            if self.finetune:
                one.calibrate(data.x, data.c)
        return two

    def _stage_two_losses(
        self, one: StageOne, two: StageTwo, data: TrainingData, *, bounded: bool
    ) -> tuple[Losses, Tensor]:
        """Return the terms of L_stage2 + MMD, with those of stage one if it is fine-tuned, and the codes."""
        with torch.set_grad_enabled(self.finetune and torch.is_grad_enabled()):
            latent = distributed.gather(one.latent(dense(data.x)))
            at_reference, c = one.tau.at_reference(latent)
        reference = two.reference_code(at_reference)
        code = two.through_channel(two.out(c).apply(reference))
        rebuilt = reconstruction_loss(latent.detach(), two.psi(code))
        terms = {"latent reconstruction": self.latent_reconstruction * rebuilt}
        if data.y is not None and two.predictor is not None:
            missed = prediction_loss(two.predictor(code), data.y, bounded=bounded)
            terms["prediction"] = self.prediction * missed
        if self.mmd and len(self.sites_) > 1:
            matched = two.through_channel(reference) if self.match == "transported" else code
            terms["mmd"] = self.mmd * mmd(matched, data.site)
        return terms | (self._stage_one_losses(one, data) if self.finetune else {}), code

    def _release(self, code: Tensor, x: Rows) -> Tensor:
        if self.power is None:
            return code
        seed = seed_for(self._seed, "release")
        noise = [row_noise(part.float().numpy(), code.shape[1], seed) for part in parts(x)]
        return code + torch.from_numpy(np.concatenate(noise)).to(code.dtype)

    @torch.no_grad()
    def read_covariates(self, X: Any) -> FloatArray:
        """Return ĉ(ℓ), the covariates as τ predicts them from X, in their units, (rows, K)."""
        x = self._scaled(self._features(X))
        latent = through(self.network_.one.latent, x)
        predicted = self.network_.one.tau.covariate(latent).double().numpy()
        return predicted * [one.scale for one in self.covariates_] + [one.centre for one in self.covariates_]

    @torch.no_grad()
    def transport(self, X: Any, to: Any, *, covariates: Any = None) -> Any:
        """Return the same rows at other covariates: Γ applied to their latents, in the units of X.

        Parameters
        ----------
        X
            Features.
        to
            The covariates to move to, in their units: one value, one for each covariate, or (rows, K).
        covariates
            The present ones; default: as predicted from X.
        """
        check_is_fitted(self, "network_")
        if not self.covariates_:
            raise InputError("This estimator was fitted without covariates; there is nothing to move along.")
        features, one = self._features(X), self.network_.one
        latent = through(one.latent, self._scaled(features))
        rows, width = len(features), len(self.covariates_)
        wanted = np.asarray(to, dtype=object)
        if wanted.ndim < 2 and wanted.size == width:
            wanted = np.broadcast_to(wanted.reshape(1, -1), (rows, width))

        def given(values: Any) -> Tensor:
            return torch.from_numpy(given_covariates(values, self.covariates_, rows).astype(np.float32))

        goal = given(to if hasattr(to, "columns") else wanted)
        source = one.tau.covariate(latent) if covariates is None else given(covariates)
        moved = one.tau.action.transport(latent, source, goal)
        change: FloatArray = (one.decoder(moved) - one.decoder(latent)).numpy()
        change = change * np.where(self.feature_varies_, self.feature_scale_, 0.0)
        if not isinstance(features, Volumes):
            return features + change
        volumes = features.read()
        unchanged = with_site(self.front_, np.zeros_like(change), volumes)
        change = with_site(self.front_, change, volumes) - unchanged
        return features.with_values(np.where(volumes == 0, 0.0, volumes + change))
