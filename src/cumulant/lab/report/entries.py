"""A row of the ledger as the page shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cumulant.lab.claims.claim import CORRECTED, FAILS, HOLDS, OPEN, correction_title
from cumulant.lab.report.documents import Links, derivations
from cumulant.lab.report.drawings import drawing
from cumulant.pages import mathml, number
from cumulant.pages.markdown import markdown

__all__ = ["KINDS", "Kind", "Number", "Shown", "powers", "shown", "worded"]


class Kind(NamedTuple):
    """A verdict, or why there is none: how it is called, said of one and of many, and marked."""

    name: str
    label: str
    one: str
    many: str
    mark: str

    def counted(self, amount: int) -> str:
        """`1 holds`, `3 hold`."""
        return f"{amount} {self.one if amount == 1 else self.many}"


_VERDICTS = {
    HOLDS: Kind("holds", HOLDS, "holds", "hold", "✓"),
    CORRECTED: Kind("corrected", CORRECTED, CORRECTED, "hold with a correction", "±"),
    FAILS: Kind("fails", FAILS, FAILS, "do not hold in general", "✕"),
    OPEN: Kind("open", OPEN, "is open", "are open", "?"),
}
_CRASHED = Kind("crashed", "crashed", "crashed", "crashed", "!")
_NOT_RUN = Kind("absent", "not run", "was not run", "were not run", "–")
KINDS = (*_VERDICTS.values(), _CRASHED, _NOT_RUN)

_OUTCOMES = {"passed": "✓", "failed": "✕", "undecided": "?", "noted": ""}


class File(NamedTuple):
    """A file of the repository, and its address where the page can lead there."""

    path: str
    address: str | None


class Number(NamedTuple):
    """One measured number in words."""

    name: str
    says: str
    value: str
    bound: str
    form: str
    outcome: str
    mark: str


@dataclass(frozen=True)
class Shown:
    """What an article of the page says; ``formula``, ``derivation`` and ``figure`` are markup."""

    id: str
    title: str
    kind: Kind
    evidence: str
    statement: str
    source: str
    formula: str
    correction: str
    correction_title: str
    slips: list[str]
    bounds: str
    finding: str
    systems: str
    tests: list[File]
    experiment: File | None
    theory: File | None
    derivation: str
    again: str
    numbers: list[Number]
    figure: str
    caption: str
    recorded: str
    departs: bool
    trouble: str
    seconds: str


def shown(row: Mapping[str, Any], figure: str | None, links: Links) -> Shown:
    """The row in words.

    Args:
        row: as the ledger has it.
        figure: its picture as SVG, if there is one.
        links: where files and other claims are.
    """

    def file(path: object) -> File:
        return File(str(path), links.file(str(path)))

    kind = _VERDICTS.get(row["verdict"], _VERDICTS[OPEN])
    if row["crash"] is not None or row["not_run"] is not None:
        kind = _CRASHED if row["crash"] is not None else _NOT_RUN
    caption = powers(str(row["caption"] or row["title"]))
    return Shown(
        id=str(row["id"]),
        title=str(row["title"]),
        kind=kind,
        evidence=str(row.get("evidence", "")),
        statement=str(row["statement"]),
        source=str(row["source"]),
        formula=_formulas(str(row["formula"] or "")),
        correction=str(row["correction"] or ""),
        correction_title=correction_title(str(row["verdict"])),
        slips=[str(slip) for slip in row.get("slips", ())],
        bounds=str(row.get("bounds", "")),
        finding=powers(str(row["finding"] or "")),
        systems=", ".join(map(str, row["systems"])),
        tests=[file(path) for path in row["tests"]],
        experiment=file(row["experiment"]) if row.get("experiment") else None,
        theory=file(f"docs/theory.md#{row['theory'].lower()}") if row["theory"] else None,
        derivation=markdown(derivations().get(str(row["id"]), ""), links),
        again=str(row["again"]),
        numbers=[worded(x) for x in row["numbers"]],
        figure=drawing(figure, str(row["id"]), caption) if figure else "",
        caption=caption,
        recorded=str(row["recorded"]),
        departs=bool(row.get("departs", row["verdict"] != row["recorded"])),
        trouble=str(row["crash"] or row["not_run"] or ""),
        seconds="under 0.01 s" if row["seconds"] < 0.01 else f"{number(row['seconds'], 2)} s",
    )


def _formulas(tex: str) -> str:
    """Formulas side by side, or below one another where a line is too short for them."""
    return " ".join(mathml(part.strip()) for part in tex.split(r"\qquad") if part.strip())


def worded(x: Mapping[str, Any]) -> Number:
    """A measured number in words, from `plain_number`."""
    value = "not finite" if x["value"] is None else number(x["value"])
    if x["value"] is not None and x["error"] is not None:
        value += f" ± {number(x['error'], 2)}"
    bound = ""
    if x["form"] != "noted":
        bound = f"≤ {_limit(x['high'])}" if x["high"] is not None else f"≥ {_limit(x['low'])}"
        if x["refuted"] is not None:
            bound += f", refuted at {_limit(x['refuted'])}"
    mark = _OUTCOMES.get(x["outcome"], "")
    return Number(x["name"], x["says"], value, bound, x["form"], x["outcome"], mark)


def powers(text: str) -> str:
    """Sentences write 2e-15, people 2·10⁻¹⁵."""
    return re.sub(r"\b\d+(\.\d+)?e[+-]\d+\b", lambda m: _limit(float(m[0])), text)


def _limit(value: float) -> str:
    """A bound, which somebody chose and so has few digits: 10⁻⁸, not 1.00·10⁻⁸."""
    text = number(value)
    if "·" in text:
        mantissa, power = text.split("·")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return power if mantissa == "1" else f"{mantissa}·{power}"
    return text.rstrip("0").rstrip(".") if "." in text else text
