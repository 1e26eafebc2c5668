"""The estimators: the harmonizers for tables and images, the two-stage pooler, and its baselines."""

from equipool.estimators.baselines import (
    CAIPooler,
    MMDPooler,
    NaivePooler,
    RandMatchPooler,
    SubsamplingPooler,
)
from equipool.estimators.equivariant_pooler import EquivariantPooler
from equipool.estimators.image_harmonizer import ImageHarmonizer
from equipool.estimators.persistence import load, save
from equipool.estimators.site_harmonizer import SiteHarmonizer

__all__ = [
    "CAIPooler",
    "EquivariantPooler",
    "ImageHarmonizer",
    "MMDPooler",
    "NaivePooler",
    "RandMatchPooler",
    "SiteHarmonizer",
    "SubsamplingPooler",
    "load",
    "save",
]
