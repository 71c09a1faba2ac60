"""How many random patterns a memory holds: the theorem's constants, and the measured rate (T21)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from cumulant.core.checks import generator_of, real, whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError

__all__ = ["Capacity", "Recall", "capacity", "recall"]


@dataclass(frozen=True)
class Capacity:
    """Constants of the storage theorem.

    Attributes:
        a, b, c: c = b / W(exp(a + log b)) with Lambert's function W.
        patterns: sqrt(failure) c^((d - 1) / 4), so many can be stored at least; where the theorem
            does not apply, 0.
        applies: whether c >= (2 / sqrt(failure))^(4 / (d - 1)), the theorem's condition.
    """

    a: float
    b: float
    c: float
    patterns: float
    applies: bool


def capacity(
    dimension: int, *, beta: float = 1.0, radius: float = 1.0, failure: float = 0.001
) -> Capacity:
    """The number of random patterns a memory can store (T21; Ramsauer et al., 2021, Theorem 3).

    Patterns lie on the sphere of radius M = radius sqrt(d - 1). With probability 1 - failure, so
    many as the result says are stored: each has a fixed point near it, and they are apart.

    Args:
        dimension: d >= 2.
        beta: inverse temperature.
        radius: the theorem's K.
        failure: probability p of random patterns that are not all stored, in (0, 1).

    >>> import cumulant as cm
    >>> round(cm.memory.capacity(20, beta=1.0, radius=3.0).c, 4)  # the paper's own example
    3.1546
    """
    d = whole("capacity", "dimension", dimension, 2)
    beta = real("capacity", "beta", beta, least=0.0, open_at_least=True)
    K = real("capacity", "radius", radius, least=0.0, open_at_least=True)
    p = real("capacity", "failure", failure, least=0.0, most=1.0, open_at_least=True)
    a = b = c = math.nan
    try:
        a = 2 / (d - 1) * (1 + math.log(2 * beta * K * K * p * (d - 1)))
        b = 2 * K * K * beta / 5
        c = b / _lambert(a + math.log(b))
    except (ValueError, OverflowError, ZeroDivisionError):
        pass
    if not 0 < c < math.inf:
        raise InputError(
            "capacity: the theorem's constants overflow at dimension "
            f"{str(d)[:20]}, beta {beta:g}, radius {K:g}, failure {p:g}."
        )
    applies = math.log(c) >= 4 / (d - 1) * math.log(2 / math.sqrt(p))
    log_count = 0.5 * math.log(p) + (d - 1) / 4 * math.log(c)
    count = (math.inf if log_count > 700 else math.exp(log_count)) if applies else 0.0
    return Capacity(a, b, c, count, applies)


def _lambert(y: float) -> float:
    """W(e^y), by w + log w = y where e^y would overflow."""
    if y < 500:
        return float(import_module("scipy.special").lambertw(math.exp(y)).real)
    w = y - math.log(y)
    for _ in range(20):
        w -= (w + math.log(w) - y) / (1 + 1 / w)
    return w


class _Retrieves(Protocol):
    def retrieve(self, state: Tensor, steps: int, /) -> Any: ...


@dataclass(frozen=True)
class Recall:
    """Recall rates of memories of different sizes.

    Attributes:
        counts: numbers of stored patterns.
        rate: share of queries that ended close enough to their pattern.
        dimension: d.
    """

    counts: tuple[int, ...]
    rate: tuple[float, ...]
    dimension: int

    __repr__ = described_fields

    @property
    def capacity(self) -> int:
        """The largest count before the rate first falls below one half; 0 if it starts below."""
        good = 0
        for count, rate in zip(self.counts, self.rate, strict=True):
            if rate < 0.5:
                break
            good = count
        return good


def recall(
    make: Callable[[Tensor], _Retrieves],
    dimension: int,
    counts: Sequence[int],
    *,
    flips: float = 0.1,
    overlap: float = 0.95,
    steps: int = 20,
    queries: int = 200,
    seed: int = 0,
) -> Recall:
    """Store random patterns of -1 and 1, corrupt them, retrieve, and count (T21, T22).

    Args:
        make: patterns to a memory, such as ``cm.memory.ClassicalMemory``.
        dimension: d.
        counts: how many patterns to store, one run each.
        flips: share of the entries that change sign.
        overlap: a query counts if the cosine with its own pattern is at least this.
        steps: updates; 1 is best for `LinearMemory`, which grows with each.
        queries: patterns asked for in each run.

    >>> import cumulant as cm
    >>> dense = cm.memory.recall(lambda x: cm.Memory(x, beta=1.0), 32, [10, 1000])
    >>> linear = cm.memory.recall(cm.memory.LinearMemory, 32, [10, 1000], steps=1)
    >>> dense.rate[1] > 0.9, linear.rate[1] < 0.1
    (True, True)
    """
    d = whole("recall", "dimension", dimension, 1)
    if not isinstance(counts, Sequence) or not counts or not callable(make):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            "recall: make must be a function from patterns to a memory, and counts some numbers of "
            "patterns to store, such as [10, 100]."
        )
    sizes = tuple(whole("recall", "each of counts", n, 1) for n in counts)
    flips = real("recall", "flips", flips, least=0.0, most=1.0)
    overlap = real("recall", "overlap", overlap, least=-1.0, most=1.0)
    most = whole("recall", "queries", queries, 1)
    generator = generator_of("recall", seed)
    rates: list[float] = []
    for n in sizes:
        patterns = 2.0 * torch.randint(0, 2, (n, d), generator=generator) - 1
        asked = patterns[:most]
        changed = torch.rand(asked.shape, generator=generator) < flips
        state = make(patterns).retrieve(torch.where(changed, -asked, asked), steps).state
        close = torch.cosine_similarity(state, asked, dim=-1) >= overlap - 1e-6
        rates.append(float(close.float().mean()))
    return Recall(sizes, tuple(rates), d)
