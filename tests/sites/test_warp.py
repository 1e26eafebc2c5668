"""Sites that bend features: straightened where held-out people show it, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad

import equipool as ep
from equipool.exceptions import InputError
from equipool.sites import rising_curves as module
from equipool.sites import warp as choices
from equipool.sites.design import Design
from equipool.sites.rising_curves import CURVE, KNOTS
from equipool.sites.warp import Affine, Bend, fit_bend, no_bend
from forging import forged


def _curves(rng, *shape):
    curves = np.exp(0.5 * rng.standard_normal((*shape, CURVE)))
    curves[..., 0] = -2.5 + rng.standard_normal(shape)
    return curves


def _some_bend(rng, sites=2, p=3):
    scale = np.exp(rng.standard_normal((sites, p)))
    offset = rng.standard_normal((sites, p))
    width = np.exp(rng.standard_normal(p))
    columns, centre = np.arange(p), rng.standard_normal(p)
    return Bend(columns, scale, offset, _curves(rng, sites, p), _curves(rng, p), centre, width)


def _design(site, seed=0, weight=None):
    rng = np.random.default_rng(seed)
    age = rng.standard_normal((len(site), 1))
    weight = np.ones(len(site)) if weight is None else weight
    empty = np.empty((len(site), 0))
    return Design(site, age, empty, weight, rng.integers(0, 3, len(site)), int(site.max()) + 1)


def _bent(rng, people, sites=4, features=6, amount=0.12):
    """People whose features rise with age, and what sites that bend both see of them."""
    site = np.repeat(np.arange(sites), people)
    design = _design(site, int(rng.integers(1000)))
    own = rng.standard_normal((len(site), features)) + 0.7 * design.c
    a = amount * np.where(site % 2 == 0, 1.0, -1.0)[:, None]
    own /= own.std(axis=0)
    return own, own + a * (np.clip(own, -2, 2) ** 2 - 1), design


def _fit(seen, design, wanted=None):
    n, p = design.n_sites, seen.shape[1]
    affine = Affine(np.ones((n, p)), np.zeros((n, p)))
    return fit_bend(seen, design, design.c, np.full(1, 1e-6), lambda rows: [affine], wanted=wanted)


def _straight(bend, seen, design):
    result = np.empty_like(seen)
    for s in range(design.n_sites):
        result[design.site == s] = bend.straighten(seen[design.site == s], s)
    return result


# -- the curves --------------------------------------------------------------------------------------------


def test_a_curve_is_the_integral_of_its_slopes():
    rng = np.random.default_rng(0)
    curve = _curves(rng, 2)
    v = np.array([[-7.0, -2.5], [-1.3, 0.2], [2.5, 6.0]])
    for i, k in np.ndindex(v.shape):
        area, _ = quad(
            lambda t, k=k: np.interp(t, KNOTS, curve[k, 1:]), KNOTS[0], v[i, k], points=KNOTS, limit=200
        )
        assert module.rise(v, curve)[i, k] == pytest.approx(curve[k, 0] + area, abs=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_bending_undoes_straightening(seed):
    rng = np.random.default_rng(seed)
    bend = _some_bend(rng)
    z = np.vstack([3 * rng.standard_normal((50, 3)), np.full(3, -90.0), np.zeros(3), np.full(3, 90.0)])
    for site in range(2):
        assert bend.bend(bend.straighten(z, site), site) == pytest.approx(z, abs=1e-7)
        assert (np.diff(bend.straighten(np.sort(z, axis=0), site), axis=0) >= 0).all()


def test_the_slope_is_that_of_the_map():
    bend = _some_bend(np.random.default_rng(0))
    z, step = np.array([[0.7, -1.2, 0.1], [4.0, 2.0, -3.0], [8.0, 0.1, 0.4]]), 1e-6
    moved = (bend.straighten(z + step, 1) - bend.straighten(z - step, 1)) / (2 * step)
    assert bend.slope(z, 1) == pytest.approx(moved, rel=1e-4)


def test_a_new_site_bends_nothing():
    bend = _some_bend(np.random.default_rng(0)).with_site()
    z = np.random.default_rng(1).standard_normal((20, 3))
    assert bend.straighten(z, 2) == pytest.approx(z, abs=1e-9)
    assert no_bend(2).with_site().straighten(z, 2) is z


def test_features_that_are_not_bent_stay_as_they_are():
    bend = replace(_some_bend(np.random.default_rng(0), p=2), columns=np.array([0, 2]))
    z = np.random.default_rng(1).standard_normal((20, 4))
    for moved in (bend.straighten(z, 1), bend.bend(z, 1)):
        assert np.array_equal(moved[:, [1, 3]], z[:, [1, 3]])
        assert not np.isclose(moved[:, [0, 2]], z[:, [0, 2]]).all(axis=0).any()
    assert np.array_equal(bend.slope(z, 1)[:, [1, 3]], np.ones((20, 2)))


# -- the likelihood ----------------------------------------------------------------------------------------


def _naive_cost(v, design, basis, curves, trend):
    """Return −log likelihood, person by person, without the constant."""
    total = 0.0
    for i, s in enumerate(design.site):
        for k in range(v.shape[1]):
            slope = np.interp(v[i, k], KNOTS, curves[s, k, 1:])
            height = module.rise(v[i : i + 1], curves[s])[0, k]
            total += design.weight[i] * (0.5 * (height - basis[i] @ trend[k]) ** 2 - np.log(slope))
    return total


def _small(seed=0, people=40):
    rng = np.random.default_rng(seed)
    site = np.repeat(np.arange(2), people)
    design = _design(site, seed, weight=rng.uniform(0.3, 1.0, len(site)))
    v = rng.standard_normal((len(site), 2)) + 0.5 * design.c
    return rng, design, np.column_stack([v[:, 0], v[:, 1] + 0.3 * (v[:, 1] ** 2 - 1) * site])


def test_the_cost_is_that_of_each_person():
    rng, design, v = _small()
    sums = module.sums_of(v, design, design.c, design.everybody)
    curves, trend = _curves(rng, 2, 2), rng.standard_normal((2, 1))
    naive = _naive_cost(v, design, design.c, curves, trend)
    # Logarithms of slopes are summed over cells, not over people.
    assert module.cost(sums, curves, trend).sum() == pytest.approx(naive, rel=1e-2)


@pytest.mark.parametrize("stiffness", [1.0, 30.0])
def test_newton_finds_the_optimum(stiffness):
    _, design, v = _small()
    sums = module.sums_of(v, design, design.c, design.everybody)
    prior = np.ones((2, CURVE))
    prior[:, 0] = KNOTS[0]
    penalty = np.array([0.01])
    curves, trend = module.newton(sums, prior, stiffness, penalty)
    sums = sums.with_nobody()

    def objective(curves, trend):
        apart = curves - prior
        steps = np.diff(apart[..., 1:], axis=-1)
        drawn = (apart**2).sum() + module.SMOOTH * (steps**2).sum()
        cost = module.cost(sums, curves, trend).sum()
        people = sums.people.sum()
        return cost + 0.5 * stiffness * drawn + 0.5 * people * (trend**2 @ penalty).sum()

    best, step = objective(curves, trend), 1e-4
    for index in np.ndindex(curves.shape):
        nudge = np.zeros_like(curves)
        nudge[index] = step
        slope = (objective(curves + nudge, trend) - objective(curves - nudge, trend)) / (2 * step)
        assert abs(slope) < 0.05, "a Newton step from the optimum would lower the cost by next to nothing"
    rng = np.random.default_rng(1)
    for _ in range(20):
        other = curves * np.exp(0.1 * rng.standard_normal(curves.shape))
        assert objective(other, trend + 0.1 * rng.standard_normal(trend.shape)) > best


# -- whether to bend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_bent_sites_are_straightened(seed):
    own, seen, design = _bent(np.random.default_rng(seed), 300)
    back = _straight(_fit(seen, design), seen, design)
    assert ((back - own) ** 2).mean() < 0.4 * ((seen - own) ** 2).mean()
    spreads = np.array([back[design.site == s].std(axis=0).mean() for s in range(4)])
    assert np.ptp(spreads) < 0.06, "straightening must not make the spread tell the site"


def test_straight_sites_are_left_alone():
    chosen = []
    for seed in range(20):
        own, _, design = _bent(np.random.default_rng(seed), 60)
        chosen.append(_fit(own, design).active)
    assert np.mean(chosen) <= 0.2


def test_few_people_fall_back_to_the_affine_form():
    chosen = []
    for seed in range(20):
        _, seen, design = _bent(np.random.default_rng(seed), 10)
        chosen.append(_fit(seen, design).active)
    assert np.mean(chosen) <= 0.2


def test_one_heavy_tailed_pool_is_not_taken_for_bending():
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(4), 80)
    chosen = [_fit(rng.standard_t(3, (320, 6)), _design(site, k)).active for k in range(20)]
    assert np.mean(chosen) <= 0.2


def test_a_shape_that_all_sites_share_is_the_peoples_own():
    rng = np.random.default_rng(1)
    design = _design(np.repeat(np.arange(4), 200))
    r = rng.gamma(2.0, size=(800, 5))
    r = (r - r.mean(axis=0)) / r.std(axis=0)
    moved = np.abs(_straight(_fit(r, design, wanted=True), r, design) - r)
    assert moved.mean() < 0.08


def test_a_rival_without_bending_must_be_surpassed():
    own, seen, design = _bent(np.random.default_rng(0), 300, features=3)
    n, p = design.n_sites, seen.shape[1]
    plain = Affine(np.ones((n, p)), np.zeros((n, p)))
    # Against an account with spreads that are far too large, and one that is worse than useless.
    poor = Affine(np.full((n, p), 50.0), np.zeros((n, p)))
    good = fit_bend(seen, design, design.c, np.full(1, 1e-6), lambda rows: [plain, poor])
    assert good.active
    assert not fit_bend(own, design, design.c, np.full(1, 1e-6), lambda rows: [poor, plain]).active


def test_a_part_of_many_people_is_enough_to_choose_by(monkeypatch):
    for bent in (False, True):
        own, seen, design = _bent(np.random.default_rng(3), 400, features=12, amount=0.2)
        whole = _fit(seen if bent else own, design)
        monkeypatch.setattr(choices, "ENOUGH", 800)
        part = _fit(seen if bent else own, design)
        assert whole.active == part.active == bent
        monkeypatch.undo()


def test_features_may_come_in_any_number_of_blocks(monkeypatch):
    _, seen, design = _bent(np.random.default_rng(0), 100, features=6)
    whole = _fit(seen, design)
    monkeypatch.setattr(choices, "AT_ONCE", 1)
    parts = _fit(seen, design)
    assert whole.active
    for name, value in vars(whole).items():
        assert getattr(parts, name) == pytest.approx(value, rel=1e-9), name


def test_spreads_that_differ_much_are_no_bending():
    """A shrunk account of shifts and spreads is easily surpassed, by anything that is shrunk less."""
    found = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        design = _design(np.repeat(np.arange(20), 15), seed)
        own = rng.standard_normal((300, 10)) + design.c
        spread, shift = np.exp(0.6 * rng.standard_normal((20, 10))), rng.standard_normal((20, 10))
        given = {"site": design.site, "covariates": design.c}
        model = ep.SiteHarmonizer().fit(spread[design.site] * own + shift[design.site], **given).model_
        found.append(model.bend.active)
    assert np.mean(found) <= 0.2


def test_one_odd_feature_decides_for_nobody_else():
    for odd in ("site", "age"):
        own, seen, design = _bent(np.random.default_rng(0), 300, amount=0.2)
        noise = 1e-3 * np.random.default_rng(1).standard_normal(len(own))
        column = (design.site if odd == "site" else design.c[:, 0] + 5 * design.site) + noise
        given = {"site": design.site, "covariates": design.c}
        straight = ep.SiteHarmonizer().fit(np.column_stack([own, column]), **given).model_.bend
        bent = ep.SiteHarmonizer().fit(np.column_stack([seen, column]), **given).model_.bend
        assert not set(range(6)) & set(straight.columns.tolist()), odd
        assert len(set(range(6)) & set(bent.columns.tolist())) >= 5, odd


def test_a_few_features_that_bend_are_found_among_many_that_do_not():
    own, seen, design = _bent(np.random.default_rng(0), 300, features=40, amount=0.24)
    mixed = np.column_stack([seen[:, :4], own[:, 4:]])
    assert set(range(4)) <= set(_fit(mixed, design).columns.tolist())


@pytest.mark.parametrize("seed", range(4))
def test_newton_does_not_jam_on_heavy_tails(seed):
    rng = np.random.default_rng(seed)
    design = _design(np.repeat(np.arange(3), 40), seed)
    bend = _fit(np.exp(3 * rng.standard_normal((120, 5))), design, wanted=True)
    assert bend.pool[:, 1:].min() > 1e-3
    ratio = bend.curves[..., 1:] / bend.pool[:, 1:]
    assert ratio.max() <= 5
    assert ratio.min() >= 0.2


@pytest.mark.parametrize("bending", [np.False_, np.True_])
def test_numpys_booleans_mean_what_they_say(bending):
    pool = ep.simulate_table(people=60).pool
    model = ep.SiteHarmonizer(bending=bending).fit(pool.X, site=pool.site_labels, covariates=pool.C)
    assert model.model_.bend.active == bool(bending)
    with pytest.raises(InputError, match="True, False or None"):
        ep.SiteHarmonizer(bending=0).fit(pool.X, site=pool.site_labels, covariates=pool.C)


@pytest.mark.filterwarnings("ignore:3 site")
def test_one_person_many_times_shows_no_curve():
    pool = ep.simulate_table(people=40, overlap=1.0, bending=0.2).pool
    given = {"site": pool.site_labels, "covariates": pool.C, "subject": np.zeros(len(pool), dtype=int)}
    model = ep.SiteHarmonizer(bending=True).fit(pool.X, **given)
    assert not model.model_.bend.active
    assert np.isfinite(model.transform(pool.X, site=pool.site_labels, covariates=pool.C)).all()


def test_small_sites_join_those_that_bend():
    pool = ep.simulate_table(people=120, overlap=1.0, bending=0.2, features=8).pool
    kept = (pool.site_labels != "GE") | (np.cumsum(pool.site_labels == "GE") <= 12)
    given = {"site": pool.site_labels[kept], "covariates": pool.C[kept]}
    model = ep.SiteHarmonizer(bending=True).fit(pool.X[kept], **given).model_
    assert model.bend.active
    assert np.array_equal(model.bend.curves[0], model.bend.pool)
    own = model.bend.straighten(np.zeros((1, 8)), 0)
    assert np.isfinite(own).all()


# -- the harmonizer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bending", [None, False, True])
def test_the_harmonizer_gets_nearer_to_the_truth(bending):
    raw, found = [], []
    for seed in range(3):
        truth = ep.simulate_table(people=200, overlap=0.5, noise=0.12, bending=0.2, random_state=seed)
        pool = truth.pool
        given = {"site": pool.site_labels, "covariates": pool.C}
        for kept, setting in ((raw, False), (found, bending)):
            clean = ep.SiteHarmonizer(bending=setting).fit_transform(pool.X, **given)
            left = np.asarray(clean) - truth.clean
            kept.append(((left - left.mean(axis=0)) ** 2 / truth.clean.var(axis=0)).mean())
    if bending is False:
        assert found == raw
    else:
        assert np.mean(found) < 0.8 * np.mean(raw)


def test_trees_no_longer_tell_a_site_that_bends():
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import cross_val_score

    read = {}
    for bending in (False, None):
        for seed in range(2):
            pool = ep.simulate_table(
                people=250, overlap=1.0, features=20, noise=0.12, bending=0.15, random_state=seed
            ).pool
            given = {"site": pool.site_labels, "covariates": pool.C}
            clean = ep.SiteHarmonizer(bending=bending).fit_transform(pool.X, **given)
            trees = HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=15, random_state=0)
            read.setdefault(bending, []).append(cross_val_score(trees, clean, pool.site, cv=3).mean())
    assert np.mean(read[False]) > np.mean(read[None]) + 0.05
    assert np.mean(read[None]) < 1 / 3 + 0.08


def test_a_bent_model_is_saved_whole_and_a_reference_stays_as_it_is(tmp_path):
    pool = ep.simulate_table(people=100, bending=0.2, overlap=1.0).pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    model = ep.SiteHarmonizer(bending=True, reference_site="GE").fit(pool.X, **given)
    assert model.model_.bend.active
    clean = model.transform(pool.X, **given)
    own = pool.site_labels == "GE"
    assert np.array_equal(np.asarray(clean)[own], np.asarray(pool.X)[own])
    model.save(tmp_path / "model")
    assert np.array_equal(ep.load(tmp_path / "model").transform(pool.X, **given), clean)


def test_effects_of_bent_sites_are_those_that_the_site_shows():
    found = {}
    for bending in (False, True):
        truth = ep.simulate_table(people=300, bending=0.1, overlap=1.0, noise=0.12)
        pool = truth.pool
        given = {"site": pool.site_labels, "covariates": pool.C}
        found[bending] = ep.SiteHarmonizer(bending=bending).fit(pool.X, **given).site_effects_
    for column in ("shift", "spread"):
        assert np.corrcoef(found[False][column], found[True][column])[0, 1] > 0.95
    width = {k: (frame["high"] - frame["low"]).mean() for k, frame in found.items()}
    assert width[True] == pytest.approx(width[False], rel=0.2)


def test_missing_values_of_new_people_are_filled_as_their_site_shows_them():
    pool = ep.simulate_table(people=200, bending=0.2, overlap=1.0).pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    model = ep.SiteHarmonizer(bending=True, missing="impute").fit(pool.X, **given)
    gaps = np.array(pool.X, dtype=float)
    gaps[::3, 0] = np.nan
    filled = np.asarray(model.transform(gaps, **given))[::3, 0]
    whole = np.asarray(model.transform(pool.X, **given))[::3, 0]
    sites = pool.site[::3]
    apart = [filled[sites == s].mean() - whole[sites == s].mean() for s in range(3)]
    assert np.abs(apart).max() < 0.25 * whole.std()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bend.curves", lambda a: a.astype(bool)),
        ("bend.curves", lambda a: -a),
        ("bend.pool", lambda a: a * 0 + 1e-320),
        ("bend.width", lambda a: a * 0 + 1e308),
        ("bend.columns", lambda a: a + 1000),
        ("bend.curves", None),
        ("model.spread", lambda a: a * 0),
    ],
)
def test_damaged_curves_are_refused(tmp_path, name, value):
    pool = ep.simulate_table(people=60, overlap=1.0).pool
    model = ep.SiteHarmonizer(bending=True).fit(pool.X, site=pool.site_labels, covariates=pool.C)
    forged(model.save(tmp_path / "model"), name, value)
    with pytest.raises(InputError, match="damaged"):
        ep.load(tmp_path / "model")


def test_models_that_bent_by_a_quadratic_are_to_be_fitted_again(tmp_path):
    pool = ep.simulate_table(people=60, overlap=1.0).pool
    model = ep.SiteHarmonizer(bending=True).fit(pool.X, site=pool.site_labels, covariates=pool.C)
    folder = model.save(tmp_path / "model")
    for name in ("columns", "scale", "offset", "curves", "pool", "centre", "width"):
        forged(folder, f"bend.{name}", None)
    forged(folder, "bend.amount", lambda a: np.ones((3, 12)))
    with pytest.raises(InputError, match="earlier version"):
        ep.load(folder)


def test_a_new_site_joins_sites_that_bend():
    pool = ep.simulate_table(people=100, bending=0.2, overlap=1.0).pool
    known = pool.site_labels != "GE"
    model = ep.SiteHarmonizer(bending=True, unseen_site="adapt")
    model.fit(pool.X[known], site=pool.site_labels[known], covariates=pool.C[known])
    clean = model.transform(pool.X[~known], site=pool.site_labels[~known], covariates=pool.C[~known])
    assert np.isfinite(np.asarray(clean)).all()
