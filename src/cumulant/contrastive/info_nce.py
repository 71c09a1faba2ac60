"""`info_nce`: contrastive learning as the likelihood of the tilted family (docs/theory.md, T24)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cumulant.contrastive.call import Call, Reduction, Similarity
from cumulant.contrastive.group import ContrastiveGroup, Reduce
from cumulant.contrastive.scores import Scores, both_sides, spread, with_queue
from cumulant.core.checks import a_step
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.renamed import renamed
from cumulant.kernels.merge import Pool
from cumulant.kernels.potential import log_normalizer

__all__ = ["Contrast", "contrast", "info_nce", "nt_xent"]


@dataclass(frozen=True)
class Contrast:
    """The loss of `info_nce` with its statistics, one of each for every anchor.

    Attributes:
        loss: reduced as requested.
        log_normalizer: G of the scores, log-weights included, ``(*batch, M)``.
        entropy: of the weights over all keys in the normalizer, in nats.
        effective_negatives: e to the entropy of the weights over the negatives alone: 1 if one
            negative has all the weight, the number of negatives if they share it; 0 without any.
    """

    loss: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    effective_negatives: Tensor

    __repr__ = described_fields


@renamed(details="contrast(...)")
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
    group: Any = None,
) -> Tensor:
    """The contrastive loss -<q, k+>/t + G(q/t), exact, in linear memory, any derivative (T24).

    It is the negative log-likelihood of the positive key under the measure over keys tilted by the
    anchor, so its gradient in q is (E[k] - k+)/t. No matrix of anchors by keys is ever stored.

    Args:
        query: ``(*batch, M, d)``, the anchors.
        key: ``(*batch, N, d)``.
        positives: key indices ``(*batch, M)``; ``(*batch, M, K)`` for several per anchor, padded
            with -1; or a boolean mask ``(*batch, M, N)``. Default: key i for anchor i. With several
            positives, the loss is the mean over them, as in SupCon.
        labels: integers; keys with an anchor's label are its positives (linear in memory, unlike a
            mask). One tensor if anchors and keys are the same points (then pass exclude="self", or
            each is its own positive), otherwise ``(labels of anchors, labels of keys)``. -1 is an
            ordinary label; queue keys have none.
        temperature: t > 0, a number or a tensor with one entry (`Temperature` learns it).
        similarity: "cosine" normalizes the vectors, "dot" does not.
        symmetric: average this loss with the one where keys are the anchors (CLIP), from the same
            scores. Needs as many keys as anchors.
        log_weights: ``(*batch, N)``, added to all scores of a key, including the positive's: logQ
            correction is ``-log_probability``. With a queue, also ``(*batch, N + Q)``.
        exclude: pairs to ignore, such as false negatives: "self" for (i, i), key indices ``(M,)``
            or ``(*batch, M, K)`` padded with -1, or a boolean mask ``(*batch, M, N)``, True =
            excluded. A positive cannot be excluded.
        queue: ``(Q, d)``, more negatives for every anchor, such as ``KeyQueue.keys``; over a group,
            for the anchors of this rank.
        in_batch: False compares an anchor only with its positive and the queue, as in MoCo.
        reduction: "mean" over anchors, "sum" or "none".
        group: ranks that train together, such as ``torch.distributed.group.WORLD`` or one dimension
            of a `DeviceMesh`. Each rank passes its own anchors, keys, `labels` and `log_weights`,
            and every anchor is scored against the keys of all ranks. Key indices in `positives` and
            `exclude` are numbered across ranks, rank 0 first; by default, key i of a rank is the
            positive of its anchor i. Every rank gets the loss over all anchors ("none": over its
            own). Gradients in anchors and keys match a single process; for a temperature and any
            other weights each rank has a part of the gradient, to be summed (docs/distributed.md).

    Returns:
        The loss; `contrast` returns statistics too. float16 and bfloat16 are computed in float32.

    Raises:
        InputError: a temperature <= 0, a zero vector under cosine, positives that are missing, out
            of range or excluded, or an empty queue with ``in_batch=False``.
        GroupError: another rank died, or is in a different call.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(8, 16)
    >>> logits = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(x).T / 0.07
    >>> exact = torch.nn.functional.cross_entropy(logits, torch.arange(8))
    >>> torch.allclose(cm.contrastive.info_nce(x, x), exact, atol=1e-5)
    True
    """
    call = Call(
        *(query, key, positives, labels, temperature, similarity, symmetric),
        *(log_weights, exclude, queue, in_batch, reduction),
    )
    return _loss(call, ContrastiveGroup(group)).loss


def contrast(
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
    group: Any = None,
) -> Contrast:
    """`info_nce` together with each anchor's G, entropy and effective number of negatives.

    Takes the arguments of `info_nce`, and one or two more passes over the keys.

    >>> import torch, cumulant as cm
    >>> x = torch.eye(4)  # each anchor has one positive and three negatives of one weight
    >>> cm.contrastive.contrast(x, x).effective_negatives
    tensor([3., 3., 3., 3.])
    """
    call = Call(
        *(query, key, positives, labels, temperature, similarity, symmetric),
        *(log_weights, exclude, queue, in_batch, reduction),
    )
    made = _loss(call, ContrastiveGroup(group))
    if call.in_batch:
        entropy = spread(made.scores).entropy
        negative, mass = spread(made.scores.negatives())
    else:
        negative, mass = spread(made.scores)
        both = Pool([made.positive, mass])
        (surprise,) = both.means(both.surprises([torch.zeros_like(negative), negative]))
        entropy = both.entropy(surprise)
    effective = negative.exp().masked_fill(mass == -torch.inf, 0.0)
    return Contrast(made.loss, made.log_normalizer, entropy, effective)


class _Loss(NamedTuple):
    """The loss, each anchor's G and positive score, and the scores that G sums over.

    With ``in_batch=False`` these scores are the queue's alone: the positive comes to them.
    """

    loss: Tensor
    log_normalizer: Tensor
    positive: Tensor
    scores: Scores


@a_step
def _loss(call: Call, group: ContrastiveGroup) -> _Loss:
    scores, queue, queue_bias, kind = call.checked(group)
    reduce, positive = Reduce(group, call.reduction, kind), scores.positive()
    if call.symmetric:
        loss, normalizer = both_sides(scores, group)
    elif call.in_batch:
        scores = with_queue(scores, queue, queue_bias)
        normalizer = log_normalizer(scores.arguments()).squeeze(-1)
        loss = normalizer - positive
    else:  # MoCo: each anchor against its own positive and the queue
        queue = scores.key[..., :0, :] if queue is None else queue  # a rank without anchors
        scores = Scores(scores.query, queue, scores.positives, queue_bias, None, None)
        rest = log_normalizer(scores.arguments()).squeeze(-1)
        normalizer = Pool([positive, rest]).log_normalizer()
        loss = normalizer - positive
    return _Loss(reduce(loss), normalizer, positive, scores)


def nt_xent(
    first: Tensor, second: Tensor, temperature: float | Tensor = 0.5, *, group: Any = None
) -> Tensor:
    """SimCLR's loss on two views: each of the 2n rows is an anchor for all others.

    Args:
        first, second: ``(n, d)``; row i of both is a view of the same item.
        temperature, group: as in `info_nce`.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(8, 16)
    >>> bool(cm.contrastive.nt_xent(x, x) < cm.contrastive.nt_xent(x, x.flip(0)))
    True
    """
    ranks = ContrastiveGroup(group)

    def both() -> tuple[Tensor, Tensor]:
        for name, x in (("first", first), ("second", second)):
            if not isinstance(x, Tensor) or x.ndim != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(f"nt_xent: {name} must be a tensor of shape (n, d).")
        if first.shape != second.shape:
            raise InputError(
                f"nt_xent: the views must have the same shape, but have {tuple(first.shape)} and "
                f"{tuple(second.shape)}."
            )
        views = torch.cat([first, second])
        return views, views

    views, _ = ranks.enter("nt_xent", both)
    partner = torch.arange(len(views), device=views.device).roll(len(first)) + ranks.own.start
    return info_nce(
        views, views, positives=partner, temperature=temperature, exclude="self", group=group
    )
