"""Numbers of the tables: out of data frames, rounded for a file, and written for people."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np

__all__ = [
    "Frame",
    "column",
    "count",
    "deviation",
    "finite",
    "has",
    "number",
    "share",
    "shortened",
    "shortened_all",
]

# A pandas data frame; pandas is optional and carries no complete types.
Frame = Any

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def has(frame: Frame | None, *names: str) -> TypeGuard[Frame]:
    """Whether the table is there, has these columns, and each holds something."""
    if frame is None:
        return False
    return all(n in frame.columns and _holds(frame[n]) for n in names)


def _holds(cells: Any) -> bool:
    """Whether any cell is a text or a finite number; stops at the first."""
    return any(isinstance(cell, str) or finite(cell) for cell in cells)


def finite(value: Any) -> bool:
    """Whether a cell holds a number that a chart can show."""
    try:
        return math.isfinite(value)
    except TypeError:
        return False


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


def number(value: float, digits: int = 3) -> str:
    """Three significant digits, a true minus sign, powers of ten where digits would mislead."""
    if not finite(value):
        return "–"
    size = abs(value)
    if value != 0 and (size < 1e-3 or size >= 1e6):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{mantissa}·10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    elif size >= 10 ** (digits - 1):
        text = f"{value:,.0f}"
    else:
        text = f"{value:.0f}" if value == int(value) else f"{value:#.{digits}g}"
    return text.replace("-", "−")


def share(value: float) -> str:
    """A fraction as a percentage that never rounds something to nothing, nor all but all to all."""
    percent = 100 * value
    if 0 < percent < 0.1:
        return "under 0.1%"
    if 99.9 < percent < 100:
        return "over 99.9%"
    fine = 0 < percent < 10 or 90 < percent < 100
    return f"{percent:.1f}%" if fine else f"{percent:.0f}%"


def deviation(value: float) -> str:
    """A standard deviation relative to its mean: a percentage, or from 2 on a factor.

    Estimates that large hang on the few largest samples and fall short, so they are lower bounds.
    """
    return share(value) if value < 2 else f"more than {number(math.floor(value))} times its mean"


def count(amount: int, noun: str) -> str:
    """`3 heads`, `1 head`."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"
