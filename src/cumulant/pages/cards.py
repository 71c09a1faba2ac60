"""Cards: how results look in a notebook.

A card is one block of HTML without scripts and without requests. Text and lines take the color of
the notebook around them and colors are chosen to stand out on white and on black, so a card needs
not know the notebook's theme. Where a viewer removes styles, tables and pictures remain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

__all__ = ["HUES", "Markup", "card", "columns", "facts", "note", "table", "text"]

# Blue, red, green, ochre, teal, purple: at least 3 : 1 against white and against black.
HUES = ("#4a80d0", "#d4536a", "#2f9468", "#b07a1e", "#22909e", "#9566c2")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")
_LONGEST = 400  # characters of one piece of text


class Markup(str):
    """HTML; any other string is text and gets escaped."""

    __slots__ = ()


def text(value: object) -> Markup:
    """A value as text that cannot be markup; what is very long is cut."""
    if isinstance(value, Markup):
        return value
    plain = str(value)
    plain = plain if len(plain) <= _LONGEST else plain[: _LONGEST - 1] + "…"
    plain = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", plain)
    return Markup(escape(plain.encode("utf-8", "replace").decode()))


@cache
def _style() -> str:
    return (files("cumulant.pages") / "card.css").read_text(encoding="utf-8")


def card(title: str, about: str, *parts: Markup) -> str:
    """A card: its title, a few words beside it, and its parts below."""
    beside = f'<span class="cm-quiet">{text(about)}</span>'
    head = f'<p class="cm-head"><b>{text(title)}</b> {beside}</p>'
    return f'<div class="cumulant-card"><style>{_style()}</style>{head}{"".join(parts)}</div>'


def facts(pairs: Iterable[tuple[str, object]]) -> Markup:
    """Names and values side by side."""
    items = "".join(f"<div><dt>{text(n)}</dt><dd>{text(x)}</dd></div>" for n, x in pairs)
    return Markup(f"<dl>{items}</dl>" if items else "")


def note(words: object) -> Markup:
    """A paragraph in small type; nothing if there is nothing to say."""
    return Markup(f'<p class="cm-note">{text(words)}</p>' if words else "")


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """A table; the first cell of each row names it."""
    top = "".join(f'<th scope="col">{text(x)}</th>' for x in heads)
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>'
        + "".join(f"<td>{text(x)}</td>" for x in row[1:])
        + "</tr>"
        for row in rows
    )
    inner = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return Markup(f'<div class="cm-wide"><table>{inner}</table></div>')


def columns(*parts: tuple[str, Markup]) -> Markup:
    """Pictures side by side, each under its title; they wrap where there is no room."""
    cells = "".join(
        f'<div><div class="cm-quiet">{text(title)}</div>{part}</div>' for title, part in parts
    )
    return Markup(f'<div class="cm-row">{cells}</div>')
