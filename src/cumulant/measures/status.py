"""What became of each mean whose natural parameter was asked for (docs/theory.md, T8)."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cumulant.core.errors import InputError

__all__ = ["Code", "Link", "Status", "checked"]


class Code(IntEnum):
    """What became of one mean."""

    CONVERGED = 0
    BOUNDARY = 1
    OUTSIDE = 2
    STALLED = 3


_DIAGNOSIS = {
    Code.BOUNDARY: "lie on the boundary of the convex hull of the support, where eta is infinite",
    Code.OUTSIDE: "lie outside the convex hull of the support, so that no eta has them",
    Code.STALLED: "were not reached: they lie outside, or rounding stopped Newton's method",
}


class Status(NamedTuple):
    """What became of each mean: `code` holds members of `Code`, ``(*batch, M)``."""

    code: Tensor

    @property
    def converged(self) -> Tensor:
        return self.code == Code.CONVERGED

    @property
    def boundary(self) -> Tensor:
        return self.code == Code.BOUNDARY

    @property
    def outside(self) -> Tensor:
        return self.code == Code.OUTSIDE

    @property
    def stalled(self) -> Tensor:
        return self.code == Code.STALLED

    def __str__(self) -> str:
        return diagnosis(self.code) or f"all {self.code.numel()} means have a natural parameter"


def diagnosis(code: Tensor) -> str:
    """The failures in words; empty if there are none."""
    counts = ((text, int((code == kind).sum())) for kind, text in _DIAGNOSIS.items())
    return "; ".join(f"{n} of {code.numel()} means {text}" for text, n in counts if n)


class Link(NamedTuple):
    """Natural parameters ``(*batch, M, d)`` and what became of each mean."""

    value: Tensor
    status: Status


class _Checked(torch.autograd.Function):
    """The identity on codes that raises where one is bad, inside vmap too."""

    @staticmethod
    def forward(code: Tensor, call: str) -> Tensor:
        if bool((code != Code.CONVERGED).any()):
            hint = " Pass throw=False for the status of each." if call == "link" else ""
            raise InputError(f"{call}: {diagnosis(code)}.{hint}")
        return code.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], code: Tensor, call: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Checked.apply(code, call), in_dims[0]


def checked(code: Tensor, throw: bool, call: str = "link") -> Tensor:
    """`code`, or an error of that call that counts the failures."""
    return cast(Tensor, _Checked.apply(code, call)) if throw else code
