"""The one place that checks X, y, site and covariates, and the pre-flight report."""

from equipool.validation.checks import Missing, check_for_fit, check_inputs, find_errors, refuse_text
from equipool.validation.findings import Finding
from equipool.validation.inputs import Arrays, Inputs, Roles, Task, require_columns
from equipool.validation.preflight import PreflightReport, preflight

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
