"""The benchmark on brains, on a cohort of 40 at 8 mm."""

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from equipool.benchmark import datasets as brainsets
from equipool.cli import app as cli
from equipool.data.volumes import block_means
from equipool.judge.classifiers import CLASSIFIERS
from equipool.simulate import brains

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # last: a file there is named as a package
import harmonized_images as volumes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `equipool benchmark --quick` and the program for harmonized images write for a small cohort."""
    out = tmp_path_factory.mktemp("benchmark")
    small = dataclasses.replace(brains.COHORTS["adni"], patients=(8, 8, 8), controls=(10, 10, 10))
    settings = out / "settings.json"
    settings.write_text('{"adni-sim": {"*": {"steps": 8}}, "adni-sim-hard": {"*": {"steps": 8}}}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUIPOOL_CACHE", str(out / "cache"))
        patch.setitem(brains.COHORTS, "adni", small)
        patch.setattr(brainsets, "RESOLUTION", 8.0)
        brainsets.whole_cohort.cache_clear()
        call = ["benchmark", "adni-sim", "adni-sim-hard", "--methods", "ss", "ours", "--quick"]
        call += ["--jobs", "1", "--settings", str(settings), "--out", str(out)]
        assert cli.main(call) == 0
        volumes.main(
            ["adni-sim", "--splits", "1", "--jobs", "1", "--settings", str(settings), "--out", str(out)]
        )
        yield out
    brainsets.whole_cohort.cache_clear()


def test_tables_and_figures_are_there(folder):
    runs = pd.read_csv(folder / "runs.csv")
    assert list(runs.method) == ["ss", "ours"] * 2
    assert runs.drop(columns="equivariance_error").notna().all().all()
    for name in ("tau", "harmonized", "tmaps", "support"):
        assert (folder / f"adni-sim-{name}.png").stat().st_size > 5000
    assert len(list((folder / "adni-sim-tmaps").glob("*_stat-t_statmap.nii.gz"))) == 3 + 5 + 5


def test_where_ages_are_apart_people_are_dropped_by_those_who_need_counterparts(folder):
    dropped = pd.read_csv(folder / "runs.csv").set_index(["dataset", "method"])["dropped"]
    assert dropped["adni-sim", "ss"] < 0.2 < dropped["adni-sim-hard", "ss"]
    assert dropped["adni-sim-hard", "ours"] == 0


def test_harmonized_volumes_are_nearer_to_the_clean_ones(folder):
    judged = pd.read_csv(folder / "adni-sim-volumes.csv").set_index("method")
    assert judged.scanner["raw"] > 0.8
    assert judged.scanner["ours"] < judged.scanner["raw"]
    assert judged.scanner_accuracy["ours"] < judged.scanner_accuracy["raw"]
    assert judged.scanner_auc["ours"] < judged.scanner_auc["raw"] > 0.8
    assert judged.largest_scanner["ours"] == pytest.approx(6 / 11, abs=0.15)  # as in the cohort
    assert judged.deviation_like_clean["ours"] > judged.deviation_like_clean["raw"]
    found = pd.read_csv(folder / "adni-sim-tmaps.csv").set_index("map")
    assert found.people["ours"] == 54
    assert ((found[["found", "false"]] >= 0) & (found[["found", "false"]] <= 1)).all().all()


def test_the_level_of_shuffled_scanners_is_beside_the_scores(folder):
    judged = pd.read_csv(folder / "adni-sim-volumes.csv")
    assert judged.scanner_shuffled.between(0.05, 0.7).all()
    assert (judged.accuracy_shuffled < judged.largest_scanner + 0.3).all()
    text = (folder / "adni-sim-volumes.md").read_text()
    assert "scanner_shuffled" in text
    assert "nan" not in text  # one split has no deviation


def test_the_same_people_by_every_scanner_tell_it_before_harmonizing_alone(folder):
    judged = pd.read_csv(folder / "adni-sim-volumes.csv").set_index("method")
    assert judged.scanner_same_people["raw"] > 0.8
    assert judged.scanner_same_people["ours"] < judged.scanner_same_people["raw"]


def test_people_scanned_by_all_are_the_cohorts_on_their_own_scanner(folder):
    pool, scans = brainsets.whole_cohort("adni-sim")
    some = np.array([7, 3, 20])
    by_all = volumes.scanned_by_all("adni-sim", pool.ids[some], pool.sites, scans.mask)
    own = scans[some].read()
    np.testing.assert_allclose(by_all[pool.site[some], range(3)], own, atol=1e-3 * np.ptp(own))
    assert (abs(by_all - own) > 0.01 * np.ptp(own)).any(axis=2).sum() == 6


@pytest.mark.parametrize("method", volumes.HARMONIZED)
def test_scans_are_harmonized_as_those_of_the_site_that_is_named(folder, method):
    pool, scans = brainsets.whole_cohort("adni-sim")
    everyone = np.arange(len(pool))
    harmonize = volumes.harmonizer(method, pool, scans, everyone)
    some = np.array([4, 30])
    whole = harmonize(scans, everyone, pool.site).read()
    again = harmonize(scans[some], some, pool.site[some]).read()
    np.testing.assert_allclose(again, whole[some], rtol=1e-5, atol=1e-3)
    other = harmonize(scans[some], some, (pool.site[some] + 1) % 3).read()
    assert np.allclose(other, whole[some]) == (method in ("raw", "gain"))


@pytest.mark.parametrize(("spoil", "fresh", "judged"), [(0, 0, [1]), (1, 0, [0, 1]), (0, 1, [0, 1])])
def test_a_split_that_is_done_is_not_judged_again(folder, tmp_path, monkeypatch, spoil, fresh, judged):
    (done,) = (folder / "runs").glob("adni-sim-volumes-*-0.json")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / done.name).write_text("[{" if spoil else done.read_text())
    asked = []

    def judge(name, seed):
        asked.append(seed)
        return [{"split": seed, "method": method, "scanner": 0.5} for method in volumes.HARMONIZED]

    monkeypatch.setattr(volumes, "judge_split", judge)
    monkeypatch.setattr(volumes, "disease_maps", lambda *given: ({}, given[2]))
    monkeypatch.setattr(volumes, "_detected", lambda *given: pd.DataFrame({"map": ["ours"]}))
    volumes.run_volumes("adni-sim", tmp_path, splits=2, jobs=1, fresh=bool(fresh))
    assert asked == judged
    splits = pd.read_csv(tmp_path / "adni-sim-volumes.csv")["split"]
    assert splits.tolist() == [0] * 5 + [1] * 5
    volumes.run_volumes("adni-sim", tmp_path, splits=2, jobs=1)
    assert asked == judged


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where a cohort of four would be simulated."""
    monkeypatch.setenv("EQUIPOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(brainsets, "RESOLUTION", 8.0)
    monkeypatch.setitem(brains.COHORTS, "adcp", brains.custom_cohort([2, 2]))
    return brainsets.place_of("adcp")


def test_what_a_killed_simulation_left_is_made_anew(place):
    place.mkdir(parents=True)
    (place / "left").write_text("")
    assert (brainsets.simulated_folder("adcp") / "participants.tsv").exists()
    assert not (place / "left").exists()


def test_a_cohort_that_another_run_simulated_meanwhile_is_taken_from_it(place, monkeypatch):
    write = brains.SimulatedBrains.write

    def twice(cohort, out, *, jobs):
        yield from write(cohort, out, jobs=jobs)
        yield from write(cohort, place)
        (place / "other").write_text("")

    monkeypatch.setattr(brains.SimulatedBrains, "write", twice)
    assert brainsets.simulated_folder("adcp") == place
    assert (place / "other").exists()
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_sites_that_are_apart_share_no_age():
    rng = np.random.default_rng(0)
    age, site = rng.uniform(50, 95, 300), np.arange(300) % 3
    keep = brainsets.apart(age, site, 3)
    ranges = sorted((age[keep & (site == k)].min(), age[keep & (site == k)].max()) for k in range(3))
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


def test_trees_read_as_well_from_columns_that_were_cut():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(500, 5))
    site = (abs(x[:, 0]) > 0.7).astype(int)
    x *= [1e-10, 1, 1, 1, 1e6]  # a tiny unit must not make values one
    cut = CLASSIFIERS["boosted trees"](0, 400).fit(x[:400], site[:400])
    plain = clone(cut.steps[-1][1]).fit(x[:400], site[:400])
    assert len(cut.steps) == 3
    assert (plain.predict(x[400:]) == cut.predict(x[400:])).mean() > 0.95
    assert (cut.predict(x[400:]) == site[400:]).mean() > 0.9


def test_block_means_against_a_loop():
    rng = np.random.default_rng(1)
    mask = rng.random((9, 8, 7)) < 0.7
    values = rng.normal(size=(3, mask.sum()))
    place = np.argwhere(mask) // 4
    expected = []
    for block in sorted(set(map(tuple, place))):
        inside = (place == block).all(axis=1)
        if inside.sum() >= 8:
            expected.append(values[:, inside].mean(axis=1))
    np.testing.assert_allclose(block_means(values, mask), np.array(expected).T)
