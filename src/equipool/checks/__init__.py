"""The one place that checks X, y, site and covariates, and the pre-flight report."""

from equipool.checks.errors import Missing, check_for_fit, check_inputs, find_errors, refuse_text
from equipool.checks.findings import Finding
from equipool.checks.inputs import Arrays, Inputs, Roles, Task, require_columns
from equipool.checks.preflight import PreflightReport, preflight

__all__ = [
    "Arrays",
    "Finding",
    "Inputs",
    "Missing",
    "PreflightReport",
    "Roles",
    "Task",
    "check_for_fit",
    "check_inputs",
    "find_errors",
    "preflight",
    "refuse_text",
    "require_columns",
]
