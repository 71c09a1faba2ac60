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


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> DenseMoments:
    """Attention with scores <q, k> + bias by the textbook formulas, M x N and all."""
    plain = query @ key.mT
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
    )
