"""Merge results over disjoint key sets: the monoid behind online softmax and sharding.

A set of keys with log-normalizer G_a has the share w_a = e^(G_a - G) of the mass, with
G = log sum_a e^G_a. Every expectation is the mixture of those over the sets, entropies add by the
chain rule, variances by the law of total variance. The sets may be tiles, chunks of a cache or
shards on different machines; only the way sums over them are taken differs (`Parts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from cumulant.core.typed import functions
from cumulant.distributed import maps
from cumulant.distributed.ranks import Ranks

__all__ = ["HERE", "Parts", "Pool", "over_ranks"]

Columns = Sequence[Tensor]


@dataclass(frozen=True)
class Parts:
    """How sums over key sets are taken, from the columns of the local sets.

    Attributes:
        add: maps the columns of the local sets to their sums over all sets.
        largest: the entrywise maximum over all sets, without derivative.
        level: subtracted from the log-normalizers of all sets before they are exponentiated.
        spread: distributes the result of `add` to each set; the adjoint of `add`.
        own: selects, from a set's rows, those that `add` leaves here.
        collect: maps a column of each local set to that of every set, on the rows `add` leaves.
    """

    add: Callable[[Sequence[Columns]], list[Tensor]]
    largest: Callable[[Sequence[Tensor]], Tensor]
    level: Callable[[Sequence[Tensor]], Tensor]
    spread: Callable[[Tensor], Tensor]
    own: Callable[[Tensor], Tensor]
    collect: Callable[[Sequence[Tensor]], list[Tensor]]


def _added(sets: Sequence[Columns]) -> list[Tensor]:
    """Column by column over the local sets."""
    return [reduce(torch.add, columns) for columns in zip(*sets, strict=True)]


def _same(x: Tensor) -> Tensor:
    return x


def _largest(xs: Sequence[Tensor]) -> Tensor:
    return reduce(torch.maximum, (x.detach() for x in xs))


def _typical(xs: Sequence[Tensor]) -> Tensor:
    """The mean of the log-normalizers under their own weights, which are constants here.

    Any level gives the same shares. This one removes the common part of the tangents before they
    meet rounded numbers.
    """
    peak = _largest(xs)
    peak = peak.masked_fill(peak == -math.inf, 0.0)
    weights = [(x.detach() - peak).exp() for x in xs]
    mass = reduce(torch.add, weights)
    seen = [x.masked_fill(w == 0, 0.0) for x, w in zip(xs, weights, strict=True)]
    total = reduce(torch.add, [w * x for w, x in zip(weights, seen, strict=True)])
    return total / mass.masked_fill(mass == 0, 1.0)


# All sets are local.
HERE = Parts(
    add=_added,
    largest=_largest,
    level=_typical,
    spread=_same,
    own=_same,
    collect=list,
)


def over_ranks(ranks: Ranks, rows: Sequence[int] | None = None) -> Parts:
    """One set of keys per rank, for the same queries.

    Sums end on every rank or, if `rows` gives the number of queries per rank, each on its own.
    """

    def add(sets: Sequence[Columns]) -> list[Tensor]:
        (columns,) = sets
        batch = functions.broadcast_shapes(*(x.shape[:-1] for x in columns))
        whole = torch.cat([x.expand(*batch, x.shape[-1]) for x in columns], -1)
        summed = maps.total(whole, ranks) if rows is None else back(whole)
        return list(torch.split(summed, [x.shape[-1] for x in columns], -1))

    def back(whole: Tensor) -> Tensor:
        return maps.scatter_rows(whole, ranks, rows or ())

    def spread(x: Tensor) -> Tensor:
        return maps.spread(x, ranks) if rows is None else maps.gather_rows(x, ranks, rows)

    def own(x: Tensor) -> Tensor:
        return x if rows is None else torch.split(x, list(rows), -2)[ranks.rank]

    def largest(xs: Sequence[Tensor]) -> Tensor:
        return maps.largest(xs[0], ranks)

    def level(xs: Sequence[Tensor]) -> Tensor:
        peak = largest(xs)  # a mean would be one more message
        return peak.masked_fill(peak == -math.inf, 0.0)

    def collect(xs: Sequence[Tensor]) -> list[Tensor]:
        # Each rank's column in its own slot, zeros elsewhere: a sum, so its adjoint is known.
        places = [xs[0] if r == ranks.rank else torch.zeros_like(xs[0]) for r in range(ranks.size)]
        return add([places])

    return Parts(add, largest, level, spread, own, collect)


class Pool:
    """The union of key sets, from the log-normalizer ``(*batch, M, 1)`` of each local set.

    Fields are given as one tensor ``(*batch, M, features)`` per local set. A query without a
    visible key in any set has G = -inf and zeros elsewhere.
    """

    def __init__(self, normalizers: Sequence[Tensor], parts: Parts = HERE) -> None:
        # logaddexp has NaN derivatives at -inf, so subtract the level explicitly.
        level = parts.level(normalizers)
        self._parts, self._level = parts, parts.own(level)
        self._gaps = [x - level for x in normalizers]
        self._weights = [gap.exp() for gap in self._gaps]
        self._mass: Tensor | None = None

    def means(self, *fields: Sequence[Tensor]) -> list[Tensor]:
        """sum_a w_a x_a for each field, all in one sum over the sets."""
        columns: list[list[Tensor]] = [
            [w * x for x in xs] for w, *xs in zip(self._weights, *fields, strict=True)
        ]
        if self._mass is None:
            columns = [[w, *xs] for w, xs in zip(self._weights, columns, strict=True)]
            self._mass, *sums = self._parts.add(columns)
        else:
            sums = self._parts.add(columns)
        return [x / self._filled() for x in sums]

    def _filled(self) -> Tensor:
        """The mass e^(G - level), 1 where there is none."""
        if self._mass is None:
            self._mass = self._parts.add([[w] for w in self._weights])[0]
        return self._mass.masked_fill(self._mass == 0, 1.0)

    def log_normalizer(self) -> Tensor:
        """G = log sum_a e^G_a."""
        filled = self._filled()
        out = self._level + filled.log()
        return out if self._mass is None else out.masked_fill(self._mass == 0, -math.inf)

    def shares(self) -> list[Tensor]:
        """w_a of each local set, on its rows."""
        mass = self._parts.spread(self._filled())
        return [w / mass for w in self._weights]

    def mean(self, field: Sequence[Tensor]) -> Tensor:
        """sum_a w_a x_a."""
        return self.means(field)[0]

    def surprises(self, entropies: Sequence[Tensor]) -> list[Tensor]:
        """The field whose mean is the entropy up to the log of the mass: H_a - (G_a - level).

        The gap of a set without weight counts as 0: it may be arbitrarily large, and a gradient
        that multiplies by it would overflow before the weight takes it to zero.
        """
        gone = (w == 0 for w in self._weights)
        gaps = [gap.masked_fill(x, 0.0) for gap, x in zip(self._gaps, gone, strict=True)]
        return [H - gap for H, gap in zip(entropies, gaps, strict=True)]

    def entropy(self, mean_surprise: Tensor) -> Tensor:
        """H = sum_a w_a (H_a - log w_a), from the mean of `surprises`."""
        return mean_surprise + self._filled().log()

    def variance(self, mean: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Law of total variance, from the joint mean and (mean, variance) of each set."""
        center = self._parts.spread(mean)
        return self.mean([variance + (m - center) ** 2 for m, variance in parts])
