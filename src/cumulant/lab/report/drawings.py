"""Figures of the house as parts of a page: its colors, its own names, nothing it does not need."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from cumulant.core.errors import InputError
from cumulant.figures.style import COLORS, INK, MUTED, PAPER

__all__ = ["drawing"]

_GRID, _UNSET = "#e4e7ee", "#000000"
_COLORS = {
    **{INK: "--ink", MUTED: "--muted", PAPER: "--surface", _GRID: "--line", _UNSET: "--ink"},
    **{color: f"--c{i}" for i, color in enumerate(COLORS)},
}
# What a figure is made of. Its style element would hold for the whole page; the rest says who
# wrote it.
_ELEMENTS = {"svg", "g", "defs", "path", "use", "clipPath", "rect", "circle", "image"}
_ATTRIBUTES = {
    *("id", "d", "x", "y", "r", "cx", "cy", "width", "height", "viewBox", "transform"),
    *("style", "clip-path", "href", "preserveAspectRatio"),
}


def drawing(text: str, name: str, caption: str) -> str:
    """A figure that matplotlib wrote as SVG, to stand in a page.

    House colors become the page's, so that dark pages can show it; ids get the name before them,
    for several figures of a page would share theirs.

    Args:
        text: the SVG.
        name: differs from figure to figure.
        caption: read out in place of the picture.

    Raises:
        InputError: the text is no SVG.
    """
    try:
        root = ElementTree.fromstring(text)
        size = [float(x) for x in root.attrib["viewBox"].split()]
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise InputError(f"the figure {name} is not an SVG that can be shown: {error}.") from None
    own = re.sub(r"\W", "-", name)
    _prune(root)
    used = set(re.findall(r"#([\w.-]+)", " ".join(_links(root))))
    for element in root.iter():
        a = element.attrib
        if "id" in a and a["id"] not in used:
            del a["id"]
        for key in ("id", "href", "clip-path"):
            if key in a and not a[key].startswith("data:"):
                a[key] = re.sub(r"^(url\(#|#)?", rf"\1{own}-", a[key])
        if "d" in a:  # a hundredth of a point is less than any screen shows
            a["d"] = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", a["d"])
            a["d"] = " ".join(a["d"].split())
        if "style" in a:
            a["style"] = re.sub(r"#[0-9a-fA-F]{6}", lambda m: _color(m[0].lower()), a["style"])
    root.attrib = {
        **{"role": "img", "aria-label": caption, "viewBox": root.attrib["viewBox"]},
        "style": f"--width: {size[2]:g}",
    }
    return ElementTree.tostring(root, encoding="unicode")


def _prune(element: ElementTree.Element) -> None:
    """Names without their namespaces; foreign elements and attributes go."""
    element.tag = _bare(element.tag)
    element.text = element.tail = None
    element.attrib = {_bare(k): v for k, v in element.attrib.items() if _bare(k) in _ATTRIBUTES}
    kept = element.attrib.get("href", "#")
    if not kept.startswith(("#", "data:image/png;")):
        del element.attrib["href"]
    for child in list(element):
        if _bare(child.tag) in _ELEMENTS:
            _prune(child)
        else:
            element.remove(child)


def _bare(name: str) -> str:
    return name.rpartition("}")[2]


def _links(root: ElementTree.Element) -> list[str]:
    found = [e.attrib.get(key, "") for e in root.iter() for key in ("href", "clip-path")]
    return [x for x in found if not x.startswith("data:")]


def _color(color: str) -> str:
    """A house color by its name; one in between, such as a ramp's, lighter on dark pages."""
    if color in _COLORS:
        return f"var({_COLORS[color]})"
    return f"light-dark({color}, color-mix(in oklab, {color}, white 35%))"
