import numpy as np
import pytest

from equipool.exceptions import InputError
from equipool.judge import delta_eq, mmd_measure, normalise_rows, paper_adversary, site_readers
from equipool.judge import scores as metrics
from equipool.judge.classifiers import permuted_band
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


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("block", [7, 2048])
def test_m_equals_the_double_loop(block, unbiased, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", block)
    z, _, site = codes()
    assert mmd_measure(z, site, unbiased=unbiased) == pytest.approx(naive_mmd(z, site, unbiased), abs=1e-12)


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
    found = metrics.discrepancy(z, site, draws=200)
    shuffled = found.shuffled
    assert abs(shuffled.mean()) < 4 * shuffled.std() / np.sqrt(200)
    assert found.unbiased == pytest.approx(mmd_measure(z, site))
    assert found.biased == pytest.approx(mmd_measure(z, site, unbiased=False))
    assert shuffled.max() < found.unbiased
    np.testing.assert_array_equal(shuffled[:20], metrics.discrepancy(z, site, draws=20).shuffled)
    again = [mmd_measure(z, rng.permutation(site)) for _ in range(200)]
    assert 0.7 < shuffled.std() / np.std(again) < 1.4


def test_delta_eq_rises_with_the_order_in_tau():
    age = np.linspace(20, 80, 200)
    angle = (age - 50) / 30 * np.pi / 2
    turning = np.column_stack([np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(2 * angle)])
    shuffled = np.random.default_rng().permutation(turning)
    assert delta_eq(turning, age) > 1.2 * delta_eq(shuffled, age)
    assert delta_eq(turning, age * 12) == pytest.approx(delta_eq(turning, age))


def test_readers_find_a_site_that_is_there_and_none_that_is_not():
    rng = np.random.default_rng()
    site = rng.integers(0, 2, 400)
    there, gone = rng.normal(size=(2, 400, 5))
    there[:, 0] += 3 * site
    half = slice(0, 200), slice(200, 400)
    for z, low, high in ((there, 0.85, 1.0), (gone, 0.35, 0.65)):
        split = z[half[0]], site[half[0]], z[half[1]], site[half[1]]
        for reading in [*site_readers(*split), paper_adversary(*split)]:
            assert low <= reading.auc <= high, reading
            assert 0.4 < reading.chance < 0.6
    low, high = permuted_band(*split)
    assert 0.35 < low < 0.5 < high < 0.65


def test_the_paper_adversary_reads_the_same_twice():
    z, _, site = codes(80)
    first, second = (paper_adversary(z, site, z, site, seed=3) for _ in range(2))
    assert first == second


def test_one_site_cannot_be_compared():
    with pytest.raises(InputError, match="at least 2"):
        mmd_measure(np.ones((3, 2)), ["A"] * 3)
    with pytest.raises(InputError, match="at least 2 rows"):
        delta_eq(np.ones((1, 2)), [3.0])
