"""Formulas as MathML, made when the site is built: browsers typeset it, and nothing is fetched."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator

# Functions stand apart from their arguments; a sign after = belongs to what follows.
FUNCTION = re.compile(r"<mi>(log|exp|max|min)</mi>")
SIGN = re.compile(
    r"(<mo[^>]*>(?:=|&#x(?:0003D|02264|02265|02248|0002C|00028);)</mo>)<mo>(&#x02212;|&#x0002B;)</mo>"
)


def mathml(tex: str, display: str) -> str:
    """The formula, or an error that shows it: what is not understood comes back as a command."""
    out = convert(tex, display=display)
    if "\\" in out or "<mi>&</mi>" in out:
        raise ExtensionError(f"latex2mathml does not know all of the formula {tex!r}")
    out = FUNCTION.sub(r'<mo lspace="0.167em" rspace="0.167em">\1</mo>', out)
    return SIGN.sub(r'\1<mo form="prefix" lspace="0" rspace="0">\2</mo>', out)


def inline(writer: HTML5Translator, node: nodes.math) -> None:
    """A formula in a line of text."""
    writer.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(writer: HTML5Translator, node: nodes.math_block) -> None:
    """A formula by itself; a long one scrolls in its own box."""
    formula = mathml(node.astext(), "block")
    writer.body.append(f'<div class="formula">{formula}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer as "mathml"."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
