"""`fixed_point`: solve x = f(x), diagnose failures, differentiate the solution.

See docs/theory.md, T16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import finite, numbers, real, whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.outcome import Code, Outcome
from cumulant.core.precision import HALF
from cumulant.core.typed import functorch, linalg
from cumulant.dynamics.implicit import attach
from cumulant.dynamics.krylov import Spectrum, leading_eigenvalue
from cumulant.dynamics.solvers import SOLVERS, Solver

__all__ = ["FixedPoint", "fixed_point", "spectral_radius"]

Map = Callable[[Tensor], Tensor]

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class FixedPoint:
    """The result of a fixed-point iteration.

    Attributes:
        value: the state, in the shape of the start; if not converged, the best one found.
        residual: max-norm of f(value) - value, ``(*batch,)``.
        steps: evaluations of f until it was reached, ``(*batch,)``.
        status: how each problem ended, an `Outcome`.
        history: residuals after each evaluation, ``(evaluations, *batch)``.
    """

    value: Tensor
    residual: Tensor
    steps: Tensor
    status: Outcome
    history: Tensor

    __repr__ = described_fields


class _Rows:
    """A map on states as a map on rows ``(B, n)``."""

    def __init__(self, call: str, f: Map, x0: Tensor, batch_dims: int, dtype: torch.dtype) -> None:
        if not isinstance(batch_dims, int) or not 0 <= batch_dims <= x0.ndim:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"{call}: batch_dims must lie between 0 and {x0.ndim}, the dimensions of a state "
                f"of shape {tuple(x0.shape)}, not {batch_dims}."
            )
        self._call, self._f, self._dtype = call, f, dtype
        self.shape, self.batch = x0.shape, x0.shape[:batch_dims]
        self.flat = (math.prod(self.batch), math.prod(x0.shape[batch_dims:]))
        if 0 in self.flat:
            raise InputError(f"{call}: the state is empty; its shape is {tuple(x0.shape)}.")

    def __call__(self, x: Tensor) -> Tensor:
        y = self._f(x.reshape(self.shape).to(self._dtype).clone())  # f may work in place
        if not isinstance(y, Tensor) or y.shape != self.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"{self._call}: f must return a tensor of the shape of its input, "
                f"{tuple(self.shape)}, but returned {got}."
            )
        if y.is_complex():
            raise InputError(f"{self._call}: f must return real numbers, but returned {y.dtype}.")
        if functorch.is_batchedtensor(y):
            raise InputError(
                f"{self._call} does not work inside torch.func.vmap: its rounds depend on the "
                "values. Put the problems into leading dimensions and use batch_dims."
            )
        return y.reshape(self.flat).to(x.dtype)


def _state(call: str, x0: Tensor) -> tuple[Tensor, torch.dtype]:
    """The state, in single precision at least, and the precision that f is to see."""
    got = finite(call, "the state", numbers(call, x0=x0)[0]["x0"]).detach()
    half = isinstance(x0, Tensor) and x0.dtype in HALF  # pyright: ignore[reportUnnecessaryIsInstance]
    return got, x0.dtype if half else got.dtype


@dataclass
class _Run:
    """The iteration as it goes."""

    x: Tensor
    best: Tensor
    residual: Tensor
    steps: Tensor
    done: Tensor
    lost: Tensor
    broken: Tensor
    history: list[Tensor]


def _iterate(f: Map, x: Tensor, solver: Solver, tol: float, max_steps: int) -> _Run:
    rows = len(x)
    run = _Run(
        x=x,
        best=x,
        residual=x.new_full((rows,), math.inf),
        steps=torch.zeros(rows, dtype=torch.long, device=x.device),
        done=torch.zeros(rows, dtype=torch.bool, device=x.device),
        lost=torch.zeros(rows, dtype=torch.bool, device=x.device),
        broken=torch.zeros(rows, dtype=torch.bool, device=x.device),
        history=[],
    )
    for _ in range(max_steps):
        g = f(run.x) - run.x
        size = g.abs().amax(-1)
        size = size.where(size.isfinite(), math.inf)
        active = ~(run.done | run.lost)
        run.steps += active
        run.history.append(torch.where(active, size, run.residual))
        better = active & (size < run.residual)
        run.best = torch.where(better[:, None], run.x, run.best)
        run.residual = torch.where(better, size, run.residual)
        run.done |= active & (size <= tol)
        far = active & (size > 1e8 * (run.history[0] + 1))
        grown = run.x.abs().amax(-1) > 1e6 * (1 + x.abs().amax(-1))
        run.broken |= active & size.isinf() & ~grown
        run.lost |= far | (active & size.isinf())
        active = ~(run.done | run.lost)
        if not bool(active.any()):
            break
        safe = torch.where(active[:, None], g, 0.0)
        new = solver.propose(run.x, safe)
        run.x = torch.where((active & new.isfinite().all(-1))[:, None], new, run.x)
        run.lost |= active & ~new.isfinite().all(-1)
    return run


def _diagnose(f: Map, run: _Run, damping: float) -> Tensor:
    """A code for each row. Eight more steps of the plain map show whether unfinished rows come
    closer, move away or cycle."""
    code = torch.where(run.lost, int(Code.DIVERGING), int(Code.CONVERGED))
    code = torch.where(run.broken, int(Code.NOT_FINITE), code)
    left = ~(run.done | run.lost)
    if not bool(left.any()):
        return code
    x, sizes, moved = run.x, list[Tensor](), list[Tensor]()
    for _ in range(9):
        g = f(x) - x
        sizes.append(linalg.vector_norm(g, dim=-1))
        x = x + damping * g
        moved.append((x - run.x).abs().amax(-1))
    change = torch.stack(sizes).diff(dim=0) / sizes[0]
    total = (sizes[-1] - sizes[0]) / sizes[0]
    noise = 200 * torch.finfo(x.dtype).eps * (1 + run.best.abs().amax(-1))
    around = (torch.stack(moved[1:]) < 1e-3 * moved[0]).any(0)
    outcome = torch.where(around, int(Code.CYCLING), int(Code.STALLED))
    falling, rising = (change < 0).all(0) & (total < -1e-6), (change > 0).all(0) & (total > 1e-6)
    outcome = torch.where(falling, int(Code.UNFINISHED), outcome)
    outcome = torch.where(rising | ~total.isfinite(), int(Code.DIVERGING), outcome)
    outcome = torch.where(run.residual <= noise, int(Code.STALLED), outcome)
    return torch.where(left, outcome, code)


def fixed_point(
    f: Map,
    x0: Tensor,
    *,
    solver: str = "anderson",
    tol: float | None = None,
    max_steps: int = 200,
    batch_dims: int = 0,
    damping: float = 1.0,
    throw: bool = True,
) -> FixedPoint:
    """Solve x = f(x), starting from x0.

    The value has derivatives, by the implicit function theorem: dx = (I - J)^(-1) df, without
    storing the iteration. They are exact through third order, in reverse and forward mode, in
    everything f closes over (not in x0, on which the solution does not depend).

    Args:
        f: keeps the shape; may close over tensors that require gradients.
        x0: the start.
        solver: "anderson", "broyden" or "damped" (plain iteration for damping 1).
        tol: bound on the max-norm of f(x) - x; 1e-10 in double, 1e-5 in single, 0.002 and
            0.01 in half precision (float16, bfloat16).
        max_steps: maximum number of evaluations of f.
        batch_dims: the number of leading dimensions that are separate problems. f must treat them
            independently; each stops separately.
        damping: fraction of f(x) - x to step by, or the initial guess of it.
        throw: raise unless all problems converged; False returns the result regardless.

    Returns:
        A `FixedPoint`.

    Raises:
        ConvergenceError: with the diagnosis, and the result as its ``result``.
        InputError: an unknown solver, NaN in the start, an f that changes the shape.

    >>> import torch, cumulant as cm
    >>> a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    >>> root = cm.dynamics.fixed_point(lambda x: (x + a / x) / 2, torch.ones((), dtype=a.dtype))
    >>> root.value, root.status  # the square root of 2, by Heron
    (tensor(1.4142, dtype=torch.float64, grad_fn=...), converged)
    >>> torch.autograd.grad(root.value, a)  # 1 / (2 sqrt(2))
    (tensor(0.3536, dtype=torch.float64),)
    """
    if solver not in SOLVERS:
        raise InputError(
            f"fixed_point: solver must be one of {', '.join(SOLVERS)}, not {solver!r}."
        )
    start, kind = _state("fixed_point", x0)
    tol = _TOLERANCE[kind] if tol is None else real("fixed_point", "tol", tol, least=0.0)
    whole("fixed_point", "max_steps", max_steps, 1)
    damping = real("fixed_point", "damping", damping, least=0.0, most=1.0, open_at_least=True)
    rows = _Rows("fixed_point", f, start, batch_dims, kind)
    with torch.no_grad():
        quiet = _quiet(rows)
        run = _iterate(quiet, start.reshape(rows.flat), SOLVERS[solver](damping), tol, max_steps)
        code = _diagnose(quiet, run, damping)
    value = attach(rows, run.best, strict=throw)
    result = FixedPoint(
        value.reshape(rows.shape).to(kind),
        run.residual.reshape(rows.batch),
        run.steps.reshape(rows.batch),
        Outcome(code.reshape(rows.batch)),
        torch.stack(run.history).reshape(-1, *rows.batch),
    )
    if not throw:
        return result
    worst, evaluations = float(run.residual.max()), int(run.steps.max())
    note = f"best residual {worst:.3g}, tol {tol:.3g}, {evaluations} evaluations"
    return result.status.check("fixed_point", result, note)


def _quiet(f: Map) -> Map:
    def detached(x: Tensor) -> Tensor:
        return f(x).detach()

    return detached


def spectral_radius(
    f: Map,
    x: Tensor,
    *,
    batch_dims: int = 0,
    tol: float = 1e-6,
    max_dimension: int = 200,
) -> Spectrum:
    """The largest modulus of the eigenvalues of f's Jacobian at x, by Arnoldi's method.

    Below 1, plain iteration converges near a fixed point, at that rate. Complex eigenvalues are
    handled, so rotations are correct, where power iteration would not converge.

    Args:
        f: keeps the shape.
        x: where, usually a fixed point.
        batch_dims: the number of leading dimensions that are separate problems.
        tol: stop when the eigenvector's residual is at most tol times the modulus.
        max_dimension: largest Krylov space; memory is that many states.

    >>> import math, torch, cumulant as cm
    >>> turn = torch.tensor([[0.0, -0.5], [0.5, 0.0]], dtype=torch.float64)
    >>> cm.dynamics.spectral_radius(lambda x: turn @ x, torch.ones(2, dtype=torch.float64)).radius
    tensor(0.5000, dtype=torch.float64)
    """
    state, kind = _state("spectral_radius", x)
    rows = _Rows("spectral_radius", f, state, batch_dims, kind)
    flat = state.reshape(rows.flat)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows.flat, dtype=torch.float64, generator=generator).to(flat)

    whole("spectral_radius", "max_dimension", max_dimension, 1)

    def product(v: Tensor) -> Tensor:
        moved: Any = torch.func.jvp(rows, (flat,), (v,))
        return finite("spectral_radius", "the Jacobian", moved[1].detach())

    with torch.no_grad():
        found = leading_eigenvalue(product, start, tol=tol, limit=max_dimension)
    return Spectrum(*(t.reshape(rows.batch) for t in found))
