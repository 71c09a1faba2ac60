"""What a visitor may change in a model: single heads, whole layers.

Shape legend: B texts, H heads, M queries, N keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from cumulant.attention.calls import AttentionCall
from cumulant.core.errors import InputError
from cumulant.lens.standing_in import continuous

__all__ = ["Change", "Edits", "parse"]

Kind = Literal["temperature", "no_sink", "uniform", "gaussian", "skip"]
HOTTEST, COLDEST = 100.0, 0.01
MOST = 32


@dataclass(frozen=True)
class Change:
    """One change: of a head, or of a whole layer (``skip``, with head -1)."""

    kind: Kind
    layer: int
    head: int = -1
    value: float = 1.0


def parse(given: object, layers: int, heads: int) -> tuple[Change, ...]:
    """Changes as the page sends them, checked.

    Raises:
        InputError: what is wrong with which.
    """
    if not isinstance(given, list) or len(cast(list[Any], given)) > MOST:
        raise InputError(f"changes must be a list of at most {MOST}.")
    return tuple(_one(x, layers, heads) for x in cast(list[object], given))


def _one(given: object, layers: int, heads: int) -> Change:
    fields = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    kind = cast(Kind, fields.get("kind"))
    if kind not in get_args(Kind):
        raise InputError(f"a change's kind must be one of {', '.join(get_args(Kind))}.")
    layer = _index("layer", fields.get("layer"), layers)
    if kind == "skip":
        return Change(kind, layer)
    head = _index("head", fields.get("head"), heads)
    value = fields.get("value", 1.0)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "temperature" and not (number and COLDEST <= value <= HOTTEST):
        raise InputError(f"a temperature must be a number from {COLDEST} to {HOTTEST:g}.")
    return Change(kind, layer, head, float(value) if number and math.isfinite(value) else 1.0)


def _index(name: str, value: object, count: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise InputError(f"{name} must be an integer from 0 to {count - 1}.")
    return value


class Edits:
    """Changes as edits of attention calls.

    Temperatures, uniform heads and hidden sinks give another call, with weights of its own. A head
    replaced by a Gaussian (T40) has no weights: only its output changes.
    """

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = tuple(changes)
        self.skipped = frozenset(x.layer for x in changes if x.kind == "skip")

    def call(self, layer: int, call: AttentionCall) -> AttentionCall:
        """The call of a layer with the weights that it has after the changes."""
        for change in self._of(layer):
            if change.kind == "temperature":
                call = replace(call, query=_scaled(call.query, change.head, 1 / change.value))
            elif change.kind == "uniform":
                call = replace(call, query=_scaled(call.query, change.head, 0.0))
            elif change.kind == "no_sink":
                call = _without_first(call, change.head)
        return call

    def answer(self, layer: int, call: AttentionCall) -> Tensor | None:
        """The output of a changed layer; None for the others."""
        changes = self._of(layer)
        if not changes:
            return None
        call = self.call(layer, call)
        mean = call.attend().mean
        gaussian = sorted({x.head for x in changes if x.kind == "gaussian"})
        if gaussian:
            mean = mean.clone()
            mean[:, gaussian] = continuous(call)[:, gaussian].to(mean.dtype)
        return mean

    def _of(self, layer: int) -> tuple[Change, ...]:
        return tuple(x for x in self.changes if x.layer == layer and x.kind != "skip")


def _scaled(query: Tensor, head: int, factor: float) -> Tensor:
    factors = torch.ones(query.shape[1], 1, 1, dtype=query.dtype, device=query.device)
    factors[head] = factor
    return query * factors


def _visible(call: AttentionCall) -> Tensor:
    """Which keys each query sees, ``(B, H, M, N)``."""
    B, H, M, _ = call.query.shape
    N = call.key.shape[2]
    seen = torch.ones(B, H, M, N, dtype=torch.bool, device=call.query.device)
    if call.mask is not None:
        seen = seen & call.mask
    return seen.tril() if call.causal else seen


def _without_first(call: AttentionCall, head: int) -> AttentionCall:
    """The call with the first key hidden from every query of a head that sees another key."""
    seen = _visible(call)
    others = seen[:, head, :, 1:].any(-1)
    seen[:, head, :, 0] &= ~others
    return replace(call, mask=seen, causal=False)
