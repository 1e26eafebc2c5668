"""Whom sites scanned: what of their differences is left to their people."""

import numpy as np
import pytest

import equipool as ep
from equipool.exceptions import InputError
from equipool.sites.composition import _places, people_factors


def scanned(rng, *, sites=12, people=60, p=50, men=0.0, scanner=0.0):
    """Return features, sites, the clean features and each site's share of a group with larger heads.

    ``men`` is how far shares differ between sites, ``scanner`` how far scanners move everybody along the
    factor that the group differs in.
    """
    site = np.repeat(np.arange(sites), people)
    share = np.clip(0.5 + men * rng.standard_normal(sites), 0.05, 0.95)
    group = rng.random(len(site)) < share[site]
    head = 1.5 * group + rng.standard_normal(len(site))
    loading = rng.uniform(0.4, 0.8, p)
    clean = np.outer(head, loading) + 0.8 * rng.standard_normal((len(site), p))
    moved = scanner * np.outer(rng.standard_normal(sites), loading) + 0.4 * rng.standard_normal((sites, p))
    return clean + moved[site], site, clean, group


def like(found, clean):
    apart = (found - clean) - (found - clean).mean(axis=0)
    return 1 - (apart**2).sum() / ((clean - clean.mean(axis=0)) ** 2).sum()


def test_a_site_that_scans_more_men_keeps_their_heads():
    gains = []
    for seed in range(5):
        x, site, clean, group = scanned(np.random.default_rng(seed), sites=20, people=80, men=0.25)
        kept = ep.SiteHarmonizer().fit(x, site=site)
        removed = ep.SiteHarmonizer(keep_people=False).fit(x, site=site)
        gains.append(like(kept.transform(x, site=site), clean) - like(removed.transform(x, site=site), clean))
        share = np.array([group[site == s].mean() for s in kept.sites_.astype(int)])
        mean = kept.site_effects_.groupby("site", sort=False)["kept"].mean()
        assert np.corrcoef(mean.loc[kept.sites_], share)[0, 1] > 0.7
        assert not removed.site_effects_["kept"].any()
    assert np.mean(gains) > 0.01


def test_told_the_group_nothing_is_left_to_guess():
    x, site, _, group = scanned(np.random.default_rng(0), men=0.2)
    blind, told = (ep.SiteHarmonizer().fit(x, y, site=site) for y in (None, group))
    size = [np.abs(h.site_effects_["kept"]).mean() for h in (blind, told)]
    assert size[1] < 0.5 * size[0]


def test_scanners_that_move_everybody_by_as_much_as_people_differ_are_harmonized():
    for seed in range(4):
        x, site, clean, _ = scanned(np.random.default_rng(seed), sites=16, scanner=2.0)
        harmonizer = ep.SiteHarmonizer().fit(x, site=site)
        assert not harmonizer.site_effects_["kept"].any()
        assert like(harmonizer.transform(x, site=site), clean) > 0.9


@pytest.mark.parametrize("settings", [{"sites": 5, "men": 0.2}, {"sites": 12}])
def test_few_sites_and_like_people_are_left_as_they_were(settings):
    some = 0
    for seed in range(5):
        x, site, _, _ = scanned(np.random.default_rng(seed), **settings)
        some += bool(ep.SiteHarmonizer().fit(x, site=site).site_effects_["kept"].any())
    assert some <= (0 if settings["sites"] == 5 else 1)


def test_a_new_sites_people_keep_theirs_too():
    left = {True: [], False: []}
    for seed in range(4):
        x, site, clean, _ = scanned(np.random.default_rng(seed), sites=26, people=80, men=0.25)
        known = site < 20
        for kept in (True, False):
            harmonizer = ep.SiteHarmonizer(unseen_site="adapt", keep_people=kept)
            harmonizer.fit(x[known], site=site[known])
            assert bool(harmonizer.choices_["kept"]) == kept
            apart = harmonizer.transform(x[~known], site=site[~known]) - clean[~known]
            left[kept] += [abs(apart[site[~known] == s].mean()) for s in range(20, 26)]
    assert np.mean(left[True]) < 0.8 * np.mean(left[False])


def test_few_features_and_copies_of_one_are_harmonized():
    """A scanner may well move four features together, or one that a table has thirteen times."""
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(20), 80)
    person = rng.standard_normal(len(site))
    four = np.outer(person, np.ones(4)) + rng.standard_normal((len(site), 4))
    four += 0.4 * rng.standard_normal(20)[site, None]
    ten = rng.standard_normal((len(site), 30)) + 0.4 * rng.standard_normal((20, 30))[site]
    copies = ten[:, :1] + 0.05 * rng.standard_normal((len(site), 25))
    for x in (four, np.hstack([ten, copies])):
        assert ep.SiteHarmonizer().fit(x, site=site).choices_["kept"] == 0


def test_what_is_kept_wanes_with_how_far_sites_differ():
    kept = []
    for scanner in (0.3, 0.6, 0.75, 1.2):
        of_seeds = []
        for seed in range(3):
            x, site, _, _ = scanned(np.random.default_rng(seed), sites=40, people=40, scanner=scanner)
            effects = ep.SiteHarmonizer(bending=False, network=False).fit(x, site=site).model_
            of_seeds.append(effects.composition.believed.max(initial=0.0))
        kept.append(np.mean(of_seeds))
    assert kept[0] > kept[2] > kept[3]
    assert kept[3] == 0


def test_places_are_generalised_least_squares():
    rng = np.random.default_rng(2)
    loadings, shift = rng.normal(size=(2, 15)), rng.normal(size=(3, 15))
    error, between, people = rng.uniform(0.1, 1, (3, 15)), rng.uniform(0.1, 1, 15), rng.uniform(0.01, 0.1, 3)
    place, noise = _places(loadings, shift, error, between, people)
    for s in range(3):
        w = 1 / np.sqrt(between + error[s] ** 2)
        wanted = np.linalg.lstsq((loadings * w).T, shift[s] * w, rcond=None)[0]
        np.testing.assert_allclose(place[s], wanted)
        inverse = np.linalg.inv((loadings * w**2) @ loadings.T)
        np.testing.assert_allclose(noise[s], np.diag(inverse) + people[s])


def test_factors_are_those_in_which_people_differ():
    rng = np.random.default_rng(3)
    loading = rng.uniform(0.5, 1.0, 30)
    rows = np.outer(rng.standard_normal(4000), loading) + 0.7 * rng.standard_normal((4000, 30))
    found, copies = people_factors(rows, np.ones(len(rows)))
    assert (copies == 1).all()
    assert found.shape == (1, 30)
    assert np.abs(np.abs(found[0]) - loading).max() < 0.15


def test_what_is_neither_yes_nor_no_is_refused():
    x, site, _, _ = scanned(np.random.default_rng(0), sites=3)
    with pytest.raises(InputError, match="keep_people must be True or False"):
        ep.SiteHarmonizer(keep_people=None).fit(x, site=site)
