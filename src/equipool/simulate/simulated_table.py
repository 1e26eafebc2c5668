"""A simulated table of regional volumes from several scanners, whose truth is known."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.data.pooled import PooledDataset
from equipool.exceptions import InputError

FloatArray = NDArray[np.float64]

REGIONS = (
    "hippocampus amygdala entorhinal fusiform temporal_inf temporal_mid insula precuneus cuneus lingual "
    "frontal_sup frontal_mid orbital_lat orbital_med cingulate_ant cingulate_post parietal_inf parietal_sup "
    "caudate putamen pallidum thalamus accumbens ventricles"
).split()


@dataclass(frozen=True, eq=False)
class SimulatedTable:
    """A simulated pool and its truth.

    ``clean`` (participants, features) are the pool's features without site effects. ``shift`` and ``scale``
    are (sites, features): without mixing and bending, feature = mean + shift + scale · (clean − mean).
    ``affected`` (features,) says which of them the disease changes.
    """

    pool: PooledDataset
    clean: FloatArray
    shift: FloatArray
    scale: FloatArray
    affected: NDArray[np.bool_]


def simulate_table(
    *,
    sites: Sequence[str] = ("GE", "Philips", "Siemens"),
    people: int = 120,
    features: int = 12,
    overlap: float = 0.0,
    ages: tuple[float, float] = (20.0, 90.0),
    patients: float = 0.35,
    disease: float = 0.08,
    noise: float = 0.03,
    mixing: float = 0.0,
    bending: float = 0.0,
    joint: float = 0.0,
    random_state: int = 0,
) -> SimulatedTable:
    """Simulate regional volumes from several scanners whose ages overlap to a given degree.

    Parameters
    ----------
    sites
        Names of the scanners.
    people, features
        Participants at each site; regions measured.
    overlap
        From 0, where the sites' ages do not overlap, to 1, where all cover the whole range ``ages``.
    patients, disease, noise
        Share of participants with the disease; the share of an affected region that it takes; standard
        deviation of the noise.
    mixing, bending
        Strength of the sites' effects on the covariance of the deviations from the mean, by a linear map,
        and on their distribution, by a monotone warp: 0 for none, 0.3 for strong effects.
    joint
        Strength of a site's nonlinear effects by latent factors that all features of a participant share,
        such as head size: 0 for none, 0.3 for strong effects.
    random_state
        The same number gives the same table.

    Examples
    --------
    >>> truth = simulate_table(overlap=0.0)
    >>> truth.pool
    PooledDataset: 360 rows, 12 features, 3 sites (GE, Philips, Siemens), covariates age, target dx
    >>> bool(np.allclose(truth.pool.X, truth.clean))
    False
    """
    if not 0 <= overlap <= 1:
        raise InputError(f"overlap must lie between 0 (none) and 1 (full). Got {overlap}.")
    if random_state < 0:
        raise InputError(f"The seed must not be negative. Got {random_state}.")
    rng = np.random.default_rng(random_state)
    site = np.repeat(np.arange(len(sites)), people)
    # Each site's window of ages: adjacent at overlap 0, the whole range at overlap 1.
    edges = np.linspace(*ages, len(sites) + 1)
    start = edges[:-1] - overlap * (edges[:-1] - ages[0])
    stop = edges[1:] + overlap * (ages[1] - edges[1:])
    age = start[site] + (stop - start)[site] * rng.beta(2.0, 2.0, len(site))
    sick = rng.random(len(site)) < patients
    mean = rng.uniform(3.0, 12.0, features)
    years = (age - ages[0]) / (ages[1] - ages[0])
    deviation, affected, factors = _anatomy(rng, years, np.where(sick, disease, 0.0), features, noise)
    clean = mean * (1 + deviation)
    shift = 0.12 * mean * rng.standard_normal((len(sites), features))
    scale = np.exp(0.2 * rng.standard_normal((len(sites), features)))
    deviations = _mixed_and_warped(rng, clean - mean, site, mixing, bending)
    # Effects of sites by latent factors: parabolas, steps and products, weighted by site.
    first, second = factors[:, 0], factors[:, 1]
    curves = np.column_stack([(first**2 - 1) / np.sqrt(2), np.tanh(2 * second), first * second])
    weights = np.random.default_rng((random_state, 2)).standard_normal((len(sites), 3, features)) / np.sqrt(3)
    coupled = np.einsum("nk,nkp->np", curves, weights[site])
    deviations += joint * coupled * (clean - mean).std(axis=0)
    names = [REGIONS[k] if k < len(REGIONS) else f"region_{k + 1}" for k in range(features)]
    pool = PooledDataset.from_arrays(
        pd.DataFrame(mean + shift[site] + scale[site] * deviations, columns=names),
        site=np.array(sites)[site],
        covariates=age,
        covariate_names=["age"],
        units={"age": "years"},
        y=np.where(sick, "AD", "CN"),
        ids=[f"sub-{k + 1:04d}" for k in range(len(site))],
    )
    order = np.argsort(np.array(sites))  # a pool's sites are in the order of their names
    return SimulatedTable(replace(pool, target_name="dx"), clean, shift[order], scale[order], affected)


def _anatomy(
    rng: np.random.Generator, years: FloatArray, effect: FloatArray, features: int, noise: float
) -> tuple[FloatArray, NDArray[np.bool_], FloatArray]:
    """Return deviations relative to the mean volume, the affected features, and the latent factors."""
    loss = rng.uniform(0.05, 0.3, features) * np.sign(rng.random(features) - 0.15)
    ageing = -np.outer(years + 0.8 * years**2, loss) / 1.8
    affected = rng.random(features) < 0.4
    factors = rng.standard_normal((len(years), 3))
    shared = 0.06 * factors @ rng.standard_normal((3, features)) / np.sqrt(3)
    deviation = ageing - np.outer(effect, affected) + shared
    return deviation + noise * rng.standard_normal(deviation.shape), affected, factors


def _mixed_and_warped(
    rng: np.random.Generator, deviations: FloatArray, site: NDArray[np.intp], mixing: float, bending: float
) -> FloatArray:
    """Return deviations after each site's linear map and monotone warp."""
    result, spread, width = deviations.copy(), deviations.std(axis=0), deviations.shape[1]
    for s in np.unique(site) if mixing or bending else ():
        mixer = np.eye(width) + mixing * rng.standard_normal((width, width)) / np.sqrt(width)
        part = deviations[site == s] / spread @ mixer
        # A quadratic whose slope stays positive within 2 standard deviations.
        curvature = np.clip(bending * rng.standard_normal(width), -0.24, 0.24)
        result[site == s] = spread * (part + curvature * (np.clip(part, -2, 2) ** 2 - 1))
    return result
