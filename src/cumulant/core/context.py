"""A context variable that reaches the threads of a backward pass.

On a GPU torch runs backward passes in threads of its own, where context variables have their
defaults: what was entered around ``backward()`` would not act on a checkpoint's second forward
pass, or on the choice of an engine. Torch takes its own thread-local state along, which may hold
objects, so a value is put there as well.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar, cast

import torch

__all__ = ["Carried", "thread"]

_T = TypeVar("_T")


class _Thread(threading.local):
    """Identifies a thread; thread ids alone are reused."""

    def __init__(self) -> None:
        self.key = object()


thread = _Thread()
_UNSET: Any = object()


class Carried(Generic[_T]):
    """A `ContextVar` that autograd's threads see as the thread that called ``backward()`` did.

    Threads started in Python see the default. Of tasks that interleave in one thread, autograd's
    threads see the value set last.
    """

    def __init__(self, name: str, default: _T) -> None:
        self._name = name
        self._default = default
        self._here: ContextVar[_T] = ContextVar(name, default=_UNSET)

    def get(self) -> _T:
        value = self._here.get()
        if value is not _UNSET:
            return value
        return self._default if torch.compiler.is_compiling() else self._from_caller()

    def _from_caller(self) -> _T:
        """The value in the thread whose backward pass this is, if this is one of autograd's."""
        state = cast(Any, torch._C)
        if not state._is_key_in_tls(self._name):
            return self._default
        key, value = state._get_obj_in_tls(self._name)
        return self._default if key is thread.key else value

    def set(self, value: _T) -> Token[_T]:
        token = self._here.set(value)
        self._carry(value)
        return token

    def reset(self, token: Token[_T]) -> None:
        self._here.reset(token)
        value = self._here.get()
        self._carry(self._default if value is _UNSET else value)

    def _carry(self, value: _T) -> None:
        cast(Any, torch._C)._stash_obj_in_tls(self._name, (thread.key, value))
