"""Values of new rows beside those of the fit: in another unit, standardised, or unusual in a few rows."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipool.checks.findings import Finding, error, rows_text, warning

AGES = {12: "months instead of years", 1 / 12: "years instead of months", 365.25: "days instead of years"}
SIZES = {
    10: "a unit ten times smaller, as mm instead of cm",
    0.1: "a unit ten times larger, as cm instead of mm",
    100: "percent instead of shares",
    0.01: "shares instead of percent",
    1000: "a unit a thousand times smaller, as mm³ instead of cm³",
    0.001: "a unit a thousand times larger, as cm³ instead of mm³",
}
MARGIN = 0.25  # of the size of values: a narrow range at the fit leaves at least this room around it
MOST = 0.5  # share of rows above which values are refused


class Seen(NamedTuple):
    """What the fit has seen of a column: the range of a covariate, or that of most values of a feature."""

    name: str
    low: float
    high: float
    is_covariate: bool

    def far(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Say which values are beyond the range by more than its width, or below half of a positive one."""
        margin = max(self.high - self.low, MARGIN * abs(self.low + self.high) / 2)
        low = max(self.low - margin, self.low / 2) if self.low > 0 else self.low - margin
        return (values < low) | (values > self.high + margin)

    def outside(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Say which values are unusual: outside of a covariate's range, far outside of a feature's."""
        if not self.is_covariate:
            return self.far(values)
        return (values < self.low) | (values > self.high)

    def findings(self, values: NDArray[np.float64]) -> Iterator[Finding]:
        """Refuse a column that is far outside in most rows, and say what it looks like; warn of a few rows.

        Examples
        --------
        >>> age = Seen("age", 20.0, 80.0, is_covariate=True)
        >>> [one.level for one in age.findings(np.array([30.0, 40.0, 85.0]))]
        ['warning']
        >>> [one.level for one in age.findings(12 * np.array([30.0, 40.0, 50.0]))]
        ['error']
        """
        far, unusual = self.far(values), self.outside(values)
        seen: dict[str, Any] = {"low": self.low, "high": self.high}
        if far.sum() > MOST * np.isfinite(values).sum():
            counts = {"count": far.sum(), "of": len(values), "median": np.nanmedian(values)}
            yield error("other-unit", self.name, **seen, **counts, remedy=self._remedy(values))
        elif unusual.any():
            rows = np.flatnonzero(unusual).tolist()
            why = "where the trend is extrapolated" if self.is_covariate else "so check these values"
            yield warning("unlike-fit", self.name, rows=rows, **seen, where=rows_text(rows), why=why)

    def _remedy(self, values: NDArray[np.float64]) -> str:
        """Say what values look like that are far outside."""
        middle, spread = float(np.nanmedian(values)), float(np.nanstd(values))
        if abs(middle) < 1 and 0.3 < spread < 3 and np.nanmin(values) < 0 <= self.low:
            return "it looks like z-scores, so give the values that these were made from"
        centre, found = (self.low + self.high) / 2, {}
        for factor, words in (AGES if self.is_covariate else SIZES).items():
            near = ~self.far(values / factor)[np.isfinite(values)]
            if middle * centre > 0 and near.mean() > MOST:
                found[abs(np.log(middle / factor / centre))] = words
        if found:
            return f"it looks like {found[min(found)]}, so convert it to the unit of the fit"
        return "correct it, or fit a model on participants like these"
