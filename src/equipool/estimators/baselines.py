"""The paper's baselines, on the pooler's backbone and with its interface.

Each has the same encoder, decoder and predictor as :class:`EquivariantPooler`, an ordinary vector for a code,
and differs in one term of the loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.checks import Task
from equipool.estimators.pooling_estimator import PoolingEstimator
from equipool.estimators.training_data import TrainingData, dense
from equipool.nn import (
    EncoderKind,
    grouped_mmd,
    match_loss,
    mlp,
    mmd,
    prediction_loss,
    reconstruction_loss,
    site_batches,
    train,
)
from equipool.nn.adversary import Opponent
from equipool.nn.training import Trained
from equipool.randomness import seeded

__all__ = ["CAIPooler", "MMDPooler", "NaivePooler", "RandMatchPooler", "SubsamplingPooler"]

VALIDATION_ROWS = 1024


class Autoencoder(nn.Module):
    """Encoder, decoder and predictor."""

    def __init__(
        self, encoder: nn.Module, decoder: nn.Module, n_latent: int, n_outputs: int, *, hidden: int
    ) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.predictor = mlp(n_latent, n_outputs, hidden=hidden) if n_outputs else None

    def code(self, x: Tensor) -> Tensor:
        """Return the code."""
        code: Tensor = self.encoder(x)
        return code

    def tau(self, x: Tensor) -> Tensor:
        """Return what stands for τ(ℓ): a method without a τ has its code."""
        return self.code(x)

    def rebuilt(self, x: Tensor) -> Tensor:
        """Return D(code)."""
        volume: Tensor = self.decoder(self.code(x))
        return volume


class NaivePooler(PoolingEstimator):
    """Pool and predict; nothing is done about the site or the covariates.

    Parameters
    ----------
    n_latent, encoder, decoder, hidden
        Dimension of the code; encoder and decoder; width of the hidden layers; as for
        :class:`EquivariantPooler`.
    prediction, reconstruction
        Factors of the loss.
    invariance
        Factor of the method's own term; Naive has none.
    task, class_weight, steps, batch_size, learning_rate, weight_decay, patience, validation_fraction
        As for :class:`EquivariantPooler`.
    checkpoint, verbose, random_state
        As for :class:`EquivariantPooler`.

    Attributes
    ----------
    dropped_
        Share of the training rows that the method's own term could not use.
    """

    def __init__(
        self,
        *,
        n_latent: int = 30,
        encoder: EncoderKind = "auto",
        decoder: nn.Module | None = None,
        hidden: int = 64,
        prediction: float = 1.0,
        reconstruction: float = 0.02,
        invariance: float = 1.0,
        task: Task | None = None,
        class_weight: Literal["balanced"] | None = None,
        steps: int = 1500,
        batch_size: int | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
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
        self.prediction = prediction
        self.reconstruction = reconstruction
        self.invariance = invariance
        self.task = task
        self.class_weight = class_weight
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.checkpoint = checkpoint
        self.verbose = verbose
        self.random_state = random_state

    def _fit_networks(self, data: TrainingData, held: TrainingData, everybody: TrainingData) -> nn.Module:
        data = data if self._stops_early else everybody
        with seeded(self._seed, type(self).__name__) as generator:
            network = self._build(data.x.shape[1], data.c.shape[1], self._n_outputs())
            self._sites = int(data.site.max()) + 1
            self._start(data)
            self._start_components(network, data)
            network.to(distributed.device())
            size, epochs = self._schedule(len(data.x))

            def step(rows: Tensor, _: int) -> dict[str, Tensor]:
                batch = data.rows(rows).ready()
                terms, code = self._common_terms(network, batch)
                if self._sites > 1:
                    own = self._own_term(code, batch, rows)
                    terms |= {} if own is None else {"invariance": self.invariance * own}
                return terms

            @torch.no_grad()
            def validate() -> float:
                part = held.rows(torch.arange(min(len(held.x), VALIDATION_ROWS)))
                return self._mean_loss(lambda part: self._common_terms(network, part)[0], part)

            stops = self._stops_early and len(held.x) > 1
            self.history_ = train(
                network,
                step,
                lambda: site_batches(data.site, size, generator),
                epochs=epochs,
                validate=validate if stops else None,
                progress=type(self).__name__ if self.verbose else None,
                checkpoint=self._checkpoint("training"),
                generator=generator,
                beside=self._beside(),
                **self._training,
            ).epochs
        return network.cpu()

    def _build(self, n_features: int, n_covariates: int, n_outputs: int) -> Autoencoder:
        return Autoencoder(*self._coders(n_features), self.n_latent, n_outputs, hidden=self.hidden)

    def _common_terms(self, network: Autoencoder, batch: TrainingData) -> tuple[dict[str, Tensor], Tensor]:
        """Return the terms that all methods have, and the codes of the whole batch."""
        x = dense(batch.x)
        own = network.code(x)
        rebuilt = distributed.average(reconstruction_loss(x, network.decoder(own)), len(x))
        terms = {"reconstruction": self._voxel_share * self.reconstruction * rebuilt}
        code = distributed.gather(own)
        if batch.y is not None and network.predictor is not None:
            weights = None if self._class_weights is None else self._class_weights.to(code.device)
            missed = prediction_loss(network.predictor(code), batch.y, class_weights=weights)
            terms["prediction"] = self.prediction * missed
        return terms, code

    # The methods differ in what follows.

    _stops_early = True

    def _start(self, data: TrainingData) -> None:
        self.dropped_ = 0.0

    def _own_term(self, code: Tensor, batch: TrainingData, rows: Tensor) -> Tensor | None:
        return None

    def _beside(self) -> list[Trained]:
        """Return what else is trained, with its optimiser."""
        return []


class MMDPooler(NaivePooler):
    """MMD (Li et al. 2014): make the sites' codes alike in distribution, whatever the covariates.

    Corrects the site. Where sites differ in age, it removes the difference in age with that of the scanner.
    """

    _stops_early = False

    def _own_term(self, code: Tensor, batch: TrainingData, rows: Tensor) -> Tensor:
        return mmd(code, batch.site)


class CAIPooler(NaivePooler):
    """CAI (Xie et al. 2017): a discriminator reads the site and the encoder learns to mislead it.

    Corrects the site, not the covariates; a minimax game, which may not settle.
    """

    _stops_early = False

    def _start(self, data: TrainingData) -> None:
        self.dropped_ = 0.0
        self._opponent = Opponent(self.n_latent, data.site, self._sites)

    def _own_term(self, code: Tensor, batch: TrainingData, rows: Tensor) -> Tensor:
        return self._opponent.play(code, batch.site)

    def _beside(self) -> list[Trained]:
        return [self._opponent.trained] if self._sites > 1 else []


class SubsamplingPooler(NaivePooler):
    """SS, sub-sampling (Zhou et al. 2018): the MMD within groups of like covariates, averaged.

    Corrects site and covariates. People whose group has nobody of another site are dropped from the
    criterion; their share is ``dropped_``.
    """

    _stops_early = False
    n_groups = 5

    def _start(self, data: TrainingData) -> None:
        self._group = covariate_groups(data.c, self.n_groups)
        self.dropped_ = 1 - float(has_counterpart(self._group, data.site).float().mean())

    def _own_term(self, code: Tensor, batch: TrainingData, rows: Tensor) -> Tensor:
        return grouped_mmd(code, batch.site, self._group[rows].to(code.device))


class RandMatchPooler(NaivePooler):
    """RM, RandMatch (Motiian et al. 2017): draw codes of random matches across sites together.

    A match has the same class (or like number) and like covariates but another site. Corrects site and
    covariates for those who have a match; the others are dropped from the criterion, ``dropped_``.
    """

    _stops_early = False
    n_groups = 5

    def _start(self, data: TrainingData) -> None:
        group = covariate_groups(data.c, self.n_groups)
        if data.y is not None:
            target = data.y.unsqueeze(1) if data.y.is_floating_point() else None
            classes = data.y if target is None else covariate_groups(target, self.n_groups)
            group = group * (int(classes.max()) + 1) + classes
        self._group = torch.unique(group, return_inverse=True)[1]
        self.dropped_ = 1 - float(has_counterpart(self._group, data.site).float().mean())

    def _own_term(self, code: Tensor, batch: TrainingData, rows: Tensor) -> Tensor:
        return match_loss(code, random_partners(self._group[rows], batch.site.cpu()).to(code.device))


def covariate_groups(c: Tensor, n_groups: int) -> Tensor:
    """Cut each covariate's range into equal parts and number the cells that people fall into."""
    group = torch.zeros(len(c), dtype=torch.int64)
    for column in c.T:
        low, high = column.min(), column.max()
        share = (column - low) / (high - low).clamp_min(1e-12)
        group = group * n_groups + (share * n_groups).long().clamp(0, n_groups - 1)
    return group


def has_counterpart(group: Tensor, site: Tensor) -> Tensor:
    """Say for each person whether somebody of another site is in the group."""
    pairs = torch.stack([group, site], dim=1)
    cells, _ = torch.unique(pairs, dim=0, return_inverse=True)
    numbers, sites_in = torch.unique(cells[:, 0], return_counts=True)
    several = set(numbers[sites_in > 1].tolist())
    return torch.tensor([int(g) in several for g in group])


def random_partners(group: Tensor, site: Tensor) -> Tensor:
    """Draw for each row a random row of the same group and another site; −1 where there is none."""
    allowed = (group.unsqueeze(1) == group) & (site.unsqueeze(1) != site)
    score = torch.rand(allowed.shape).masked_fill(~allowed, -1.0)
    best, partner = score.max(dim=1)
    return torch.where(best >= 0, partner, -1)
