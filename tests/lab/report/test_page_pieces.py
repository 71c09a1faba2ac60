"""What pages are made of: formulas and figures that can stand in any page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from made_parts import figure

from cumulant.core.errors import InputError
from cumulant.lab.report.drawings import drawing
from cumulant.pages import mathml


def test_formulas_are_escaped():
    for tex in (r"\text{<script>run()</script>}", "<script>run()</script>", r"a \& b < c"):
        made = mathml(tex)
        assert "<script" not in made
        root = ElementTree.fromstring(made)
        assert root.tag == "math"
    assert "".join(ElementTree.fromstring(mathml(r"a < b \& c")).itertext()) == "a<b&c"


def test_what_is_no_tex_is_shown_as_written():
    assert mathml(r"<b> \frac{") == r"<code>&lt;b&gt; \frac{</code>"


def test_names_of_functions_are_spaced_as_tex_does():
    made = mathml(r"\operatorname{softmax}_n(x) = -\log \pi")
    assert '<msub><mi mathvariant="normal">softmax</mi><mi>n</mi></msub><mo' in made
    assert '<mo form="prefix">−</mo><mi>log</mi><mspace width="0.167em" /><mi>π</mi>' in made
    assert 'form="prefix"' not in mathml("(a) - b")


def test_figures_take_the_pages_colors():
    plain = figure("T1")
    assert "#e4e7ee" in plain  # the grid's: if it changes, drawings.py must know
    made = drawing(plain, "T1", "A caption.")
    left = set(re.findall(r"(?<!\()#[0-9a-f]{6}\b(?!,)", made))
    between = re.findall(r"light-dark\(#5050a0, color-mix\(in oklab, #5050a0, white 35%\)\)", made)
    assert between
    assert left <= {"#5050a0"}
    for name in ("--ink", "--muted", "--surface", "--line", *(f"--c{i}" for i in range(6))):
        assert f"var({name})" in made


def test_figures_share_no_names_and_bring_nothing_along():
    first, second = (drawing(figure("same"), name, "c") for name in ("a b", "c"))
    names = [set(re.findall(r' id="([^"]+)"', made)) for made in (first, second)]
    assert names[0]
    assert not names[0] & names[1]
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', first))
    assert used == names[0]
    for foreign in ("<style", "<metadata", "<!--", "<?xml", "http", "xlink", "ns0"):
        assert foreign not in first


def test_figures_lose_scripts_and_handlers():
    nasty = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" onload="run()"><script>run()'
        '</script><a href="javascript:run()"><rect/></a><image href="https://elsewhere/x.png"/>'
        '<path d="M0 0.123456" onclick="run()"/></svg>'
    )
    made = drawing(nasty, "T1", '"quoted" <caption>')
    assert "run()" not in made
    assert "elsewhere" not in made
    assert 'd="M0 0.12"' in made
    root = ElementTree.fromstring(made)
    assert root.attrib["aria-label"] == '"quoted" <caption>'
    assert root.attrib["role"] == "img"


@pytest.mark.parametrize("text", ["no svg", "<svg></svg>", '<svg viewBox="a b"/>'])
def test_what_is_no_figure_is_an_error(text):
    with pytest.raises(InputError, match="the figure T9 is not an SVG"):
        drawing(text, "T9", "caption")
