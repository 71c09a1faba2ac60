"""What a check found: one row per word, and the operators at fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from cumulant.core.describing import described_fields

__all__ = ["DerivativeReport", "Fault", "Row", "Status"]

Status = Literal["right", "wrong", "not supported", "kink", "unclear", "left out"]


@dataclass(frozen=True)
class Row:
    """One word of modes, outermost first, against finite differences.

    Attributes:
        word: such as ``RF``, reverse over forward.
        status: ``right``; ``wrong``; ``not supported`` (torch raises); ``kink`` (the function is
            not differentiable there); ``unclear`` (finite differences are too coarse to tell);
            ``left out`` (no time).
        value: what torch computes along the random directions, if it does.
        expected: the same by finite differences.
        error_bar: how far `expected` may be off.
        note: why, in one line.
    """

    word: str
    status: Status
    value: float | None = None
    expected: float | None = None
    error_bar: float | None = None
    note: str = ""

    __repr__ = described_fields


@dataclass(frozen=True)
class Fault:
    """An operator in the call that is wrong or not supported, and where it is called.

    Attributes:
        operator: as torch names it, such as ``torch.nn.functional.layer_norm``.
        wrong: the words in which it returns a wrong number.
        not_supported: the words in which it raises.
        error: the largest relative error among the wrong words.
        places: where it is called: module path and source line.
        inside: the internal operators that carry the fault, if the call has several.
        issue: a link, if the fault is known.
        remedy: what to do.
    """

    operator: str
    wrong: tuple[str, ...]
    not_supported: tuple[str, ...]
    error: float
    places: tuple[str, ...]
    inside: tuple[str, ...] = ()
    issue: str | None = None
    remedy: str = ""

    __repr__ = described_fields

    def __str__(self) -> str:
        parts = [f"{' '.join(self.wrong)} wrong (by {self.error:.1e})"] if self.wrong else []
        if self.not_supported:
            parts.append(f"{' '.join(self.not_supported)} not supported")
        text = f"{self.operator}: {', '.join(parts) or 'suspected'}"
        if self.inside:
            text += f"\n  inside:  {', '.join(self.inside)}"
        text += "".join(f"\n  at:      {p}" for p in self.places[:3] if p)
        if len(self.places) > 3:
            text += f"\n           and {len(self.places) - 3} more"
        if self.issue:
            text += f"\n  known:   {self.issue}"
        return text + (f"\n  do:      {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class DerivativeReport:
    """Every word of forward and reverse mode against finite differences.

    Attributes:
        rows: one `Row` per word, shortest first.
        faults: the operators at fault, if a row is wrong or not supported.
        notes: what limits the check.
    """

    rows: tuple[Row, ...]
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        found = Counter(row.status for row in self.rows)
        told = ", ".join(f"{count} {kind}" for kind, count in found.items())
        fault = (
            f"; at fault: {', '.join(x.operator for x in self.faults[:3])}" if self.faults else ""
        )
        return f"DerivativeReport({len(self.rows)} words: {told}{fault}; print it for the table)"

    @property
    def ok(self) -> bool:
        """Whether every word was checked and is right."""
        return all(row.status == "right" for row in self.rows)

    def words(self, status: Status) -> tuple[str, ...]:
        """The words with this status."""
        return tuple(row.word for row in self.rows if row.status == status)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        head = f"{'word':<6}{'status':<15}{'torch':>16}{'differences':>16}{'± ':>10}"
        lines = [head, *(_format(row) for row in self.rows)]
        lines += [f"note: {n}" for n in self.notes]
        if self.faults:
            lines += ["", "At fault:", *map(str, self.faults)]
        return "\n".join(line.rstrip() for line in lines)


def _format(row: Row) -> str:
    value = "" if row.value is None else f"{row.value:.9g}"
    expected = "" if row.expected is None else f"{row.expected:.9g}"
    bar = "" if row.error_bar is None else f"{row.error_bar:.1e}"
    return f"{row.word:<6}{row.status:<15}{value:>16}{expected:>16}{bar:>10}  {row.note}"
