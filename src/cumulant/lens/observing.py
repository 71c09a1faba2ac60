"""`observe`: look at every attention call of a model while it runs, without changing its output."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.attention.calls import AttentionCall, additive_parts
from cumulant.core.errors import InputError
from cumulant.core.interception import Begun, Effect, Handler, Scope, Setting
from cumulant.integrations.transformers import call_of, is_eager, register
from cumulant.lens.layers import LayerProbe
from cumulant.lens.recorder import Recorder, Wanted
from cumulant.lens.stack import is_model
from cumulant.lens.tables import Lens

__all__ = ["is_compiled", "observe", "unseen", "watching"]

# Whether what runs has been recorded already. It is set in a copy of the context, which ends with
# the call whatever happens.
_seen: ContextVar[bool] = ContextVar("cumulant_lens_seen", default=False)


def observe(
    model: nn.Module,
    *,
    k90: bool = True,
    spectrum: bool = True,
    patterns: bool = True,
    energy: bool = False,
    layers: bool = False,
) -> Scope[Lens]:
    """Within this context, every attention call of `model` is measured.

    See docs/theory.md, T7, T12, T21.

    It sees Hugging Face models (through the attention interface), ``nn.MultiheadAttention``,
    ``nn.TransformerEncoder`` and any code that calls ``F.scaled_dot_product_attention``. The
    model's own implementation computes the output, so values, gradients and dropout do not change.
    The statistics take memory linear in the length. One exception: torch's inference fast path for
    its own encoder layers is turned off, which changes rounding and leaves padded positions as they
    are instead of zero. Compiled models run uncompiled, with a warning.

    The model may run in any thread. Of the asyncio tasks of one thread, it sees only those whose
    context entered `observe`. Lenses and `sdpa_replaced` can be entered and left in any order.

    Args:
        model: any ``nn.Module``.
        k90: include k90, class and top key, which need sorted rows of weights.
        spectrum: include the leading eigenvalue of Cov[k], the most expensive statistic.
        patterns: include the weights on the previous token, on earlier occurrences of the same
            token, and on what followed them (induction).
        energy: include the Hopfield energy of each head's own update (T19), in a second pass.
        layers: include expansion, contraction and shape of the hidden states (T14, T15, T17).

    Yields:
        Lens: ``table()`` has a row per (input, layer, head, token).

    Raises:
        InputError: the model ran, but the lens saw none of its attention.

    >>> import torch, cumulant as cm
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with cm.lens.observe(layer) as lens:
    ...     _ = layer(torch.randn(1, 5, 8))
    >>> len(lens.table())  # 2 heads, 5 tokens
    10
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"observe takes a torch.nn.Module, not a {type(model).__name__}.")
    wanted = Wanted(order=k90, spectrum=spectrum, patterns=patterns, energy=energy, layers=layers)

    def begin() -> Begun[Lens]:
        begun = _begin(model, wanted, 0)
        return Begun(Lens(begun.result), begun.effects, begun.check)

    return Scope(begin)


def watching(
    model: nn.Module, wanted: Wanted, seed: int = 0, *, warns: bool = True
) -> Scope[Recorder]:
    """`observe` for a recorder: of `examine`, of `Monitor`; the seed is for sampling layers.

    `warns` is whether to say that a compiled model runs uncompiled.
    """
    return Scope(lambda: _begin(model, wanted, seed, warns))


def _begin(model: nn.Module, wanted: Wanted, seed: int, warns: bool = True) -> Begun[Recorder]:
    probe = LayerProbe(model, seed=seed) if wanted.layers else None
    return recording(model, Recorder(model, wanted, probe), warns)


def recording(model: nn.Module, recorder: Recorder, warns: bool = True) -> Begun[Recorder]:
    """What makes every attention call of `model` reach `recorder`."""
    if any(isinstance(x, torch.jit.ScriptModule) for x in model.modules()):
        raise InputError(
            "observe cannot look inside scripted modules, which take no hooks: pass the original "
            "model, before torch.jit."
        )
    probe = recorder.probe
    effects: list[Effect] = [] if probe is None else probe.effects()
    if any(map(is_compiled, model.modules())):
        if warns:
            warnings.warn(
                "the model is compiled; it runs uncompiled while observed, because compiled code "
                "does not expose its attention.",
                stacklevel=4,
            )
        dynamo = import_module("torch._dynamo.eval_frame")
        effects.append(Setting(dynamo, "_stance", dynamo.DynamoStance("force_eager")))
    effects += [*_handlers(recorder), *recorder.stack.effects()]

    def check() -> None:
        if recorder.stack.frames and not recorder.calls and recorder.wanted.sample is None:
            raise InputError(unseen(model))

    return Begun(recorder, effects, check)


def unseen(model: nn.Module) -> str:
    """Why a table would be empty, and what to do."""
    return (
        f"no attention of {type(model).__name__} reached the lens although the model ran. The lens "
        "sees Hugging Face's attention interface, torch.nn.MultiheadAttention and calls of "
        "torch.nn.functional.scaled_dot_product_attention made through that module; attention "
        "written out by hand, or imported by name, it cannot see. Let the model call "
        "F.scaled_dot_product_attention."
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was applied to this module itself."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _handlers(recorder: Recorder) -> list[Handler]:
    """Everything that attention may go through, in the order from outside to inside."""
    targets: list[tuple[Any, str, Callable[..., Any]]] = [
        (F, "multi_head_attention_forward", _multi_head),
        (torch.backends.mha, "get_fastpath_enabled", _fast_path),
        (F, "scaled_dot_product_attention", _sdpa),
    ]
    if "transformers" in sys.modules:
        register()
        interface = import_module("transformers.modeling_utils").AttentionInterface
        targets.append((interface, "get_interface", _get_interface))
    return [
        Handler(owner, name, partial(call, recorder), observes=True)
        for owner, name, call in targets
    ]


def _unrecorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what has been recorded already."""

    def call() -> Any:
        _seen.set(True)
        return function(*args, **kwargs)

    return copy_context().run(call)


def _fast_path(recorder: Recorder, following: Callable[[], bool]) -> bool:
    """torch's inference shortcut hides the attention of the model that runs."""
    return following() and not recorder.stack.running


def _get_interface(
    recorder: Recorder, following: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    function = following(*args, **kwargs)
    plain = getattr(function, "observed", function)  # beneath what other lenses made of it

    def observing(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **given: Any
    ) -> Any:
        if recorder.owns(module):
            call = call_of(
                module,
                query,
                key,
                value,
                rest[0] if rest else given.get("attention_mask"),
                eager=is_eager(plain),
                cross=_is_cross(recorder, module),
                given=given,
            )
            recorder.take(module, call)
        return _unrecorded(function, module, query, key, value, *rest, **given)

    setattr(observing, "observed", plain)  # noqa: B010
    return observing


def _is_cross(recorder: Recorder, module: nn.Module) -> bool:
    """Whether an attention module was given another sequence to attend to."""
    running = recorder.stack.innermost(lambda x: x.module is module)
    if running is not None:
        for name in ("key_value_states", "encoder_hidden_states"):
            if name in running.given:
                return running.given[name] is not None
    label = f"{recorder.stack.names.get(id(module), '')} {type(module).__name__}".lower()
    return any(word in label for word in ("cross", "encoder_attn", "encdecattention"))


def _sdpa(
    recorder: Recorder, following: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    if recorder.stack.running and not _seen.get():
        _take_sdpa(recorder, *args, **kwargs)
    return following(*args, **kwargs)


def _take_sdpa(
    recorder: Recorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    if query.is_nested:
        raise InputError(
            "observe does not read nested tensors: call the model on padded batches with a mask."
        )
    shape = (*query.shape[:-1], key.shape[-2])
    if isinstance(attn_mask, Tensor) and hasattr(attn_mask, "variant"):
        from torch.nn.attention.bias import CausalVariant  # takes a second to import

        m, n = shape[-2:]
        lower = getattr(attn_mask, "variant", None) == CausalVariant.LOWER_RIGHT
        attn_mask, is_causal = None, True
        if lower and m != n:
            attn_mask = torch.ones(m, n, dtype=torch.bool, device=query.device).tril(n - m)
            is_causal = False
    mask, bias = additive_parts(attn_mask)
    if len(shape) > 4:
        mask, bias = (x if x is None else x.expand(shape) for x in (mask, bias))
    query, key, value = (_heads(x) for x in (query, key, value))
    running = recorder.stack.innermost(lambda x: isinstance(x.module, nn.MultiheadAttention))
    if running is not None:
        cross = running.given.get("query") is not running.given.get("key")
    else:
        owner = recorder.stack.innermost(is_model)
        cached = owner is not None and owner.past > 0
        cross = query.shape[2] != key.shape[2] and not (is_causal or cached)
    call = AttentionCall(
        query,
        key,
        value,
        mask=None if mask is None else _heads(mask),
        bias=None if bias is None else _heads(bias),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=is_causal,
        cross=cross,
    )
    recorder.take(None, call)


def _heads(x: Tensor) -> Tensor:
    """``(batch, heads, length, features)``: missing dimensions are 1, further ones are batches."""
    if x.ndim < 4:
        return x.reshape(*((1,) * (4 - x.ndim)), *x.shape)
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def _multi_head(
    recorder: Recorder, following: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """torch's multi-head attention; where it writes the weights out it calls no sdpa to be seen.

    Then the same call is made once more without weights and dropout, for all lenses to see.
    """
    if _seen.get() or not recorder.stack.running:
        return following(*args, **kwargs)
    names = inspect.signature(F.multi_head_attention_forward).parameters
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("need_weights", True):
        return following(*args, **kwargs)
    with torch.no_grad():
        plain = {"need_weights": False, "training": False, "dropout_p": 0.0, "is_causal": False}
        following(**{**given, **plain})
    return _unrecorded(following, *args, **kwargs)
