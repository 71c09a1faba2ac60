"""`AttentionCall`: one attention call of a model, whatever library made it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.attention.attended import Attended
from cumulant.attention.inputs import Call, prepare
from cumulant.attention.sinks import attended
from cumulant.core.checks import holds_at_once
from cumulant.core.errors import InputError
from cumulant.core.precision import widened, without_autocast

__all__ = ["AttentionCall", "additive_parts"]


@dataclass(frozen=True)
class AttentionCall:
    """Queries, keys, values and everything that shapes the weights (docs/theory.md, T12).

    p(j|i) = exp(score_ij + bias_ij - G_i) over the keys that `mask` and `causal` leave, with
    score = scale <q_i, k_j>, or softcap tanh(scale <q_i, k_j> / softcap). A sink logit is one more
    atom, with key 0 and value 0 (`cumulant.attend`).

    Attributes:
        query: ``(B, H, M, d)``.
        key, value: ``(B, Hk, N, d)`` and ``(B, Hk, N, e)``, H a multiple of Hk.
        mask: boolean, True = may attend; broadcasts to ``(B, H, M, N)``.
        bias: added to the scores; broadcasts to ``(B, H, M, N)``.
        scale: a number.
        causal: query i sees keys j <= i.
        softcap: a number, or None.
        sinks: ``(H,)``, or None.
        dropout_p: probability of dropping a weight.
        cross: whether the keys come from another sequence.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    causal: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    cross: bool = False

    def prepared(self, query: Tensor | None = None, value: Tensor | None = None) -> Call:
        """The call in the kernels' form, in float32 or wider; `query` and `value` replace its own.

        A `value` may have a head for each query head.
        """
        query = self.query if query is None else query
        key, value = self.key, self.value if value is None else value
        if value.shape[1] != key.shape[1]:
            key = key.repeat_interleave(value.shape[1] // key.shape[1], dim=1)
        kind = widened(query.dtype)
        with without_autocast(query):
            return prepare(
                "attention",
                *(x.to(kind) for x in (query, key, value)),
                attn_mask=self.mask,
                bias=None if self.bias is None else self.bias.to(kind),
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
                window=(None, 0) if self.causal else None,
                softcap=self.softcap,
                sink=None if self.sinks is None else self.sinks.to(kind),
                dropout_p=self.dropout_p,
            )

    def attend(self, query: Tensor | None = None, value: Tensor | None = None) -> Attended:
        """`cumulant.attend` of this call; `query` and `value` replace its own."""
        return attended(self.prepared(query, value))


def additive_parts(mask: object) -> tuple[Tensor | None, Tensor | None]:
    """(boolean mask, bias) of a mask as models pass it: boolean, or added to the scores.

    Entries below -9999 mean "may not attend": libraries write the most negative number, -1e9 or
    -1e4, and beside a visible key the weight is zero in each case. A row of nothing but such
    entries is a padded query: it sees no key, where `attend` would take the numbers at their word.
    A mask of only zeros and such entries has no bias; under vmap there are always both parts.
    """
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor):
        raise InputError(
            f"attention masks must be tensors, not {type(mask).__name__}: load the model with "
            "attn_implementation='sdpa' or 'eager'."
        )
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        return mask != 0, None
    seen = mask > -9999
    bias = None if holds_at_once(seen == (mask == 0)) else mask.masked_fill(~seen, 0.0)
    return (None if holds_at_once(seen) else seen), bias
