"""Fields computed on first access and cached per mode.

A tensor belongs to the mode it was made in: under ``torch.no_grad`` it has no gradient, in a
functorch transform it is wrapped for that level, in inference mode autograd may not record it. So a
cached value is returned only where a fresh one would be the same. There is no lock: two threads
that read a field at once both compute it, and each gets a correct answer without waiting.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor

from cumulant.core.eager import transforms
from cumulant.core.errors import InputError
from cumulant.core.typed import forward_ad

__all__ = ["Lazy", "Mode", "Snapshot", "kept", "known"]

_T = TypeVar("_T")


class Mode(NamedTuple):
    """The global state that the result of a computation depends on."""

    grad: bool
    inference: bool
    transforms: int
    dual_level: int
    autocast: tuple[torch.dtype | None, ...]

    @classmethod
    def now(cls) -> Mode:
        # Graphs have no inference mode: the compiler traces as under ``torch.no_grad``.
        compiling = torch.compiler.is_compiling()
        return cls(
            torch.is_grad_enabled(),
            False if compiling else torch.is_inference_mode_enabled(),
            transforms(),
            forward_ad._current_level,
            (
                torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
                torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
            ),
        )

    @property
    def plain(self) -> bool:
        """Whether reverse mode is the only kind of differentiation that can be active."""
        return self.transforms == 0 and self.dual_level < 0 and not self.inference


class Lazy:
    """Base of objects with `kept` fields; remembers the mode the object was made in.

    An object made under ``torch.no_grad`` has no gradients, wherever its fields are read. Pickling
    and deep copying detach: the copy holds numbers only.
    """

    _made: Mode
    _kept: dict[tuple[str, Mode], Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        object.__setattr__(self, "_made", Mode.now())  # also where dataclasses are frozen
        object.__setattr__(self, "_kept", {})
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {n: _numbers(x) for n, x in vars(self).items() if n not in ("_made", "_kept")}


def _numbers(x: Any) -> Any:
    """`x` without autograd graphs, which can be neither copied nor pickled."""
    if isinstance(x, Tensor):
        return x.detach() if x.grad_fn is not None else x
    if isinstance(x, dict):
        return {n: _numbers(y) for n, y in cast(dict[Any, Any], x).items()}
    if isinstance(x, list | tuple):
        items = [_numbers(y) for y in cast(Iterable[Any], x)]
        named = hasattr(cast(Any, x), "_fields")
        return type(cast(Any, x))(*items) if named else type(cast(Any, x))(items)
    if type(x).__module__.startswith("cumulant.") and hasattr(x, "__dict__"):
        out = copy.copy(x)
        fields = cast(dict[str, Any], vars(x))
        out.__dict__.update({n: _numbers(y) for n, y in fields.items()})
        return out
    return x


if TYPE_CHECKING:
    kept = property
else:

    class kept:  # noqa: N801  (a decorator, like property)
        """A property computed once per mode.

        Inside a ``torch.func`` transform, only objects made in that same transform cache
        anything: levels are numbered, and the next transform to run reuses the number.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self.func = compute  # as functools.cached_property calls it
            self._name = compute.__name__
            self.__doc__ = compute.__doc__

        def __get__(self, owner: Lazy | None, kind: Any) -> Any:
            return self if owner is None else _fetch(owner, self._name, self.func)


def known(owner: Lazy, name: str) -> Any:
    """The cached value of a field in the current mode; None if it must be computed."""
    return owner._kept.get((name, _key(owner)))


def _key(owner: Lazy) -> Mode:
    now = Mode.now()
    return now._replace(grad=False) if now.grad and not owner._made.grad else now


_NOTHING: Any = object()


def _fetch(owner: Lazy, name: str, compute: Callable[[Any], _T]) -> _T:
    key = _key(owner)
    value = owner._kept.get((name, key), _NOTHING)
    if value is not _NOTHING:
        return value
    value = _detached(owner, name, key)
    if value is _NOTHING:
        with torch.set_grad_enabled(key.grad):
            value = compute(owner)
    if key.transforms == owner._made.transforms:
        owner._kept[name, key] = value
    return cast(_T, value)


def _detached(owner: Lazy, name: str, key: Mode) -> Any:
    """A value cached with its gradient also serves without one; `detach` drops tangents."""
    if key.grad or not key.plain:
        return _NOTHING
    value = owner._kept.get((name, key._replace(grad=True)), _NOTHING)
    return value.detach() if isinstance(value, Tensor) else _NOTHING


class Snapshot:
    """A snapshot of tensors, to detect later in-place changes."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        # In a graph tensors have no versions, and the compiler orders what is read and written.
        seen = () if torch.compiler.is_compiling() else tensors
        self._tensors = [x for x in seen if x is not None and not x.is_inference()]
        self._versions = [x._version for x in self._tensors]

    def __reduce__(self) -> tuple[Any, ...]:
        return Snapshot, (self._tensors,)  # copies of the tensors count their changes anew

    def check(self, name: str, inputs: str) -> None:
        """Refuse to compute the field `name` if one of its inputs has changed since."""
        if [x._version for x in self._tensors] != self._versions:
            raise InputError(
                f"{name} is computed on first access, but {inputs} changed in place before "
                "that: read it first, or pass a clone of what you change."
            )
