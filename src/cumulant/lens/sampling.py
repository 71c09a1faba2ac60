"""A sample of the queries of an attention call, with everything that shapes their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.attention.calls import AttentionCall
from cumulant.core.typed import tolist
from cumulant.lens.statistics import Positions

__all__ = ["Sample", "Sampled", "sampled"]

# Of how many texts of a batch. Keys are read for each text, and texts differ more than tokens.
MOST_TEXTS = 16


@dataclass(frozen=True)
class Sample:
    """How many queries of a call to measure, drawn with this seed.

    `replayed` is whether the calls come from a pass that was made for the lens, without gradients.
    """

    queries: int
    seed: int
    replayed: bool = False


class Sampled(NamedTuple):
    """A call of fewer queries, where they stand, and which texts of the batch they belong to."""

    call: AttentionCall
    positions: Positions
    texts: list[int]


def sampled(call: AttentionCall, positions: Positions, sample: Sample, layer: int) -> Sampled:
    """Up to `sample.queries` queries of the call, as many of each of up to 16 texts.

    Texts and tokens are drawn without replacement, from a generator of their own. A text with fewer
    tokens than its share gives all of them.
    """
    batch, _, m, _ = call.query.shape
    if batch * m <= sample.queries:
        return Sampled(call, positions, list(range(batch)))
    generator = torch.Generator().manual_seed((sample.seed * 4096 + layer) % 2**63)
    device = call.query.device
    filled = positions.real.any(-1).cpu()
    count = max(1, min(MOST_TEXTS, int(filled.sum()), sample.queries))
    drawn = torch.rand(batch, generator=generator) + filled  # texts of padding alone come last
    texts = drawn.topk(count).indices.sort().values.to(device)
    share = min(m, sample.queries // count)
    chance = torch.rand(count, m, generator=generator).to(device) + positions.real[texts]
    index_bm = chance.topk(share).indices.sort().values
    return Sampled(
        _rows(call, texts, index_bm),
        Positions(
            positions.real[texts].gather(1, index_bm),
            positions.token[texts].gather(1, index_bm),
            positions.key_token[texts],
            positions.own[texts].gather(1, index_bm),
        ),
        tolist(texts),
    )


def _rows(call: AttentionCall, texts: Tensor, index_bm: Tensor) -> AttentionCall:
    """The call for these texts and, of each, these queries; a causal call becomes a masked one."""

    def rows(x: Tensor | None) -> Tensor | None:
        """Of a mask or bias that broadcasts to ``(B, H, M, N)``."""
        if x is None:
            return None
        x = x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
        x = x[texts] if x.shape[0] > 1 else x
        if x.shape[2] == 1:
            return x
        x = x.expand(len(texts), *x.shape[1:])
        index = index_bm[:, None, :, None]
        return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))

    query = call.query[texts]
    index = index_bm[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
    mask, key = rows(call.mask), call.key[texts]
    if call.causal:
        before = torch.arange(key.shape[2], device=key.device) <= index_bm[:, None, :, None]
        mask = before if mask is None else mask & before
    return AttentionCall(
        query.gather(2, index),
        key,
        call.value[texts],
        mask=mask,
        bias=rows(call.bias),
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        cross=call.cross,
    )
