import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from equipool.cli.app import main
from equipool.simulate import simulate_table


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.csv"
    simulate_table().pool.to_frame().to_csv(path, index=False)
    return path


def whole(out, said):
    """Whether a demo ended with the path of a picture and a pool without errors."""
    picture = Path(said.strip().splitlines()[-1].split(maxsplit=1)[1])
    ok = json.loads((out / "preflight.json").read_text())["ok"]
    return ok and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_demo(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    assert whole(tmp_path / "demo", capsys.readouterr().out)


def test_the_demo_overwrites_only_an_earlier_demo(tmp_path, capsys, monkeypatch):
    figures = dict.fromkeys(
        ["site_auc_raw", "site_auc_code", "accuracy", "majority", "clean_raw", "clean_harmonized"], 0.5
    )
    monkeypatch.setattr("equipool.cli.commands.demo._pooled", lambda truth, seed: (figures, truth.clean))
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    assert whole(out, capsys.readouterr().out)
    assert main(["demo", "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["demo", "--out", str(out), "--force"]) == 0
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    (out / "notes.txt").write_text("mine too")
    assert main(["demo", "--out", str(out), "--force"]) == 0
    assert (out / "notes.txt").read_text() == "mine too"
    assert main(["demo", "--out", str(mine), "--force"]) == 2
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_the_figure_is_drawn_in_the_format_asked_for(table, tmp_path, capsys):
    table = str(table)
    figure = tmp_path / "f.svg"
    assert main(["check", table, "--site", "site", "--covariate", "age", "--figure", str(figure)]) == 0
    assert "<svg" in figure.read_text()
    assert main(["check", table, "--site", "site", "--figure", str(tmp_path / "f.docx")]) == 2
    assert "f.docx" in capsys.readouterr().err
    assert main(["check", table, "--site", "site", "--figure", str(tmp_path / "no" / "f.png")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["chek"], ["check", "--covariate", "age", "t.csv"]])
def test_a_wrong_call_exits_with_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_help_and_import_do_not_load_torch():
    code = (
        "import sys, equipool, equipool.cli.app\n"
        "try: equipool.cli.app.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'pandas', 'sklearn') if m in sys.modules], file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.strip() == "[]"
    assert "check" in run.stdout


def test_checking_a_table_does_not_load_torch_nor_need_a_terminal_with_greek_letters(table):
    code = (
        "import sys; from equipool.cli.app import main\n"
        "main(['check', sys.argv[1], '--site', 'site', '--covariate', 'age'])\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code, str(table)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "Can be pooled" in run.stdout


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m equipool datasets | (exec <&-; sleep 2)"
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert run.returncode == 141  # of a broken pipe, as other programs have it
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("out", ["file/x", "file"])
def test_a_folder_that_cannot_be_made_is_one_sentence(out, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / out)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_defect_is_not_a_verdict(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("oh")

    monkeypatch.setattr("equipool.simulate.simulate_table", broken)
    assert main(["demo"]) == 3
    assert "EQUIPOOL_TRACEBACK=1" in capsys.readouterr().err
