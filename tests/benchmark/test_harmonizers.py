import importlib.util
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import equipool as ep
from equipool.benchmark import harmonizers
from equipool.cli.app import main
from equipool.exceptions import InputError

ROOT = Path(__file__).parents[2]
needs_peers = pytest.mark.skipif(
    importlib.util.find_spec("combatlearn") is None, reason="the extra 'peers' (combatlearn) is not installed"
)


def test_the_site_goes_and_the_age_stays(tmp_path):
    pools = {"sim": ep.simulate_table(overlap=1.0, people=60, noise=0.1).pool}
    folds = harmonizers.run_harmonizers(pools, tmp_path, methods=["raw", "ours"], repeats=1, jobs=1)
    assert len(folds) == 10
    raw, ours = (folds[folds["method"] == m].mean(numeric_only=True) for m in ("raw", "ours"))
    assert raw["adv"] > 0.9
    assert ours["adv"] < ours["adv_age"] + 0.15
    assert ours["age"] > raw["age"] - 0.02
    assert ours["lso"] > raw["lso"]
    assert ours["broken"] == 0
    assert "| ours |" in (tmp_path / "harmonizers.md").read_text()
    assert len(pd.read_csv(tmp_path / "folds.csv")) == 10


def test_a_killed_comparison_goes_on(tmp_path, monkeypatch, capsys):
    pools = {"../sim": ep.simulate_table(overlap=1.0, people=20, features=4).pool}
    score, calls = harmonizers.score_fold, []

    def killed(pool, *task):
        calls.append(task[:3])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(pool, *task)

    monkeypatch.setattr(harmonizers, "score_fold", killed)
    settings = {"methods": ["raw"], "repeats": 1, "jobs": 1}
    with pytest.raises(KeyboardInterrupt):
        harmonizers.run_harmonizers(pools, tmp_path / "out", **settings)
    folds = harmonizers.run_harmonizers(pools, tmp_path / "out", **settings)
    assert len(calls) == 3 + 3  # two were kept
    assert "2 of 5 folds are there already" in capsys.readouterr().err
    whole = harmonizers.run_harmonizers(pools, tmp_path / "whole", **settings)
    pd.testing.assert_frame_equal(folds.drop(columns="seconds"), whole.drop(columns="seconds"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    harmonizers.run_harmonizers(pools, tmp_path / "out", **settings, fresh=True)
    assert len(calls) == 16
    other = {"../sim": pools["../sim"][:-1]}
    harmonizers.run_harmonizers(other, tmp_path / "out", **settings)
    assert len(calls) == 21  # other data, other folds


@needs_peers
@pytest.mark.parametrize("method", ["combat", "combat-gam", "covbat"])
def test_peers_are_fitted_on_train_and_applied_to_others(method):
    pool = ep.simulate_table(overlap=1.0, people=60).pool
    peer = harmonizers.make_harmonizer(method)
    train = np.arange(len(pool)) % 3 > 0
    peer.fit(pool.X[train], site=pool.site_labels[train], covariates=pool.C[train])
    found = peer.transform(pool.X[~train], site=pool.site_labels[~train], covariates=pool.C[~train])
    means = [
        abs(np.diff([x[pool.site[~train] == s].mean() for s in range(3)])).max()
        for x in (pool.X[~train], found)
    ]
    assert means[1] < 0.5 * means[0]


@needs_peers
def test_no_degenerate_table_gives_nan_or_a_traceback(monkeypatch):
    path = ROOT / "benchmarks" / "degenerate.py"
    spec = importlib.util.spec_from_file_location("degenerate", path)
    degenerate = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "degenerate", degenerate)
    spec.loader.exec_module(degenerate)
    found = {name: degenerate.outcome(ep.SiteHarmonizer, case) for name, case in degenerate.cases().items()}
    assert {name: said for name, said in found.items() if said not in ("right", "clear error")} == {}


def test_the_command_compares_on_a_users_table(tmp_path, capsys):
    ep.simulate_table(overlap=1.0, people=30).pool.to_frame().to_csv(tmp_path / "volumes.csv", index=False)
    call = ["benchmark", "harmonizers", str(tmp_path / "volumes.csv"), "--site", "site", "--covariate", "age"]
    call += ["--target", "dx", "--id", "id", "--methods", "raw", "ours", "--repeats", "1", "--jobs", "1"]
    assert main([*call, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "## volumes" in out
    assert (tmp_path / "out" / "frontier.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["harmonizers"], "Name the tables"),
        (["harmonizers", "simulated-half"], "no simulated table"),
        (["harmonizers", "volumes.csv"], "volumes.csv does not exist"),
        (["harmonizers", "simulated-1", "--methods", "magic"], "no harmonizer 'magic'"),
        (["harmonizers", "simulated-1", "--repeats", "0"], "at least once"),
    ],
)
def test_wrong_calls_are_answered(tmp_path, capsys, call, message):
    assert main(["benchmark", *call, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_table_without_a_covariate_is_answered(tmp_path):
    pool = ep.PooledDataset.from_arrays(np.random.default_rng(0).normal(size=(40, 3)), site=["a", "b"] * 20)
    with pytest.raises(InputError, match="needs features and a covariate to keep"):
        harmonizers.run_harmonizers({"t": pool}, tmp_path, methods=["raw"])


def test_told_the_target_of_training_people_the_shares_of_sites_survive():
    """Half the sites have many patients: a harmonizer that does not know removes what they have in common."""
    rng = np.random.default_rng(0)
    site = np.repeat([f"s{k}" for k in range(8)], 60)
    sick = rng.random(480) < np.where(np.repeat(np.arange(8), 60) % 2, 0.85, 0.15)
    x = rng.standard_normal((480, 12)) + 1.2 * sick[:, None] * (np.arange(12) < 3)
    x += rng.standard_normal((8, 12))[np.repeat(np.arange(8), 60)]
    pool = ep.PooledDataset.from_arrays(
        x, site=site, covariates=rng.uniform(20, 80, 480), y=np.where(sick, "AD", "CN")
    )
    scores = harmonizers.score_fold(pool, "t", 0, 0, ["ours", "ours-y", "clean"])
    ours, with_y = scores  # the truth of this table is not known
    assert [score["method"] for score in scores] == ["ours", "ours-y"]
    assert with_y["auc"] > ours["auc"] + 0.05
    assert ours["auc_within"] > ours["auc"] + 0.05
    assert np.isnan(ours["clean"])


def test_simulated_tables_are_judged_by_their_truth():
    name, pool, _ = harmonizers.read_pool("simulated-1", site=None)
    methods = ["raw", "ours", "clean"]
    raw, ours, clean = harmonizers.score_fold(pool, name, 0, 0, methods)
    assert raw["clean"] < 0.5 < ours["clean"] < clean["clean"] == 1
    # A file may be called so too, and has no truth.
    assert len(harmonizers.score_fold(pool[: len(pool) - 1], "simulated-mine", 0, 0, methods)) == 2
