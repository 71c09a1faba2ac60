"""What the ranks of a group compare before a call: facts of its input, by name.

Ranks exchange a digest of their facts, which is one small message. Only where digests differ do
they exchange the facts themselves, to say which one it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import forward_ad

__all__ = [
    "Fact",
    "Facts",
    "carries_tangent",
    "describe",
    "digest",
    "grad_mode",
    "shape_of",
    "told",
]

Fact: TypeAlias = bool | int | float | str | tuple[int, ...]
Facts: TypeAlias = Mapping[str, Fact]


def digest(facts: Facts) -> int:
    """64 bits that tell different facts apart."""
    text = repr([(name, type(x).__name__, x) for name, x in facts.items()])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def told(fact: Fact | None) -> str:
    """A fact as people say it."""
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if isinstance(fact, float):
        return f"{fact:g}"
    text = "not given" if fact is None else str(fact)
    return text if len(text) <= 80 else f"{text[:77]}..."


def describe(**named: Tensor) -> dict[str, Fact]:
    """Facts of tensors that ranks must agree on: dtype, batch, features, who wants derivatives."""
    facts: dict[str, Fact] = {}
    for name, x in named.items():
        _plain(name, x)
        facts[f"dtype of {name}"] = _kind(x)
        facts[f"batch of {name}"] = tuple(x.shape[:-2])
        facts[f"features of {name}"] = x.shape[-1]
        facts[f"whether {name} requires gradients"] = x.requires_grad
        facts[f"whether {name} carries a tangent"] = carries_tangent(x)
    return facts


def shape_of(what: str, x: Any) -> dict[str, Fact]:
    """What must be equal where a tensor is summed over ranks entry by entry."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{what}: expected a real floating-point tensor, not {kind}.")
    _plain(f"{what}: the tensor", x)
    return {
        "dtype": _kind(x),
        "shape": tuple(x.shape),
        "whether it carries a tangent": carries_tangent(x),
        **grad_mode(),
    }


def grad_mode() -> dict[str, Fact]:
    """Ranks that record gradients must do so together."""
    return {"whether gradients are computed": torch.is_grad_enabled()}


def carries_tangent(x: Tensor) -> bool:
    """Whether it is a dual number; ranks that push tangents forward must do so together."""
    return forward_ad.unpack_dual(x).tangent is not None


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _plain(name: str, x: Tensor) -> None:
    if hasattr(x, "to_local"):
        raise InputError(f"{name} is a DTensor: pass this rank's part, such as x.to_local().")
    if x.layout != torch.strided or x.is_meta:
        raise InputError(f"{name} must be dense and hold numbers, not {x.layout} on {x.device}.")
