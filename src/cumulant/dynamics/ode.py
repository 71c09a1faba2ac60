"""Differential equations by scipy's adaptive Runge-Kutta pairs, with outputs and escape times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Output", "integrate"]

Array = Any


class Output(NamedTuple):
    """The state at one of the times asked for, and when each member of the batch escaped."""

    time: float
    state: Tensor
    escaped: Tensor  # (*batch,), inf where it has not


def integrate(
    velocity: Callable[[float, Tensor], Tensor],
    start: Tensor,
    times: Tensor,
    *,
    size: Callable[[Tensor], Tensor],
    limit: Tensor | float,
    rtol: float,
    atol: float,
) -> Iterator[Output]:
    """Yield the state at each time, from `start` at time 0, by the order 8(5,3) pair of
    Dormand and Prince.

    A member of the batch whose `size` passes `limit` has escaped: the time is located by bisection
    on the dense output, and it is held where it was. Once all have escaped nothing more is yielded
    but the state at that moment. The solver's own arithmetic is in double precision, the field in
    that of `start`.
    """
    methods = import_module("scipy.integrate")
    shape = start.shape
    held = torch.zeros(size(start).shape, dtype=torch.bool, device=start.device)
    escaped = torch.full(held.shape, float("inf"), dtype=torch.float64)

    def unpack(y: Array) -> Tensor:
        return torch.as_tensor(np.asarray(y).reshape(shape)).to(start)

    def pack(x: Tensor) -> Array:
        return x.detach().to("cpu", torch.float64).reshape(-1).numpy()

    def rate(t: float, y: Array) -> Array:
        moving = velocity(t, unpack(y))
        spare = moving.ndim - held.ndim
        return pack(moving.masked_fill(held[(..., *[None] * spare)], 0.0))

    def escape(dense: Any, t: float) -> Tensor:
        return ~held & ~(size(unpack(dense(t))) <= limit)

    out = ~(size(start) <= limit)
    if bool(out.any()):  # already too large to begin with
        held |= out
        escaped = torch.where(out.to("cpu"), 0.0, escaped)
        if bool(held.all()):
            yield Output(0.0, start, escaped)
            return
    end, now, state = float(times[-1]), 0.0, pack(start)
    wanted = iter(float(t) for t in times)
    due = next(wanted, None)
    while due is not None and due <= now:
        yield Output(due, start, escaped.clone())
        due = next(wanted, None)
    while due is not None:
        solver = methods.DOP853(rate, now, state, end, rtol=rtol, atol=atol)
        while due is not None:
            solver.step()
            if solver.status == "failed":
                # Steps below the spacing of floating-point numbers: a singularity stands here, of
                # those members that change fastest for their size.
                here = unpack(solver.y)
                rate_of = size(velocity(solver.t, here)) / size(here)
                rate_of = rate_of.where(rate_of.isfinite(), float("inf")).masked_fill(held, -1.0)
                out = ~held & (rate_of >= 0.1 * rate_of.max())
                held |= out
                escaped = torch.where(out.to("cpu"), solver.t, escaped)
                now, state = solver.t, np.asarray(solver.y)
                break
            dense, reached = solver.dense_output(), solver.t
            out = escape(dense, reached)
            if bool(out.any()):
                reached = _first(partial(_any, escape, dense), solver.t_old, reached)
                out = escape(dense, reached)
            while due is not None and due <= reached:
                yield Output(due, unpack(dense(due)), escaped.clone())
                due = next(wanted, None)
            if bool(out.any()):
                held |= out
                escaped = torch.where(out.to("cpu"), reached, escaped)
                now, state = reached, np.asarray(dense(reached))
                break
        if bool(held.all()):
            yield Output(now, unpack(state), escaped.clone())
            return


def _any(escape: Callable[[Any, float], Tensor], dense: Any, t: float) -> bool:
    return bool(escape(dense, t).any())


def _first(past: Callable[[float], bool], low: float, high: float) -> float:
    """Where the condition begins to hold, to the last bits."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (low, middle) if past(middle) else (middle, high)
    return high
