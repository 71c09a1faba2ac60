"""The compiled recursion under autograd: value, gradient and second derivatives in C++.

The gradient is the adjoint of the recursion, one pass back over its steps, so its cost does not
grow with the number of parameters. The second derivative is the derivative of that pass along a
direction. From the third order on, derivatives are those of the torch recursion, which is also what
runs where the compiled one does not: nonlinear models, roots of covariances, other devices,
forward mode and the transforms of torch.func.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.typed import Function, forward_ad, functorch
from cumulant.filtering.kalman import GaussianBank, OverTime
from cumulant.filtering.moments import Affine
from cumulant.filtering.native import calls
from cumulant.filtering.native.calls import Plan
from cumulant.filtering.recursion import Belief, Beliefs, Run, Scheme, steps
from cumulant.kernels.engines import compiled

__all__ = ["as_arrays", "problem_of", "run_compiled", "takes", "total_compiled"]

# Beyond this, torch's products of matrices are quicker than plain loops.
MOST_SIZE = 16


def takes(bank: GaussianBank, belief: Belief) -> bool:
    """Whether the compiled recursion can run these filters from this belief on."""
    return compiled() is not None and as_arrays(bank, belief)


def as_arrays(bank: GaussianBank, belief: Belief) -> bool:
    """Whether the filters are small arrays of numbers and nothing else."""
    model, y = bank.model, bank.observations
    if getattr(model, "functions", None) or len(belief.message) > 2:
        return False
    if max(model.state_size, model.observation_size) > MOST_SIZE:
        return False
    tensors = [y, belief.log_weights, *belief.message]
    if bank.known is None or model.device.type != "cpu":
        tensors += model.parameters.values()
    if bank.inputs is not None:
        tensors.append(bank.inputs)
    return y.shape[-2] > 0 and 0 not in belief.log_weights.shape and all(map(_readable, tensors))


def _readable(x: Tensor) -> bool:
    """Whether a tensor has an address, and nothing but reverse mode can ask for derivatives."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or functorch.is_functorch_wrapped_tensor(x):
        return False
    return forward_ad._current_level < 0 or forward_ad.unpack_dual(x).tangent is None


def run_compiled(bank: GaussianBank, scheme: Scheme, belief: Belief, *, alike: bool) -> Run | None:
    """All steps of a bank, from a belief on.

    None where an observation has no density, or covariances lose the digits that roots keep.
    """
    plan, given, batch = problem_of(bank, scheme, belief, alike, total_only=False)
    digits, totals, predicted, *beliefs = _found(plan, given)
    if not _good(digits, totals):
        return None
    totals, predicted = (
        x.reshape(*batch, *x.shape[1:]).to(bank.dtype) for x in (totals, predicted)
    )
    pieces = partial(_pieces, plan, beliefs, batch, bank.dtype)
    if totals.requires_grad:  # whoever asks first may do so without gradients
        return Run(Beliefs(pieces()), (totals,), (predicted,))
    source = partial(_moments, plan, given, beliefs, batch)
    back = partial(_smoothed, plan, given, beliefs, batch, bank.dtype)
    return Run(Beliefs(pieces, source, back), (totals,), (predicted,))


def _found(plan: Plan, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What is found, on the tape where something given is."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return _Found.apply(plan, *given)
    found, digits = calls.value(plan, given)
    return digits, *found


def _moments(
    plan: Plan, given: Sequence[Tensor], beliefs: Sequence[Tensor], batch: torch.Size
) -> dict[str, Tensor]:
    """Moments over all modes and histories, ``(*batch, T, ...)``."""
    found = calls.moments(plan, given, beliefs)
    return {name: x.reshape(*batch, *x.shape[1:]) for name, x in found.items()}


def _smoothed(
    plan: Plan,
    given: Sequence[Tensor],
    beliefs: Sequence[Tensor],
    batch: torch.Size,
    dtype: torch.dtype,
) -> tuple[Beliefs, tuple[Tensor, ...]] | None:
    """Smoothed beliefs and the log-weights of pairs; None if plain covariances do not suffice."""
    (*found, pairs), digits = calls.smoothed(plan, given, beliefs)
    if not _good(digits, found[0]):
        return None
    each: list[Tensor] = []
    begin, M = 0, plan.modes
    for G, times in _runs(plan.histories[:-1]):
        part = pairs.narrow(1, begin, times * G * M * M).reshape(*batch, times, G * M, M)
        each += part.to(dtype).unbind(len(batch))
        begin += times * G * M * M
    return Beliefs(_pieces(plan, found, batch, dtype)), tuple(each)


def total_compiled(
    bank: GaussianBank, scheme: Scheme, belief: Belief, *, alike: bool
) -> Tensor | None:
    """log p(observations), ``(*batch,)``; None as in `run_compiled`."""
    plan, given, batch = problem_of(bank, scheme, belief, alike, total_only=True)
    digits, totals = _found(plan, given)
    return totals[:, 0].reshape(batch).to(bank.dtype) if _good(digits, totals) else None


def _good(digits: Tensor, totals: Tensor) -> bool:
    """Whether every number can be trusted."""
    return float(digits.sum()) == len(digits) and math.isfinite(float(totals.detach().sum()))


def problem_of(
    bank: GaussianBank, scheme: Scheme, belief: Belief, alike: bool, *, total_only: bool
) -> tuple[Plan, list[Tensor], torch.Size]:
    """The plan, what is given as contiguous arrays of doubles, and the shape of the batch."""
    model, y = bank.model, bank.observations
    weights, (mean, covariance) = belief
    batch, (G, M) = weights.shape[:-2], weights.shape[-2:]
    T = y.shape[-2]
    sizes = M, model.state_size, model.observation_size
    histories = _histories(scheme, M, G, T, alike)
    joins, count = scheme.memory == 1, batch.numel()
    plan = Plan(*sizes, T, count, histories, scheme.mixes, joins, alike, total_only)
    known = {} if bank.known is None else bank.known.arrays
    given = known.get(batch)
    if given is None:
        given = [_by_series(x, batch).double().contiguous() for x in bank.over_time()]
        if not batch:
            known[batch] = given
    shared = y.shape[:-2].numel() == 1
    values = (y if shared else y.expand(*batch, *y.shape[-2:])).reshape(-1, *y.shape[-2:])
    start = [x.reshape(count, *x.shape[len(batch) :]) for x in (weights, mean, covariance)]
    return plan, [*given, *(x.double().contiguous() for x in (values, *start))], batch


@cache
def _histories(scheme: Scheme, modes: int, first: int, steps: int, alike: bool) -> tuple[int, ...]:
    """How many histories are kept before the first step and after each."""
    out, room = [first], scheme.histories(modes)
    for t in range(steps):
        one = scheme.mixes or (alike if t == 0 else scheme.memory == 1)
        branches = 1 if one else out[-1] * modes
        out.append(branches if room is None else min(branches, room))
        if t > 0 and out[-1] == out[-2]:
            return (*out, *[out[-1]] * (steps - t - 1))
    return tuple(out)


def _by_series(x: OverTime, batch: torch.Size) -> Tensor:
    """A parameter as ``(series or 1, steps or 1, M, ...)``."""
    whole, lead = x.by_step, x.batch
    if x.constant:
        return whole[None, None]
    tail = whole.shape[len(lead) :]
    if lead.numel() == 1:
        return whole.reshape(1, *tail)
    return whole.expand(*batch, *tail).reshape(batch.numel(), *tail)


def _pieces(
    plan: Plan, beliefs: Sequence[Tensor], batch: torch.Size, dtype: torch.dtype
) -> list[Belief]:
    """Runs of beliefs with as many histories."""
    out: list[Belief] = []
    begin, M = 0, plan.modes
    for G, times in _runs(plan.histories):
        count = times * G * M
        parts = [
            x.narrow(1, begin, count).reshape(*batch, times, G, M, *x.shape[2:]).to(dtype)
            for x in beliefs
        ]
        out.append(Belief(parts[0], tuple(parts[1:])))
        begin += count
    return out


@cache
def _runs(histories: tuple[int, ...]) -> list[tuple[int, int]]:
    """How many histories, and for how many beliefs in a row."""
    return [(G, len(list(same))) for G, same in groupby(histories)]


def _like(total: Tensor | None, given: Tensor) -> Tensor | None:
    """A gradient by series as one in what was given, which all series may share."""
    return None if total is None else total.sum_to_size(given.shape)


class _Found(Function):
    """What is given to what is found."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.known = plan, None
        ctx.save_for_backward(*given)
        wanted = ctx.needs_input_grad[1:]
        if plan.total_only and any(wanted):
            ones = given[0].new_ones(plan.series, 1)
            totals, digits, ctx.known = calls.gradient(plan, given, [ones], wanted)
            found = [totals]
        else:
            found, digits = calls.value(plan, given)
        ctx.mark_non_differentiable(digits)
        return digits, *found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        seeds = grads[1:]
        plan, given, wanted = ctx.plan, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *_Gradient.apply(plan, wanted, len(given), *given, *map(_dense, seeds))
        if ctx.known is None:
            to = calls.gradient(plan, given, [_dense(s) for s in seeds], wanted)[-1]
        else:
            to = [None if x is None else x * _over(seeds[0], x) for x in ctx.known]
        return None, *(_like(x, y) for x, y in zip(to, given, strict=True))


class _Gradient(Function):
    """What is given, and seeds of what is found, to the gradient of <seeds, found>."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, wanted: Sequence[bool], count: int, *arrays: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.plan, ctx.wanted, ctx.count = plan, wanted, count
        ctx.save_for_backward(*arrays)
        given, seeds = arrays[:count], arrays[count:]
        to = calls.gradient(plan, given, seeds, wanted)[-1]
        return tuple(_like(x, y) for x, y in zip(to, given, strict=True))

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> Any:
        arrays, count = ctx.saved_tensors, ctx.count
        needed = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return None, None, None, *_reference(ctx.plan, arrays, count, ctx.wanted, along, needed)
        given, seeds = arrays[:count], arrays[count:]
        directions = [_dense(x) for x in along]
        found, to = calls.curvature(ctx.plan, given, seeds, directions, needed[:count])
        first = (_like(x, y) for x, y in zip(to, given, strict=True))
        return None, None, None, *first, *found


def _dense(x: Tensor | None) -> Tensor | None:
    """With an address, which lazy zeros and lazy signs do not have."""
    if x is None:
        return None
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype)
    return x.resolve_neg().contiguous()


def _over(seed: Tensor | None, x: Tensor) -> Tensor:
    """A number for each series, to multiply x with."""
    seed = x.new_zeros(len(x)) if seed is None else seed
    return seed.reshape(-1, *[1] * (x.ndim - 1))


def _reference(
    plan: Plan,
    arrays: Sequence[Tensor],
    count: int,
    wanted: Sequence[bool],
    along: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The second derivative by the torch recursion, so that it can be differentiated again."""
    # Seeds may be functions of what is given: derivatives are taken in copies, which are not.
    arrays = [x.view_as(x) for x in arrays]
    given, seeds = arrays[:count], arrays[count:]
    found = _torch_found(plan, given)
    inside = [x for x, need in zip(given, wanted, strict=True) if need]
    directions = [u for u, need in zip(along, wanted, strict=True) if need]
    slopes = torch.autograd.grad(
        found, inside, list(seeds), create_graph=True, allow_unused=True, materialize_grads=True
    )
    pairs = [(s, u) for s, u in zip(slopes, directions, strict=True) if u is not None]
    chosen = [x for x, need in zip(arrays, needed, strict=True) if need]
    out = iter(
        torch.autograd.grad(
            *([s for s, _ in pairs], chosen, [u for _, u in pairs]),
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return [next(out) if need else None for need in needed]


def _torch_found(plan: Plan, given: Sequence[Tensor]) -> list[Tensor]:
    """The same arrays by the torch recursion."""
    bank = _ArrayBank(plan, given)
    M = plan.modes
    start = Belief(given[8], (given[9], given[10]))
    scheme = Scheme(_memory(plan), plan.mixes, None)
    found = steps(bank, scheme, start, plan.steps, alike=plan.alike)
    (totals,), (predicted,) = found.step_totals, found.log_predicted
    if plan.total_only:
        return [totals.sum(-1, keepdim=True)]
    weights = torch.cat([b.log_weights.reshape(plan.series, -1) for b in found.beliefs], 1)
    message = (
        torch.cat([x.reshape(plan.series, x.shape[1] * M, *x.shape[3:]) for x in part], 1)
        for part in zip(*(b.message for b in found.beliefs), strict=True)
    )
    return [totals, predicted, weights, *message]


def _memory(plan: Plan) -> int | None:
    """k of GPB(k), from the histories that are kept at the end."""
    if plan.joins:
        return 1
    kept, k = plan.histories[-1], 2
    growing = plan.histories[-1] > plan.histories[-2]
    while not growing and plan.modes > 1 and plan.modes ** (k - 2) < kept:
        k += 1
    return None if growing else k


class _LinearModel(NamedTuple):
    modes: int
    state_size: int

    def linearize(self, step: Affine, *rest: Any) -> Affine:
        return step


class _ArrayBank(GaussianBank):
    """The bank of filters over arrays that were taken from another."""

    def __init__(self, plan: Plan, given: Sequence[Tensor]) -> None:
        parts = [OverTime(x, 1 if k in (0, 2, 5) else 2) for k, x in enumerate(given[:7])]
        self._log_transition = parts[0]
        self._parts = {"dynamics": tuple(parts[1:4]), "emission": tuple(parts[4:])}
        self._noise_roots = {}
        self.observations, self.inputs, self.first = given[7], None, 0
        self.dtype, self.model = given[7].dtype, _LinearModel(plan.modes, plan.states)
