"""Pools of several sites: reading tables and images, holding, splitting and writing them."""

from equipool.data.bids import find_images, read_bids
from equipool.data.covariates import Covariate
from equipool.data.nifti import check_volumes, write_volume
from equipool.data.pooled import PooledDataset
from equipool.data.presets import read_adcp, read_adni
from equipool.data.roles import guess_roles
from equipool.data.tables import check, read_table
from equipool.data.volumes import Volumes

__all__ = [
    "Covariate",
    "PooledDataset",
    "Volumes",
    "check",
    "check_volumes",
    "find_images",
    "guess_roles",
    "read_adcp",
    "read_adni",
    "read_bids",
    "read_table",
    "write_volume",
]
