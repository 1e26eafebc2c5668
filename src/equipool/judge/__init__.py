"""How harmonized data and codes are judged: site classifiers, scores, a held-out protocol, chance levels."""

from equipool.judge.classifiers import SiteScore, classify_site, shuffled_band
from equipool.judge.scores import delta_eq, mmd_measure, normalise_rows

__all__ = ["SiteScore", "classify_site", "delta_eq", "mmd_measure", "normalise_rows", "shuffled_band"]
