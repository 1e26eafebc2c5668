"""The documentation builds without a warning, and its pages ask nothing of the network."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = ("sphinx", "myst_parser", "furo", "sphinx_gallery")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages, built in a copy; examples are shown and not run, since test_examples.py runs them."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        pytest.skip(f"the docs need {', '.join(missing)}: pip install 'equipool[docs]'")
    work = tmp_path_factory.mktemp("docs")
    for folder in ("docs", "examples"):
        ignored = shutil.ignore_patterns("_build", "auto_examples", "__pycache__")
        shutil.copytree(ROOT / folder, work / folder, ignore=ignored)
    shutil.copy(ROOT / "CHANGELOG.md", work)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-D",
        "plot_gallery=0",
    ]
    run = subprocess.run(
        [*command, work / "docs", work / "html"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return work / "html"


def test_every_page_is_built(pages):
    for page in (ROOT / "docs").glob("*.md"):
        assert (pages / f"{page.stem}.html").is_file(), page.name
    assert list(pages.glob("auto_examples/plot_*.html"))


def test_pages_load_nothing_from_elsewhere(pages):
    loaded = re.compile(r'<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)="((?:https?:)?//[^"]*)"')
    for page in pages.rglob("*.html"):
        assert loaded.findall(page.read_text()) == [], page.name


def test_the_public_names_are_in_the_reference(pages):
    import equipool as ep

    reference = (pages / "reference.html").read_text()
    listed = set(re.findall(r'id="equipool\.(?:\w+\.)*(\w+)"', reference))
    assert set(ep.__all__) - listed == {"__version__"}
