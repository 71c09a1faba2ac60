"""One attention call of a model, in a common form, and its way to the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.attention.attended import Attended
from cumulant.attention.direct import Direct
from cumulant.attention.inputs import Call, _split_heads, prepare
from cumulant.core.errors import InputError
from cumulant.kernels.tiles import Band

__all__ = ["AttentionCall", "additive_parts"]


@dataclass(frozen=True)
class AttentionCall:
    """Queries, keys, values and all that shapes the weights (docs/theory.md, T12).

    p(j|i) = exp(score_ij + bias_ij - G_i) over the keys that `mask` and `causal` leave, with
    score = scale <q_i, k_j>, or softcap tanh(scale <q_i, k_j> / softcap). A sink logit is one more
    key: zero, with value zero and the logit as its bias; it comes first.

    Attributes:
        query: ``(B, H, M, d)``.
        key, value: ``(B, Hk, N, d)`` and ``(B, Hk, N, e)``, H a multiple of Hk.
        mask: boolean, True = may attend; broadcasts to ``(B, H, M, N)``.
        bias: added to the scores; broadcasts to ``(B, H, M, N)``.
        scale: a number.
        causal: query i sees keys j <= i.
        softcap: a number, or None.
        sinks: ``(H,)``, or None.
        cross: whether the keys are another sequence's.
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
    cross: bool = False

    def prepared(self, query: Tensor | None = None, value: Tensor | None = None) -> Call:
        """The kernels' arguments and options; `query` and `value` stand in for the call's own."""
        query = self.query if query is None else query
        key, value = self.key, self.value if value is None else value
        if value.shape[1] != key.shape[1]:  # values of each query head: the keys are repeated
            key = key.repeat_interleave(value.shape[1] // key.shape[1], dim=1)
        groups = query.shape[1] // key.shape[1]
        kind = torch.promote_types(query.dtype, torch.float32)
        query, key, value = (x.to(kind) for x in (query, key, value))
        mask, bias, sinks = self.mask, self.bias, self.sinks
        if sinks is not None:  # one more key, before all others
            key, value = (F.pad(x, (0, 0, 1, 0)) for x in (key, value))
            logits = sinks.to(kind).reshape(1, -1, 1, 1)
            rest = logits.new_zeros(1, 1, 1, key.shape[2] - 1) if bias is None else bias.to(kind)
            batch = torch.broadcast_shapes(rest.shape[:-1], logits.shape[:-1])
            bias = torch.cat([logits.expand(*batch, 1), rest.expand(*batch, -1)], -1)
            mask = (
                None if mask is None else F.pad(_wide(mask, key.shape[2] - 1), (1, 0), value=True)
            )
        with torch.autocast(query.device.type, enabled=False):
            call = prepare(
                "the lens",
                query,
                key,
                value,
                attn_mask=mask,
                scale=self.scale,
                enable_gqa=groups > 1,
                window=(None, 0) if self.causal else None,
            )
        arguments, options = dict(call.arguments), call.options
        if sinks is not None and self.causal:
            options = replace(options, band=Band(None, 1))
        rank = arguments["query"].ndim
        if bias is not None:
            bias = bias.to(kind).reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
            heads = (key.shape[1], groups)
            arguments["bias"] = _split_heads("bias", bias, heads) if groups > 1 else bias
        if self.softcap is not None:
            arguments["cap"] = query.new_full((1,) * rank, self.softcap)
        return replace(call, arguments=arguments, options=options)

    def attend(self, query: Tensor | None = None, value: Tensor | None = None) -> Attended:
        """`cumulant.attend` of this call; `query` and `value` stand in for the call's own."""
        call = self.prepared(query, value)
        return Attended(Direct(call), call.dtype)


def _wide(mask: Tensor, n: int) -> Tensor:
    return mask.expand(*mask.shape[:-1], n)


def additive_parts(mask: Any) -> tuple[Tensor | None, Tensor | None]:
    """(boolean mask, bias) of a mask as models pass it: boolean, or added to the scores.

    Entries below -9999 mean "may not attend": libraries write the most negative number, -1e9 or
    -1e4, and beside a visible key the weight is zero in each case. A row of nothing but such
    entries is a padded query: it sees no key, where `attend` would take the numbers at their word.
    A mask that is nothing but that has no bias; under vmap there are always both.
    """
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor):
        raise InputError(
            f"the lens reads attention masks that are tensors, not {type(mask).__name__}: load the "
            "model with attn_implementation='sdpa' or 'eager'."
        )
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        return mask != 0, None
    seen = mask > -9999
    try:
        whole, plain = bool(seen.all()), bool((seen == (mask == 0)).all())
    except RuntimeError:  # vmap hides the entries: both parts are right, if not needed
        whole, plain = False, False
    return (None if whole else seen), (None if plain else mask.masked_fill(~seen, 0.0))
