"""What attention over sharded keys costs a rank: bytes, messages, FLOPs, memory, on paper.

The bytes are those that `traffic` counts; docs/scaling.md derives the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cumulant.core.errors import InputError
from cumulant.distributed.ranks import COMPARED

__all__ = ["Cost", "Step", "Way", "cost", "seconds"]

Way = Literal["replicated", "gather", "ring"]
Step = Literal["forward", "training step"]

# Ranks compare whole numbers of 8 bytes, once for the call and once for its field.
_COMPARISONS, _COMPARED = 2, COMPARED * 8


@dataclass(frozen=True)
class Cost:
    """The cost of one step for one rank.

    Attributes:
        bytes: sent to other ranks.
        messages: number of collectives and of passes to the next rank.
        hops: consecutive messages, with collectives going around a ring of ranks.
        flops: matrix products only; a multiplication and an addition count as two.
        memory: bytes of inputs, results and intermediate values held at once, without score tiles.
        reads: bytes of keys and values, and copies, that memory must move at least once.
    """

    bytes: float
    messages: int
    hops: int
    flops: int
    memory: int
    reads: int


def cost(
    way: Way,
    queries: int | Sequence[int],
    keys: int | Sequence[int],
    features: int,
    width: int | None = None,
    *,
    ranks: int = 1,
    rank: int = 0,
    step: Step = "forward",
    size: int = 4,
    batch: int = 1,
) -> Cost:
    """The cost of ``cm.attend(query, ShardedKeys(...)).mean`` for one rank, without masks.

    Args:
        way: "replicated" queries, or sharded ones that go by "gather" or "ring".
        queries: number of queries over all ranks or, unless replicated, one number per rank.
        keys: the same for keys. A single number is split as evenly as possible, larger parts first.
        features: of queries and keys.
        width: width of the values; None if the values are the keys.
        ranks, rank: the number of ranks, and the rank whose cost is computed.
        step: "forward", or "training step": forward and the gradient in queries, keys and values.
        size: bytes per number of the input; half precision is computed and mostly sent in float32.
        batch: number of such problems at once, such as heads.

    Raises:
        InputError: an unknown way or step, or counts that do not fit the ranks.

    >>> import cumulant as cm
    >>> one = cm.distributed.cost("replicated", 4096, 10**9, 128, ranks=64)
    >>> f"{one.memory / 1e9:.1f} GB, {one.flops / 1e12:.1f} TFLOP, {one.bytes / 1e6:.1f} MB sent"
    '8.0 GB, 32.8 TFLOP, 4.2 MB sent'
    """
    if way not in ("replicated", "gather", "ring"):
        raise InputError(f"cost: way must be replicated, gather or ring, not {way!r}.")
    if step not in ("forward", "training step"):
        raise InputError(f"cost: step must be 'forward' or 'training step', not {step!r}.")
    if not 0 <= rank < ranks or min(features, size, batch) < 1:
        raise InputError("cost: rank must be below ranks, and sizes must be positive.")
    if way == "replicated" and not isinstance(queries, int):
        raise InputError("cost: replicated queries are the same on all ranks: pass one number.")
    m, n = _parts("queries", queries, ranks), _parts("keys", keys, ranks)
    d, e = features, features if width is None else width
    held = d if width is None else d + e  # numbers stored for a key
    wide, trained = max(size, 4), step == "training step"
    P, M, N, others = ranks, sum(m), sum(n), ranks - 1
    messages, hops = _COMPARISONS, _COMPARISONS * others
    sent = float(hops * _COMPARED)
    if way == "ring":
        # What passes by last is the next rank's own shard, which need not go there.
        sent += batch * wide * (d + e) * (1 + trained) * (N - n[(rank + 1) % P])
        sent += batch * wide * (d + e) * N * trained  # sums for keys, all the way home
        passed = (1 + trained) * others + P * trained
        messages, hops = messages + passed, hops + passed
    elif way == "gather":
        # Queries, and gradients of answers, are gathered, padded to the longest part; answers, and
        # gradients of queries, go straight to their ranks.
        sent += batch * others * max(m) * (d * size + (e + 1) * wide * trained)
        sent += batch * (M - m[rank]) * ((e + 1) * wide + d * size * trained)
        sent += batch * 2 * others / P * M * wide
        messages += 3 + 2 * trained
        hops += (2 + 2 * trained) * others + 2 * others
    else:
        sent += batch * 2 * others / P * M * ((e + 2) * wide + d * size * trained)
        messages += 2 + trained
        hops += 2 * (2 + trained) * others
    if P == 1:
        sent, messages, hops = 0.0, 0, 0
    here = m[rank] if way == "ring" else M
    pairs = batch * here * (N if way == "ring" else n[rank])
    flops = pairs * (2 * d + 2 * e + (6 * d + 4 * e) * trained)
    copies = (n[rank] * held + here * d) * wide * (size < wide)
    memory = n[rank] * held * size + (M if way == "replicated" else m[rank]) * d * size + copies
    shards = min(others, 2) + 4 * trained if way == "ring" and P > 1 else trained
    memory += shards * max(n) * (d + e) * wide
    # Rows of features and of answers that live at once, forward and backward: found by measuring.
    alive = {"replicated": ((1, 4), (3, 6)), "gather": ((1, 6), (3, 4)), "ring": ((0, 6), (3, 3))}
    rows = alive[way] if P > 1 else ((0, 1), (1, 2))
    memory += here * max(a * d + b * (e + 1) for a, b in rows[: 1 + trained]) * wide
    reads = (1 + trained) * (N if way == "ring" else n[rank]) * held * size
    reads += 2 * n[rank] * held * wide * (size < wide)  # copies are written and read
    return Cost(sent, messages, hops, flops, batch * memory, batch * reads)


def seconds(
    cost: Cost, *, bandwidth: float, flops: float, latency: float = 0.0, memory: float = math.inf
) -> float:
    """Estimated time of a step where nothing overlaps: arithmetic or reading, then sending.

    Args:
        bandwidth: bytes per second that a rank sends.
        flops: per second, of a rank.
        latency: seconds of a hop.
        memory: bytes per second that a rank reads.
    """
    work = max(cost.flops / flops, cost.reads / memory)
    return work + cost.bytes / bandwidth + cost.hops * latency


def _parts(name: str, given: int | Sequence[int], ranks: int) -> list[int]:
    """How many each rank has."""
    if isinstance(given, int):
        given = [given // ranks + (r < given % ranks) for r in range(ranks)]
    if len(given) != ranks or min(given) < 0:
        raise InputError(f"cost: {name} must be a number, or one for each of {ranks} ranks.")
    return list(given)
