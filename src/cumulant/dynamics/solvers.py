"""Three ways to the solution of f(x) = x, for a batch of rows that stop separately."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cumulant.core.typed import linalg

__all__ = ["SOLVERS", "Anderson", "Broyden", "Damped", "Solver"]


class Solver(Protocol):
    """Proposes the next x ``(B, n)`` from x and the residual g = f(x) - x."""

    def __init__(self, damping: float) -> None: ...

    def propose(self, x: Tensor, g: Tensor) -> Tensor: ...


class Damped:
    """x + damping * g: plain iteration for damping 1."""

    def __init__(self, damping: float) -> None:
        self._damping = damping

    def propose(self, x: Tensor, g: Tensor) -> Tensor:
        return x + self._damping * g


class _Last(NamedTuple):
    x: Tensor
    g: Tensor


class Anderson:
    """The combination of the last few iterates whose residuals cancel best (Walker and Ni, 2011).

    With differences dX, dG: x + damping g - (dX + damping dG) c, where c minimizes
    ||g - dG c||^2 + a small multiple of ||c||^2. A row whose residual jumps forgets its past.
    """

    window = 6

    def __init__(self, damping: float) -> None:
        self._damping = damping
        self._last: _Last | None = None
        self._steps: list[Tensor] = []
        self._changes: list[Tensor] = []

    def propose(self, x: Tensor, g: Tensor) -> Tensor:
        if self._last is not None:
            size, before = (linalg.vector_norm(r, dim=-1) for r in (g, self._last.g))
            calm = (size < before)[:, None]  # otherwise the past misleads: forget it
            self._steps = [s * calm for s in self._steps] + [(x - self._last.x) * calm]
            self._changes = [c * calm for c in self._changes] + [(g - self._last.g) * calm]
            self._steps, self._changes = self._steps[-self.window :], self._changes[-self.window :]
        self._last = _Last(x, g)
        plain = x + self._damping * g
        if not self._steps:
            return plain
        steps, changes = torch.stack(self._steps, -1), torch.stack(self._changes, -1)
        length = linalg.vector_norm(changes, dim=-2, keepdim=True)
        length = length.where(length > 0, 1.0)
        S, Y = (
            steps / length,
            changes / length,
        )  # columns of unit length: the regularization is relative
        m = Y.shape[-1]
        ridge = 100 * torch.finfo(x.dtype).eps * torch.eye(m, dtype=x.dtype, device=x.device)
        c = linalg.solve(Y.mT @ Y + ridge, Y.mT @ g[..., None])
        return plain - ((S + self._damping * Y) @ c)[..., 0]


class Broyden:
    """Quasi-Newton: B approximates the inverse Jacobian of g, begun at -I (Broyden, 1965).

    The good update B += (s - B y) s'B / (s'B y) is kept as a sum of products; after `memory` of
    them it begins anew.
    """

    memory = 30

    def __init__(self, damping: float) -> None:
        self._damping = damping
        self._last: _Last | None = None
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []

    def _times(self, y: Tensor) -> Tensor:
        """B y."""
        out = -self._damping * y
        for u, v in zip(self._left, self._right, strict=True):
            out = out + u * (v * y).sum(-1, keepdim=True)
        return out

    def _transposed(self, s: Tensor) -> Tensor:
        out = -self._damping * s
        for u, v in zip(self._left, self._right, strict=True):
            out = out + v * (u * s).sum(-1, keepdim=True)
        return out

    def propose(self, x: Tensor, g: Tensor) -> Tensor:
        if len(self._left) == self.memory:
            self._left, self._right, self._last = [], [], None
        if self._last is not None:
            s, y = x - self._last.x, g - self._last.g
            mapped, back = self._times(y), self._transposed(s)
            slope = (s * mapped).sum(-1, keepdim=True)
            size = linalg.vector_norm(s, dim=-1, keepdim=True).square()
            usable = slope.abs() > 1e-8 * size
            self._left.append(torch.where(usable, (s - mapped) / slope, 0.0))
            self._right.append(back)
        self._last = _Last(x, g)
        return x - self._times(g)


SOLVERS: dict[str, type[Solver]] = {"anderson": Anderson, "broyden": Broyden, "damped": Damped}
