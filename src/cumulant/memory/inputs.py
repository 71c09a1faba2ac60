"""What people pass to `Memory`, checked once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant.errors import InputError
from cumulant.measures.checks import finite, numbers, real, require

__all__ = ["checked", "given_kind", "inverse_temperature", "out_of_range"]


def given_kind(given: Any, kept: Tensor) -> torch.dtype:
    """The dtype results go back to: the caller's, if it was a real one."""
    real = isinstance(given, Tensor) and given.is_floating_point()
    return given.dtype if real else kept.dtype


def out_of_range(owner: str, size: int) -> str:
    """What to say of a number that no pattern has."""
    return f"{owner}: index must lie between 0 and {size - 1}, the numbers of stored patterns."


def checked(
    owner: str, *, patterns: Tensor, values: Tensor | None, empty: bool = False
) -> dict[str, Tensor]:
    """Finite patterns ``(*sets, N, d)`` and values of the same length; `empty` allows N = 0."""
    given = {"patterns": patterns} if values is None else {"patterns": patterns, "values": values}
    got, _ = numbers(owner, **given)
    x = finite(owner, "patterns", got["patterns"])
    if x.ndim < 2 or (0 in x.shape and not (empty and 0 not in (*x.shape[:-2], x.shape[-1]))):
        raise InputError(
            f"{owner}: patterns must have shape (*sets, N, d), N and d at least 1, but have "
            f"{tuple(x.shape)}. A single pattern goes in as x[None]."
        )
    if values is not None:
        v = finite(owner, "values", got["values"])
        if v.ndim != x.ndim or v.shape[:-1] != x.shape[:-1]:
            raise InputError(
                f"{owner}: values must have one row for each pattern, (*sets, N, e) beside "
                f"{tuple(x.shape)}, but have {tuple(v.shape)}. Class labels go in as "
                "one_hot(labels).float()."
            )
    return got


def inverse_temperature(owner: str, beta: Any, patterns: Tensor) -> float | Tensor:
    """A positive number, or a positive tensor that broadcasts to the sets of patterns."""
    if not isinstance(beta, Tensor):
        return real(owner, "beta", beta, least=0.0, open_at_least=True)
    sets = patterns.shape[:-2]
    try:
        fits = torch.broadcast_shapes(beta.shape, sets) == sets
    except RuntimeError:
        fits = False
    if not fits or not beta.is_floating_point():
        raise InputError(
            f"{owner}: a tensor beta must be real and broadcast to the sets of patterns, "
            f"{tuple(sets)}, but is {beta.dtype} of shape {tuple(beta.shape)}."
        )
    kept = beta.to(patterns.device, patterns.dtype)
    require(
        (kept > 0) & kept.isfinite(),
        lambda: (
            f"{owner}: beta, an inverse temperature, must be positive and finite as {kept.dtype}."
        ),
    )
    return kept
