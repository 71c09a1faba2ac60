"""Human-readable numbers and facts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

__all__ = ["count", "deviation", "fact", "finite", "flat", "number", "share"]

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def finite(value: Any) -> bool:
    """Whether this is a number that a chart can plot."""
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def number(value: float, digits: int = 3) -> str:
    """Three significant digits, a true minus sign, powers of ten for very large or small values."""
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
    """A fraction as a percentage; only exactly 0 rounds to 0%, and only exactly 1 to 100%."""
    percent = 100 * value
    if 0 < percent < 0.1:
        return "under 0.1%"
    if 99.9 < percent < 100:
        return "over 99.9%"
    fine = 0 < percent < 10 or 90 < percent < 100
    return f"{percent:.1f}%" if fine else f"{percent:.0f}%"


def deviation(value: float) -> str:
    """A standard deviation relative to its mean: a percentage, or a factor if >= 2.

    Estimates that large depend on a few largest samples and are biased low, so they are given as
    lower bounds.
    """
    return share(value) if value < 2 else f"more than {number(math.floor(value))} times its mean"


def count(amount: int, noun: str) -> str:
    """`3 heads`, `1 head`."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def flat(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Flatten facts to one level: `versions: {torch: 2}` becomes `versions torch: 2`."""
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        label = str(name).replace("_", " ")
        if isinstance(value, Mapping):
            rows += [(f"{label} {inner}", x) for inner, x in flat(cast(Mapping[str, Any], value))]
        elif value is not None:
            rows.append((label, value))
    return rows


def fact(value: Any) -> str:
    """A fact's value: numbers with few digits, lists with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list | tuple):
        return ", ".join(fact(v) for v in cast(Iterable[Any], value))
    return str(value)
