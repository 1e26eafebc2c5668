"""The protocol: who is fitted on and who is evaluated, and what the scores are of."""

import numpy as np
import pytest

from equipool.data import PooledDataset
from equipool.judge.heldout import Fold, held_out, make_folds, sample_rows


def pool_of(count=90, effect=0.0):
    rng = np.random.default_rng()
    site = np.arange(count) % 3
    age = rng.uniform(20, 80, count)
    x = rng.normal(size=(count, 4)) + age[:, None] / 10 * [1, -1, 0, 0] + effect * site[:, None]
    dx = np.where(age + 15 * rng.normal(size=count) > 50, "AD", "CN")
    return PooledDataset.from_arrays(
        x, site=np.array(["A", "B", "C"])[site], covariates=age, covariate_names=["age"], y=dx
    )


def test_every_row_is_tested_once_and_sites_are_in_proportion():
    pool = pool_of()
    folds = make_folds(pool, None, 5)
    assert sorted(np.concatenate([fold.test for fold in folds])) == list(range(90))
    for fold in folds:
        assert set(fold.train) & set(fold.test) == set()
        assert np.ptp(np.bincount(pool.site[fold.test])) <= 2


def test_of_no_large_sites_there_are_no_folds():
    pool = pool_of(12)
    assert make_folds(pool, None) == []
    assert held_out(pool, pool.features, lambda train: pool.features) is None


def test_classifiers_among_test_rows_never_split_a_participant():
    """Who somebody is tells the site, and nothing else does: split, visits would give it away."""
    rng = np.random.default_rng()
    subject = np.repeat(np.arange(60), 3)
    x = (100 * rng.normal(size=(60, 6)))[subject] + 0.01 * rng.normal(size=(180, 6))
    pool = PooledDataset.from_arrays(x, site=np.array(["A", "B", "C"])[subject % 3])
    fold = Fold(pool, np.arange(0), np.arange(180), subject)
    assert max(fold.site_scores_among_test(x).values()) < 0.65
    apart = Fold(pool, np.arange(0), np.arange(180), np.arange(180))
    assert apart.site_scores_among_test(x)["tree"] > 0.75


def test_among_test_rows_shuffled_sites_cannot_be_predicted():
    pool = pool_of(300, effect=3.0)
    fold = Fold(pool, np.arange(100), np.arange(100, 300), np.arange(300))
    assert fold.site_scores_among_test(pool.features)["logistic"] > 0.8
    assert fold.site_scores_among_test(pool.features, shuffled=True)["logistic"] < 0.65


def test_a_site_with_one_test_participant_is_not_cross_validated():
    pool = pool_of()
    fold = Fold(pool, np.arange(80), np.array([80, 81, 82, 83, 84]), np.arange(90))
    assert fold.site_scores_among_test(pool.features) == {}


def test_other_training_labels_give_the_level_of_chance():
    pool = pool_of(300, effect=3.0)
    fold = Fold(pool, np.arange(100), np.arange(100, 300), np.arange(300))
    [true] = fold.site_scores(pool.features, ["logistic"])
    shuffled = []  # one such classifier may be right or wrong by chance about most of a site
    for mixed in (np.random.default_rng().permutation(pool.site) for _ in range(10)):
        [scores] = fold.site_scores(pool.features, ["logistic"], site=mixed)
        shuffled.append(scores.balanced_accuracy)
    assert true.balanced_accuracy > 0.8 > 0.65 > np.mean(shuffled)


def test_numbers_and_classes_are_predicted_from_features():
    pool = pool_of(300)
    fold = Fold(pool, np.arange(200), np.arange(200, 300), np.arange(300))
    scores = fold.number_scores(pool.features, pool.C[:, 0])
    assert set(scores) == {"all", "within sites", "left-out sites"}
    assert min(scores.values()) > 0.5
    assert min(fold.class_scores(pool.features, pool.y.astype(str)).values()) > 0.7
    assert fold.class_scores(pool.features, np.repeat("AD", 300)) == {}


def test_the_harmonizer_is_given_training_rows_and_its_result_is_what_is_judged():
    pool, seen = pool_of(effect=3.0), []

    def harmonize(train):
        seen.append(len(train))
        return pool.features - 3.0 * pool.site[:, None]

    found = held_out(pool, pool.features, harmonize)
    assert len(seen) == found["folds"] == 5
    assert max(seen) <= 75
    best = {}
    for stage, mean in zip(found["site_scores"]["stage"], found["site_scores"]["mean"], strict=True):
        best[stage] = max(best.get(stage, 0), mean)
    assert set(best) == {"before", "after", "covariates", "shuffled"}
    assert best["before"] > 0.8 > 0.65 > best["after"]
    assert found["signals"]["what"] == ["age"] * 3 + ["target"] * 2
    assert np.mean(found["shares"]["after"]) < 0.3 < np.mean(found["shares"]["before"])


@pytest.mark.parametrize("most", [30, 500])
def test_a_sample_has_every_site_in_proportion(most):
    pool = pool_of()
    rows = sample_rows(pool, most, 0)
    assert len(rows) == pytest.approx(min(most, 90), abs=1)
    assert np.ptp(np.bincount(pool.site[rows])) <= 1
