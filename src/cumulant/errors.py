"""The one exception for input that cannot mean anything."""

from __future__ import annotations


class InputError(ValueError, RuntimeError):
    """What was expected, what came, and the likely remedy, in one line.

    It is a ValueError, and a RuntimeError too because that is what torch's own attention raises
    and drop-in code may catch.
    """
