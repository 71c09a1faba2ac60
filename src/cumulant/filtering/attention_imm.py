"""Attention as a step of the IMM filter (docs/theory.md, T27)."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.attention.inputs import Call, prepare
from cumulant.core.checks import finite, numbers, real, require
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.precision import without_autocast
from cumulant.filtering import moments
from cumulant.filtering.model_checks import semi_definite
from cumulant.filtering.moments import Affine
from cumulant.filtering.recursion import LOG_ZERO, Belief, Message, branch

__all__ = ["AttentionBank", "AttentionMessages", "attention_as_imm", "scores_of"]


class AttentionMessages(NamedTuple):
    """Tokens after attention, ``(*batch, [heads,] N, d_v)``; ``mixing[i, j]`` = p(i|j), query j."""

    mean: Tensor
    covariance: Tensor
    mixing: Tensor

    __repr__ = described_fields


class AttentionBank:
    """The bank of an IMM whose modes are tokens: all move alike, and nothing is observed."""

    def __init__(self, log_transition: Tensor, sees: Tensor, step: Affine) -> None:
        self._log_transition, self._sees, self._step = log_transition, sees, step

    def log_transition(self, t: int | None) -> Tensor:
        return self._log_transition

    def predict(self, message: Message, t: int | None) -> Message:
        return moments.predict(self._step, *message)

    def observe(self, message: Message, t: int | None) -> tuple[Message, Tensor]:
        return message, message[0].new_zeros(message[0].shape[:-1])

    def collapse(self, log_weights: Tensor, message: Message) -> Message:
        mean, covariance = moments.collapse(log_weights, *message)
        sees = self._sees[..., None, :, None]
        return torch.where(sees, mean, 0.0), torch.where(sees[..., None], covariance, 0.0)


def attention_as_imm(
    hidden: Tensor,
    covariance: Tensor | None = None,
    *,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    noise: Tensor | float | None = None,
) -> AttentionMessages:
    """One step of the IMM filter without observation whose mean is softmax attention (T27, T28).

    Modes are tokens with messages N(H_i, S_i). For each next mode j the IMM mixes them with
    p(i|j) = softmax over i of scale <W_q H_j, W_k H_i> + mask, collapses, and moves the result by
    x -> W_v x + N(0, Q): with m_i = W_v H_i and m = sum_i p(i|j) m_i, the mean is m and the
    covariance sum_i p(i|j) (W_v S_i W_v' + Q + (m_i - m)(m_i - m)').

    Unlike in the IMM, the switching depends on the states. What the draft calls the transition
    P(j|i) (eq. 12) is p(i|j), the mixing probability. The step uses the transition
    T_ij = p(i|j) / sum_j p(i|j) and the modes pi_i = mean_j p(i|j), which make all next modes
    equally likely. It takes memory N^2 E; use `cumulant.nn.MomentAttention` in models.

    Args:
        hidden: H, ``(*batch, N, E)``.
        covariance: S, ``(*batch, N, E, E)``; zero by default.
        query_weight, key_weight: ``(d, E)`` as in ``nn.Linear``, or ``(heads, d, E)``.
        value_weight: ``(d_v, E)`` or ``(heads, d_v, E)``.
        scale: 1/sqrt(d) by default.
        attn_mask: boolean (True = may attend) or added; broadcasts to ``(*batch, [heads,] N, N)``,
            [query, key]. A query that sees nothing has mean 0, covariance Q and no mixing.
        is_causal: query j sees tokens i <= j; not with `attn_mask`.
        noise: Q, ``([heads,] d_v, d_v)``, or a number q for q I; zero by default.

    Raises:
        InputError: shapes that do not fit together, or an invalid covariance.

    >>> import torch, torch.nn.functional as F
    >>> from cumulant.filtering.attention_imm import attention_as_imm
    >>> x, (q, k, v) = torch.randn(5, 8), torch.randn(3, 8, 8)
    >>> out = attention_as_imm(x, query_weight=q, key_weight=k, value_weight=v)
    >>> attention = F.scaled_dot_product_attention(x @ q.mT, x @ k.mT, x @ v.mT)
    >>> torch.allclose(out.mean, attention, atol=1e-4), out.covariance.shape
    (True, torch.Size([5, 8, 8]))
    """
    me = "attention_as_imm"
    given = {"hidden": hidden, "query_weight": query_weight, "key_weight": key_weight}
    given |= {"value_weight": value_weight, "covariance": covariance, "noise": noise}
    given = {name: x for name, x in given.items() if x is not None}
    got, _ = numbers(me, **given)
    H, S, Q, W = _messages(me, got)
    if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(H.dtype)
    scale = None if scale is None else real(me, "scale", scale)
    with without_autocast(H):
        return _attention(me, given, (H, S, Q, W), attn_mask, is_causal, scale)


def _attention(
    me: str,
    given: dict[str, Any],
    parts: tuple[Tensor, Tensor, Tensor, list[Tensor]],
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> AttentionMessages:
    H, S, Q, W = parts
    query, key, value = (H @ w.mT for w in W)
    call = prepare(me, query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    scores, seen = scores_of(me, call)
    bank, belief, log_mixing = _imm(scores, seen, (H, S), Affine(W[2], H.new_zeros(()), Q))
    # As `recursion.advance` does for the IMM, less the observation.
    mean, spread = bank.predict(bank.collapse(*branch(bank, belief, None)), None)
    out = mean.squeeze(-3), moments.symmetric(spread.squeeze(-4)), log_mixing.exp()
    kinds = [x.dtype for x in given.values() if isinstance(x, Tensor) and x.is_floating_point()]
    kind = reduce(torch.promote_types, kinds) if kinds else H.dtype
    return AttentionMessages(*(x.to(kind) for x in out))


def _messages(me: str, got: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """H, S, Q and the weights; H and S with a dimension for the heads where there are."""
    for name, x in got.items():
        finite(me, name, x)
    H, W = got["hidden"], [got[f"{name}_weight"] for name in ("query", "key", "value")]
    flat = any(w.ndim not in (2, 3) or w.shape[-1:] != H.shape[-1:] for w in W)
    if H.ndim < 2 or flat or W[0].shape != W[1].shape or W[0].shape[:-2] != W[2].shape[:-2]:
        told = ", ".join(f"{name} {tuple(x.shape)}" for name, x in got.items())
        raise InputError(
            f"{me}: expected hidden (*batch, N, E), query_weight and key_weight (d, E) and "
            f"value_weight (d_v, E), the last three with heads in front or without; got {told}. "
            "Weights of x @ w go in as w.mT."
        )
    (*heads, d), E = W[2].shape[:-1], H.shape[-1]
    S = got.get("covariance", H.new_zeros(()).expand(*H.shape, E))
    if S.shape != (*H.shape, E):
        raise InputError(
            f"{me}: covariance must hold one matrix for each token, shape {(*H.shape, E)}, not "
            f"{tuple(S.shape)}; variances go in as torch.diag_embed(x)."
        )
    noise = got.get("noise", H.new_zeros(()))
    Q = noise if noise.ndim else noise * torch.eye(d, dtype=H.dtype, device=H.device)
    if tuple(Q.shape) not in ((d, d), (*heads, d, d)):
        raise InputError(
            f"{me}: noise must be a number, {(d, d)} or {('heads', d, d)}, as value_weight has "
            f"them, not {tuple(Q.shape)}; variances go in as torch.diag_embed(x)."
        )
    semi_definite(me, "covariance", S)
    semi_definite(me, "noise", Q)
    return (H.unsqueeze(-3), S.unsqueeze(-4), Q, W) if heads else (H, S, Q, W)


def scores_of(me: str, call: Call) -> tuple[Tensor, Tensor]:
    """scale <q, k> + bias ``(..., queries, keys)``, and where a query may see a key."""
    scores = call.options.scale * (call.arguments["query"] @ call.arguments["key"].mT)
    bias, mask = call.arguments.get("bias"), call.arguments.get("mask")
    if bias is not None:
        scores, mask = scores + bias, bias > -math.inf
    require(
        scores.detach() < math.inf,
        lambda: f"{me}: scores overflow or are NaN: look at attn_mask, or take a smaller scale.",
    )
    seen = torch.ones_like(scores, dtype=torch.bool)
    rows, columns = (range(n) for n in scores.shape[-2:])
    hidden = call.options.band.hidden(rows, columns, scores.device)
    seen = seen if mask is None else seen & mask
    return scores, seen if hidden is None else seen & ~hidden


def _imm(
    scores: Tensor, seen: Tensor, message: Message, step: Affine
) -> tuple[AttentionBank, Belief, Tensor]:
    """Modes, messages and transition of the step, and log p(i|j) ``(..., tokens i, queries j)``."""
    sees = seen.any(-1)
    # Biases were lowered, so that what is hidden lies far below what is seen.
    log_mixing = scores.masked_fill(~seen, LOG_ZERO).log_softmax(-1)
    log_mixing = log_mixing.masked_fill(~seen, LOG_ZERO).mT
    joint = log_mixing - sees.sum(-1).clamp_min(1).log()[..., None, None]
    step = Affine(
        step.matrix[..., None, None, :, :], step.offset, step.noise[..., None, None, :, :]
    )
    bank = AttentionBank(joint.log_softmax(-1).unsqueeze(-3), sees, step)
    mean, covariance = message
    message = mean.unsqueeze(-3), covariance.unsqueeze(-4)
    return bank, Belief(joint.logsumexp(-1).unsqueeze(-2), message), log_mixing
