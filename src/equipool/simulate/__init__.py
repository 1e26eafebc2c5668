"""Simulated data with known truth: a table of regional volumes, brains of several scanners."""

from equipool.simulate.simulated_table import SimulatedTable, simulate_table

__all__ = ["SimulatedTable", "simulate_table"]
