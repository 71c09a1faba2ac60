"""`merge`: results over disjoint key sets, joined exactly; sharded keys and sinks use it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.attention.attended import Attended
from cumulant.attention.held import Held
from cumulant.attention.source import Field, Source, column_of
from cumulant.core.errors import InputError
from cumulant.core.lazy import Lazy, Mode, kept, known
from cumulant.kernels.merge import HERE, Parts, Pool
from cumulant.kernels.search import Largest, best

__all__ = ["Joined", "merge"]

# How many parts a stream without gradients keeps before it turns them into numbers. That computes
# every field, also those that nobody asked for, so it does not happen at every step.
_PARTS = 32


class _Pooled(NamedTuple):
    """Key sets and their shares of the mass; the common `lift` is taken off.

    `gaps` is what this adds to the scores of each set, None if nothing.
    """

    sets: tuple[Source, ...]
    pool: Pool
    lift: Tensor | None
    gaps: tuple[Tensor, ...] | None


class Joined(Lazy):
    """The columns of all key sets together, from those of the sets in this process.

    See docs/theory.md, T1, T7.

    Attributes:
        sets: the sources whose columns are joined.
        leaves: the sources behind them that are not merges themselves.
    """

    def __init__(
        self, sets: Sequence[Source], parts: Parts | None = None, *, lifted: bool = True
    ) -> None:
        """`parts` defaults to all sets in this process; `lifted`: whether any may have a lift."""
        self.sets = tuple(sets)
        self.leaves: tuple[Source, ...] = tuple(leaf for x in sets for leaf in _leaves(x))
        self.requires_grad = any(x.requires_grad for x in sets)
        self.over_ranks = any(x.over_ranks for x in sets)
        self._parts = HERE if parts is None else parts  # no default: Dynamo cannot trace it
        self._lifted = lifted
        self._first = 0  # the number of the first key

    def flatten(self) -> None:
        """Drop the merges behind this one; columns already computed stay."""
        self.sets = self.leaves
        for key in [key for key in self._kept if key[0] in ("_pooled", "_winner")]:
            self._kept.pop(key, None)

    @property
    def shape(self) -> torch.Size:
        return self.sets[0].shape

    @property
    def device(self) -> torch.device:
        return self.sets[0].device

    @property
    def keys(self) -> int:
        return sum(x.keys for x in self.sets)

    def ready(self, name: str) -> None:
        """Ask each set, unless the column is already computed."""
        if known(self, column_of(name)) is None:
            for each in self.sets:
                each.ready(name)

    def _pool_of(self, sets: tuple[Source, ...], normalizers: Sequence[Tensor]) -> _Pooled:
        found = [each.lift for each in sets]
        if not self._lifted or (self._parts is HERE and all(x is None for x in found)):
            return _Pooled(sets, Pool(normalizers, self._parts), None, None)
        lifts = [
            torch.zeros_like(lowered) if lift is None else lift
            for lift, lowered in zip(found, normalizers, strict=True)
        ]
        own = [
            lift.masked_fill(lowered == -math.inf, -math.inf)
            for lift, lowered in zip(lifts, normalizers, strict=True)
        ]
        lift = self._parts.largest(own)
        lift = lift.masked_fill(lift == -math.inf, 0.0)
        gaps = tuple(x - lift for x in own)
        common = [G + gap for G, gap in zip(normalizers, gaps, strict=True)]
        return _Pooled(sets, Pool(common, self._parts), self._parts.own(lift), gaps)

    @kept
    def _pooled(self) -> _Pooled:
        sets = self.sets
        return self._pool_of(sets, [each.lowered for each in sets])

    @kept
    def lowered(self) -> Tensor:
        return self._pooled.pool.log_normalizer()

    @kept
    def lift(self) -> Tensor | None:
        return self._pooled.lift

    def _mixed(self, pool: Pool, columns: Sequence[Tensor]) -> Tensor:
        """sum_a w_a x_a. The mass comes with the same sum; the next merge will need it."""
        mean = pool.mean(columns)
        _ = self.lowered, self.lift
        return mean

    @kept
    def mean(self) -> Tensor:
        sets, pool, *_ = self._pooled
        return self._mixed(pool, _one_width("mean", [x.mean for x in sets]))

    @kept
    def key_mean(self) -> Tensor:
        sets, pool, *_ = self._pooled
        return self._mixed(pool, _one_width("key_mean", [x.key_mean for x in sets]))

    @kept
    def entropy(self) -> Tensor:
        for each in self.sets:
            _ = each.entropy  # first: it brings G and the mean with it
        sets, pool, *_ = self._pooled
        return pool.entropy(self._mixed(pool, pool.surprises([x.entropy for x in sets])))

    @kept
    def score_mean(self) -> Tensor:
        sets, pool, *_ = self._pooled
        return self._mixed(pool, [x.score_mean for x in sets])

    @kept
    def score_variance(self) -> Tensor:
        sets, pool, *_ = self._pooled
        pairs = [(x.score_mean, x.score_variance) for x in sets]
        return pool.variance(self.score_mean, pairs)

    @kept
    def value_moments(self) -> Tensor:
        sets = self.sets
        own = _one_width("value_variance", [each.value_moments for each in sets])
        width = own[0].shape[-1] // 2
        pairs = [(x[..., :width], x[..., width:-1]) for x in own]
        # Shares as precise as the moments.
        pool = self._pool_of(sets, [x[..., -1:] for x in own]).pool
        center = pool.mean([m for m, _ in pairs])
        return torch.cat([center, pool.variance(center, pairs), pool.log_normalizer()], -1)

    def _levelled(self, scores: Sequence[Tensor], alpha: float = 1.0) -> list[Tensor]:
        """Scores of each set without the common lift."""
        bare = self._parts is HERE and all(x.lift is None for x in self.sets)
        gaps = None if bare or alpha == 0.0 else self._pooled.gaps
        if gaps is None:
            return list(scores)
        return [s + alpha * gap for s, gap in zip(scores, gaps, strict=True)]

    def _numbered(self, keys: Sequence[Tensor]) -> list[Tensor]:
        """Numbers in each set as numbers in all of them."""
        before = accumulate((x.keys for x in self.sets), initial=self._first)
        return [torch.where(x < 0, x, x + n) for x, n in zip(keys, before, strict=False)]

    def _largest_of(self, scores: Sequence[Tensor]) -> Largest:
        """The largest of a score of each set, and which set has it."""
        found = self._parts.collect(self._levelled(scores))
        return best([Largest(x, torch.full_like(x, n).long()) for n, x in enumerate(found)], 1)

    @kept
    def _winner(self) -> Largest:
        return self._largest_of([x.score_max for x in self.sets])

    @kept
    def score_max(self) -> Tensor:
        return self._winner.score

    @kept
    def score_max_key(self) -> Tensor:
        keys = self._parts.collect(self._numbered([x.score_max_key for x in self.sets]))
        return torch.cat(keys, -1).gather(-1, self._winner.index)

    def largest(self, k: int) -> Largest:
        found = [x.largest(k) for x in self.sets]
        scores = self._parts.collect(self._levelled([x.score for x in found]))
        keys = self._parts.collect(self._numbered([x.index for x in found]))
        return best([Largest(*pair) for pair in zip(scores, keys, strict=True)], k)

    def received(self, share: Tensor) -> Tensor:
        sets, pool, *_ = self._pooled
        share = self._parts.spread(share)
        parts = [x.received(share * w) for x, w in zip(sets, pool.shares(), strict=True)]
        return torch.cat(parts, -2)

    def seen(self, share: Tensor) -> Tensor:
        share = self._parts.spread(share)
        return torch.cat([x.seen(share) for x in self.sets], -2)

    def tempered(self, alpha: float) -> Tensor:
        found = [x.tempered(alpha) for x in self.sets]
        if alpha == math.inf:
            return self._largest_of(found).score
        return Pool(self._levelled(found, alpha), self._parts).log_normalizer()


def _one_width(name: Field, columns: list[Tensor]) -> list[Tensor]:
    shapes = [tuple(x.shape) for x in columns]
    for shape in shapes:
        if shape != shapes[0]:
            raise InputError(
                f"merge: {name} has shape {shapes[0]} in one result and {shape} in another; attend "
                "all of them with values of one width."
            )
    return columns


def _leaves(source: Source) -> tuple[Source, ...]:
    return source.leaves if isinstance(source, Merged) else (source,)


class Merged(Joined):
    """Key sets that are all in this process. A chain of merges stays flat, however long.

    Each merge reuses the columns that the previous result has computed, so a step of a stream costs
    the same however long the stream is. Merges further back are dropped: a column that the previous
    result has not computed comes from the leaves.
    """

    def __init__(self, sets: Sequence[Source]) -> None:
        super().__init__([_cut(x) for x in sets])


def _cut(source: Source) -> Source:
    """The source without what lies behind it; of a long stream without gradients, its numbers."""
    if not isinstance(source, Merged):
        return source
    source.flatten()
    recorded = torch.is_grad_enabled() and source.requires_grad
    if len(source.leaves) > _PARTS and source._kept and not recorded and Mode.now().plain:
        return Held.of(source)
    return source


def merge(first: Attended, *others: Attended) -> Attended:
    """Join results of the same queries over disjoint key sets, exactly (docs/theory.md, T1, T7).

    A key lies in set a with probability e^(G_a - G), G = log sum_a e^G_a; means mix, entropies add
    by the chain rule, variances by the law of total variance. A KV-cache in chunks, shards of keys
    and streaming are all this.

    Streams can be of any length: once fields of ``total`` are in use, each ``total = merge(total,
    part)`` takes the same time, and the same memory where no gradient is recorded.

    Args:
        first: a result of `attend`.
        others: further results of `attend` for the same queries; no key may be in two of them. A
            sink counts as a key: give it to one result only.

    Returns:
        Attended: as if all keys had been attended at once; fields are joined on first access.

    Raises:
        InputError: the results are not for the same queries, or their values differ in width.

    >>> import torch, cumulant as cm
    >>> q, k, v = torch.randn(4, 8), torch.randn(10, 8), torch.randn(10, 3)
    >>> parts = cm.merge(cm.attend(q, k[:6], v[:6]), cm.attend(q, k[6:], v[6:]))
    >>> whole = cm.attend(q, k, v)
    >>> torch.allclose(parts.mean, whole.mean, atol=1e-6)
    True
    >>> torch.allclose(parts.entropy, whole.entropy, atol=1e-6)
    True
    """
    results = (first, *others)
    for part in results:
        if not isinstance(part, Attended):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"merge joins results of attend, not a {type(part).__name__}.")
    shapes = [tuple(x._source.shape[:-1]) for x in results]
    for shape in shapes:
        if shape != shapes[0]:
            raise InputError(
                "merge joins results of the same queries over different keys; their "
                f"log-normalizers must have one shape, but these have {shapes[0]} and {shape}."
            )
    kinds = {x._dtype for x in results}
    if len(kinds) > 1:
        found = " and ".join(sorted(map(str, kinds)))
        raise InputError(f"merge joins results of one dtype, not of {found}.")
    return Attended(Merged([x._source for x in results]), first._dtype)
