"""Sites that warp features: undone where held-out participants show it, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad

import equipool as ep
from equipool.exceptions import InputError
from equipool.sites import design as designs
from equipool.sites import warp as module
from equipool.sites.design import Design
from equipool.sites.effect import Context
from equipool.sites.shift_scale import SharedTrend
from equipool.sites.warp import KNOTS, WIDTH, Warp
from forging import forged


def _curves(rng, *shape):
    curves = np.exp(0.5 * rng.standard_normal((*shape, WIDTH)))
    curves[..., 0] = -2.5 + rng.standard_normal(shape)
    return curves


def _some_warp(rng, sites=2, p=3):
    scale = np.exp(rng.standard_normal((sites, p)))
    offset = rng.standard_normal((sites, p))
    width = np.exp(rng.standard_normal(p))
    columns, centre = np.arange(p), rng.standard_normal(p)
    return Warp(columns, scale, offset, _curves(rng, sites, p), _curves(rng, p), centre, width)


def _at(site, z):
    return Context(np.broadcast_to(site, len(z)), np.empty((len(z), 0)), z[:, :0])


def _design(site, seed=0, weight=None):
    rng = np.random.default_rng(seed)
    age = rng.standard_normal((len(site), 1))
    weight = np.ones(len(site)) if weight is None else weight
    empty = np.empty((len(site), 0))
    return Design(site, age, empty, weight, rng.integers(0, 3, len(site)), int(site.max()) + 1)


def _warped(rng, n, sites=4, features=6, amount=0.12):
    """Features that rise with age, and what sites that warp them measure."""
    site = np.repeat(np.arange(sites), n)
    design = _design(site, int(rng.integers(1000)))
    clean = rng.standard_normal((len(site), features)) + 0.7 * design.covariates
    a = amount * np.where(site % 2 == 0, 1.0, -1.0)[:, None]
    clean /= clean.std(axis=0)
    return clean, clean + a * (np.clip(clean, -2, 2) ** 2 - 1), design


def _fit(measured, design, wanted=None):
    return Warp.fit(measured, design, SharedTrend.fit(measured, design), wanted=wanted)


def _undone(warp, measured, design):
    return warp.undo(measured, _at(design.site, measured))


def _fitted(pool, **settings):
    harmonizer = ep.SiteHarmonizer(network=False, **settings)
    return harmonizer.fit(pool.X, site=pool.site_labels, covariates=pool.C)


def _warp_of(harmonizer):
    return harmonizer.model_.composition["warp"]


# -- the curves --------------------------------------------------------------------------------------------


def test_a_curve_is_the_integral_of_its_slopes():
    rng = np.random.default_rng(0)
    curve = _curves(rng, 2)
    v = np.array([[-7.0, -2.5], [-1.3, 0.2], [2.5, 6.0]])
    for i, k in np.ndindex(v.shape):
        area, _ = quad(
            lambda t, k=k: np.interp(t, KNOTS, curve[k, 1:]),
            KNOTS[0],
            v[i, k],
            points=KNOTS,
            limit=200,
        )
        assert module.curve_at(v, curve)[i, k] == pytest.approx(curve[k, 0] + area, abs=1e-7)


def test_a_curve_and_its_inverse_undo_each_other():
    rng = np.random.default_rng(0)
    curve, v = (
        _curves(rng, 4),
        np.vstack([4 * rng.standard_normal((50, 4)), np.repeat(KNOTS[:, None], 4, axis=1)]),
    )
    np.testing.assert_allclose(module.inverse_curve(module.curve_at(v, curve), curve), v, atol=1e-9)
    line = np.ones((4, WIDTH))  # equal slopes, where the quadratic has no second term
    np.testing.assert_allclose(module.inverse_curve(module.curve_at(v, line), line), v, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_undone_values_keep_their_order(seed):
    rng = np.random.default_rng(seed)
    warp = _some_warp(rng)
    z = np.vstack([3 * rng.standard_normal((50, 3)), np.full(3, -90.0), np.zeros(3), np.full(3, 90.0)])
    for site in range(2):
        ordered = np.sort(z, axis=0)
        assert (np.diff(warp.undo(ordered, _at(site, z)), axis=0) >= 0).all()


def test_features_that_are_not_warped_stay_as_they_are():
    warp = replace(_some_warp(np.random.default_rng(0), p=2), columns=np.array([0, 2]))
    z = np.random.default_rng(1).standard_normal((20, 4))
    for moved in (warp.undo(z, _at(1, z)), warp.redo(z, _at(1, z))):
        assert np.array_equal(moved[:, [1, 3]], z[:, [1, 3]])
        assert not np.isclose(moved[:, [0, 2]], z[:, [0, 2]]).all(axis=0).any()
    assert np.array_equal(warp.slope(z, 1)[:, [1, 3]], np.ones((20, 2)))


# -- the likelihood ----------------------------------------------------------------------------------------


def _naive_log_loss(v, design, curves, trend):
    """Return − log-likelihood, participant by participant, without the constant."""
    total = 0.0
    for i, s in enumerate(design.site):
        for k in range(v.shape[1]):
            slope = np.interp(v[i, k], KNOTS, curves[s, k, 1:])
            height = module.curve_at(v[i : i + 1], curves[s])[0, k]
            residual = height - design.covariates[i] @ trend[k]
            total += design.weight[i] * (0.5 * residual**2 - np.log(slope))
    return total


def _small(seed=0, n=40):
    rng = np.random.default_rng(seed)
    site = np.repeat(np.arange(2), n)
    design = _design(site, seed, weight=rng.uniform(0.3, 1.0, len(site)))
    v = rng.standard_normal((len(site), 2)) + 0.5 * design.covariates
    return rng, design, np.column_stack([v[:, 0], v[:, 1] + 0.3 * (v[:, 1] ** 2 - 1) * site])


def _sums(v, design):
    return module.sums_of(v, design, design.covariates, np.arange(len(v)))


def test_the_loss_is_the_sum_over_participants():
    rng, design, v = _small()
    curves, trend = _curves(rng, 2, 2), rng.standard_normal((2, 1))
    # Logarithms of slopes are summed over cells, not over participants.
    loss = module.log_loss(_sums(v, design), curves, trend)
    assert loss.sum() == pytest.approx(_naive_log_loss(v, design, curves, trend), rel=1e-2)
    level = np.ones_like(curves)  # with one slope everywhere, cells change nothing
    level[..., 0] = curves[..., 0]
    loss = module.log_loss(_sums(v, design), level, trend)
    assert loss.sum() == pytest.approx(_naive_log_loss(v, design, level, trend), rel=1e-12)


@pytest.mark.parametrize("stiffness", [1.0, 30.0])
def test_newton_reaches_the_optimum(stiffness):
    _, design, v = _small()
    sums = _sums(v, design)
    prior = np.ones((2, WIDTH))
    prior[:, 0] = KNOTS[0]
    penalty = np.array([0.01])
    curves, trend = module.newton(sums, prior, stiffness, penalty)
    cells = sums.cells.copy()
    cells[..., -len(KNOTS) :] += 0.5 / len(KNOTS)  # half a participant, spread over the knots
    sums = replace(sums, cells=cells)

    def objective(curves, trend):
        apart = curves - prior
        steps = np.diff(apart[..., 1:], axis=-1)
        drawn = (apart**2).sum() + module.SMOOTH * (steps**2).sum()
        loss = module.log_loss(sums, curves, trend).sum()
        return loss + 0.5 * stiffness * drawn + 0.5 * sums.n.sum() * (trend**2 @ penalty).sum()

    best, step = objective(curves, trend), 1e-4
    for index in np.ndindex(curves.shape):
        nudge = np.zeros_like(curves)
        nudge[index] = step
        slope = (objective(curves + nudge, trend) - objective(curves - nudge, trend)) / (2 * step)
        assert abs(slope) < 0.05, (
            "a Newton step from the optimum would lower the objective by next to nothing"
        )
    rng = np.random.default_rng(1)
    for _ in range(20):
        other = curves * np.exp(0.1 * rng.standard_normal(curves.shape))
        assert objective(other, trend + 0.1 * rng.standard_normal(trend.shape)) > best


# -- whether to warp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_warps_are_undone(seed):
    clean, measured, design = _warped(np.random.default_rng(seed), 300)
    back = _undone(_fit(measured, design), measured, design)
    assert ((back - clean) ** 2).mean() < 0.4 * ((measured - clean) ** 2).mean()
    scales = np.array([back[design.site == s].std(axis=0).mean() for s in range(4)])
    assert np.ptp(scales) < 0.06, "undoing the warp must not make the scale tell the site"


def test_sites_that_warp_nothing_are_left_alone():
    chosen = []
    for seed in range(20):
        clean, _, design = _warped(np.random.default_rng(seed), 60)
        chosen.append(not _fit(clean, design).is_identity)
    assert np.mean(chosen) <= 0.2


def test_few_participants_fall_back_to_shift_and_scale():
    chosen = []
    for seed in range(20):
        _, measured, design = _warped(np.random.default_rng(seed), 10)
        chosen.append(not _fit(measured, design).is_identity)
    assert np.mean(chosen) <= 0.2


def test_one_heavy_tailed_pool_is_not_taken_for_warps():
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(4), 80)
    chosen = [not _fit(rng.standard_t(3, (320, 6)), _design(site, k)).is_identity for k in range(20)]
    assert np.mean(chosen) <= 0.2


def test_a_shape_that_all_sites_share_stays():
    rng = np.random.default_rng(1)
    design = _design(np.repeat(np.arange(4), 200))
    r = rng.gamma(2.0, size=(800, 5))
    r = (r - r.mean(axis=0)) / r.std(axis=0)
    moved = np.abs(_undone(_fit(r, design, wanted=True), r, design) - r)
    assert moved.mean() < 0.08


def test_a_part_of_many_rows_is_enough_to_choose_by(monkeypatch):
    for warped in (False, True):
        clean, measured, design = _warped(np.random.default_rng(3), 400, features=12, amount=0.2)
        z = measured if warped else clean
        whole = _fit(z, design)
        monkeypatch.setattr(designs, "MAX_ROWS", 800)
        part = _fit(z, design)
        assert whole.is_identity == part.is_identity == (not warped)
        monkeypatch.undo()


def test_features_may_come_in_any_number_of_blocks(monkeypatch):
    _, measured, design = _warped(np.random.default_rng(0), 100, features=6)
    whole = _fit(measured, design)
    monkeypatch.setattr(designs, "PIECE", 100)
    parts = _fit(measured, design)
    assert not whole.is_identity
    for name, value in vars(whole).items():
        assert getattr(parts, name) == pytest.approx(value, rel=1e-9), name


def test_scales_that_differ_much_are_no_warps():
    """A shrunk estimate of shifts and scales is easily surpassed, by anything that is shrunk less."""
    chosen = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        design = _design(np.repeat(np.arange(20), 15), seed)
        clean = rng.standard_normal((300, 10)) + design.covariates
        scale, shift = np.exp(0.6 * rng.standard_normal((20, 10))), rng.standard_normal((20, 10))
        given = {"site": design.site, "covariates": design.covariates}
        harmonizer = ep.SiteHarmonizer(network=False).fit(
            scale[design.site] * clean + shift[design.site], **given
        )
        chosen.append(not _warp_of(harmonizer).is_identity)
    assert np.mean(chosen) <= 0.2


def test_one_odd_feature_does_not_decide_for_the_others():
    for odd in ("site", "age"):
        clean, measured, design = _warped(np.random.default_rng(0), 300, amount=0.2)
        noise = 1e-3 * np.random.default_rng(1).standard_normal(len(clean))
        column = (design.site if odd == "site" else design.covariates[:, 0] + 5 * design.site) + noise
        given = {"site": design.site, "covariates": design.covariates}
        columns = [
            set(
                _warp_of(
                    ep.SiteHarmonizer(network=False).fit(np.column_stack([z, column]), **given)
                ).columns.tolist()
            )
            for z in (clean, measured)
        ]
        assert not set(range(6)) & columns[0], odd
        assert len(set(range(6)) & columns[1]) >= 5, odd


def test_a_few_features_that_are_warped_are_recognised_among_many_that_are_not():
    clean, measured, design = _warped(np.random.default_rng(0), 300, features=40, amount=0.24)
    mixed = np.column_stack([measured[:, :4], clean[:, 4:]])
    assert set(range(4)) <= set(_fit(mixed, design).columns.tolist())


@pytest.mark.parametrize("seed", range(4))
def test_newton_does_not_jam_on_heavy_tails(seed):
    rng = np.random.default_rng(seed)
    design = _design(np.repeat(np.arange(3), 40), seed)
    warp = _fit(np.exp(3 * rng.standard_normal((120, 5))), design, wanted=True)
    assert warp.pool[:, 1:].min() > 1e-3
    ratio = warp.curves[..., 1:] / warp.pool[:, 1:]
    assert ratio.max() <= 5 + 1e-9
    assert ratio.min() >= 0.2 - 1e-9


@pytest.mark.parametrize("bending", [np.False_, np.True_])
def test_numpys_booleans_mean_what_they_say(bending):
    pool = ep.simulate_table(people=60).pool
    assert _warp_of(_fitted(pool, bending=bending)).is_identity == (not bending)
    with pytest.raises(InputError, match="True, False or None"):
        _fitted(pool, bending=0)


@pytest.mark.filterwarnings("ignore:3 site")
def test_one_participant_many_times_shows_no_curve():
    pool = ep.simulate_table(people=40, overlap=1.0, bending=0.2).pool
    given = {"site": pool.site_labels, "covariates": pool.C, "subject": np.zeros(len(pool), dtype=int)}
    model = ep.SiteHarmonizer(bending=True, network=False).fit(pool.X, **given)
    assert _warp_of(model).is_identity
    assert np.isfinite(model.transform(pool.X, site=pool.site_labels, covariates=pool.C)).all()


def test_small_sites_get_the_curve_of_the_pool():
    pool = ep.simulate_table(people=120, overlap=1.0, bending=0.2, features=8).pool
    kept = (pool.site_labels != "GE") | (np.cumsum(pool.site_labels == "GE") <= 12)
    given = {"site": pool.site_labels[kept], "covariates": pool.C[kept]}
    warp = _warp_of(ep.SiteHarmonizer(bending=True, network=False).fit(pool.X[kept], **given))
    assert not warp.is_identity
    assert np.array_equal(warp.curves[0], warp.pool)
    z = np.zeros((1, 8))
    assert np.isfinite(warp.undo(z, _at(0, z))).all()


# -- the harmonizer ----------------------------------------------------------------------------------------


def test_features_come_nearer_to_the_truth():
    error = {False: [], True: [], None: []}
    for seed in range(3):
        truth = ep.simulate_table(people=200, overlap=0.5, noise=0.12, bending=0.2, random_state=seed)
        pool = truth.pool
        for bending, errors in error.items():
            harmonized = _fitted(pool, bending=bending).transform(
                pool.X, site=pool.site_labels, covariates=pool.C
            )
            apart = harmonized - truth.clean
            errors.append(((apart - apart.mean(axis=0)) ** 2 / truth.clean.var(axis=0)).mean())
    assert np.mean(error[None]) < 0.8 * np.mean(error[False])
    assert np.mean(error[True]) < 0.8 * np.mean(error[False])


def test_trees_no_longer_classify_a_site_that_warps():
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import cross_val_score

    accuracy = {False: [], None: []}
    for bending, values in accuracy.items():
        for seed in range(2):
            pool = ep.simulate_table(
                people=250, overlap=1.0, features=20, noise=0.12, bending=0.15, random_state=seed
            ).pool
            clean = _fitted(pool, bending=bending).transform(pool.X, site=pool.site_labels, covariates=pool.C)
            trees = HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=15, random_state=0)
            values.append(cross_val_score(trees, clean, pool.site, cv=3).mean())
    assert np.mean(accuracy[False]) > np.mean(accuracy[None]) + 0.05
    assert np.mean(accuracy[None]) < 1 / 3 + 0.08


def test_a_warped_model_is_saved_whole_and_a_reference_stays_as_it_is(tmp_path):
    pool = ep.simulate_table(people=100, bending=0.2, overlap=1.0).pool
    given = {"site": pool.site_labels, "covariates": pool.C}
    model = _fitted(pool, bending=True, reference_site="GE")
    assert not _warp_of(model).is_identity
    clean = model.transform(pool.X, **given)
    reference = pool.site_labels == "GE"
    assert np.array_equal(np.asarray(clean)[reference], np.asarray(pool.X)[reference])
    model.save(tmp_path / "model")
    assert np.array_equal(ep.load(tmp_path / "model").transform(pool.X, **given), clean)


def test_effects_of_sites_that_warp_are_those_that_the_site_shows():
    effects = {}
    for bending in (False, True):
        pool = ep.simulate_table(people=300, bending=0.1, overlap=1.0, noise=0.12).pool
        effects[bending] = _fitted(pool, bending=bending).site_effects_
    for column in ("shift", "scale"):
        assert np.corrcoef(effects[False][column], effects[True][column])[0, 1] > 0.95
    width = {k: (frame["high"] - frame["low"]).mean() for k, frame in effects.items()}
    assert width[True] == pytest.approx(width[False], rel=0.2)
    assert effects[True]["warped"].all()
    assert not effects[False]["warped"].any()


def test_missing_values_of_new_participants_are_filled_as_their_site_shows_them():
    pool = ep.simulate_table(people=600, bending=0.2, overlap=1.0).pool
    train, new = (pool[rows] for rows in pool.split(0.5, random_state=0))
    model = _fitted(train, bending=True, missing="impute")
    given = {"site": new.site_labels, "covariates": new.C}
    gaps = np.array(new.X, dtype=float)
    gaps[:, 0] = np.nan
    filled = np.asarray(model.transform(gaps, **given))[:, 0]
    whole = np.asarray(model.transform(new.X, **given))[:, 0]
    sites = new.site
    apart = [filled[sites == s].mean() - whole[sites == s].mean() for s in range(3)]
    assert np.abs(apart).max() < 0.25 * whole.std()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("warp.curves", lambda a: a.astype(bool)),
        ("warp.curves", lambda a: -a),
        ("warp.curves", lambda a: a[..., :-1].copy()),
        ("warp.pool", lambda a: a * 0 + 1e-320),
        ("warp.width", lambda a: a * 0 + 1e308),
        ("warp.columns", lambda a: a + 1000),
        ("warp.columns", lambda a: a[::-1].copy()),
        ("warp.curves", None),
        ("shift and scale.scale", lambda a: a * 0),
    ],
)
def test_damaged_curves_are_refused(tmp_path, name, value):
    model = _fitted(ep.simulate_table(people=60, overlap=1.0).pool, bending=True)
    forged(model.save(tmp_path / "model"), f"model_.composition.effects.{name}", value)
    with pytest.raises(InputError, match="damaged"):
        ep.load(tmp_path / "model")


def test_a_new_site_is_shifted_and_scaled_though_the_others_are_warped():
    """What warps take out of the others' shifts must not make a new site's shift seem unlikely."""
    for seed in range(3):
        truth = ep.simulate_table(
            sites=list("abcdef"), people=80, bending=0.2, overlap=1.0, noise=0.12, random_state=seed
        )
        pool, new = truth.pool, truth.pool.site_labels == "f"
        model = ep.SiteHarmonizer(bending=True, network=False, unseen_site="adapt")
        model.fit(pool.X[~new], site=pool.site_labels[~new], covariates=pool.C[~new])
        clean = model.transform(pool.X[new], site=pool.site_labels[new], covariates=pool.C[new])
        others = model.transform(pool.X[~new], site=pool.site_labels[~new], covariates=pool.C[~new])
        level = (others - truth.clean[~new]).mean(axis=0)  # of the pool, which nothing can tell
        before, after = (
            np.abs((x - truth.clean[new] - level).mean(axis=0)).mean() for x in (pool.X[new], clean)
        )
        assert after < 0.4 * before
