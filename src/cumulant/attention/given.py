"""An attention call as it was made, and an error that restates it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypedDict

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.precision import autocast_of

__all__ = ["Given", "Keywords", "Shard", "Window", "shown"]

Window = tuple[int | None, int | None]


class Keywords(TypedDict, total=False):
    """The keyword arguments of an attention call; `Given` has their defaults.

    `bias` is for callers that have both a boolean mask and numbers to add; the public functions
    take one of them, as `attn_mask`.
    """

    attn_mask: Tensor | None
    bias: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | Tensor | None
    softcap: float | None
    sink: float | Tensor | None
    enable_gqa: bool
    window: Window | None


@dataclass(frozen=True)
class Shard:
    """Where the keys of a call stand among those of all ranks.

    Attributes:
        before: how many keys come before them.
        keys, queries: how many there are on all ranks together.
    """

    before: int
    keys: int
    queries: int


@dataclass(frozen=True)
class Given:
    """A call of the public function `name`, unchecked."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    bias: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | Tensor | None = None
    softcap: float | None = None
    sink: float | Tensor | None = None
    enable_gqa: bool = False
    window: Window | None = None

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype that autocast asks for; None where it is off or does not apply."""
        return None if self.query.dtype == torch.float64 else autocast_of(self.query)

    def fail(self, problem: str) -> InputError:
        """An error that states the problem, then the call with its shapes and dtypes."""
        told = [
            shown(field.name, x)
            for field in fields(self)
            if field.name != "name" and (x := getattr(self, field.name)) is not None
            if isinstance(x, Tensor) or x != field.default
        ]
        return InputError(f"{problem} Got {self.name}({', '.join(told)}).")


def shown(name: str, x: object) -> str:
    """An argument in an error message: tensors by shape and dtype, long values by type."""
    if isinstance(x, Tensor):
        place = "" if x.device.type == "cpu" else f" on {x.device}"
        return f"{name}={tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}{place}"
    return f"{name}={x!r}" if len(repr(x)) < 40 else f"{name}=<{type(x).__name__}>"
