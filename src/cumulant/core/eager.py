"""Keeping torch.compile out of the streaming loops, and of what ranks say to each other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from cumulant.core.typed import compiler

_P = ParamSpec("_P")
_T = TypeVar("_T")


def eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Break the graph of compiled code here and run `function` as it stands.

    ``torch.compiler.disable`` does that, but importing its machinery takes over a second, so it is
    used only once something else has loaded it.
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
    return call
