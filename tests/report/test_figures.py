import numpy as np
import pandas as pd
import pytest

import equipool as ep
from equipool.report.figures import preflight_figure, save_figure


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
