"""The paper's causal diagram with the user's own variables."""

from __future__ import annotations

from collections.abc import Sequence

from equipool.report.svg import Panel, shortened

__all__ = ["causal_diagram"]

COLUMNS = (62.0, 180.0, 298.0)
ROWS = (38.0, 142.0, 246.0)
BOX = (110.0, 52.0)


def causal_diagram(site: str, covariates: Sequence[str], target: str | None, kind: str) -> str:
    """Return the diagram: the site acts on who came, on the measurement and on how common the target is."""
    panel = Panel((0, 1), (0, 1), height=284)
    measured = "images" if kind == "images" else "features"
    names = ", ".join(covariates) or "no covariate"
    goal = target or ""
    left, middle, right = COLUMNS
    top, centre, bottom = ROWS
    arrows = [
        ((left, top), (left, centre), ""),
        ((middle, top), (middle, centre), " cut"),
        ((left, centre), (middle, bottom), ""),
        ((middle, bottom), (middle, centre), ""),
    ]
    nodes = [
        (left, top, site, "who came", ""),
        (middle, top, site, "how it measured", " gone"),
        (left, centre, names, "C, covariates", " kept"),
        (middle, centre, measured, "X, measured", ""),
        (middle, bottom, "the person", "not seen itself", " kept"),
    ]
    alt = (
        f"Causal diagram: {site} acts on {names} (who came) and on the {measured} (how it measured); {names} "
        f"acts on the person, and the person on the {measured}."
    )
    if goal:
        arrows += [((right, top), (right, centre), ""), ((middle, bottom), (right, centre), "")]
        nodes += [(right, top, site, "how common it is", ""), (right, centre, goal, "Y, target", " kept")]
        alt += f" {site} (how common it is) and the person act on {goal}."
    for start, end, style in arrows:
        _arrow(panel, start, end, f"arrow{style}")
    for x, y, first, second, style in nodes:
        _node(panel, x, y, first, second, style)
    return panel.svg(alt)


def _node(panel: Panel, x: float, y: float, first: str, second: str, style: str) -> None:
    width, height = BOX
    panel.rect(x - width / 2, y - height / 2, width, height, f"node{style}", ' rx="8"')
    panel.text(x, y - 3, shortened(first, 17), "middle")
    panel.text(x, y + 13, second, "middle", "small it")


def _arrow(panel: Panel, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
    """Draw an arrow between two boxes, from edge to edge."""
    half = BOX[1] / 2 + 2
    down = 1 if end[1] > start[1] else -1
    across = 0.28 * (end[0] - start[0])
    panel.line(start[0] + across, start[1] + down * half, end[0] - across, end[1] - down * half, kind)
