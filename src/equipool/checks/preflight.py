"""The pre-flight report: can these sites be pooled, and what will it cost?"""

import textwrap
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from equipool.checks import cautions
from equipool.checks import overlap as measures
from equipool.checks.breaks import break_cautions
from equipool.checks.errors import Missing, find_errors
from equipool.checks.findings import LEVELS, Finding, plural
from equipool.checks.inputs import Inputs

WIDTH = 100  # characters of a line
SITES_SHOWN = 24  # longer tables are cut in the text; report.sites has all of it
MATRIX_SHOWN = 8
CONFOUNDING = (
    "Association of each with the site (0 none, 1 complete: ω² for numbers, Cramér's V for classes):"
)
MARKS = {"error": "✗", "warning": "!", "note": "·"}


@dataclass(frozen=True, eq=False)
class PreflightReport:
    """The findings before pooling; ``print(report)`` shows it."""

    inputs: Inputs = field(repr=False)  #: the parsed pool
    findings: tuple[Finding, ...]  #: errors first, then warnings, then notes
    sites: pd.DataFrame  #: one row a site: rows, classes or target mean, range of each covariate
    #: by covariate, site × site: the share of participants in a common range
    overlap: dict[str, pd.DataFrame]
    common: dict[str, float]  #: by covariate, the share of participants in the range that all sites cover
    confounding: dict[str, float]  #: of each covariate and the target: its association with the site, 0 to 1
    site_prediction: measures.SitePrediction | None  #: from covariates and target together, and chance

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What has to be solved first."""
        return tuple(one for one in self.findings if one.level == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What the user should know."""
        return tuple(one for one in self.findings if one.level == "warning")

    @property
    def ok(self) -> bool:
        """Whether the sites can be pooled."""
        return not self.errors

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if self.errors:
            return f"Cannot be pooled as it is: {plural(len(self.errors), 'problem')} to solve first."
        size = f"{plural(self.inputs.n_rows, 'row')} from {plural(len(self.sites), 'site')}"
        if self.warnings:
            return f"Can be pooled, with care: {size}, {plural(len(self.warnings), 'warning')}."
        return f"Can be pooled: {size}, nothing to worry about."

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON-ready values."""
        # JSON has neither NaN nor infinity.
        sites = self.sites.astype(object).where(np.isfinite(self.sites.astype(float)), None)
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "rows": self.inputs.n_rows,
            "features": len(self.inputs.feature_names),
            "findings": [asdict(finding) for finding in self.findings],
            "sites": {str(site): row for site, row in sites.to_dict(orient="index").items()},
            "overlap": {name: frame.to_dict() for name, frame in self.overlap.items()},
            "common_support": self.common,
            "confounding": self.confounding,
            "site_from_covariates_and_target": self.site_prediction and asdict(self.site_prediction),
        }

    def __str__(self) -> str:
        """Return the report as text, verdict last, where the eye of a terminal user is."""
        parts = [self._sites_text(), *map(self._overlap_text, self.overlap)]
        if self.confounding:
            lines = [f"  {value:.2f}  {name}" for name, value in self.confounding.items()]
            if (prediction := self.site_prediction) is not None:
                accuracy = f"{prediction.balanced_accuracy:.2f} (chance {prediction.chance:.2f} ±"
                what = "A classifier predicts the site from all of them with a balanced accuracy of"
                lines.append(f"  {what} {accuracy} {prediction.chance_error:.2f})")
            parts.append("\n".join([CONFOUNDING, *lines]))
        wrap = partial(textwrap.fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)
        lines = [wrap(f"{MARKS[one.level]} {one.text}", subsequent_indent="  ") for one in self.findings]
        return "\n\n".join([*parts, *(["\n".join(lines)] if lines else []), self.verdict])

    def _sites_text(self) -> str:
        features = plural(len(self.inputs.feature_names), "feature")
        head = f"{plural(self.inputs.n_rows, 'row')}, {features}, {plural(len(self.sites), 'site')}"
        if self.sites.empty:
            return head
        shown = self.sites.sort_values("rows", ascending=False).head(SITES_SHOWN)
        lines = shown.to_string(float_format=lambda v: f"{v:.4g}" if v == v else "–", line_width=WIDTH)
        more = len(self.sites) - len(shown)
        tail = f"\n… and {plural(more, 'smaller site')}" if more else ""
        return f"{head}\n{textwrap.indent(lines + tail, '  ')}"

    def _overlap_text(self, name: str) -> str:
        """Return a small matrix whole, of a large one the pairs of sites with the least overlap."""
        share = f"{self.common[name]:.0%} of participants are in the range that all sites cover"
        head = f"Support of {name}: {share}. Share of participants in the range common to two sites:"
        if len(frame := self.overlap[name]) <= MATRIX_SHOWN:
            matrix = frame.to_string(float_format="{:.0%}".format)
        else:
            pairs = cautions.pairs_by_overlap(frame)
            lines = [f"{share:4.0%}  {one} – {other}" for share, one, other in pairs[:5]]
            median = np.median([share for share, *_ in pairs])
            matrix = "\n".join([*lines, f"… the least of {len(pairs)} pairs; median {median:.0%}"])
        return f"{textwrap.fill(head, WIDTH)}\n{textwrap.indent(matrix, '  ')}"


def preflight(
    inputs: Inputs, *, missing: Missing = "error", measured: NDArray[np.float64] | None = None
) -> PreflightReport:
    """Check a pool before anything is fitted; with ``missing="impute"``, missing features are no error.

    ``measured`` (rows, numbers) is what was measured where the features only summarise it, as with images.
    """
    several = len(inputs.sites) > 1
    overlap, common = {}, {}
    for name, values, _ in inputs.covariates_with_site() if several else ():
        finite = np.isfinite(values)
        values, site_index = values[finite], inputs.site_index[finite]
        # Two levels have no range, and a site without a single value has no support to compare.
        if not measures.two_valued(values) and len(np.unique(site_index)) == len(inputs.sites):
            share = measures.support_overlap(values, site_index)
            overlap[name] = pd.DataFrame(share, inputs.sites, inputs.sites)
            common[name] = measures.common_support(values, site_index)
    confounding, prediction = _confounding(inputs) if several else ({}, None)
    findings = [
        *find_errors(inputs, missing=missing),
        *cautions.site_cautions(inputs),
        *cautions.absence_cautions(inputs),
        *cautions.overlap_cautions(overlap, common),
        *cautions.confounding_cautions(inputs, confounding, prediction),
        *cautions.outlier_cautions(inputs),
        *cautions.feature_cautions(inputs),
        *cautions.copy_cautions(inputs),
        *cautions.column_cautions(inputs),
        *break_cautions(inputs, measured),
        *cautions.notes(inputs),
    ]
    findings.sort(key=lambda one: LEVELS.index(one.level))
    table = _site_table(inputs)
    return PreflightReport(inputs, tuple(findings), table, overlap, common, confounding, prediction)


def _site_table(inputs: Inputs) -> pd.DataFrame:
    rows, site_index = inputs.rows_with_site, inputs.site_index
    index = pd.Index(inputs.sites, name=inputs.site_name)
    columns: dict[str, Any] = {"rows": np.bincount(site_index, minlength=len(index))}
    for name, values, _ in inputs.covariates_with_site():
        by_site = pd.Series(values).groupby(site_index)
        columns |= {f"{name} {what}": by_site.agg(what).to_numpy() for what in ("min", "median", "max")}
    table = pd.DataFrame(columns, index=index)
    if inputs.target is None or not len(rows):
        return table
    target = pd.Series(inputs.target[rows], name="class")
    if inputs.task == "number":
        return table.assign(**{f"{inputs.target_name} mean": target.groupby(site_index).mean().to_numpy()})
    counts = pd.crosstab(site_index, target.fillna("missing")).set_axis(index)
    return table.join(counts.rename(columns=lambda label: f"{inputs.target_name}={label}"))


def _confounding(inputs: Inputs) -> tuple[dict[str, float], measures.SitePrediction | None]:
    rows, site_index = inputs.rows_with_site, inputs.site_index
    columns = [(name, values, False) for name, values, _ in inputs.covariates_with_site()]
    if inputs.target_numbers is not None:
        columns.append((inputs.target_name, inputs.target_numbers[rows], inputs.task == "class"))
    strength: dict[str, float] = {}
    for name, values, is_class in columns:
        finite = np.isfinite(values)
        sites, measure = site_index[finite], measures.cramers_v if is_class else measures.omega_squared
        if len(np.unique(values[finite])) > 1:
            strength[name] = float(measure(values[finite], np.unique(sites, return_inverse=True)[1]))
    complete = np.isfinite([values for _, values, _ in columns]).all(axis=0)
    if not columns or not complete.any():
        return strength, None
    variables = np.column_stack([values[complete] for _, values, _ in columns])
    return strength, measures.predict_site(variables, site_index[complete])
