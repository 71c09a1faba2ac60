"""Markdown with formulas as HTML, for texts of the documentation inside pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from importlib import import_module
from typing import Any

from cumulant.core.errors import InputError
from cumulant.pages.formulas import mathml
from cumulant.pages.typeset import typeset

__all__ = ["markdown", "sections"]

# What is code stays as it is; then blocks of TeX, then TeX within a line.
_MATH = re.compile(
    r"(`+)(?:.+?)\1|\$\$(?P<block>.+?)\$\$|\$(?P<line>[^\s$](?:[^$]*[^\s$])?)\$", re.S
)
_KEPT = re.compile("\ue000(\\d+)\ue001")
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """What stands under each heading of the second level.

    >>> sections("# A\\n\\n## B. b\\n\\nOne.\\n\\n## C\\n\\nTwo.\\n")
    {'B. b': 'One.', 'C': 'Two.'}
    """
    _, *parts = _HEADING.split(text)
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


def markdown(text: str, link: Callable[[str], str | None] = lambda address: address) -> str:
    """CommonMark with tables and TeX between dollar signs; markup in the text is shown as written.

    Args:
        text: Markdown. Pictures are left out: a page places its own.
        link: what an address becomes in this page; None leaves the words without a link.

    Raises:
        InputError: markdown-it-py or latex2mathml is not installed.

    >>> markdown("Of *all* [keys](a.md).", lambda address: None)
    '<p>Of <em>all</em> keys.</p>\\n'
    """
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        block, line = found["block"], found["line"]
        if block is None and line is None:
            return found[0]
        formula = mathml((block or line or "").strip(), block=block is not None)
        # A box of its own, so that a long formula scrolls and the page does not.
        kept.append(formula if block is None else f'<span class="formula">{formula}</span>')
        return f"\ue000{len(kept) - 1}\ue001"

    parser = _parser()
    tokens: list[Any] = parser.parse(_MATH.sub(keep, text.translate({0xE000: None, 0xE001: None})))
    for token in tokens:
        token.children = token.children and _inline(token.children, link)
    html: str = parser.renderer.render(tokens, parser.options, {})
    return _KEPT.sub(lambda found: kept[int(found[1])], html)


def _parser() -> Any:
    try:
        module = import_module("markdown_it")
    except ModuleNotFoundError:
        raise InputError("pages need markdown-it-py: pip install '.[report]'.") from None
    return module.MarkdownIt("commonmark", {"html": False}).enable("table")


def _inline(tokens: list[Any], link: Callable[[str], str | None]) -> list[Any]:
    """The pieces of a line: links as this page has them, indices and exponents typeset."""
    out: list[Any] = []
    open_links: list[bool] = []
    for token in tokens:
        if token.type == "link_open":
            address = link(str(token.attrs["href"]))
            open_links.append(address is not None)
            token.attrs["href"] = address or ""
        keeps = open_links.pop() if token.type == "link_close" else not open_links or open_links[-1]
        if token.type == "image" or (token.type in ("link_open", "link_close") and not keeps):
            continue
        if token.type == "text":
            token.type, token.content = "html_inline", _typeset(token.content)
        out.append(token)
    return out


def _typeset(text: str) -> str:
    return "".join(
        f"<{piece.element}>{escape(piece.text, quote=False)}</{piece.element}>"
        if piece.element
        else escape(piece.text, quote=False)
        for piece in typeset(text, signs=False)
    )
