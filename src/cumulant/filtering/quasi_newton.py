"""BFGS with a strong Wolfe line search, as a generator that asks for the values it needs.

`minimize` yields points ``(k, P)`` and is sent their values and slopes, so that a driver can run
many searches side by side and evaluate all their points in one batch. It begins with the Hessian at
the start, from the slopes at P points around it, which saves most of the steps that would otherwise
go into learning the scales.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Asked", "minimize"]

_T = TypeVar("_T")
Array = NDArray[np.float64]
Asked = Generator[Array, tuple[Array, Array], _T]

# Armijo's and Wolfe's constants; evaluations of one line search; the least relative change.
DECREASE, CURVATURE, MOST_TRIALS, LEAST_CHANGE = 1e-4, 0.9, 25, 1e-13
# Steps of the differences of slopes, and up to how many coordinates they are taken.
STEP, MOST_COORDINATES = 1e-5, 60
# No step tries to move a coordinate further at first: far away lies another maximum's country.
LONGEST = 1.0
# Eigenvalues of the Hessian count as at least this share of the largest.
LEAST_SHARE = 1e-4


class _Place(NamedTuple):
    """A point of a line: how far along, value, slope, and slope along the line."""

    length: float
    value: float
    slope: Array
    along: float


def minimize(start: Array, tol: float, max_steps: int, count: list[int]) -> Asked[None]:
    """Steps until no component of the slope exceeds `tol`, or nothing more is gained.

    Args:
        start: where to begin, ``(P,)``.
        tol: largest slope at the end.
        max_steps: of the search; each may take several evaluations.
        count: count[0] is set to the number of steps done.
    """
    x, P = start, len(start)
    around = STEP * np.eye(P) if P <= MOST_COORDINATES else np.zeros((0, P))
    values, slopes = yield x + np.concatenate([np.zeros((1, P)), around])
    value, slope = float(values[0]), slopes[0]
    if not math.isfinite(value):
        return
    steepest = _scaled(slope)
    inverse = _inverse((slopes[1:] - slope) / STEP, steepest)
    fresh = False  # whether the inverse is the plain one
    while count[0] < max_steps and not abs(slope).max() <= tol:
        direction = -inverse @ slope
        direction = direction * min(1.0, LONGEST / max(float(abs(direction).max()), 1e-300))
        found = None
        if direction @ slope < 0:  # else rounding has spoiled the inverse
            found = yield from _line(x, direction, value, slope)
            count[0] += 1
        if found is None:
            if fresh:
                return
            inverse, fresh = _scaled(slope), True
            continue
        moved, gained = found.length * direction, value - found.value
        inverse, fresh = _updated(inverse, moved, found.slope - slope), False
        x, value, slope = x + moved, found.value, found.slope
        if abs(moved).max() <= LEAST_CHANGE or abs(gained) <= LEAST_CHANGE * (1 + abs(value)):
            return


def _scaled(slope: Array) -> Array:
    """The inverse that steps downhill, by at most one in all coordinates together."""
    return np.eye(len(slope)) * min(1.0, 1.0 / max(float(abs(slope).sum()), 1e-300))


def _inverse(hessian: Array, otherwise: Array) -> Array:
    """The inverse Hessian with the signs of its eigenvalues dropped, so that it leads downhill."""
    if hessian.shape != otherwise.shape or not np.isfinite(hessian).all():
        return otherwise
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    sizes = np.abs(values)
    if not sizes.max() > 0:
        return otherwise
    return (vectors / np.maximum(sizes, LEAST_SHARE * sizes.max())) @ vectors.T


def _updated(inverse: Array, moved: Array, change: Array) -> Array:
    """The inverse Hessian of BFGS after a step."""
    product = float(moved @ change)
    if product <= 1e-10 * math.sqrt(float(moved @ moved) * float(change @ change)):
        return inverse
    across = inverse @ change
    mixed = np.outer(moved, across / product)
    scale = (1 + float(change @ across) / product) / product
    return inverse + np.outer(moved, scale * moved) - mixed - mixed.T


def _line(x: Array, direction: Array, value: float, slope: Array) -> Asked[_Place | None]:
    """A place along the line that is lower and less steep; None if there is none to be found."""
    first = _Place(0.0, value, slope, float(direction @ slope))
    low, high, length = first, None, 1.0
    for _ in range(MOST_TRIALS):
        values, slopes = yield (x + length * direction)[None]
        found, there = float(values[0]), slopes[0]
        here = _Place(length, found, there, float(direction @ there))
        good = math.isfinite(found) and math.isfinite(float(there @ there))
        if (
            not good
            or found > value + DECREASE * length * first.along
            or (low is not first and found >= low.value)
        ):
            high = here
        elif abs(here.along) <= -CURVATURE * first.along:
            return here
        else:
            if here.along * ((high.length if high else math.inf) - low.length) >= 0:
                high = low
            low = here
        if high is not None and abs(high.length - low.length) * abs(direction).max() <= 1e-14:
            break
        length = 2.5 * length if high is None else _between(low, high)
    return low if low.value < value else None


def _between(low: _Place, high: _Place) -> float:
    """The minimum of the cubic through both, kept away from the ends; the middle if it has none."""
    width = high.length - low.length
    middle = low.length + 0.5 * width
    if not (math.isfinite(high.value) and math.isfinite(high.along)):
        return low.length + 0.2 * width
    bend = low.along + high.along - 3 * (high.value - low.value) / width
    inside = bend * bend - low.along * high.along
    if not inside >= 0:
        return middle
    twist = math.copysign(math.sqrt(inside), width)
    at = high.length - width * (high.along + twist - bend) / (high.along - low.along + 2 * twist)
    near, far = sorted((low.length + 0.1 * width, low.length + 0.9 * width))
    return float(min(max(at, near), far)) if math.isfinite(at) else middle
