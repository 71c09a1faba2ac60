"""One function in every word against finite differences: the rows of a report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten

import torch
from torch import Tensor

from cumulant.core.typed import functorch
from cumulant.derivatives.differences import Difference, Line, mixed_derivative, noise_of
from cumulant.derivatives.problem import Problem
from cumulant.derivatives.reporting import Row, Status
from cumulant.derivatives.words import Tensors, evaluate_word, words

__all__ = ["Options", "compare"]

_UNSETTLED = "finite differences did not settle: noise, a jump, or a kink close by"


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
    along = partial(_in_time, options, problem, directions)
    expected: dict[int, Difference] = {}
    kink = unsettled = 0  # the lowest order at which there is one, or differences do not settle
    rows: list[Row] = []
    with torch.no_grad():
        base = problem.scalar(*problem.point).item()
    for word in words(options.order):
        n = len(word)
        try:
            if n not in expected:
                noise = noise_of(along((1.0,)))
                expected[n] = mixed_derivative(along, n, noise)
                kink = kink or (n if expected[n].kink else 0)
                rough = _is_rough(expected[n], problem.scale, options.tolerance)
                unsettled = unsettled or (n if rough else 0)
            _stop_if_late(options)
        except _OutOfTimeError:
            rows.append(Row(word, "left out", note="out of time"))
            continue
        if kink:
            rows.append(Row(word, "kink", note=f"one-sided derivatives of order {kink} differ"))
            continue
        try:
            seen: list[float] = []
            scalar = partial(_watched, problem, seen)
            value = evaluate_word(word, scalar, problem.point, directions[:n])
        except Exception as error:
            note = shorten((str(error).strip().splitlines() or [""])[0], 160, placeholder=" ...")
            rows.append(Row(word, "not supported", note=f"{type(error).__name__}: {note}"))
            continue
        if any(not abs(x - base) <= 1e-9 * max(problem.scale, abs(base)) for x in seen):
            note = "f has another value in this mode: it draws other random numbers"
            rows.append(Row(word, "unclear", note=note))
            continue
        row = _compared(word, value, expected[n], problem.scale, options.tolerance)
        if unsettled and unsettled < n:  # a derivative of what has none, as far as can be seen
            row = _unclear(row)
        rows.append(row)
    if unsettled in expected and _agree(rows, unsettled, options.tolerance):
        # Among many kinks the error bar itself is too small, and torch contradicts only it.
        rows = [
            _unclear(r) if r.status == "wrong" and len(r.word) == unsettled else r for r in rows
        ]
    return tuple(rows)


def _unclear(row: Row) -> Row:
    return replace(row, status="unclear", note=_UNSETTLED)


def _agree(rows: list[Row], order: int, tolerance: float) -> bool:
    """Whether all words of this length give one number."""
    found = [r.value for r in rows if len(r.word) == order and r.value is not None]
    return max(found) - min(found) <= tolerance * max(map(abs, found)) if found else False


class _OutOfTimeError(Exception):
    """The time budget is spent."""


def _stop_if_late(options: Options) -> None:
    if options.late:
        raise _OutOfTimeError


def _in_time(
    options: Options,
    problem: Problem,
    directions: tuple[Tensors, ...],
    coefficients: tuple[float, ...],
) -> Line:
    """`Problem.line` until the time is out: a single difference may take fifty calls of f."""
    line = problem.line(coefficients, directions)

    def timed(t: float) -> float:
        _stop_if_late(options)
        return line(t)

    return timed


def _watched(problem: Problem, seen: list[float], *x: Tensor) -> Tensor:
    """The scalar, and a note of its value, which must be the same in every mode."""
    y = plain = problem.scalar(*x)
    while functorch.is_functorch_wrapped_tensor(plain):
        plain = functorch.get_unwrapped(plain)
    seen.append(plain.detach().item())
    return y


def _is_rough(d: Difference, scale: float, tolerance: float) -> bool:
    """Whether a difference is too coarse to call anything right."""
    return not 3 * d.error <= 10 * tolerance * max(abs(d.value), scale)


def _compared(word: str, value: float, d: Difference, scale: float, tolerance: float) -> Row:
    size = max((abs(x) for x in (value, d.value) if math.isfinite(x)), default=0.0)
    status: Status = "right"
    if not abs(value - d.value) <= tolerance * size + 3 * d.error:  # NaN is wrong
        status = "wrong" if d.error < 0.1 * max(size, scale) else "unclear"
    elif _is_rough(d, max(size, scale), tolerance):
        status = "unclear"
    return Row(word, status, value, d.value, d.error, _UNSETTLED if status == "unclear" else "")
