"""torch's fused attention on CUDA: value with G, and the first gradient, at torch's own cost.

Half precision takes the flash operator, float32 the memory-efficient one. Both return the
log-sum-exp, and their gradient needs nothing else. No number is read back: where the CPU asks
whether a common part of the keys is large enough to be removed, it always is here, in float32.

Plans are tested with fake tensors, and the arithmetic around the operators with others in their
place; neither operator has run on a GPU from here yet.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.precision import HALF
from cumulant.kernels.tiles import Arguments, Band, Named

__all__ = ["Heads", "backward", "forward"]

# The memory-efficient gradient reads its log-sum-exp in blocks of so many rows.
_ROWS = 32


class Heads(NamedTuple):
    """Batch dimensions as (batch, heads), and how many query heads share a key head."""

    batch: int
    heads: int
    groups: int


class _Plan(NamedTuple):
    flash: bool
    dtype: torch.dtype
    causal: bool


def _plan(arguments: Named, narrow: torch.dtype | None, band: Band) -> _Plan | None:
    """Which operator takes the call; None if neither does."""
    query, key, value = (arguments[n] for n in ("query", "key", "value"))
    hides = any(n in arguments for n in ("mask", "bias", "query_tag", "cap", "seed"))
    causal = band == Band(upper=0)
    if hides or query.dtype != torch.float32 or not (band.open or causal):
        return None
    d, e, square = query.shape[-1], value.shape[-1], query.shape[-2] == key.shape[-2]
    # The flash operator aligns causal attention to the last key, torch and we to the first.
    fits = d == e and d % 8 == 0 and d <= 256 and (square or not causal)
    if narrow in HALF and fits and _flash_runs(query.device):
        return _Plan(True, narrow, causal)
    if d % 4 == 0 and e % 4 == 0 and _efficient_runs():
        return _Plan(False, torch.float32, causal)
    return None


def _flash_runs(device: torch.device) -> bool:
    backend = torch.backends.cuda
    if not (backend.is_flash_attention_available() and backend.flash_sdp_enabled()):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _efficient_runs() -> bool:
    return torch.backends.cuda.is_built() and torch.backends.cuda.mem_efficient_sdp_enabled()


def _laid_out(x: Tensor, heads: Heads, dtype: torch.dtype, *, shared: bool = False) -> Tensor:
    """``(batch, heads, rows, features)``; keys that query heads share are repeated."""
    if shared and heads.groups > 1:
        x = x.expand(*x.shape[:-3], heads.groups, *x.shape[-2:])
    x = x.reshape(heads.batch, heads.heads, *x.shape[-2:]).to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    arguments: Named, heads: Heads, scale: float, band: Band, narrow: torch.dtype | None
) -> tuple[Tensor, Tensor] | None:
    """(mean, G) in the shape of the queries; `narrow` is the precision the caller gave."""
    plan = _plan(arguments, narrow, band)
    if plan is None:
        return None
    q, k, v = (
        _laid_out(arguments[n], heads, plan.dtype, shared=n != "query")
        for n in ("query", "key", "value")
    )
    aten = torch.ops.aten
    if plan.flash:
        out = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, plan.causal, False, scale=scale
        )
    else:
        out = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, plan.causal, scale=scale
        )
    mean, normalizer = out[0].float(), out[1].narrow(-1, 0, q.shape[-2])
    rows = arguments["query"].shape[:-1]
    return mean.reshape(*rows, mean.shape[-1]).clone(), normalizer.reshape(*rows, 1).clone()


def backward(
    arguments: Named,
    heads: Heads,
    scale: float,
    band: Band,
    narrow: torch.dtype | None,
    *,
    whole: bool,
) -> Arguments | None:
    """Gradients of the mean alone; `whole` as in ``fused.backward``."""
    plan = _plan(arguments, narrow, band)
    if plan is None:
        return None
    query, key, value = (arguments[n] for n in ("query", "key", "value"))
    mean, normalizer = arguments["mean"], arguments["log_normalizer"]
    normalizer = normalizer.masked_fill(normalizer == -math.inf, 0.0)
    level = value.new_zeros(1)
    if not plan.flash:  # weights and gradients do not depend on either; half precision would
        level = value.mean(-2, keepdim=True)
        if whole:  # rows of ds add up to eps |s| instead of zero
            common = key.mean(-2, keepdim=True)
            key, normalizer = key - common, normalizer - scale * (query @ common.mT)
    g, q, k, v, out = (
        _laid_out(x, heads, plan.dtype, shared=shared)
        for x, shared in (
            (arguments["cotangent mean"].expand(*query.shape[:-1], value.shape[-1]), False),
            (query, False),
            (key, True),
            (value - level, True),
            (mean.expand(*query.shape[:-1], value.shape[-1]) - level, False),
        )
    )
    lse = normalizer.expand(*query.shape[:-1], 1).reshape(heads.batch, heads.heads, -1)
    grads = _gradient(plan, (g, q, k, v, out), lse.contiguous(), scale)
    made: Arguments = {}
    for name, x in zip(("query", "key", "value"), grads, strict=True):
        shape = arguments[name].shape
        x = x.float().reshape(*query.shape[:-2], *shape[-2:])
        made[name] = x.sum_to_size(shape) if x.shape != shape else x.clone()
    return made


def _gradient(
    plan: _Plan, tensors: tuple[Tensor, ...], lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    g, q, k, v, out = tensors
    m, n = q.shape[-2], k.shape[-2]
    aten = torch.ops.aten
    if plan.flash:
        # The state of a dropout that is off.
        state, offset = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in ((2,), ()))
        return aten._scaled_dot_product_flash_attention_backward(
            *(g, q, k, v, out, lse, None, None, m, n, 0.0, plan.causal, state, offset),
            scale=scale,
        )
    lse = torch.nn.functional.pad(lse, (0, -m % _ROWS), value=math.inf)
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = aten._scaled_dot_product_efficient_attention_backward(
        *(g, q, k, v, None, out, lse, state, state, 0.0, (True, True, True, False), plan.causal),
        scale=scale,
    )
    return grads[0], grads[1], grads[2]
