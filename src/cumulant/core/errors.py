"""Exceptions: invalid input, failed convergence, lost ranks."""

from __future__ import annotations

from typing import Any


class InputError(ValueError, RuntimeError):
    """Invalid input; the message says what was expected, what was received and the likely remedy.

    It is a ValueError, and also a RuntimeError because torch's own attention raises that and code
    written for it may catch it.
    """


class UnknownFieldError(InputError):
    """A result field that cannot be determined from the input; ``why`` says what is missing."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} is not known here: {why}")
        self.name = name
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return UnknownFieldError, (self.name, self.why)


class ConvergenceError(RuntimeError):
    """An iteration did not converge. The message says what happened, the likely cause and what to
    try.

    ``result`` is the object that ``throw=False`` returns.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class NoSolutionError(ConvergenceError, InputError):
    """The problem has no solution: for example, a mean outside the convex hull of the support.

    It is an `InputError` because the input is at fault, and a `ConvergenceError` with a ``result``
    because no iteration can converge. Catch the one that fits: the first to check input, the
    second to fall back when a solver fails.
    """


class GroupError(RuntimeError):
    """A process group cannot continue: a rank died, or the ranks are in different calls."""
