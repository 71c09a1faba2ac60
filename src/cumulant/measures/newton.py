"""Damped Newton's method for the canonical link: minimize G(eta) - <eta, mean>.

See docs/theory.md, T8.

Rows ``(*batch, M)`` are solved together, each with its own step length and stopping point.
Everything runs in double precision. Convergence is judged by the Newton decrement lambda^2 =
g' H^-1 g, which is twice the remaining gap in nats and independent of the coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.autodiff import on_tape
from cumulant.core.outcome import Code, Outcome, Solution
from cumulant.core.typed import Function, linalg
from cumulant.measures.frame import Frame

__all__ = ["Problem", "link_by_newton", "wide"]

# Twice the gap in nats after the last step, predicted from the contraction so far; for
# single-precision input, as small as that precision can resolve.
_GAP = 1e-20
_STEPS = 200
# A Hessian factor is reused while its steps are short and shrink the gap by this factor.
_KEEP = 1e-3
# Variances below this fraction of each other or of the support's need double precision.
_DOUBTFUL = 1e-4
# A direction whose variance has shrunk to this fraction of the support's is at the boundary.
_VANISHED = 1e3 * torch.finfo(torch.float64).eps
# Ridge added to the Hessian there while the mean is still far away.
_RIDGE = 1e-6


class Problem(NamedTuple):
    """A convex function of eta ``(*batch, M, d)``, its gradient and Hessian.

    `floor` ``(*batch, 1)`` marks finite support: inside the hull G - <eta, mean> never falls below
    the smallest log-weight, so falling below it proves that the mean lies outside. `reach`
    ``(*batch, 1, d)``, the extent of the points along each coordinate, bounds how much a step
    changes the log-weights; it limits steps only after one has overshot.
    """

    value_and_gradient: Callable[[Tensor], tuple[Tensor, Tensor]]
    hessian: Callable[[Tensor], Tensor]
    rough: Callable[[Tensor], Tensor] | None = None  # the Hessian in single precision
    floor: Tensor | None = None
    reach: Tensor | None = None
    start: Callable[[Tensor], Tensor] | None = None


def _curvature(hessian: Callable[[Tensor], Tensor], eta: Tensor, frame: Frame) -> Tensor:
    """The Hessian in the frame, with ones on the idle directions."""
    whiten = frame.whiten[..., None, :, :]
    inner = whiten.mT @ hessian(eta) @ whiten
    return inner + torch.diag_embed(frame.idle.to(inner.dtype))[..., None, :, :]


def newton_step(
    problem: Problem, mean: Tensor, eta: Tensor, frame: Frame, moving: Tensor
) -> Tensor:
    """One full Newton step, differentiable; only `moving` rows change."""
    move = moving[..., None]
    here = torch.where(move, eta, 0.0)
    eye = torch.eye(eta.shape[-1], dtype=eta.dtype, device=eta.device)
    curvature = _curvature(problem.hessian, here, frame)
    curvature = torch.where(move[..., None], curvature, eye)
    slope = (mean - problem.value_and_gradient(here)[1]) @ frame.whiten
    # By the inverse: torch's solve has wrong second derivatives over forward mode.
    step = (linalg.inv(curvature) @ slope[..., None])[..., 0]
    return torch.where(move, (here + step @ frame.whiten.mT) @ frame.span, eta)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x[..., rows, :]


def _factor(problem: Problem, eta: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
    """Cholesky factors of the Hessian and their smallest squared pivots; 0 where there is none."""

    def factored(hessian: Callable[[Tensor], Tensor], eta: Tensor) -> tuple[Tensor, Tensor]:
        curvature = _curvature(hessian, eta, frame)
        factor, info = linalg.cholesky_ex(curvature)
        pivot = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
        pivot = torch.where((info == 0) & (pivot > 0), pivot, 0.0)
        thin = _thin(problem, pivot)
        if bool(thin.any()):  # a ridge where there is no curvature left
            eye = torch.eye(eta.shape[-1], dtype=eta.dtype, device=eta.device)
            ridged = linalg.cholesky_ex(curvature + _RIDGE * eye).L
            factor = torch.where(thin[..., None, None], ridged, factor)
        return factor, pivot

    if problem.rough is None or bool((frame.narrow < _DOUBTFUL).any()):
        return factored(problem.hessian, eta)
    factor, pivot = factored(problem.rough, eta)
    rows = _any(pivot < _DOUBTFUL)
    if len(rows):
        factor[..., rows, :, :], pivot[..., rows] = factored(problem.hessian, _take(eta, rows))
    return factor, pivot


def _thin(problem: Problem, pivot: Tensor) -> Tensor:
    """Where the curvature is exhausted; only finite support sets the scale to judge by."""
    return pivot < _VANISHED if problem.floor is not None else pivot <= 0


def _beyond(problem: Problem, eta: Tensor, mean: Tensor, floor: Tensor) -> Tensor:
    """Whether eta, far out, separates the mean from all points: sup <x, eta> < <mean, eta>."""
    far = 1e6 * eta
    reach, height = problem.value_and_gradient(far)[0], (far * mean).sum(-1)
    return reach - height < floor - 1e-9 * (1 + reach.abs() + height.abs())


def _any(mask: Tensor) -> Tensor:
    """The rows marked in any batch element."""
    return mask.flatten(0, -2).any(0).nonzero()[:, 0] if mask.ndim > 1 else mask.nonzero()[:, 0]


class _Point(NamedTuple):
    """The current point of each row: eta, G - <eta, mean>, and the gradient of G."""

    eta: Tensor
    gap: Tensor
    gradient: Tensor

    def take(self, rows: Tensor) -> _Point:
        return _Point(_take(self.eta, rows), self.gap[..., rows], _take(self.gradient, rows))

    def put(self, rows: Tensor, other: _Point) -> None:
        self.eta[..., rows, :], self.gradient[..., rows, :] = other.eta, other.gradient
        self.gap[..., rows] = other.gap

    def where(self, mask: Tensor, other: _Point) -> _Point:
        """`other` where the mask is true."""
        return _Point(
            torch.where(mask[..., None], other.eta, self.eta),
            torch.where(mask, other.gap, self.gap),
            torch.where(mask[..., None], other.gradient, self.gradient),
        )


def _start(problem: Problem, mean: Tensor) -> _Point:
    if problem.start is not None:
        eta = problem.start(mean)
        value, gradient = problem.value_and_gradient(eta)
    else:  # all rows start alike, so one stands for all
        eta, one = torch.zeros_like(mean), torch.zeros_like(mean[..., :1, :])
        value, gradient = problem.value_and_gradient(one)
        value, gradient = value.expand(mean.shape[:-1]), gradient.expand_as(mean).clone()
    return _Point(eta, value - (eta * mean).sum(-1), gradient)


def minimize(
    problem: Problem, mean: Tensor, frame: Frame, code: Tensor, aim: float
) -> tuple[Tensor, Tensor]:
    """(eta, code) for all rows, solved to a gap of `aim`, given the codes already known."""
    descent = _Descent(problem, mean, frame, code, aim)
    for _ in range(_STEPS):
        descent.refresh_factors()
        rows = _any(descent.active)
        if len(rows) == 0:
            break
        descent.advance(rows)
    return descent.point.eta, descent.code


class _Step(NamedTuple):
    """A Newton step of some rows: start, factor, displacement and predicted decrease."""

    now: _Point
    target: Tensor
    factor: Tensor
    pivot: Tensor
    thin: Tensor  # where no curvature is left
    slope: Tensor  # in the frame
    direction: Tensor  # of eta
    decrement: Tensor  # lambda^2, twice the promised fall


class _Verdict(NamedTuple):
    """Verdict on some rows before they move: their codes, which continue, which are reset."""

    code: Tensor
    going: Tensor
    lost: Tensor


class _Descent:
    """The state of all rows, and one round of the method."""

    def __init__(
        self, problem: Problem, mean: Tensor, frame: Frame, code: Tensor, aim: float
    ) -> None:
        self.problem, self.mean, self.frame, self.aim = problem, mean, frame, aim
        self.active = code == Code.CONVERGED
        self.code = torch.where(self.active, int(Code.STALLED), code)
        self.point = _start(problem, mean)
        self.back = _Point(*(x.clone() for x in self.point))  # where a lost row returns to
        self.returnable = torch.zeros_like(self.active)
        self.last = torch.zeros_like(self.point.gap)  # the decrement of the round before
        self.stride = torch.full_like(self.point.gap, torch.inf)
        self.pivot = torch.ones_like(self.point.gap)
        self.factor = torch.empty(*mean.shape, mean.shape[-1], dtype=mean.dtype, device=mean.device)
        self.stale = self.active.clone()
        if problem.start is None and mean.shape[-2]:  # all rows start alike: one factor for all
            first = _factor(problem, self.point.eta[..., :1, :], frame)
            self.factor[:], self.pivot[:] = first
            self.stale[:] = False

    def refresh_factors(self) -> None:
        """Refactor the Hessian where the old factor no longer shrinks the gap fast enough."""
        rows = _any(self.active & self.stale)
        if len(rows):
            fresh = _factor(self.problem, _take(self.point.eta, rows), self.frame)
            self.factor[..., rows, :, :], self.pivot[..., rows] = fresh

    def advance(self, rows: Tensor) -> None:
        """One round for these rows: step, verdict, line search, bookkeeping."""
        step = self._step(rows)
        verdict = self._verdict(rows, step)
        step = self._limited(rows, step, verdict.lost)
        new, moved = _search(
            self.problem, step.target, step.now, step.direction, step.decrement, verdict.going
        )
        self._record(rows, step, verdict, new, moved)

    def _step(self, rows: Tensor) -> _Step:
        """Newton's direction, H^-1 (mean - gradient)."""
        now, target = self.point.take(rows), _take(self.mean, rows)
        factor, pivot = self.factor[..., rows, :, :], self.pivot[..., rows]
        slope = (target - now.gradient) @ self.frame.whiten
        move = torch.cholesky_solve(slope[..., None], factor)[..., 0]
        return _Step(
            now,
            target,
            factor,
            pivot,
            _thin(self.problem, pivot),
            slope,
            move @ self.frame.whiten.mT,
            (move * slope).sum(-1),
        )

    def _verdict(self, rows: Tensor, step: _Step) -> _Verdict:
        """Which rows have finished, and how; which must be reset."""
        last, thin = self.last[..., rows], step.thin
        foretold = step.decrement * (step.decrement / last).clamp_max(1.0).nan_to_num(1.0)
        rounding = (step.decrement < 1e-12) & (step.decrement > last / 2)
        settled = (foretold <= self.aim) | rounding
        code, going = self.code[..., rows], self.active[..., rows]
        lost = torch.zeros_like(going)
        ends = [(settled & ~thin, Code.CONVERGED)]
        if self.problem.floor is not None:
            outside = self._outside(step, self.problem.floor, going)
            strain = step.slope.square().sum(-1) / step.pivot.clamp_min(1e-300)
            boundary = thin & (strain < 1e-3)
            ends = [(outside, Code.OUTSIDE), (boundary, Code.BOUNDARY), *ends]
            # The weights are so peaked that the curvature vanishes: the last step overshot.
            lost = going & thin & ~outside & ~boundary & self.returnable[..., rows]
        for reached, kind in ends:
            code = torch.where(going & reached, int(kind), code)
            going = going & ~reached
        return _Verdict(code, going & ~lost, lost)

    def _outside(self, step: _Step, floor: Tensor, going: Tensor) -> Tensor:
        """Where the mean provably lies outside the hull of a finite support."""
        outside = step.now.gap < floor - 1e-9 * (1 + floor.abs())
        if bool((step.thin & going).any()):
            beyond = _beyond(self.problem, step.now.eta, step.target, floor)
            outside = outside | (step.thin & beyond)
        return outside

    def _limited(self, rows: Tensor, step: _Step, lost: Tensor) -> _Step:
        """Limit the step to its row's stride, which halves after an overshoot and doubles after a
        good step."""
        if self.problem.reach is None:
            return step
        length = (step.direction.abs() * self.problem.reach).sum(-1)
        before = self.stride[..., rows]
        limit = torch.where(self.returnable[..., rows], 2 * before, before)
        limit = torch.where(lost, before.clamp_max(200) / 2, limit)
        self.stride[..., rows] = limit
        limit = torch.where(step.thin, limit.clamp_max(50), limit)
        share = (limit / length.clamp_min(1e-300)).clamp_max(1.0)
        return step._replace(
            direction=step.direction * share[..., None], decrement=step.decrement * share
        )

    def _record(
        self, rows: Tensor, step: _Step, verdict: _Verdict, new: _Point, moved: Tensor
    ) -> None:
        """Record the rows' new points, which of them continue, and whose factor is stale."""
        code, going, lost = verdict
        ended = self.active[..., rows] & (code == Code.CONVERGED)  # one more step costs nothing
        new = new._replace(eta=new.eta + step.direction * ended[..., None])
        new = new.where(lost, self.back.take(rows))
        self.point.put(rows, new)
        self.back.put(rows, self.back.take(rows).where(moved, step.now))
        stuck = going & ~moved
        code = torch.where(stuck & (step.decrement < 1e-8), int(Code.CONVERGED), code)
        retry = stuck & ~self.stale[..., rows] & (code != Code.CONVERGED)  # with a fresh factor
        self.code[..., rows] = code
        self.active[..., rows] = moved | lost | retry
        self.returnable[..., rows] = moved & ~step.thin
        slope = (step.target - new.gradient) @ self.frame.whiten
        ahead = (slope * torch.cholesky_solve(slope[..., None], step.factor)[..., 0]).sum(-1)
        self.stale[..., rows] = (ahead > _KEEP * step.decrement) | (step.decrement > 0.1) | ~moved
        self.last[..., rows] = step.decrement


def _search(
    problem: Problem,
    mean: Tensor,
    now: _Point,
    direction: Tensor,
    decrement: Tensor,
    going: Tensor,
) -> tuple[_Point, Tensor]:
    """Halve each row's step until the function decreases enough (Armijo)."""
    new = _Point(*(x.clone() for x in now))
    moved = torch.zeros_like(going)
    rows = _any(going)
    length = 1.0
    while len(rows) and length > 1e-12:
        here = now.take(rows)
        trial = here.eta + length * _take(direction, rows)
        height, gradient = problem.value_and_gradient(trial)
        gap = height - (trial * _take(mean, rows)).sum(-1)
        size = 1 + here.gap.abs() + height.nan_to_num(0, 0, 0).abs()
        if problem.reach is not None:  # the height is a difference of numbers of this size
            size = size + (trial.abs() * problem.reach).sum(-1)
        enough = here.gap - 1e-4 * length * decrement[..., rows]
        good = gap <= enough + 8 * torch.finfo(gap.dtype).eps * size
        good = good & gradient.isfinite().all(-1) & (going & ~moved)[..., rows]
        new.put(rows, new.take(rows).where(good, _Point(trial, gap, gradient)))
        moved[..., rows] |= good
        rows = _any(going & ~moved)
        length /= 2
    return new, moved


class _Solve(Function):
    """`minimize` for a measure given as tensors: no derivatives, but vmap works."""

    @staticmethod
    def forward(measure: Any, names: tuple[str, ...], aim: float, *tensors: Tensor) -> Any:
        mean, code, *rest = tensors
        frame, leaves = Frame(*rest[:4]), dict(zip(names, rest[4:], strict=True))
        eta, code = minimize(measure._rebuilt(leaves)._problem(), mean, frame, code, aim)
        return eta @ frame.span, code

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        return None, None

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any,
        in_dims: tuple[int | None, ...],
        measure: Any,
        names: tuple[str, ...],
        aim: float,
        *tensors: Tensor,
    ) -> Any:
        front = [
            x if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims[3:], strict=True)
        ]
        for i, own in ((0, 2), (1, 1)):  # means and codes carry the new dimension, always
            batch = tensors[0].shape if in_dims[3] is None else front[0].shape[1:]
            shape = (info.batch_size, *batch[: len(batch) - 2 + own])
            front[i] = front[i].expand(shape)
        return _Solve.apply(measure, names, aim, *front), (0, 0)


def solve(measure: Any, mean: Tensor, code: Tensor, frame: Frame, resolution: float) -> Solution:
    """The link of every mean whose code is good, as constants."""
    rank = max(len(measure.batch_shape), mean.ndim - 2)

    def aligned(x: Tensor, own: int) -> Tensor:
        return x.detach()[(None,) * (rank + own - x.ndim)]

    leaves = measure._leaves()
    tensors = [aligned(mean, 2), aligned(code, 1)]
    tensors += [aligned(x, own) for x, own in zip(frame, frame.tails, strict=True)]
    tensors += [aligned(x, own) for x, own in leaves.values()]
    aim = max(_GAP, resolution**2)
    eta, code = _Solve.apply(measure, tuple(leaves), aim, *tensors)
    return Solution(eta.reshape(mean.shape), Outcome(code.reshape(mean.shape[:-1])))


def wide(measure: Any, mean: Tensor) -> tuple[Any, Tensor, float]:
    """Measure and means in double precision, and the rounding error of the input."""
    resolution = torch.finfo(mean.dtype).eps
    kind = mean.dtype if mean.device.type == "mps" else torch.float64
    return measure._to(kind), mean.to(kind), resolution


def link_by_newton(
    measure: Any, mean: Tensor, code: Tensor, frame: Frame, resolution: float
) -> Solution:
    """The link of every mean whose code is good, with derivatives.

    The search itself is not recorded. If derivatives are needed, two more Newton steps are: a step
    squares the error, including that of a formal power series in the inputs, so from the solution
    one step makes the first derivative exact, and two make derivatives exact through the third.
    """
    found = solve(measure, mean, code, frame, resolution)
    if not on_tape(mean, *(x for x, _ in measure._leaves().values())):
        return found
    eta, problem = found.value, measure._problem()
    for _ in range(2):
        eta = newton_step(problem, mean, eta, frame, found.status.converged)
    return Solution(eta, found.status)
