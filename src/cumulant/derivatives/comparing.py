"""One function in every word against finite differences: the rows of a report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cumulant.derivatives.differences import Difference, mixed_derivative, noise_of
from cumulant.derivatives.problem import Problem
from cumulant.derivatives.reporting import Row, Status
from cumulant.derivatives.words import evaluate_word, words

__all__ = ["Options", "compare"]


@dataclass(frozen=True)
class Options:
    """What a check is asked for; `deadline` is on the clock of ``time.monotonic``."""

    order: int
    seed: int
    tolerance: float
    deadline: float

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


def compare(problem: Problem, options: Options) -> tuple[Row, ...]:
    """One row per word up to the order asked for."""
    directions = problem.directions(options.order, options.seed)
    noise = noise_of(problem.line((1.0,), directions))
    expected: dict[int, Difference] = {}
    kink = 0  # the lowest order at which there is one
    rows: list[Row] = []
    with torch.no_grad():
        base = problem.scalar(*problem.point).item()
    for word in words(options.order):
        n = len(word)
        if options.late:
            rows.append(Row(word, "left out", note="out of time"))
            continue
        if n not in expected:
            along = partial(problem.line, directions=directions)
            expected[n] = mixed_derivative(along, n, noise)
            kink = kink or (n if expected[n].kink else 0)
        if kink:
            rows.append(Row(word, "kink", note=f"one-sided derivatives of order {kink} differ"))
            continue
        try:
            seen: list[float] = []
            scalar = partial(_watched, problem, seen)
            value = evaluate_word(word, scalar, problem.point, directions[:n])
        except Exception as error:
            note = (str(error).strip().splitlines() or [""])[0][:100]
            rows.append(Row(word, "not supported", note=f"{type(error).__name__}: {note}"))
            continue
        if any(not abs(x - base) <= 1e-9 * max(problem.scale, abs(base)) for x in seen):
            note = "f has another value in this mode: it draws other random numbers"
            rows.append(Row(word, "unclear", note=note))
            continue
        rows.append(_compared(word, value, expected[n], problem.scale, options.tolerance))
    return tuple(rows)


def _watched(problem: Problem, seen: list[float], *x: Tensor) -> Tensor:
    """The scalar, and a note of its value, which must be the same in every mode."""
    y = plain = problem.scalar(*x)
    while torch._C._functorch.is_functorch_wrapped_tensor(plain):  # pyright: ignore[reportAttributeAccessIssue]
        plain = torch._C._functorch.get_unwrapped(plain)  # pyright: ignore[reportAttributeAccessIssue]
    seen.append(plain.detach().item())
    return y


def _compared(word: str, value: float, d: Difference, scale: float, tolerance: float) -> Row:
    size = max(abs(value), abs(d.value))
    bar = 3 * d.error
    apart = abs(value - d.value)
    status: Status = "right"
    note = ""
    if not apart <= tolerance * size + bar:  # NaN is wrong
        status = "wrong" if d.error < 0.1 * max(size, scale) or value != value else "unclear"
    elif bar > 10 * tolerance * max(size, scale):
        status = "unclear"
    if status == "unclear":
        note = "finite differences did not settle: noise, a jump, or a kink close by"
    return Row(word, status, value, d.value, d.error, note)
