"""Repeating an update until each query has come to rest: memories and Hopfield layers share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import holds, real, whole
from cumulant.core.describing import readable, shape_of
from cumulant.core.lazy import Lazy, kept
from cumulant.core.typed import linalg

__all__ = ["Retrieval", "Rows", "Settled", "energy", "here", "plan", "settle"]

MOST_STEPS = 1000

# Points and weights of Gauss and Legendre on [0, 1].
_PATH = (
    (0.0469100770306680, 0.1184634425280945),
    (0.2307653449471585, 0.2393143352496832),
    (0.5, 0.2844444444444444),
    (0.7692346550528415, 0.2393143352496832),
    (0.9530899229693320, 0.1184634425280945),
)
# Up to this beta <x, xi> the five points leave less than rounding.
_GENTLE = 1 / 8


@dataclass(frozen=True)
class Settled:
    """Where the queries came to, the state before each one's last update, how it went."""

    state: Tensor
    before: Tensor
    steps: Tensor
    change: Tensor


def plan(owner: str, steps: Any, tol: Any) -> tuple[int, float | None]:
    """(steps at most, tol): one step if neither is given, up to 1000 if only `tol` is."""
    if tol is not None:
        tol = real(owner, "tol", tol, least=0.0)
    if steps is None:
        steps = 1 if tol is None else MOST_STEPS
    return whole(owner, "steps", steps, 0), tol


def here(moving: Tensor) -> tuple[Tensor, bool]:
    """The rows that move, and whether any does, where nobody else is to be asked."""
    return moving, bool(moving.any())


def settle(
    update: Callable[[Tensor], Tensor],
    state: Tensor,
    steps: int,
    tol: float | None,
    *,
    separate: bool,
    still: Callable[[Tensor], tuple[Tensor, bool]] = here,
) -> Settled:
    """Update `steps` times, or each row until its change in Euclidean norm is at most `tol`.

    A row that has come to rest stays as it is. `separate` says that rows of ``(Q, d)`` can be
    updated without the others, so that those at rest cost nothing. `still` tells from the rows
    that move here which go on, and whether any does anywhere.
    """
    rows = state.shape[:-1]
    before = state
    count = torch.zeros(rows, dtype=torch.long, device=state.device)
    change = state.new_full(rows, torch.inf)
    if tol is None:
        for _ in range(steps):
            before, state = state, update(state)
        if steps:
            change = linalg.vector_norm((state - before).detach(), dim=-1)
        return Settled(state, before, count + steps, change)
    for _ in range(steps):
        moving, going = still(change > tol)
        if not going:
            break
        if separate:
            (where,) = moving.nonzero(as_tuple=True)
            old = state[where]
            new = update(old)
            before = before.index_copy(0, where, old)
            state = state.index_copy(0, where, new)
            moved = linalg.vector_norm((new - old).detach(), dim=-1)
            change = change.index_copy(0, where, moved)
        else:
            new = update(state)
            moved = linalg.vector_norm((new - state).detach(), dim=-1)
            before = torch.where(moving[..., None], state, before)
            state = torch.where(moving[..., None], new, state)
            change = torch.where(moving, moved, change)
        count = count + moving
    return Settled(state, before, count, change)


def energy(
    state: Tensor,
    log_normalizer: Tensor,
    log_count: Tensor,
    beta: Tensor,
    largest: Tensor,
    *,
    update: Callable[[Tensor], Tensor],
) -> Tensor:
    """E = -G/beta + |state|^2 / 2 + log(N)/beta + M^2 / 2 >= 0 (T19), rows of ``(*batch, Q)``.

    Where beta is small, G - log N cancels. As its gradient over beta is the update, (G - log N) /
    beta is the integral of <state, update(t state)> over t in [0, 1] as well, which stays exact
    down to beta = 0, derivatives in beta included; there it is <mean pattern, state>.

    Rounding can take a value that is nearly zero below it; it is lifted, and its gradient kept.
    Where there is no pattern, the logarithm of their number and G are left out.
    """
    square = (state * state).sum(-1)
    none = log_count == -torch.inf
    spread = log_count.masked_fill(none, 0.0) - log_normalizer.masked_fill(none, 0.0)
    spread = spread / beta.where(beta > 0, 1.0)
    # That any row is computed so depends on nothing that differs between ranks.
    gentle = (beta * largest * largest).detach() <= _GENTLE
    if holds(~gentle) is not True:
        path = sum(weight * (state * update(t * state)).sum(-1) for t, weight in _PATH)
        gentle = gentle & ((beta * largest * square.sqrt()).detach() <= _GENTLE)
        spread = torch.where(gentle, -path, spread)
    value = spread + (square + largest * largest) / 2
    return value + (-value).detach().clamp_min(0.0)


class Rows:
    """The way back to the shape of the states for a quantity of every row."""

    def __init__(self, shape: torch.Size | None) -> None:
        self._shape = shape

    def __call__(self, x: Tensor) -> Tensor:
        return x if self._shape is None else x.reshape(*self._shape, *x.shape[1:])


class Retrieval(Lazy):
    """The result of `Memory.retrieve`; ``energy``, ``index`` and ``value`` are computed on demand.

    ============= ================== ============================================================
    field         shape              what it is
    ============= ================== ============================================================
    ``state``     ``(*batch, Q, d)`` where each query came to
    ``steps``     ``(*batch, Q)``    how many updates it took
    ``converged`` ``(*batch, Q)``    whether its last update moved it by at most ``tol``
    ``energy``    ``(*batch, Q)``    the energy there
    ``index``     ``(*batch, Q)``    the stored pattern of the largest weight there
    ``value``     ``(*batch, Q, e)`` E[v] under the weights of the last update: what is stored with
                                     the patterns, or the patterns themselves
    ============= ================== ============================================================
    """

    def __init__(self, state: Tensor, steps: Tensor, converged: Tensor, ask: Any) -> None:
        self.state = state
        self.steps = steps
        self.converged = converged
        self._ask: Callable[[str], Tensor] = ask

    def __repr__(self) -> str:
        size, state = self.converged.numel(), shape_of(self.state)
        if not size or not readable(self.converged) or not readable(self.steps):
            return f"Retrieval(state {state})"
        done, most = int(self.converged.sum()), int(self.steps.max())
        return f"Retrieval(state {state}; at most {most} steps; {done} of {size} at rest)"

    @kept
    def energy(self) -> Tensor:
        return self._ask("energy")

    @kept
    def index(self) -> Tensor:
        return self._ask("index")

    @kept
    def value(self) -> Tensor:
        return self._ask("value")
