"""The paper's baselines, on the pooler's backbone and with its interface.

Each has the same encoder, decoder and predictor as :class:`EquivariantPooler`, an ordinary vector for a code,
and differs in one term of the loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipool import distributed
from equipool.estimators.pooling_estimator import VALIDATION_ROWS, PoolingEstimator, TrainingData, dense
from equipool.nn import grouped_mmd, match_loss, mlp, mmd, prediction_loss
from equipool.nn.networks import Adversary
from equipool.nn.training import Trained
from equipool.randomness import seeded

N_GROUPS = 5  # equal parts of each covariate's range

SiteTerm = Callable[[Tensor, TrainingData, Tensor], Tensor]  # of codes, batch and rows


class Autoencoder(nn.Module):
    """Encoder, decoder and predictor; a method without a τ has its code in the place of τ(ℓ)."""

    def __init__(
        self, encoder: nn.Module, decoder: nn.Module, n_latent: int, n_outputs: int, *, hidden: int
    ) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.predictor = mlp(n_latent, n_outputs, hidden=hidden) if n_outputs else None

    def code(self, x: Tensor) -> Any:
        """Return the code."""
        return self.encoder(x)

    tau = code

    def rebuilt(self, x: Tensor) -> Any:
        """Return D(code)."""
        return self.decoder(self.code(x))


@dataclass(kw_only=True, eq=False, repr=False)
class NaivePooler(PoolingEstimator):
    """Pool and predict; nothing is done about the site or the covariates.

    Parameters
    ----------
    prediction, reconstruction
        Factors of the loss.
    invariance
        Factor of the method's term for the site; Naive has none.
    front
        As for :class:`EquivariantPooler`, but ``None`` by default.
    n_latent, encoder, decoder, hidden, task, steps, batch_size, learning_rate, weight_decay, \
    patience, checkpoint, verbose, random_state
        As for :class:`EquivariantPooler`; ``n_latent`` is the dimension of the code.

    Attributes
    ----------
    dropped_
        Share of the training rows that the method's term for the site could not use.
    """

    prediction: float = 1.0
    invariance: float = 1.0

    def _fit_networks(self, data: TrainingData, held: TrainingData, whole: TrainingData) -> nn.Module:
        several = len(self.sites_) > 1
        with seeded(self._seed, type(self).__name__) as generator:
            network = self._build(whole.x.shape[1], whole.c.shape[1], self._n_outputs())
            self.dropped_ = 0.0
            site_term, beside = self._site_term(whole)
            data = data if site_term is None else whole
            self._start_components(network, data)
            network.to(distributed.device())

            def step(batch: TrainingData, rows: Tensor, _: int) -> dict[str, Tensor]:
                terms, code = self._common_terms(network, batch)
                if site_term is not None and several:
                    terms["invariance"] = self.invariance * site_term(code, batch, rows)
                return terms

            def validate() -> float:
                some = held.rows(torch.arange(min(len(held.x), VALIDATION_ROWS)))
                return self._mean_loss(lambda part: self._common_terms(network, part)[0], some)

            more: dict[str, Any] = {"beside": beside if several else []}
            more["validate"] = validate if site_term is None and len(held.x) > 1 else None
            self.history_ = self._train("training", network, step, data, generator, **more)
        return network.cpu()

    def _site_term(self, data: TrainingData) -> tuple[SiteTerm | None, list[Trained]]:
        """Return the method's term for the site, and what else is trained, with its optimiser."""
        return None, []

    def _build(self, n_features: int, n_covariates: int, n_outputs: int) -> Autoencoder:
        return Autoencoder(*self._coders(n_features), self.n_latent, n_outputs, hidden=self.hidden)

    def _common_terms(self, network: Autoencoder, batch: TrainingData) -> tuple[dict[str, Tensor], Tensor]:
        """Return the terms that all methods have, and the codes of the whole batch."""
        x = dense(batch.x)
        part = network.code(x)
        terms = {"reconstruction": self._reconstruction(x, network.decoder(part))}
        code = distributed.gather(part)
        if batch.y is not None and network.predictor is not None:
            terms["prediction"] = self.prediction * prediction_loss(network.predictor(code), batch.y)
        return terms, code


class MMDPooler(NaivePooler):
    """MMD (Li et al. 2014): make the sites' codes alike in distribution, whatever the covariates.

    Corrects the site. Where sites differ in age, it removes the difference in age with that of the scanner.
    """

    def _site_term(self, data: TrainingData) -> tuple[SiteTerm, list[Trained]]:
        return lambda code, batch, rows: mmd(code, batch.site), []


class CAIPooler(NaivePooler):
    """CAI (Xie et al. 2017): a discriminator predicts the site and the encoder learns to mislead it.

    Corrects the site, not the covariates; a minimax game, which may not settle.
    """

    def _site_term(self, data: TrainingData) -> tuple[SiteTerm, list[Trained]]:
        adversary = Adversary(self.n_latent, data.site, len(self.sites_))
        beside: list[Trained] = [(adversary.network, adversary.optimiser)]
        return lambda code, batch, rows: adversary.play(code, batch.site), beside


class SubsamplingPooler(NaivePooler):
    """SS, sub-sampling (Zhou et al. 2018): the MMD within groups of like covariates, averaged.

    Corrects site and covariates. Rows whose group has none of another site are dropped from the criterion;
    their share is ``dropped_``.
    """

    def _site_term(self, data: TrainingData) -> tuple[SiteTerm, list[Trained]]:
        group = covariate_groups(data.c)
        self.dropped_ = share_without_counterpart(group, data.site)
        return lambda code, batch, rows: grouped_mmd(code, batch.site, group[rows].to(code.device)), []


class RandMatchPooler(NaivePooler):
    """RM, RandMatch (Motiian et al. 2017): draw codes of random matches across sites together.

    A match has the same class (or like number) and like covariates but another site. Corrects site and
    covariates for rows with a match; the others are dropped from the criterion, ``dropped_``.
    """

    def _site_term(self, data: TrainingData) -> tuple[SiteTerm, list[Trained]]:
        group = covariate_groups(data.c)
        if data.y is not None:
            classes = covariate_groups(data.y.unsqueeze(1)) if data.y.is_floating_point() else data.y
            group = group * (int(classes.max()) + 1) + classes
        group = torch.unique(group, return_inverse=True)[1]
        self.dropped_ = share_without_counterpart(group, data.site)

        def distance_to_matches(code: Tensor, batch: TrainingData, rows: Tensor) -> Tensor:
            return match_loss(code, random_partners(group[rows], batch.site.cpu()).to(code.device))

        return distance_to_matches, []


def covariate_groups(c: Tensor) -> Tensor:
    """Cut each covariate's range into equal parts and number the cells that rows fall into."""
    low, high = c.min(dim=0).values, c.max(dim=0).values
    cells = ((c - low) / (high - low).clamp_min(1e-12) * N_GROUPS).long().clamp(0, N_GROUPS - 1)
    return cells @ N_GROUPS ** torch.arange(c.shape[1] - 1, -1, -1)


def share_without_counterpart(group: Tensor, site: Tensor) -> float:
    """Return the share of rows whose group has no row of another site."""
    cells = torch.unique(torch.stack([group, site], dim=1), dim=0)
    groups, n_sites = torch.unique(cells[:, 0], return_counts=True)
    return 1 - float(torch.isin(group, groups[n_sites > 1]).float().mean())


def random_partners(group: Tensor, site: Tensor) -> Tensor:
    """Draw for each row a random row of the same group and another site; −1 where there is none."""
    allowed = (group.unsqueeze(1) == group) & (site.unsqueeze(1) != site)
    score = torch.rand(allowed.shape).masked_fill(~allowed, -1.0)
    best, partner = score.max(dim=1)
    return torch.where(best >= 0, partner, -1)
