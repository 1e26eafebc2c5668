"""Small volumes, and the model fitted to them, for tests."""

import numpy as np
from scipy.ndimage import gaussian_filter

from equipool.data.splits import deal
from equipool.data.volumes import Volumes
from equipool.sites.design import Design
from equipool.sites.volume_model import fit_volume_model

FOLDS = 5


def design_of(site, age=None, target=None):
    """Return the design of participants with one volume each, the target standardised."""
    n = len(site)
    if target is not None:
        target = (target - np.mean(target)) / np.std(target)
    return Design(
        site=np.asarray(site, dtype=np.intp),
        covariates=np.empty((n, 0)) if age is None else np.asarray(age, dtype=float)[:, None],
        target=np.empty((n, 0)) if target is None else np.asarray(target, dtype=float)[:, None],
        weight=np.ones(n),
        fold=deal([site], [], min(FOLDS, n), 0),
        n_sites=int(np.max(site)) + 1,
    )


def fitted(volumes, site, age=None, target=None):
    """Return the model fitted to volumes."""
    return fit_volume_model(volumes, design_of(site, age, target))


def ellipsoid(*shape):
    """Return a mask that leaves air at the edges of its box."""
    places = np.meshgrid(*(np.linspace(-1, 1, size) for size in shape), indexing="ij")
    return sum(place**2 for place in places) < 0.95


def smooth_field(rng, mask, width=1.5):
    """Return a smooth random pattern over the brain with standard deviation 1, (voxels,)."""
    field = gaussian_filter(rng.normal(size=mask.shape), width)[mask]
    return field / field.std()


def volumes_of(rows, mask):
    """Return volumes with these values within the mask."""
    rows = np.asarray(rows, dtype=np.float32)
    return Volumes(mask, np.eye(4), (), rows, np.arange(len(rows)), None)
