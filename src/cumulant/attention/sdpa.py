"""torch's attention function with every derivative, and a way to put it in torch's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.attention.inputs import prepare
from cumulant.attention.packed import attend_packed
from cumulant.core.errors import InputError
from cumulant.core.interception import Begun, Handler, Scope
from cumulant.kernels.attention import attention

__all__ = ["replacements", "scaled_dot_product_attention", "sdpa_replaced"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with every derivative.

    See docs/theory.md, T12.

    Same arguments, same semantics; torch's fused kernel runs where it applies. Beyond torch:
    forward mode and derivatives of any order in memory linear in the lengths, gradients of
    `attn_mask` and of a tensor `scale`, dropout without an M x N array, and zeros for rows without
    keys.

    An additive mask is added exactly, however large: a row with the same -1e9 or
    ``torch.finfo(dtype).min`` at every key is plain attention, because softmax does not change
    under a shift (T1). In torch such scores are rounded away, and the row is the mean of all
    values. A boolean mask gives zeros in both.

    Jagged nested tensors ``(batch, heads, length, features)`` work without `attn_mask` and dropout,
    and have only the first gradient, which is all that torch's nested tensors support;
    `attend_packed` has the others.

    Args:
        query: ``(*batch, M, d)``.
        key: ``(*batch, N, d)``.
        value: ``(*batch, N, e)``.
        attn_mask: boolean (True = may attend) or additive, or a ``torch.nn.attention.bias`` object.
        dropout_p: probability of dropping a weight; as in torch it is applied whenever given.
        is_causal: query i sees keys j <= i.
        scale: defaults to 1/sqrt(d).
        enable_gqa: dimension -3 holds heads, and key heads serve groups of query heads.

    Returns:
        Tensor: ``(*batch, M, e)``.

    Raises:
        InputError: the shapes, dtypes or devices do not fit; the message restates the call.

    >>> import torch, cumulant as cm
    >>> q, k, v = (torch.randn(2, 5, 8) for _ in range(3))
    >>> f = lambda q: cm.scaled_dot_product_attention(q, k, v)
    >>> value, tangent = torch.func.jvp(f, (q,), (torch.randn(2, 5, 8),))
    >>> tangent.shape
    torch.Size([2, 5, 8])
    """
    if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):  # pyright: ignore[reportUnnecessaryIsInstance]
        if attn_mask is not None or dropout_p:
            raise InputError(
                "Nested tensors do not go with attn_mask or dropout_p: use is_causal, or attend to "
                "each sequence by itself."
            )
        return _nested(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    call = prepare(
        "scaled_dot_product_attention",
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return call.finish(attention(call.arguments, call.options).mean).to(call.dtype)


def _nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | Tensor | None,
    enable_gqa: bool,
) -> Tensor:
    """Jagged ``(batch, heads, length, features)``, as torch's own function takes them."""
    parts: list[Tensor] = []
    offsets: list[Tensor] = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not x.is_nested or x.layout != torch.jagged or x.ndim != 4:
            raise InputError(
                f"With nested input, query, key and value must all be jagged with shape (batch, "
                f"heads, length, features); {name} is {type(x).__name__} with layout {x.layout}."
            )
        length: Any = x.shape[2]
        if isinstance(length, int):
            raise InputError(
                f"The jagged dimension of {name} must be the third, (batch, heads, length, "
                f"features): pass {name}.transpose(1, 2)."
            )
        rows: Any = x.transpose(1, 2)  # (batch, length, heads, features): lengths are packed
        if rows.lengths() is not None:
            raise InputError(f"{name} has holes between its sequences: pass {name}.contiguous().")
        parts.append(rows.values().transpose(0, 1))
        offsets.append(rows.offsets())
    if not torch.equal(offsets[1], offsets[2]):
        raise InputError("The sequences of key and value must have the same lengths.")
    out = attend_packed(
        *parts,
        query_offsets=offsets[0],
        key_offsets=offsets[1],
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    ).mean.transpose(0, 1)
    return torch.nested.nested_tensor_from_jagged(out, offsets[0]).transpose(1, 2)


def sdpa_replaced() -> Scope[None]:
    """Within this context, ``F.scaled_dot_product_attention`` is ours, in this thread or task.

    One line gives an existing model's attention forward mode and higher derivatives. It replaces
    attention alone: torch's norms stay torch's, and differentiating their tangents again gives
    wrong numbers; `differentiable` replaces both.

    It covers whatever calls the function through ``torch.nn.functional``:
    ``nn.MultiheadAttention``, ``nn.TransformerEncoder`` (whose inference shortcut is switched off
    inside), Hugging Face models with ``attn_implementation="sdpa"``. It does not reach code that
    imported the function by name, or modules after ``torch.compile``, which keep what they were
    compiled with. Checkpointed parts are recomputed in backward, which must then run inside too.

    Contexts nest and may be left in any order; other threads and tasks keep torch's function.
    Afterwards torch's own is back, also after an exception or Ctrl-C.

    >>> import torch, cumulant as cm
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> x = torch.randn(1, 5, 8)
    >>> with cm.sdpa_replaced():
    ...     value, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    >>> tangent.shape
    torch.Size([1, 5, 8])
    """
    return Scope(lambda: Begun(None, replacements()))


def replacements() -> list[Handler]:
    """The handlers that put our function in torch's place, and torch's shortcuts out of the way."""
    return [
        Handler(F, "scaled_dot_product_attention", _ours),
        Handler(torch.backends.mha, "get_fastpath_enabled", _never),
    ]


def _never(_: Callable[[], bool]) -> bool:
    return False


def _ours(_: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return scaled_dot_product_attention(*args, **kwargs)
