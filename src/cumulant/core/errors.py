"""The exceptions: input that means nothing, work that missed its goal, ranks that were lost."""

from __future__ import annotations

from typing import Any


class InputError(ValueError, RuntimeError):
    """What was expected, what came, and the likely remedy, in one line.

    It is a ValueError, and a RuntimeError too because that is what torch's own attention raises
    and drop-in code may catch.
    """


class UnknownFieldError(InputError):
    """A field of a result that nothing at hand determines; ``why`` says what is missing."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} is not known here: {why}")
        self.name = name
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return UnknownFieldError, (self.name, self.why)


class ConvergenceError(RuntimeError):
    """An iteration did not reach its goal. The message is a diagnosis: what happened, the likely
    cause, what to try.

    ``result`` is the object that ``throw=False`` returns.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class NoSolutionError(ConvergenceError, InputError):
    """The problem has no solution: for example, a mean outside the convex hull of the support.

    The input is at fault, so it is an `InputError`; and no iteration can reach the goal, so it is
    a `ConvergenceError` with a ``result``. Catch whichever fits: code that checks its input, or
    code that falls back when a solver fails.
    """


class GroupError(RuntimeError):
    """The processes of a group cannot continue: one died, or they are in different calls."""
