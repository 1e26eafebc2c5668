import numpy as np
import pytest

from equipool.exceptions import InputError
from equipool.judge import classifiers, classify_site, shuffled_band
from equipool.judge.classifiers import (
    BALANCED,
    CLASSIFIERS,
    REPORTED,
    UNWEIGHTED,
    fit_classifiers,
    shuffled_sites,
)


def rows(count=400, effect=0.0):
    rng = np.random.default_rng()
    site = rng.integers(0, 2, count)
    x = rng.normal(size=(count, 5))
    x[:, 0] += effect * site
    half = count // 2
    return x[:half], site[:half], x[half:], site[half:]


@pytest.mark.parametrize("name", list(CLASSIFIERS))
def test_every_classifier_predicts_a_site_that_is_there_and_none_that_is_not(name):
    for effect, low, high in ((3.0, 0.8, 1.0), (0.0, 0.3, 0.7)):
        [score] = classify_site(*rows(effect=effect), classifiers=[name])
        assert score.classifier == name
        assert low <= score.auc <= high, score
        assert low - 0.05 <= score.balanced_accuracy <= high, score
        assert 0.4 < score.chance < 0.65


def test_the_names_of_each_protocol_are_in_the_registry():
    assert {*BALANCED, *UNWEIGHTED, *REPORTED} <= set(CLASSIFIERS)
    with pytest.raises(InputError, match=r"no classifier 'svm'; there are logistic, "):
        classify_site(*rows(), classifiers=["svm"])


def test_scores_equal_their_definitions():
    rng = np.random.default_rng()
    x, site = rng.normal(size=(90, 3)), np.array(["A", "B", "C"])[rng.integers(0, 3, 90)]
    fitted = fit_classifiers(x[:60], site[:60], classifiers=["logistic"])
    [score] = fitted.score(x[60:], site[60:])
    predicted, true = np.array(["A", "B", "C"])[fitted.models["logistic"].predict(x[60:])], site[60:]
    recalls = [(predicted[true == s] == s).mean() for s in np.unique(true)]
    assert score.accuracy == pytest.approx((predicted == true).mean())
    assert score.balanced_accuracy == pytest.approx(np.mean(recalls))
    assert score.chance == max((true == s).mean() for s in "ABC")


def test_weighted_classifiers_do_not_ignore_a_small_site():
    rng = np.random.default_rng()
    site = (np.arange(600) % 20 == 0).astype(int)
    x = rng.normal(size=(600, 2)) + 1.5 * site[:, None]
    half = x[:300], site[:300], x[300:], site[300:]
    weighted, plain = (classify_site(*half, classifiers=[n])[0] for n in ("logistic", "unweighted logistic"))
    assert weighted.balanced_accuracy > plain.balanced_accuracy
    assert weighted.accuracy < plain.accuracy


def test_rows_of_unknown_sites_do_not_count():
    x, site, x_test, site_test = rows(effect=3.0)
    labels = np.where(np.arange(len(site_test)) < 20, "new", site_test.astype(str))
    whole = classify_site(x, site, x_test, labels, classifiers=["logistic"])
    assert whole == classify_site(x, site, x_test[20:], site_test[20:], classifiers=["logistic"])


def test_the_network_of_the_paper_gives_the_same_twice():
    data = rows(160)
    assert classify_site(*data, classifiers=["paper"], seed=3) == classify_site(
        *data, classifiers=["paper"], seed=3
    )


def test_a_small_table_of_many_sites_can_be_classified():
    """A tenth of these rows would be too few to stop a perceptron by."""
    rng = np.random.default_rng()
    site = np.repeat(np.arange(9), 4)
    for score in classify_site(rng.normal(size=(36, 3)), site, rng.normal(size=(36, 3)), site):
        assert 0 <= score.balanced_accuracy <= 1
    assert len(site) < classifiers.ROWS_TO_STOP_EARLY


def test_the_band_of_shuffled_sites_holds_the_auc_of_no_effect():
    low, high = shuffled_band(*rows(effect=3.0))
    assert 0.3 < low < 0.5 < high < 0.7


def test_shuffled_sites_stay_among_the_rows():
    rng = np.random.default_rng()
    site, some = np.arange(30) % 4, np.arange(5, 25)
    shuffled = shuffled_sites(site, some, rng)
    assert sorted(shuffled[some]) == sorted(site[some])
    np.testing.assert_array_equal(np.delete(shuffled, some), np.delete(site, some))
    assert (shuffled != site).any()
    np.testing.assert_array_equal(site, np.arange(30) % 4)
