"""Derivatives along lines by finite differences, with an error bar.

A central n-th difference with step h has an error in h^2, h^4, ...; Richardson's extrapolation
removes these terms one by one (Ridders' tableau). The entry that agrees best with its neighbors,
rounding noise included, is the value, and that agreement is its error bar. One-sided differences
tell a kink at the point from a smooth function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

__all__ = ["Difference", "mixed_derivative", "noise_of"]

Line = Callable[[float], float]

LONGEST, LEVELS = 0.125, 13  # steps 1/8, 1/16, ..., 3e-5 of the size of the input
_SHORT = 2.0**-17  # over so short a step a smooth function is a cubic up to rounding


@dataclass(frozen=True)
class Difference:
    """A derivative by finite differences: the value, how far it may be off, and smoothness."""

    value: float
    error: float
    kink: bool


def noise_of(line: Line) -> float:
    """Rounding noise of a function of one variable, from high differences of close values."""
    values: list[float] = [line(k * _SHORT) for k in range(-4, 5)]
    floor = 2.0**-52 * max(map(abs, values))
    order, estimates = 0, list[float]()
    while len(values) > 3:
        order += 1
        values = [b - a for a, b in pairwise(values)]
        if order >= 4:  # the cubic has gone by now
            size = math.sqrt(sum(x * x for x in values) / len(values))
            estimates.append(size / math.sqrt(math.comb(2 * order, order)))
    return max(floor, *estimates)


def _stencil(order: int, side: int) -> list[tuple[float, int]]:
    """(node in steps, weight) of the n-th difference: central, or to one side of 0."""
    shift = -order / 2 if side == 0 else (0 if side > 0 else -order)
    return [(k + shift, (-1) ** (order - k) * math.comb(order, k)) for k in range(order + 1)]


def _extrapolated(line: Line, order: int, side: int, noise: float) -> tuple[float, float, float]:
    """(derivative, error bar, rounding in it): the best entry of the tableau."""
    ratio = 4.0 if side == 0 else 2.0  # an error in h^2, h^4, ...; to one side in h, h^2, ...
    best, error, noisy = math.nan, math.inf, 0.0
    above: list[float] = []
    for level in range(LEVELS):
        h = LONGEST * 2.0**-level
        difference = sum(w * line(k * h) for k, w in _stencil(order, side))
        row = [difference / h**order]
        rounding = noise * 2**order / h**order
        for m in range(1, level + 1):
            factor = ratio**m
            row.append((factor * row[-1] - above[m - 1]) / (factor - 1))
            rounding *= (factor + 1) / (factor - 1)
            spread = max(abs(row[m] - row[m - 1]), abs(row[m] - above[m - 1]))
            if spread + rounding < error:
                best, error, noisy = row[m], spread + rounding, rounding
        above = row
    return best, error, noisy


def _line_derivative(line: Line, order: int, noise: float) -> Difference:
    line = cache(line)
    value, error, _ = _extrapolated(line, order, 0, noise)
    right, right_error, right_noise = _extrapolated(line, order, +1, noise)
    left, left_error, left_noise = _extrapolated(line, order, -1, noise)
    apart = abs(right - left)
    # Both sides must have settled far below their distance: their error bars are the least sure,
    # and a function with a jump or much noise has no sides to compare.
    kink = 200 * (right_error + left_error) < apart
    # Central differences of an even function, sqrt(|x|) say, agree on 0 whether or not there is a
    # derivative. Where the sides settle on nothing, and not for noise, neither has the center.
    sides, size = right_error + left_error, max(abs(value), abs(right), abs(left))
    if not sides <= max(0.5 * size, 10 * (right_noise + left_noise)):
        error = max(error, sides)
    return Difference(value, error, kink)


def mixed_derivative(
    line_along: Callable[[tuple[float, ...]], Line], order: int, noise: float
) -> Difference:
    """D^n g[v_1, ..., v_n] from n-th derivatives along the lines v_1 ± v_2 ± ... (polarization).

    Args:
        line_along: the coefficients of v_1, ..., v_n to g along that line.
        order: n.
        noise: the rounding noise of g.
    """
    value = error = 0.0
    kink = False
    for signs in product((1.0, -1.0), repeat=order - 1):
        d = _line_derivative(line_along((1.0, *signs)), order, noise)
        weight = math.prod(signs) / (2 ** (order - 1) * math.factorial(order))
        value, error, kink = value + weight * d.value, error + abs(weight) * d.error, kink or d.kink
    return Difference(value, error, kink)
