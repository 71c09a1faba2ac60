"""`info_nce`: contrastive learning as the likelihood of the tilted family (docs/theory.md, T24)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cumulant.contrastive.inputs import (
    excluded,
    is_self,
    vectors,
    weights,
)
from cumulant.contrastive.positives import (
    Aligned,
    Listed,
    Masked,
    Positives,
    label_rows,
    positives_of,
)
from cumulant.contrastive.room import Reduce, Room, nothing
from cumulant.core.errors import InputError
from cumulant.distributed.facts import Facts, grad_mode
from cumulant.kernels.attention import Options, attention
from cumulant.kernels.merge import Pool, over_ranks
from cumulant.kernels.potential import both_normalizers, log_normalizer

__all__ = ["Contrast", "info_nce", "nt_xent"]

Similarity = Literal["cosine", "dot"]
Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class Contrast:
    """`info_nce` with its statistics, one of each for every anchor.

    Attributes:
        loss: reduced as asked for.
        log_normalizer: G of the scores, log-weights included, ``(*batch, M)``.
        entropy: of the weights over all keys that count, in nats.
        effective_negatives: e to the entropy of the weights over the negatives alone: 1 if one
            negative has all the weight, the number of negatives if they share it; 0 without any.
    """

    loss: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    effective_negatives: Tensor


@dataclass(frozen=True)
class _Scores:
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

    def negatives(self) -> _Scores:
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


def _joined(first: tuple[Tensor, Tensor] | None, second: tuple[Tensor, Tensor]) -> Any:
    """Tags side by side: equal in any column is hidden."""
    if first is None:
        return second

    def cat(a: Tensor, b: Tensor) -> Tensor:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return torch.cat([x.expand(*batch, *x.shape[-2:]) for x in (a, b)], -1)

    return cat(first[0], second[0]), cat(first[1], second[1])


class _Local(NamedTuple):
    """What this process brings, checked."""

    query: Tensor
    key: Tensor
    queue: Tensor | None
    kind: torch.dtype
    bias: Tensor | None
    queue_bias: Tensor | None
    labels: list[Tensor] | None


def info_nce(
    query: Tensor,
    key: Tensor,
    *,
    positives: Tensor | None = None,
    labels: Any = None,
    temperature: float | Tensor = 0.07,
    similarity: Similarity = "cosine",
    symmetric: bool = False,
    log_weights: Tensor | None = None,
    exclude: Tensor | Literal["self"] | None = None,
    queue: Tensor | None = None,
    in_batch: bool = True,
    reduction: Reduction = "mean",
    details: bool = False,
    group: Any = None,
) -> Any:
    """The contrastive loss -<q, k+>/t + G(q/t), exact, in linear memory, any derivative (T24).

    It is the negative log-likelihood of the positive key under the measure over keys tilted by the
    anchor, so its gradient in q is (E[k] - k+)/t. No matrix of anchors by keys is ever stored.

    Args:
        query: ``(*batch, M, d)``, the anchors.
        key: ``(*batch, N, d)``.
        positives: key numbers ``(*batch, M)``; ``(*batch, M, K)`` for several per anchor, -1 where
            there are fewer; or a boolean mask ``(*batch, M, N)``. Key i belongs to anchor i if left
            out. Several positives count alike: the mean of their losses, as in SupCon.
        labels: whole numbers; keys of an anchor's label are its positives (linear in memory, where
            a mask is not). One tensor if anchors and keys are the same points (then exclude="self",
            or each is its own positive), otherwise ``(labels of anchors, labels of keys)``. -1 is a
            label like others, and keys of a queue have none.
        temperature: t > 0, a number or a tensor with one entry (`Temperature` learns it).
        similarity: "cosine" divides by the norms, "dot" takes the vectors as they are.
        symmetric: the mean of this loss and that of the keys as anchors (CLIP), from the same
            scores. Needs as many keys as anchors.
        log_weights: ``(*batch, N)``, added to all scores of a key, the positive's included: logQ
            correction is ``-log_probability``. With a queue also ``(*batch, N + Q)``.
        exclude: pairs that do not count, such as false negatives: "self" for (i, i), key numbers
            ``(M,)`` or ``(*batch, M, K)`` with -1 for none, or a boolean mask ``(*batch, M, N)``,
            True = left out. A positive cannot be left out.
        queue: ``(Q, d)``, more negatives for every anchor, such as ``KeyQueue.keys``; over a group,
            for the anchors of this rank.
        in_batch: False compares an anchor with its own positive and the queue alone, as MoCo does.
        reduction: "mean" over anchors, "sum" or "none".
        details: also return G, entropy and effective number of negatives, at one more pass or two.
        group: of ranks that train together, such as ``torch.distributed.group.WORLD`` or one
            dimension of a `DeviceMesh`. Anchors and keys are each rank's own, and every anchor
            meets the keys of all ranks: numbers of keys, in `positives` and `exclude`, count those
            of rank 0 first, and key i of a rank belongs to its anchor i if they are left out;
            `labels` and `log_weights` are those of this rank. The loss is that of all anchors, on
            every rank ("none": of this rank's). Gradients in anchors and keys are those of a single
            process; of a temperature, as of any weights, each rank has its part of the gradient,
            which DDP adds up (docs/distributed.md).

    Returns:
        The loss, or `Contrast` with `details`. float16 and bfloat16 are computed in float32.

    Raises:
        InputError: a temperature that is not positive, a zero vector under cosine, positives that
            are missing, out of range or left out, an empty queue where it is all there is.
        GroupError: another rank has died, or is in another call.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(8, 16)
    >>> logits = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(x).T / 0.07
    >>> exact = torch.nn.functional.cross_entropy(logits, torch.arange(8))
    >>> torch.allclose(cm.contrastive.info_nce(x, x), exact, atol=1e-5)
    True
    """
    room = Room(group)

    def local() -> _Local:
        if reduction not in ("mean", "sum", "none"):
            raise InputError(f"info_nce: reduction must be mean, sum or none, not {reduction!r}.")
        if symmetric and (log_weights is not None or queue is not None or not in_batch):
            raise InputError(
                "info_nce: with symmetric, keys are anchors too, so log_weights, queue and "
                "in_batch=False have no meaning; call it twice, once for each side."
            )
        q, k, extra, kind = vectors(query, key, queue, similarity, temperature, empty=room.shared)
        bias, extra_bias = weights(log_weights, k, extra)
        named = None if labels is None else label_rows("info_nce", labels, q, k)
        return _Local(q, k, extra, kind, bias, extra_bias, named)

    def facts() -> Facts:
        return {
            **grad_mode(),
            "whether it is symmetric": bool(symmetric),
            "reduction": reduction,
            "similarity": similarity,
            "whether other anchors' keys count": bool(in_batch),
            "the value of temperature": _number(temperature),
            "whether the temperature requires gradients": _learned(temperature),
            "whether log_weights require gradients": _learned(log_weights),
            "whether log_weights are given": log_weights is not None,
            "whether labels are given": labels is not None,
        }

    q, k, extra, kind, bias, extra_bias, named = room.enter("info_nce", local, facts)
    if named is not None:
        others = named[1].expand(k.shape[:-1])
        labels = named[0], room.gather(others[..., None])[..., 0]
    if bias is not None:
        bias = room.gather(bias.expand(*k.shape[:-2], 1, k.shape[-2]).mT).mT
    own, k = room.own, room.gather(k)

    def scores() -> _Scores:
        if q.shape[-2] == 0:
            return _Scores(q, k, Aligned(0, k.shape[-2]), bias, None, None)
        not_self = is_self(exclude)
        given = positives_of("info_nce", positives, labels, q, k, not_self=not_self, own=own)
        if room.shared and symmetric and not isinstance(given, Aligned):
            raise InputError(
                "info_nce: symmetric over a group needs key i of a rank to belong to its anchor i; "
                "leave positives and labels out."
            )
        if symmetric:
            _as_many(q, k, own.stop - own.start)
        tags, mask = excluded(exclude, given, q, k, first=own.start)
        made = _Scores(q, k, given, bias, mask, tags)
        if not in_batch:
            _check_queue(made, extra)
        return made

    call = room.checked(scores)
    reduce = Reduce(room, reduction, kind)
    if symmetric:
        loss, normalizer = _both_sides(call, room)
    elif in_batch:
        positive = call.positive()
        call = _with_queue(call, extra, extra_bias)
        normalizer = log_normalizer(call.arguments())[..., 0]
        loss = normalizer - positive
    else:
        return _against_queue(call, extra, extra_bias, reduce, details)
    out = reduce(loss)
    if not details:
        return out
    entropy, _ = _entropy(call)
    negative, mass = _entropy(call.negatives())
    effective = negative.exp().masked_fill(mass == -math.inf, 0.0)
    return Contrast(out, normalizer, entropy, effective)


def _learned(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _number(x: Any) -> float | str:
    """A plain number as ranks compare it; a tensor, which may be learned, is taken as it is."""
    return "a tensor" if isinstance(x, Tensor) else float(x)


def nt_xent(
    first: Tensor, second: Tensor, temperature: float | Tensor = 0.5, *, group: Any = None
) -> Tensor:
    """SimCLR's loss on two views of the same things: each of the 2n is an anchor for all others.

    Args:
        first, second: ``(n, d)``; row i of both shows the same thing.
        temperature, group: as in `info_nce`.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(8, 16)
    >>> bool(cm.contrastive.nt_xent(x, x) < cm.contrastive.nt_xent(x, x.flip(0)))
    True
    """
    room = Room(group)

    def both() -> tuple[Tensor, Tensor]:
        for name, x in (("first", first), ("second", second)):
            if not isinstance(x, Tensor) or x.ndim != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(f"nt_xent: {name} must be a tensor of shape (n, d).")
        if first.shape != second.shape:
            raise InputError(
                f"nt_xent: the views must have one shape, but have {tuple(first.shape)} and "
                f"{tuple(second.shape)}."
            )
        views = torch.cat([first, second])
        return views, views

    views, _ = room.enter("nt_xent", both)
    partner = torch.arange(len(views), device=views.device).roll(len(first)) + room.own.start
    return info_nce(
        views, views, positives=partner, temperature=temperature, exclude="self", group=group
    )


def _with_queue(call: _Scores, queue: Tensor | None, bias: Tensor | None) -> _Scores:
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


def _both_sides(call: _Scores, room: Room) -> tuple[Tensor, Tensor]:
    """The mean of the losses of anchors and keys, and G of the anchors."""
    if not room.shared:
        G, H = (x[..., 0] for x in both_normalizers(call.arguments()))
        back = (call.key * call.positives.reversed().center(call.query)).sum(-1)
        return (G - call.positive() + H - back) / 2, G
    # Here are all keys, but only some of the anchors that their normalizers sum over.
    if call.query.shape[-2]:
        rows, columns = both_normalizers(call.arguments())
    else:
        rows, columns = call.query[..., :1], nothing(call.query, call.key)
    whole = Pool([columns], over_ranks(room.ranks, room.rows)).log_normalizer()
    return (rows + whole)[..., 0] / 2 - call.positive(), rows[..., 0]


def _as_many(query: Tensor, key: Tensor, keys: int) -> None:
    anchors = query.shape[-2]
    if anchors != keys or query.shape[:-2] != key.shape[:-2]:
        raise InputError(
            f"info_nce: symmetric needs as many keys as anchors, but got {anchors} anchors in "
            f"batches {tuple(query.shape[:-2])} and {keys} keys in batches "
            f"{tuple(key.shape[:-2])}."
        )


def _check_queue(call: _Scores, queue: Tensor | None) -> None:
    """What comparing with the queue alone needs."""
    if queue is None or queue.shape[-2] == 0:
        raise InputError(
            "info_nce: in_batch=False compares with the queue alone, but the queue is "
            + ("missing." if queue is None else "empty; push some keys first.")
        )
    one = call.positives
    if not isinstance(one, Aligned) and not (isinstance(one, Listed) and one.index.shape[-1] == 1):
        raise InputError("info_nce: in_batch=False takes one positive for each anchor.")
    if call.tags is not None or call.mask is not None:
        raise InputError(
            "info_nce: exclude is about keys of the batch; with in_batch=False leave it."
        )


def _against_queue(
    call: _Scores, queue: Tensor | None, bias: Tensor | None, reduce: Reduce, details: bool
) -> Tensor | Contrast:
    """MoCo: each anchor against its own positive and the queue."""
    positive = call.positive()
    queue = call.key[..., :0, :] if queue is None else queue  # a rank without anchors needs none
    against = _Scores(call.query, queue, call.positives, bias, None, None)
    if not details:
        rest = log_normalizer(against.arguments())[..., 0]
        both = Pool([positive, rest])
        return reduce(both.log_normalizer() - positive)
    negative, rest = _entropy(against)
    both = Pool([positive, rest])
    (surprise,) = both.means(both.surprises([torch.zeros_like(negative), negative]))
    normalizer = both.log_normalizer()
    loss = reduce(normalizer - positive)
    return Contrast(loss, normalizer, both.entropy(surprise), negative.exp())


def _entropy(call: _Scores) -> tuple[Tensor, Tensor]:
    """Entropy of the weights and G, ``(*batch, M)``."""
    named = call.arguments()
    moments = attention({**named, "value": named["key"][..., :0]}, Options(entropy=True))
    if moments.entropy is None:
        raise RuntimeError("the kernel was asked for the entropy and did not return it")
    return moments.entropy[..., 0], moments.log_normalizer[..., 0]
