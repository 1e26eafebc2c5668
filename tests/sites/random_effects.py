"""Site effects with numbers drawn at random, and contexts for them."""

import numpy as np

from equipool.sites.coupling import Coupling
from equipool.sites.covariance import Covariance
from equipool.sites.design import Design
from equipool.sites.effect import Composition, Context
from equipool.sites.shift_scale import ShiftScale
from equipool.sites.warp import WIDTH, Warp


def context(site, rows, *, predicted=None, covariates=None):
    """Return the context of rows (n, p) at a site, or at one site each."""
    predicted = np.zeros_like(rows) if predicted is None else predicted
    covariates = np.empty((len(rows), 0)) if covariates is None else covariates
    return Context(np.broadcast_to(site, len(rows)), covariates, predicted)


def design_of(site, c=None, *, weight=None, folds=3, target=None):
    """Return a design with participants dealt to folds in turn."""
    n = len(site)
    empty = np.empty((n, 0))
    return Design(
        site=site,
        covariates=empty if c is None else c,
        target=empty if target is None else target,
        weight=np.ones(n) if weight is None else weight,
        fold=np.arange(n) % folds,
        n_sites=int(site.max()) + 1,
    )


def shift_scale(rng, sites=3, p=4, *, scales_trend=False):
    return ShiftScale(
        scales_trend=scales_trend,
        shift=rng.normal(size=(sites, p)),
        error=rng.uniform(0.1, 0.3, (sites, p)),
        scale=np.exp(0.5 * rng.normal(size=(sites, p))),
        between=rng.uniform(0.5, 2.0, p),
        scale_weight=rng.uniform(1.0, 20.0, p),
        variance=rng.uniform(0.5, 2.0, p),
    )


def covariance(rng, sites=3, p=4, *, shrinkage=5.0, n=40):
    """Return the covariances of sites that mix features, of so many participants each."""
    site = np.repeat(np.arange(sites), n)
    mixing = np.eye(p) + 0.4 * rng.normal(size=(sites, p, p))
    residuals = np.einsum("ip,ipq->iq", rng.normal(size=(len(site), p)), mixing[site])
    residuals -= np.array([residuals[site == s].mean(axis=0) for s in range(sites)])[site]
    return Covariance.fit(residuals, design_of(site), shrinkage=shrinkage)


def curves(rng, *shape):
    result = np.exp(0.5 * rng.normal(size=(*shape, WIDTH)))
    result[..., 0] = -2.5 + rng.normal(size=shape)
    return result


def warp(rng, sites=3, p=4, *, columns=None):
    columns = np.arange(p) if columns is None else np.asarray(columns)
    b = len(columns)
    return Warp(
        columns=columns,
        scale=np.exp(rng.normal(size=(sites, b))),
        offset=rng.normal(size=(sites, b)),
        curves=curves(rng, sites, b),
        pool=curves(rng, b),
        centre=rng.normal(size=b),
        width=np.exp(rng.normal(size=b)),
    )


def coupling(rng, sites=3, p=4, *, q=2, covariates=2, hidden=5):
    axes = np.linalg.qr(rng.normal(size=(p, q)))[0]
    heads = rng.normal(size=(sites, hidden, p))
    return Coupling(
        share=0.5,
        middle=rng.normal(size=covariates),
        reach=rng.uniform(1, 3, covariates),
        scores=axes,
        weights=rng.normal(size=(max(2 * covariates, 1) + q, hidden)),
        bias=rng.normal(size=hidden),
        heads=heads - heads @ axes @ axes.T,
        head_of=np.arange(sites),
        deviation=np.full(p, 10.0),
    )


def composition(rng, sites=3, p=4):
    effects = (
        warp(rng, sites, p),
        shift_scale(rng, sites, p),
        covariance(rng, sites, p),
        coupling(rng, sites, p),
    )
    return Composition(effects)
