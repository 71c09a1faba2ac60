"""What people pass to `Memory`, checked once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.checks import broadcasts_to, common_shape, finite, numbers, real, require
from cumulant.core.errors import InputError
from cumulant.core.typed import functions, tolist
from cumulant.distributed.facts import Facts
from cumulant.memory.retrieval import Rows

__all__ = [
    "Asked",
    "Bounded",
    "beta_facts",
    "checked",
    "given_kind",
    "inverse_temperature",
    "one_each",
    "same_numbers",
    "several",
    "states",
]


class Asked(NamedTuple):
    """A checked call of `retrieve`."""

    state: Tensor
    restore: Rows
    steps: int
    tol: float | None
    step_size: float

    def facts(self) -> Facts:
        """What ranks must agree on."""
        tol = "not given" if self.tol is None else self.tol
        return {"steps": self.steps, "tol": tol, "step_size": self.step_size}


class Bounded(NamedTuple):
    """A checked call of `error_bound`."""

    state: Tensor
    restore: Rows
    at: Tensor | None
    fixed_point: Tensor | None

    def facts(self) -> Facts:
        """What ranks must agree on."""
        given = {"index": self.at, "fixed_point": self.fixed_point}
        return {f"whether {n} is given": x is not None for n, x in given.items()}


def beta_facts(beta: float | Tensor) -> Facts:
    """Of a number its value; of a tensor, which may be learned, what it is."""
    learned = isinstance(beta, Tensor) and beta.requires_grad
    return {
        "the value of beta": "a tensor" if isinstance(beta, Tensor) else float(beta),
        "whether beta is a tensor": isinstance(beta, Tensor),
        "whether beta requires gradients": learned,
    }


def same_numbers(at: Tensor) -> Facts:
    """That ranks must be given the same numbers."""
    return {"index": tuple(tolist(at.flatten()))}


def given_kind(given: Any, kept: Tensor) -> torch.dtype:
    """The dtype results go back to: the caller's, if it was a real one."""
    real = isinstance(given, Tensor) and given.is_floating_point()
    return given.dtype if real else kept.dtype


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
            f"{tuple(x.shape)}. Pass a single pattern as x[None]."
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
    """A number >= 0, or a tensor of them that broadcasts to the sets of patterns."""
    if not isinstance(beta, Tensor):
        return real(owner, "beta", beta, least=0.0)
    sets = patterns.shape[:-2]
    if not broadcasts_to(beta.shape, sets) or not beta.is_floating_point():
        raise InputError(
            f"{owner}: a tensor beta must be real and broadcast to the sets of patterns, "
            f"{tuple(sets)}, but is {beta.dtype} of shape {tuple(beta.shape)}."
        )
    kept = beta.to(patterns.device, patterns.dtype)
    require(
        (kept >= 0) & kept.isfinite(),
        lambda: (
            f"{owner}: beta, an inverse temperature, must be finite and at least 0 as {kept.dtype}."
        ),
    )
    return kept


def states(owner: str, state: Tensor, patterns: Tensor) -> tuple[Tensor, Rows]:
    """States as the kernels take them, and the way back for a row quantity."""
    xi = finite(owner, "state", numbers(owner, state=state)[0]["state"])
    d, sets = patterns.shape[-1], patterns.shape[:-2]
    if xi.ndim < 2 or xi.shape[-1] != d:
        raise InputError(
            f"{owner}: state must have shape (*batch, Q, {d}) to meet patterns "
            f"{tuple(patterns.shape)}, but has {tuple(xi.shape)}. A single state goes in as "
            "x[None]."
        )
    if xi.device != patterns.device:
        raise InputError(
            f"{owner}: state is on {xi.device}, the patterns are on {patterns.device}."
        )
    xi = finite(owner, f"state as {patterns.dtype}", xi.to(patterns.dtype))
    shape = xi.shape
    if not sets:  # one set of patterns: all states are queries of it
        return xi.reshape(-1, d), Rows(shape[:-1])
    batch = common_shape(shape[:-2], sets)
    if batch is None:
        raise InputError(
            f"{owner}: the batch of state, {tuple(shape[:-2])}, must broadcast against the sets of "
            f"patterns, {tuple(sets)}."
        )
    return xi.expand(*batch, *shape[-2:]), Rows(None)


def _numbers(owner: str, index: Any, count: int, device: torch.device) -> Tensor:
    """Numbers of stored patterns, of which there are so many."""
    try:
        at = torch.as_tensor(index, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{owner}: index must be integers, not {index!r:.40}.") from None
    at = at if at.numel() else at.long()
    if at.is_floating_point() or at.is_complex() or at.dtype == torch.bool:
        raise InputError(f"{owner}: index must be integers, not {at.dtype}.")
    require(
        (at >= 0) & (at < count),
        lambda: (
            f"{owner}: index must lie between 0 and {count - 1}, the numbers of stored patterns."
        ),
    )
    return at.long()


def one_each(owner: str, index: Any, count: int, shape: torch.Size, device: torch.device) -> Tensor:
    """A number for each state of `shape`."""
    at = _numbers(owner, index, count, device)
    if not broadcasts_to(at.shape, shape):
        raise InputError(
            f"{owner}: index must have shape {tuple(shape)}, one number for each state, but has "
            f"{tuple(at.shape)}."
        )
    return at.expand(shape)


def several(owner: str, index: Any, count: int, device: torch.device) -> Tensor:
    """Different numbers, ``(n,)``."""
    at = _numbers(owner, index, count, device).reshape(-1)
    if len(functions.unique(at)) != len(at):
        raise InputError(f"{owner}: index names a pattern twice.")
    return at
