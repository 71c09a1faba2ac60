"""Fields over several key sets from those over each: what `merge` and sharded keys share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cumulant.kernels.merge import HERE, Parts, Pool

__all__ = ["joined"]


def joined(
    sets: Sequence[Callable[[str], Tensor]], parts: Parts = HERE, *, lifted: bool = True
) -> Callable[[str], Tensor]:
    """The columns of all key sets together, from those of the sets at hand (THEORY T1, T7).

    `lifted` says that something may have been taken off the bias of some set.
    """
    pools: list[Pool] = []
    lifts: list[Tensor] = []
    done: dict[str, Tensor] = {}

    def gathered(normalizers: Sequence[Tensor]) -> tuple[Pool, Tensor | None]:
        """The pool, and what was taken off the bias of all sets."""
        if not lifted:
            return Pool(normalizers, parts), None
        # What is common to all sets stays out, so that the rest keeps its digits.
        own = [
            each("lift").masked_fill(x == -math.inf, -math.inf)
            for each, x in zip(sets, normalizers, strict=True)
        ]
        lift = parts.largest(own)
        lift = lift.masked_fill(lift == -math.inf, 0.0)
        lowered = [G + (x - lift) for G, x in zip(normalizers, own, strict=True)]
        return Pool(lowered, parts), parts.own(lift)

    def pool() -> Pool:
        if not pools:
            made, lift = gathered([each("lowered") for each in sets])
            pools.append(made)
            lifts.extend([] if lift is None else [lift])
        return pools[0]

    def mean(name: str) -> Tensor:
        if name not in done:
            (done[name],) = pool().means([each(name) for each in sets])
        return done[name]

    def compute(name: str) -> Tensor:
        if name in ("log_normalizer", "lowered"):
            G = pool().log_normalizer()
            return G + lifts[0] if lifts and name == "log_normalizer" else G
        if name == "lift":
            zero = torch.zeros_like(pool().log_normalizer())
            return lifts[0] if lifts else zero
        if name == "value_variance":
            moments, plain = compute("value_moments"), mean("mean")
            width = plain.shape[-1]
            variance = moments[..., width : 2 * width].to(plain.dtype)
            return variance.masked_fill(~plain.isfinite(), math.nan)
        own = [each(name) for each in sets]  # before the pool: entropy brings G and mean with it
        if name == "entropy":
            (surprise,) = pool().means(pool().surprises(own))
            return pool().entropy(surprise)
        if name == "score_variance":
            pairs = [(each("score_mean"), x) for each, x in zip(sets, own, strict=True)]
            return pool().variance(mean("score_mean"), pairs)
        if name == "value_moments":
            width = own[0].shape[-1] // 2
            pairs = [(x[..., :width], x[..., width:-1]) for x in own]
            wide, _ = gathered([x[..., -1:] for x in own])  # shares as precise as the moments
            (center,) = wide.means([m for m, _ in pairs])
            parted = [center, wide.variance(center, pairs), wide.log_normalizer()]
            return torch.cat(parted, -1)
        return mean(name)

    return compute
