import numpy as np
import pytest

from equipool.data import PooledDataset
from equipool.exceptions import InputError
from equipool.judge import delta_eq, mmd_measure, normalise_rows
from equipool.judge import scores as metrics
from oracles import delta_eq as naive_delta_eq
from oracles import mmd as naive_mmd


def codes(rows=40, n=6):
    rng = np.random.default_rng()
    return rng.normal(size=(rows, n)), rng.uniform(20, 80, rows), rng.integers(0, 3, rows)


@pytest.mark.parametrize("block", [7, 2048])
def test_delta_eq_equals_the_double_loop(block, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", block)
    z, age, _ = codes()
    assert delta_eq(z, age) == pytest.approx(naive_delta_eq(z, age), rel=1e-10)


@pytest.mark.parametrize("block", [7, 2048])
def test_m_equals_the_double_loop(block, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", block)
    z, _, site = codes()
    found = metrics.discrepancy(z, site, draws=0)
    assert mmd_measure(z, site) == found.unbiased == pytest.approx(naive_mmd(z, site, True), abs=1e-12)
    assert found.biased == pytest.approx(naive_mmd(z, site, False), abs=1e-12)


def test_delta_eq_of_two_covariates_equals_the_double_loop(monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 7)
    z, age, _ = codes()
    c = np.column_stack([age, np.random.default_rng().permutation(age)])
    scaled, rows = (c - c.min(axis=0)) / np.ptp(c, axis=0), normalise_rows(z)
    pairs = [
        np.linalg.norm(scaled[i] - scaled[j]) * ((rows[i] - rows[j]) ** 2).sum()
        for i in range(len(z))
        for j in range(len(z))
        if i != j
    ]
    assert delta_eq(z, c) == pytest.approx(np.mean(pairs), rel=1e-10)


def test_of_very_many_rows_a_sample_is_compared(monkeypatch):
    rng = np.random.default_rng()
    site = rng.integers(0, 3, 3000)
    z = rng.normal(size=(len(site), 5)) + 0.6 * site[:, None] * np.arange(5)
    age = rng.uniform(20, 80, (len(site), 2))
    exact = mmd_measure(z, site), delta_eq(z, age), delta_eq(z, age[:, 0])
    monkeypatch.setattr(metrics, "MOST", 600)
    sampled = mmd_measure(z, site), delta_eq(z, age), delta_eq(z, age[:, 0])
    assert sampled[:2] != exact[:2]
    assert sampled[2] == exact[2]  # one covariate needs no sample
    assert sampled == pytest.approx(exact, rel=0.25)
    assert mmd_measure(z, site) == sampled[0]


def test_a_sample_has_people_of_every_site(monkeypatch):
    monkeypatch.setattr(metrics, "MOST", 600)
    site = np.append(np.random.default_rng().integers(0, 3, 3000), [3] * 3)
    some = metrics._sample(site)
    assert 597 <= len(some) <= 602
    assert len(set(some)) == len(some)
    assert (np.bincount(site[some]) >= [150, 150, 150, 2]).all()


def test_normalised_rows_lie_between_0_and_1_whatever_their_scale():
    z, *_ = codes()
    z[3] = 4.0
    for factor in (1e-8, 1.0, 1e8):
        scaled = normalise_rows(factor * z)
        np.testing.assert_allclose(scaled, normalise_rows(z), atol=1e-6)
        assert scaled.min() == 0
        assert scaled.max() == 1


def test_m_is_zero_on_average_where_sites_do_not_differ():
    values = []
    for _ in range(60):
        rng = np.random.default_rng()
        values.append(mmd_measure(rng.normal(size=(60, 5)), np.arange(60) < 6))
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(60)
    assert (
        mmd_measure(np.vstack([np.eye(5), np.eye(5)[::-1] * 0 + [0, 0, 0, 0, 1]]), [0] * 5 + [1] * 5) > 0.05
    )


@pytest.mark.parametrize("block", [7, 2048])
def test_m_of_shuffled_sites_is_zero_on_average_and_below_that_of_sites_that_differ(block, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", block)
    rng = np.random.default_rng()
    site = np.repeat([0, 1, 2], [8, 20, 30])
    z = rng.normal(size=(len(site), 5)) + 3 * site[:, None] * [1, 0, 0, 0, -1]
    found = metrics.discrepancy(z, site, draws=600)
    shuffled = found.shuffled
    assert abs(shuffled.mean()) < 4 * shuffled.std() / np.sqrt(600)
    assert found.unbiased == pytest.approx(mmd_measure(z, site))
    assert shuffled.max() < found.unbiased
    np.testing.assert_allclose(shuffled[:20], metrics.discrepancy(z, site, draws=20).shuffled, atol=1e-12)
    again = [mmd_measure(z, rng.permutation(site)) for _ in range(600)]
    assert 0.7 < shuffled.std() / np.std(again) < 1.4


def test_delta_eq_rises_with_the_order_in_tau():
    age = np.linspace(20, 80, 200)
    angle = (age - 50) / 30 * np.pi / 2
    turning = np.column_stack([np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(2 * angle)])
    shuffled = np.random.default_rng().permutation(turning)
    assert delta_eq(turning, age) > 1.2 * delta_eq(shuffled, age)
    assert delta_eq(turning, age * 12) == pytest.approx(delta_eq(turning, age))


def test_one_site_cannot_be_compared():
    with pytest.raises(InputError, match="at least 2"):
        mmd_measure(np.ones((3, 2)), ["A"] * 3)
    with pytest.raises(InputError, match="at least 2 rows"):
        delta_eq(np.ones((1, 2)), [3.0])


# -- predictions -------------------------------------------------------------------------------------------


def test_r2_equals_its_definition():
    rng = np.random.default_rng()
    true, predicted = rng.normal(size=(2, 30))
    residual = sum((a - b) ** 2 for a, b in zip(true, predicted, strict=True))
    total = sum((a - true.mean()) ** 2 for a in true)
    assert metrics.r2(true, predicted) == pytest.approx(1 - residual / total)
    assert np.isnan(metrics.r2(np.ones(30), predicted))


def concordance(positive, score, site=None):
    """The share of pairs, of one site if sites are given, in which the positive has the higher score."""
    hits = []
    for i in np.flatnonzero(positive):
        for j in np.flatnonzero(~positive):
            if site is None or site[i] == site[j]:
                hits.append((score[i] > score[j]) + 0.5 * (score[i] == score[j]))
    return np.mean(hits)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_auc_is_the_share_of_pairs_in_the_right_order(within, count):
    rng = np.random.default_rng()
    classes = np.array(["a", "b", "c"])[:count]
    true, site = classes[np.arange(40) % count], rng.integers(0, 3, 40)
    probability = rng.random((40, count)).round(1)  # with ties
    if count == 2:
        probability[:, 0] = 1 - probability[:, 1]
    places = [1] if count == 2 else range(count)
    expected = np.mean(
        [concordance(true == classes[k], probability[:, k], site if within else None) for k in places]
    )
    found = metrics.auc(true, probability, classes, site if within else None)
    assert found == pytest.approx(expected)


def test_auc_of_one_class_is_nan():
    assert np.isnan(metrics.auc(np.array(["a", "a"]), np.ones((2, 2)) / 2, np.array(["a", "b"])))
    apart = np.array(["a", "b"]), np.ones((2, 2)) / 2, np.array(["a", "b"]), np.array([0, 1])
    assert np.isnan(metrics.auc(*apart))


@pytest.fixture
def table():
    """Features, an age that they show, sites that shift them, and rows to fit on and to evaluate on."""
    rng = np.random.default_rng()
    site, age = rng.integers(0, 3, 90), rng.uniform(20, 80, 90)
    x = rng.normal(size=(90, 4)) + age[:, None] / 10 * [1, 0, -1, 0] + rng.normal(size=(3, 4))[site]
    return x, age, site, np.arange(60), np.arange(60, 90)


def naive_ridge(x, y, alpha):
    """The textbook's formula on standardised features."""
    centre, scale = x.mean(axis=0), x.std(axis=0)
    z = (x - centre) / scale
    weights = np.linalg.inv(z.T @ z + alpha * np.eye(z.shape[1])) @ z.T @ (y - y.mean())
    return lambda new: (new - centre) / scale @ weights + y.mean()


def test_r2_at_left_out_sites_predicts_each_site_from_the_others(table):
    x, age, site, train, test = table
    predicted = []
    for row in test:
        others = [k for k in train if site[k] != site[row]]
        alpha = metrics.ridge().fit(x[others], age[others])[-1].alpha_
        predicted.append(naive_ridge(x[others], age[others], alpha)(x[row]))
    expected = metrics.r2(age[test], np.array(predicted))
    assert metrics.left_out_site_r2(x, age, site, train, test) == pytest.approx(expected)


def test_r2_within_sites_does_not_depend_on_what_sites_add(table):
    x, age, site, train, test = table
    plain = metrics.within_site_r2(x, age, site, train, test)
    moved = metrics.within_site_r2(x + 50.0 * site[:, None], age + 30.0 * site, site, train, test)
    assert moved == pytest.approx(plain)
    assert plain > 0.3
    constant = np.tile([1.0, 2.0, 3.0], 30)
    assert np.isnan(metrics.within_site_r2(x, constant, np.tile([0, 1, 2], 30), train, test))


def test_rows_are_normalised_to_the_unit_interval_and_constant_ones_to_zero():
    np.testing.assert_array_equal(
        normalise_rows([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0]]), [[0, 1, 0.5], [0, 0, 0]]
    )


def test_similarity_with_clean_features():
    rng = np.random.default_rng()
    clean, noise = rng.normal(size=(2, 50, 3))
    x = clean + 0.5 * noise + 7.0
    each = [
        1 - ((a - a.mean() - b + b.mean()) ** 2).sum() / ((b - b.mean()) ** 2).sum()
        for a, b in zip(x.T, clean.T, strict=True)
    ]
    assert metrics.r2_with_clean(x, clean) == pytest.approx(np.mean(each))
    assert metrics.r2_with_clean(clean + 3, clean) == pytest.approx(1)


def test_the_share_of_the_site_is_omega_squared():
    rng = np.random.default_rng()
    site = np.repeat(["A", "B", "C"], [10, 15, 25])
    x = rng.normal(size=(50, 2)) + (site == "B")[:, None] * [0.0, 2.0]
    pool = PooledDataset.from_arrays(x, site=site)
    for share, column in zip(metrics.site_shares(pool, x), x.T, strict=True):
        groups = [column[site == s] for s in "ABC"]
        between = sum(len(g) * (g.mean() - column.mean()) ** 2 for g in groups)
        error = sum(((g - g.mean()) ** 2).sum() for g in groups) / (50 - 3)
        total = ((column - column.mean()) ** 2).sum()
        assert share == pytest.approx(max((between - 2 * error) / (total + error), 0.0))


def test_the_age_is_predicted_from_a_tau_that_turns_with_it():
    rng = np.random.default_rng()
    age = rng.uniform(20, 80, 200)
    tau = np.column_stack([np.cos(age / 40), np.sin(age / 40)])
    halves = tau[:100], age[:100], tau[100:], age[100:]
    assert min(metrics.age_from_tau(*halves)) > 0.8
    assert metrics.age_from_tau(tau[:100], rng.permutation(age[:100]), tau[100:], age[100:])[0] < 0.5
