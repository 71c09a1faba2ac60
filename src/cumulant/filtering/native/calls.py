"""Calls of the compiled recursion: arrays go in as addresses with strides of series and steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from cumulant.kernels.native.library import Kernel, library

__all__ = ["Plan", "curvature", "gradient", "moments", "smoothed", "value"]

# The numbers are those of `Given` and `Found` in recursion.hpp. Shapes behind (series, steps):
GIVEN = (
    *("transition", "dynamics", "dynamics_offset", "dynamics_noise"),  # (M, M), (M, n, n), ...
    *("emission", "emission_offset", "emission_noise", "values"),  # ..., (p,)
    *("log_weights", "means", "covariances"),  # of the start, behind (series,): (G, M), ...
)
FOUND = ("totals", "predicted", "log_weights", "means", "covariances", "digits")
MOMENTS = (  # those of `Moment` in moments.hpp
    *("mean", "covariance", "predicted_mean", "predicted_covariance"),
    *("observation_mean", "observation_covariance"),
)
STEPS = 8  # the first so many of what is given may change with time

Arrays = Sequence[Tensor | None]


@dataclass(frozen=True)
class Plan:
    """The sizes of a problem, and where the scheme collapses.

    Attributes:
        modes, states, observed: M, n and p.
        steps, series: T and B.
        histories: G before the first step and after each.
        mixes: IMM.
        joins: GPB1: one message for all modes.
        alike: all modes begin with the same message.
        total_only: find log p(y_1, ..., y_T) of each series, and nothing else.
    """

    modes: int
    states: int
    observed: int
    steps: int
    series: int
    histories: tuple[int, ...]
    mixes: bool
    joins: bool
    alike: bool
    total_only: bool

    def found(self, like: Tensor) -> list[Tensor]:
        """Room for what is found; beliefs lie one after another. `digits` is not among it."""
        B, T, M, n = self.series, self.steps, self.modes, self.states
        if self.total_only:
            return [like.new_empty(B, 1)]
        count = sum(self.histories) * M
        shapes = (B, T), (B, T, M), (B, count), (B, count, n), (B, count, n, n)
        return [like.new_empty(shape) for shape in shapes]


@cache
def _kernel(name: str) -> Kernel:
    return library().kernel(name)


@lru_cache(64)
def _histories(counts: tuple[int, ...]) -> array[int]:
    """With an address that stays while it is in use."""
    return array("q", counts)


def _words(arrays: Arrays, count: int, changing: int) -> list[int]:
    """Address, stride of series, stride of steps; the first `changing` have a dimension of time."""
    out: list[int] = []
    for k, x in enumerate(arrays):
        if x is None:
            out += (0, 0, 0)
            continue
        shape, stride = x.shape, x.stride()
        step = stride[1] if k < changing and shape[1] > 1 else 0
        out += (x.data_ptr(), stride[0] if shape[0] > 1 else 0, step)
    return out + [0] * (3 * (count - len(arrays)))


def _run(
    name: str,
    plan: Plan,
    given: Arrays,
    found: Arrays,
    *,
    along: Arrays = (),
    found_along: Arrays = (),
    seeds: Arrays = (),
    to: Arrays = (),
    to_along: Arrays = (),
) -> None:
    words = [plan.modes, plan.states, plan.observed, plan.steps, plan.series]
    words += (torch.get_num_threads(), plan.mixes, plan.joins, plan.alike)
    words.append(_histories(plan.histories).buffer_info()[0])
    g, f = len(GIVEN), len(FOUND)
    groups = (
        *((given, g, STEPS), (along, g, STEPS), (found, f, 1), (found_along, f, 1), (seeds, f, 1)),
        *((to, g, STEPS), (to_along, g, STEPS)),
    )
    for arrays, count, changing in groups:
        words += _words(arrays, count, changing)
    packed = array("q", words)
    if _kernel(name)(packed.buffer_info()[0], 0.0, 0.0):
        raise MemoryError("the compiled filter ran out of memory")


def value(plan: Plan, given: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """What the filter finds, and for each series 1 if covariances kept enough digits, else 0."""
    found, digits = plan.found(given[0]), given[0].new_empty(plan.series)
    _run("filter", plan, given, [*found, *[None] * (5 - len(found)), digits])
    return found, digits


def moments(plan: Plan, given: Sequence[Tensor], beliefs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Of the state after each step and before it, and of the observation to come, by series."""
    n, p = plan.states, plan.observed
    shapes = (n,), (n, n), (n,), (n, n), (p,), (p, p)
    out = [given[0].new_empty(plan.series, plan.steps, *shape) for shape in shapes]
    _run("filter_moments", plan, given, [None, None, *beliefs], to=out)
    return dict(zip(MOMENTS, out, strict=True))


def smoothed(
    plan: Plan, given: Sequence[Tensor], beliefs: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Smoothed beliefs, laid out as those of the filter, and pairs (history, next mode) by step.

    Also, for each series, 1 if covariances have enough digits for it, else 0.
    """
    digits = given[0].new_zeros(plan.series)
    pairs = sum(plan.histories[:-1]) * plan.modes**2
    out = [*(torch.empty_like(x) for x in beliefs), given[0].new_empty(plan.series, pairs)]
    _run("filter_smooth", plan, given, [None, None, *beliefs, digits], to=out)
    return out, digits


def _room(plan: Plan, given: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    """For a derivative in each wanted array, by series."""
    return [
        x.new_empty(plan.series, *x.shape[1:]) if need else None
        for x, need in zip(given, wanted, strict=True)
    ]


def gradient(
    plan: Plan, given: Sequence[Tensor], seeds: Arrays, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The totals, `digits`, and the gradient of <seeds, found> in each wanted array, by series."""
    totals = given[0].new_empty(plan.series, 1 if plan.total_only else plan.steps)
    digits, to = given[0].new_empty(plan.series), _room(plan, given, wanted)
    found = [totals, *[None] * 4, digits]
    _run("filter_gradient", plan, given, found, seeds=seeds, to=to)
    return totals, digits, to


def curvature(
    plan: Plan, given: Sequence[Tensor], seeds: Arrays, along: Arrays, wanted: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Derivatives along a direction: of what is found, and of the gradient of <seeds, found>."""
    found, along_found = plan.found(given[0]), plan.found(given[0])
    to = _room(plan, given, wanted)
    _run(
        *("filter_curvature", plan, given, found),
        along=along,
        found_along=along_found,
        seeds=seeds,
        to_along=to,
    )
    return along_found, to
