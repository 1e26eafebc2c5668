"""The tutorials, followed from top to bottom as a reader would: commands, Python, and what they print."""

import re
import shlex
from pathlib import Path

import pytest

from equipool.cli.app import main

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page):
    """Return the fenced blocks of a page in order, with their language."""
    return re.findall(r"^```(console|python|text)\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)


def commands(block):
    """Return each command of a console block with the lines that it is said to print."""
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, *shown = part.splitlines()
        yield shlex.split(command)[1:], shown


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def alike(shown, printed):
    """Say whether two lines are the same but for digits that another machine may round otherwise."""
    if [part.split() for part in NUMBER.split(shown)] != [part.split() for part in NUMBER.split(printed)]:
        return False
    pairs = zip(*(map(float, NUMBER.findall(line)) for line in (shown, printed)), strict=True)
    return all(abs(a - b) <= 0.15 + 0.05 * abs(b) for a, b in pairs)


def assert_printed(shown, printed):
    """Find the lines shown in what was printed, in order; a line of … stands for any number of others."""
    left = iter(printed.splitlines())
    for line in (line for line in shown if line.strip() and line.strip() != "…"):
        assert any(alike(line, other) for other in left), f"{line!r} is not among\n{printed}"


@pytest.mark.parametrize("page", ["tutorial-tables.md", "tutorial-images.md"])
def test_tutorial(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("equipool.report.figure_tables.embedding", lambda x, seed: x[:, :2])  # t-SNE is slow
    printed = ""
    for language, block in blocks(page):
        if language == "text":  # what the block before it printed
            assert_printed(block.splitlines(), printed)
        elif language == "python":
            exec(compile(block, page, "exec"), {})
            printed = capsys.readouterr().out
            promised = re.findall(r"print\(.*\)\s+# (.*)", block)
            assert_printed(promised, printed)
        else:
            for arguments, shown in commands(block):
                assert main(arguments) == 0, arguments
                printed = capsys.readouterr().out
                assert_printed(shown, printed)
    assert printed
