"""The estimators: the two-stage pooler of the paper and ours, the baselines, the harmonizer for tables."""

from equipool.estimators.baselines import (
    CAIPooler,
    MMDPooler,
    NaivePooler,
    RandMatchPooler,
    SubsamplingPooler,
)
from equipool.estimators.equivariant_pooler import EquivariantPooler
from equipool.estimators.persistence import load, save
from equipool.estimators.site_harmonizer import SiteHarmonizer

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
