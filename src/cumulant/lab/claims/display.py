"""Claims in a notebook: the card of the report, with the formula, the numbers and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cumulant.core.errors import InputError
from cumulant.figures import COLORS, as_svg
from cumulant.lab.claims.claim import Claim, Measured, Picture, Result, verdict
from cumulant.lab.claims.ledger import Entry, plain_number
from cumulant.lab.report.documents import Links
from cumulant.lab.report.drawings import drawing
from cumulant.lab.report.entries import Kind, Shown, powers, shown, worded
from cumulant.pages import mathml
from cumulant.pages.cards import HUES, Markup, card, facts, note, table, text

__all__ = ["claim_html", "entry_html", "result_html"]

_MARKS = {"holds": 2, "corrected": 3, "fails": 1, "open": 0, "crashed": 5}
# The colors of figures, in the order of the house palette, as they stand out on any page.
_PALETTE = dict(zip(COLORS, (HUES[i] for i in (0, 1, 2, 5, 3, 4)), strict=True))


def claim_html(claim: Claim) -> str:
    """What the claim states, and the verdict on record; nothing is run."""
    row = Entry(claim, 0, quick=False).as_dict() | {"verdict": claim.recorded}
    said = _words(row)
    parts = [_badge(said.kind, "recorded: "), *_about(said, claim)]
    return card(f"{claim.id}  {claim.title}", "", *parts)


def entry_html(entry: Entry) -> str:
    """The claim and what a run of its experiment came to."""
    claim, said = entry.claim, _words(entry.as_dict())
    parts = [_badge(said.kind, ""), *_about(said, claim)]
    if said.trouble:
        parts.append(_paragraph(said.kind.label.capitalize(), said.trouble))
    if said.departs:
        parts.append(_paragraph("Differs from the record", f"recorded: {said.recorded}"))
    if said.finding:
        parts.append(_paragraph("Found", said.finding))
    parts += [_numbers(entry.numbers), _picture(entry.picture, claim.id)]
    end = [("seed", entry.seed), ("took", said.seconds), ("short run", "yes")]
    return card(f"{claim.id}  {claim.title}", "", *parts, facts(end if entry.quick else end[:2]))


def result_html(result: Result) -> str:
    """What an experiment measured."""
    said = verdict(result.numbers)
    name = "".join(x.name for x in result.numbers)
    parts = [_paragraph("Found", powers(result.finding)), _numbers(result.numbers)]
    return card("Result", said, *parts, _picture(result.picture, name))


def _words(row: dict[str, Any]) -> Shown:
    """The row in words; the formula needs a package and is set apart."""
    return shown(row | {"formula": ""}, None, Links(()))


def _about(said: Shown, claim: Claim) -> list[Markup]:
    parts = [Markup(f"<p>{text(said.statement)}</p>"), _formula(claim.formula)]
    if said.correction:
        parts.append(_paragraph(said.correction_title, said.correction))
    parts += [_paragraph("Slip", slip) for slip in said.slips]
    told = [("source", said.source), ("evidence", said.evidence), ("known as", said.systems)]
    return [*parts, facts([(n, x) for n, x in told if x])]


def _paragraph(head: str, words: str) -> Markup:
    return Markup(f"<p><b>{text(head)}.</b> {text(words)}</p>") if words else Markup("")


def _badge(kind: Kind, before: str) -> Markup:
    hue = HUES[_MARKS[kind.name]] if kind.name in _MARKS else "currentColor"
    mark = f'<b style="color:{hue}">{text(kind.mark)}</b>'
    return Markup(f"<p>{mark} {text(before + kind.label)}</p>")


def _formula(tex: str) -> Markup:
    if not tex:
        return Markup("")
    try:
        return Markup(f'<div class="cm-wide">{mathml(tex)}</div>')
    except InputError:  # without the package, as written
        return Markup(f"<p><code>{text(tex)}</code></p>")


def _numbers(numbers: Sequence[Measured]) -> Markup:
    if not numbers:
        return Markup("")
    said = [worded(plain_number(x)) for x in numbers]
    rows = [
        [x.says, x.value, x.bound, "" if x.form == "noted" else x.form, f"{x.mark} {x.outcome}"]
        for x in said
    ]
    return table(["what was measured", "value", "should be", "evidence for", "outcome"], rows)


def _picture(picture: Picture | None, name: str) -> Markup:
    """The figure, if matplotlib is there to draw it."""
    if picture is None:
        return Markup("")
    try:
        plain = as_svg(picture.draw, picture.size, name)
    except InputError:
        return Markup("")
    figure = drawing(plain, f"cumulant-{name}", picture.caption)
    colors = [f"--c{i}:{hue}" for i, hue in enumerate(_PALETTE.values())]
    colors += ["--ink:currentColor", "--muted:currentColor", "--line:rgba(128,128,128,.35)"]
    colors += ["--surface:transparent", "max-width:46em"]
    return Markup(f'<div style="{";".join(colors)}">{figure}</div>{note(picture.caption)}')
