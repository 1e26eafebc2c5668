"""The affine site model in closed form: a trend that all sites share, and each site's shift and scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["AffineSites", "fit_affine_sites"]

SHRINKAGE = 10.0  # people's worth of the pooled scale that each site's own is mixed with


@dataclass(frozen=True)
class AffineSites:
    """What each site adds to and how it stretches what is left of X beside the shared trend.

    Attributes
    ----------
    coefficients
        Of the covariates and their squares, (2K, columns).
    square_means
        Means of the squared covariates, which are subtracted from them, (K,).
    shift
        (sites, columns); their mean over people is 0.
    centre
        (columns,): the value at covariates 0 without a site.
    scale
        (sites, columns): ratio of a site's spread to the pooled one, shrunk towards 1 for small sites.
    """

    coefficients: Tensor
    square_means: Tensor
    shift: Tensor
    centre: Tensor
    scale: Tensor

    def remove(self, x: Tensor, c: Tensor, site: Tensor) -> Tensor:
        """Return x (rows, columns) without the shift and scale of its site; the trend is kept."""
        trend = self.centre + _powers(c, self.square_means) @ self.coefficients
        return trend + (x - trend - self.shift[site]) / self.scale[site]


def fit_affine_sites(x: Tensor, c: Tensor, site: Tensor) -> AffineSites:
    """Fit by least squares on covariates, their squares and sites; then the residuals' spread by site.

    A ridge on the squares keeps the trend straight where the sites' covariates do not overlap and its
    curvature could not be told from the sites' shifts.
    """
    count = int(site.max()) + 1
    dummies = nn.functional.one_hot(site, count).to(x.dtype)
    square_means = c.square().mean(dim=0)
    powers = _powers(c, square_means)
    design = torch.cat([dummies, powers], dim=1)
    ridge = x.new_zeros(design.shape[1])
    ridge[count:] = 1e-9 * len(x)
    ridge[count + c.shape[1] :] = 1e-2 * len(x)
    solution = torch.linalg.solve(design.mT @ design + torch.diag(ridge), design.mT @ x)
    solution = solution.contiguous()  # as a file would give it back: the same order of sums, the same bits
    shift, coefficients = solution[:count], solution[count:]
    centre = (dummies @ shift).mean(dim=0)
    squared = (x - design @ solution).square()
    people = dummies.sum(dim=0).unsqueeze(-1)
    pooled = squared.mean(dim=0)
    own = (dummies.mT @ squared + SHRINKAGE * pooled) / (people + SHRINKAGE)
    still = pooled <= 1e-18
    scale = torch.where(still, 1.0, (own / pooled.masked_fill(still, 1.0)).sqrt())
    return AffineSites(coefficients, square_means, shift - centre, centre, scale)


def _powers(c: Tensor, square_means: Tensor) -> Tensor:
    return torch.cat([c, c.square() - square_means], dim=1)
