"""Harmonizers that cheat, each in its way: the report must name what they did. And tables to try them on."""

import numpy as np

import equipool as ep
from equipool.data import PooledDataset


def table(seed, *, people=60, sites=3, features=12, overlap=0.6):
    """A simulated pool in which age and disease can be predicted, but not perfectly."""
    names = [f"site {k}" for k in range(sites)]
    more = {"overlap": overlap, "noise": 0.1, "random_state": seed}
    return ep.simulate_table(sites=names, people=people, features=features, **more).pool


class Honest:
    """Each site's mean and standard deviation about a parabola in age become those of the pool, as by ComBat.

    Cheats change ``publish``. ``target`` are the classes of the rows of the fit, 0 for other rows.
    """

    def fit(self, X, y=None, *, site, covariates):
        c = self._scale(covariates, covariates)
        self.sites, self.c = np.unique(site), covariates
        member = (site[:, None] == self.sites).astype(float)
        b = np.linalg.lstsq(np.hstack([member, c, c**2]), X, rcond=None)[0]
        self.trend, share = b[len(self.sites) :], member.mean(axis=0)
        r = X - np.hstack([c, c**2]) @ self.trend
        self.mean = b[: len(self.sites)]
        self.pooled = share @ self.mean
        self.spread = np.stack([r[site == s].std(axis=0) for s in self.sites])
        self.overall = np.sqrt(share @ self.spread**2)
        self.rows = {} if y is None else dict(zip(map(bytes, X), (y == np.unique(y)[-1]) - 0.5, strict=True))
        self.learn(self.residuals(X, site, covariates), np.searchsorted(self.sites, site), self.target(X))
        return self

    def transform(self, X, *, site, covariates):
        r = self.residuals(X, site, covariates)
        c = self._scale(covariates, self.c)
        return self.publish(r, self.pooled + np.hstack([c, c**2]) @ self.trend, c, site, self.target(X))

    def residuals(self, X, site, covariates):
        c, k = self._scale(covariates, self.c), np.searchsorted(self.sites, site)
        return (X - np.hstack([c, c**2]) @ self.trend - self.mean[k]) / self.spread[k] * self.overall

    def target(self, X):
        return np.array([self.rows.get(bytes(row), 0.0) for row in X])[:, None]

    def learn(self, r, k, y):
        pass

    def publish(self, r, trend, c, site, y):
        return trend + r

    @staticmethod
    def _scale(c, of):
        return (c - of.mean(axis=0)) / of.std(axis=0)


class MovesClasses(Honest):
    """Was told the target, and moves its classes half a standard deviation apart in every third feature."""

    def publish(self, r, trend, c, site, y):
        return trend + r + 0.5 * self.overall * y * (np.arange(r.shape[1]) % 3 == 0)


class ExaggeratesChance(Honest):
    """Was told the target, and exaggerates by half whatever the classes differ in, by chance too."""

    def learn(self, r, k, y):
        self.difference = y.T @ (r - r.mean(axis=0)) / max(float((y**2).sum()), 1.0)

    def publish(self, r, trend, c, site, y):
        return trend + r + 0.5 * y * self.difference


class DividesByCovariance(Honest):
    """Was told the target; divides each site's residuals by their covariance without it."""

    def learn(self, r, k, y):
        self.maps, covariances = [], []
        for s in range(len(self.sites)):
            e, v = r[k == s], y[k == s]
            e = e - e.mean(axis=0)
            v = v - v.mean()
            covariances.append(np.cov((e - v * (v.T @ e) / max(float((v**2).sum()), 1e-9)).T))
        pooled = self._root(np.mean(covariances, axis=0), 0.5)
        self.maps = [self._root(one, -0.5) @ pooled for one in covariances]

    def publish(self, r, trend, c, site, y):
        k = np.searchsorted(self.sites, site)
        return trend + np.stack([row @ self.maps[s] for row, s in zip(r, k, strict=True)])

    @staticmethod
    def _root(covariance, power):
        values, vectors = np.linalg.eigh(covariance)
        return (vectors * np.maximum(values, 1e-9) ** power) @ vectors.T


class AddsAge(Honest):
    """Adds half a standard deviation for one of age to one feature."""

    def publish(self, r, trend, c, site, y):
        return trend + r + 0.5 * self.overall * c * (np.arange(r.shape[1]) == 2)


class ShrinksToTrend(Honest):
    """Takes 40 % off whatever age does not predict, as a filter of noise does."""

    def publish(self, r, trend, c, site, y):
        return trend + 0.6 * r


class FiltersNoise(Honest):
    """Shrinks weak patterns of what age does not predict."""

    def learn(self, r, k, y):
        values, self.vectors = np.linalg.eigh(np.cov(r.T))
        self.share = values / (values + np.median(values))

    def publish(self, r, trend, c, site, y):
        return trend + (r @ self.vectors * self.share) @ self.vectors.T


class SiteMeans(Honest):
    """Returns the mean of the site."""

    def publish(self, r, trend, c, site, y):
        return self.mean[np.searchsorted(self.sites, site)]


class AgeTrend(Honest):
    """Returns what age predicts."""

    def publish(self, r, trend, c, site, y):
        return trend


class EmptiesCells(Honest):
    """Was told the target, and empties low cells of one class and high cells of the other."""

    def publish(self, r, trend, c, site, y):
        return np.where(r * np.sign(y) < -1.2 * self.overall, np.nan, trend + r)


class EmptiesOutliers(Honest):
    """Empties what is far from its site's mean, whoever it is of."""

    def publish(self, r, trend, c, site, y):
        return np.where(np.abs(r) > 2.2 * self.overall, np.nan, trend + r)


TARGET = (MovesClasses, ExaggeratesChance, DividesByCovariance)
AGE = (AddsAge, ShrinksToTrend, FiltersNoise, AgeTrend)
NOTHING_KEPT = (SiteMeans, AgeTrend)


def noise_with_holes(seed, *, rows=400, features=20, share=0.8):
    """Columns of pure noise, most cells empty, with an age and a sex that have nothing to do with them."""
    rng = np.random.default_rng(seed)
    site = np.array(["A", "B", "C", "D"])[np.arange(rows) % 4]
    age, sex = rng.uniform(20, 80, rows), np.where(rng.random(rows) < 0.5, "F", "M")
    x = rng.normal(size=(rows, features)) + rng.normal(size=(4, features))[np.arange(rows) % 4]
    x[rng.random(x.shape) < share] = np.nan
    return PooledDataset.from_arrays(
        x, site=site, covariates=age, covariate_names=["age"], y=sex, missing="keep"
    )


def filled_in(pool, seed, *, drawn):
    """The pool's features with empty cells predicted from site, age and target; perhaps with noise."""
    rng, x = np.random.default_rng(seed), pool.features.copy()
    design = np.c_[np.eye(len(pool.sites))[pool.site], pool.C, pool.y == np.unique(pool.y)[0]]
    for column in x.T:
        there = ~np.isnan(column)
        fit = np.linalg.lstsq(design[there], column[there], rcond=None)[0]
        spread = (column[there] - design[there] @ fit).std() if drawn else 0.0
        column[~there] = design[~there] @ fit + spread * rng.normal(size=(~there).sum())
    return x
