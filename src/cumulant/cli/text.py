"""Text of files and models on a terminal."""

from __future__ import annotations

from rich.markup import escape

from cumulant.core.files import printable

__all__ = ["as_text"]


def as_text(text: object) -> str:
    """Shown as it is: neither rich's markup nor codes of the terminal act in it."""
    return escape(printable(text))
