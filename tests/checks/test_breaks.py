import numpy as np
import pandas as pd
import pytest

import equipool as ep
from equipool.checks import Inputs, breaks
from equipool.checks.breaks import break_cautions, find_break


def cautions(table, **roles):
    return list(break_cautions(Inputs.from_frame(table, site="site", covariates="age", **roles)))


def two_sites(seed, *, rows=60, at=None, size=1.0, features=8):
    """Return two sites; from a row on, the first measures some features otherwise."""
    rng = np.random.default_rng(seed)
    site = np.repeat(["A", "B"], rows)
    age = rng.uniform(20, 80, 2 * rows)
    x = rng.standard_normal((2 * rows, features)) + np.outer(age / 30, rng.standard_normal(features))
    if at is not None:
        x[at:rows] += size * (np.arange(features) % 2)
    columns = pd.DataFrame(x, columns=[f"f{k}" for k in range(features)])
    return columns.assign(site=site, age=age, id=[f"sub-{k:03d}" for k in range(2 * rows)])


def test_a_change_of_the_scanner_is_found_where_it_is():
    right = []
    for seed in range(10):
        findings = cautions(two_sites(seed, at=25, size=1.5), id="id")
        right += [abs(f.rows[1] - 26) <= 5 for f in findings if "'A'" in f.text and "sub-0" in f.text]
        assert not any("'B'" in f.text for f in findings)
    assert np.mean(right) > 0.7
    assert len(right) >= 8
    report = ep.check(two_sites(0, at=25, size=1.5), site="site", covariates="age", id="id")
    assert [f for f in report.warnings if f.code == "break-within-site"] == cautions(
        two_sites(0, at=25, size=1.5), id="id"
    )


def test_tables_without_a_change_are_left_in_peace():
    alarms = [len(cautions(two_sites(seed), id="id")) for seed in range(25)]
    assert np.sum(alarms) <= 1  # one in a thousand sites


def test_chance_is_what_it_says():
    """Where nothing changes, one in twenty steps is beyond the 95 % of random orders."""
    rng = np.random.default_rng(0)
    steps = [find_break(rng.standard_normal((40, 6)), np.empty((40, 0)), seed=k) for k in range(60)]
    assert 0 <= np.mean([step.p <= 0.05 for step in steps]) < 0.17
    assert 0.3 < np.mean([step.p for step in steps]) < 0.7


@pytest.mark.parametrize("visits", [2, 3, 5])
def test_visits_of_one_participant_are_no_change(visits):
    p_values = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        person = np.repeat(rng.standard_normal((90 // visits, 10)), visits, axis=0)
        values = person + 0.3 * rng.standard_normal(person.shape)
        p_values.append(find_break(values, np.empty((len(values), 0))).p)
    assert np.mean(np.array(p_values) == 0.001) <= 0.1


def test_rows_sorted_by_age_or_target_are_no_change():
    for seed in range(5):
        table = two_sites(seed).drop(columns="id").sort_values(["site", "age"])
        assert not cautions(table)
        sick = np.random.default_rng(seed).random(len(table)) < 0.5
        table[["f0", "f1", "f2"]] -= 2.0 * sick[:, None]
        table = table.assign(dx=np.where(sick, "AD", "CN")).sort_values(["site", "dx"])
        assert not cautions(table, target="dx")


def test_the_step_is_that_of_a_loop_over_rows():
    rng = np.random.default_rng(0)
    values, regressors = rng.standard_normal((50, 4)), rng.standard_normal((50, 1))
    values[30:] += 2.0
    step = find_break(values, regressors)
    a = (regressors[:, 0] - regressors.mean()) / regressors.std()
    hinges = [np.maximum(a - place, 0) for place in np.quantile(a, (0.25, 0.5, 0.75))]
    design = np.column_stack([np.ones(50), a, *hinges])
    residuals = values - design @ np.linalg.pinv(design) @ values
    residuals = np.clip(residuals / residuals.std(axis=0), -4, 4)
    residuals -= residuals.mean(axis=0)
    whitening = np.linalg.inv(np.linalg.cholesky(np.cov(residuals.T, bias=True)))  # four of at most five
    white = residuals @ whitening.T
    sizes = {}
    for k in range(8, 43):
        apart = white[:k].mean(axis=0) - white[k:].mean(axis=0)
        sizes[k] = (apart**2).sum() / (1 / k + 1 / (50 - k))
    assert step.start == max(sizes, key=sizes.get)
    assert step.size == pytest.approx(max(sizes.values()))
    assert step.p == 0.001


def test_a_curve_in_age_is_no_change():
    alarms = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        age = np.sort(rng.uniform(20, 85, 200))
        values = rng.standard_normal((200, 10)) - 0.08 * np.maximum(age - 55, 0)[:, None]
        alarms.append(find_break(values, age[:, None]).p == 0.001)
    assert np.sum(alarms) <= 1


def test_units_do_not_matter():
    rng = np.random.default_rng(0)
    values, regressors = rng.standard_normal((60, 4)), rng.uniform(20, 80, (60, 1))
    values[20:] += 1.5
    whole = find_break(values, regressors)
    for scale, shift in ((1e200, 0.0), (1e-200, 0.0), (1.0, 1e6)):
        step = find_break(values * scale, regressors + 1e14 * (shift > 0))
        assert (step.start, step.p) == (whole.start, whole.p)


@pytest.mark.parametrize("rows", [0, 1, 23])
def test_few_rows_show_no_change(rows):
    assert find_break(np.ones((rows, 3)), np.ones((rows, 1))) is None


def test_odd_columns_are_no_trouble():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40, 5))
    values[:, 0] = 3.0
    values[3, 1], values[:, 2], values[5, 3] = np.nan, np.nan, np.inf
    assert np.isfinite(find_break(values, np.full((40, 2), np.nan)).size)
    assert find_break(np.ones((40, 3)), np.empty((40, 0))) is None


def test_large_sites_are_looked_at_in_groups(monkeypatch):
    monkeypatch.setattr(breaks, "MAX_GROUPS", 50)
    values = np.random.default_rng(0).standard_normal((1000, 3))
    values[600:] += 0.5
    step = find_break(values, np.empty((1000, 0)))
    assert step.p == 0.001
    assert abs(step.start - 600) <= 60


def test_more_features_than_rows():
    values = np.random.default_rng(0).standard_normal((60, 300))
    values[20:, :150] += 1.5
    step = find_break(values, np.empty((60, 0)))
    assert step.p == 0.001
    assert abs(step.start - 20) <= 2
