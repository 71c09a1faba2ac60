"""Typeset plain-text formulas: subscripts, exponents, Greek letters, true minus signs, code."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Piece", "typeset"]


class Piece(NamedTuple):
    """A piece of text and its HTML element: "" for none, "sub", "sup" or "code"."""

    element: str
    text: str


# In this order. A word such as feed_forward or sink_mass has no subscript: an index is one letter,
# a pair of them, or max. An exponent is a number, a letter, or stands in brackets, of which only
# angles are shown.
_SIGNS = (
    (re.compile(r"->"), "→"),
    (re.compile(r"<([^<>]+, ?[^<>]+)>"), r"⟨\1⟩"),
    (re.compile(r"\bsum(?=_[a-z]\b| l\b)"), "Σ"),
    (re.compile(r"\blambda(?=_)"), "λ"),
    (re.compile(r" \* "), " · "),
    (re.compile(r"(?<!\w)-(?=[\w ])"), "−"),
    (re.compile(r"(?<=\w)'(?=[:)|])"), "^T"),
)
_LOWERED = r"(?<=\w)_(?P<low>ij|ii|max|[a-zα-ω0-9])(?![a-zα-ω0-9_])"
_RAISED = (
    r"\^(?:(?P<high>[-−]?[0-9]+|[A-Za-z½]|⟨[^⟨⟩]+⟩)(?![A-Za-z0-9])"
    r"|\((?P<inside>(?:[^()]|\([^()]*\))+)\)|\{(?P<braced>[^{}]+)\})"
)
_MOVED = re.compile(f"`(?P<code>[^`]+)`|{_LOWERED}|{_RAISED}")


def typeset(text: str, signs: bool = True) -> list[Piece]:
    """The text split into pieces, none of them markup.

    Args:
        text: a formula; or, without ``signs``, a sentence, whose hyphens and apostrophes stay.
        signs: whether to replace arrows, brackets, hyphens and the like.

    >>> [tuple(piece) for piece in typeset("-sum_j p_ij")]
    [('', '−Σ'), ('sub', 'j'), ('', ' p'), ('sub', 'ij')]
    """
    for pattern, sign in _SIGNS if signs else ():
        text = pattern.sub(sign, text)
    pieces: list[Piece] = []
    end = 0
    for match in _MOVED.finditer(text):
        pieces.append(Piece("", text[end : match.start()]))
        pieces.append(_moved(match))
        end = match.end()
    pieces.append(Piece("", text[end:]))
    return [piece for piece in pieces if piece.text]


def _moved(match: re.Match[str]) -> Piece:
    if match["code"]:
        return Piece("code", match["code"])
    if match["low"]:
        return Piece("sub", match["low"])
    high = match["high"] or match["inside"] or match["braced"]
    return Piece("sup", high.replace("-", "−"))
