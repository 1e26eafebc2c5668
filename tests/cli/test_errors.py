"""Every error of the command line: one or two sentences, what it is about, what to do, nothing half-written.

``docs/errors.md`` is written from the same table: EQUIPOOL_WRITE_DOCS=1 pytest tests/cli/test_errors.py
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import warnings
from pathlib import Path

import pytest
from error_cases import CASES, make_world, short

from equipool.cli.app import main

pytestmark = pytest.mark.usefixtures("quick_models")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"

VERBS = (
    "add choose complete copy correct delete drop fill fit give install keep leave load make mend must name "
    "put rename repair resample run save say use write"
)
REMEDY = rf"(?i)--\w|did you mean|there are \w|end it in|it needs|fetch with|\b({'|'.join(VERBS.split())})\b"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The folder that every call starts from, with a model of tables and one of images."""
    folder = tmp_path_factory.mktemp("world")
    with contextlib.chdir(folder), cache(folder):
        make_world()
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert main("harmonize people.csv --out fitted --no-report".split()) == 0
            assert main("harmonize bids --out brains --steps 2 --no-report".split()) == 0
    shutil.rmtree(folder / "cache")
    return folder


@pytest.fixture(scope="module")
def outcomes(world, tmp_path_factory):
    """What each call ends in: exit code, stderr, and the folder before and after."""
    results = {}
    for case in CASES:
        folder = world  # a call alone leaves it as it is, which is asserted
        if case.change:
            folder = tmp_path_factory.mktemp("call") / "here"
            shutil.copytree(world, folder)
        with contextlib.chdir(folder), cache(folder):
            if case.change:
                case.change()
            before = listing(folder)
            code, said = call(shlex.split(case.call))
            results[case.what] = code, said, before, listing(folder)
    return results


@contextlib.contextmanager
def cache(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQUIPOOL_CACHE", str(folder / "cache"))
        yield


def call(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
    return code, err.getvalue()


def listing(folder):
    files = (path for path in folder.rglob("*") if "cache" not in path.relative_to(folder).parts)
    return {str(path): path.read_bytes() if path.is_file() else None for path in files}


def message_of(said):
    """Return the last thing said, which is the error; before it come guesses and warnings."""
    return "equipool: " + re.split(r"(?m)^equipool: ", said)[-1].strip()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_an_error_is_short_tells_what_and_what_to_do(case, outcomes):
    code, said, before, after = outcomes[case.what]
    assert code == case.code, said
    assert "Traceback" not in said
    assert after == before
    if code == 1:
        return  # a verdict, on stdout
    message = message_of(said)
    assert case.words in message
    assert re.search(REMEDY, message), message
    assert len(message) < 420, message
    lines = message.splitlines()
    assert len(lines) == 1 or all(line.startswith("  ") for line in lines[1:]), message
    assert message[-1] in ".?)" or message.endswith("--help") or len(lines) > 1, message


def test_the_page_lists_them(outcomes):
    page = [
        "# Errors of the command line",
        "",
        "What each wrong call or spoilt input ends in, written from the table in",
        "`tests/cli/error_cases.py`; in all of them nothing is left behind. `fitted` and `brains` are",
        "results of `equipool harmonize`.",
        "",
    ]
    for case in CASES:
        code, said, *_ = outcomes[case.what]
        lines = (
            short(message_of(said)).splitlines()
            if code != 1
            else ["(the report, with its verdict, on stdout)"]
        )
        page += [f"**{case.what}** (exit code {code})", "", "```text", f"$ equipool {case.call}".rstrip()]
        page += [*lines, "```", ""]
    text = "\n".join(page)
    if os.environ.get("EQUIPOOL_WRITE_DOCS"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "out of date: EQUIPOOL_WRITE_DOCS=1 pytest tests/cli/test_errors.py"
