"""Attention as Hugging Face's models call it: our implementation, and how theirs is read."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.core.errors import InputError
from cumulant.kernels.attention import attention
from cumulant.lens.calls import AttentionCall, additive_parts
from cumulant.lens.support import guard

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
    mask = _selected(mask, given.get("indices"), key.shape[2])
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


def _selected(mask: Tensor | None, indices: Tensor | None, n: int) -> Tensor | None:
    """The mask without the keys that a model's own index of each query leaves out.

    Sparse models put that index into the mask for "eager" and "sdpa" alone, and pass it on to all
    other implementations: the positions ``(B, M, k)`` of the keys that a query sees.
    """
    if indices is None:
        return mask
    chosen = torch.zeros(*indices.shape[:-1], n, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    return chosen if mask is None else mask & chosen


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
    if given.get("block_indices") is not None:  # a mask says the same, but not to us
        raise InputError(
            f'{type(module).__name__} selects blocks of keys, which "{NAME}" does not read: load '
            'the model with attn_implementation="eager" or "sdpa".'
        )
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

    It computes what eager attention does, soft-capping and sinks included, with every derivative
    and without a matrix of weights. A model whose attention is written out in its own code cannot
    run it, and says so when it is built or when the implementation is set: InputError, with the
    name of its class.

    Masks are those of eager attention, added to the scores: models cut them, add to them and
    combine them with masks of their own, and a boolean mask would be added as zeros and ones.
    (Without a registered mask, transformers would make none.)

    >>> import cumulant as cm
    >>> cm.lens.register()
    >>> from transformers import AttentionInterface
    >>> "cumulant" in AttentionInterface().valid_keys()
    True
    """
    package = transformers()
    package.AttentionInterface.register(NAME, forward)
    masks = import_module("transformers.masking_utils")
    package.AttentionMaskInterface.register(NAME, masks.eager_mask)
    guard(package.PreTrainedModel, NAME)


def is_eager(function: Callable[..., Any]) -> bool:
    """Whether masks are always made, so that none means that every key is seen."""
    return function is forward or "eager" in getattr(function, "__name__", "")
