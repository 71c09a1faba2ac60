"""torch's fused attention: the same value and first gradient at torch's own cost.

The CPU's operator is here, CUDA's are in ``fused_cuda.py``. Given the arguments, a backend computes
(mean, G) and the first gradient of the mean, or returns ``None``, and the tiles do the work.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.kernels import fused_cuda
from cumulant.kernels.tiles import Arguments, Band, Named

_CAUSAL = Band(upper=0)
_DTYPES = (torch.float32, torch.float64)

# Beyond this |G| the weights exp(s - G) are off by more than 1e-5 in float32.
_LARGE_NORMALIZER = 128.0


class _Plan(NamedTuple):
    """How batch dimensions become the operator's (batch, heads)."""

    query: tuple[int, int]
    key: tuple[int, int]
    bias: Tensor | None


def _heads(x: Tensor, batch: tuple[int, int]) -> Tensor:
    """``(batch, heads, rows, features)``; the operator assumes unit stride in the features."""
    x = x.reshape(*batch, *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _plan(arguments: Named, band: Band) -> _Plan | None:
    """The operator's view of the arguments, or ``None`` where it does not apply."""
    query = arguments["query"]
    if query.device.type != "cpu" or query.dtype not in _DTYPES or "seed" in arguments:
        return None
    if "query_tag" in arguments or "cap" in arguments:
        return None
    masked = "mask" in arguments or "bias" in arguments
    if not band.open and (band != _CAUSAL or masked):
        return None
    # The operator needs equal feature sizes, and divides by the sizes it gets.
    if query.shape[-1] != arguments["value"].shape[-1] or (shared := _sharing(arguments)) is None:
        return None
    split, groups = shared
    outer = tuple(query.shape[:-2])
    lead, heads = math.prod(outer[:split]), math.prod(outer[split:])
    bias = None
    if masked:
        bias = _additive(arguments)
        sizes: list[int] = []
        for mine, full in (
            (bias.shape[:split], outer[:split]),
            (bias.shape[split:-2], outer[split:]),
        ):
            if math.prod(mine) != 1 and tuple(mine) != full:
                return None
            sizes.append(math.prod(mine))
        bias = bias.reshape(*sizes, *bias.shape[-2:])
    return _Plan((lead, heads), (lead, heads // groups), bias)


def _sharing(arguments: Named) -> tuple[int, int] | None:
    """Where batch dimensions become heads, and how many query heads share one key head."""
    query, key, value = (arguments[n] for n in ("query", "key", "value"))
    outer, inner = tuple(query.shape[:-2]), tuple(key.shape[:-2])
    if 0 in (*query.shape, *key.shape) or inner != tuple(value.shape[:-2]):
        return None
    if inner == outer:
        return max(len(outer) - 1, 0), 1
    if len(outer) > 1 and inner == (*outer[:-1], 1):
        return len(outer) - 2, outer[-1]
    return None


def _cuda_heads(arguments: Named) -> fused_cuda.Heads | None:
    """The layout of a call on CUDA; None if the call is elsewhere, or has none."""
    query = arguments["query"]
    if query.device.type != "cuda" or (shared := _sharing(arguments)) is None:
        return None
    split, groups = shared
    outer = query.shape[:-2]
    return fused_cuda.Heads(math.prod(outer[:split]), math.prod(outer[split:]), groups)


def _additive(arguments: Named) -> Tensor:
    """Bias and boolean mask as one additive tensor."""
    bias, mask = arguments.get("bias"), arguments.get("mask")
    if bias is None:
        bias = arguments["query"].new_zeros(())
    return bias if mask is None else torch.where(mask, bias, -math.inf)


def forward(
    arguments: Named, scale: float, band: Band, narrow: torch.dtype | None = None
) -> tuple[Tensor, Tensor] | None:
    """(mean, G) by torch's fused operator; `narrow` as in `Options`."""
    if (heads := _cuda_heads(arguments)) is not None:
        return fused_cuda.forward(arguments, heads, scale, band, narrow)
    plan = _plan(arguments, band)
    if plan is None:
        return None
    mean, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads(arguments["query"], plan.query),
        _heads(arguments["key"], plan.key),
        _heads(arguments["value"], plan.key),
        0.0,
        not band.open,
        attn_mask=plan.bias,
        scale=scale,
    )
    # The operator reports G = 0 for a row without keys, and for some rows that hold NaN.
    suspect = normalizer == 0
    if bool(suspect.any()):
        if plan.bias is not None:
            empty = suspect & ~(plan.bias > -math.inf).any(-1)
            normalizer = normalizer.masked_fill(empty, -math.inf)
            suspect = suspect & ~empty
        if bool(suspect.any()):
            return None
    rows = arguments["query"].shape[:-1]
    return _own(mean, (*rows, mean.shape[-1])), _own(normalizer, (*rows, 1))


def _own(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshaped, but not a view: dual numbers cannot attach a tangent to a fresh view."""
    return torch.ops.aten._unsafe_view(x.contiguous(), shape)


def _loses_digits(arguments: Named) -> bool:
    """Whether the operator's gradient is less precise than that of a softmax.

    It is p (<g, v> - <g, mean>) with p = exp(s - G), and both G and the mean are rounded: that
    costs eps |G|, and eps times whatever the values have in common.
    """
    normalizer, value = arguments["log_normalizer"], arguments["value"]
    if bool((normalizer.abs() > _LARGE_NORMALIZER).logical_and(normalizer != -math.inf).any()):
        return True
    return _is_large(_common(value), value, 4)


def _centered(
    query: Tensor, key: Tensor, normalizer: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Keys minus their common part, and G of these keys.

    Weights and gradients are unchanged. But the operator sums scores in a different order here than
    in the forward pass, so the rows of ds add up to eps |s| instead of zero, and dq = ds k would be
    off by that fraction of the common part.
    """
    common = _common(key)
    if not _is_large(common, key, 1):
        return key, normalizer
    lowered = normalizer - scale * (query @ common.mT)
    # Hidden keys may hold anything; then G moves away from zero, and nothing is subtracted.
    sizes = (x.abs().amax(-2, keepdim=True) for x in (lowered, normalizer))
    low, high = (_over_groups(x, key) for x in sizes)
    helps = low <= high + 1
    return key - common.where(helps, 0.0), lowered.where(helps, normalizer)


def _over_groups(x: Tensor, key: Tensor) -> Tensor:
    """The largest over the query heads that share keys."""
    shared = [d for d in range(key.ndim - 2) if key.shape[d] == 1 < x.shape[d]]
    return x.amax(shared, keepdim=True) if shared else x


def _some(x: Tensor) -> Tensor:
    """Up to 31 of the rows."""
    return x[..., :: max(1, x.shape[-2] // 16), :]


def _common(x: Tensor) -> Tensor:
    """The common part of the rows: the mean of a few."""
    return _some(x).mean(-2, keepdim=True)


def _is_large(common: Tensor, x: Tensor, times: float) -> bool:
    """Whether |common|^2 exceeds the variance by more than this factor anywhere in the batch.

    `torch.var_mean` would take ten times as long along rows.
    """
    square = _some(x).square().mean(-2, keepdim=True).sum(-1)
    return bool(((1 + times) * common.square().sum(-1) > times * square).any())


def backward(
    arguments: Named,
    scale: float,
    band: Band,
    narrow: torch.dtype | None = None,
    *,
    whole: bool = True,
) -> Arguments | None:
    """Gradients of the mean alone, by torch's fused operator.

    `whole` means that these are all keys of each query; otherwise rows of ds need not sum to zero.
    """
    if (heads := _cuda_heads(arguments)) is not None:
        return fused_cuda.backward(arguments, heads, scale, band, narrow, whole=whole)
    plan = _plan(arguments, band)
    if plan is None or _loses_digits(arguments):
        return None
    key, normalizer = arguments["key"], arguments["log_normalizer"]
    normalizer = normalizer.masked_fill(normalizer == -math.inf, 0.0)
    if whole:
        key, normalizer = _centered(arguments["query"], key, normalizer, scale)
    # Under vmap queries may be a batch where the cotangent is one for all.
    batch = arguments["query"].shape[:-2]
    cotangent, mean, normalizer = (
        x.expand(*batch, *x.shape[-2:])
        for x in (arguments["cotangent mean"], arguments["mean"], normalizer)
    )
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads(cotangent, plan.query),
        _heads(arguments["query"], plan.query),
        _heads(key, plan.key),
        _heads(arguments["value"], plan.key),
        _heads(mean, plan.query),
        _heads(normalizer, plan.query).squeeze(-1),
        0.0,
        not band.open,
        attn_mask=plan.bias,
        scale=scale,
    )
    names = ("query", "key", "value")
    # torch returns transposed views, and refuses a dual number whose primal is a view with other
    # strides than its tangent; `.data` is the same memory, but no view.
    return {n: g.reshape(arguments[n].shape).data for n, g in zip(names, grads, strict=True)}
