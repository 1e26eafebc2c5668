"""A disk that is full in the middle of writing: one sentence, nothing half-written, nothing lost."""

from __future__ import annotations

import contextlib
import sys

import pytest

import equipool as ep
from equipool.cli.app import main

pytestmark = pytest.mark.usefixtures("quick_models")


@contextlib.contextmanager
def full_disk():
    """No file may grow beyond a size: the system refuses the write, as a full disk does."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "people.csv"
    ep.simulate_table(people=30, features=4).pool.to_frame().to_csv(path, index=False)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="limits on the size of files are POSIX's")
@pytest.mark.parametrize(
    "call",
    [
        ["harmonize", "TABLE", "--no-report", "--out", "OUT/result"],
        ["check", "TABLE", "--figure", "OUT/who.png"],
        ["report", "TABLE", "--after", "TABLE", "--out", "OUT/page.html"],
        ["demo", "--out", "OUT/demo"],
    ],
    ids=lambda call: call[0],
)
def test_a_full_disk(table, tmp_path, call, monkeypatch, capsys):
    (tmp_path / "kept.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    words = [word.replace("TABLE", str(table)).replace("OUT", str(tmp_path)) for word in call]
    with full_disk():
        code = main(words)
    said = capsys.readouterr().err
    assert code == 2
    assert "could not be written: File too large. Make room" in said.strip().splitlines()[-1]
    assert "Traceback" not in said
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files <= {"kept.txt", ".equipool-demo"}
    assert (tmp_path / "kept.txt").read_text() == "mine"


def test_a_run_that_fails_leaves_an_earlier_result_as_it_was(table, tmp_path, monkeypatch, capsys):
    from equipool.exceptions import EquipoolError

    out = tmp_path / "result"
    call = ["harmonize", str(table), "--no-report", "--out", str(out)]
    assert main(call) == 0
    (out / "harmonized.xlsx").write_text("mine")
    (out / "model" / "notes.txt").write_text("mine too")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def no_room(path, frame):
        raise EquipoolError(f"{path} could not be written: No space left on device.")

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("equipool.cli.derivative.write_table", no_room)
        assert main(call) == 2
    assert str(out / "harmonized.csv") in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert main(call) == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_result_of_other_data_is_not_overwritten(table, tmp_path, capsys):
    table_copy = tmp_path / "own.csv"
    table_copy.write_text(table.read_text())
    call = ["harmonize", str(table_copy), "--no-report", "--out", str(tmp_path / "result")]
    assert main(call) == 0
    table_copy.write_text("\n".join(table_copy.read_text().splitlines()[:-1]))
    assert main(call) == 2
    assert "earlier" in capsys.readouterr().err
