import itertools

import numpy as np
import pandas as pd
import pytest

from equipool.benchmark import datasets, methods, runs, uci
from equipool.benchmark import table1 as benchmark
from equipool.cli.app import main
from equipool.estimators import EquivariantPooler
from equipool.exceptions import InputError
from equipool.simulate import simulate_table


@pytest.fixture
def quick(monkeypatch):
    """Small data and few steps; counts the runs."""
    calls = []
    make, run = benchmark.make_method, benchmark.run_one

    def small(name, seed=0):
        pool = simulate_table(overlap=0.5, people=80, random_state=seed).pool
        parts = pool.split(0.5, stratify=("site", "target"), random_state=seed)
        return uci.DatasetSplit(name, *(pool[rows] for rows in parts))

    def counted(*key):
        calls.append(key[:3])
        return run(*key)

    monkeypatch.setattr(benchmark, "make_method", lambda *key: make(*key).set_params(steps=5))
    monkeypatch.setattr(benchmark, "run_one", counted)
    monkeypatch.setattr(datasets, "load_dataset", small)
    return calls


def test_the_table_has_every_method_and_seed(quick, tmp_path):
    runs = benchmark.run_benchmark(["sim"], tmp_path, seeds=1, jobs=1)
    assert runs["method"].tolist() == list(benchmark.METHODS)
    promised = [
        "dataset",
        "method",
        "seed",
        "delta_eq",
        "adv",
        "adv_auc",
        "adv_chance",
        "mmd",
        "acc",
        "seconds",
    ]
    assert list(pd.read_csv(tmp_path / "runs.csv").columns)[:10] == promised
    numbers = runs.drop(columns="equivariance_error").select_dtypes("number")
    assert np.isfinite(numbers.to_numpy()).all()
    assert runs.set_index("method")["equivariance_error"]["ours"] < 1e-12
    for kind in ("md", "tex", "csv"):
        text = (tmp_path / f"table.{kind}").read_text()
        assert "ours" in text
    assert (tmp_path / "table.md").read_text().count("**") >= 2 * len(benchmark.COLUMNS)
    assert r"\textbf{" in (tmp_path / "table.tex").read_text()


def test_a_stopped_benchmark_goes_on_and_gives_the_same_numbers(quick, tmp_path):
    whole = benchmark.run_benchmark(["sim"], tmp_path / "a", methods=["naive", "ours"], seeds=2, jobs=1)
    benchmark.run_benchmark(["sim"], tmp_path / "b", methods=["naive"], seeds=2, jobs=1)
    quick.clear()
    resumed = benchmark.run_benchmark(["sim"], tmp_path / "b", methods=["naive", "ours"], seeds=2, jobs=1)
    assert quick == [("sim", "ours", 0), ("sim", "ours", 1)]
    pd.testing.assert_frame_equal(whole.drop(columns="seconds"), resumed.drop(columns="seconds"))


def test_runs_with_other_settings_are_not_taken_for_these(quick, tmp_path, monkeypatch):
    benchmark.run_benchmark(["sim"], tmp_path, methods=["naive"], seeds=1, jobs=1)
    others = {"sim": {"naive": {"hidden": 8}}}
    for settings, expected in ((None, 0), (others, 1), (others, 0)):
        quick.clear()
        benchmark.run_benchmark(["sim"], tmp_path, methods=["naive"], seeds=1, jobs=1, settings=settings)
        assert len(quick) == expected


@pytest.mark.parametrize("version", ["METHODS_VERSION", "SCORES_VERSION", "BRAINS_VERSION"])
def test_runs_of_other_versions_are_not_taken_for_these(version, quick, tmp_path, monkeypatch):
    benchmark.run_benchmark(["sim"], tmp_path, methods=["naive"], seeds=1, jobs=1)
    monkeypatch.setattr(runs, version, getattr(runs, version) + 1)
    quick.clear()
    benchmark.run_benchmark(["sim"], tmp_path, methods=["naive"], seeds=1, jobs=1)
    assert len(quick) == 1


def test_one_and_two_workers_give_the_same_bits(cache, tmp_path):
    """The real German table, with few steps: each worker is a process of its own."""
    settings = {"german": {"*": {"steps": 20}}}
    one, two = (
        benchmark.run_benchmark(
            ["german"], tmp_path / str(jobs), methods=["cai", "ours"], seeds=1, jobs=jobs, settings=settings
        )
        for jobs in (1, 2)
    )
    pd.testing.assert_frame_equal(one.drop(columns="seconds"), two.drop(columns="seconds"), check_exact=True)


def test_every_step_from_the_paper_to_ours_changes_what_it_says():
    steps = [methods.make_method(name, 0, {}).get_params() for name in methods.ABLATION]
    changed = [{k for k in a if a[k] != b[k]} for a, b in itertools.pairwise(steps)]
    assert [sorted(c) for c in changed] == [
        ["generator", "tau"],
        ["independence", "turning_planes"],
        ["finetune"],
        ["power"],
        ["adversary"],
        ["bounded"],
        ["front", "latent_reconstruction", "mmd", "prediction"],
        ["match"],
    ]
    assert methods.make_method("ours", 0, {}).get_params() == EquivariantPooler(random_state=0).get_params()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"german": 3}', '{"german": {"ours": {"powr": 1}}}', '{"german": {"*": 1}}']
)
def test_a_file_that_holds_no_settings_is_answered(tmp_path, text):
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"settings.json holds no settings .* as `equipool select` writes"):
        methods.read_settings(path)
    with pytest.raises(InputError, match=r"other.json does not exist; .*that `equipool select` wrote"):
        methods.read_settings(tmp_path / "other.json")


def test_the_command_draws_tau_and_prints_the_table(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets, "require_dataset", lambda name: None)
    arguments = ["benchmark", "sim", "--methods", "naive", "ours", "--seeds", "1", "--jobs", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| ours |" in out
    assert "sim-tau.png" in out
    assert (tmp_path / "sim-tau.png").stat().st_size > 10_000


def test_unknown_methods_are_answered(tmp_path, capsys):
    with pytest.raises(InputError, match="no method 'combat'; there are naive"):
        benchmark.run_benchmark(["german"], tmp_path, methods=["combat"])
    assert main(["benchmark", "iris", "--out", str(tmp_path / "x"), "--jobs", "1", "--methods", "naive"]) == 2
    assert "no dataset 'iris'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_chance_is_the_best_that_a_classifier_can_do():
    means = pd.DataFrame({"adv_auc": [0.42, 0.52], "mmd": [-1.2, -0.1], "acc": [70.0, 75.0]})
    assert benchmark.best_rows(means, "adv_auc").tolist() == [False, True]
    assert benchmark.best_rows(means, "mmd").tolist() == [True, True]
    assert benchmark.best_rows(means, "acc").tolist() == [False, True]
