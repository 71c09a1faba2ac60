"""Findings that name heads: induction, previous token, duplicate token, fixed distance."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from cumulant.lens.report.finding import Finding
from cumulant.lens.report.numbers import column
from cumulant.pages import count, number

if TYPE_CHECKING:
    from cumulant.lens.report.page import ReportData

__all__ = ["distance", "duplicate", "induction", "previous", "ranked", "said"]

# A head is named after a pattern from this mean weight on; uniform attention scores about 0.01.
STRONG = 0.4
NONE = "No"  # begins the headline of a kind that there is not
NEXT = 3  # further heads that are listed


class Head(NamedTuple):
    """A head and its score."""

    layer: int
    head: int
    score: float


def ranked(data: ReportData, name: str) -> list[Head]:
    """Heads by a column, the largest first."""
    cells = (column(data.heads, n) for n in ("layer", "head", name))
    rows = [
        Head(int(a), int(b), float(x)) for a, b, x in zip(*cells, strict=False) if x is not None
    ]
    return sorted(rows, key=lambda x: -x.score)


def said(head: Head) -> str:
    """`layer 17 head 5`."""
    return f"layer {head.layer} head {head.head}"


def _listed(heads: Sequence[Head]) -> str:
    return ", ".join(f"{said(x)} ({x.score:.2f})" for x in heads)


def _named(data: ReportData, kind: str, test: str, text: str, what: str) -> Finding | None:
    """The strongest heads of a kind, by the test of repeats if there is one, else in the texts."""
    tested, natural = ranked(data, test), ranked(data, text)
    order = tested or natural
    if not order:
        return None
    top, strong = order[0], sum(x.score >= STRONG for x in order)
    where = "on 50 random tokens said twice" if tested else "in the texts"
    headline = f"{said(top).capitalize()} is the strongest {kind} head: {top.score:.2f}"
    if not strong:
        headline = f"{NONE} {kind} head: the strongest, {said(top)}, scores {top.score:.2f}"
    sentence = (
        f"It puts {top.score:.2f} of its weight on {what}, {where}; the median head puts "
        f"{number(median(x.score for x in order), 2)}. Next: {_listed(order[1 : 1 + NEXT])}. "
        f"{strong} of {count(len(order), 'head')} {'scores' if strong == 1 else 'score'} at least "
        f"{STRONG}"
    )
    if tested and natural:
        sentence += f". In the texts the strongest is {_listed(natural[:1])}"
    shown = test if tested else text
    place = (top.layer, top.head)
    return Finding(headline, sentence + ".", f"Mean weight, {shown}.", "maps", shown, place)


def induction(data: ReportData) -> Finding | None:
    """Who looks for what followed the same token before."""
    what = "the token that followed the last copy of the current one"
    return _named(data, "induction", "repeat_induction", "induction_mass", what)


def previous(data: ReportData) -> Finding | None:
    """Who looks at the token before."""
    return _named(data, "previous-token", "repeat_previous", "previous_mass", "the token before")


def duplicate(data: ReportData) -> Finding | None:
    """Who looks for the same token."""
    what = "earlier copies of the current token"
    return _named(data, "duplicate-token", "repeat_duplicate", "duplicate_mass", what)


def distance(data: ReportData) -> Finding | None:
    """Who looks at a fixed distance other than the token before."""
    cells = (column(data.heads, n) for n in ("layer", "head", "distance", "distance_mass"))
    rows = [
        (Head(int(a), int(b), float(x)), int(d))
        for a, b, d, x in zip(*cells, strict=False)
        if x is not None and d is not None and int(d) != 1 and float(x) >= STRONG
    ]
    if not rows:
        return None
    rows.sort(key=lambda x: -x[0].score)
    told = [f"{said(x)} ({_place(d)}, {x.score:.2f})" for x, d in rows[: 1 + NEXT]]
    top, place = rows[0]
    many = len(rows) > 1
    return Finding(
        f"{said(top).capitalize()} is positional: {top.score:.2f} of its weight is {_place(place)}",
        f"{count(len(rows), 'head')} {'put' if many else 'puts'} at least {STRONG} of "
        f"{'their' if many else 'its'} weight on one fixed distance other than the token before: "
        f"{', '.join(told)}.",
        "Largest mean weight on one distance, from 1 to 8 tokens back or ahead, in the texts.",
        "maps",
        "distance_mass",
        (top.layer, top.head),
    )


def _place(steps: int) -> str:
    return f"{count(abs(steps), 'token')} {'back' if steps > 0 else 'ahead'}"
