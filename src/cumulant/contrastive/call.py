"""A call of `info_nce`: its options, checked on this rank and compared with the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cumulant.contrastive.group import ContrastiveGroup
from cumulant.contrastive.inputs import excluded, is_self, vectors, weights
from cumulant.contrastive.positives import Aligned, Listed, label_rows, positives_of
from cumulant.contrastive.scores import Scores
from cumulant.core.errors import InputError
from cumulant.distributed.facts import Facts, grad_mode

__all__ = ["Call", "Checked", "Reduction", "Similarity"]

Similarity = Literal["cosine", "dot"]
Reduction = Literal["mean", "sum", "none"]


class _Local(NamedTuple):
    """What this process brings, checked."""

    query: Tensor
    key: Tensor
    queue: Tensor | None
    kind: torch.dtype
    bias: Tensor | None
    queue_bias: Tensor | None
    labels: list[Tensor] | None


class Checked(NamedTuple):
    """A call ready to compute: scores against all ranks' keys, and this rank's queue."""

    scores: Scores
    queue: Tensor | None
    queue_bias: Tensor | None
    kind: torch.dtype


@dataclass(frozen=True)
class Call:
    """The arguments of `info_nce` as they came."""

    query: Tensor
    key: Tensor
    positives: Tensor | None
    labels: Any
    temperature: float | Tensor
    similarity: Similarity
    symmetric: bool
    log_weights: Tensor | None
    exclude: Tensor | Literal["self"] | None
    queue: Tensor | None
    in_batch: bool
    reduction: Reduction

    def checked(self, group: ContrastiveGroup) -> Checked:
        """Check the call on every rank, gather the keys, and say which pairs count."""
        mine = group.enter("info_nce", lambda: self._local(group), self._facts)
        labels: Any = self.labels
        if mine.labels is not None:
            others = mine.labels[1].expand(mine.key.shape[:-1])
            labels = mine.labels[0], group.gather(others[..., None])[..., 0]
        bias, k = mine.bias, mine.key
        if bias is not None:
            bias = group.gather(bias.expand(*k.shape[:-2], 1, k.shape[-2]).mT).mT
        every = group.gather(k)

        def scores() -> Scores:
            return self._scores(group, mine, every, labels, bias)

        return Checked(group.checked(scores), mine.queue, mine.queue_bias, mine.kind)

    def _local(self, group: ContrastiveGroup) -> _Local:
        if self.reduction not in ("mean", "sum", "none"):
            raise InputError(
                f"info_nce: reduction must be mean, sum or none, not {self.reduction!r}."
            )
        queued = self.queue is not None or not self.in_batch
        if self.symmetric and (self.log_weights is not None or queued):
            raise InputError(
                "info_nce: with symmetric, keys are anchors too, so log_weights, queue and "
                "in_batch=False do not apply; call it twice, once per side."
            )
        q, k, extra, kind = vectors(
            self.query, self.key, self.queue, self.similarity, self.temperature, empty=group.shared
        )
        bias, extra_bias = weights(self.log_weights, k, extra)
        labels = None if self.labels is None else label_rows("info_nce", self.labels, q, k)
        return _Local(q, k, extra, kind, bias, extra_bias, labels)

    def _facts(self) -> Facts:
        """What ranks must agree on."""
        return {
            **grad_mode(),
            "whether it is symmetric": bool(self.symmetric),
            "reduction": self.reduction,
            "similarity": self.similarity,
            "whether other anchors' keys count": bool(self.in_batch),
            "the value of temperature": _number(self.temperature),
            "whether the temperature requires gradients": _learned(self.temperature),
            "whether log_weights require gradients": _learned(self.log_weights),
            "whether log_weights are given": self.log_weights is not None,
            "whether labels are given": self.labels is not None,
        }

    def _scores(
        self,
        group: ContrastiveGroup,
        mine: _Local,
        k: Tensor,
        labels: Any,
        bias: Tensor | None,
    ) -> Scores:
        q, own = mine.query, group.own
        if q.shape[-2] == 0:
            return Scores(q, k, Aligned(0, k.shape[-2]), bias, None, None)
        not_self = is_self(self.exclude)
        given = positives_of("info_nce", self.positives, labels, q, k, not_self=not_self, own=own)
        if group.shared and self.symmetric and not isinstance(given, Aligned):
            raise InputError(
                "info_nce: symmetric over a group needs key i of a rank to belong to its anchor i; "
                "drop positives and labels."
            )
        if self.symmetric:
            _as_many(q, k, own.stop - own.start)
        tags, mask = excluded(self.exclude, given, q, k, first=own.start)
        made = Scores(q, k, given, bias, mask, tags)
        if not self.in_batch:
            _check_queue(made, mine.queue)
        return made


def _learned(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _number(x: Any) -> float | str:
    """A plain number as ranks compare it; a tensor, which may be learned, is taken as it is."""
    return "a tensor" if isinstance(x, Tensor) else float(x)


def _as_many(query: Tensor, key: Tensor, keys: int) -> None:
    anchors = query.shape[-2]
    if anchors != keys or query.shape[:-2] != key.shape[:-2]:
        raise InputError(
            f"info_nce: symmetric needs as many keys as anchors, but got {anchors} anchors in "
            f"batches {tuple(query.shape[:-2])} and {keys} keys in batches "
            f"{tuple(key.shape[:-2])}."
        )


def _check_queue(call: Scores, queue: Tensor | None) -> None:
    """What comparing with the queue alone needs."""
    if queue is None or queue.shape[-2] == 0:
        raise InputError(
            "info_nce: in_batch=False compares only with the queue, but the queue is "
            + ("missing." if queue is None else "empty; push some keys first.")
        )
    one = call.positives
    if not isinstance(one, Aligned) and not (isinstance(one, Listed) and one.index.shape[-1] == 1):
        raise InputError("info_nce: in_batch=False takes one positive for each anchor.")
    if call.tags is not None or call.mask is not None:
        raise InputError(
            "info_nce: exclude applies to keys of the batch; drop it with in_batch=False."
        )
