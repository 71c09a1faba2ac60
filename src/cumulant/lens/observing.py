"""`observe`: look at every attention call of a model while it runs, without changing its output."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.errors import InputError
from cumulant.lens.calls import AttentionCall, additive_parts
from cumulant.lens.interface import call_of, is_eager, register
from cumulant.lens.layers import LayerProbe
from cumulant.lens.recorder import Recorder, Wanted
from cumulant.lens.stack import is_model
from cumulant.lens.tables import Lens

__all__ = ["observe"]

_lock = threading.Lock()
_active: list[Recorder] = []
_originals: dict[str, Any] = {}
_local = threading.local()


@contextmanager
def observe(
    model: nn.Module,
    *,
    k90: bool = True,
    spectrum: bool = True,
    energy: bool = False,
    layers: bool = False,
) -> Generator[Lens]:
    """Within this context, every attention call of `model` is measured (THEORY T7, T12, T21).

    Hugging Face models (through the attention interface), ``nn.MultiheadAttention``,
    ``nn.TransformerEncoder`` and whatever calls ``F.scaled_dot_product_attention`` are seen. The
    model's own implementation computes its output, so nothing changes: not its values, not its
    gradients, not its dropout. Statistics are taken beside it in memory linear in the length. One
    exception: torch's inference shortcut for its own encoder layers is switched off meanwhile; that
    changes roundings, and leaves padded positions as they are instead of zero. Compiled models run
    uncompiled meanwhile, with a warning.

    Args:
        model: any ``nn.Module``.
        k90: also k90, class and top key; they sort the weights of each row.
        spectrum: also the leading eigenvalue of Cov[k], the dearest of the statistics.
        energy: also the Hopfield energy of each head's own update (T19): another pass.
        layers: also expansion, contraction and shape of the hidden states (T14, T15, T17).

    Yields:
        Lens: ``table()`` has a row per (input, layer, head, token).

    Raises:
        InputError: the model ran, but none of its attention was seen.

    >>> import torch, cumulant as cm
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with cm.lens.observe(layer) as lens:
    ...     _ = layer(torch.randn(1, 5, 8))
    >>> len(lens.table())  # 2 heads, 5 tokens
    10
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"observe takes a torch.nn.Module, not a {type(model).__name__}.")
    wanted = Wanted(order=k90, spectrum=spectrum, energy=energy, layers=layers)
    with watching(model, wanted) as recorder:
        yield Lens(recorder)


@contextmanager
def watching(model: nn.Module, wanted: Wanted, seed: int = 0) -> Generator[Recorder]:
    """`observe` for a recorder; what `examine` uses too. The seed is that of samples of layers."""
    with ExitStack() as stack:
        probe = stack.enter_context(LayerProbe(model, seed=seed)) if wanted.layers else None
        recorder = Recorder(model, wanted, probe)
        if _is_compiled(model):
            warnings.warn(
                "the model is compiled; while it is observed it runs uncompiled, because compiled "
                "code does not show its attention.",
                stacklevel=4,
            )
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _enter(recorder)
        stack.callback(_leave, recorder)
        recorder.stack.attach()
        stack.callback(recorder.stack.detach)
        yield recorder
        if recorder.stack.frames and not recorder.calls:
            raise InputError(unseen(model))


def unseen(model: nn.Module) -> str:
    """Why a table would be empty, and what to do."""
    return (
        f"no attention of {type(model).__name__} reached the lens although the model ran. The lens "
        "sees Hugging Face's attention interface, torch.nn.MultiheadAttention and calls of "
        "torch.nn.functional.scaled_dot_product_attention made through that module; attention "
        "written out by hand, or imported by name, it cannot see. Let the model call "
        "F.scaled_dot_product_attention."
    )


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )


def _enter(recorder: Recorder) -> None:
    with _lock:
        if not _active:
            _originals["sdpa"] = F.scaled_dot_product_attention
            _originals["multi_head"] = F.multi_head_attention_forward
            _originals["fast"] = torch.backends.mha.get_fastpath_enabled()
            F.scaled_dot_product_attention = _sdpa
            F.multi_head_attention_forward = _multi_head
            torch.backends.mha.set_fastpath_enabled(False)
        interface = _interface()
        if interface is not None and "interface" not in _originals:  # it may be imported late
            register()
            _originals["interface"] = interface.get_interface
            interface.get_interface = _get_interface
        _active.append(recorder)


def _leave(recorder: Recorder) -> None:
    with _lock:
        _active.remove(recorder)
        if not _active:
            F.scaled_dot_product_attention = _originals["sdpa"]
            F.multi_head_attention_forward = _originals["multi_head"]
            torch.backends.mha.set_fastpath_enabled(_originals["fast"])
            if "interface" in _originals:
                _interface().get_interface = _originals["interface"]
            _originals.clear()


def _interface() -> Any:
    """Hugging Face's table of attention functions, if that package is in use at all."""
    import sys

    if "transformers" not in sys.modules:
        return None
    return import_module("transformers.modeling_utils").AttentionInterface


def _recorders(module: nn.Module | None = None) -> list[Recorder]:
    """Who watches: the owners of a module, or of whatever is running in this thread."""
    if getattr(_local, "inside", 0):
        return []
    if module is not None:
        return [r for r in _active if r.owns(module)]
    return [r for r in _active if r.stack.running]


@contextmanager
def _seen() -> Generator[None]:
    """What happens inside has been recorded already."""
    _local.inside = getattr(_local, "inside", 0) + 1
    try:
        yield
    finally:
        _local.inside -= 1


def _get_interface(self: Any, implementation: str, default: Callable[..., Any]) -> Any:
    function = _original("interface")(self, implementation, default)

    def observed(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **given: Any
    ) -> Any:
        mask = rest[0] if rest else given.get("attention_mask")
        for recorder in _recorders(module):
            call = call_of(
                module,
                query,
                key,
                value,
                mask,
                eager=is_eager(function),
                cross=_is_cross(recorder, module),
                given=given,
            )
            recorder.take(module, call)
        with _seen():
            return function(module, query, key, value, *rest, **given)

    return observed


def _is_cross(recorder: Recorder, module: nn.Module) -> bool:
    """Whether an attention module was given another sequence to attend to."""
    running = recorder.stack.innermost(lambda x: x.module is module)
    if running is not None:
        for name in ("key_value_states", "encoder_hidden_states"):
            if name in running.given:
                return running.given[name] is not None
    label = f"{recorder.stack.names.get(id(module), '')} {type(module).__name__}".lower()
    return any(word in label for word in ("cross", "encoder_attn", "encdecattention"))


def _sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """Stands in torch's place while somebody observes."""
    watchers = _recorders()
    mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    for recorder in watchers:
        _take_sdpa(recorder, *args, **kwargs)
    # torch's causal bias looks for its function under the name that we hold meanwhile
    if hasattr(mask, "variant"):
        with _seen():
            return type(mask)._dispatch(*args, **kwargs)
    return _original("sdpa")(*args, **kwargs)


def _original(name: str) -> Any:
    """What stood where we stand; in another thread the context may have been left just now."""
    found = _originals.get(name)
    if found is not None:
        return found
    if name == "interface":
        return _interface().get_interface
    return {"sdpa": F.scaled_dot_product_attention, "multi_head": F.multi_head_attention_forward}[
        name
    ]


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


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """torch's multi-head attention; where it writes the weights out it calls no sdpa to be seen.

    Then the same call is made once more without weights and dropout, for the lens alone.
    """
    original = _original("multi_head")
    if not _recorders():
        return original(*args, **kwargs)
    names = _names(original)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("need_weights", True):
        return original(*args, **kwargs)
    with torch.no_grad():
        plain = {"need_weights": False, "training": False, "dropout_p": 0.0, "is_causal": False}
        original(**{**given, **plain})
    with _seen():
        return original(*args, **kwargs)


def _names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
