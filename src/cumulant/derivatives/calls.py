"""The operators of a call, recorded with their inputs and with where they were called."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cumulant.core import interception
from cumulant.core.typed import DispatchMode, named_modules, overrides
from cumulant.derivatives.problem import is_real

__all__ = ["Call", "Cut", "Recording", "inner_operators", "is_live", "record"]

# Python calls that end the derivative on purpose: they explain a fault but are not one.
_CUTS = {"detach", "detach_", "item", "tolist", "numpy", "__array__", "__float__", "data"}
_TORCH = str(Path(torch.__file__).parent)
_OURS = (str(Path(__file__).parent), interception.__file__)
_one_recording = threading.Lock()


@dataclass(frozen=True)
class Call:
    """One call of an operator: `function` of the recorded arguments.

    Attributes:
        name: as torch names the operator, or ``module.Class`` of an ``autograd.Function``.
        custom: whether it is an ``autograd.Function``.
        place: module path and source line.
    """

    name: str
    custom: bool
    place: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def signature(self) -> Any:
        """Calls of one signature differ only in their numbers."""
        leaves, structure = pytree.tree_flatten((self.args, self.kwargs))
        shapes = tuple(
            (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves
        )
        return self.name, shapes, str(structure)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Arguments and keyword arguments as `pose` takes them, for `run`."""
        return (self.args, self.kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call on other tensors; what it writes to counts as a result."""
        given = [x for x in pytree.tree_leaves((args, kwargs)) if is_real(x)]
        versions = [x._version for x in given]
        out = self.function(*args, **kwargs)
        results = [x for x in pytree.tree_leaves(out) if is_real(x)]
        written = [
            x
            for x, version in zip(given, versions, strict=True)
            if x._version != version and all(x is not y for y in results)
        ]
        # Statistics that batch_norm writes are results only where there are no others.
        return results or written


@dataclass(frozen=True)
class Cut:
    """A call that may explain a fault: detach or no_grad, say."""

    name: str
    place: str
    remedy: str = "it cuts the derivative here; remove it if the derivative should pass"


@dataclass
class Recording:
    """All calls of one run, in order, and the cuts."""

    calls: list[Call] = field(default_factory=list[Call])
    cuts: list[Cut] = field(default_factory=list[Cut])


def _kept(tree: Any) -> Any:
    """Copies that still say whether they depend on what is differentiated."""
    return pytree.tree_map_only(
        Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), tree
    )


def is_live(x: Any) -> bool:
    """Whether x is a tensor that the recorded run differentiates."""
    return is_real(x) and x.requires_grad


def _line() -> str:
    """File and line of the innermost frame of f outside torch; none if f is all torch's layers."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS[0]) and frame.f_code.co_name == record.__name__:
            return ""
        if not file.startswith((_TORCH, *_OURS)) and not file.startswith(("<string>", "<frozen")):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class _Recorder(TorchFunctionMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.stack, self.recording = names, list[str](), Recording()
        self.depth = 0  # inside a recorded call, whose parts are no calls of their own

    def place(self) -> str:
        return ", ".join(p for p in (self.stack[-1] if self.stack else "", _line()) if p)

    def enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.names.get(id(module), type(module).__name__))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def note(self, name: str, function: Any, args: Any, kwargs: Any, custom: bool) -> None:
        if any(is_live(x) for x in pytree.tree_leaves((args, kwargs))):
            kept = _kept((args, kwargs))
            self.recording.calls.append(Call(name, custom, self.place(), function, *kept))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = overrides.resolve_name(func) or getattr(func, "__name__", str(func))
        name = name.removesuffix(".__get__")
        short = name.rsplit(".", 1)[-1]
        live = any(is_live(x) for x in pytree.tree_leaves((args, kwargs)))
        kept = len(self.recording.calls)
        if short not in _CUTS:
            self.note(name, func, args, kwargs, custom=False)
        self.depth += 1
        try:
            out = func(*args, **kwargs)
        finally:
            self.depth -= 1
        real = any(is_real(x) for x in pytree.tree_leaves(out)) or short.endswith("_")
        if live and short in _CUTS:
            self.recording.cuts.append(Cut(name, self.place()))
        elif live and real and not torch.is_grad_enabled():
            self.recording.cuts.append(Cut("torch.no_grad", self.place()))
        if not real:  # sizes, comparisons, indices: nothing to differentiate
            del self.recording.calls[kept:]
        return out


@contextmanager
def _functions_recorded(recorder: _Recorder) -> Generator[None]:
    """`autograd.Function` has no hook of torch's; what its `apply` calls is wrapped meanwhile.

    Its `apply` itself would not do: ``f = MyFunction.apply`` keeps the one it found.
    """
    base: Any = _SingleLevelFunction
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        above = super(_SingleLevelFunction, cls)
        run: Callable[..., Any] = getattr(above, "apply")  # noqa: B009 (torch hides it)
        if recorder.depth or threading.get_ident() != thread:
            return run(*args, **kwargs)
        name = f"{cls.__module__}.{cls.__qualname__}"
        with torch._C.DisableTorchFunction():  # its parts are no calls of their own
            recorder.note(name, cls.apply, args, kwargs, custom=True)
            return run(*args, **kwargs)

    with _one_recording:
        base.apply = classmethod(apply)
        try:
            yield
        finally:
            del base.apply


def _uncompiled() -> AbstractContextManager[Any]:
    """Compiled functions run operator by operator, if there can be any."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def record(run: Callable[[], Any], module: nn.Module | None = None) -> Recording:
    """The operators of ``run()``; module paths are those inside `module`."""
    every = named_modules(module) if module is not None else ()
    names = {id(m): n for n, m in every if n}
    recorder = _Recorder(names)
    handles = [
        hooks.register_module_forward_pre_hook(recorder.enter),
        hooks.register_module_forward_hook(recorder.leave, always_call=True),
    ]
    try:
        with torch.enable_grad(), _uncompiled(), _functions_recorded(recorder), recorder:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return recorder.recording


class _Dispatched(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(is_live(x) for x in pytree.tree_leaves((args, kwargs))):
            name = str(func).removesuffix(".default")
            self.calls.append(Call(name, False, "", partial(_first, func), *_kept((args, kwargs))))
        return func(*args, **kwargs)


def _first(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The first result: the others of an internal operator are often not differentiable."""
    out = func(*args, **kwargs)
    return cast(tuple[Any, ...], out)[0] if isinstance(out, tuple) else out


def inner_operators(call: Call) -> list[Call]:
    """The internal operators (``aten``) that a call runs, one of each signature."""
    # A leaf may not be written to in place; a view of it may.
    inputs = pytree.tree_map_only(Tensor, lambda x: x.view_as(x), _kept(call.inputs))
    with torch.enable_grad(), _Dispatched() as mode:
        call.run(*inputs)
    unique = {c.signature: c for c in mode.calls}
    return [c for c in unique.values() if c.name != "aten.detach"]
