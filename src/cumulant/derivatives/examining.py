"""Which operators of a call are at fault: each is checked by itself, at the inputs it had."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from cumulant.core.errors import InputError
from cumulant.derivatives.calls import Call, Cut, Recording, inner_operators, is_live, record
from cumulant.derivatives.comparing import Options, compare
from cumulant.derivatives.known import known_fault
from cumulant.derivatives.problem import Problem, pose
from cumulant.derivatives.reporting import Fault, Row

__all__ = ["find_faults"]

_CUSTOM = "check its backward and jvp; both must be differentiable functions of saved tensors"


def find_faults(
    problem: Problem, module: nn.Module | None, rows: tuple[Row, ...], options: Options
) -> tuple[tuple[Fault, ...], list[str]]:
    """(the operators at fault, notes), given the rows of the whole call."""
    recording = _recorded(problem, module)
    search = _Search({r.word for r in rows if r.status in ("wrong", "not supported")}, options)
    groups: dict[Any, list[Call]] = {}
    for call in recording.calls:
        groups.setdefault(call.signature, []).append(call)
    for calls in groups.values():
        search.look(calls[0], [c.place for c in calls])
    if not search.explained:  # a fault may depend on the numbers
        for calls in groups.values():
            for call in calls[1:]:
                search.look(call, [call.place])
    if not search.explained:
        search.suspect((*recording.cuts, *_written(recording, rows)))
    notes: list[str] = []
    if search.unseen:
        notes.append(f"{search.unseen} operators were not examined: out of time.")
    elif not search.faults:
        notes.append("No single operator is at fault alone.")
    return tuple(search.faults.values()), notes


def _recorded(problem: Problem, module: nn.Module | None) -> Recording:
    point = [x.detach().requires_grad_() for x in problem.point]
    try:
        return record(lambda: problem.outputs(*point), module)
    except Exception:  # what cannot be recorded is reported without names
        return Recording()


class _Search:
    """The faults found so far, by operator."""

    def __init__(self, failing: set[str], options: Options) -> None:
        self.failing, self.options = failing, options
        self.faults: dict[str, Fault] = {}
        self.unseen = 0

    @property
    def explained(self) -> bool:
        """Whether every failing word fails in some operator."""
        found = {w for f in self.faults.values() for w in (*f.wrong, *f.not_supported)}
        return self.failing <= found

    def look(self, call: Call, places: list[str]) -> None:
        if self.options.late:
            self.unseen += 1
            return
        fault = _fault(call, self.failing, self.options)
        if fault is None:
            self.unseen += self.options.late
            return
        before = self.faults.get(call.name)
        if before is None:
            inside = () if call.custom else _inside(call, fault, self.options)
            fault = replace(fault, places=tuple(dict.fromkeys(places)), inside=inside)
        self.faults[call.name] = fault if before is None else _joined(before, fault, places)

    def suspect(self, cuts: Iterable[Cut]) -> None:
        places: dict[str, list[str]] = {}
        remedies: dict[str, str] = {}
        for cut in cuts:
            places.setdefault(cut.name, []).append(cut.place)
            remedies[cut.name] = cut.remedy
        for name, found in places.items():
            self.faults[name] = Fault(
                operator=name,
                wrong=(),
                not_supported=(),
                error=0.0,
                places=tuple(dict.fromkeys(found)),
                remedy=remedies[name],
            )


def _fault(call: Call, failing: set[str], options: Options) -> Fault | None:
    """What is wrong with one call by itself, among the words that fail as a whole."""
    try:
        problem = pose(call.run, call.inputs, seed=options.seed, moves=is_live)
        rows = compare(problem, options)
    except InputError:
        return None  # not a function of real tensors by itself
    wrong = tuple(r for r in rows if r.status == "wrong" and r.word in failing)
    missing = tuple(r.word for r in rows if r.status == "not supported" and r.word in failing)
    if not wrong and not missing:
        return None
    known = known_fault(call.name, custom=call.custom)
    if call.custom and any("FF" not in r.word for r in wrong):
        known = None  # the author's own mistake
    remedy = known.remedy if known else _CUSTOM if call.custom else ""
    return Fault(
        operator=call.name,
        wrong=tuple(r.word for r in wrong),
        not_supported=missing,
        error=max((_relative_error(r) for r in wrong), default=0.0),
        places=(call.place,),
        issue=known.issue if known else None,
        remedy=remedy,
    )


def _relative_error(row: Row) -> float:
    value, expected = row.value or 0.0, row.expected or 0.0
    return abs(value - expected) / max(abs(value), abs(expected))


def _written(recording: Recording, rows: tuple[Row, ...]) -> list[Cut]:
    """The in-place calls, if torch complains about one."""
    if not any("inplace" in r.note for r in rows if r.status == "not supported"):
        return []
    return [
        Cut(c.name, c.place, "it writes in place to a tensor that reverse mode needs; use a copy")
        for c in recording.calls
        if c.name.endswith("__setitem__") or (c.name.endswith("_") and c.name[-2] != "_")
    ]


def _inside(call: Call, fault: Fault, options: Options) -> tuple[str, ...]:
    """The internal operators that fail in the same words."""
    failing = {*fault.wrong, *fault.not_supported}
    try:
        inner = inner_operators(call)
    except Exception:
        return ()
    found = (c.name for c in inner if not options.late and _fault(c, failing, options))
    return tuple(dict.fromkeys(found))


def _joined(first: Fault, second: Fault, places: list[str]) -> Fault:
    def both(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted({*a, *b}, key=lambda w: (len(w), w)))

    return replace(
        first,
        wrong=both(first.wrong, second.wrong),
        not_supported=both(first.not_supported, second.not_supported),
        error=max(first.error, second.error),
        places=tuple(dict.fromkeys((*first.places, *places))),
    )
