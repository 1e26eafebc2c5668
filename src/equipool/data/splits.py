"""Splits that keep strata in proportion and never lose or repeat a row, however small a stratum is.

Rows are put in the order of their strata, at random within each, and dealt out like cards. A stratum is a run
of that order, so its share of every part is right to within one row. Numbers are cut, in their order, into
runs as long as there are parts, so that each run gives one row to each part.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.intp]
Labels = Sequence[IntArray]
Numbers = Sequence[NDArray[np.float64]]


def deal(labels: Labels, numbers: Numbers, parts: int, seed: int) -> IntArray:
    """Return for each row the part (0 … parts − 1) that it was dealt to."""
    rng = np.random.default_rng(seed)
    order = _stratified_order(labels, numbers, parts, rng)
    part = np.empty(len(order), dtype=np.intp)
    # Which part comes first is drawn, so that no part is always the longer one.
    part[order] = rng.permutation(parts)[np.arange(len(order)) % parts]
    return part


def systematic(labels: Labels, numbers: Numbers, share: float, seed: int) -> NDArray[np.bool_]:
    """Return a mask that takes ``share`` of the rows, every stratum in proportion to within one row."""
    rng = np.random.default_rng(seed)
    order = _stratified_order(labels, numbers, max(2, round(1 / min(share, 1 - share))), rng)
    steps = np.floor(share * np.arange(len(order) + 1) + rng.random())
    taken = np.zeros(len(order), dtype=bool)
    taken[order] = np.diff(steps) > 0
    return taken


def _stratified_order(labels: Labels, numbers: Numbers, run: int, rng: np.random.Generator) -> IntArray:
    n_rows = len((*labels, *numbers)[0])
    keys = [np.asarray(label) for label in labels]
    for k, values in enumerate(numbers):
        # All but the last number are cut coarsely, or no row would be left to vary in the next one.
        length = run if k == len(numbers) - 1 else run * 4
        order = np.lexsort((rng.random(n_rows), values, *reversed(keys)))
        key = np.empty(n_rows, dtype=np.intp)
        key[order] = np.arange(n_rows) // length
        keys.append(key)
    return np.lexsort((rng.random(n_rows), *reversed(keys))).astype(np.intp)
