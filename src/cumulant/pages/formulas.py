"""TeX to MathML at build time; browsers typeset it without fetching anything."""

from __future__ import annotations

from functools import cache
from html import escape, unescape
from importlib import import_module
from xml.etree import ElementTree

from cumulant.core.errors import InputError

__all__ = ["mathml"]

_SIGNS, _CLOSING = ("+", "-", "−"), (")", "]", "}", "⟩", "|", "‖", "!")


@cache
def mathml(tex: str, *, block: bool = True) -> str:
    """A formula as a math element; invalid TeX is shown as written.

    Args:
        tex: TeX source without dollar signs.
        block: display the formula as a block, not inline.

    Raises:
        InputError: latex2mathml is not installed.

    >>> mathml("x", block=False)
    '<math display="inline"><mrow><mi>x</mi></mrow></math>'
    """
    try:
        converter = import_module("latex2mathml.converter")
    except ModuleNotFoundError:
        raise InputError("formulas need latex2mathml: pip install '.[report]'.") from None
    try:
        found = converter.Converter(display="block" if block else "inline").convert_to_element(tex)
    except Exception:  # its errors have no common class but this
        return f"<code>{escape(tex)}</code>"
    found.attrib.pop("xmlns", None)  # HTML knows the element without
    # Its own serialization takes escapes away, and so would let TeX write markup.
    for element in found.iter():
        element.text = unescape(element.text) if element.text else element.text
    for element in list(found.iter()):
        _name(element)
    for row in list(found.iter("mrow")):
        _space(row)
    return ElementTree.tostring(found, encoding="unicode")


def _name(element: ElementTree.Element) -> None:
    """Mark names such as softmax as identifiers: an operator would get space on both sides."""
    if element.tag == "mo" and (element.text or "").isalpha():
        element.tag, element.attrib = "mi", {"mathvariant": "normal"}


def _space(row: ElementTree.Element) -> None:
    """Space as TeX does: a thin space after log, none after the sign in = -x."""
    before: ElementTree.Element | None = None
    for element in list(row):
        if before is not None and before.tag == "mo" and before.text not in _CLOSING:
            if element.tag == "mo" and element.text in _SIGNS:
                element.set("form", "prefix")
        elif before is not None and _is_function(before) and element.tag != "mo":
            place = list(row).index(element)
            row.insert(place, ElementTree.Element("mspace", {"width": "0.167em"}))
        before = element


def _is_function(element: ElementTree.Element) -> bool:
    """Whether this is log, or softmax with a subscript."""
    if element.tag.startswith(("msu", "mun")) and len(element):
        return _is_function(element[0])
    text = element.text or ""
    return element.tag == "mi" and len(text) > 1 and text.isalpha()
