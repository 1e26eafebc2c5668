from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equipool as ep
from equipool.data import Covariate
from equipool.exceptions import InputError


def pool(sizes=(30, 20, 10), seed=0):
    rng = np.random.default_rng(seed)
    site = np.repeat([f"site{k}" for k in range(len(sizes))], sizes)
    rows = len(site)
    return ep.PooledDataset.from_arrays(
        rng.normal(size=(rows, 3)),
        site=site,
        covariates=np.column_stack([rng.uniform(20, 80, rows), np.arange(1, rows + 1) % 2]),
        covariate_names=["age", "sex"],
        units={"age": "years"},
        y=np.arange(rows) % 2,
    )


def partitions(folds, rows):
    """Whether each fold's train and test are all rows once, and the tests together too."""
    for train, test in folds:
        assert sorted([*train, *test]) == list(range(rows))
    return sorted(np.concatenate([test for _, test in folds])) == list(range(rows))


site_sizes = st.lists(st.integers(1, 30), min_size=2, max_size=12).filter(
    lambda s: sum(s) >= 8 and max(s) > 1
)
strata = st.sampled_from(["site", "target", "age", ("site", "age"), ("site", "target", "age", "sex"), ()])


@given(site_sizes, st.integers(2, 7), strata, st.integers(0, 10_000))
def test_folds_never_lose_or_repeat_a_row(sizes, n_folds, stratify, seed):
    data = pool(sizes)
    folds = data.folds(n_folds, stratify=stratify, random_state=seed)
    assert partitions(folds, len(data))
    lengths = [len(test) for _, test in folds]
    assert max(lengths) - min(lengths) <= 1


@given(site_sizes, st.floats(0.05, 0.95), strata, st.integers(0, 10_000))
def test_a_split_never_loses_or_repeats_a_row(sizes, share, stratify, seed):
    data = pool(sizes)
    train, test = data.split(share, stratify=stratify, random_state=seed)
    assert sorted([*train, *test]) == list(range(len(data)))
    assert abs(len(test) - share * len(data)) <= 1


@given(site_sizes, st.integers(2, 5), st.integers(0, 10_000))
def test_every_site_is_in_every_fold_in_proportion(sizes, n_folds, seed):
    data = pool(sizes)
    for _, test in data.folds(n_folds, stratify="site", random_state=seed):
        counts = np.bincount(data.site[test], minlength=len(sizes))
        sizes_of_sites = np.bincount(data.site)
        assert (np.abs(counts - sizes_of_sites / n_folds) <= 1).all()


@given(site_sizes, st.floats(0.1, 0.9), st.integers(0, 10_000))
def test_every_site_is_in_a_split_in_proportion(sizes, share, seed):
    data = pool(sizes)
    _, test = data.split(share, random_state=seed)
    counts = np.bincount(data.site[test], minlength=len(sizes))
    sizes_of_sites = np.bincount(data.site)
    assert (np.abs(counts - sizes_of_sites * share) <= 1 + 1e-9).all()


def test_covariate_strata_make_folds_of_like_ages():
    data = pool((200, 100))
    free, strict = (
        np.std([data.covariate("age")[test].mean() for _, test in data.folds(5, stratify=s, random_state=1)])
        for s in ((), "age")
    )
    assert strict < 0.5
    assert strict < free


def test_leave_one_site_out_takes_each_site_once():
    data = pool()
    folds = data.leave_one_site_out()
    assert partitions(folds, len(data))
    assert [set(data.site_labels[test]) for _, test in folds] == [{"site0"}, {"site1"}, {"site2"}]


def test_the_same_seed_gives_the_same_split_and_another_another():
    data = pool()
    first, again, other = (data.split(0.3, random_state=seed)[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert set(first) != set(other)


def test_folds_work_as_scikit_learns_cv():
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import cross_val_score

    data = pool()
    scores = cross_val_score(Ridge(), data.X, data.C[:, 0], cv=data.folds(4))
    assert len(scores) == 4


def test_a_pool_is_frozen():
    data = pool()
    with pytest.raises(AttributeError):
        data.X = None
    for array in (data.X, data.y, data.C, data.site, data.ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = array[1]


def test_building_does_not_freeze_or_change_the_callers_arrays():
    X, age = np.ones((4, 2)), np.array([1.0, 2, 3, 4])
    X[0] = 0
    ep.PooledDataset.from_arrays(X, site=["A", "A", "B", "B"], covariates=age)
    X[0, 0], age[0] = 5.0, 5.0


def test_a_selection_keeps_the_names_and_scales_of_the_whole():
    data = pool()
    mask = (data.site_labels == "site2") & (data.C[:, 0] >= 30) & (data.C[:, 0] <= 60)
    part = data[mask]
    assert part.sites == data.sites
    assert part.covariates == data.covariates
    assert set(part.site_labels) == {"site2"}
    assert part.covariate("age").min() >= 30
    np.testing.assert_array_equal(part.X, data.X[mask])
    np.testing.assert_array_equal(part.ids, data.ids[mask])


def test_covariates_are_scaled_to_plus_minus_one_and_back():
    data = pool()
    assert data.scaled[:, 0].min() == pytest.approx(-1)
    assert data.scaled[:, 0].max() == pytest.approx(1)
    age = data.covariates[0]
    np.testing.assert_allclose(data.scaled[:, 0] * age.scale + age.centre, data.C[:, 0])
    assert data.covariates[0].unit == "years"
    assert Covariate("constant").scaled(3.0) == 3.0


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_pool_survives_a_round_trip_through_a_file(suffix, tmp_path):
    data = ep.simulate_table(people=20).pool
    path = tmp_path / f"pool{suffix}"
    frame = data.to_frame()
    if suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
    back = ep.PooledDataset.read(path, site="site", covariates="age", target="dx", id="id")
    np.testing.assert_allclose(back.X, data.X)
    np.testing.assert_allclose(back.C, data.C)
    np.testing.assert_array_equal(back.y, data.y)
    np.testing.assert_array_equal(back.ids, data.ids)
    assert back.sites == data.sites
    assert back.feature_names == data.feature_names


def test_text_levels_survive_a_round_trip():
    frame = pd.DataFrame({"s": list("AABB"), "sex": list("MFFM"), "v": [1.0, 2, 3, 4]})
    data = ep.PooledDataset.from_frame(frame, site="s", covariates="sex")
    assert data.covariates[0].levels == ("F", "M")
    assert data.to_frame()["sex"].tolist() == list("MFFM")


def test_images_take_the_place_of_features(tmp_path):
    frame = pd.DataFrame({"s": list("AABB"), "age": [1.0, 2, 3, 4], "t1": [f"{k}.nii.gz" for k in range(4)]})
    data = ep.PooledDataset.from_frame(frame, site="s", covariates="age", images="t1")
    assert data.X is None
    assert data[[2, 0]].images == (Path("2.nii.gz"), Path("0.nii.gz"))
    assert "images" in repr(data)
    assert data.to_frame()["image"].tolist() == frame.t1.tolist()
    again = ep.PooledDataset.from_arrays(images=frame.t1, site=frame.s, covariates=frame.age)
    assert again.images == data.images
    assert again.feature_names == ()
    frame.loc[1, "t1"] = None
    with pytest.raises(InputError, match="names no image in row 2"):
        ep.PooledDataset.from_frame(frame, site="s", covariates="age", images="t1")


def test_numeric_targets_are_numbers_and_few_whole_ones_are_classes():
    frame = pd.DataFrame(
        {"s": list("AABB") * 5, "v": np.arange(20.0), "mmse": np.arange(20) + 0.5, "dx": [0, 1] * 10}
    )
    assert ep.PooledDataset.from_frame(frame, site="s", target="mmse").task == "number"
    data = ep.PooledDataset.from_frame(frame, site="s", target="dx", ignore=["mmse"])
    assert data.task == "class"
    assert set(data.y) == {"0", "1"}
    assert ep.PooledDataset.from_frame(frame, site="s", target="dx", task="number").y.dtype == float


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ep.PooledDataset.from_arrays(site=["A", "B"]), "either X"),
        (lambda: ep.PooledDataset.from_arrays(np.ones(3), site=["A", "B", "B"]), r"X.reshape\(-1, 1\)"),
        (
            lambda: ep.PooledDataset.from_arrays(np.ones((3, 1)), site=["A", "B"]),
            "site has 2 values but X has 3",
        ),
        (
            lambda: ep.PooledDataset.from_arrays(np.ones((2, 1)), site=["A", "B"], covariates=[1, 2, 3]),
            "covariates has 3 values",
        ),
        (lambda: pool().covariate("agee"), "did you mean 'age'"),
        (lambda: pool().covariate("mmse"), "no covariate 'mmse'; it has 'age', 'sex'"),
        (lambda: pool().folds(1), "between 2 and the 60 rows"),
        (lambda: pool().split(1.5), "share between 0 and 1"),
        (lambda: pool()[0], "not a single number"),
        (lambda: pool()[:1].split(), "cannot be split"),
        (
            lambda: ep.PooledDataset.from_arrays(
                np.ones((2, 1)), site=["A", "B"], covariates=np.eye(2), covariate_names=["a", "a"]
            ),
            "column 'a' more than once",
        ),
        (
            lambda: ep.PooledDataset.from_arrays(np.eye(2), site=["A", "B"], task="x", y=[1, 2]),
            "task must be",
        ),
        (lambda: ep.PooledDataset.from_arrays(np.eye(2), site=["A", "B"], missing="drop"), "missing must be"),
        (lambda: ep.PooledDataset.from_arrays(images=["a", None], site=["A", "B"]), "no image in row 2"),
        (
            lambda: ep.PooledDataset.from_arrays(images=["a"], site=["A", "B"]),
            "2 values for 1 image;",
        ),
        (lambda: ep.simulate_table(overlap=2), "between 0"),
    ],
)
def test_wrong_calls_are_answered(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_numbers_may_name_sites_and_classes():
    data = ep.PooledDataset.from_arrays(np.arange(4.0)[:, None], site=[1, 1, 2, 2], y=[0.0, 1.0, 0.0, 1.0])
    assert data.sites == ("1", "2")
    assert data.y.tolist() == ["0", "1", "0", "1"]


def test_a_table_keeps_its_own_names():
    frame = pd.DataFrame({"scanner": list("AABB"), "site": [1.0, 2, 3, 5], "id": [4.0, 3, 2, 2]})
    back = ep.PooledDataset.from_frame(frame, site="scanner", covariates="site").to_frame()
    assert back["scanner"].tolist() == list("AABB")
    assert back["site"].tolist() == frame["site"].tolist()
    assert back["id"].tolist() == frame["id"].tolist()
    assert back.columns.is_unique


def test_new_rows_take_the_meaning_of_the_pool_they_are_like():
    frame = pd.DataFrame(
        {"s": list("BBCC"), "sex": list("MFFM"), "age": [20.0, 30, 60, 80], "v": [1.0, 2, 3, 4]}
    )
    train = ep.PooledDataset.from_frame(frame, site="s", covariates=["age", "sex"])
    one = frame.assign(s="C", sex="M", age=50.0, extra=1.0).iloc[:1]
    new = ep.PooledDataset.from_frame(one, site="s", covariates=["age", "sex"], like=train)
    assert new.sites == ("B", "C")
    assert new.site.tolist() == [1]
    assert new.covariates == train.covariates
    np.testing.assert_allclose(new.scaled, [[0.0, 1.0]])
    assert new.feature_names == ("v",)
    unseen = ep.PooledDataset.from_frame(one.assign(s="A"), site="s", covariates=["age", "sex"], like=train)
    assert unseen.sites == ("B", "C", "A")
    assert unseen.site.tolist() == [2]
    with pytest.raises(InputError, match="'sex' must hold numbers but has text, such as 'X'"):
        ep.PooledDataset.from_frame(one.assign(sex="X"), site="s", covariates=["age", "sex"], like=train)
    with pytest.raises(InputError, match="give the same in the same order"):
        ep.PooledDataset.from_frame(one, site="s", covariates="age", like=train)


@given(st.integers(2, 6), st.floats(0.01, 0.99), st.integers(0, 1000))
def test_no_side_of_a_split_is_empty(rows, share, seed):
    data = ep.PooledDataset.from_arrays(np.arange(rows)[:, None], site=["A"] * (rows - 1) + ["B"])
    train, test = data.split(share, random_state=seed)
    assert min(len(train), len(test)) >= 1
