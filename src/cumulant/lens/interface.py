"""Attention as Hugging Face's models call it: our implementation, and how theirs is read."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.errors import InputError
from cumulant.kernels.attention import attention
from cumulant.lens.calls import AttentionCall, additive_parts

__all__ = ["NAME", "call_of", "forward", "register", "transformers"]

NAME = "cumulant"


def transformers() -> Any:
    """The package, or one clear line."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise InputError(
            "this needs transformers 5 or later; install it with: pip install 'cumulant[lens]'"
        ) from error


def call_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    eager: bool,
    cross: bool,
    given: dict[str, Any],
) -> AttentionCall:
    """A call of the attention interface in the common form.

    Where no mask was made, implementations other than eager rely on a flag: causal unless the
    module or the call says otherwise, and more keys than queries mean an empty part of a cache.
    """
    if given.get("cache") is not None:
        raise InputError(
            "the lens does not read continuous batching, where texts share one paged cache: run "
            "the model on padded batches, or with model.generate."
        )
    scale = given.get("scaling")
    sinks = given.get("s_aux")
    if sinks is None and eager:
        sinks = getattr(module, "sinks", None)
    mask, bias = additive_parts(_four(attention_mask))
    causal = False
    if not eager and attention_mask is None and query.shape[2] > 1:
        flag = given.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if flag is None else flag)
    position = given.get("position_bias")
    if position is not None:
        bias = position if bias is None else bias + position
    n = query.shape[2]
    if causal and key.shape[2] > n:
        key, value = key[:, :, :n], value[:, :, :n]
        bias = None if bias is None else bias[..., :n]
    if isinstance(bias, Tensor) and mask is None:
        mask, bias = additive_parts(bias)
    return AttentionCall(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=causal,
        softcap=given.get("softcap"),
        sinks=sinks,
        cross=cross,
    )


def _four(mask: Any) -> Any:
    """A padding mask (batch, keys), as flash implementations take it, with all its dimensions."""
    return mask[:, None, None, :] if isinstance(mask, Tensor) and mask.ndim == 2 else mask


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **given: Any,
) -> tuple[Tensor, None]:
    """The implementation called "cumulant": every derivative, memory linear in the lengths.

    Soft-capping, sink logits and position bias are part of the normalizer; ``(B, M, H, e)``.
    """
    call = call_of(
        module, query, key, value, attention_mask, eager=True, cross=False, given=given
    ).prepared()
    arguments, options = call.arguments, call.options
    if dropout:
        batch = torch.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
        seed = torch.randint(-(2**31), 2**31, (*batch, 1, 1), dtype=torch.int32)
        arguments = {**arguments, "seed": seed.to(query.device)}
        options = type(options)(options.scale, options.band, dropout)
    mean = call.finish(attention(arguments, options).mean).to(value.dtype)
    return mean.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make ``attn_implementation="cumulant"`` known to Hugging Face's transformers.

    Attention and its masks are registered (without the second, masks would silently be dropped).
    The implementation computes what eager attention does, soft-capping and sinks included, with
    every derivative and without a matrix of weights; masks are arrays of booleans.

    >>> import cumulant as cm
    >>> cm.lens.register()
    >>> from transformers import AttentionInterface
    >>> "cumulant" in AttentionInterface().valid_keys()
    True
    """
    package = transformers()
    masks = import_module("transformers.masking_utils")
    package.AttentionInterface.register(NAME, forward)

    def explicit(*args: Any, **given: Any) -> Any:
        # A causal mask is always made: that a module is causal is not always written on it.
        return masks.sdpa_mask(*args, **{**given, "allow_is_causal_skip": False})

    package.AttentionMaskInterface.register(NAME, explicit)


def is_eager(function: Callable[..., Any]) -> bool:
    """Whether masks are always made, so that none means that every key is seen."""
    return function is forward or "eager" in getattr(function, "__name__", "")
