"""What a claim is, what an experiment may say of it, and how numbers become a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = [
    "CORRECTED",
    "FAILS",
    "HOLDS",
    "OPEN",
    "VERDICTS",
    "Claim",
    "Evidence",
    "Measured",
    "Picture",
    "Trial",
    "at_least",
    "at_most",
    "noted",
    "verdict",
]

Verdict = Literal["holds", "holds with a correction", "does not hold in general", "open"]
Form = Literal["statement", "correction", "control", "noted"]
Outcome = Literal["passed", "failed", "undecided", "noted"]

HOLDS: Verdict = "holds"
CORRECTED: Verdict = "holds with a correction"
FAILS: Verdict = "does not hold in general"
OPEN: Verdict = "open"
VERDICTS: tuple[Verdict, ...] = (HOLDS, CORRECTED, FAILS, OPEN)


@dataclass(frozen=True)
class Measured:
    """One number, what it is, and what it would have to be.

    ``form`` says whom it speaks for: the *statement* as the draft makes it, its *correction*, or a
    *control* without which the experiment would mean nothing. ``refuted`` is where doubt ends:
    between the bound and it, the number decides nothing. A number that is not finite fails.
    """

    name: str
    value: float
    says: str
    form: Form = "noted"
    low: float | None = None
    high: float | None = None
    refuted: float | None = None
    error: float | None = None

    @property
    def outcome(self) -> Outcome:
        if self.form == "noted":
            return "noted"
        if not math.isfinite(self.value):
            return "failed"
        if self.high is not None:
            beyond, limit = self.value - self.high, self.refuted
            doubt = limit is not None and self.value < limit
        else:
            beyond, limit = (self.low or 0.0) - self.value, self.refuted
            doubt = limit is not None and self.value > limit
        return "passed" if beyond <= 0 else "undecided" if doubt else "failed"


def at_most(
    name: str,
    value: float | Tensor,
    bound: float,
    says: str,
    *,
    form: Form = "statement",
    refuted: float | None = None,
    error: float | None = None,
) -> Measured:
    """A number that must not exceed a bound; from ``refuted`` on the contrary is shown."""
    return Measured(name, float(value), says, form, None, float(bound), refuted, error)


def at_least(
    name: str,
    value: float | Tensor,
    bound: float,
    says: str,
    *,
    form: Form = "statement",
    refuted: float | None = None,
    error: float | None = None,
) -> Measured:
    """A number that must reach a bound; from ``refuted`` down the contrary is shown."""
    return Measured(name, float(value), says, form, float(bound), None, refuted, error)


def noted(name: str, value: float | Tensor, says: str, *, error: float | None = None) -> Measured:
    """A number worth knowing on which nothing hangs."""
    return Measured(name, float(value), says, error=error)


def verdict(numbers: Sequence[Measured]) -> Verdict:
    """What the numbers say, by themselves.

    A control that fails, a number that is not finite, or no number of the statement leaves the
    question open. Otherwise the statement holds if each of its numbers does; if one fails, it holds
    with a correction if there is one whose numbers all hold. Without a correction, or with one that
    fails, it does not hold in general. Numbers in doubt leave it open.

    >>> verdict([at_most("gap", 1e-12, 1e-10, "of both sides")])
    'holds'
    >>> verdict([at_most("gap", 0.3, 1e-10, "as drafted"),
    ...          at_most("mended", 1e-12, 1e-10, "with weights", form="correction")])
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


@dataclass(frozen=True)
class Picture:
    """A figure, drawn only where somebody wants it: ``draw`` fills a house-style figure."""

    draw: Callable[[Any], None]
    caption: str
    size: tuple[float, float] = (7.0, 3.0)


@dataclass(frozen=True)
class Evidence:
    """What an experiment found: numbers, one sentence about them, perhaps a picture."""

    numbers: Sequence[Measured]
    finding: str
    picture: Picture | None = None


class Trial:
    """What an experiment may use: random numbers that depend on the seed alone, and its size."""

    def __init__(self, seed: int = 0, quick: bool = False) -> None:
        self.seed, self.quick = seed, quick
        self.generator = torch.Generator().manual_seed(seed)

    def size(self, full: int, quick: int) -> int:
        """The first number, or where time is short the second."""
        return quick if self.quick else full

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in double precision."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers between 0 and 1 in double precision."""
        return torch.rand(*shape, dtype=torch.float64, generator=self.generator)


@dataclass(frozen=True)
class Claim:
    """A statement, where it stands, and the experiment that judges it.

    Attributes:
        id: T1 to T33, or the name of a system the paper leans on.
        title: a few words.
        statement: the claim in our own words, in plain text.
        source: draft and equation.
        formula: TeX, for pages.
        recorded: the verdict the experiment came to when it was written down.
        experiment: takes a `Trial`, returns `Evidence`.
        correction: what the draft's form lacks, in words, where it lacks something.
        systems: the names under which this claim is known elsewhere.
        tests: files with tests of the law itself, from the root of the repository.
        needs: packages beyond the core that the experiment imports.
    """

    id: str
    title: str
    statement: str
    source: str
    formula: str
    recorded: Verdict
    experiment: Callable[[Trial], Evidence]
    correction: str = ""
    systems: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
