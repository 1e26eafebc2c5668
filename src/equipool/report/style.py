"""The one style of all figures: colours, fonts, axes, and how a figure is saved or put into a page.

Figures are drawn by matplotlib in the colours of ``LIGHT``, from colours.toml. In a page they are SVG whose
colours are CSS variables, so that one drawing serves light and dark.
"""

import io
import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equipool.exceptions import InputError
from equipool.files import packaged, write_whole

_PAIRS = packaged("report", "colours.toml")
LIGHT, DARK = ({name: pair[k] for name, pair in _PAIRS.items()} for k in range(2))
COLOURS = tuple(LIGHT[f"c{k}"] for k in range(7))
SHADES = tuple(LIGHT[f"q{k}"] for k in range(8))  # of a number, from low to high
MARKERS = "os^DP"
FORMATS = (".png", ".svg", ".pdf")
VARIABLES = {colour: f"var(--{name})" for name, colour in LIGHT.items()}

RC: Any = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["soft"]),
    **dict.fromkeys(("axes.labelcolor", "text.color"), LIGHT["ink"]),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False),
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.axisbelow": True,
    "grid.color": LIGHT["line"],
    "lines.markeredgewidth": 0,
    "image.composite_image": False,  # in SVG each keeps its resolution
    "savefig.dpi": 150,
    "svg.fonttype": "none",
    "svg.hashsalt": "equipool",
    "text.parse_math": False,  # a user's dollar sign starts no formula
}
styled = mpl.rc_context(RC)  # decorates every function that draws


def shortened(name: str, longest: int = 40) -> str:
    """Return a name with an ellipsis if it is longer than so many signs."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


def spread(shades: tuple[str, ...], count: int) -> list[str]:
    """Return so many shades, from the first to the last."""
    return [shades[round(k * (len(shades) - 1) / max(count - 1, 1))] for k in range(count)]


def check_figure_path(path: Path) -> None:
    """Refuse a path that no figure can be written to, before anything is computed."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path.name} is no picture that equipool writes; end it in {', '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: the folder {path.parent} does not exist; make it first.")


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure; the format follows the file's ending."""
    check_figure_path(path)
    return write_whole(path, _content(figure, path.suffix.lower().removeprefix(".")))


@styled
def _content(figure: Figure, kind: str, *, transparent: bool = False) -> bytes:
    content = io.BytesIO()
    with warnings.catch_warnings():
        # Names in a script that the font lacks are drawn as boxes; that is no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        none = {"png": ["Software"], "svg": ["Date", "Creator", "Format", "Type"]}.get(kind, [])
        figure.savefig(content, format=kind, metadata=dict.fromkeys(none), transparent=transparent)
    return content.getvalue()


# -- pages -------------------------------------------------------------------------------------------------


@styled
def panel(height: float = 250) -> tuple[Figure, Axes]:
    """Return a figure of one drawing for a page: 360 points wide, as a phone, where text keeps its size."""
    figure = Figure(figsize=(5, height / 72), layout="constrained")
    return figure, figure.subplots()


def page_svg(figure: Figure, key: str) -> str:
    """Return the figure as SVG for inside a page, whose ids begin with ``key``.

    Colours become CSS variables, and styles attributes: a page's security policy forbids inline styles. Text
    stays text. What was drawn with ``gid="site:3:NAME"`` has ``data-k="3"`` and the name as a tooltip.
    """
    content = _content(figure, "svg", transparent=True).decode()
    used = set(re.findall(r'(?:href="#|url\(#)([\w-]+)', content))
    root = ElementTree.fromstring(content)
    for element in list(root.iter()):
        site = re.fullmatch(r"site:(\d+):(.*)", element.get("id", ""), re.DOTALL)
        attributes = _attributes(element, key, used)
        element.attrib.clear()
        element.attrib.update(attributes)
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = (element.text or "").strip(), None
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)
        if site:
            element.set("data-k", site[1])
            title = ElementTree.Element("title")
            title.text = site[2]
            element.insert(0, title)
    root.attrib = {"viewBox": root.get("viewBox", ""), "class": "plot", "aria-hidden": "true"}
    return ElementTree.tostring(root, encoding="unicode")


def _attributes(element: ElementTree.Element, key: str, used: set[str]) -> dict[str, str]:
    """Return an element's attributes without namespaces, and with its style as attributes."""
    attributes: dict[str, str] = {}
    for name, value in ((full.rpartition("}")[2], value) for full, value in element.items()):
        if name == "style":
            for style, setting in re.findall(r"([\w-]+):\s*([^;]+)", value):
                if style in ("font", "font-size"):
                    attributes["font-size"] = re.findall(r"[\d.]+px", setting)[0]
                elif style != "font-family":  # that is the page's
                    attributes[style] = VARIABLES.get(setting, setting)
        elif name == "id" and value in used:
            attributes[name] = f"{key}-{value}"
        elif name in ("href", "clip-path"):
            attributes[name] = re.sub(r"^(url\()?#", rf"\g<1>#{key}-", value)
        elif name != "id" and not value.startswith("rotate(-0 "):
            short = re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]), 2):.6g}", value)
            attributes[name] = short.replace(" \n", "")
    return attributes
