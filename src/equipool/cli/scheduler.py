"""The option of commands whose work can go to a Dask cluster."""

from __future__ import annotations

import argparse

__all__ = ["add_scheduler"]


def add_scheduler(command: argparse.ArgumentParser) -> None:
    """Add ``--scheduler``; the command line then runs the command within the cluster."""
    command.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="run on the Dask cluster with this scheduler, such as tcp://10.0.0.1:8786 (default: here)",
    )
