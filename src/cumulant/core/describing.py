"""`described`: what an object is and its shape, in a line that costs nothing.

Every result of the library has ``__repr__ = described_fields`` or its own line made of these parts.
A description reads no value that is not at hand: a tensor on another device, in a transform of
``torch.func``, without values (meta, fake) or with more than a few entries is named by its shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cumulant.core.eager import tracing
from cumulant.core.typed import functorch

__all__ = ["described", "described_fields", "readable", "shape_of"]

_FEW = 6  # entries of a tensor or a list that are written out
_LONG = 60  # characters of one value
_WIDTH = 100


def readable(x: Tensor) -> bool:
    """Whether the values of a tensor can be read here and now, without waiting for a device."""
    plain = type(x) is Tensor or isinstance(x, torch.nn.Parameter)
    if not plain or x.device.type != "cpu" or x.layout != torch.strided or tracing():
        return False
    return not functorch.is_functorch_wrapped_tensor(x)


def shape_of(x: Tensor) -> str:
    """`(2, 5) float32`, and the device if it is not the CPU."""
    kind = str(x.dtype).removeprefix("torch.")
    place = "" if x.device.type == "cpu" else f" {x.device}"
    return f"{tuple(x.shape)} {kind}{place}"


def described(value: object) -> str:
    """One value in a few words: its own repr if that is short, else its kind and size.

    >>> import torch
    >>> described(torch.zeros(3, 64)), described(torch.tensor([1, 2])), described([0.0] * 99)
    ('(3, 64) float32', 'tensor([1, 2])', 'list of 99')
    """
    x: Any = value
    if isinstance(x, Tensor):
        if x.numel() > _FEW or not readable(x):
            return shape_of(x)
        return re.sub(r"\s+", " ", repr(x.detach()))
    if isinstance(x, str | bytes):
        return _cut(repr(x))
    if isinstance(x, Mapping):
        return _mapping(cast(Mapping[Any, Any], x))
    if isinstance(x, list | tuple | set | frozenset) and not hasattr(cast(Any, x), "_fields"):
        return _several(cast(Sequence[Any], x))
    return _other(value)


def _other(x: Any) -> str:
    """A function by its name; anything else by its repr, or by its class if that is long."""
    if callable(x) and hasattr(x, "__qualname__"):
        return str(x.__qualname__)
    text = repr(x)
    if len(text) <= _LONG and "\n" not in text and " at 0x" not in text:
        return text
    shape = getattr(x, "shape", None)
    return f"{type(x).__name__}({'...' if shape is None else tuple(shape)})"


def described_fields(self: object) -> str:
    """The repr of a result: its name, and each field in a few words."""
    names: Iterable[str]
    if is_dataclass(self):
        names = [field.name for field in fields(self) if field.repr]
    else:
        names = getattr(self, "_fields", None) or [n for n in vars(self) if n[:1] != "_"]
    parts = [f"{name}={described(getattr(self, name))}" for name in names]
    lines, line = list[str](), f"{type(self).__name__}("
    for i, part in enumerate(parts):
        part += ")" if i == len(parts) - 1 else ", "
        if len(line + part) > _WIDTH:
            lines.append(line.rstrip())
            line = "    "
        line += part
    return "\n".join([*lines, line if parts else f"{line})"])


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG - 4]}...{text[-1]}"


def _mapping(value: Mapping[Any, Any]) -> str:
    names = ", ".join(map(str, list(value)[:_FEW]))
    more = ", ..." if len(value) > _FEW else ""
    return _cut(f"{{{names}{more}}}")


def _several(value: Sequence[Any]) -> str:
    if 0 < len(value) <= _FEW and isinstance(value, list | tuple):
        inner = ", ".join(map(described, value))
        if len(inner) <= _LONG:
            one = "," if len(value) == 1 and isinstance(value, tuple) else ""
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{one})"
    return f"{type(value).__name__} of {len(value)}" if len(value) else repr(value)
