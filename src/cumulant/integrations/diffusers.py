"""diffusers: our attention as a backend of its dispatcher, and inside processors without one.

Newer models (Flux and its kin) ask the library's dispatcher for attention; `register` makes ours
known there by name. Older ones (U-Nets, DiT, SD3) call torch's function inside an attention
processor; `Processor` runs such a processor with ours in its place. `use` does both for a model.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from cumulant.attention import scaled_dot_product_attention, sdpa_replaced
from cumulant.core.errors import InputError

__all__ = ["NAME", "Processor", "attention_backend", "register", "use"]

NAME = "cumulant"


def _dispatch() -> Any:
    """The library's module of attention backends, or an error that says what to install."""
    try:
        return import_module("diffusers.models.attention_dispatch")
    except ImportError as error:
        raise InputError(
            "this needs diffusers 0.36 or later; install it with: pip install diffusers"
        ) from error


def attention_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as the dispatcher calls it: ``(batch, length, heads, features)``.

    A mask of two dimensions is a padding mask ``(batch, keys)``, if its sizes say so.
    """
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    out = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.transpose(1, 2)


def register() -> str:
    """Make "cumulant" a backend of the dispatcher; returns that name.

    Afterwards ``model.set_attention_backend("cumulant")`` works, which sets it for the whole
    process, and ``diffusers.models.attention_dispatch.attention_backend("cumulant")``.

    Raises:
        InputError: diffusers is missing, or has no dispatcher yet.
    """
    module = _dispatch()
    names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
    if NAME not in names._value2member_map_:
        # The library lists its backends in an enumeration and has no call that adds one.
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
    registry.register(names(NAME))(attention_backend)
    return NAME


class Processor:
    """An attention processor of diffusers, with our attention in place of torch's function.

    Args:
        inner: the processor that the module had.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_replaced():
            return self.inner(*args, **kwargs)


@contextmanager
def use(model: nn.Module) -> Generator[None]:
    """Within this context the attention of a diffusers model is ours, with every derivative.

    Only this model changes, and it gets its own processors back at the end. Norms stay torch's:
    for a gradient of a JVP use `cumulant.differentiable` around it.

    Raises:
        InputError: the model has no attention that diffusers knows.

    Example, after ``transformer = FluxTransformer2DModel(...)``::

        with use(transformer):
            value, tangent = torch.func.jvp(step, (latents,), (velocity,))
    """
    register()
    name = _dispatch().AttentionBackendName(NAME)
    found: list[Any] = [x for x in model.modules() if hasattr(x, "set_processor")]
    found = [x for x in found if getattr(x, "processor", None) is not None]
    if not found:
        raise InputError(
            f"{type(model).__name__} has no attention processors: pass a model of diffusers, such "
            "as pipeline.transformer or pipeline.unet."
        )
    before = [(x, x.processor, getattr(x.processor, "_attention_backend", None)) for x in found]
    try:
        for module, processor, _ in before:
            if hasattr(processor, "_attention_backend"):
                processor._attention_backend = name
            else:
                module.set_processor(Processor(processor))
        yield
    finally:
        for module, processor, backend in before:
            if hasattr(processor, "_attention_backend"):
                processor._attention_backend = backend
            else:
                module.set_processor(processor)
