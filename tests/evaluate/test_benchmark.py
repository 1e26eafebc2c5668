import numpy as np
import pandas as pd
import pytest

from equipool.cli import main
from equipool.data import simulate_table, uci
from equipool.evaluate import benchmark
from equipool.exceptions import InputError


@pytest.fixture
def quick(monkeypatch):
    """Small data and few steps; counts the runs."""
    calls = []
    make, run = benchmark._make, benchmark.run_one

    def small(name, seed=0):
        train, test = (
            simulate_table(overlap=0.5, people=40, random_state=k).pool for k in (seed, seed + 100)
        )
        return uci.DatasetSplit(name, train, test)

    def counted(*key):
        calls.append(key)
        return run(*key)

    monkeypatch.setattr(benchmark, "_make", lambda *key: make(*key).set_params(steps=5))
    monkeypatch.setattr(benchmark, "run_one", counted)
    monkeypatch.setattr(uci, "load_dataset", small)
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
    make = benchmark._make
    monkeypatch.setattr(benchmark, "_make", lambda *key: make(*key).set_params(steps=6))
    quick.clear()
    benchmark.run_benchmark(["sim"], tmp_path, methods=["naive"], seeds=1, jobs=1)
    assert len(quick) == 1


def test_unknown_methods_are_answered(tmp_path, capsys):
    with pytest.raises(InputError, match="no method 'combat'; there are naive"):
        benchmark.run_benchmark(["german"], tmp_path, methods=["combat"])
    assert main(["benchmark", "iris", "--out", str(tmp_path / "x"), "--jobs", "1", "--methods", "naive"]) == 2
    assert "no dataset 'iris'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_chance_is_the_best_that_a_reader_can_do():
    means = pd.DataFrame({"adv_auc": [0.42, 0.52], "mmd": [-1.2, -0.1], "acc": [70.0, 75.0]})
    assert benchmark.best_rows(means, "adv_auc").tolist() == [False, True]
    assert benchmark.best_rows(means, "mmd").tolist() == [True, True]
    assert benchmark.best_rows(means, "acc").tolist() == [False, True]
