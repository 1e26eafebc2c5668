import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

import equipool as ep
from equipool.report.figures import preflight_figure
from equipool.report.style import COLOURS, LIGHT, page_svg, panel, save_figure, styled


@pytest.mark.parametrize("sites", [["A", "B"], [f"c${k}_{{" for k in range(40)], ["<b>", "長い名前" * 9]])
def test_the_figure_is_drawn_whatever_the_names(sites, tmp_path):
    rng = np.random.default_rng(0)
    rows = 12 * len(sites)
    table = pd.DataFrame(
        {"s": np.repeat(sites, 12), r"a$\frac{$b": rng.uniform(20, 80, rows), "sex": rng.integers(0, 2, rows)}
    ).assign(v=rng.normal(size=rows))
    report = ep.check(table, site="s", covariates=[r"a$\frac{$b", "sex"])
    figure = preflight_figure(report)
    path = save_figure(figure, tmp_path / "f.svg")
    assert path.stat().st_size > 1000
    # Two-valued covariates have no range to draw.
    assert len([axes for axes in figure.axes if axes.axison]) == 3


def test_a_table_without_covariates_shows_sizes_alone(tmp_path):
    table = pd.DataFrame({"s": list("AABB"), "v": [1.0, 2, 3, 4]})
    figure = preflight_figure(ep.check(table, site="s"))
    assert len([axes for axes in figure.axes if axes.axison]) == 1


@styled
def drawing(name):
    figure, axes = panel()
    axes.plot([0, 1], [0, 1], "o", color=COLOURS[0], gid=f"site:3:{name}")
    axes.set_title(name)
    return figure


@pytest.mark.parametrize("name", ["GE", 'a style="fill: red" $x_{', "</svg><script>alert(1)</script>"])
def test_a_drawing_for_a_page_takes_its_colours_from_it(name):
    svg = page_svg(drawing(name), "key")
    root = ElementTree.fromstring(svg)
    assert "style" not in {attribute for element in root.iter() for attribute in element.attrib}
    assert not set(LIGHT.values()) & set(re.findall(r"#[0-9a-f]{6}", svg))
    assert "var(--c0)" in svg
    assert name in [text.text for text in root.iter("text")]  # text stays text
    site = root.find(".//*[@data-k='3']")
    assert site.find("title").text == name
    assert len(site.findall(".//use")) == 2


def test_ids_of_two_drawings_differ_and_are_found():
    pages = [page_svg(drawing("GE"), key) for key in ("one", "two")]
    ids = [set(re.findall(r' id="([^"]+)"', page)) for page in pages]
    assert ids[0]
    assert not ids[0] & ids[1]
    for own, page in zip(ids, pages, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([\w-]+)', page)) == own
