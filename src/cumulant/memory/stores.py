"""Where patterns are: in this process, or spread over the ranks of a group.

A store answers for all patterns what a memory asks of them; only `Sharded` knows of ranks. Its
queries are replicated or each rank's own, as its `ShardedKeys` say, and numbers of patterns count
those of rank 0 first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from cumulant.attention.sharded import attend_sharded
from cumulant.core.errors import InputError
from cumulant.core.typed import linalg
from cumulant.distributed import maps
from cumulant.distributed.facts import Facts
from cumulant.distributed.sharded import ShardedKeys
from cumulant.kernels.attention import Options, attention
from cumulant.kernels.ring import Ring
from cumulant.kernels.search import largest
from cumulant.memory.retrieval import here

__all__ = ["Answer", "Local", "Sharded", "Store"]

_T = TypeVar("_T")
_Facts = Callable[[_T], Facts]


class Answer(NamedTuple):
    """E[v] ``(*batch, Q, e)`` and G ``(*batch, Q)``, each computed when it is called for."""

    mean: Callable[[], Tensor]
    log_normalizer: Callable[[], Tensor]


class Local:
    """All patterns in this process."""

    def __init__(self, patterns: Tensor) -> None:
        self._patterns = patterns

    def count(self) -> int:
        return self._patterns.shape[-2]

    def checked(self, what: str, make: Callable[[], _T], facts: _Facts[_T] | None = None) -> _T:
        """What `make` returns, which checks what was given to the call `what`."""
        return make()

    def attend(self, xi: Tensor, value: Tensor, scale: float) -> Answer:
        """E[value] and G at scale * xi."""
        named = {"query": xi, "key": self._patterns, "value": value}
        named = {n: x[(None,) * (xi.ndim - x.ndim)] for n, x in named.items()}
        found = attention(named, Options(scale=scale))
        return Answer(lambda: found.mean, lambda: found.log_normalizer[..., 0])

    def largest_norm(self) -> Tensor:
        """M = max |x_i|, ``(*sets, 1)``."""
        return linalg.vector_norm(self._patterns, dim=-1).amax(-1, keepdim=True)

    def best(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """The largest <x_i, xi> and its i, ``(*batch, Q)``."""
        x = self._patterns.detach()
        top = largest({"query": xi.detach(), "key": x[(None,) * (xi.ndim - x.ndim)]})
        return top.score[..., 0], top.index[..., 0]

    def gaps(self) -> Tensor:
        """min over j != i of <x_i, x_i - x_j> for the patterns of this process."""
        x = self._patterns
        if self.count() == 1:
            return x.new_full(x.shape[:-1], math.inf)
        own = torch.arange(self.count(), device=x.device)[:, None]
        tags = {n: own.expand(*x.shape[:-1], 1) for n in ("query_tag", "key_tag")}
        nearest = largest({"query": x.detach(), "key": x.detach(), **tags}).index
        other = x.gather(-2, nearest.clamp_min(0).expand_as(x))
        return (x * (x - other)).sum(-1)

    def take(self, rows: Tensor, at: Tensor) -> Tensor:
        """Of rows ``(*batch, N, features)`` of all patterns, those with the numbers `at`."""
        return rows.gather(-2, at[..., None].expand(*at.shape, rows.shape[-1]))

    def still(self, moving: Tensor) -> tuple[Tensor, bool]:
        """Which queries go on moving, and whether any does."""
        return here(moving)

    def own(self, at: Tensor) -> Tensor:
        """Which of the numbers are patterns of this process."""
        return torch.ones_like(at, dtype=torch.bool)

    @property
    def before(self) -> int:
        """How many patterns come before those of this process."""
        return 0


class Sharded:
    """Patterns of all ranks, each with its own."""

    def __init__(self, shard: ShardedKeys, patterns: Tensor) -> None:
        self._shard, self._patterns, self._ranks = shard, patterns, shard.ranks

    def count(self) -> int:
        return len(self._shard)

    def checked(self, what: str, make: Callable[[], _T], facts: _Facts[_T] | None = None) -> _T:
        """What `make` returns; if it refuses what one rank was given, all ranks stop.

        They also do if they are not all in the call `what`. `facts` must be the same everywhere.
        """
        return self._ranks.checked(what, make, facts or (lambda _: {}))

    def attend(self, xi: Tensor, value: Tensor, scale: float) -> Answer:
        found = attend_sharded(xi, self._shard.holding(self._patterns, value), scale=scale)
        return Answer(lambda: found.mean, lambda: found.log_normalizer)

    def largest_norm(self) -> Tensor:
        norms = linalg.vector_norm(self._patterns, dim=-1)
        norm = torch.nn.functional.pad(norms, (0, 1)).amax(-1, keepdim=True)  # some have none
        # Patterns of one norm share its gradient, on one rank as over several.
        top = maps.largest(norm, self._ranks)
        hits = (norms.detach() == top).sum(-1, keepdim=True).to(norm.dtype)
        share = hits / maps.total(hits, self._ranks)
        found = maps.total(norm * share, self._ranks)
        return maps.spread(found, self._ranks) if self._shard.sharded_queries else found

    def best(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        xi, counts = self._everywhere(xi.detach())
        score, index = Local(self._patterns).best(xi)
        top = self._ranks.largest(score)
        found = (score == top) & (index >= 0)
        number = torch.where(found, index + self._shard.before, self.count())
        number = -self._ranks.largest(-number)  # the first of equals
        if counts is not None:
            top, number = (torch.split(x, counts, -1)[self._ranks.rank] for x in (top, number))
        return top, number

    def gaps(self) -> Tensor:
        """Without derivative: the nearest pattern may be on another rank."""
        x = self._patterns.detach()
        best = x.new_full((*x.shape[:-1], 1), -math.inf)
        mine = self._numbers(self._shard.before, x.shape[-2])
        ring = Ring(self._ranks, self._shard.rows, 0)
        for block in ring.blocks({"key": x}):
            tags = {"query_tag": mine, "key_tag": self._numbers(block.before, block.keys)}
            tags = {n: t[(None,) * (x.ndim - 2)] for n, t in tags.items()}
            best = torch.maximum(best, largest({"query": x, **block.arguments, **tags}).score)
        return (x * x).sum(-1) - best[..., 0]

    def _numbers(self, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count, device=self._patterns.device)[:, None]

    def take(self, rows: Tensor, at: Tensor) -> Tensor:
        at, counts = self._everywhere(at[..., None])
        at = at[..., 0]
        own = self.own(at)[..., None]
        if rows.shape[-2]:
            found = Local(rows).take(rows, (at - self.before).clamp(0, rows.shape[-2] - 1))
        else:
            found = rows.new_zeros(*at.shape, rows.shape[-1]) + rows.sum()
        found = found.masked_fill(~own, 0.0)
        if counts is None:
            return maps.total(found, self._ranks)
        return maps.scatter_rows(found, self._ranks, counts)

    def _everywhere(self, x: Tensor) -> tuple[Tensor, list[int] | None]:
        """The rows of every rank's queries, and how many each has; None if all have the same."""
        if not self._shard.sharded_queries:
            return x, None
        ranks = self._ranks
        counts = ranks.agree("Memory", lambda: {"rows": x.shape[-2]}, differ=("rows",))["rows"]
        return ranks.gather(x, counts), counts

    def still(self, moving: Tensor) -> tuple[Tensor, bool]:
        if self._shard.sharded_queries:
            some = self._ranks.largest(moving.any().float().reshape(1).to(self._ranks.device))
            return moving, bool(some > 0)
        moving = self._ranks.largest(moving.float()) > 0  # rounding must not divide the ranks
        return moving, bool(moving.any())

    def own(self, at: Tensor) -> Tensor:
        return (at >= self.before) & (at < self.before + self._patterns.shape[-2])

    @property
    def before(self) -> int:
        return self._shard.before

    def refusal(self, what: str) -> InputError:
        """Of what needs all patterns in one place."""
        return InputError(
            f"{what}: this memory's patterns are spread over {self._ranks.size} ranks; make a "
            "Memory of this rank's own patterns for it."
        )


Store = Local | Sharded
