"""The classical Hopfield network and linear attention: memories of one matrix.

See docs/theory.md, T22.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cumulant.core.checks import finite, numbers, require
from cumulant.core.errors import InputError
from cumulant.memory.retrieval import Retrieval, plan, settle

__all__ = ["ClassicalMemory", "LinearMemory"]


class LinearMemory:
    """Unnormalized linear attention: xi <- sum_i x_i <x_i, xi> / d, read from one matrix (T22).

    Patterns add up in ``weights`` = X'X / d, without normalization or separation, so
    beyond a few patterns it returns a blend.

    Args:
        patterns: ``(N, d)``.

    >>> import torch, cumulant as cm
    >>> x = torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0]])
    >>> cm.memory.LinearMemory(x).retrieve(torch.tensor([[1.0, 1.0, 0.0, 0.0]])).state
    tensor([[ 0.5000,  0.5000, -0.5000, -0.5000]])
    """

    _owner = "LinearMemory"

    def __init__(self, patterns: Tensor) -> None:
        x = finite(self._owner, "patterns", numbers(self._owner, patterns=patterns)[0]["patterns"])
        if x.ndim != 2 or 0 in x.shape:
            raise InputError(
                f"{self._owner}: patterns must have shape (N, d), but have {tuple(x.shape)}."
            )
        self.patterns = x
        self.weights = x.mT @ x / x.shape[-1]

    def __len__(self) -> int:
        return self.patterns.shape[0]

    def __repr__(self) -> str:
        return f"{self._owner}(patterns={tuple(self.patterns.shape)})"

    def energy(self, state: Tensor) -> Tensor:
        """-<xi, W xi> / 2, ``(*batch, Q)``: the quadratic energy, not bounded below in xi."""
        xi = self._states("energy", state)
        return -((xi @ self.weights) * xi).sum(-1) / 2

    def retrieve(
        self, state: Tensor, steps: int | None = None, tol: float | None = None
    ) -> Retrieval:
        """Update the states `steps` times, or until each moves by at most `tol`.

        Nothing bounds linear attention: every step multiplies by up to the largest eigenvalue of
        ``weights``. Overflow raises an error.
        """
        most, tol = plan("retrieve", steps, tol)
        xi = self._states("retrieve", state)
        flat = xi.reshape(-1, xi.shape[-1])
        flat = flat.clone() if most == 0 else flat  # the result is not the caller's tensor
        found = settle(self._update, flat, most, tol, separate=True)
        require(
            found.state.isfinite(),
            lambda: (
                f"retrieve: the states left the range of {xi.dtype}; linear attention multiplies "
                "them in every step. Take fewer steps, or normalize in between."
            ),
        )
        rest = found.change <= (0.0 if tol is None else tol)
        rows = xi.shape[:-1]
        state = found.state.reshape(xi.shape)
        ask = partial(self._answer, state)
        return Retrieval(state, found.steps.reshape(rows), rest.reshape(rows), ask)

    def _answer(self, state: Tensor, name: str) -> Tensor:
        """Fields of a `Retrieval` that are computed when asked for."""
        if name == "energy":
            return self.energy(state)
        return (state @ self.patterns.mT).argmax(-1) if name == "index" else state

    def _update(self, xi: Tensor) -> Tensor:
        return xi @ self.weights

    def _states(self, owner: str, state: Tensor) -> Tensor:
        xi = finite(owner, "state", numbers(owner, state=state)[0]["state"])
        d = self.patterns.shape[-1]
        if xi.ndim < 1 or xi.shape[-1] != d:
            raise InputError(
                f"{owner}: state must have shape (..., {d}), but has {tuple(xi.shape)}."
            )
        return xi.to(self.patterns.dtype)


class ClassicalMemory(LinearMemory):
    """The classical Hopfield network: linear attention, then the sign (T22).

    xi <- sign(W xi) with W = X'X / d without diagonal; where W xi is zero a unit keeps its sign. It
    holds about 0.14 d random patterns. Updating one unit after the other (`asynchronous`) never
    raises the energy; updating all at once is faster, and can end in a cycle of two states.

    Args:
        patterns: ``(N, d)`` of -1 and 1.
        asynchronous: a step updates the units one by one.

    >>> import torch, cumulant as cm
    >>> x = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]])
    >>> bad = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0]])
    >>> bool((cm.memory.ClassicalMemory(x).retrieve(bad).state == x).all())
    True
    """

    _owner = "ClassicalMemory"

    def __init__(self, patterns: Tensor, *, asynchronous: bool = False) -> None:
        super().__init__(patterns)
        require(
            self.patterns.abs() == 1,
            lambda: "ClassicalMemory: patterns must be -1 or 1; use x.sign() if 0 does not occur.",
        )
        # Whole numbers, so that a field of zero is exactly zero.
        self._sums = self.patterns.mT @ self.patterns
        self._sums = self._sums - torch.diag(self._sums.diagonal())
        self.weights = self._sums / self.patterns.shape[-1]
        self.asynchronous = asynchronous

    @torch.no_grad()
    def _update(self, xi: Tensor) -> Tensor:
        if not self.asynchronous:
            return _sign(xi @ self._sums, xi)
        out = xi.clone()
        for unit in range(xi.shape[-1]):
            out[..., unit] = _sign(out @ self._sums[:, unit], out[..., unit])
        return out


def _sign(field: Tensor, before: Tensor) -> Tensor:
    return torch.where(field == 0, before.sign(), field.sign())
