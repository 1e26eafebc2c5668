"""The pre-flight report: can these sites be pooled, and what will it cost?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks.breaks import break_cautions
from equipool.checks.cautions import (
    class_cautions,
    column_cautions,
    confounding_cautions,
    copy_cautions,
    feature_cautions,
    level_cautions,
    notes,
    outlier_cautions,
    overlap_cautions,
    site_cautions,
    two_valued,
)
from equipool.checks.errors import Missing, find_errors
from equipool.checks.findings import Finding, by_level, plural
from equipool.checks.inputs import Inputs
from equipool.checks.overlap import (
    Readability,
    common_support,
    cramers_v,
    omega_squared,
    site_readability,
    support_overlap,
)

__all__ = ["PreflightReport", "preflight"]


@dataclass(frozen=True, eq=False)
class PreflightReport:
    """What was found before pooling; ``print(report)`` shows it.

    Attributes
    ----------
    findings
        Errors first, then warnings, then notes.
    sites
        One row a site: people, classes or target mean, range of each covariate.
    overlap
        For each covariate, a site × site frame: the share of people in the range common to both.
    common
        For each covariate, the share of people in the range that all sites cover.
    confounding
        For each covariate and the target: how far it goes with the site, from 0 to 1.
    readability
        How well covariates and target together tell the site, and the chance level.
    """

    inputs: Inputs = field(repr=False)
    findings: tuple[Finding, ...]
    sites: pd.DataFrame
    overlap: dict[str, pd.DataFrame]
    common: dict[str, float]
    confounding: dict[str, float]
    readability: Readability | None

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What has to be solved first."""
        return tuple(f for f in self.findings if f.level == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What the user should know."""
        return tuple(f for f in self.findings if f.level == "warning")

    @property
    def ok(self) -> bool:
        """Whether the sites can be pooled."""
        return not self.errors

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if self.errors:
            count = plural(len(self.errors), "problem")
            return f"Cannot be pooled as it is: {count} to solve first."
        size = f"{plural(self.inputs.n_rows, 'row')} from {plural(len(self.sites), 'site')}"
        if self.warnings:
            return f"Can be pooled, with care: {size}, {plural(len(self.warnings), 'warning')}."
        return f"Can be pooled: {size}, nothing to worry about."

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON-ready values."""
        readability = None if self.readability is None else asdict(self.readability)
        # JSON knows neither NaN nor infinity.
        sites = self.sites.astype(object).where(np.isfinite(self.sites.astype(float)), None)
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "rows": self.inputs.n_rows,
            "features": len(self.inputs.feature_names),
            "findings": [finding.to_dict() for finding in self.findings],
            "sites": {str(site): row for site, row in sites.to_dict(orient="index").items()},
            "overlap": {name: frame.to_dict() for name, frame in self.overlap.items()},
            "common_support": self.common,
            "confounding": self.confounding,
            "site_from_covariates_and_target": readability,
        }

    def __str__(self) -> str:
        """Return the report as text."""
        from equipool.checks.text import report_text

        return report_text(self)


def preflight(
    inputs: Inputs, *, missing: Missing = "error", measured: NDArray[np.float64] | None = None
) -> PreflightReport:
    """Look at a pool before anything is fitted.

    Parameters
    ----------
    inputs
        From :meth:`Inputs.from_frame` or :meth:`Inputs.from_arrays`.
    missing
        ``"error"``: missing feature values stand in the way; ``"impute"``: they will be imputed.
    measured
        What was measured, (rows, numbers), where the features only stand for it, as with images.
    """
    findings = find_errors(inputs, missing=missing)
    known = _known_rows(inputs)
    labels, codes = np.unique(inputs.site[known].astype(str), return_inverse=True)
    several = len(labels) > 1
    overlap, common = _overlap(inputs, known, labels, codes) if several else ({}, {})
    confounding, readability = _confounding(inputs, known, codes) if several else ({}, None)
    findings += [
        *site_cautions(inputs, labels, codes),
        *class_cautions(inputs, known, labels, codes),
        *level_cautions(inputs, known, labels, codes),
        *overlap_cautions(overlap, common),
        *confounding_cautions(inputs, confounding, readability),
        *outlier_cautions(inputs),
        *feature_cautions(inputs),
        *copy_cautions(inputs),
        *column_cautions(inputs, known, codes),
        *break_cautions(inputs, measured),
        *notes(inputs),
    ]
    return PreflightReport(
        inputs=inputs,
        findings=by_level(findings),
        sites=_site_table(inputs, known, labels, codes),
        overlap=overlap,
        common=common,
        confounding=confounding,
        readability=readability,
    )


def _known_rows(inputs: Inputs) -> NDArray[np.intp]:
    """Return the rows whose site is known: every figure of the report is over these."""
    return np.flatnonzero([site is not None for site in inputs.site])


def _site_table(
    inputs: Inputs, known: NDArray[np.intp], labels: NDArray[Any], codes: NDArray[np.intp]
) -> pd.DataFrame:
    columns: dict[str, Any] = {"rows": np.bincount(codes, minlength=len(labels))}
    index = pd.Index(labels, name=inputs.site_name)
    for k, name in enumerate(inputs.covariate_names):
        grouped = pd.Series(inputs.covariates[known, k]).groupby(codes)
        for statistic in ("min", "median", "max"):
            columns[f"{name} {statistic}"] = grouped.agg(statistic).to_numpy()
    table = pd.DataFrame(columns, index=index)
    if inputs.target is None or not len(known):
        return table
    target = inputs.target[known]
    if inputs.task == "number":
        return table.assign(
            **{f"{inputs.target_name} mean": pd.Series(target).groupby(codes).mean().to_numpy()}
        )
    counts = pd.crosstab(codes, pd.Series(target, name="class").fillna("missing")).set_axis(index)
    return table.join(counts.rename(columns=lambda label: f"{inputs.target_name}={label}"))


def _overlap(
    inputs: Inputs, known: NDArray[np.intp], labels: NDArray[Any], codes: NDArray[np.intp]
) -> tuple[dict[str, pd.DataFrame], dict[str, float]]:
    frames, shares = {}, {}
    for k, name in enumerate(inputs.covariate_names):
        values = inputs.covariates[known, k]
        finite = np.isfinite(values)
        # Two levels have no range, and a site without a single value has no support to compare.
        if two_valued(values) or len(np.unique(codes[finite])) < len(labels):
            continue
        frames[name] = pd.DataFrame(support_overlap(values[finite], codes[finite]), labels, labels)
        shares[name] = common_support(values[finite], codes[finite])
    return frames, shares


def _confounding(
    inputs: Inputs, known: NDArray[np.intp], codes: NDArray[np.intp]
) -> tuple[dict[str, float], Readability | None]:
    strength: dict[str, float] = {}
    columns = []
    for k, name in enumerate(inputs.covariate_names):
        columns.append((name, inputs.covariates[known, k], False))
    if inputs.target is not None:
        target = inputs.target[known]
        if inputs.task == "class":
            target = pd.factorize(target, sort=True)[0].astype(float)
            target[target < 0] = np.nan
        columns.append((inputs.target_name, target, inputs.task == "class"))
    for name, values, is_class in columns:
        finite = np.isfinite(values)
        if len(np.unique(values[finite])) < 2:
            continue
        _, compact = np.unique(codes[finite], return_inverse=True)
        measure = (
            cramers_v(values[finite].astype(int), compact)
            if is_class
            else omega_squared(values[finite], compact)
        )
        strength[name] = measure
    if not columns:
        return strength, None
    variables = np.column_stack([values for _, values, _ in columns])
    complete = np.isfinite(variables).all(axis=1)
    return strength, site_readability(variables[complete], codes[complete]) if complete.any() else None
