"""Derivatives of a fixed point by the implicit function theorem, right beyond the first order.

From the solution x* as a constant, take chord steps x <- x + M (f(x) - x) with the *constant*
operator M = (I - J)^(-1), J the Jacobian of f at x*. The correction is zero in value, and each step
makes one more order of the derivative exact: if x has the first k derivatives right, f(x) - x
vanishes through order k, its derivative of order k + 1 is multiplied by M alone, and that is what
the implicit function theorem says. So no derivative of M is ever needed, and M, being linear and
constant, is its own derivative.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from cumulant.core.autodiff import on_tape
from cumulant.core.checks import holds
from cumulant.core.errors import ConvergenceError, InputError
from cumulant.core.typed import Function, forward_ad, functorch, linalg
from cumulant.dynamics.krylov import gmres
from cumulant.measures.calculus import jacobian

__all__ = ["attach"]

ORDERS = 3

_SINGULAR = (
    "derivative of a fixed point: the linear system (I - J) u = g was not solved. {}: J has an "
    "eigenvalue close to 1, so the fixed point is not isolated, or the iteration had not converged."
)


class _Resolvent:
    """M = (I - J)^(-1) and its transpose, by GMRES, at one point."""

    def __init__(
        self, f: Callable[[Tensor], Tensor], x: Tensor, value: Tensor, strict: bool
    ) -> None:
        self._f, self._x, self._value, self._strict = f, x, value, strict
        self._seen: dict[int, tuple[int, Tensor]] = {}

    def _moved(self, v: Tensor) -> Tensor:
        return cast(Any, torch.func.jvp(self._f, (self._x,), (v,)))[1]

    def without_noise(self, b: Tensor, place: int) -> Tensor:
        """The cotangent of the chord step at this place, rows that are rounding set to zero.

        In a first derivative a step cancels all but rounding of what it hands to the one before,
        and solving for that would triple the work. Where the pass itself is to be differentiated
        all rows stay: what is zero in value is not in its derivatives.
        """
        sizes = linalg.vector_norm(b.detach(), dim=-1)
        current = cast(Any, torch._C)._current_graph_task_id()
        self._seen[place] = (current, sizes)
        last, later = self._seen.get(place + 1, (-1, sizes))
        if last != current or current < 0 or torch.is_grad_enabled():
            return b
        real = sizes > 1e4 * torch.finfo(b.dtype).eps * later
        return b * real[:, None]

    def solve(self, b: Tensor, transposed: bool) -> Tensor:
        """M b or M' b, each row to its own precision."""
        with torch.no_grad():
            b = b.detach()
            value, pull = cast(Any, torch.func.vjp(self._f, self._x))
            self._same(value)

            def operator(v: Tensor) -> Tensor:
                return (v - (pull(v)[0] if transposed else self._moved(v))).detach()

            sizes = linalg.vector_norm(b, dim=-1)
            goal = 100 * torch.finfo(b.dtype).eps * sizes
            found = gmres(operator, b, goal)
            lost = found.residual > 1e4 * goal
            if bool(lost.any()):
                self._complain(float((found.residual / sizes)[lost].max()))
            return found.value

    def _same(self, value: Tensor) -> None:
        """f must be what it was when the fixed point was found, up to what a running estimate
        inside it (spectral_norm) may move meanwhile."""
        slack = 1e-3 * (1 + self._value.abs().max())
        if bool(((value - self._value).abs() > slack).any()):
            raise InputError(
                "derivative of a fixed point: f has changed since it was solved. A tensor that f "
                "uses was modified in place, or f is random (dropout)."
            )

    def _complain(self, left: float) -> None:
        text = _SINGULAR.format(f"{left:.2g} of g is left")
        if self._strict:
            raise ConvergenceError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


class _Solve(Function):
    """M b, or M' b: linear in b."""

    @staticmethod
    def forward(b: Tensor, resolvent: _Resolvent, transposed: bool) -> Tensor:
        return resolvent.solve(b, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.resolvent, ctx.transposed = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Solve.apply(grads[0], ctx.resolvent, not ctx.transposed), None, None

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        return _Solve.apply(grads[0], ctx.resolvent, ctx.transposed)

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[int | None, ...], b: Tensor, resolvent: Any, transposed: bool
    ) -> Any:
        return _each(_Solve, b, in_dims[0], resolvent, transposed)


class _Correction(Function):
    """Zero in value, M in every derivative."""

    @staticmethod
    def forward(r: Tensor, resolvent: _Resolvent, place: int) -> Tensor:
        return torch.zeros_like(r)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.resolvent, ctx.place = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        b = ctx.resolvent.without_noise(grads[0], ctx.place)
        return _Solve.apply(b, ctx.resolvent, True), None, None

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        return _Solve.apply(grads[0], ctx.resolvent, False)

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[int | None, ...], r: Tensor, resolvent: Any, place: int
    ) -> Any:
        return _each(_Correction, r, in_dims[0], resolvent, place)


def _each(function: Any, x: Tensor, dim: int | None, *rest: Any) -> Any:
    """One after another: each right-hand side has its own Krylov space."""
    if dim is None:
        return function.apply(x, *rest), None
    return torch.stack([function.apply(one, *rest) for one in x.unbind(dim)]), 0


def _transformed(x: Tensor) -> bool:
    """Whether torch.func or forward mode is at work. Then what f closes over belongs to levels that
    an autograd Function leaves on entry, so no product with J can be formed inside one."""
    wrapped = functorch.is_functorch_wrapped_tensor
    return wrapped(x) or forward_ad._current_level >= 0


def _by_products(
    f: Callable[[Tensor], Tensor], x: Tensor, value: Tensor, strict: bool
) -> Callable[[Tensor, int], Tensor]:
    """M by GMRES, in linear memory."""
    resolvent = _Resolvent(f, x, value.detach(), strict)

    def correct(r: Tensor, place: int) -> Tensor:
        return cast(Tensor, _Correction.apply(r, resolvent, place))

    return correct


_DENSE = 4096


def _dense(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor, int], Tensor]:
    """M as matrices ``(B, n, n)``: ordinary operations, at home in every transform."""
    n = x.shape[-1]
    if n > _DENSE:
        raise InputError(
            f"fixed_point: under torch.func and in forward mode a state may have {_DENSE} entries, "
            f"but this one has {n}. torch.autograd.grad and backward() have no such limit."
        )
    J = jacobian(f, x).mT
    one = torch.eye(n, dtype=x.dtype, device=x.device)
    singular = linalg.inv_ex((one - J).detach()).info != 0
    if holds(~singular) is False:
        raise ConvergenceError(_SINGULAR.format("It is singular"))
    M = linalg.inv(one - J).detach()

    def correct(r: Tensor, _: int) -> Tensor:
        return (M @ (r - r.detach())[..., None])[..., 0]

    return correct


def attach(f: Callable[[Tensor], Tensor], solution: Tensor, *, strict: bool) -> Tensor:
    """The solution ``(B, n)``, with the derivatives it has in whatever f closes over."""
    x = solution.detach()
    first = f(x)
    if not on_tape(first):
        return x
    correct = _dense(f, x) if _transformed(first) else _by_products(f, x, first, strict)
    y = x + correct(first - x, 0)
    for place in range(1, ORDERS):
        y = y + correct(f(y) - y, place)
    return y
