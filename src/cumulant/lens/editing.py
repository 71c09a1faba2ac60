"""`edited`: other answers in place of single attention calls of a model, or of whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Set
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from cumulant.attention.calls import AttentionCall
from cumulant.core.interception import Begun, Effect, Handler, Hook, Scope
from cumulant.core.typed import named_modules
from cumulant.integrations.transformers import call_of, is_eager, package

__all__ = ["block_of", "edited", "edits"]

Answer = Callable[[int, AttentionCall], Tensor | None]


def edited(model: nn.Module, answer: Answer, *, skipped: Set[int] = frozenset()) -> Scope[None]:
    """Within this context `answer` may compute the attention of a Hugging Face model.

    Layers are counted as the lens counts them: by attention calls within a pass, from 0. The edits
    act in the thread or task that entered the context; a lens sees the calls as the model made
    them. Other parts of the model are unchanged, and all of it is when the context is left.

    Args:
        model: a Hugging Face model that asks the attention interface.
        answer: ``answer(layer, call)`` returns the output ``(B, H, M, e)``, or None to let the
            model compute it.
        skipped: layers whose whole block returns its input.
    """
    effects, _ = edits(model, answer, skipped)
    return Scope(lambda: Begun(None, effects))


def edits(
    model: nn.Module, answer: Answer, skipped: Set[int] = frozenset()
) -> tuple[list[Effect], dict[str, int]]:
    """The effects of `edited`, and the number of the layer that runs, as ``"layer"``."""
    package()
    interface = import_module("transformers.modeling_utils").AttentionInterface
    owned = {id(module): name for name, module in named_modules(model)}
    modules = dict(named_modules(model))
    now = {"layer": -1}

    def restart(*_: Any) -> None:
        now["layer"] = -1

    def get_interface(following: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        function = following(*args, **kwargs)

        def attending(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **given: Any
        ) -> Any:
            if id(module) not in owned:
                return function(module, query, key, value, *rest, **given)
            now["layer"] += 1
            mask = rest[0] if rest else given.get("attention_mask")
            plain = getattr(function, "observed", function)
            eager = is_eager(plain)
            call = call_of(module, query, key, value, mask, eager=eager, cross=False, given=given)
            mean = answer(now["layer"], call)
            if mean is None:
                return function(module, query, key, value, *rest, **given)
            return mean.to(value.dtype).transpose(1, 2).contiguous(), None

        return attending

    effects: list[Effect] = [Hook(model, restart, after=False)]
    effects.append(Handler(interface, "get_interface", get_interface))
    blocks = {name for x in owned.values() if (name := block_of(x, modules)) is not None}
    if skipped:
        skip = _skipping(now, skipped)
        effects += [Hook(modules[name], skip, after=True) for name in sorted(blocks)]
    return effects, now


def _skipping(now: dict[str, int], skipped: Set[int]) -> Callable[..., Any]:
    """A hook that returns what a block was given, after the attention call of a skipped layer."""

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if now["layer"] not in skipped or output is None:
            return None
        state = args[0] if args else kwargs["hidden_states"]
        return (state, *output[1:]) if isinstance(output, tuple) else state

    return after


def block_of(name: str, modules: dict[str, nn.Module]) -> str | None:
    """The innermost child of a list of modules that contains the module, by name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        parent = modules.get(".".join(parts[: end - 1]))
        if isinstance(parent, nn.ModuleList):
            return ".".join(parts[:end])
    return None
