"""Gradients and Hessians of row-wise functions, ``(..., d)`` to ``(...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["gradient", "jacobian", "log_sum_exp", "pullback"]


def pullback(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Any]:
    """The value and its vector-Jacobian product."""
    value, pull = cast(Any, torch.func.vjp(function, x))

    def back(seed: Tensor) -> Tensor:
        return pull(seed)[0]

    return value, back


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a row-wise scalar."""
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
    """log sum exp; -inf if every entry is. torch's has NaN forward-mode derivatives at -inf."""
    peak = x.detach().amax(dim, keepdim=True)
    empty = peak == -torch.inf
    peak = torch.where(empty, 0.0, peak)
    total = (x - peak).exp().sum(dim, keepdim=True)
    out = torch.where(empty, 1.0, total).log() + peak
    return torch.where(empty, -torch.inf, out).squeeze(dim)
