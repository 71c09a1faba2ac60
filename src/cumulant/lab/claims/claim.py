"""What a claim is: what it states, which numbers decide it, and how they become a verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from cumulant.core.describing import described_fields

__all__ = [
    "CORRECTED",
    "EVIDENCE",
    "FAILS",
    "HOLDS",
    "OPEN",
    "VERDICTS",
    "Claim",
    "Evidence",
    "Found",
    "Measured",
    "Picture",
    "Result",
    "Rule",
    "Trial",
    "correction_title",
    "table",
    "verdict",
]

Verdict = Literal["holds", "holds with a correction", "does not hold in general", "open"]
Evidence = Literal["identity", "simulation", "empirical"]
Form = Literal["statement", "correction", "control", "noted"]
Outcome = Literal["passed", "failed", "undecided", "noted"]
Value: TypeAlias = float | Tensor | tuple[float | Tensor, float | Tensor]

HOLDS: Verdict = "holds"
CORRECTED: Verdict = "holds with a correction"
FAILS: Verdict = "does not hold in general"
OPEN: Verdict = "open"
VERDICTS: tuple[Verdict, ...] = (HOLDS, CORRECTED, FAILS, OPEN)
# What a verdict rests on, and so what could change it.
EVIDENCE: dict[Evidence, str] = {
    "identity": "mathematics, where a computation can only find a bug",
    "simulation": "runs of a model, where other parameters could decide otherwise",
    "empirical": "trained weights or real text, where other models could decide otherwise",
}


@dataclass(frozen=True)
class Rule:
    """What a number is, and what it would have to be.

    ``form`` says whom it speaks for: the *statement* as the draft makes it, its *correction*, or a
    *control* without which the experiment would mean nothing. ``refuted`` is where doubt ends:
    between the bound and it, the number decides nothing. A number that is not finite fails.
    """

    says: str
    form: Form = "noted"
    low: float | None = None
    high: float | None = None
    refuted: float | None = None

    __repr__ = described_fields

    def outcome(self, value: float) -> Outcome:
        if self.form == "noted":
            return "noted"
        if not math.isfinite(value):
            return "failed"
        if self.high is not None:
            passed = value <= self.high
            doubt = self.refuted is not None and value < self.refuted
        else:
            passed = value >= (self.low or 0.0)
            doubt = self.refuted is not None and value > self.refuted
        return "passed" if passed else "undecided" if doubt else "failed"


_ROW = re.compile(r"(\w+)(?: ([≤≥]) (\S+?)(?: \(refuted at (\S+)\))?)?: (.+)")


def table(text: str) -> dict[str, Rule]:
    """Decision rules, one a line under the form they speak for; longer lines go on indented.

    >>> rules = table('''
    ...   statement:
    ...     error ≤ 0.1 (refuted at 0.5): of the estimate
    ...   noted:
    ...     steps: until it was found
    ... ''')
    >>> rules["error"].outcome(0.3)
    'undecided'

    Raises:
        ValueError: a line is none of these, or a name stands twice.
    """
    rules: dict[str, Rule] = {}
    form: Form = "noted"
    for line in re.sub(r"\n {6,}", " ", dedent(text)).split("\n"):
        if (heading := line.strip().removesuffix(":")) in get_args(Form):
            form = cast(Form, heading)
        elif heading:
            row = _ROW.fullmatch(line.strip())
            if row is None or row[1] in rules:
                raise ValueError(f"expected `name ≤ bound: what it is`, each name once: {line!r}")
            name, sign, bound, refuted, says = row.groups()
            low, high = (float(bound) if sign == side else None for side in "≥≤")
            if (sign is None) != (form == "noted"):
                raise ValueError(f"numbers are noted, or else have a bound: {line!r}")
            rules[name] = Rule(says, form, low, high, float(refuted) if refuted else None)
    return rules


@dataclass(frozen=True)
class Measured:
    """A number, the rule it is judged by, and its standard error where it has one."""

    name: str
    value: float
    rule: Rule
    error: float | None = None

    __repr__ = described_fields

    @property
    def form(self) -> Form:
        return self.rule.form

    @property
    def outcome(self) -> Outcome:
        return self.rule.outcome(self.value)


def verdict(numbers: Sequence[Measured]) -> Verdict:
    """What the numbers say, by themselves.

    A control that fails, a number that is not finite, or no number of the statement leaves the
    question open. Otherwise the statement holds if each of its numbers does; if one fails, it holds
    with a correction if there is one whose numbers all hold. Without a correction it does not hold
    in general, and neither if the correction fails: a wrong correction, even beside numbers of the
    statement that pass, says that something is wrong. Numbers in doubt leave it open.

    >>> drafted = Measured("gap", 0.3, Rule("as drafted", "statement", high=1e-10))
    >>> verdict([drafted])
    'does not hold in general'
    >>> verdict([drafted, Measured("mended", 0.0, Rule("with weights", "correction", high=1e-10))])
    'holds with a correction'
    """
    outcomes = {
        form: {x.outcome for x in numbers if x.form == form}
        for form in ("statement", "correction", "control")
    }
    statement, correction = outcomes["statement"], outcomes["correction"]
    judged = [x.value for x in numbers if x.form in ("statement", "correction")]
    if outcomes["control"] - {"passed"} or not statement or not all(map(math.isfinite, judged)):
        return OPEN
    if "failed" in correction:
        return FAILS
    if "failed" in statement:
        return OPEN if "undecided" in correction else CORRECTED if correction else FAILS
    return OPEN if "undecided" in statement | correction else HOLDS


def correction_title(said: str) -> str:
    """What a correction is called beside a verdict: one that fails must not read as true.

    >>> correction_title("does not hold in general")
    'Proposed correction, which fails too'
    """
    known = {FAILS: "Proposed correction, which fails too", OPEN: "Proposed correction"}
    return known.get(said, "Correction")


class Trial:
    """What an experiment may use: random numbers that depend on the seed alone, and its size."""

    def __init__(self, seed: int = 0, quick: bool = False) -> None:
        self.seed, self.quick = seed, quick
        self.generator = torch.Generator().manual_seed(seed)

    def __repr__(self) -> str:
        return f"Trial(seed={self.seed}, quick={self.quick})"

    def size(self, full: int, quick: int) -> int:
        """The first number, or where time is short the second."""
        return quick if self.quick else full

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in double precision."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers between 0 and 1 in double precision."""
        return torch.rand(*shape, dtype=torch.float64, generator=self.generator)


class Found:
    """What an experiment measured.

    Args:
        numbers: a value for each rule, or a pair of a value and its standard error.
        seen: what else the finding tells or the picture shows, by name.
    """

    def __init__(self, numbers: Mapping[str, Value], **seen: Any) -> None:
        self.numbers, self.seen = numbers, seen

    __repr__ = described_fields


@dataclass(frozen=True)
class Picture:
    """A figure, drawn only where somebody wants it: ``draw`` fills a house-style figure."""

    draw: Callable[[Any], None]
    caption: str
    size: tuple[float, float] = (7.0, 3.0)

    __repr__ = described_fields


@dataclass(frozen=True)
class Result:
    """What an experiment came to: numbers with their rules, a sentence, perhaps a picture."""

    numbers: Sequence[Measured]
    finding: str
    picture: Picture | None = None

    def __repr__(self) -> str:
        return f"Result({verdict(self.numbers)}; {len(self.numbers)} numbers)"

    def _repr_html_(self) -> str:
        from cumulant.lab.claims.display import result_html

        return result_html(self)


@dataclass(frozen=True)
class Claim:
    """A statement, where it stands, what decides it, and the experiment that measures that.

    ``finding`` and ``caption`` are format strings over the numbers and whatever else was seen.

    Attributes:
        id: T1 to T42, or the name of a system the paper leans on.
        title: a few words.
        evidence: what the verdict rests on, one of `EVIDENCE`.
        statement: the claim in our own words, in plain text.
        source: draft and equation.
        formula: TeX, for pages.
        recorded: the verdict the experiment came to when it was written down.
        rules: the numbers, and what each has to be.
        finding: what the numbers say, in a sentence or two.
        caption: what the picture shows.
        size: of the picture, in inches.
        correction: what the draft's form lacks, in words, where it lacks something.
        slips: misprints and wrong names in the draft, which leave what it claims as it is.
        bounds: why the bounds are where they are, if not for rounding.
        systems: the names under which this claim is known elsewhere.
        theory: the section of the theory that derives it; by default the one of its own id.
        tests: files with tests of the law itself, from the root of the repository.
        file: where the experiment stands, if not in the module of ``measure``.
        again: the command that makes the experiment again, if not `cumulant claims`.
        needs: packages beyond the core that the experiment imports.
        measure: takes a `Trial`, returns what it `Found`.
        draw: fills a figure with what was seen.
    """

    id: str
    title: str
    evidence: Evidence
    statement: str
    source: str
    formula: str
    recorded: Verdict
    rules: Mapping[str, Rule]
    finding: str
    caption: str = ""
    size: tuple[float, float] = (7.0, 3.0)
    correction: str = ""
    slips: tuple[str, ...] = ()
    bounds: str = ""
    systems: tuple[str, ...] = ()
    theory: str = ""
    tests: tuple[str, ...] = ()
    file: str = ""
    again: str = ""
    needs: tuple[str, ...] = ()
    measure: Callable[[Trial], Found] | None = None
    draw: Callable[[Any, Any], None] | None = None

    def __repr__(self) -> str:
        return f"Claim({self.id}: {self.title}; {self.recorded}, by {self.evidence})"

    def _repr_html_(self) -> str:
        from cumulant.lab.claims.display import claim_html

        return claim_html(self)

    def experiment(self, trial: Trial) -> Result:
        """Measure, and put every number beside its rule.

        Raises:
            ValueError: the numbers are not those of the rules.
        """
        if self.measure is None:
            raise ValueError(f"{self.id} has no experiment")
        found = self.measure(trial)
        if odd := found.numbers.keys() ^ self.rules.keys():
            raise ValueError(f"{self.id}: {', '.join(sorted(odd))} measured or ruled, not both")
        if odd := found.numbers.keys() & found.seen.keys():
            raise ValueError(f"{self.id}: {', '.join(sorted(odd))} names a number and what is seen")
        numbers = [_measured(name, found.numbers[name], rule) for name, rule in self.rules.items()]
        told = found.seen | {x.name: x.value for x in numbers}
        picture, draw = None, self.draw
        if draw is not None:
            seen = SimpleNamespace(**told)
            caption = _told(self.caption, told)
            picture = Picture(lambda figure: draw(figure, seen), caption, self.size)
        return Result(numbers, _told(self.finding, told), picture)


def _measured(name: str, value: Value, rule: Rule) -> Measured:
    if isinstance(value, tuple):
        return Measured(name, float(value[0]), rule, float(value[1]))
    return Measured(name, float(value), rule)


def _told(text: str, told: Mapping[str, Any]) -> str:
    """The sentence with its numbers; what is negative gets a minus, not a hyphen."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", text.format(**told))
