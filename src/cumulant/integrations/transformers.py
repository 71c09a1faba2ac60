"""Hugging Face's transformers: our attention as one of its implementations, and its calls read.

The library is imported only when one of these functions needs it. A model asks transformers'
attention interface for the implementation that the user named, and calls it with queries, keys,
values, a mask and whatever else that model knows. `call_of` reads such a call, `forward` computes
it, `register` makes it known by name, and `refusal` says which models never ask.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, wraps
from importlib import import_module
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from cumulant.attention.calls import AttentionCall, additive_parts
from cumulant.core.errors import InputError

__all__ = ["NAME", "call_of", "forward", "is_eager", "package", "refusal", "register"]

NAME = "cumulant"


def package() -> Any:
    """The library itself, or an error that says how to install it."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise InputError(
            "this needs transformers 5 or later; install it with: pip install '.[lens]'"
        ) from error


# ------------------------------------------------------------------------------------------- calls


def call_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    eager: bool,
    cross: bool,
    given: Mapping[str, Any],
) -> AttentionCall:
    """A call of the attention interface in the common form.

    Where no mask was made, implementations other than eager rely on a flag: causal unless the
    module or the call says otherwise. More keys than queries then mean that the rest of a cache is
    empty.

    Args:
        module: the attention module, which holds flags and sinks.
        query, key, value: ``(B, H, M, d)``, ``(B, Hk, N, d)`` and ``(B, Hk, N, e)``.
        attention_mask: as transformers made it: a tensor, or None.
        eager: whether masks are always made, so that None means that every key is seen.
        cross: whether the keys come from another sequence.
        given: the remaining keyword arguments of the call.

    Raises:
        InputError: the call uses a paged cache, or a mask that is not a tensor.
    """
    if given.get("cache") is not None:
        raise InputError(
            "continuous batching, where texts share one paged cache, is not supported: run the "
            "model on padded batches, or with model.generate."
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
    """A padding mask (batch, keys), as flash implementations take it, with four dimensions."""
    return mask[:, None, None, :] if isinstance(mask, Tensor) and mask.ndim == 2 else mask


def _selected(mask: Tensor | None, indices: Tensor | None, n: int) -> Tensor | None:
    """The mask, limited to the keys that a sparse model selected for each query.

    Such models put their selection into the mask for "eager" and "sdpa" only. All other
    implementations get the positions ``(B, M, k)`` of the keys that each query sees.
    """
    if indices is None:
        return mask
    chosen = torch.zeros(*indices.shape[:-1], n, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    return chosen if mask is None else mask & chosen


# --------------------------------------------------------------------------------- implementation


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **given: Any,
) -> tuple[Tensor, None]:
    """The implementation named "cumulant": every derivative, memory linear in the lengths.

    Softcap, sink logits and position bias are part of the normalizer.

    Returns:
        The output ``(B, M, H, e)``, and None in place of the weights.

    Raises:
        InputError: the model selects blocks of keys, or `call_of` refuses the call.
    """
    if given.get("block_indices") is not None:  # no mask says the same
        raise InputError(
            f'{type(module).__name__} selects blocks of keys, which "{NAME}" does not support: '
            'load the model with attn_implementation="eager" or "sdpa".'
        )
    call = call_of(module, query, key, value, attention_mask, eager=True, cross=False, given=given)
    mean = replace(call, dropout_p=dropout).attend().mean.to(value.dtype)
    return mean.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make ``attn_implementation="cumulant"`` known to Hugging Face's transformers.

    It computes the same as eager attention, including softcap and sinks, with every derivative and
    without storing attention matrices. A model with hand-written attention cannot run it: building
    the model, or setting the implementation, raises InputError with the name of its class.

    Masks are those of eager attention, which are added to the scores: models cut them, add to them
    and combine them with their own, and a boolean mask would be added as zeros and ones. (Without a
    registered mask, transformers would make none.)

    Raises:
        InputError: transformers is not installed.

    >>> import cumulant as cm
    >>> cm.lens.register()
    >>> from transformers import AttentionInterface
    >>> "cumulant" in AttentionInterface().valid_keys()
    True
    """
    library = package()
    library.AttentionInterface.register(NAME, forward)
    masks = import_module("transformers.masking_utils")
    library.AttentionMaskInterface.register(NAME, masks.eager_mask)
    _guard(library.PreTrainedModel, NAME)


def is_eager(function: Callable[..., Any]) -> bool:
    """Whether transformers always makes masks for this implementation."""
    return function is forward or "eager" in getattr(function, "__name__", "")


# ------------------------------------------------------------------------------- supported models

# How a modeling file asks for the implementation that the user named,
_ASKS = re.compile(r"\bALL_ATTENTION_FUNCTIONS\b[\s\S]{0,80}?_attn_implementation")
# how it chooses one of its own classes by that name, which knows no other names,
_CHOOSES = re.compile(r"_CLASSES\[\w*\.?config\._attn_implementation\]")
# and what the classes of attention are called, whether or not they ask.
_LAYER = re.compile(r"^class \w*(Attention|Attn)\w*\(", re.MULTILINE)


def refusal(kind: type[nn.Module], name: str) -> str | None:
    """Why a model class cannot run the implementation `name`, or None if it can.

    If a model does not ask transformers' attention interface, its attention is written out in its
    own file, and another name would change nothing. This reads the files that define the class and
    its bases; a file that cannot be read counts as support.
    """
    own = takewhile(lambda base: base.__name__ != "PreTrainedModel", kind.__mro__)
    sources = [_source(file) for file in {base.__module__ for base in own}]
    chooses = any(_CHOOSES.search(text) for text in sources)
    asks = any(_ASKS.search(text) for text in sources)
    layers = any(_LAYER.search(text) for text in sources)
    if not chooses and (asks or not layers):
        return None
    return (
        f'attn_implementation="{name}" cannot run in {kind.__name__}: its attention is written out '
        "in its own code, which does not ask transformers' attention interface. Use "
        'attn_implementation="eager" (or "sdpa", where the model has it); its derivatives are '
        f"those of the operators it calls. In a composite model, set {name} for the other parts "
        f'only, as in attn_implementation={{"text_config": "{name}"}}.'
    )


@cache
def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


def _guard(base: type[nn.Module], name: str) -> None:
    """Make every model refuse the implementation `name` where it would not run.

    `base` is transformers' ``PreTrainedModel``. A model checks the name when it is built, and when
    it is set for the model or its parts. The refusal is raised there, before anything has changed.
    """
    checks: Any = base
    check, change = checks.get_correct_attn_implementation, checks.set_attn_implementation
    if getattr(check, "refuses", None) == name:
        return

    @wraps(check)
    def get_correct_attn_implementation(self: Any, requested: str | None, *args: Any, **kw: Any):
        if requested == name:
            _demand(self, name)
        return check(self, requested, *args, **kw)

    @wraps(change)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kw: Any) -> None:
        # transformers only logs a warning for parts that it cannot change.
        asked = [id(config) for config in _asked(self.config, attn_implementation, name)]
        for part in self.modules():
            if isinstance(part, base) and (attn_implementation == name or id(part.config) in asked):
                _demand(part, name)
        change(self, attn_implementation, *args, **kw)

    vars(get_correct_attn_implementation)["refuses"] = name
    checks.get_correct_attn_implementation = get_correct_attn_implementation
    checks.set_attn_implementation = set_attn_implementation


def _demand(model: nn.Module, name: str) -> None:
    reason = refusal(type(model), name)
    if reason is not None:
        raise InputError(reason)


def _asked(config: Any, request: Any, name: str) -> Iterator[Any]:
    """The configurations, nested ones included, for which a request names `name`."""
    parts: dict[str, Any] = dict.fromkeys(["", *config.sub_configs], request)
    if isinstance(request, dict):
        parts = cast(dict[str, Any], request)
    if parts.get("") == name:
        yield config
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None and key in parts:
            yield from _asked(part, parts[key], name)
