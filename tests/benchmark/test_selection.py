import json

import numpy as np
import pandas as pd
import pytest

from equipool.benchmark import datasets, methods, runs
from equipool.cli.app import main
from equipool.exceptions import InputError
from equipool.simulate import simulate_table

pytest.importorskip("optuna")


@pytest.fixture
def quick(monkeypatch):
    """Count the fits and give each setting a made-up accuracy and AUC that depend on it alone."""
    calls = []

    def judged(dataset, method, changes, seed, split):
        calls.append((seed, split))
        decay = changes["weight_decay"]
        return [80 - decay, 0.9 - 0.05 * decay - 0.1 * (changes["encoder"] == "linear")]

    monkeypatch.setattr(methods, "_judge", judged)
    return calls


def test_the_most_invariant_of_the_accurate_settings_is_taken(quick, tmp_path):
    chosen = methods.select("german", tmp_path, methods=["naive"], trials=15, tolerance=0.02, jobs=1)
    assert chosen["naive"]["weight_decay"] == 1.0
    assert chosen["naive"]["encoder"] == "linear"
    trials = pd.read_csv(tmp_path / "trials.csv")
    assert len(trials) == 15
    assert trials["chosen"].sum() == 1
    written = methods.read_settings(tmp_path / "settings.json")
    assert written == {"german": chosen}
    assert methods.settings_of("german", "naive", written)["steps"] == 400


def test_a_stopped_search_goes_on_and_ends_with_the_same_trials(quick, tmp_path):
    for folder, counts in (("whole", [14]), ("stopped", [5, 14])):
        for trials in counts:
            quick.clear()
            methods.select("german", tmp_path / folder, methods=["mmd"], trials=trials, jobs=1)
    assert 0 < len(quick) <= (14 - 5) * 6
    assert len(quick) % 6 == 0
    whole, stopped = ((tmp_path / folder / "trials.csv").read_bytes() for folder in ("whole", "stopped"))
    assert whole == stopped


def test_searches_add_up_and_other_methods_keep_their_settings(quick, tmp_path):
    for method in ("naive", "mmd"):
        methods.select("german", tmp_path, methods=[method], trials=2, jobs=1)
    written = methods.read_settings(tmp_path / "settings.json")
    assert set(written["german"]) == {"naive", "mmd"}
    assert methods.settings_of("german", "ours", written) == methods.settings_of("german", "ours")


def test_a_search_of_another_version_does_not_count(quick, tmp_path, monkeypatch):
    methods.select("german", tmp_path, methods=["naive"], trials=2, jobs=1)
    monkeypatch.setattr(runs, "METHODS_VERSION", runs.METHODS_VERSION + 1)
    quick.clear()
    methods.select("german", tmp_path, methods=["naive"], trials=2, jobs=1)
    assert len(quick) == 2 * 6


def test_settings_are_judged_on_training_people_alone(monkeypatch):
    truth = simulate_table(people=60, random_state=0).pool
    test = truth[np.arange(0)]  # nobody: a look at the test people would fail
    monkeypatch.setattr(datasets, "load_dataset", lambda name, seed: datasets.DatasetSplit(truth, test))
    acc, auc = methods._judge("sim", "naive", {"steps": 30}, 0, 0)
    assert 0 <= acc <= 100
    assert 0 <= auc <= 1


def test_the_auc_nearest_to_chance_is_taken_within_the_tolerance():
    trials = pd.DataFrame({"acc": [80.0, 77.0, 70.0], "auc": [0.8, 0.6, 0.5]})
    assert (methods.choose(trials, 0.05), methods.choose(trials, 0.0)) == (1, 0)


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_searched_parameter_is_one_of_the_method(method):
    space = methods.search_space(method)
    estimator = methods.make_method(method, 0, {name: values[0] for name, values in space.items()})
    assert set(space) <= set(estimator.get_params())
    json.dumps(space)


def test_wrong_calls_are_answered(tmp_path, capsys):
    with pytest.raises(InputError, match="no method 'combat' to select"):
        methods.select("german", tmp_path, methods=["combat"])
    with pytest.raises(InputError, match=r"from 0 to 1. Got 5"):
        methods.select("german", tmp_path, tolerance=5)
    with pytest.raises(InputError, match="at least 1"):
        methods.select("german", tmp_path, trials=0)
    assert main(["select", "iris", "--out", str(tmp_path / "x")]) == 2
    assert "no dataset 'iris'" in capsys.readouterr().err
