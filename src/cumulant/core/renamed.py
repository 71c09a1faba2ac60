"""Errors that point from old names to new ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from cumulant.core.errors import InputError

__all__ = ["moved", "renamed"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def renamed(**names: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Reject keyword arguments under old names and name the new ones: ``@renamed(old="new")``.

    >>> from cumulant.core.renamed import renamed
    >>> @renamed(seed="generator")
    ... def draw(generator=None):
    ...     return generator
    >>> draw(seed=0)
    Traceback (most recent call last):
        ...
    cumulant.core.errors.InputError: draw: 'seed' is now 'generator'.
    """

    def wrap(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for old in names.keys() & kwargs.keys():
                raise InputError(f"{function.__name__}: '{old}' is now '{names[old]}'.")
            return function(*args, **kwargs)

        return call

    return wrap


def moved(module: str, name: str, names: dict[str, str]) -> NoReturn:
    """Fallback for a module's ``__getattr__``: an error that names the new location, if any."""
    if name in names:
        raise AttributeError(f"{module}.{name} is now {names[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
