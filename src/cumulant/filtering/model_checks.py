"""Checks of models and series, once, at the public edge."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulant.core.checks import broadcasts_to, holds, numbers, require, semi_definite, square
from cumulant.core.errors import InputError
from cumulant.core.typed import linalg, tolist
from cumulant.filtering.frames import is_pandas, values_of

__all__ = [
    "bounded",
    "initial_probabilities",
    "next_row",
    "one_class",
    "proper_start",
    "real_numbers",
    "semi_definite",
    "series",
    "sized",
    "stochastic",
]


# What rounding, or a finite difference, may do to a sum or a symmetry.
SLACK = 1e-5


def sized(owner: str, name: str, x: Tensor, least: int) -> torch.Size:
    """The shape of x, which must have at least this many dimensions."""
    if x.ndim < least:
        raise InputError(
            f"{owner}: {name} must have at least {least} dimensions, but has shape "
            f"{tuple(x.shape)}; a single number is x.reshape({', '.join('1' * least)})."
        )
    return x.shape


def stochastic(owner: str, transition: Tensor) -> int:
    """The number of modes of a transition matrix with rows that sum to one."""
    sized(owner, "transition", transition, 2)
    modes = square(owner, "transition", transition, "M")
    if modes < 1:
        raise InputError(f"{owner}: transition must have at least one mode, but is empty.")
    require(
        transition >= 0,
        lambda: (
            f"{owner}: transition holds probabilities, but its smallest entry is "
            f"{float(transition.min()):.6g}."
        ),
    )
    rows = transition.detach().sum(-1)
    if holds((rows - 1).abs() <= SLACK) is False:
        columns = transition.detach().sum(-2)
        worst = (rows - 1).abs().flatten().argmax()
        hint = "divide each row by its sum if these are counts"
        if holds((columns - 1).abs() <= SLACK):
            hint = (
                "its columns do, so it looks transposed: transition[i, j] = P(j | i), from row to "
                "column; pass transition.mT"
            )
        raise InputError(
            f"{owner}: rows of transition must sum to one; row {int(worst) % modes} sums to "
            f"{float(rows.flatten()[worst]):.6g}. Remedy: {hint}."
        )
    return modes


def initial_probabilities(owner: str, initial: Tensor, modes: int) -> None:
    """Probabilities of the modes at time 0."""
    if initial.ndim < 1 or initial.shape[-1] != modes:
        raise InputError(
            f"{owner}: initial must hold one probability for each of the {modes} modes "
            f"(transition), but has shape {tuple(initial.shape)}."
        )
    sums = initial.detach().sum(-1)
    require(
        (initial >= 0).all(-1) & ((sums - 1).abs() <= SLACK),
        lambda: (
            f"{owner}: initial must be probabilities that sum to one; they are "
            f"{tolist(initial.detach())}."
        ),
    )


def bounded(owner: str, covariance: Tensor) -> Tensor:
    """An initial covariance with variance 1 for states of which nothing is known: infinity."""
    vague = covariance.diagonal(dim1=-2, dim2=-1) == torch.inf
    rows = vague[..., None] | vague[..., None, :]
    unit = torch.diag_embed(vague.to(covariance.dtype))
    require(
        ~rows | (covariance == torch.where(unit > 0, torch.inf, 0.0)),
        lambda: (
            f"{owner}: where a variance of initial_covariance is infinite, its covariances must be "
            "zero."
        ),
    )
    return torch.where(rows, unit, covariance)


def proper_start(owner: str, model: Any) -> None:
    """Raise if nothing is known of some state at the start."""
    if model.diffuse:
        raise InputError(
            f"{owner}: a variance of initial_covariance is infinite, which filter, smooth, "
            "forecast and fit of linear models take: give a finite initial_covariance."
        )


def one_class(owner: str, transition: Tensor) -> None:
    """Modes that `transition` leaves as they are must be unique."""
    first = transition.detach()
    M = first.shape[-1]
    first = first if first.ndim == 2 else first[..., 0, :, :]
    values = linalg.eigvals(first.reshape(-1, M, M))
    close = 1e-9 if first.dtype == torch.float64 else 1e-5
    count = ((values - 1).abs() < close).sum(-1)
    require(
        count <= 1,
        lambda: (
            f"{owner}: transition has several probabilities that it leaves as they are (modes that "
            "never meet): give initial."
        ),
    )


def real_numbers(owner: str, name: str, x: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A dense real tensor; arrays and lists become tensors of this dtype on this device."""
    if is_pandas(x):
        x = values_of(owner, name, x)
    if not isinstance(x, Tensor):
        try:
            x = torch.as_tensor(_writable(x), device=device)
            x = x if x.is_complex() or x.dtype == torch.bool else x.to(dtype)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"{owner}: {name} must be a tensor or an array of numbers, not {type(x).__name__}."
            ) from None
    if x.is_complex() or x.dtype == torch.bool:
        raise InputError(f"{owner}: {name} must be real numbers, not {x.dtype}.")
    if x.layout != torch.strided:
        raise InputError(f"{owner}: {name} must be dense: use .to_dense().")
    return x


def _writable(x: Any) -> Any:
    """Read-only arrays as copies: torch would warn, although nobody writes to them."""
    if not isinstance(x, np.ndarray):
        return x
    array = cast(NDArray[np.generic], x)
    return array if array.flags.writeable else array.copy()


def next_row(owner: str, y: Any, past: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One more observation of each series, of the dtype of those before."""
    value = real_numbers(owner, "y", y, past.dtype, past.device)
    if tuple(value.shape) != shape:
        raise InputError(
            f"{owner}: y must be the next observation of each series, shape {shape}, not "
            f"{tuple(value.shape)}."
        )
    value = value.to(past)
    require(~value.isinf(), lambda: f"{owner}: y holds an infinity; NaN marks what is missing.")
    return value


def series(owner: str, model: Any, observations: Any, lengths: Any = None) -> Tensor:
    """Observations ``(*batch, T, p)`` of the model's dtype, NaN where missing or past the end."""
    y = real_numbers(owner, "observations", observations, model.dtype, model.device)
    y = y[..., None] if is_pandas(observations) and y.ndim == 1 else y
    p = model.observation_size
    if y.ndim < 2 or y.shape[-1] != p or y.shape[-2] < 1:
        hint = (
            "; for a single number per step that is y[..., None]" if p == 1 and y.ndim < 2 else ""
        )
        raise InputError(
            f"{owner}: observations must have shape (*batch, T, {p}), T >= 1, but have "
            f"{tuple(y.shape)}{hint}."
        )
    if y.device != model.device:
        raise InputError(
            f"{owner}: observations are on {y.device}, the model on {model.device}; move one."
        )
    y = y.to(torch.promote_types(y.dtype, model.dtype) if y.is_floating_point() else model.dtype)
    if lengths is None and y.numel() and holds(y.detach().sum().isfinite()):
        return y  # nothing is missing, and nothing infinite
    require(
        ~y.isinf(), lambda: f"{owner}: observations hold an infinity; NaN marks what is missing."
    )
    if lengths is not None:
        y = _cut(owner, y, lengths)
    all_missing = y.isnan().all(-1).all(-1)
    if holds(~all_missing) is False:
        where = tolist(all_missing.nonzero())
        which = "" if y.ndim == 2 else f" number {where[0][0] if y.ndim == 3 else where[0]}"
        raise InputError(
            f"{owner}: series{which} has no observation at all: every element is NaN"
            f"{' or lies past its length' if lengths is not None else ''}. Leave it out."
        )
    return y


def _cut(owner: str, y: Tensor, lengths: Any) -> Tensor:
    got, _ = numbers(owner, lengths=lengths)
    size = got["lengths"].to(y.device)
    T = y.shape[-2]
    if not broadcasts_to(size.shape, y.shape[:-2]):
        raise InputError(
            f"{owner}: lengths must have one entry for each series, shape {tuple(y.shape[:-2])}, "
            f"not {tuple(size.shape)}."
        )
    size = size.expand(y.shape[:-2])
    require(
        (size == size.round()) & (size >= 1) & (size <= T),
        lambda: f"{owner}: lengths must be integers from 1 to T = {T}.",
    )
    past = torch.arange(T, device=y.device) >= size[..., None]
    return y.masked_fill(past[..., None], torch.nan)
