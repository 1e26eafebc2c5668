import contextlib
import itertools
import json
import shutil

import numpy as np
import pandas as pd
import pytest

from equipool.benchmark import datasets, methods, runs
from equipool.benchmark import table1 as benchmark
from equipool.cli.app import main
from equipool.estimators import EquivariantPooler
from equipool.exceptions import InputError
from equipool.simulate import simulate_table


@contextlib.contextmanager
def quick_runs():
    """Small data and few steps; yields the list of runs."""
    calls = []
    make, run = benchmark.make_method, benchmark.run_one

    def small(name, seed=0):
        pool = simulate_table(overlap=0.5, people=80, random_state=seed).pool
        parts = pool.split(0.5, stratify=("site", "target"), random_state=seed)
        return datasets.DatasetSplit(*(pool[rows] for rows in parts))

    def counted(*key):
        calls.append(key[:3])
        return run(*key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "make_method", lambda *key: make(*key).set_params(steps=5))
        patch.setattr(benchmark, "run_one", counted)
        patch.setattr(datasets, "load_dataset", small)
        yield calls


@pytest.fixture
def quick():
    with quick_runs() as calls:
        yield calls


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A benchmark of every method, and its folder; not to be written to."""
    out = tmp_path_factory.mktemp("finished")
    with quick_runs():
        return benchmark.run_benchmark(["sim"], out, seeds=1, jobs=1), out


@pytest.fixture
def repeated(finished, quick, tmp_path, monkeypatch):
    """A folder with a run of one method; the list of runs after it, which give the same numbers."""
    [path] = finished[1].glob("runs/*-naive-*.json")
    (tmp_path / "runs").mkdir()
    shutil.copy(path, tmp_path / "runs")
    result = json.loads(path.read_text()), path.with_suffix(".npz").read_bytes()
    monkeypatch.setattr(benchmark, "run_one", lambda *key: quick.append(key[:3]) or result)
    return tmp_path, quick


def test_the_table_has_every_method_and_seed(finished):
    runs, out = finished
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
    assert list(pd.read_csv(out / "runs.csv").columns)[:10] == promised
    numbers = runs.drop(columns="equivariance_error").select_dtypes("number")
    assert np.isfinite(numbers.to_numpy()).all()
    assert runs.set_index("method")["equivariance_error"]["ours"] < 1e-12
    for kind in ("md", "csv"):
        text = (out / f"table.{kind}").read_text()
        assert "ours" in text
    assert (out / "table.md").read_text().count("**") >= 2 * len(benchmark.COLUMNS)


def test_a_stopped_benchmark_goes_on_and_gives_the_same_numbers(finished, quick, tmp_path):
    whole, out = finished
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("runs/*-ours-*"):
        path.unlink()
    resumed = benchmark.run_benchmark(["sim"], tmp_path, seeds=1, jobs=1)
    assert quick == [("sim", "ours", 0)]
    pd.testing.assert_frame_equal(whole.drop(columns="seconds"), resumed.drop(columns="seconds"))


def test_runs_with_other_settings_are_not_taken_for_these(repeated):
    out, calls = repeated
    others = {"sim": {"naive": {"hidden": 8}}}
    for settings, expected in ((None, 0), (others, 1), (others, 0)):
        calls.clear()
        benchmark.run_benchmark(["sim"], out, methods=["naive"], seeds=1, jobs=1, settings=settings)
        assert len(calls) == expected


@pytest.mark.parametrize("version", ["METHODS_VERSION", "SCORES_VERSION", "BRAINS_VERSION"])
def test_runs_of_other_versions_are_not_taken_for_these(version, repeated, monkeypatch):
    out, calls = repeated
    for expected in (0, 1):
        benchmark.run_benchmark(["sim"], out, methods=["naive"], seeds=1, jobs=1)
        assert len(calls) == expected
        monkeypatch.setattr(runs, version, getattr(runs, version) + 1)


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


def test_the_command_draws_tau_and_prints_the_table(finished, quick, tmp_path, monkeypatch, capsys):
    shutil.copytree(finished[1] / "runs", tmp_path / "runs")
    monkeypatch.setitem(datasets.LOADERS, "sim", None)  # `quick` makes the pool
    arguments = ["benchmark", "sim", "--methods", "naive", "ours", "--seeds", "1", "--jobs", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert quick == []
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
