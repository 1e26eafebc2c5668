"""Breaks within a site: rows from which on people are measured otherwise, as after a change of the scanner.

Sites are often two: a coil, a protocol or a version changed, and the table has one name for both. Where rows
come in the order of measuring, as ids mostly do, such a change is a step in what covariates and target do
not explain. It is looked for along the directions in which a site's people differ most, at every row, and
compared with the same rows in random order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipool.checks.findings import Finding
from equipool.checks.inputs import Inputs

__all__ = ["Break", "break_cautions", "find_break"]

FloatArray = NDArray[np.float64]

LEAST = 8  # rows before and after
DIRECTIONS = 5
SHUFFLES = 999
MOST = 1000  # rows of a site; more are taken together in so many groups of neighbours
CLASSES = 40
CUT = 4.0  # deviations: one odd person is no break


@dataclass(frozen=True)
class Break:
    """A step: the position of the first row after it, how large it is, and how large chance makes it.

    ``size`` is the squared distance of the means in standard errors, summed over directions; ``chance`` the
    95 % quantile of the largest with rows in random order. Where neighbours are alike, as visits of one
    person are, the size is less by what that adds.
    """

    start: int
    size: float
    chance: float
    p: float


def break_cautions(inputs: Inputs, measured: FloatArray | None = None) -> Iterator[Finding]:
    """Warn of sites whose rows change at some point; ``measured`` stands for the features, if given."""
    values = inputs.X if measured is None else measured
    allowed = _allowed(inputs)
    known = np.flatnonzero([name is not None for name in inputs.site])
    names, codes = np.unique(inputs.site[known].astype(str), return_inverse=True)
    order, ends = known[np.argsort(codes, kind="stable")], np.cumsum(np.bincount(codes))
    for site, rows in zip(names, np.split(order, ends)[:-1], strict=True):
        found = find_break(values[rows], allowed[rows])
        if found is None or found.p > 1 / (SHUFFLES + 1):
            continue
        last, first = rows[found.start - 1], rows[found.start]
        where = f"row {first + 1}"
        if inputs.ids is not None and inputs.ids[first] is not None:
            where += f" ({inputs.ids[first]})"
        yield Finding(
            "warning",
            "break-within-site",
            f"From about {where} on, people of {str(site)!r} are measured otherwise than the {found.start} "
            f"before them (a step of {found.size:.0f}, where random orders give {found.chance:.0f}): if the "
            f"scanner or its protocol changed there, give both parts names of their own in "
            f"{inputs.site_name!r}; if rows are sorted by something that matters, make it a covariate.",
            (inputs.site_name,),
            (int(last) + 1, int(first) + 1),
        )


def find_break(values: FloatArray, allowed: FloatArray, *, seed: int = 0) -> Break | None:
    """Return the largest step in rows of one site, in their order; ``None`` where there are too few.

    Parameters
    ----------
    values
        What was measured, (rows, features).
    allowed
        What may explain it, (rows, k): covariates and target.
    seed
        Of the random orders.
    """
    starts = np.unique(np.linspace(0, len(values), min(len(values), MOST), endpoint=False).astype(int))
    values, allowed = (_grouped(part, starts) for part in (values, allowed))
    n = len(values)
    if n < 3 * LEAST or not values.shape[1]:
        return None
    scores = _scores(values, _smooth(allowed))
    if scores is None:
        return None
    before = np.arange(LEAST, n - LEAST + 1)
    scale = n / (before * (n - before))

    def steps(orders: NDArray[np.intp]) -> FloatArray:
        sums: FloatArray = np.cumsum(scores[orders], axis=1)[:, before - 1]
        return (sums**2).sum(axis=2) * scale

    rng = np.random.default_rng(seed)
    sizes = steps(np.arange(n)[None])[0]
    best = int(sizes.argmax())
    size = float(sizes[best]) / _crowding(scores, int(before[best]))
    shuffled: FloatArray = np.empty(0)
    while len(shuffled) < SHUFFLES and not (shuffled >= size).any():
        # A few at a time: one that is larger is enough to stay silent.
        orders = rng.permuted(np.tile(np.arange(n), ((SHUFFLES + 1) // 10 - (not len(shuffled)), 1)), axis=1)
        shuffled = np.append(shuffled, steps(orders).max(axis=1))
    p = (1 + int((shuffled >= size).sum())) / (1 + len(shuffled))
    return Break(int(starts[before[best]]), size, float(np.quantile(shuffled, 0.95)), p)


def _crowding(scores: FloatArray, start: int) -> float:
    """Return how much neighbours that are alike, such as one person's visits, enlarge steps; at least 1."""
    left = np.concatenate([part - part.mean(axis=0) for part in (scores[:start], scores[start:])])
    alike = float((left[1:] * left[:-1]).sum() / max((left**2).sum(), 1e-300))
    if alike < 2 / np.sqrt(left.size):  # as chance has it
        return 1.0
    return (1 + alike) / (1 - min(alike, 0.99))


def _smooth(allowed: FloatArray) -> FloatArray:
    """Return the columns around 0, in deviations, and their bends at the quartiles: age acts on a curve."""
    largest = np.maximum(np.abs(allowed).max(axis=0), 1e-300)
    centred = allowed / largest - (allowed / largest).mean(axis=0)
    deviation = centred.std(axis=0)
    columns = (centred / np.where(deviation > 1e-12, deviation, np.inf)).T
    result = list(columns)
    for column in columns:
        if len(np.unique(column)) >= 10 and len(allowed) >= 6 * LEAST:
            result += [np.maximum(column - place, 0) for place in np.quantile(column, (0.25, 0.5, 0.75))]
    return np.column_stack(result) if result else np.empty((len(allowed), 0))


def _scores(values: FloatArray, allowed: FloatArray) -> FloatArray | None:
    """Return people along the directions in which they differ most, each of variance 1; or nothing."""
    largest = np.abs(values).max(axis=0)
    values = values / np.where(largest > 0, largest, 1.0)  # squares of huge numbers are no numbers
    design = np.column_stack([np.ones(len(allowed)), allowed])
    left = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    deviation = left.std(axis=0)
    varies = deviation > 1e-9
    if not varies.any():
        return None
    left = np.clip(left[:, varies] / deviation[varies], -CUT, CUT)
    left -= left.mean(axis=0)
    n = len(left)
    # The smaller of the two Gram matrices has the same directions.
    if left.shape[1] <= n:
        own, vectors = np.linalg.eigh(left.T @ left)
        scores = left @ vectors
    else:
        own, vectors = np.linalg.eigh(left @ left.T)
        scores = vectors * np.sqrt(np.maximum(own, 0.0))
    kept = np.flatnonzero(own > 1e-9 * own[-1])[::-1][: min(DIRECTIONS, n // LEAST)]
    result: FloatArray = scores[:, kept] / np.sqrt(own[kept] / n)
    return result


def _grouped(values: FloatArray, starts: NDArray[np.intp]) -> FloatArray:
    """Return the means of neighbouring rows, cells that are no number filled with the column's mean."""
    known = np.isfinite(values)
    if not known.all():
        count = np.maximum(known.sum(axis=0), 1)
        values = np.where(known, values, np.where(known, values, 0.0).sum(axis=0) / count)
    people = np.diff(np.append(starts, len(values)))
    means: FloatArray = np.add.reduceat(values, starts, axis=0) / people[:, None]
    return means


def _allowed(inputs: Inputs) -> FloatArray:
    """Return covariates and target as columns of numbers."""
    columns = [inputs.covariates]
    if inputs.target is not None and inputs.task == "number":
        columns.append(np.asarray(inputs.target, dtype=np.float64)[:, None])
    elif inputs.target is not None:
        labels = np.array([str(label) for label in inputs.target])
        names, count = np.unique(labels, return_counts=True)
        # The rarest of very many classes are taken together.
        common = names[np.argsort(-count, kind="stable")][:CLASSES]
        columns += [(labels == name).astype(np.float64)[:, None] for name in common[: len(names) - 1]]
    return np.hstack(columns)
