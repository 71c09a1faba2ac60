"""The scores of a contrastive loss: which pairs count, positives, negatives, both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.contrastive.group import ContrastiveGroup, nothing
from cumulant.contrastive.positives import Masked, Positives
from cumulant.core.typed import functions
from cumulant.kernels.attention import Options, attention
from cumulant.kernels.merge import Pool, over_ranks
from cumulant.kernels.potential import both_normalizers

__all__ = ["Scores", "Spread", "both_sides", "spread", "with_queue"]


@dataclass(frozen=True)
class Scores:
    """A checked call: scores are <query, key> + bias, without the pairs that do not count."""

    query: Tensor  # divided by the temperature
    key: Tensor
    positives: Positives
    bias: Tensor | None
    mask: Tensor | None
    tags: tuple[Tensor, Tensor] | None

    def arguments(self) -> dict[str, Tensor]:
        out = {"query": self.query, "key": self.key}
        if self.bias is not None:
            out["bias"] = self.bias
        if self.mask is not None:
            out["mask"] = self.mask
        if self.tags is not None:
            out["query_tag"], out["key_tag"] = self.tags
        rank = max(x.ndim for x in out.values())
        return {n: x[(None,) * (rank - x.ndim)] for n, x in out.items()}

    def positive(self) -> Tensor:
        """The mean score of each anchor's positives, ``(*batch, M)``."""
        score = (self.query * self.positives.center(self.key)).sum(-1)
        if self.bias is None:
            return score
        column = self.bias.mT.expand(*self.key.shape[:-1], 1)
        return score + self.positives.center(column)[..., 0]

    def negatives(self) -> Scores:
        """The same call without the positives; further keys, from a queue, are nobody's."""
        if isinstance(self.positives, Masked):
            others = ~self.positives.mask
            more = self.key.shape[-2] - others.shape[-1]
            others = torch.cat([others, others.new_ones(*others.shape[:-1], more)], -1)
            mask = others if self.mask is None else self.mask & others
            return replace(self, mask=mask)
        anchors, keys = self.positives.tags(self.key.device)
        keys = _untagged(keys, self.key.shape[-2] - keys.shape[-2])
        return replace(self, tags=_joined(self.tags, (anchors, keys)))


def _joined(
    first: tuple[Tensor, Tensor] | None, second: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Tags side by side: equal in any column is hidden."""
    if first is None:
        return second

    def cat(a: Tensor, b: Tensor) -> Tensor:
        batch = functions.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return torch.cat([x.expand(*batch, *x.shape[-2:]) for x in (a, b)], -1)

    return cat(first[0], second[0]), cat(first[1], second[1])


def with_queue(call: Scores, queue: Tensor | None, bias: Tensor | None) -> Scores:
    """The same call with more negatives behind the keys; an empty queue adds none."""
    if queue is None or queue.shape[-2] == 0:
        return call
    more = queue.shape[-2]
    key = torch.cat([call.key, queue.expand(*call.key.shape[:-2], *queue.shape)], -2)
    own = call.bias
    if own is not None:
        other = own.new_zeros(*own.shape[:-1], more) if bias is None else bias
        own = torch.cat([own, other], -1)
    mask, tags = call.mask, call.tags
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], call.key.shape[-2])
        mask = torch.cat([mask, mask.new_ones(*mask.shape[:-1], more)], -1)
    if tags is not None:
        tags = (tags[0], _untagged(tags[1], more))
    return replace(call, key=key, bias=own, mask=mask, tags=tags)


def _untagged(tag: Tensor, more: int) -> Tensor:
    """Tags of the keys, and for so many more one that no query has."""
    return torch.cat([tag, tag.new_full((*tag.shape[:-2], more, tag.shape[-1]), -2)], -2)


def both_sides(call: Scores, group: ContrastiveGroup) -> tuple[Tensor, Tensor]:
    """The mean of the losses of anchors and keys, and G of the anchors."""
    if not group.shared:
        G, H = (x[..., 0] for x in both_normalizers(call.arguments()))
        back = (call.key * call.positives.reversed().center(call.query)).sum(-1)
        return (G - call.positive() + H - back) / 2, G
    # Here are all keys, but only some of the anchors that their normalizers sum over.
    if call.query.shape[-2]:
        rows, columns = both_normalizers(call.arguments())
    else:
        rows, columns = call.query[..., :1], nothing(call.query, call.key)
    whole = Pool([columns], over_ranks(group.ranks, group.rows)).log_normalizer()
    return (rows + whole)[..., 0] / 2 - call.positive(), rows[..., 0]


class Spread(NamedTuple):
    """How the weights of each anchor are spread over its keys, ``(*batch, M)``."""

    entropy: Tensor
    log_normalizer: Tensor


def spread(call: Scores) -> Spread:
    """Entropy of the weights and G, ``(*batch, M)``."""
    named = call.arguments()
    moments = attention({**named, "value": named["key"][..., :0]}, Options(entropy=True))
    if moments.entropy is None:
        raise RuntimeError("the kernel was asked for the entropy and did not return it")
    return Spread(moments.entropy[..., 0], moments.log_normalizer[..., 0])
