"""Pools of people: reading tables, holding them, splitting them, making them up with known truth."""

from equipool.data.pooled import Covariate, PooledDataset
from equipool.data.simulate import SimulatedTable, simulate_table
from equipool.data.tables import check, read_table

__all__ = ["Covariate", "PooledDataset", "SimulatedTable", "check", "read_table", "simulate_table"]
