"""`linear_cross_entropy`: the loss of a classifier over a vocabulary, without its logits (T24).

Logits are <x, W_j> + b_j, so their log-sum-exp is attention's G with the rows of W as keys, and the
loss is G minus the target's score. Everything else is linear in the scores or a function of G.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from cumulant.contrastive.call import Reduction
from cumulant.contrastive.vocabulary_call import Problem, VocabularyCall
from cumulant.core.checks import a_step, holds
from cumulant.core.describing import described_fields
from cumulant.distributed.maps import total
from cumulant.distributed.ranks import Ranks
from cumulant.kernels.attention import Options, attention
from cumulant.kernels.likelihood import likelihood, score_total, target_score
from cumulant.kernels.merge import Pool, over_ranks

__all__ = ["LossAndEntropy", "LossAndLse", "LossLseEntropy", "linear_cross_entropy"]


class LossAndLse(NamedTuple):
    """What `linear_cross_entropy` returns with ``return_lse=True``."""

    loss: Tensor
    lse: Tensor

    __repr__ = described_fields


class LossAndEntropy(NamedTuple):
    """What `linear_cross_entropy` returns with ``return_entropy=True``."""

    loss: Tensor
    entropy: Tensor

    __repr__ = described_fields


class LossLseEntropy(NamedTuple):
    """What `linear_cross_entropy` returns with both."""

    loss: Tensor
    lse: Tensor
    entropy: Tensor

    __repr__ = described_fields


class _Options(TypedDict, total=False):
    """The keywords that do not change what is returned."""

    linear_bias: Tensor | None
    weight: Tensor | None
    reduction: Reduction
    ignore_index: int | None
    label_smoothing: float
    softcap: float | None
    z_loss: float
    options: object
    group: Any


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[False] = False,
    **options: Unpack[_Options],
) -> LossAndLse: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    **options: Unpack[_Options],
) -> LossAndEntropy: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[True],
    **options: Unpack[_Options],
) -> LossLseEntropy: ...


@a_step
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    options: object = None,
    group: Any = None,
) -> Tensor | LossAndLse | LossAndEntropy | LossLseEntropy:
    """Cross-entropy of ``input @ linear_weight.T + linear_bias`` without the logits (T24).

    loss_i = G_i - s_i(target_i),   s_ij = <x_i, W_j> + b_j,   G_i = log sum_j exp(s_ij)

    The same values as ``torch.nn.functional.linear_cross_entropy``, in memory linear in tokens plus
    classes, with derivatives of any order, forward and reverse (torch's chunked version returns a
    zero tangent in forward mode and has no second derivative). "mean" and "sum" make the gradient
    in the same pass as the loss; everything else computes the scores once more.

    Args:
        input: ``(*batch, features)``, one row for each token.
        linear_weight: ``(classes, features)``. As in torch also ``(classes, d_1, ..., d_K,
            features)`` with an input ``(N, features)``.
        target: class numbers ``(*batch)``, or probabilities of the classes ``(*batch, classes)``;
            ``(N, d_1, ..., d_K)`` or ``(N, classes, d_1, ..., d_K)`` with K dimensions.
        linear_bias: ``(classes)``, or ``(classes, d_1, ..., d_K)``; added before the softcap.
        weight: ``(classes)``, as in ``torch.nn.CrossEntropyLoss``.
        reduction: "mean" divides by the sum of the targets' weights (by the number of rows if
            targets are probabilities), "sum" adds up, "none" returns a loss for each row. The mean
            over no row is NaN, with zero gradients, as in torch.
        ignore_index: the target of rows that do not count; -100 by default. Their loss is 0.
        label_smoothing: from 0 to 1, the share of the target that is spread over all classes.
        softcap: logits become softcap * tanh(logits / softcap), as in Gemma.
        z_loss: adds z_loss * G_i^2 to the loss of each row that counts, whatever its class weight
            ("mean": its mean over these rows).
        return_lse: return G too, ``(*batch)``, also of rows that do not count.
        return_entropy: return the entropy of each row's softmax in nats, likewise. With
            ``reduction="none"`` the loss is minus the log-probability of the target: what a policy
            gradient needs.
        options: accepted because torch's function has it, and ignored: the logits never exist.
        group: of ranks that share the classes, such as ``torch.distributed.group.WORLD`` or one
            dimension of a `DeviceMesh`. Then `linear_weight`, `linear_bias`, `weight` and
            probabilities are those of this rank's classes, and `input` and class numbers, which
            count the classes of rank 0 first, are the same on every rank. So are loss and gradient
            of `input` (docs/distributed.md).

    Returns:
        The loss; with `return_lse` or `return_entropy` a named tuple ``(loss, lse)``, ``(loss,
        entropy)`` or ``(loss, lse, entropy)``, each differentiable. float16 and bfloat16 are
        computed in float32.

    Raises:
        InputError: shapes that do not fit, targets out of range, options out of range.
        GroupError: another rank has died, or is in another call.

    >>> import torch, cumulant as cm
    >>> x, W, y = torch.randn(6, 8), torch.randn(100, 8), torch.randint(100, (6,))
    >>> exact = torch.nn.functional.cross_entropy(x @ W.T, y)
    >>> torch.allclose(cm.linear_cross_entropy(x, W, y), exact, atol=1e-5)
    True
    >>> loss, entropy = cm.linear_cross_entropy(x, W, y, reduction="none", return_entropy=True)
    >>> entropy.shape
    torch.Size([6])
    """
    call = VocabularyCall(
        *(input, linear_weight, target, linear_bias, weight, reduction, ignore_index),
        *(label_smoothing, softcap, z_loss),
    )
    p = call.problem(Ranks.solo() if group is None else Ranks(group))
    every = return_lse or return_entropy
    loss, G, H = _loss(call, p if every else _without_ignored(p), entropy=return_entropy)
    if call.reduction == "none":
        loss = call.shaped(loss if every else _put_back(loss, p))
    loss = loss.to(call.kind)
    if not every:
        return loss
    lse = call.shaped(G)
    if H is None:
        return LossAndLse(loss, lse)
    entropy = call.shaped(H)
    return LossLseEntropy(loss, lse, entropy) if return_lse else LossAndEntropy(loss, entropy)


def _counting(p: Problem) -> Tensor | None:
    """The numbers of the rows that count; None if all do, if losses vary, or inside vmap."""
    if p.query.ndim > 2 or holds(p.counted > 0) is not False:
        return None
    return p.counted.nonzero()[:, 0]


def _without_ignored(p: Problem) -> Problem:
    """The same problem without the rows that do not count: nothing is computed for them."""
    if p.query.device.type != "cpu" and p.soft is None:  # how many count, only the device knows
        counts = (p.counted > 0).unsqueeze(-1)
        return replace(p, query=torch.where(counts, p.query, 0.0))
    if p.soft is not None or (at := _counting(p)) is None:
        return p
    here = None if p.here is None else p.here[at]
    rows = {"query": p.query[at], "index": p.index[at], "counted": p.counted[at], "here": here}
    return replace(p, **rows)


def _put_back(rows: Tensor, p: Problem) -> Tensor:
    """Zeros for the rows that were left out."""
    if p.soft is not None or (at := _counting(p)) is None:
        return rows
    return rows.new_zeros(p.counted.shape).index_copy(0, at, rows)


class _Coefficients(NamedTuple):
    """loss_i = level G_i - share s_i(target) - smooth sum_j w_j s_ij + square G_i^2, each ``(M)``.

    `undefined` is NaN for a mean over nothing, otherwise 0.
    """

    level: Tensor
    share: Tensor
    smooth: Tensor | None
    square: Tensor | None
    undefined: Tensor | float


def _coefficients(call: VocabularyCall, p: Problem) -> _Coefficients:
    """What the loss of each row is made of, divided by what a mean divides by."""
    eps, w = float(call.label_smoothing), p.weight
    counted, count = p.counted, p.counted.sum()
    all_classes = p.query.new_full((), float(p.classes)) if w is None else _total(w.sum(), p)
    if p.soft is not None:  # the total weight of the target's classes
        own = _total(p.soft.sum(-1) if w is None else p.soft @ w, p)
        divisor = count
    else:
        own = counted if w is None else counted * _total(_at_target(p, w[:, None]), p)
        divisor = own.sum()
    undefined: Tensor | float = 0.0
    if call.reduction == "mean":
        undefined = torch.where(divisor == 0, torch.nan, 0.0)
        divisor, count = (x.masked_fill(x == 0, 1.0) for x in (divisor, count))
    else:
        divisor = count = torch.ones_like(count)
    share = (1 - eps) * (counted if p.soft is not None else own) / divisor
    level = ((1 - eps) * own + eps / p.classes * all_classes * counted) / divisor
    return _Coefficients(
        level,
        share,
        eps / p.classes * counted / divisor if eps else None,
        call.z_loss * counted / count if call.z_loss else None,
        undefined,
    )


def _total(x: Tensor, p: Problem) -> Tensor:
    """The sum over the classes of all ranks."""
    return x if p.ranks.alone else total(x, p.ranks)


def _at_target(p: Problem, x: Tensor | None = None) -> Tensor:
    """Scores of the targets, or numbers ``(C, 1)`` of their classes; 0 where another rank knows."""
    if p.key.shape[-2] == 0:
        return _no_classes(p) if x is None else torch.zeros_like(p.counted)
    out = target_score(p.scores(), p.index) if x is None else x[p.index, 0]
    return out if p.here is None else torch.where(p.here, out, 0.0)


def _loss(
    call: VocabularyCall, p: Problem, *, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss, reduced or of each row, and G and entropy of the rows."""
    c = _coefficients(call, p)
    # The gradient can be made with the loss where the cotangent of each G is known beforehand.
    known = call.reduction != "none" and c.square is None and p.soft is None and p.ranks.alone
    if known and not entropy and p.query.ndim == 2:
        loss, normalizer = likelihood(p.scores(), p.index, c.level, c.share)
        if c.smooth is not None:
            loss = loss - (c.smooth * _over_classes(p, None)).sum()
        return loss + c.undefined, normalizer[..., 0], None
    G, H = _normalizer(p, entropy=entropy)
    linear = c.share * (_at_target(p) if p.soft is None else _over_classes(p, p.soft))
    if c.smooth is not None:
        linear = linear + c.smooth * _over_classes(p, None)
    rows = c.level * G - _total(linear, p)
    if c.square is not None:
        rows = rows + c.square * G.square()
    rows = torch.where(p.counted > 0, rows, 0.0)
    return rows if call.reduction == "none" else rows.sum() + c.undefined, G, H


def _no_classes(p: Problem) -> Tensor:
    """Sums over the scores of a rank without classes, which takes part in the backward pass."""
    return 0.0 * p.query.sum(-1)


def _over_classes(p: Problem, share: Tensor | None) -> Tensor:
    """sum_j w_j s_ij, or sum_j w_j share_ij s_ij, over the classes of this rank, ``(*K, M)``."""
    if p.key.shape[-2] == 0:
        return _no_classes(p)
    weights = p.key.new_ones(p.key.shape[-2]) if p.weight is None else p.weight
    weights = weights.expand(*p.key.shape[:-2], 1, -1) if share is None else weights * share
    if p.cap is not None:
        return score_total(p.scores(), weights)
    out = (p.query * (weights @ p.key)).sum(-1)
    return out if p.bias is None else out + (weights @ p.bias.mT)[..., 0]


def _normalizer(p: Problem, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """G and the entropy of every row, over the classes of all ranks."""
    given = {**p.scores(), "value": p.key[..., :0]}
    _, normalizer, spread, _ = attention(given, Options(entropy=entropy))
    if not p.ranks.alone:
        pool = Pool([normalizer], over_ranks(p.ranks))
        if spread is not None:
            spread = pool.entropy(pool.mean(pool.surprises([spread])))
        normalizer = pool.log_normalizer()
    return normalizer[..., 0], None if spread is None else spread[..., 0]
