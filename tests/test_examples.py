"""Every example runs by itself, without a warning, and draws something."""

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("plot_*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plt, "show", lambda: drawn.extend(plt.get_fignums()))
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        plt.close("all")
    assert drawn


def test_every_example_is_in_the_gallery():
    """The order of the gallery is given by hand; Sphinx would stop at an example that it does not name."""
    order = (Path(__file__).parents[1] / "docs" / "conf.py").read_text()
    assert EXAMPLES
    assert [example.name for example in EXAMPLES if f'"{example.name}"' not in order] == []
