"""New rows beside the data of the fit: other units are recognised, unusual rows are named, others pass."""

import numpy as np
import pytest

from equipool.checks.units import Seen

rng = np.random.default_rng(0)
AGE = rng.uniform(25, 75, 200)
COLUMNS = {  # what the fit has seen, and new values like it
    "age": (Seen("age", 18.0, 85.0, is_covariate=True), AGE),
    "months": (Seen("months", 216.0, 1020.0, is_covariate=True), 12 * AGE),
    "thickness": (Seen("thickness", 2.1, 2.9, is_covariate=False), rng.normal(2.5, 0.2, 200)),
    "ventricles": (Seen("ventricles", 2e3, 2.6e4, is_covariate=False), rng.lognormal(9.2, 0.5, 200)),
    "residual": (Seen("residual", -2.0, 2.0, is_covariate=False), rng.normal(0, 1, 200)),
}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("age", lambda x: 12 * x, "months instead of years"),
        ("age", lambda x: 365.25 * x, "days instead of years"),
        ("months", lambda x: x / 12, "years instead of months"),
        ("age", lambda x: (x - x.mean()) / x.std(), "z-scores"),
        ("thickness", lambda x: x / 10, "cm instead of mm"),
        ("thickness", lambda x: 10 * x, "mm instead of cm"),
        ("thickness", lambda x: (x - x.mean()) / x.std(), "z-scores"),
        ("ventricles", lambda x: x / 1000, "cm³ instead of mm³"),
        ("ventricles", lambda x: 1000 * x, "mm³ instead of cm³"),
        ("thickness", lambda x: x + 3, "fit a model on participants like these"),
        ("residual", lambda x: x + 100, "fit a model on participants like these"),
    ],
)
def test_another_unit_is_an_error_that_says_what_it_looks_like(name, change, words):
    seen, values = COLUMNS[name]
    [finding] = seen.findings(change(values))
    assert finding.level == "error"
    assert repr(name) in finding.text
    assert words in finding.text


@pytest.mark.parametrize("name", COLUMNS)
def test_values_like_those_of_the_fit_pass_and_unusual_rows_are_named(name):
    seen, values = COLUMNS[name]
    values = np.where(seen.outside(values), np.median(values), values)
    assert list(seen.findings(values)) == []
    holes = np.where(np.arange(200) % 3 == 0, np.nan, values)
    assert list(seen.findings(holes)) == []
    values[4] = 100 * seen.high
    [finding] = seen.findings(values)
    assert (finding.level, finding.rows) == ("warning", (5,))


def test_other_participants_are_no_other_unit():
    older, _ = COLUMNS["age"]
    assert [one.level for one in older.findings(np.full(50, 95.0))] == [
        "warning"
    ]  # the trend is extrapolated
    narrow = Seen("age", 70.0, 75.0, is_covariate=True)
    assert [one.level for one in narrow.findings(rng.uniform(60, 69, 50))] == ["warning"]
