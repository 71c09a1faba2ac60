"""Which modules of a model are running, and what they were called with: hooks on all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor, nn

__all__ = ["Frame", "Running", "Stack"]


@dataclass
class Running:
    """A module that has been called and has not returned."""

    module: nn.Module
    name: str
    given: dict[str, Any]
    past: int = 0


@dataclass
class Frame:
    """One call from outside: its inputs, how often each module attended, what is padding."""

    serial: int
    outermost: Running
    inputs: list[int] = field(default_factory=list[int])
    times: dict[str, int] = field(default_factory=dict[str, int])
    real: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])


class Stack:
    """Keeps the running modules of a model; the first one called from outside opens a frame."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(m): name for name, m in model.named_modules()}
        self.running: list[Running] = []
        self.frame: Frame | None = None
        self.frames = 0
        self._modules = list(model.modules())
        self._handles: list[Any] = []

    def attach(self) -> None:
        for module in self._modules:
            self._handles += [
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.running.clear()
        self.frame = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _bound(module, args, kwargs)
        now = Running(module, self.names[id(module)], given, _seen_before(given))
        if not self.running and not _in_backward():
            self.frame = Frame(self.frames, now)
            self.frames += 1
        self.running.append(now)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # A call that raised before its own hooks leaves nothing behind: unwind to the module.
        while self.running and self.running.pop().module is not module:
            pass
        if not self.running:
            self.frame = None

    def innermost(self, wanted: Callable[[Running], bool]) -> Running | None:
        return next((x for x in reversed(self.running) if wanted(x)), None)


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; positional ones only where somebody will ask for them."""
    if not args or not (hasattr(module, "config") or isinstance(module, nn.MultiheadAttention)):
        return kwargs
    names = _parameters(type(module))
    return {**dict(zip(names, args, strict=False)), **kwargs}


@cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def _seen_before(given: dict[str, Any]) -> int:
    """How many tokens a cache held before this call."""
    cached = given.get("past_key_values")
    length = getattr(cached, "get_seq_length", None)
    if length is None:
        return 0
    try:
        return int(length())
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError):
        return 0


def _in_backward() -> bool:
    """Whether a backward pass is running: a checkpoint is then computed again, which is no call."""
    return import_module("torch._C")._current_graph_task_id() != -1


def under_transform(x: Tensor) -> bool:
    """Whether torch.func is transforming: values are then not to be had."""
    return bool(import_module("torch._C._functorch").is_functorch_wrapped_tensor(x))
