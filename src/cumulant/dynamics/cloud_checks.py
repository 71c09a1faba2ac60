"""Checks of clouds and levels, once, at the public edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import finite, numbers, real
from cumulant.core.errors import InputError

__all__ = ["cloud", "levels_of", "some_points"]


def levels_of(owner: str, levels: Any, like: Tensor) -> Tensor:
    """Levels of quantiles, each in [0, 1]."""
    at = [real(owner, "each of levels", q, least=0.0, most=1.0) for q in levels]
    return torch.tensor(at, dtype=like.dtype, device=like.device)


def cloud(owner: str, x: Any, name: str = "x") -> Tensor:
    """A finite ensemble of clouds ``(*batch, N, d)``, half precision widened."""
    got = finite(owner, name, numbers(owner, **{name: x})[0][name])
    if got.ndim < 2 or 0 in got.shape[-2:]:
        raise InputError(
            f"{owner}: {name} must have shape (*batch, N, d), N and d at least 1, but has "
            f"{tuple(got.shape)}. Pass scalars as x[:, None], a single point as x[None]."
        )
    return got


def some_points(owner: str, x: Any, name: str = "x") -> Tensor:
    """A cloud, of a batch that is not empty."""
    got = cloud(owner, x, name)
    if 0 in got.shape:
        raise InputError(f"{owner}: the batch is empty; {name} has shape {tuple(got.shape)}.")
    return got
