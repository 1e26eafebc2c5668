r"""The protocol of site effects, their composition, and the one rule by which effects are chosen.

A measurement at site :math:`s` is :math:`z = T_s(m(c) + e)`: the trend :math:`m` of the covariates :math:`c`,
the participant's residual :math:`e`, and what the site does, :math:`T_s = T_s^{(1)} \circ \dots \circ
T_s^{(k)}`. Each :math:`T_s^{(j)}` is a :class:`SiteEffect`: an invertible map of values, given the trend's
prediction. Effects are undone from the outermost, :math:`T^{(1)}`, to the innermost.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

STANDARD_ERRORS = 2.0  # by which held-out log-likelihood must rise for an effect to enter: p = 0.023


def exceeds(
    gains: FloatArray, *, tests: int = 1, standard_errors: float = STANDARD_ERRORS
) -> NDArray[np.bool_]:
    """Say where gains (..., parts) of held-out log-likelihood add up to more than two standard errors.

    Parts are the held-out participants of one site and fold. Features that are correlated are no independent
    observations, so gains are summed over features first. Several ``tests`` have Bonferroni's threshold.
    """
    from scipy.stats import norm

    parts = gains.shape[-1]
    if parts < 2:
        return np.zeros(gains.shape[:-1], dtype=bool)
    threshold = float(norm.isf(norm.sf(standard_errors) / tests))
    error = gains.std(axis=-1, ddof=1) * np.sqrt(parts)
    return np.asarray(gains.sum(axis=-1) > threshold * error)


def choose(log_likelihoods: FloatArray) -> int:
    """Return the most likely candidate if it exceeds the first, in which there is no effect; otherwise 0.

    ``log_likelihoods`` are of held-out participants, (candidates, parts). Without any part, nothing enters.
    """
    if not log_likelihoods.size:
        return 0
    best = int(log_likelihoods.sum(axis=1).argmax())
    return best if exceeds(log_likelihoods[best] - log_likelihoods[0]) else 0


def simplest(log_likelihoods: FloatArray) -> int:
    """Return the simplest candidate within one standard error of the most likely one: Breiman's rule.

    For the trend, which is kept and not removed. Candidates are ordered from the simplest.
    """
    best = log_likelihoods[int(log_likelihoods.sum(axis=1).argmax())]
    return int(np.flatnonzero(~exceeds(best - log_likelihoods, standard_errors=1.0))[0])


def array(*dimensions: str, positive: bool = False, neutral: Any = None) -> Any:
    """Declare a field that is an array, with the names of its dimensions, for saving and for checks at load.

    ``"sites"`` and ``"features"`` are the model's, ``"sites+1"`` is one more, ``"5"`` is 5; other names have
    one length throughout an effect. ``neutral`` is what the array holds of sites that do nothing: by default
    0, or 1 where numbers must be positive.
    """
    neutral = float(positive) if neutral is None else neutral
    return field(metadata={"dimensions": dimensions, "positive": positive, "neutral": neutral})


@dataclass(frozen=True, eq=False)
class Context:
    """What an effect may depend on beside the values."""

    site: IntArray  # (rows,), index
    covariates: FloatArray  # (rows, K)
    predicted: FloatArray  # (rows, features), by the trend

    def __getitem__(self, rows: Any) -> Self:
        names = ("site", "covariates", "predicted")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


@dataclass(frozen=True, eq=False)
class SiteEffect(ABC):
    """An invertible map T_s of values, one for each site; ``rows`` below are (rows, features).

    Subclasses are frozen dataclasses whose arrays are declared by :func:`array`, with a classmethod ``fit``
    that estimates the effect from values out of which the outer effects are undone.
    """

    name: ClassVar[str]
    acts: ClassVar[tuple[str, ...]]  # fields that are neutral if and only if no site does anything

    @classmethod
    def identity(cls, n_sites: int, n_features: int) -> Self:
        """Return the effect of sites that do nothing: every field neutral, dimensions of its own empty."""
        sizes = {"sites": n_sites, "sites+1": n_sites + 1, "features": n_features}
        values = {f.name: f.metadata["neutral"] for f in fields(cls)}
        for f in fields(cls):
            if "dimensions" in f.metadata:
                shape = [sizes.get(d, int(d) if d.isdigit() else 0) for d in f.metadata["dimensions"]]
                values[f.name] = np.full(shape, values[f.name])
        return cls(**values)

    @property
    def is_identity(self) -> bool:
        """Whether no site does anything."""
        neutral = {f.name: f.metadata["neutral"] for f in fields(self)}
        return all(bool(np.all(getattr(self, name) == neutral[name])) for name in self.acts)

    @abstractmethod
    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return T_s⁻¹(rows): values without this effect."""

    @abstractmethod
    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return T_s(rows): the inverse of :meth:`undo`."""

    def log_det(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return log |∂ undo(rows) / ∂ rows|, (rows,); 0 by default."""
        return np.zeros(len(rows))

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Return the effect with one more site, estimated from its rows with everything else as it is.

        Cells that are NaN were not measured and are left out. By default the site does nothing.
        """
        return self._with_site()

    def _with_site(self, **values: FloatArray) -> Self:
        """Return the effect with one more site that has these values, and is neutral in all others."""
        for f in fields(self):
            if f.metadata.get("dimensions", ("",))[0] == "sites":
                others = getattr(self, f.name)
                new = values.get(f.name, f.metadata["neutral"])
                values[f.name] = np.concatenate([others, np.broadcast_to(new, (1, *others.shape[1:]))])
        return replace(self, **values)


@dataclass(frozen=True, eq=False)
class Composition:
    """Effects in order, the outermost first."""

    effects: tuple[SiteEffect, ...]

    def __iter__(self) -> Iterator[SiteEffect]:
        return iter(self.effects)

    def __getitem__(self, name: str) -> Any:
        return next(effect for effect in self.effects if effect.name == name)

    @property
    def active(self) -> list[SiteEffect]:
        """Effects that do something."""
        return [effect for effect in self.effects if not effect.is_identity]

    def undo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return values as the pool would have measured them."""
        for effect in self.active:
            rows = effect.undo(rows, at)
        return rows

    def redo(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return values as the site would have measured them: the inverse of :meth:`undo`."""
        for effect in reversed(self.active):
            rows = effect.redo(rows, at)
        return rows

    def log_det(self, rows: FloatArray, at: Context) -> FloatArray:
        """Return log |∂ undo(rows) / ∂ rows|, (rows,)."""
        total = np.zeros(len(rows))
        for effect in self.active:
            total += effect.log_det(rows, at)
            rows = effect.undo(rows, at)
        return total

    def add_site(self, rows: FloatArray, at: Context) -> Self:
        """Return the effects with one more site, each estimated from rows without the outer ones."""
        effects = []
        for effect in self.effects:
            added = effect.add_site(rows, at)
            effects.append(added)
            if not added.is_identity:
                rows = added.undo(rows, at)
        return replace(self, effects=tuple(effects))
