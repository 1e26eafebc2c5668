import numpy as np
import pandas as pd
import pytest
from scipy import stats

from equipool.exceptions import InputError
from equipool.judge import statmaps
from equipool.judge.statmaps import StatMap, clusters, detection, in_volume, stat_map


@pytest.fixture(params=[0, 1])
def people(request):
    """Forty people of three sites with ten voxels: values, classes, two covariates, sites."""
    rng = np.random.default_rng(request.param)
    site = np.resize(["GE", "Philips", "Siemens"], 40)
    dx = rng.permutation(np.resize(["AD", "CN"], 40))
    covariates = rng.normal(size=(40, 2)) * [9, 1] + [70, 0]
    values = rng.normal(size=(40, 10)) + 0.05 * covariates[:, :1] + (site == "GE")[:, None]
    return values * 100 + 1000, dx, covariates, site


def from_t(t, *, tested=None, df=100):
    t = np.asarray(t, dtype=float)
    tested = np.ones(len(t), dtype=bool) if tested is None else np.asarray(tested)
    return StatMap(t, 2 * stats.t.sf(np.abs(t), df), t, df, df + 2, tested)


def voxel_by_voxel(values, design):
    """The textbook: coefficients, their standard errors from (X'X)^-1, one voxel after the other."""
    n, k = design.shape
    result = []
    for voxel in values.T:
        beta = np.linalg.lstsq(design, voxel)[0]
        variance = ((voxel - design @ beta) ** 2).sum() / (n - k)
        t = beta[-1] / np.sqrt(variance * np.linalg.inv(design.T @ design)[-1, -1])
        result.append((beta[-1], t, 2 * stats.t.sf(abs(t), n - k)))
    return np.array(result).T


@pytest.mark.parametrize("with_sites", [False, True])
@pytest.mark.parametrize("with_covariates", [False, True])
@pytest.mark.parametrize("numeric", [False, True])
def test_the_map_is_the_textbook_regression(people, with_sites, with_covariates, numeric):
    values, dx, covariates, site = people
    target = covariates[:, 1] if numeric else dx
    covariates = covariates[:, 0] if with_covariates else None
    found = stat_map(values, target, covariates=covariates, sites=site if with_sites else None)
    columns = [site[:, None] == np.unique(site)] if with_sites else [np.ones((40, 1))]
    columns += [] if covariates is None else [covariates[:, None]]
    columns.append((target if numeric else target == "CN")[:, None])
    effect, t, p = voxel_by_voxel(values, np.hstack(columns).astype(float))
    np.testing.assert_allclose(found.effect, effect, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.t, t, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(found.p, p, rtol=1e-7)
    assert (found.n, found.df) == (40, 40 - sum(c.shape[1] for c in columns))


def test_without_covariates_it_is_students_t_test(people):
    values, dx, *_ = people
    t, p = stats.ttest_ind(values[dx == "CN"], values[dx == "AD"])
    found = stat_map(values, dx)
    np.testing.assert_allclose(found.t, t, rtol=1e-9)
    np.testing.assert_allclose(found.p, p, rtol=1e-9)
    assert found.contrast == "CN - AD"
    other = stat_map(values, dx, positive="AD")
    np.testing.assert_allclose(other.t, -t, rtol=1e-9)
    assert other.contrast == "AD - CN"


def test_it_agrees_with_nilearn(people):
    from nilearn.mass_univariate import permuted_ols

    values, dx, covariates, _ = people
    theirs = permuted_ols((dx == "CN").astype(float), values, covariates, model_intercept=True, n_perm=0)
    t = theirs["t"] if isinstance(theirs, dict) else theirs[1]
    ours = stat_map(values, dx, covariates=covariates)
    np.testing.assert_allclose(ours.t, np.ravel(t), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("labels", [("10", "9"), (9, 10), (False, True), ("b", "a"), (1.0, 2.0)])
def test_classes_are_in_sorted_order_whatever_they_are(labels):
    low, high = sorted(labels, key=float) if "a" not in labels else sorted(labels)
    target = [low, high] * 5
    values = np.arange(10.0)[:, None] % 2 + np.random.default_rng(0).normal(size=(10, 1)) * 0.1
    assert stat_map(values, target).t[0] > 0
    assert stat_map(values, pd.Series(target), positive=low).t[0] < 0


class Columns:
    """Volumes that can be read a few voxels at a time only."""

    def __init__(self, values):
        self.values, self.shape, self.widest = values, values.shape, 0

    def columns(self, start, stop):
        self.widest = max(self.widest, stop - start)
        return self.values[:, start:stop]


def test_reading_a_few_voxels_at_a_time_changes_no_bit():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(30, 2000)).astype(np.float32) + 50
    target, age, site = np.arange(30) % 2, rng.normal(size=30), np.arange(30) % 3
    whole = stat_map(values, target, covariates=age, sites=site)
    source = Columns(values)
    parts = stat_map(source, target, covariates=age, sites=site)
    for one, other in [(whole.t, parts.t), (whole.p, parts.p), (whole.effect, parts.effect)]:
        np.testing.assert_array_equal(one, other)
    assert source.widest <= statmaps.TILE


@pytest.mark.parametrize("level", [0.0, 0.1, 1e6 / 3])
def test_voxels_without_variation_are_not_tested(people, level):
    values, dx, covariates, site = people
    values = values.copy()
    values[:, 2] = level
    values[:, 5] = np.where(site == "GE", level, 7.3)  # such as a voxel outside of one scanner's view
    found = stat_map(values, dx, covariates=covariates, sites=site)
    assert np.flatnonzero(~found.tested).tolist() == [2, 5]
    assert found.t[[2, 5]].tolist() == [0, 0]
    assert found.p[[2, 5]].tolist() == [1, 1]
    assert found.effect[[2, 5]].tolist() == [0, 0]
    assert stat_map(values, dx).tested[5]


@pytest.mark.parametrize("n", [4, 16, 40])
def test_a_voxel_that_is_the_target_is_finite_and_significant(n):
    dx = np.resize(["AD", "CN"], n)
    found = stat_map(np.column_stack([dx == "CN", 3.0 * (dx == "AD")]), dx)
    assert np.isfinite(found.t).all()
    assert found.p.max() < 1e-14
    np.testing.assert_allclose(found.effect, [1, -3])


def test_where_the_zero_of_a_covariate_lies_does_not_matter(people):
    values, dx, covariates, _ = people
    expected = stat_map(values, dx, covariates=covariates).t
    # such as a date in seconds
    np.testing.assert_allclose(stat_map(values, dx, covariates=covariates + 1e10).t, expected, rtol=1e-4)


@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.3])
def test_corrections_follow_their_definitions(alpha):
    rng = np.random.default_rng(0)
    tested = rng.random(500) < 0.7
    found = from_t(np.where(tested, rng.normal(size=500) * 2.5, 0), tested=tested)
    found.p[~tested] = 1
    m = tested.sum()
    p = found.p
    np.testing.assert_array_equal(found.significant(alpha=alpha, correction=None), tested & (p < alpha))
    np.testing.assert_array_equal(found.significant(alpha=alpha), tested & (p < alpha / m))
    # Benjamini and Hochberg: the largest k with p_(k) <= k alpha / m, and all below it
    passing = [k for k, value in enumerate(np.sort(p[tested]), start=1) if value <= k * alpha / m]
    expected = p <= (np.sort(p[tested])[passing[-1] - 1] if passing else -1)
    np.testing.assert_array_equal(found.significant(alpha=alpha, correction="fdr"), tested & expected)
    assert 0 < expected.sum() < m


def test_nothing_tested_is_nothing_found():
    found = stat_map(np.ones((10, 4)), np.arange(10) % 2)
    for correction in ("bonferroni", "fdr", None):
        assert not found.significant(alpha=0.5, correction=correction).any()


def test_without_an_effect_the_level_holds():
    rates, any_found = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        site, age = rng.integers(0, 3, 60), rng.normal(size=60)
        values = rng.normal(size=(60, 500)) + 3 * rng.normal(size=(3, 500))[site] + age[:, None]
        # patients are older and mostly of one site: what is not adjusted for would be taken for the disease
        dx = (age + (site == 0) + rng.normal(size=60) > 0).astype(int)
        found = stat_map(values, dx, covariates=age, sites=site)
        rates.append(found.significant(alpha=0.05, correction=None).mean())
        any_found.append(found.significant(alpha=0.1).any())
    assert 0.045 < np.mean(rates) < 0.055  # standard error 0.0015
    assert np.mean(any_found) < 0.27  # 0.1 + 3.5 standard errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": ["CN"] * 40}, "'CN' in every row"),
        ({"target": np.resize(["AD", "CN", "MCI", "CN"], 40)}, "3 classes"),
        ({"target": ["AD"] * 39}, "target has 39 values for 40 rows"),
        ({"target": [None, "AD"] * 20}, r"'target' \(target\) is empty in rows 1, 3"),
        ({"positive": "MCI"}, "positive must be one of the target's two classes"),
        ({"sites": np.resize(["GE", None], 40)}, r"'site' \(site\) is empty in rows 2, 4"),
        ({"covariates": np.ones(40)}, "'c0' is the same in every row"),
        ({"covariates": np.r_[np.arange(39.0), np.nan]}, r"'c0' \(covariate\) is empty in row 40"),
        (
            {"covariates": [*range(39), "old"]},
            "'c0' must hold numbers but has text, such as 'old', in row 40",
        ),
        ({"covariates": np.arange(39.0)}, "covariates has 39 values"),
        ({"values": np.ones(40)}, "rows by voxels"),
    ],
)
def test_what_cannot_be_used_is_named(people, change, message):
    values, dx, _, _ = people
    arguments = {"values": values, "target": dx} | change
    with pytest.raises(InputError, match=message):
        stat_map(arguments.pop("values"), arguments.pop("target"), **arguments)


def test_missing_values_are_named_by_voxel_and_person(people):
    values, dx, *_ = people
    values = np.tile(values, 60)
    values[6, 411] = np.nan
    with pytest.raises(InputError, match="Voxel 412 of row 7 is nan"):
        stat_map(values, dx)


@pytest.mark.parametrize("offset", [0, 1e5])
def test_what_cannot_be_told_apart_is_named(people, offset):
    values, dx, covariates, site = people
    frame = pd.DataFrame({"age": covariates[:, 0] + offset, "score": covariates[:, 1]})
    with pytest.raises(InputError, match="target is fixed by the sites"):
        stat_map(values, site == "GE", sites=site, covariates=frame)
    with pytest.raises(InputError, match="target is fixed by 'months'"):
        stat_map(values, frame["age"], covariates=frame[["score"]].assign(months=frame["age"] * 12))
    with pytest.raises(InputError, match="target is fixed by 'age' and 'score'"):
        stat_map(values, frame.sum(axis=1), covariates=frame)
    with pytest.raises(InputError, match="'months' is fixed by 'age'"):
        stat_map(values, dx, covariates=frame.assign(months=12 * frame["age"]), sites=site)
    with pytest.raises(InputError, match="'field' is fixed by the sites"):
        stat_map(values, dx, covariates=frame.assign(field=np.where(site == "GE", 1.5, 3)), sites=site)


def test_as_many_coefficients_as_people_are_refused(people):
    values, dx, covariates, _ = people
    dx = np.resize(["AD", "CN"], 5)
    assert stat_map(values[:5], dx, covariates=covariates[:5]).df == 1
    with pytest.raises(InputError, match="4 participants for 4 coefficients"):
        stat_map(values[:4], dx[:4], covariates=covariates[:4])


def test_clusters_of_a_planted_blob():
    mask = np.ones((12, 14, 12), dtype=bool)
    mask[0] = False
    affine = np.array([[-4.0, 0, 0, 20], [0, 4, 0, -30], [0, 0, 5, -10], [0, 0, 0, 1]])
    t = np.zeros(mask.shape)
    t[3:6, 4:7, 5:8] = 8
    t[4, 5, 5] = 12
    t[6, 4:7, 5] = -9  # touches the blob, but points the other way
    t[9, 9, 9], t[10, 10, 9] = 7, 6.5  # share an edge, not a face
    found = clusters(from_t(t[mask]), mask, affine)
    assert found["cluster"].tolist() == [1, 2, 3, 4]
    assert found["voxels"].tolist() == [27, 3, 1, 1]
    np.testing.assert_allclose(found["mm3"], [27 * 80, 240, 80, 80])
    assert found["peak_t"].tolist() == [12, -9, 7, 6.5]
    assert found.loc[0, ["peak_x", "peak_y", "peak_z"]].tolist() == [4, -10, 15]
    centre = [4, -10, 20 - 5 * 4 / (26 * 8 + 12)]  # drawn to the peak by its larger t
    np.testing.assert_allclose(found.loc[0, ["centre_x", "centre_y", "centre_z"]].tolist(), centre)
    np.testing.assert_allclose(found.loc[1, ["centre_x", "centre_y", "centre_z"]].tolist(), [-4, -10, 15])
    assert clusters(from_t(t[mask]), mask, affine, keep=t[mask] > 11)["voxels"].tolist() == [1]
    none = clusters(from_t(0 * t[mask]), mask, affine)
    assert len(none) == 0
    assert none.columns.tolist() == found.columns.tolist()


def test_clusters_agree_with_nilearn():
    import nibabel as nib
    from nilearn.reporting import get_clusters_table
    from scipy.ndimage import gaussian_filter

    affine = np.diag([4.0, 4, 4, 1])
    affine[:3, 3] = [-30, -40, -20]
    t = gaussian_filter(np.random.default_rng(0).normal(size=(12, 14, 12)), 1) * 30
    mask = np.ones(t.shape, dtype=bool)
    ours = clusters(from_t(t.ravel()), mask, affine, keep=np.abs(t.ravel()) > 4)
    theirs = get_clusters_table(nib.Nifti1Image(t, affine), 4, two_sided=True, min_distance=1000)
    expected = theirs[["X", "Y", "Z", "Peak Stat", "Cluster Size (mm3)"]].astype(float).to_numpy()
    found = ours[["peak_x", "peak_y", "peak_z", "peak_t", "mm3"]].to_numpy()
    order = [np.argsort(table[:, 3]) for table in (found, expected)]
    np.testing.assert_allclose(found[order[0]], expected[order[1]], rtol=1e-5)
    assert len(found) > 4


def test_a_mask_of_another_volume_is_refused():
    with pytest.raises(InputError, match=r"27 voxels, the map has shape \(20,\)"):
        in_volume(np.zeros(20), np.ones((3, 3, 3)))


def test_detection_counts_what_is_called():
    t = np.array([9.0, -9, 4.2, 1, 0, 9, 3.8, 0.5, -9, 3])  # p < 0.001 / 10 where |t| > 4.05
    affected = np.arange(10) < 4
    unaffected = (np.arange(10) >= 4) & (np.arange(10) < 8)
    found = detection(from_t(t), affected, unaffected)
    assert (found.found, found.false) == (0.75, 0.25)
    signed = detection(from_t(t), affected, unaffected, direction=np.where(affected, 1, 0))
    assert (signed.found, signed.false) == (0.5, 0.25)
    called = from_t(t).significant(alpha=0.05, correction="fdr")
    loose = detection(from_t(t), affected, unaffected, alpha=0.05, correction="fdr")
    assert (loose.found, loose.false) == (called[affected].mean(), called[unaffected].mean())


@pytest.mark.parametrize("seed", range(3))
def test_detection_compares_at_one_false_rate(seed):
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(seed)
    affected = np.arange(4000) < 1000
    t = rng.normal(size=4000) - 2.5 * affected
    for scale in (1, 3):  # one map calls far more freely than the other, and is no better for it
        found = detection(from_t(scale * t), affected, ~affected, false_rate=0.29)
        assert found.false == 0.29
        assert (
            found.found
            == (np.abs(t[affected]) > np.quantile(np.abs(t[~affected]), 0.71, method="lower")).mean()
        )
        assert found.auc == pytest.approx(roc_auc_score(affected, np.abs(t)))
    strict = detection(from_t(t), affected, ~affected, false_rate=0.01)
    assert strict.false == 0.01
    # normal theory: |t| above 2.576 has the power P(z < -2.576 + 2.5) = 0.47; three standard errors of both
    assert strict.found == pytest.approx(0.47, abs=0.1)
    assert detection(from_t(t), affected, ~affected, false_rate=0.01, direction=-1).found > strict.found
    assert detection(from_t(t), affected, ~affected, false_rate=0.01, direction=1).found < 0.01
    assert detection(
        from_t(rng.normal(size=4000)), affected, ~affected, false_rate=0.01
    ).auc == pytest.approx(0.5, abs=0.06)


def test_a_truth_that_cannot_be_is_refused():
    t = from_t(np.arange(5.0))
    yes = np.arange(5) < 2
    for affected, unaffected in [(yes, yes), (yes, yes & ~yes), (yes & ~yes, yes)]:
        with pytest.raises(InputError, match="at least one of each"):
            detection(t, affected, unaffected)
    with pytest.raises(InputError, match="each of the map's 5 voxels"):
        detection(t, yes[:3], ~yes)
    with pytest.raises(InputError, match="false_rate"):
        detection(t, yes, ~yes, false_rate=1.0)
    with pytest.raises(InputError, match="alpha"):
        detection(t, yes, ~yes, alpha=0)
    with pytest.raises(InputError, match="correction"):
        t.significant(correction="holm")


@pytest.mark.parametrize("seed", [0, 1])
def test_visits_of_one_person_count_once(seed):
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(20), rng.integers(1, 4, 20))
    rng.shuffle(who)
    ill, age = np.arange(20) % 2, rng.uniform(60, 80, len(who))
    values = rng.normal(size=(20, 5))[who] + 0.1 * rng.normal(size=(len(who), 5))
    found = stat_map(values, ill[who], covariates=age, subject=[f"s{k}" for k in who])
    means = np.array([values[who == k].mean(axis=0) for k in range(20)])
    ages = np.array([age[who == k].mean() for k in range(20)])
    expected = stat_map(means, ill, covariates=ages)
    np.testing.assert_allclose(found.t, expected.t)
    assert (found.n, found.df) == (20, expected.df)
    assert np.abs(stat_map(values, ill[who], covariates=age).t).max() > np.abs(found.t).max()  # too sure


def test_who_changes_class_between_visits_is_named():
    with pytest.raises(InputError, match=r"1 participant is of one class .*'b'"):
        stat_map(np.arange(8.0)[:, None] ** 2, [0, 0, 0, 1, 1, 1, 0, 1], subject=list("aabbccde"))
    with pytest.raises(InputError, match="subject has 2 values"):
        stat_map(np.ones((8, 1)), [0, 1] * 4, subject=["a", "b"])


@pytest.mark.parametrize("everywhere", [True, False])
def test_travelling_participants_have_the_mean_of_their_sites_intercepts(everywhere):
    rng = np.random.default_rng(0)
    who, site = np.repeat(np.arange(30), 2), np.tile(["a", "b"], 30)
    if not everywhere:  # a third stayed at one site
        site[:20] = "a"
    values, ill = rng.normal(size=(60, 5)) + (site == "b")[:, None], rng.permutation(30) % 2
    found = stat_map(values, ill[who], sites=site, subject=who)
    means = values.reshape(30, 2, 5).mean(axis=1)
    share = (site == "b").reshape(30, 2).mean(axis=1)
    expected = stat_map(means, ill) if everywhere else stat_map(means, ill, covariates=share)
    np.testing.assert_allclose(found.t, expected.t)
    assert found.df == expected.df
