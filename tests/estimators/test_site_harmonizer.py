import tracemalloc
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import LeaveOneGroupOut, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import equipool as ep
from equipool.exceptions import EquipoolWarning, InputError
from equipool.sites.design import Design
from equipool.sites.table_model import fit_site_model

SITES = ("GE", "Philips", "Siemens")


def harmonized(pool, **settings):
    given = {"site": pool.site_labels, "covariates": pool.C}
    return ep.SiteHarmonizer(**settings).fit(pool.X, **given).transform(pool.X, **given)


def r2(harmonized, clean):
    """Return the R² of each feature around the means: that of the pool cannot be estimated."""
    a, b = harmonized - harmonized.mean(axis=0), clean - clean.mean(axis=0)
    return (1 - ((a - b) ** 2).sum(axis=0) / (b**2).sum(axis=0)).mean()


@pytest.fixture(scope="module")
def truth():
    return ep.simulate_table(sites=SITES, overlap=0.5, people=80)


@pytest.fixture(scope="module")
def fitted(truth):
    pool = truth.pool
    return ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=pool.C)


@pytest.mark.filterwarnings("ignore:No site was given")
@parametrize_with_checks([ep.SiteHarmonizer(), ep.SiteHarmonizer(missing="impute")])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


# -- the model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [0.0, 0.6])
def test_tables_that_are_taken_in_pieces_give_the_same(monkeypatch, gain):
    pool = ep.simulate_table(sites=SITES, overlap=0.5, people=80).pool
    rng = np.random.default_rng(0)
    x = pool.X * (1 + gain * (pool.site_labels == "GE"))[:, None]
    subject = rng.integers(0, 150, len(x))
    results = []
    for numbers in (10**9, 100):
        monkeypatch.setattr("equipool.sites.design.PIECE", numbers)
        harmonizer = ep.SiteHarmonizer(bending=True, infer=True)
        harmonizer.fit(x, pool.y, site=pool.site_labels, covariates=pool.C, subject=subject)
        results.append(harmonizer.transform(x, site=pool.site_labels, covariates=pool.C))
        results.append(harmonizer.transform(x))  # by inferred sites and covariates
    np.testing.assert_allclose(results[2], results[0], rtol=1e-8)
    np.testing.assert_allclose(results[3], results[1], rtol=1e-8)


# Of 1500 sites with three rows each, the moments by site and fold are more numbers than the table.
@pytest.mark.parametrize(("rows", "sites", "tables"), [(40_000, 4, 9.0), (4500, 1500, 40.0)])
def test_memory_is_a_few_times_that_of_the_table(rows, sites, tables):
    rng = np.random.default_rng(0)
    site = np.arange(rows) % sites
    x = rng.standard_normal((rows, 10)) + rng.standard_normal((sites, 10))[site]
    age = rng.uniform(20, 80, rows)
    ep.SiteHarmonizer().fit(x[:100], site=site[:100] % 2, covariates=age[:100])  # imports are not counted
    tracemalloc.start()
    ep.SiteHarmonizer().fit(x, site=site, covariates=age)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < tables * x.nbytes


def design_of(site, c, folds=3):
    n = len(site)
    return Design(site, c, np.empty((n, 0)), np.ones(n), np.arange(n) % folds, int(site.max()) + 1)


def test_what_a_site_measured_comes_back(truth):
    pool = truth.pool
    z = (pool.X - pool.X.mean(axis=0)) / pool.X.std(axis=0)
    model = fit_site_model(z, design_of(pool.site.astype(np.intp), pool.C), shrinkage=50.0)
    at = model.at(pool.C, pool.site)
    undone = model.undo(z, at)
    deviation = model.composition["covariance"].deviation
    near = (np.abs(undone - at.predicted) < 3 * deviation).all(axis=1)  # outliers are set apart
    assert near.mean() > 0.9
    np.testing.assert_allclose(model.redo(undone, at)[near], z[near], atol=1e-9)


def test_each_sites_covariance_becomes_that_of_the_pool():
    """Without shrinkage, residuals of all sites end with the same covariance."""
    rng = np.random.default_rng(0)
    n, p = 3000, 5
    site = np.repeat(np.arange(3), n // 3)
    z = np.empty((n, p))
    for s in range(3):
        z[site == s] = rng.normal(size=(n // 3, p)) @ (np.eye(p) + 0.5 * rng.normal(size=(p, p)))
    design = design_of(site, np.empty((n, 0)))
    model = fit_site_model(z, design, shrinkage=1e-6)
    undone = model.undo(z, model.at(design.covariates, site))
    after, before = ([np.cov(x[site == s].T) for s in range(3)] for x in (undone, z))
    assert max(np.abs(a - after[0]).max() for a in after) < 0.1 * max(
        np.abs(b - before[0]).max() for b in before
    )


def test_sites_that_scale_the_trend_are_recognised():
    for seed in range(4):
        rng = np.random.default_rng(seed)
        chosen = {}
        for scales_trend in (False, True):
            n = 600
            site = rng.integers(0, 3, n)
            c = rng.normal(size=(n, 1))
            scale = np.array([0.6, 1.0, 1.6])[site][:, None]
            trend, residuals = 2 * c * np.ones((1, 6)), rng.normal(size=(n, 6))
            z = scale * (trend + residuals) if scales_trend else trend + scale * residuals
            model = fit_site_model(z, design_of(site, c), warp=False)  # curves would take it up
            chosen[scales_trend] = model.composition["shift and scale"].scales_trend
        assert chosen == {False: False, True: True}


# -- what users see ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
def test_clean_features_come_back(overlap):
    for seed in range(3):
        truth = ep.simulate_table(overlap=overlap, random_state=seed)
        assert r2(harmonized(truth.pool), truth.clean) > 0.9
        assert r2(truth.pool.X, truth.clean) < 0.5


def test_frames_come_back_as_frames(truth):
    pool = truth.pool
    frame = pd.DataFrame(pool.X, columns=pool.feature_names, index=[f"p{k}" for k in range(len(pool))])
    covariates = pd.DataFrame({"age": pool.C[:, 0], "sex": np.resize(["F", "M"], len(pool))})
    harmonizer = ep.SiteHarmonizer().fit(frame, site=pd.Series(pool.site_labels), covariates=covariates)
    found = harmonizer.transform(frame, site=pool.site_labels, covariates=covariates)
    assert found.index.equals(frame.index)
    assert found.columns.equals(frame.columns)
    assert harmonizer.get_feature_names_out().tolist() == list(frame.columns)


def test_a_person_is_harmonized_the_same_alone_or_in_company(truth, fitted):
    pool = truth.pool
    whole = fitted.transform(pool.X, site=pool.site_labels, covariates=pool.C)
    for rows in (slice(5, 6), pool.site == 1):
        part = fitted.transform(pool.X[rows], site=pool.site_labels[rows], covariates=pool.C[rows])
        np.testing.assert_allclose(part, whole[rows], rtol=1e-10)


def test_without_site_or_covariates_it_is_inferred_if_asked_for(truth, fitted):
    pool = truth.pool
    for given, lacking in (({"covariates": pool.C}, "site"), ({"site": pool.site_labels}, "covariates")):
        with pytest.raises(InputError, match=lacking):
            fitted.transform(pool.X, **given)
    fitted = clone(fitted).set_params(infer=True)
    fitted.fit(pool.X, site=pool.site_labels, covariates=pool.C)
    raw = r2(pool.X, truth.clean)
    inferred = {
        "no site": fitted.transform(pool.X, covariates=pool.C),
        "no covariates": fitted.transform(pool.X, site=pool.site_labels),
        "neither": fitted.transform(pool.X),
    }
    scores = {name: r2(found, truth.clean) for name, found in inferred.items()}
    assert scores["no covariates"] > 0.9
    assert min(scores.values()) > raw + 0.5
    posterior = fitted.infer_site(pool.X, covariates=pool.C)
    np.testing.assert_allclose(posterior.sum(axis=1), 1)
    said = posterior.columns.to_numpy()[posterior.to_numpy().argmax(axis=1)]
    assert (said == pool.site_labels).mean() > 0.9


def test_unseen_sites(truth):
    pool = truth.pool
    known = pool.site != 2
    given = {"site": pool.site_labels[~known], "covariates": pool.C[~known]}
    results, mixed = {}, {}
    for policy in ("error", "pooled", "adapt"):
        harmonizer = ep.SiteHarmonizer(unseen_site=policy)
        harmonizer.fit(pool.X[known], site=pool.site_labels[known], covariates=pool.C[known])
        if policy == "error":
            with pytest.raises(
                InputError, match=r"Site 'Siemens' was not seen at fit.*unseen_site=\"adapt\""
            ):
                harmonizer.transform(pool.X[~known], **given)
            continue
        results[policy] = harmonizer.transform(pool.X[~known], **given)
        # In company of others or alone, it is the same.
        mixed[policy] = harmonizer.transform(pool.X, site=pool.site_labels, covariates=pool.C)
        np.testing.assert_allclose(mixed[policy][~known], results[policy])
        with (
            pytest.warns(EquipoolWarning, match=r"1 new site with fewer than 10 rows \('Siemens'\)")
            if policy == "adapt"
            else nullcontext()
        ):
            one = harmonizer.transform(pool.X[-1:], site=["Siemens"], covariates=pool.C[-1:])
        assert np.isfinite(one).all()
    np.testing.assert_array_equal(results["pooled"], pool.X[~known])
    assert r2(mixed["adapt"], truth.clean) > 0.9 > r2(mixed["pooled"], truth.clean)


def test_the_reference_site_stays_as_it_is(truth):
    pool = truth.pool
    found = harmonized(pool, reference_site="Philips")
    own = pool.site_labels == "Philips"
    np.testing.assert_array_equal(found[own], pool.X[own])
    # The others are brought to it, not to the pool.
    mean = truth.pool.X.mean(axis=0)
    wanted = mean + truth.shift[1] + truth.scale[1] * (truth.clean - truth.clean.mean(axis=0))
    assert r2(found, wanted) > 0.9
    with pytest.raises(InputError, match="reference site 'Toshiba' is not among the sites; there are 'GE'"):
        harmonized(pool, reference_site="Toshiba")


def test_controls_can_be_learned_from_alone():
    """All patients at one site: its shift is that of its controls, and patients keep their difference."""
    truth = ep.simulate_table(overlap=1.0, people=150, disease=0.2, random_state=1)
    pool = truth.pool
    controls = pool.y == "CN"
    keep = controls | (pool.site == 0)
    x, clean, site, c = pool.X[keep], truth.clean[keep], pool.site_labels[keep], pool.C[keep]
    given = {"site": site, "covariates": c}
    alone = ep.SiteHarmonizer().fit(x, **given, fit_on=controls[keep]).transform(x, **given)
    both = ep.SiteHarmonizer().fit(x, **given).transform(x, **given)
    with_y = ep.SiteHarmonizer(keep_target=True).fit(x, pool.y[keep], **given).transform(x, **given)
    affected = truth.affected
    errors = [
        np.abs((f - clean) - (f - clean).mean(axis=0))[:, affected].mean() for f in (alone, with_y, both)
    ]
    assert max(errors[:2]) < 0.8 * errors[2]


def test_values_that_many_share_stay_what_they_are():
    """A ventricle that most people lack must not become another number at each site."""
    truth = ep.simulate_table(people=60)
    pool, rng = truth.pool, np.random.default_rng(0)
    x = pool.X.copy()
    x[:, 0] = np.where(rng.random(len(x)) < 0.95, 0.0, 3.0)
    x[:, 1] = np.where(rng.random(len(x)) < 0.2, 0.0, x[:, 1])
    x[:, 2] = 7.0
    given = {"site": pool.site_labels, "covariates": pool.C}
    found = ep.SiteHarmonizer().fit(x, **given).transform(x, **given)
    np.testing.assert_array_equal(found[:, [0, 2]], x[:, [0, 2]])
    zero = x[:, 1] == 0
    assert (found[zero, 1] == 0).all()
    assert not np.isclose(found[~zero, 1], x[~zero, 1]).any()


@pytest.mark.parametrize("settings", [{}, {"infer": True}, {"missing": "impute"}, {"keep_target": True}])
@pytest.mark.parametrize("kind", ["constant", "point mass"])
def test_a_table_without_anything_to_harmonize_passes_through_unchanged(kind, settings, tmp_path):
    """Also with covariates, which scikit-learn's regression on no features refused."""
    rng = np.random.default_rng(0)
    x = np.where((rng.random((100, 1)) < 0.9) | (kind == "constant"), 0.0, rng.random((100, 1)))
    given = {"site": np.repeat(["a", "b"], 50), "covariates": rng.normal(size=(100, 2))}
    model = ep.SiteHarmonizer(unseen_site="adapt", **settings).fit(x, rng.integers(0, 2, 100), **given)
    for one in (model, ep.load(model.save(tmp_path / "model"))):
        for sites in (given["site"], ["new"] * 100):
            assert (one.transform(x, **{**given, "site": sites}) == x).all()
    if model.infer:
        assert (model.transform(x) == x).all()
    assert not model.harmonized_.any()
    assert model.choices_["target"] is False


def test_visits_of_one_person_count_as_one(truth):
    """Every row of one site ten times over is no more evidence than once."""
    pool = truth.pool
    rows = np.concatenate([np.arange(len(pool)), np.repeat(np.flatnonzero(pool.site == 0), 9)])
    who = np.array([f"s{k}" for k in rows])
    once = ep.SiteHarmonizer(mixing=100.0).fit(
        pool.X, site=pool.site_labels, covariates=pool.C, subject=who[: len(pool)]
    )
    often = ep.SiteHarmonizer(mixing=100.0).fit(
        pool.X[rows], site=pool.site_labels[rows], covariates=pool.C[rows], subject=who
    )
    np.testing.assert_allclose(often.model_.n_participants, once.model_.n_participants)
    a, b = (h.transform(pool.X, site=pool.site_labels, covariates=pool.C) for h in (once, often))
    # Medians are of rows, so the numbers differ a little.
    assert np.abs(a - b).max() < 0.1 * np.abs(a - pool.X).max()


def test_missing_values_by_policy(truth):
    pool = truth.pool
    rng = np.random.default_rng(0)
    holes = rng.random(pool.X.shape) < 0.05
    x = np.where(holes, np.nan, pool.X)
    given = {"site": pool.site_labels, "covariates": pool.C}
    with pytest.raises(InputError, match=r"missing \(NaN\) in 12 features .*missing=\"impute\""):
        ep.SiteHarmonizer(missing="error").fit(x, **given)
    kept = ep.SiteHarmonizer().fit(x, **given).transform(x, **given)
    np.testing.assert_array_equal(np.isnan(kept), holes)
    assert r2(np.where(holes, 0, kept), np.where(holes, 0, truth.clean)) > 0.85
    found = ep.SiteHarmonizer(missing="impute").fit(x, **given).transform(x, **given)
    np.testing.assert_array_equal(found[~holes], kept[~holes])
    assert np.isfinite(found).all()
    assert r2(found, truth.clean) > 0.85
    # Filled in better than by the feature's mean.
    blunt = np.abs(truth.clean.mean(axis=0) - truth.clean)[holes].mean()
    offset = (found - truth.clean)[~holes.any(axis=1)].mean(axis=0)
    assert np.abs(found - offset - truth.clean)[holes].mean() < blunt


def test_categories_survive_from_fit_to_transform(truth):
    pool = truth.pool
    rng = np.random.default_rng(0)
    hand = rng.choice(["left", "right", "both"], len(pool))
    covariates = pd.DataFrame({"age": pool.C[:, 0], "hand": hand})
    x = pool.X + 2.0 * (hand == "left")[:, None]
    harmonizer = ep.SiteHarmonizer().fit(x, site=pool.site_labels, covariates=covariates)
    found = harmonizer.transform(x, site=pool.site_labels, covariates=covariates)
    left = hand == "left"
    kept = found[left].mean() - found[~left].mean() - truth.clean[left].mean() + truth.clean[~left].mean()
    assert abs(kept - 2.0) < 0.4
    one = covariates.iloc[[0]].assign(hand="none")
    with pytest.raises(InputError, match="'hand' is 'none' in row 1; at fit it was one of both, left, right"):
        harmonizer.transform(x[:1], site=pool.site_labels[:1], covariates=one)


def test_small_sites_and_many_sites():
    pool = ep.simulate_table(people=40).pool
    site = pool.site_labels.copy()
    site[0] = "lonely"
    given = {"site": site, "covariates": pool.C}
    with pytest.warns(EquipoolWarning, match=r"1 site with fewer than 3 participants \('lonely'\)"):
        harmonizer = ep.SiteHarmonizer().fit(pool.X, **given)
    found = harmonizer.transform(pool.X, **given)
    assert np.isfinite(found).all()
    # One person tells little about a site: it moves less than a whole site would.
    assert np.abs(found - pool.X)[0].mean() < 3 * np.abs(found - pool.X)[1:].mean()
    many = ep.simulate_table(sites=[f"s{k}" for k in range(200)], people=5, overlap=1.0)
    found = harmonized(many.pool)
    assert np.isfinite(found).all()
    assert r2(found, many.clean) > r2(many.pool.X, many.clean) + 0.5


def test_uncertainty_grows_where_ages_do_not_overlap():
    widths, beyond = [], []
    for overlap in (1.0, 0.0):
        pool = ep.simulate_table(overlap=overlap).pool
        harmonizer = ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=pool.C)
        effects = harmonizer.site_effects_
        assert ((effects["low"] <= effects["shift"]) & (effects["shift"] <= effects["high"])).all()
        widths.append((effects["high"] - effects["low"]).mean())
        beyond.append(harmonizer.support_["share_beyond"].mean())
    assert widths[1] > 1.3 * widths[0]
    assert beyond[0] < 0.05
    assert beyond[1] > 0.5


def test_intervals_hold_the_true_shift():
    """At full overlap, intervals of 95 % hold the truth about as often as they say."""
    inside = []
    for seed in range(8):
        truth = ep.simulate_table(overlap=1.0, people=100, random_state=seed)
        pool = truth.pool
        harmonizer = ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=pool.C)
        effects = harmonizer.site_effects_
        shift = effects["shift"].to_numpy().reshape(3, -1)
        half = ((effects["high"] - effects["low"]) / 2).to_numpy().reshape(3, -1)
        # Every site is scale · clean + offset; its shift is that for people of the mean clean features.
        first = [np.flatnonzero(pool.site == s)[0] for s in range(3)]
        offset = pool.X[first] - truth.scale * truth.clean[first]
        known = offset + truth.scale * truth.clean.mean(axis=0)
        inside.append(np.abs(shift - known + known.mean(axis=0)) <= half)
    assert np.mean(inside) > 0.8


def test_in_a_pipeline_and_with_sites_left_out():
    pool = ep.simulate_table(overlap=1.0, people=50).pool
    with config_context(enable_metadata_routing=True):
        harmonizer = (
            ep.SiteHarmonizer(unseen_site="adapt")
            .set_fit_request(site=True, covariates=True, subject=False, fit_on=False)
            .set_transform_request(site=True, covariates=True)
        )
        model = make_pipeline(harmonizer, Ridge())
        scores = cross_validate(
            model,
            pool.X,
            pool.C[:, 0],
            params={"site": pool.site_labels, "covariates": pool.C, "groups": pool.site},
            cv=LeaveOneGroupOut(),
        )["test_score"]
    assert len(scores) == 3
    assert min(scores) > 0.5


def test_a_saved_harmonizer_gives_the_same_numbers(truth, tmp_path):
    pool = truth.pool
    covariates = pd.DataFrame({"age": pool.C[:, 0], "hand": np.resize(["left", "right", "both"], len(pool))})
    frame = pd.DataFrame(pool.X, columns=pool.feature_names)
    for k, settings in enumerate(({}, {"mixing": np.inf}, {"reference_site": "GE", "unseen_site": "adapt"})):
        harmonizer = ep.SiteHarmonizer(**settings).fit(frame, site=pool.site_labels, covariates=covariates)
        harmonizer.save(tmp_path / str(k))
        again = ep.load(tmp_path / str(k))
        given = {"site": pool.site_labels, "covariates": covariates}
        pd.testing.assert_frame_equal(
            again.transform(frame, **given), harmonizer.transform(frame, **given), check_exact=True
        )
        for one in (again, harmonizer):
            one.set_params(infer=True)
        pd.testing.assert_frame_equal(again.transform(frame), harmonizer.transform(frame), check_exact=True)
        pd.testing.assert_frame_equal(again.site_effects_, harmonizer.site_effects_, check_dtype=False)
        assert again.get_params() == harmonizer.get_params()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"site": ["a"] * 10}, "nothing to harmonize"),
        ({"site": None, "covariates": np.zeros(9)}, "one row for each of the 10 rows"),
        ({"site": ["a", "b"] * 5, "covariates": np.ones(10)}, "is 1 in every row"),
        ({"site": ["a", "b"] * 5, "covariates": [0, 1] * 5}, "never varies within a site"),
        ({"site": ["a", "b"] * 5, "fit_on": [1] * 10}, "mask of True and False"),
        ({"site": ["a", "b"] * 5, "fit_on": np.zeros(10, dtype=bool)}, "selects no row"),
        ({"site": ["a", "b"] * 5, "subject": ["x"] * 9}, "subject must have one value"),
        ({"site": ["a", None] * 5}, "is empty in rows"),
    ],
)
def test_bad_calls_are_answered(arguments, message):
    x = np.random.default_rng(0).normal(size=(10, 3))
    with pytest.raises(InputError, match=message):
        ep.SiteHarmonizer().fit(x, **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unseen_site": "skip"}, "unseen_site must be one of error, pooled, adapt. Got 'skip'"),
        ({"missing": "drop"}, "missing must be one of"),
        ({"mixing": -1.0}, "mixing must be a number above 0. Got -1.0"),
    ],
)
def test_bad_settings_are_answered(truth, settings, message):
    with pytest.raises(InputError, match=message):
        harmonized(truth.pool, **settings)


# -- found by a review -------------------------------------------------------------------------------------


def test_rounded_features_are_harmonized_like_others():
    """One decimal makes values repeat, but none of them means 'nothing here'."""
    rng = np.random.default_rng(0)
    site = np.repeat(["a", "b", "c"], 200)
    x = (2.5 + 0.15 * rng.normal(size=(600, 5)) + np.repeat([0.3, 0, -0.3], 200)[:, None]).round(1)
    harmonizer = ep.SiteHarmonizer().fit(x, site=site)
    assert np.isnan(harmonizer.point_masses_).all()
    found = harmonizer.transform(x, site=site)
    assert max(np.ptp([found[site == s].mean(axis=0) for s in "abc"], axis=0)) < 0.05


def test_gaps_do_not_make_a_site_seem_to_vary_less():
    rng = np.random.default_rng(0)
    n = 200
    site, age = np.repeat(list("ABC"), n), rng.uniform(20, 80, 3 * n)
    x = 10 + rng.normal(size=(3 * n, 5))
    holes = np.zeros(x.shape, dtype=bool)
    holes[:, 0] = (site == "B") & (rng.random(3 * n) < 0.6)
    given = {"site": site, "covariates": age}
    gappy = np.where(holes, np.nan, x)
    found = ep.SiteHarmonizer(missing="impute").fit(gappy, **given).transform(gappy, **given)
    seen = ~holes[:, 0]
    spreads = [found[seen & (site == s), 0].std() for s in "ABC"]
    assert max(spreads) / min(spreads) < 1.2
    # What was not measured is drawn around the pool's mean, whichever the site.
    assert abs(found[holes[:, 0], 0].mean() - 10) < 0.4
    whole = np.where((site == "B")[:, None] & (np.arange(5) == 0), np.nan, x)
    later = ep.SiteHarmonizer(missing="impute").fit(whole, **given).transform(x, **given)
    assert later[site == "B", 0].std() < 1.5


def test_a_new_site_is_estimated_from_what_it_measured():
    rng = np.random.default_rng(0)
    site = np.repeat(list("abcde"), 100)
    x = rng.normal(size=(500, 4)) + np.repeat(np.linspace(-2, 2, 5), 100)[:, None]
    new = rng.normal(size=(100, 4)) + 5
    new[:70, 0] = np.nan
    harmonizer = ep.SiteHarmonizer(missing="impute", unseen_site="adapt").fit(x, site=site)
    found = harmonizer.transform(new, site=["f"] * 100)
    assert abs(found[70:, 0].mean()) < 0.5
    assert abs(found[:, 1].mean()) < 0.5


def test_a_target_that_is_a_covariate_leaves_the_trend_alone():
    pool = ep.simulate_table(overlap=0.0, people=100).pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    plain, with_y = (ep.SiteHarmonizer().fit(pool.X, y, **given) for y in (None, pool.C[:, 0]))
    a, b = (one.model_.trend.coefficients for one in (with_y, plain))
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_one_site_with_gaps_comes_back_whole_and_empty_columns_are_named():
    x = np.random.default_rng(0).normal(size=(20, 3))
    x[3, 1] = np.nan
    with pytest.warns(EquipoolWarning, match="nothing to harmonize. Pass site="):
        filled = ep.SiteHarmonizer(missing="impute").fit_transform(x)
    assert np.isfinite(filled).all()
    np.testing.assert_allclose(filled[np.isfinite(x)], x[np.isfinite(x)])
    x[:, 2] = np.nan
    with pytest.raises(InputError, match="Column 'x2' has no value in any row"):
        ep.SiteHarmonizer(missing="impute").fit(x, site=["a", "b"] * 10)


def test_covariates_without_names_are_taken_by_position(truth):
    pool = truth.pool
    frame = pd.DataFrame({"age": pool.C[:, 0], "sex": np.resize(["F", "M"], len(pool))})
    harmonizer = ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=frame)
    expected = harmonizer.transform(pool.X, site=pool.site_labels, covariates=frame)
    for given in (frame[["sex", "age"]], frame.to_numpy(), frame.to_dict("list")):
        found = harmonizer.transform(pool.X, site=pool.site_labels, covariates=given)
        np.testing.assert_allclose(found, expected)
    alone = ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=pool.C)
    series = pd.Series(pool.C[:, 0], name="years")
    np.testing.assert_allclose(
        alone.transform(pool.X, site=pool.site_labels, covariates=series),
        alone.transform(pool.X, site=pool.site_labels, covariates=pool.C),
    )
    with pytest.raises(InputError, match=r"2 covariate\(s\) at fit \('age', 'sex'\). Got 1"):
        harmonizer.transform(pool.X, site=pool.site_labels, covariates=pool.C)


def test_those_who_are_not_learned_from_do_not_stand_in_the_way(truth):
    pool = truth.pool
    hand = np.resize(["left", "right", "both"], len(pool)).astype(object)
    chosen = np.arange(len(pool)) % 10 > 0
    hand[~chosen] = np.resize(["unknown", None], (~chosen).sum())
    frame = pd.DataFrame({"age": pool.C[:, 0], "hand": hand})
    harmonizer = ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=frame, fit_on=chosen)
    assert harmonizer.encoding_.categories == {"hand": ("both", "left", "right")}


def test_categories_may_look_like_numbers(truth):
    pool = truth.pool
    code = pd.Series(np.resize(["1", "2", "3"], len(pool))).astype("category")
    frame = pd.DataFrame({"age": pool.C[:, 0], "code": code})
    harmonizer = ep.SiteHarmonizer().fit(pool.X, site=pool.site_labels, covariates=frame)
    assert harmonizer.encoding_.names == ("age", "code=2", "code=3")


def test_small_units_survive_a_file(truth, tmp_path):
    pool = truth.pool
    harmonizer = ep.SiteHarmonizer().fit(1e-12 * pool.X, site=pool.site_labels, covariates=pool.C)
    again = ep.load(harmonizer.save(tmp_path / "model"))
    pd.testing.assert_frame_equal(
        again.site_effects_, harmonizer.site_effects_, check_dtype=False, rtol=1e-12, atol=0
    )


def test_sites_that_are_numbers_are_the_same_in_any_batch(truth):
    pool = truth.pool
    site = np.array([1.0, 2.0, 3.5])[pool.site]
    harmonizer = ep.SiteHarmonizer(reference_site=2.0).fit(pool.X, site=site, covariates=pool.C)
    whole = harmonizer.transform(pool.X, site=site, covariates=pool.C)
    part = harmonizer.transform(pool.X[site == 1.0], site=site[site == 1.0], covariates=pool.C[site == 1.0])
    np.testing.assert_allclose(part, whole[site == 1.0])


def test_with_too_few_held_out_participants_covariances_are_left_alone():
    many = ep.simulate_table(sites=[f"s{k}" for k in range(30)], people=2, overlap=1.0).pool
    with pytest.warns(EquipoolWarning, match="fewer than 3 participants"):
        harmonizer = ep.SiteHarmonizer().fit(many.X, site=many.site_labels, covariates=many.C)
    assert harmonizer.choices_["shrinkage"] == np.inf


def test_rows_with_a_gap_are_named_at_transform(truth):
    pool = truth.pool
    fitted = ep.SiteHarmonizer(missing="error").fit(pool.X, site=pool.site_labels, covariates=pool.C)
    rows = pool.X[:3].copy()
    given = {"site": pool.site_labels[:3], "covariates": pool.C[:3]}
    rows[1, 4] = np.nan
    with pytest.raises(InputError, match=r"Column 'x4' has no value \(NaN\) in row 2; .*missing=\"keep\""):
        fitted.transform(rows, **given)
    rows[1, 4] = np.inf
    with pytest.raises(InputError, match=r"Column 'x4' is infinite \(inf\) in row 2"):
        fitted.transform(rows, **given)
    with pytest.raises(InputError, match=r"such as \['GE'\]"):
        fitted.transform(pool.X[:1], site="GE", covariates=pool.C[:1])


def test_the_folder_that_harmonize_wrote_is_loaded(fitted, truth, tmp_path):
    fitted.save(tmp_path / "result" / "model")
    pool = truth.pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    np.testing.assert_array_equal(
        ep.load(tmp_path / "result").transform(pool.X, **given), fitted.transform(pool.X, **given)
    )
