"""Damped Newton's method for the canonical link: minimize G(eta) - <eta, mean>.

See docs/theory.md, T8.

Rows ``(*batch, M)`` are solved together, each with its own step length and its own end. Everything
runs in double precision; the Newton decrement lambda^2 = g' H^-1 g, which is twice the remaining
gap in nats and does not depend on coordinates, decides convergence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.autodiff import on_tape
from cumulant.core.outcome import Code, Outcome, Solution

__all__ = ["Frame", "Problem", "link_by_newton", "no_frame", "whitening", "wide"]

# Twice the gap in nats after the last step, as the contraction so far foretells it; for numbers
# that came in single precision, what that precision can show.
_GAP = 1e-20
_STEPS = 200
# A factor of the Hessian is kept while steps with it are short and shrink the gap to this part.
_KEEP = 1e-3
# Variances below this part of each other or of the support's are not left to single precision.
_DOUBTFUL = 1e-4
# A direction whose variance has shrunk to this part of the support's has met the boundary.
_VANISHED = 1e3 * torch.finfo(torch.float64).eps
# What is added to the Hessian there, while the mean is still far.
_RIDGE = 1e-6


class Problem(NamedTuple):
    """A convex function of eta ``(*batch, M, d)``, its gradient and Hessian.

    `floor` ``(*batch, 1)`` marks finite support: inside the hull G - <eta, mean> never falls below
    the smallest log-weight, so falling below it proves that the mean lies outside. `reach`
    ``(*batch, 1, d)``, how far the points extend along each coordinate, bounds what a step does to
    log-weights; steps are limited by it only after one has gone too far.
    """

    value_and_gradient: Callable[[Tensor], tuple[Tensor, Tensor]]
    hessian: Callable[[Tensor], Tensor]
    rough: Callable[[Tensor], Tensor] | None = None  # the Hessian in single precision
    floor: Tensor | None = None
    reach: Tensor | None = None
    start: Callable[[Tensor], Tensor] | None = None


class Frame(NamedTuple):
    """Coordinates z with eta = W z in which the support, weights aside, has covariance one.

    `idle` directions do not move: the support is flat there, and W is zero on them. `span` projects
    on the directions of the support, which makes eta as short as it can be.
    """

    whiten: Tensor  # (*batch, d, d): W
    idle: Tensor  # (*batch, d)
    span: Tensor  # (*batch, d, d)
    narrow: Tensor  # (*batch, 1): the smallest eigenvalue of the correlations that is not idle

    @property
    def tails(self) -> tuple[int, ...]:
        """How many dimensions of each tensor are not batch."""
        return 2, 1, 2, 1


def whitening(
    center: Tensor, covariance: Tensor, mean: Tensor, resolution: float
) -> tuple[Frame, Tensor]:
    """The frame of a measure, and which of the means lie off its affine span.

    Coordinates may be in different units, so rank is judged by correlations. `resolution` is the
    rounding of the numbers the caller gave.
    """
    d, rounding = covariance.shape[-1], torch.finfo(covariance.dtype).eps
    unit = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    # A coordinate whose spread is rounding of its own size does not vary.
    unit = torch.where(unit <= 4 * rounding * center[..., 0, :].abs(), 0.0, unit)
    inverse = torch.where(unit > 0, 1 / torch.where(unit > 0, unit, 1.0), 0.0)
    correlation = covariance * inverse[..., :, None] * inverse[..., None, :]
    values, axes = torch.linalg.eigh(correlation)
    idle = values <= d * max(100 * rounding, (16 * resolution) ** 2)
    length = torch.where(idle, 1.0, values).sqrt()
    whiten = inverse[..., :, None] * axes * torch.where(idle, 0.0, 1 / length)[..., None, :]
    # What the support's directions cannot see: the null space of the covariance.
    blind = torch.where(unit > 0, inverse, 1.0)[..., :, None] * axes * idle[..., None, :]
    blind = blind / torch.linalg.vector_norm(blind, dim=-2, keepdim=True).clamp_min(1e-300)
    eye = torch.eye(d, dtype=covariance.dtype, device=covariance.device)
    span = eye - blind @ torch.linalg.pinv(blind, rtol=1e-10)
    away = mean - center
    off = torch.linalg.vector_norm(away - away @ span, dim=-1)
    size = unit.amax(-1)[..., None] + torch.linalg.vector_norm(away, dim=-1) + center.abs().amax(-1)
    narrow = torch.where(idle, torch.inf, values).amin(-1, keepdim=True)
    frame = Frame(whiten, idle, span, narrow)
    return frame, off > max(1e4 * rounding, 100 * resolution) * size


def no_frame(like: Tensor) -> Frame:
    """The coordinates as they are, for eta of d statistics."""
    eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return Frame(eye, eye[0] > 1, eye, eye[0, :1])


def _curvature(hessian: Callable[[Tensor], Tensor], eta: Tensor, frame: Frame) -> Tensor:
    """The Hessian in the frame, one on the idle directions."""
    whiten = frame.whiten[..., None, :, :]
    inner = whiten.mT @ hessian(eta) @ whiten
    return inner + torch.diag_embed(frame.idle.to(inner.dtype))[..., None, :, :]


def newton_step(
    problem: Problem, mean: Tensor, eta: Tensor, frame: Frame, moving: Tensor
) -> Tensor:
    """One full Newton step, differentiable; rows that are not `moving` stay."""
    move = moving[..., None]
    here = torch.where(move, eta, 0.0)
    eye = torch.eye(eta.shape[-1], dtype=eta.dtype, device=eta.device)
    curvature = _curvature(problem.hessian, here, frame)
    curvature = torch.where(move[..., None], curvature, eye)
    slope = (mean - problem.value_and_gradient(here)[1]) @ frame.whiten
    # By the inverse: torch's solve has wrong second derivatives over forward mode.
    step = (torch.linalg.inv(curvature) @ slope[..., None])[..., 0]
    return torch.where(move, (here + step @ frame.whiten.mT) @ frame.span, eta)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x[..., rows, :]


def _factor(problem: Problem, eta: Tensor, frame: Frame) -> tuple[Tensor, Tensor]:
    """Cholesky factors of the Hessian, and the smallest squared pivots; 0 where there are none."""

    def factored(hessian: Callable[[Tensor], Tensor], eta: Tensor) -> tuple[Tensor, Tensor]:
        curvature = _curvature(hessian, eta, frame)
        factor, info = torch.linalg.cholesky_ex(curvature)
        pivot = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
        pivot = torch.where((info == 0) & (pivot > 0), pivot, 0.0)
        thin = _thin(problem, pivot)
        if bool(thin.any()):  # a ridge where there is no curvature left
            eye = torch.eye(eta.shape[-1], dtype=eta.dtype, device=eta.device)
            ridged = torch.linalg.cholesky_ex(curvature + _RIDGE * eye).L
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
    """Where no curvature is left. Only finite support says how much there should be."""
    return pivot < _VANISHED if problem.floor is not None else pivot <= 0


def _beyond(problem: Problem, eta: Tensor, mean: Tensor, floor: Tensor) -> Tensor:
    """Whether eta, far out, separates the mean from all points: sup <x, eta> < <mean, eta>."""
    far = 1e6 * eta
    reach, height = problem.value_and_gradient(far)[0], (far * mean).sum(-1)
    return reach - height < floor - 1e-9 * (1 + reach.abs() + height.abs())


def _any(mask: Tensor) -> Tensor:
    """The rows that are marked in some member of the batch."""
    return mask.flatten(0, -2).any(0).nonzero()[:, 0] if mask.ndim > 1 else mask.nonzero()[:, 0]


class _Point(NamedTuple):
    """Where each row is: eta, G - <eta, mean>, and the gradient of G."""

    eta: Tensor
    gap: Tensor
    gradient: Tensor

    def take(self, rows: Tensor) -> _Point:
        return _Point(_take(self.eta, rows), self.gap[..., rows], _take(self.gradient, rows))

    def put(self, rows: Tensor, other: _Point) -> None:
        self.eta[..., rows, :], self.gradient[..., rows, :] = other.eta, other.gradient
        self.gap[..., rows] = other.gap

    def where(self, mask: Tensor, other: _Point) -> _Point:
        """The other point where the mask is true."""
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
    """(eta, code) for all rows down to a gap of `aim`, given the codes known before."""
    d = mean.shape[-1]
    active = code == Code.CONVERGED
    code = torch.where(active, int(Code.STALLED), code)
    point = _start(problem, mean)
    back = _Point(*(x.clone() for x in point))
    pivot, before = torch.ones_like(point.gap), torch.zeros_like(point.gap)
    stride = torch.full_like(point.gap, torch.inf)
    factor = torch.empty(*mean.shape, d, dtype=mean.dtype, device=mean.device)
    stale, returnable = active.clone(), torch.zeros_like(active)
    if problem.start is None and mean.shape[-2]:
        factor[:], pivot[:] = _factor(problem, point.eta[..., :1, :], frame)
        stale[:] = False
    for _ in range(_STEPS):
        old = _any(active & stale)
        if len(old):
            fresh = _factor(problem, _take(point.eta, old), frame)
            factor[..., old, :, :], pivot[..., old] = fresh
        rows = _any(active)
        if len(rows) == 0:
            break
        now, target, thinnest = point.take(rows), _take(mean, rows), pivot[..., rows]
        thin = _thin(problem, thinnest)
        whole = factor[..., rows, :, :]
        slope = (target - now.gradient) @ frame.whiten
        step = torch.cholesky_solve(slope[..., None], whole)[..., 0]
        decrement, last = (step * slope).sum(-1), before[..., rows]
        foretold = decrement * (decrement / last).clamp_max(1.0).nan_to_num(1.0)
        settled = (foretold <= aim) | ((decrement < 1e-12) & (decrement > last / 2))
        going, fate = active[..., rows], code[..., rows]
        lost = torch.zeros_like(going)
        ends = [(settled & ~thin, Code.CONVERGED)]
        if problem.floor is not None:
            strain = slope.square().sum(-1) / thinnest.clamp_min(1e-300)
            outside = now.gap < problem.floor - 1e-9 * (1 + problem.floor.abs())
            if bool((thin & going).any()):
                outside = outside | (thin & _beyond(problem, now.eta, target, problem.floor))
            boundary = thin & (strain < 1e-3)
            ends = [(outside, Code.OUTSIDE), (boundary, Code.BOUNDARY), *ends]
            # Weights so peaked that they no longer feel the slope: the last step went too far.
            lost = going & thin & ~outside & ~boundary & returnable[..., rows]
        for reached, kind in ends:
            fate = torch.where(going & reached, int(kind), fate)
            going = going & ~reached
        going = going & ~lost
        direction = step @ frame.whiten.mT
        if problem.reach is not None:
            length = (direction.abs() * problem.reach).sum(-1)
            # Halved after a step too far, doubled after a good one.
            limit = stride[..., rows]
            limit = torch.where(returnable[..., rows], 2 * limit, limit)
            limit = torch.where(lost, stride[..., rows].clamp_max(200) / 2, limit)
            stride[..., rows] = limit
            limit = torch.where(thin, limit.clamp_max(50), limit)
            share = (limit / length.clamp_min(1e-300)).clamp_max(1.0)
            direction, decrement = direction * share[..., None], decrement * share
        new, moved = _search(problem, target, now, direction, decrement, going)
        ended = active[..., rows] & (fate == Code.CONVERGED)  # one more step costs nothing
        new = new._replace(eta=new.eta + direction * ended[..., None])
        new = new.where(lost, back.take(rows))
        point.put(rows, new)
        back.put(rows, back.take(rows).where(moved, now))
        stuck = going & ~moved
        fate = torch.where(stuck & (decrement < 1e-8), int(Code.CONVERGED), fate)
        retry = stuck & ~stale[..., rows] & (fate != Code.CONVERGED)  # with a fresh factor
        code[..., rows] = fate
        active[..., rows] = moved | lost | retry
        returnable[..., rows] = moved & ~thin
        slope = (target - new.gradient) @ frame.whiten
        ahead = (slope * torch.cholesky_solve(slope[..., None], whole)[..., 0]).sum(-1)
        stale[..., rows] = (ahead > _KEEP * decrement) | (decrement > 0.1) | ~moved
        before[..., rows] = decrement
    return point.eta, code


def _search(
    problem: Problem,
    mean: Tensor,
    now: _Point,
    direction: Tensor,
    decrement: Tensor,
    going: Tensor,
) -> tuple[_Point, Tensor]:
    """Halve each row's step until the function has fallen enough (Armijo)."""
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


class _Solve(torch.autograd.Function):
    """`minimize` for a measure given as tensors: without derivatives, but open to vmap."""

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
    """The link of every mean whose code is good, as constants without derivatives."""
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
    """Measure and means in double precision, and the rounding of what was given."""
    resolution = torch.finfo(mean.dtype).eps
    kind = mean.dtype if mean.device.type == "mps" else torch.float64
    return measure._to(kind), mean.to(kind), resolution


def link_by_newton(
    measure: Any, mean: Tensor, code: Tensor, frame: Frame, resolution: float
) -> Solution:
    """The link of every mean whose code is good, with derivatives.

    The search itself is off the tape. Where derivatives are wanted, two more steps are on it: a
    Newton step squares the error, also that of a formal power series in whatever moves, so from
    the solution one step makes the first derivative exact and two make it the third.
    """
    found = solve(measure, mean, code, frame, resolution)
    if not on_tape(mean, *(x for x, _ in measure._leaves().values())):
        return found
    eta, problem = found.value, measure._problem()
    for _ in range(2):
        eta = newton_step(problem, mean, eta, frame, found.status.converged)
    return Solution(eta, found.status)
