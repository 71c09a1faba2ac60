"""Gradients and Hessians of functions that act row by row, ``(..., d)`` to ``(...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["gradient", "jacobian", "log_sum_exp", "pullback"]


def pullback(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Any]:
    """The value, and the function that maps cotangents of it to cotangents of x."""
    value, pull = cast(Any, torch.func.vjp(function, x))

    def back(seed: Tensor) -> Tensor:
        return pull(seed)[0]

    return value, back


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a scalar of each row."""
    value, back = pullback(function, x)
    return back(torch.ones_like(value))


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The symmetric Jacobian ``(..., d, d)`` of a gradient field, row by row."""
    _, back = pullback(function, x)

    def column(e: Tensor) -> Tensor:
        return back(e.expand_as(x))

    basis = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.vmap(column)(basis).movedim(0, -1)


def log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """log sum exp, -inf where all are; torch's own has NaN derivatives at -inf in forward mode."""
    peak = x.detach().amax(dim, keepdim=True)
    empty = peak == -torch.inf
    peak = torch.where(empty, 0.0, peak)
    total = (x - peak).exp().sum(dim, keepdim=True)
    out = torch.where(empty, 1.0, total).log() + peak
    return torch.where(empty, -torch.inf, out).squeeze(dim)
