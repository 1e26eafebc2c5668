"""The estimators: the two-stage pooler of the paper and ours, and the baselines on the same backbone."""

from equipool.models.baselines import CAIPooler, MMDPooler, NaivePooler, RandMatchPooler, SubsamplingPooler
from equipool.models.persistence import load, save
from equipool.models.pooler import EquivariantPooler

__all__ = [
    "CAIPooler",
    "EquivariantPooler",
    "MMDPooler",
    "NaivePooler",
    "RandMatchPooler",
    "SubsamplingPooler",
    "load",
    "save",
]
