import json

import numpy as np
import pandas as pd
import pytest

from equipool.benchmark import runs
from equipool.benchmark.runs import file_stem, fingerprint, run_all


@pytest.fixture
def square():
    """A task, and the list of its calls."""
    calls = []

    def task(k):
        calls.append(k)
        if k < 0:
            raise KeyboardInterrupt
        return {"square": k * k, "nan": float("nan")}

    return task, calls


def test_results_are_kept_in_order_and_not_computed_twice(square, tmp_path, capsys):
    task, calls = square
    wanted = {tmp_path / f"{k}.json": (k,) for k in (3, 1, 2)}
    first = run_all(task, wanted, what="squares", jobs=1, describe=lambda one: f"got {one['square']}")
    assert [one["square"] for one in first] == [9, 1, 4]
    assert "[3/3] got 4; about 0 s left" in capsys.readouterr().err
    wanted[tmp_path / "5.json"] = (5,)
    again = run_all(task, wanted, what="squares", jobs=1)
    assert [one["square"] for one in again] == [9, 1, 4, 25]
    assert calls == [3, 1, 2, 5]
    assert "3 of 4 squares are there already" in capsys.readouterr().err
    assert np.isnan(again[0]["nan"])
    run_all(task, wanted, what="squares", jobs=1, fresh=True)
    assert len(calls) == 8


def test_what_was_done_before_a_run_was_killed_is_kept(square, tmp_path):
    task, calls = square
    wanted = {tmp_path / f"{k}.json": (k,) for k in (1, 2, -1)}
    with pytest.raises(KeyboardInterrupt):
        run_all(task, wanted, what="squares", jobs=1)
    run_all(task, {path: (abs(k),) for path, (k,) in wanted.items()}, what="squares", jobs=1)
    assert calls == [1, 2, -1, 1]


def test_a_damaged_file_is_made_anew(square, tmp_path):
    task, _ = square
    path = tmp_path / "2.json"
    path.write_text('{"square": ')
    assert run_all(task, {path: (2,)}, what="squares", jobs=1)[0]["square"] == 4
    assert json.loads(path.read_text())["square"] == 4


def test_bytes_are_kept_beside(tmp_path):
    [record] = run_all(lambda: ({"a": 1}, b"vectors"), {tmp_path / "x.json": ()}, what="runs", jobs=1)
    assert record == {"a": 1}
    assert (tmp_path / "x.npz").read_bytes() == b"vectors"


def test_a_fingerprint_depends_on_each_part_and_version(monkeypatch):
    x = np.arange(6.0)
    parts = ("german", x, np.array(["AD", None], dtype=object), None)
    name = fingerprint(*parts)
    assert name == fingerprint("german", x.copy(), np.array(["AD", None], dtype=object), None)
    others = [
        fingerprint("adult", *parts[1:]),
        fingerprint("german", x + 1e-12, *parts[2:]),
        fingerprint("german", x.reshape(2, 3), *parts[2:]),
        fingerprint("german", x, np.array(["AD", "CN"], dtype=object), None),
    ]
    for version in ("METHODS_VERSION", "SCORES_VERSION", "BRAINS_VERSION", "__version__"):
        with monkeypatch.context() as patch:
            patch.setattr(runs, version, "another")
            others.append(fingerprint(*parts))
    assert len({name, *others}) == 9


def test_folders_of_one_name_are_told_apart_in_file_names(tmp_path):
    names = {file_stem(f"adni:{tmp_path / place / 'bids'}") for place in "ab"}
    assert len(names) == 2
    assert all(name.startswith("adni-bids-") for name in names)
    assert file_stem("german") == "german"


def test_a_table_has_one_row_a_method_with_the_best_in_bold():
    cells = runs.mean_and_sd(pd.Series([0.5]), pd.Series([0.123]), 2, bold=pd.Series([True]))
    assert cells == ["**0.50** (0.12)"]
    table = runs.markdown_table(pd.DataFrame({"ACC %": cells}, index=["ours"]))
    assert table == "| method | ACC % |\n|---|---|\n| ours | **0.50** (0.12) |"
