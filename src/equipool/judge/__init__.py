"""Judging codes: the paper's four metrics, readers of the site that cannot be fooled, and the benchmark."""

from equipool.judge.classifiers import SiteReading, paper_adversary, site_readers
from equipool.judge.scores import delta_eq, mmd_measure, normalise_rows

__all__ = ["SiteReading", "delta_eq", "mmd_measure", "normalise_rows", "paper_adversary", "site_readers"]
