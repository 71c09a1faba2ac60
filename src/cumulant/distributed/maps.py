"""Linear maps between what ranks hold, each with its adjoint: why gradients come out right.

A tensor is *replicated* (one vector, of which every rank has a copy) or *local* (one vector for
each rank, their direct sum). A loss is replicated, and its gradient in a replicated tensor is again
replicated: whole on every rank, to be counted once. Then the adjoints are

    total   local -> replicated   sum over ranks           adjoint: spread
    spread  replicated -> local   every rank takes it      adjoint: total
    gather  local -> local        every rank's rows        adjoint: scatter
    scatter local -> local        own rows of the sum      adjoint: gather

and one autograd Function serves all four, forward and backward, to any order: the derivative of a
linear map is itself, and the adjoint of its adjoint is the map. (torch's own collectives count the
gradient of a replicated loss once for every rank.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cumulant.core.eager import eager
from cumulant.core.errors import InputError
from cumulant.core.typed import Function
from cumulant.distributed.facts import Facts, describe, grad_mode, shape_of
from cumulant.distributed.ranks import Group, Ranks

__all__ = ["gather", "gather_rows", "largest", "scatter_rows", "spread", "total"]

_ADJOINT = {"total": "spread", "spread": "total", "gather": "scatter", "scatter": "gather"}

Rows = tuple[int, ...]


class _Linear(Function):
    """One of the four maps; its derivatives are the same map and its adjoint."""

    @staticmethod
    def forward(ranks: Ranks, name: str, rows: Rows, x: Tensor) -> Tensor:
        if name == "total":
            return ranks.total(x)
        if name == "spread":
            return x.clone()
        return ranks.gather(x, rows) if name == "gather" else ranks.scatter(x, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.ranks, ctx.name, ctx.rows, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, None, _Linear.apply(ctx.ranks, _ADJOINT[ctx.name], ctx.rows, grad)

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        return _Linear.apply(ctx.ranks, ctx.name, ctx.rows, grads[3])

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[int | None, ...], ranks: Ranks, name: str, rows: Rows, x: Tensor
    ) -> Any:
        return _Linear.apply(ranks, name, rows, x.movedim(in_dims[3] or 0, 0)), 0


@eager
def _apply(ranks: Ranks, name: str, rows: Rows, x: Tensor) -> Tensor:
    return _Linear.apply(ranks, name, rows, x)


class _Largest(Function):
    """The maximum over ranks as a constant."""

    @staticmethod
    def forward(ranks: Ranks, x: Tensor) -> Tensor:
        return ranks.largest(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        return None

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[int | None, ...], ranks: Ranks, x: Tensor
    ) -> Any:
        return _Largest.apply(ranks, x.movedim(in_dims[1] or 0, 0)), 0


@eager
def largest(x: Tensor, ranks: Ranks) -> Tensor:
    """The entrywise maximum over ranks, without derivative."""
    return x.detach() if ranks.alone else _Largest.apply(ranks, x.detach())


def gather_rows(x: Tensor, ranks: Ranks, rows: Sequence[int]) -> Tensor:
    """`gather` where it is known how many rows each rank has."""
    return x if ranks.alone else _apply(ranks, "gather", tuple(rows), x)


def scatter_rows(x: Tensor, ranks: Ranks, rows: Sequence[int]) -> Tensor:
    """This rank's rows of the sum over ranks; the adjoint of `gather_rows`."""
    return x if ranks.alone else _apply(ranks, "scatter", tuple(rows), x)


def total(x: Tensor, group: Group | Ranks = None) -> Tensor:
    """The sum of a tensor over ranks; the adjoint of `spread`.

    It turns each rank's part of a loss into one replicated loss. All ranks must pass the same shape
    and dtype; they compare these first.

    >>> import torch, cumulant as cm
    >>> cm.distributed.total(torch.tensor(2.0))  # without a group: a sum of one
    tensor(2.)
    """
    if isinstance(group, Ranks):  # inside the library, where shapes are known
        ranks = group
    else:
        ranks = Ranks(group)
        ranks.agree("total", lambda: shape_of("total", x))
    return x if ranks.alone else _apply(ranks, "total", (), x)


def spread(x: Tensor, group: Group | Ranks = None) -> Tensor:
    """A replicated tensor as each rank's own; its gradient is the `total` of theirs.

    Use it where a tensor that is the same on all ranks (a query, a temperature) meets data of this
    rank only; its gradient is then complete on every rank. All ranks must pass the same shape,
    dtype and requires_grad; they compare these first.

    >>> import torch, cumulant as cm
    >>> cm.distributed.spread(torch.tensor(2.0))
    tensor(2.)
    """
    if isinstance(group, Ranks):
        ranks = group
    else:
        ranks = Ranks(group)
        learned = "whether it requires gradients"
        ranks.agree("spread", lambda: {**shape_of("spread", x), learned: x.requires_grad})
    return x if ranks.alone else _apply(ranks, "spread", (), x)


def gather(x: Tensor, group: Group | Ranks = None) -> Tensor:
    """The rows (dimension -2) of all ranks, in their order, on every rank; uneven parts are fine.

    The gradient of a rank's rows is the sum over all ranks that used them.

    >>> import torch, cumulant as cm
    >>> cm.distributed.gather(torch.zeros(3, 2)).shape
    torch.Size([3, 2])
    """
    ranks = group if isinstance(group, Ranks) else Ranks(group)

    def facts() -> Facts:
        if not isinstance(x, Tensor) or x.ndim < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("gather: takes a tensor (..., rows, features).")
        return {**describe(x=x), **grad_mode(), "rows": x.shape[-2]}

    return gather_rows(x, ranks, ranks.agree("gather", facts, differ=("rows",))["rows"])
