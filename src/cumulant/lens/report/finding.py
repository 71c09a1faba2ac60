"""`Finding`: what an examination found, in a sentence with its numbers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Finding"]


class Finding(NamedTuple):
    """A headline, a sentence with the numbers, their source, and the section's name.

    The map of heads shows ``statistic`` and marks ``head`` (layer, head), where there are any.
    """

    headline: str
    sentence: str
    evidence: str
    section: str
    statistic: str = ""
    head: tuple[int, int] | None = None
