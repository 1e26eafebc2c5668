"""The estimators: the two-stage pooler of the paper and ours, the baselines, the harmonizer for tables."""

from equipool.models.baselines import CAIPooler, MMDPooler, NaivePooler, RandMatchPooler, SubsamplingPooler
from equipool.models.harmonizer import SiteHarmonizer
from equipool.models.persistence import load, save
from equipool.models.pooler import EquivariantPooler

__all__ = [
    "CAIPooler",
    "EquivariantPooler",
    "MMDPooler",
    "NaivePooler",
    "RandMatchPooler",
    "SiteHarmonizer",
    "SubsamplingPooler",
    "load",
    "save",
]
