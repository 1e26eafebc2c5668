"""The documentation keeps its word: examples run, named tests and codes exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Tutorials are followed by test_tutorials.py, since their blocks build on each other.
ALONE = [page for page in PAGES if not page.name.startswith("tutorial-")]


@pytest.mark.parametrize("page", ALONE, ids=lambda page: page.name)
def test_examples_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        promised = re.findall(r"print\(.*\)\s+# (.*)", block)
        exec(compile(block, page.name, "exec"), {})
        printed = capsys.readouterr().out.splitlines()
        for line, promise in zip(printed, promised, strict=True):
            assert promise.startswith(line)


def test_notation_names_folders_of_tests_that_exist():
    folders = re.findall(r"`(tests/[\w/]+)`", (ROOT / "docs" / "notation.md").read_text())
    assert folders
    assert [folder for folder in folders if not list((ROOT / folder).glob("test_*.py"))] == []


@pytest.mark.parametrize("name", ["architecture", "notation"])
def test_files_of_the_architecture_and_the_notation_exist(name):
    page = (ROOT / "docs" / f"{name}.md").read_text()
    files = re.findall(r"`([a-z_]+/[a-z_0-9/]+\.py)`", page)
    assert len(files) > 10
    assert [file for file in files if not (ROOT / "src/equipool" / file).is_file()] == []


def test_every_code_of_the_report_is_documented():
    source = "".join(path.read_text() for path in (ROOT / "src/equipool/checks").glob("*.py"))
    codes = set(re.findall(r'\b(?:error|warning)\(\s*"([a-z-]+)"', source))
    codes |= set(re.findall(r'Finding\("note", "([a-z-]+)"', source))
    codes |= set(re.findall(r'^\s+\(?"((?:near-)?constant-columns|site-in-disguise)",', source, re.M))
    page = (ROOT / "docs" / "preflight.md").read_text()
    assert len(codes) > 20
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link
