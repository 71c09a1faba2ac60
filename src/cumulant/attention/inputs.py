"""From what people pass to what the kernels take: the place where attention input is checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.kernels.attention import Options
from cumulant.kernels.tiles import Band

__all__ = ["Call", "Shard", "Window", "prepare"]

Window = tuple[int | None, int | None]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shard:
    """The keys of a call are those after so many others, of so many in all; likewise queries."""

    before: int
    keys: int
    queries: int


@dataclass(frozen=True)
class Call:
    """A checked call: named kernel arguments of equal rank, options, and the way back.

    A tensor scale has been multiplied into the queries, grouped heads are an extra batch dimension,
    half precision has become float32; `finish` undoes the grouping of a row quantity. `lift` is
    what was taken off the bias of each query, to be added to its log-normalizer.
    """

    arguments: dict[str, Tensor]
    options: Options
    finish: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    lift: Tensor | None


def _describe(call: str, **tensors: Any) -> str:
    """Restate a call with the shapes and types it got."""

    def one(name: str, x: Any) -> str:
        if isinstance(x, Tensor):
            kind = str(x.dtype).removeprefix("torch.")
            place = "" if x.device.type == "cpu" else f" on {x.device}"
            return f"{name}={tuple(x.shape)} {kind}{place}"
        return f"{name}={x!r}" if len(repr(x)) < 40 else f"{name}=<{type(x).__name__}>"

    shown = ", ".join(one(n, x) for n, x in tensors.items() if x is not None and x is not False)
    return f"{call}({shown})"


def prepare(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    window: Window | None = None,
    shard: Shard | None = None,
) -> Call:
    """Check a call of the public function `name` and put it into the kernels' form."""

    def fail(problem: str) -> InputError:
        call = _describe(
            name,
            query=query,
            key=key,
            value=value,
            attn_mask=attn_mask,
            dropout_p=dropout_p or None,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            window=window,
        )
        return InputError(f"{problem} Got {call}.")

    tensors = {"query": query, "key": key, "value": value}
    for label, x in tensors.items():
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(x).__name__
            hint = " Sharded keys go into attend alone." if kind == "ShardedKeys" else ""
            raise fail(f"{label} must be a torch.Tensor, not {kind}.{hint}")
        if x.is_nested:
            raise InputError(
                f"{name} does not take nested tensors ({label} is one): use attend_packed with "
                f"offsets, or scaled_dot_product_attention for the mean alone."
            )
        if x.ndim < 2:
            raise fail(
                f"{label} must have shape (..., length, features): add dimensions with x[None]."
            )
        if not x.is_floating_point():
            raise fail(f"{label} must be real and floating point: convert it with .float().")
    autocast = _autocast_dtype(query)
    if autocast is None and len({x.dtype for x in tensors.values()}) > 1:
        raise fail("query, key and value must have one dtype: convert them with .to(dtype).")
    if len({x.device for x in tensors.values()}) > 1:
        raise fail("query, key and value must be on one device: move them with .to(device).")
    if query.shape[-1] != key.shape[-1]:
        raise fail("query and key must have the same number of features (last dimension).")
    if key.shape[-2] != value.shape[-2]:
        raise fail("key and value must have the same length (second last dimension).")
    if not isinstance(dropout_p, int | float) or not 0.0 <= dropout_p <= 1.0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise fail(f"dropout_p must lie in [0, 1], not {dropout_p!r}.")
    groups = _groups(query, key, value, fail) if enable_gqa else None

    spread = shard is not None
    shard = shard or Shard(0, key.shape[-2], query.shape[-2])
    band, mask = _band(shard.queries, shard.keys, attn_mask, is_causal, window, fail)
    band = band.shifted(shard.before)
    if mask is not None and mask.device != query.device:
        raise fail("attn_mask must be on the device of the query: move it with .to(query.device).")
    output = autocast or query.dtype
    compute = torch.float32 if output in _HALF else output
    tensors = {n: x.to(compute) for n, x in tensors.items() if n != "value" or x is not key}
    tensors.setdefault("value", tensors["key"])  # one copy where the keys are the values
    if isinstance(scale, Tensor):
        _check_scale(scale, query, fail)
        tensors["query"] = tensors["query"] * scale.to(compute)
        scale = 1.0
    elif scale is None:
        scale = 1 / math.sqrt(query.shape[-1] or 1)
    elif not isinstance(scale, int | float) or not math.isfinite(scale):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise fail(f"scale must be a finite number or a tensor, not {scale!r}.")
    rank = max(x.ndim for x in tensors.values())
    tensors = {n: x[(None,) * (rank - x.ndim)] for n, x in tensors.items()}
    try:
        heads = [x.shape[:-2] if groups is None else x.shape[:-3] for x in tensors.values()]
        batch = torch.broadcast_shapes(*heads)
    except RuntimeError:
        raise fail(
            "Batch and head dimensions must broadcast (grouped heads: enable_gqa=True)."
        ) from None
    if groups is not None:
        batch = (*batch, query.shape[-3])
    arguments = tensors
    if mask is not None:
        grid = (*batch, query.shape[-2], key.shape[-2])
        if (
            mask.is_floating_point()
            and mask.dtype not in (query.dtype, compute)
            and autocast is None
        ):
            raise fail("A floating-point attn_mask must have the dtype of the query.")
        if not mask.is_floating_point() and mask.dtype != torch.bool:
            raise fail("attn_mask must be boolean (True = may attend) or floating point (added).")
        mask = mask.reshape((1,) * (max(rank, 2) - mask.ndim) + tuple(mask.shape))
        try:
            fits = torch.broadcast_shapes(mask.shape, grid) == torch.Size(grid)
        except RuntimeError:
            fits = False
        if not fits:
            raise fail(
                f"attn_mask must broadcast to {grid} (..., query length, key length); a padding "
                "mask (batch, keys) of a call with heads goes in as mask[:, None, None, :]."
                + (" Of sharded keys it has this rank's columns." if spread else "")
            )
        arguments["bias" if mask.is_floating_point() else "mask"] = (
            mask.to(compute) if mask.is_floating_point() else mask
        )
    if groups is not None:
        arguments = {n: _split_heads(n, x, groups) for n, x in arguments.items()}
    lift: Tensor | None = None
    if "bias" in arguments:
        arguments["bias"], lift = _lowered(arguments["bias"])
    if dropout_p > 0.0:
        seeds = torch.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
        arguments["seed"] = torch.randint(
            -(2**31), 2**31, (*seeds, 1, 1), dtype=torch.int32, device=query.device
        )

    def finish(x: Tensor) -> Tensor:
        return x if groups is None else x.flatten(-4, -3)

    return Call(arguments, Options(float(scale), band, dropout_p), finish, output, lift)


def _autocast_dtype(query: Tensor) -> torch.dtype | None:
    kind = query.device.type
    if query.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _groups(
    query: Tensor, key: Tensor, value: Tensor, fail: Callable[[str], InputError]
) -> tuple[int, int]:
    """(key heads, queries per key head) of grouped-query attention."""
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise fail("enable_gqa needs a head dimension: shape (..., heads, length, features).")
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if key_heads != value_heads or key_heads == 0 or heads % key_heads:
        raise fail(
            f"With enable_gqa the {heads} query heads must be a multiple of the key and value "
            f"heads, which must agree (got {key_heads} and {value_heads})."
        )
    return key_heads, heads // key_heads


def _split_heads(name: str, x: Tensor, groups: tuple[int, int]) -> Tensor:
    """Turn the head dimension into (key head, query of the group)."""
    if name in ("key", "value") or x.shape[-3] == 1:
        return x.unsqueeze(-3)
    return x.unflatten(-3, groups)


def _band(
    m: int,
    n: int,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: Window | None,
    fail: Callable[[str], InputError],
) -> tuple[Band, Tensor | None]:
    """The band of pairs that may meet, and the mask that remains beside it."""
    diagonal, causal = 0, is_causal
    if attn_mask is not None and is_causal:
        raise fail(
            "is_causal=True and attn_mask exclude each other: put both into the mask, or pass the "
            "mask to attend with window=(None, 0)."
        )
    if attn_mask is not None and type(attn_mask) not in (Tensor, torch.nn.Parameter):
        from torch.nn.attention.bias import CausalBias, CausalVariant

        if isinstance(attn_mask, CausalBias):
            if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (m, n):
                raise fail(
                    f"The causal bias was made for lengths ({attn_mask.seq_len_q}, "
                    f"{attn_mask.seq_len_kv}), the call has ({m}, {n})."
                )
            diagonal = n - m if attn_mask.variant == CausalVariant.LOWER_RIGHT else 0
            causal, attn_mask = True, None
    if attn_mask is not None and not isinstance(attn_mask, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise fail(f"attn_mask must be a tensor, not {type(attn_mask).__name__}.")
    left, right = (None, None) if window is None else _sides(window, fail)
    if causal:
        right = 0
    lower = None if left is None else diagonal - left
    upper = None if right is None else diagonal + right
    return Band(lower, upper), attn_mask


def _lowered(bias: Tensor) -> tuple[Tensor, Tensor | None]:
    """Take a large common part off each query's bias: weights stay, and G keeps its digits.

    Masks made of the most negative number give a fully padded row such a bias. Added to it, the
    scores would be rounded away, and the weights exp(s - G) would no longer sum to one.
    """
    if bias.shape[-1] == 0:
        return bias, None
    top = bias.detach().amax(-1, keepdim=True)
    huge = top.isfinite() & (top.abs() > 64)
    try:
        if not bool(huge.any()):
            return bias, None
    except RuntimeError:  # inside vmap the question has no single answer
        pass
    lift = torch.where(huge, top, 0.0)
    return bias - lift, lift


def _sides(window: Any, fail: Callable[[str], InputError]) -> Window:
    sides = tuple(window) if isinstance(window, tuple | list) else ()
    if len(sides) != 2 or not all(x is None or (isinstance(x, int) and x >= 0) for x in sides):
        raise fail(
            "window must be (left, right), each a whole number >= 0 or None for no limit: "
            "(3, 0) sees three keys back and none ahead."
        )
    return sides[0], sides[1]


def _check_scale(scale: Tensor, query: Tensor, fail: Callable[[str], InputError]) -> None:
    try:
        fits = torch.broadcast_shapes(scale.shape, query.shape) == query.shape
    except RuntimeError:
        fits = False
    if not scale.is_floating_point() or scale.device != query.device:
        raise fail("A tensor scale must be real and on the device of the query.")
    if not fits:
        raise fail(
            f"A tensor scale must broadcast to the query; it has shape {tuple(scale.shape)}."
        )
