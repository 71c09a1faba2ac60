"""The exceptions: input that means nothing, work that missed its goal, ranks that were lost."""

from __future__ import annotations

from typing import Any


class InputError(ValueError, RuntimeError):
    """What was expected, what came, and the likely remedy, in one line.

    It is a ValueError, and a RuntimeError too because that is what torch's own attention raises
    and drop-in code may catch.
    """


class ConvergenceError(RuntimeError):
    """An iteration that did not reach its goal: what became of it, and what to try.

    ``result`` holds what there is: the same object that ``throw=False`` returns.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class GroupError(RuntimeError):
    """Processes of a group that cannot go on together: one died, or they are in different calls."""
