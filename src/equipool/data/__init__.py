"""Pools of people: reading tables and images, holding and splitting them, making them up with known truth."""

from equipool.data.bids import find_images, read_bids
from equipool.data.guess import guess_roles
from equipool.data.images import Volumes, check_volumes, write_volume
from equipool.data.pooled import Covariate, PooledDataset
from equipool.data.presets import read_adcp, read_adni
from equipool.data.simulate import SimulatedTable, simulate_table
from equipool.data.tables import check, read_table

__all__ = [
    "Covariate",
    "PooledDataset",
    "SimulatedTable",
    "Volumes",
    "check",
    "check_volumes",
    "find_images",
    "guess_roles",
    "read_adcp",
    "read_adni",
    "read_bids",
    "read_table",
    "simulate_table",
    "write_volume",
]
