"""`Equilibrium`: a layer iterated to its fixed point (docs/theory.md, T16)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from cumulant.core.errors import InputError
from cumulant.dynamics.fixed_point import FixedPoint, fixed_point

__all__ = ["Equilibrium"]


class Equilibrium(nn.Module):
    """The fixed point of a layer as a layer: a deep equilibrium model (Bai et al., 2019).

    Solves z = layer(z, x) for a two-input layer, z = layer(z + x) for a one-input layer. Gradients
    come from the implicit function theorem and are exact at second order too; memory does not grow
    with the number of iterations. The layer must be deterministic: dropout inside it would change
    the map at every iteration.

    Args:
        layer: any module or function that preserves the shape of z.
        solver, tol, max_steps, damping: see `cumulant.dynamics.fixed_point`.
        batch_dims: number of leading dimensions that index independent problems.
        throw: raise if the solver does not converge; otherwise check ``solution.status``.

    ``solution`` is the `FixedPoint` of the last call: residual, steps, status.

    >>> import torch, cumulant as cm
    >>> layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    >>> _ = torch.nn.init.orthogonal_(layer[0].weight, gain=0.5)
    >>> deep = cm.nn.Equilibrium(layer)
    >>> z = deep(torch.randn(8, 4))
    >>> z.shape, deep.solution.status
    (torch.Size([8, 4]), 8 of 8 converged)
    """

    def __init__(
        self,
        layer: Any,
        *,
        solver: str = "anderson",
        tol: float | None = None,
        max_steps: int = 200,
        batch_dims: int = 1,
        damping: float = 1.0,
        throw: bool = True,
    ) -> None:
        super().__init__()
        if not callable(layer):
            raise InputError(f"Equilibrium: layer must be callable, not {type(layer).__name__}.")
        self.layer: Any = layer
        count = _inputs(layer)
        if count > 2:
            raise InputError(
                f"Equilibrium: layer must take z, or z and x, but {type(layer).__name__} requires "
                f"{count} inputs. Wrap it: Equilibrium(lambda z, x: ...), or in a module."
            )
        self._two = count == 2
        self._how: dict[str, Any] = {
            "solver": solver,
            "tol": tol,
            "max_steps": max_steps,
            "batch_dims": batch_dims,
            "damping": damping,
            "throw": throw,
        }
        self.solution: FixedPoint | None = None

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._how.items())

    def forward(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """Solve for the equilibrium at `x`, starting from `start` (default zero)."""

        def once(z: Tensor) -> Tensor:
            return self.layer(z, x) if self._two else self.layer(z + x)

        z0 = x.detach().new_zeros(x.shape) if start is None else start
        found = fixed_point(once, z0, **self._how)
        self.solution = FixedPoint(
            found.value.detach(), found.residual, found.steps, found.status, found.history
        )
        return found.value


def _inputs(layer: Any) -> int:
    """Number of required positional inputs."""
    function = layer.forward if isinstance(layer, nn.Module) else layer
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in by_position and p.default is p.empty for p in parameters)
