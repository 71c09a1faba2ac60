"""Numbers of the tables: out of data frames, and rounded for a file."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np

from cumulant.pages import finite

__all__ = ["Frame", "column", "has", "shortened", "shortened_all"]

# A pandas data frame; pandas is optional and carries no complete types.
Frame = Any


def has(frame: Frame | None, *names: str) -> TypeGuard[Frame]:
    """Whether the table is there, has these columns, and each holds something."""
    if frame is None:
        return False
    return all(n in frame.columns and _holds(frame[n]) for n in names)


def _holds(cells: Any) -> bool:
    """Whether any cell is a text or a finite number; stops at the first."""
    return any(isinstance(cell, str) or finite(cell) for cell in cells)


def column(frame: Frame | None, name: str) -> list[Any]:
    """A column as plain Python values, None where there is nothing; [] for a column not there."""
    if frame is None or name not in frame.columns:
        return []
    cells: list[Any] = frame[name].tolist()
    return [cell if isinstance(cell, str) or finite(cell) else None for cell in cells]


def shortened(value: Any, digits: int = 5) -> Any:
    """A cell as JSON should hold it: few digits, whole numbers whole, None for what is absent."""
    if isinstance(value, str) or value is None:
        return value
    if not finite(value):
        return None
    if isinstance(value, bool):
        return value
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def shortened_all(values: Any, digits: int) -> list[Any]:
    """`shortened` of a whole array at once, as nested lists.

    A whole number over an exact power of ten is the float nearest to that decimal, which is
    therefore how Python and JSON write it.
    """
    known = np.isfinite(values)
    sizes = np.abs(np.where(known & (values != 0), values, 1.0))
    places = np.clip(digits - 1 - np.floor(np.log10(sizes)), -22, 22)
    up, down = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
    short = np.rint(np.where(known, values, 0.0) * up / down) / up * down
    cells = short.astype(object)
    cells[~known] = None
    return cells.tolist()
