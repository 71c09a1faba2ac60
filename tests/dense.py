"""The oracle: attention and its statistics written out with the M x N array of scores.

Every streaming result is tested against these few lines, differentiated by torch itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class DenseMoments(NamedTuple):
    """All fields of an attention call; columns are squeezed to ``(*batch, M)``."""

    mean: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    key_mean: Tensor
    score_mean: Tensor
    value_variance: Tensor
    score_variance: Tensor
    weights: Tensor
    score_max: Tensor


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> DenseMoments:
    """Attention with scores <q, k> + bias by the textbook formulas, M x N and all.

    A `sink`, which broadcasts to ``(*batch, M)``, is one more column of logits, with key and value
    zero and out of reach of mask and softcap.
    """
    plain = query @ key.mT
    plain = plain if softcap is None else softcap * (plain / softcap).tanh()
    if sink is not None:
        rows, n = plain.shape[:-1], key.shape[-2]
        zero = torch.zeros(1, dtype=plain.dtype)
        plain = torch.cat([plain, zero.expand(*rows, 1)], -1)
        rest = torch.zeros(n, dtype=plain.dtype) if bias is None else bias
        bias = torch.cat([rest.expand(*rows, n), sink[..., None].expand(*rows, 1)], -1)
        if mask is not None:
            mask = torch.cat([mask.expand(*rows, n), (zero == 0).expand(*rows, 1)], -1)
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    total = plain if bias is None else plain + bias
    removed = torch.zeros((), dtype=torch.bool) if mask is None else ~mask
    if bias is not None:
        removed = removed | (bias == -math.inf)
    total = torch.where(removed, -math.inf, total)
    alive = (~removed).expand(total.shape).any(-1, keepdim=True) & (key.shape[-2] > 0)
    # Rows without keys: the softmax of anything, times zero.
    safe = torch.where(alive, total, 0.0)
    if key.shape[-2] == 0:
        normalizer = torch.full(total.shape[:-1], -math.inf, dtype=query.dtype)
        weights = safe
    else:
        # By hand: the forward-mode formulas of logsumexp and softmax break their own backward.
        peak = safe.amax(-1, keepdim=True).detach()
        normalizer = ((safe - peak).exp().sum(-1).log() + peak[..., 0]).masked_fill(
            ~alive[..., 0], -math.inf
        )
        weights = (safe - torch.where(alive, normalizer[..., None], 0.0)).exp() * alive
    log_weights = torch.where(weights > 0, weights, 1.0).log()
    scores = total if sink is None else total[..., :-1]  # the sink is no key
    rows = torch.full(scores.shape[:-1], -math.inf, dtype=query.dtype)
    if scores.shape[-1]:
        # By hand: amax shares the derivative among equal scores, and the first key is to have it.
        rows = scores.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    mean = weights @ value
    score_mean = (weights * plain).sum(-1, keepdim=True)
    return DenseMoments(
        mean=mean,
        log_normalizer=normalizer,
        entropy=-(weights * log_weights).sum(-1),
        key_mean=weights @ key,
        score_mean=score_mean[..., 0],
        value_variance=(
            weights[..., None] * (value[..., None, :, :] - mean[..., None, :]) ** 2
        ).sum(-2),
        score_variance=(weights * (plain - score_mean) ** 2).sum(-1),
        weights=weights,
        score_max=rows,
    )
