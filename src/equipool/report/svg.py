"""A small writer of SVG panels: marks take their colours from the page, so one drawing serves light and dark.

A panel is 360 units wide, as a phone is; a page puts two side by side where there is room. Every mark that
has a value leaves a hit, its place and its row in the figure's table, from which the page makes what is
shown on hover, by keyboard and by touch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["WIDTH", "Panel", "nice_ticks", "number", "shortened"]

WIDTH = 360
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float, digits: int = 3) -> str:
    """Return a number for people to read.

    Examples
    --------
    >>> number(0.12345), number(1234.5), number(-0.5), number(2e-16)
    ('0.123', '1230', '−0.5', '2 × 10⁻¹⁶')
    """
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text.replace("-", "−")
    if 1 <= abs(value) < 1e6:
        return f"{float(text):.0f}".replace("-", "−")
    digit, power = text.split("e")
    return f"{digit} × 10{str(int(power)).translate(RAISED)}".replace("-", "−")


def shortened(text: str, most: int) -> str:
    """Return the text, with an ellipsis if it is longer than so many signs."""
    return text if len(text) <= most else text[: most - 1] + "…"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers between low and high.

    Examples
    --------
    >>> nice_ticks(0, 1), nice_ticks(8.2, 84.9)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [20.0, 40.0, 60.0, 80.0])
    """
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


@dataclass
class Panel:
    """One drawing: plot area, scales, and what was drawn so far.

    Parameters
    ----------
    x, y
        Ranges of the data, low and high; y goes up unless ``down``.
    height
        Of the whole panel.
    left, right, top, bottom
        Margins around the plot.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    height: float = 250
    left: float = 44
    right: float = 8
    top: float = 10
    bottom: float = 36
    down: bool = False
    parts: list[str] = field(default_factory=list)
    hits: list[str] = field(default_factory=list)

    def px(self, value: float) -> float:
        """Return where a value of x lies."""
        low, high = self.x
        return round(self.left + (value - low) / ((high - low) or 1) * (WIDTH - self.left - self.right), 1)

    def py(self, value: float) -> float:
        """Return where a value of y lies."""
        low, high = self.y
        share = (value - low) / ((high - low) or 1)
        share = share if self.down else 1 - share
        return round(self.top + share * (self.height - self.top - self.bottom), 1)

    def add(self, part: str) -> None:
        """Add a piece of SVG as it is."""
        self.parts.append(part)

    def hit(self, x: float, y: float, row: int) -> None:
        """Let a place (in the panel's units) show a row of the table."""
        self.hits.append(f"{x:.4g},{y:.4g},{row}")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> None:
        """Draw a line between two places."""
        self.add(f'<line class="{kind}" x1="{x1:.5g}" y1="{y1:.5g}" x2="{x2:.5g}" y2="{y2:.5g}"/>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str = "", more: str = "") -> None:
        """Draw a rectangle by its upper left corner."""
        style = f' class="{kind}"' if kind else ""
        size = f'x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"'
        self.add(f"<rect{style} {size}{more}/>")

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", kind: str = "", turn: float | None = None
    ) -> None:
        """Write a text, escaped."""
        turned = "" if turn is None else f' transform="rotate({turn:g} {x:.5g} {y:.5g})"'
        style = f' class="{kind}"' if kind else ""
        self.add(f'<text x="{x:.5g}" y="{y:.5g}" text-anchor="{anchor}"{style}{turned}>{escape(text)}</text>')

    def path(self, points: Iterable[tuple[float, float]], kind: str, *, closed: bool = False) -> None:
        """Draw a line through places."""
        d = "M" + "L".join(f"{x:.5g} {y:.5g}" for x, y in points) + ("Z" if closed else "")
        self.add(f'<path class="{kind}" d="{d}"/>')

    def mark(self, x: float, y: float, shape: int = 0, *, big: bool = False) -> None:
        """Put one of the page's marks at a place."""
        self.add(f'<use href="#{"b" if big else "m"}{shape}" x="{x:.5g}" y="{y:.5g}"/>')

    def group(self, kind: str, key: int | None = None) -> None:
        """Open a group; close it with :meth:`end`."""
        site = "" if key is None else f' data-k="{key}"'
        self.add(f'<g class="{kind}"{site}>')

    def end(self) -> None:
        """Close a group."""
        self.add("</g>")

    def x_axis(self, label: str, ticks: Sequence[float] | None = None, *, grid: bool = False) -> None:
        """Draw the axis below the plot."""
        bottom = self.height - self.bottom
        for tick in nice_ticks(*self.x) if ticks is None else ticks:
            at = self.px(tick)
            self.line(at, self.top if grid else bottom, at, bottom + 4, "grid" if grid else "tick")
            self.text(at, bottom + 15, number(tick), "middle", "small")
        self.line(self.left, bottom, WIDTH - self.right, bottom, "tick")
        self.text((self.left + WIDTH - self.right) / 2, self.height - 5, shortened(label, 40), "middle")

    def y_axis(self, label: str = "", ticks: Sequence[float] | None = None) -> None:
        """Draw the axis left of the plot."""
        for tick in nice_ticks(*self.y) if ticks is None else ticks:
            at = self.py(tick)
            self.line(self.left, at, WIDTH - self.right, at, "grid")
            self.text(self.left - 5, at + 3.5, number(tick), "end", "small")
        if label:
            middle = (self.top + self.height - self.bottom) / 2
            self.text(11, middle, shortened(label, 34), "middle", turn=-90)

    def svg(self, alt: str, *, by: str = "xy") -> str:
        """Return the panel; ``by`` says whether hits are looked for by place or by height alone."""
        hits = f' data-hits="{";".join(self.hits)}" data-by="{by}" tabindex="0"' if self.hits else ""
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height:g}" role="img" aria-label="{escape(alt)}"{hits}>'
            + "".join(self.parts)
            + "</svg>"
        )
