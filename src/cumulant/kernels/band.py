"""Bands of pairs: causal attention and windows, without a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Band"]


@dataclass(frozen=True)
class Band:
    """Visible pairs: ``lower <= j - i <= upper``; ``None`` leaves a side unbounded.

    Causal attention is ``upper=0``, aligned to the last key ``upper=N-M``, a sliding window of w
    past keys adds ``lower=-w``.
    """

    lower: int | None = None
    upper: int | None = None

    @property
    def open(self) -> bool:
        return self.lower is None and self.upper is None

    def shifted(self, offset: int) -> Band:
        """The same pairs with keys numbered from `offset` and queries from 0."""
        sides = (None if x is None else x - offset for x in (self.lower, self.upper))
        return Band(*sides)

    def reach(self, rows: range, keys: int) -> range:
        """The range of keys visible to any of these queries."""
        start = 0 if self.lower is None else max(0, rows.start + self.lower)
        stop = keys if self.upper is None else min(keys, rows.stop + self.upper)
        return range(min(start, keys), max(start, stop))

    def excludes(self, rows: range, columns: range) -> bool:
        """Whether no pair of the tile is visible."""
        nearest = columns.start - (rows.stop - 1)
        farthest = (columns.stop - 1) - rows.start
        return (self.upper is not None and nearest > self.upper) or (
            self.lower is not None and farthest < self.lower
        )

    def hidden(self, rows: range, columns: range, device: torch.device) -> Tensor | None:
        """True where a pair is *not* visible; ``None`` if the whole tile is visible."""
        nearest = columns.start - (rows.stop - 1)
        farthest = (columns.stop - 1) - rows.start
        above = self.upper is not None and farthest > self.upper
        below = self.lower is not None and nearest < self.lower
        if not (above or below):
            return None
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        offset = torch.arange(columns.start, columns.stop, device=device)[None, :] - i
        hidden = torch.zeros_like(offset, dtype=torch.bool)
        if above and self.upper is not None:
            hidden |= offset > self.upper
        if below and self.lower is not None:
            hidden |= offset < self.lower
        return hidden
