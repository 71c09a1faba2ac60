"""Checks of what people pass to dynamics, once, at the public edge."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from cumulant.errors import InputError
from cumulant.measures.checks import finite, numbers

__all__ = ["cloud", "generator_of", "levels_of", "real", "some_points", "whole"]


def whole(owner: str, name: str, value: Any, least: int) -> int:
    """A whole number, at least so large."""
    try:
        truth = isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool
        number = -math.inf if truth else operator.index(value)
    except TypeError:
        number = -math.inf
    if number < least:
        raise InputError(f"{owner}: {name} must be a whole number from {least} on, not {value!r}.")
    return int(number)


def real(
    owner: str,
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    open_at_least: bool = False,
) -> float:
    """A finite number within bounds."""
    try:
        out = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{owner}: {name} must be a number, not {type(value).__name__}.") from None
    low = out > least if open_at_least else out >= least
    if not (math.isfinite(out) and low and out <= most):
        bounds = [
            f"{'above' if open_at_least else 'at least'} {least:g}" * (least > -math.inf),
            f"at most {most:g}" * (most < math.inf),
        ]
        told = " and ".join(["finite", *filter(None, bounds)])
        raise InputError(f"{owner}: {name} must be {told}, not {value!r}.")
    return out


def levels_of(owner: str, levels: Any, like: Tensor) -> Tensor:
    """Levels of quantiles, each in [0, 1]."""
    at = [real(owner, "each of levels", q, least=0.0, most=1.0) for q in levels]
    return torch.tensor(at, dtype=like.dtype, device=like.device)


def generator_of(owner: str, seed: Any) -> torch.Generator:
    """A generator with that seed."""
    try:
        return torch.Generator().manual_seed(seed)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(
            f"{owner}: seed must be a whole number below 2^63, not {seed!r}."
        ) from None


def cloud(owner: str, x: Any, name: str = "x") -> Tensor:
    """A finite ensemble of clouds ``(*batch, N, d)``, half precision widened."""
    got = finite(owner, name, numbers(owner, **{name: x})[0][name])
    if got.ndim < 2 or 0 in got.shape[-2:]:
        raise InputError(
            f"{owner}: {name} must have shape (*batch, N, d), N and d at least 1, but has "
            f"{tuple(got.shape)}. Numbers go in as x[:, None], a single point as x[None]."
        )
    return got


def some_points(owner: str, x: Any, name: str = "x") -> Tensor:
    """A cloud, of a batch that is not empty."""
    got = cloud(owner, x, name)
    if 0 in got.shape:
        raise InputError(f"{owner}: the batch is empty; {name} has shape {tuple(got.shape)}.")
    return got
