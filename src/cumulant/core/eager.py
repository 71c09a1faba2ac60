"""Compiled code: detect graph tracing, and exclude functions from torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from cumulant.core.typed import compiler, functorch

_P = ParamSpec("_P")
_T = TypeVar("_T")


# Depth of nested torch.func transforms; torch has no public name for it.
_level: Callable[[], int | None] = functorch.maybe_current_level


def transforms() -> int:
    """Number of enclosing ``torch.func`` transforms; in compiled code, at trace time."""
    return _level() or 0


setattr(transforms, "_dynamo_marked_constant", True)  # noqa: B010  (torch.compiler.assume_constant_result)


_REASON = (
    "cumulant runs this eagerly. Of attention, compiled graphs hold the value and first gradient "
    "of mean, log_normalizer and entropy, without torch.func's transforms and sharded keys."
)


def tracing() -> bool:
    """Whether this code is being traced by ``torch.compile``, ``export`` or ``make_fx``.

    Also true if tensors have shapes but no values (``FakeTensorMode``).
    """
    if torch.compiler.is_compiling():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    kinds = torch._C._TorchDispatchModeKey
    modes = (torch._C._get_dispatch_mode(kind) for kind in (kinds.PROXY, kinds.FAKE))
    return any(mode is not None for mode in modes)


def eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Break the graph of compiled code here and run `function` eagerly.

    ``torch.compiler.disable`` does that, but importing its machinery takes over a second, so it is
    used only if something else has already loaded it.
    """
    disabled: list[Any] = []

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(compiler.disable(function))
        return disabled[0](*args, **kwargs)

    setattr(call, "_torchdynamo_disable", True)  # noqa: B010
    setattr(call, "_torchdynamo_disable_msg", _REASON)  # noqa: B010  (what fullgraph=True reports)
    return call
