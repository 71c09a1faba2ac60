"""Which modules of a model are running, and what they were called with: hooks on all of them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.core.interception import Afterwards, Effect, Hook
from cumulant.core.typed import named_modules

__all__ = ["Frame", "Running", "Stack", "in_backward", "is_model", "under_transform"]


@dataclass
class Running:
    """A module that has been called and has not returned."""

    module: nn.Module
    name: str
    given: dict[str, Any]
    past: int = 0


@dataclass
class Frame:
    """One call of a model: its inputs, how often each module attended, what is padding."""

    serial: int
    outermost: Running
    differentiated: bool = False  # whether gradients were enabled: a training step
    inputs: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # by batch size
    times: dict[str, int] = field(default_factory=dict[str, int])
    real: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])


class _Here(threading.local):
    """What runs in one thread."""

    def __init__(self) -> None:
        self.running: list[Running] = []
        self.frames: list[tuple[int, Frame | None]] = []  # each with its depth in `running`


class Stack:
    """Keeps the running modules of a model, thread by thread.

    The first module called from outside opens a frame, and so does a Hugging Face model inside
    something that is none: a module that generates calls its model once for each step. `closed` is
    told when a frame's call has returned, with what it returned.
    """

    def __init__(self, model: nn.Module, closed: Callable[[Frame, Any], None]) -> None:
        self.names = {id(m): name for name, m in named_modules(model)}
        self.frames = 0
        self._here = _Here()
        self._closed = closed
        self._modules = list(model.modules())

    @property
    def running(self) -> list[Running]:
        return self._here.running

    @property
    def frame(self) -> Frame | None:
        return self._here.frames[-1][1] if self._here.frames else None

    def effects(self) -> list[Effect]:
        """Hooks that tell of every module that is called and returns."""
        effects: list[Effect] = [Afterwards(self._forget)]
        for module in self._modules:
            effects.append(Hook(module, self._enter, after=False))
            effects.append(Hook(module, self._leave, after=True))
        return effects

    def _forget(self) -> None:
        """What an interrupted call left behind, in all threads."""
        self._here = _Here()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(module) not in self.names:  # a copy made meanwhile, which has our hooks too
            return
        here = self._here
        if here.running and here.running[0].module is module:  # an interrupted call left its traces
            here.running.clear()
            here.frames.clear()
        given = _bound(module, args, kwargs)
        now = Running(module, self.names[id(module)], given, _seen_before(given))
        opens = not here.running or (is_model(now) and not any(map(is_model, here.running)))
        if opens:
            frame = None if in_backward() else Frame(self.frames, now, torch.is_grad_enabled())
            here.frames.append((len(here.running), frame))
            self.frames += frame is not None
        here.running.append(now)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        here = self._here
        if id(module) not in self.names:
            return
        # A call that raised before its own hooks leaves nothing behind: unwind to the module.
        while here.running and here.running.pop().module is not module:
            pass
        while here.frames and here.frames[-1][0] >= len(here.running):
            _, frame = here.frames.pop()
            if frame is not None:
                self._closed(frame, output)

    def innermost(self, wanted: Callable[[Running], bool]) -> Running | None:
        return next((x for x in reversed(self.running) if wanted(x)), None)


def is_model(running: Running) -> bool:
    """A Hugging Face model or one of its stacks, which know the mask of the texts."""
    return hasattr(running.module, "base_model_prefix")


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


def in_backward() -> bool:
    """Whether a backward pass is running: a checkpoint is then computed again, which is no call."""
    return import_module("torch._C")._current_graph_task_id() != -1


def under_transform(x: Tensor) -> bool:
    """Whether torch.func is transforming: values are then not to be had."""
    return bool(import_module("torch._C._functorch").is_functorch_wrapped_tensor(x))
