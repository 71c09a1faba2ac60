"""What `fit` climbs: the log-likelihood and its slope at many points at once.

Points are rows of free coordinates ``(S, P)``: several starts of a search. Where the compiled
recursion runs, the way from coordinates to its arrays and the slope back are a few lines of numpy,
since autograd over a handful of 2 x 2 matrices would take longer than the filter. Without it,
models of modes alone have their gradient from numpy too (`modes_gradient`); with a state, all
points and their neighbors are filtered as one batch, and slopes are central differences. What none
of these takes goes through autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import functions
from cumulant.filtering import modes_gradient
from cumulant.filtering.compiled import as_arrays, problem_of, takes
from cumulant.filtering.filters import log_likelihood
from cumulant.filtering.kalman import GaussianBank
from cumulant.filtering.model import COVARIANCES, SHAPES
from cumulant.filtering.modes import stateless
from cumulant.filtering.native import calls
from cumulant.filtering.native.calls import GIVEN, Plan
from cumulant.filtering.parameters import PROBABILITIES, Block, Coordinates
from cumulant.filtering.recursion import Scheme
from cumulant.filtering.scales import ScaleBlock

__all__ = ["Array", "Evaluation", "Objective", "Problem", "hessian", "objective_of"]

Array = NDArray[np.float64]

WHICH, PARTS = ("dynamics", "emission"), ("bias", "input")
LOG_ZERO = -1e-8 * float(np.finfo(np.float64).max)  # as in `kalman.log_probability`

# Relative steps of differences, where rounding and what is left out weigh the same.
STEP = 6e-6
SLOPE_STEP = 1e-4
SECOND_STEP = 2e-3
# A batch of differences is quicker than a tape up to so many coordinates.
MOST_DIFFERENCES = 40


class Evaluation(NamedTuple):
    """Log-likelihoods ``(S,)`` and slopes ``(S, P)``; NaN where there is no density."""

    values: Array
    slopes: Array


class Objective(Protocol):
    """The log-likelihood as a function of many points."""

    def __call__(self, points: Array) -> Evaluation: ...


@dataclass(frozen=True)
class Problem:
    """What is maximized: the log-likelihood of all series in the free coordinates of a model.

    The first `given` steps are taken as given: log p(y_1, ..., y_T) - log p(y_1, ..., y_given).
    """

    observations: Tensor
    inputs: Tensor | None
    scheme: Scheme
    coordinates: Coordinates
    given: int = 0

    def at(self, vector: Tensor) -> Tensor:
        """The log-likelihood at these coordinates ``(*points, P)``, of all series together."""
        model = self.coordinates.at(vector, self.observations.ndim - 2)
        alike = self.coordinates.alike if vector.ndim > 1 else None
        y, u = self.observations, self.inputs
        each = log_likelihood(model, y, u, self.scheme, alike=alike)
        if self.given:
            y, u = y[..., : self.given, :], None if u is None else u[..., : self.given, :]
            each = each - log_likelihood(model, y, u, self.scheme, alike=alike)
        return each.reshape(*vector.shape[:-1], -1).sum(-1)

    @property
    def count(self) -> int:
        """How many numbers were observed after those that are given."""
        return int((~self.observations[..., self.given :, :].isnan()).sum())


def objective_of(problem: Problem) -> Objective:
    """The quickest way to values and slopes that takes the problem."""
    found = _Arrays.of(problem)
    if found is not None:
        return found
    return _differences(problem) if _batches(problem) else _by_autograd(problem)


def _as_batch(problem: Problem) -> bool:
    """Whether many points are one batch of models."""
    found = problem.coordinates
    return found.constant and not getattr(found.model, "functions", None)


def _batches(problem: Problem) -> bool:
    """Whether differences over a batch are quicker than the tape: many steps, few coordinates."""
    model, size = problem.coordinates.model, sum(b.size for b in problem.coordinates.blocks)
    steps = model.state_size > 0 and model.dtype == torch.float64
    return steps and _as_batch(problem) and size <= MOST_DIFFERENCES


def hessian(problem: Problem, vector: Tensor) -> Tensor:
    """Second derivatives of the log-likelihood, ``(P, P)``.

    Exact with the compiled recursion. Without it they are differences: of slopes, to about eight
    digits, for models of modes alone, and of values, to about six, for batches of models.
    """
    arrays = _Arrays.of(problem)
    if arrays is None and _batches(problem):
        return _second_differences(problem, vector)
    if arrays is not None and arrays.gradient is modes_gradient.gradient:
        return _differences_of_slopes(arrays, vector)
    P = len(vector)
    if _as_batch(problem):
        # Each of P copies is differentiated once more along its own coordinate.
        copies = vector.detach().repeat(P, 1).requires_grad_()
        (slopes,) = torch.autograd.grad(problem.at(copies).sum(), copies, create_graph=True)
        (rows,) = torch.autograd.grad(slopes.diagonal().sum(), copies)
        return rows
    at = vector.detach().requires_grad_()
    (slope,) = torch.autograd.grad(problem.at(at), at, create_graph=True)
    return torch.stack([torch.autograd.grad(s, at, retain_graph=True)[0] for s in slope])


def _second_differences(problem: Problem, vector: Tensor) -> Tensor:
    """From the values at x, x +- e_i and x +- (e_i + e_j), as one batch."""
    P = len(vector)
    steps = torch.diag(SECOND_STEP * vector.abs().clamp_min(1.0))
    pairs = torch.combinations(torch.arange(P), 2)
    beside = torch.cat([steps, steps[pairs[:, 0]] + steps[pairs[:, 1]]])
    with torch.no_grad():
        values = problem.at(torch.cat([vector[None], vector + beside, vector - beside]))
    both = values[1 : len(beside) + 1] + values[len(beside) + 1 :] - 2 * values[0]
    out = torch.diag(both[:P])
    mixed = (both[P:] - both[pairs[:, 0]] - both[pairs[:, 1]]) / 2
    out[pairs[:, 0], pairs[:, 1]] = out[pairs[:, 1], pairs[:, 0]] = mixed
    size = steps.diagonal()
    return out / size[:, None] / size


def _differences_of_slopes(objective: Objective, vector: Tensor) -> Tensor:
    """From the slopes at x +- e_i, as one batch."""
    at, P = vector.detach().numpy(), len(vector)
    sizes = SLOPE_STEP * np.maximum(np.abs(at), 1.0)
    slopes = objective(np.concatenate([at + np.diag(sizes), at - np.diag(sizes)])).slopes
    rows = (slopes[:P] - slopes[P:]) / (2 * sizes[:, None])
    return functions.from_numpy((rows + rows.T) / 2)


def _by_autograd(problem: Problem) -> Objective:
    """By the tape: all points as one batch of models where that is possible, else one by one."""
    like = problem.coordinates.model.parameters["transition"]

    def at(points: Array) -> Evaluation:
        vectors = functions.from_numpy(points).to(like).requires_grad_()
        values = problem.at(vectors if len(points) > 1 else vectors[0]).reshape(-1)
        (slopes,) = torch.autograd.grad(values.sum(), vectors)
        return Evaluation(values.detach().double().numpy(), slopes.double().numpy())

    def evaluate(points: Array) -> Evaluation:
        if len(points) == 1 or _as_batch(problem):
            try:
                return at(points)
            except InputError:  # no density at some point
                if len(points) == 1:
                    return Evaluation(np.full(1, np.nan), np.full_like(points, np.nan))
        each = [evaluate(p[None]) for p in points]
        return Evaluation(*(np.concatenate(x) for x in zip(*each, strict=True)))

    return evaluate


def _differences(problem: Problem) -> Objective:
    """All points and their neighbors in each coordinate, as one batch of models."""

    def evaluate(points: Array) -> Evaluation:
        P = points.shape[-1]
        steps = STEP * np.maximum(np.abs(points), 1.0)
        beside = steps[:, None, :] * np.eye(P)
        all_points = np.concatenate(
            [points[:, None], points[:, None] + beside, points[:, None] - beside], 1
        )
        with torch.no_grad():
            flat = functions.from_numpy(all_points.reshape(-1, P))
            try:
                values = problem.at(flat).double().numpy().reshape(len(points), -1)
            except InputError:  # some point has no density: by itself, then
                if len(points) == 1:
                    return Evaluation(np.full(1, np.nan), np.full_like(points, np.nan))
                each = [evaluate(p[None]) for p in points]
                return Evaluation(*(np.concatenate(x) for x in zip(*each, strict=True)))
        slopes = (values[:, 1 : P + 1] - values[:, P + 1 :]) / (2 * steps)
        return Evaluation(values[:, 0], slopes)

    return evaluate


class _Piece(NamedTuple):
    """A free block: where its coordinates are, and how it makes a parameter and takes a slope.

    `value` maps coordinates ``(S, size)`` to ``(S, *shape)``; `back` maps the coordinates, that
    value and its slope to a slope in the coordinates.
    """

    block: Block | ScaleBlock
    at: slice
    value: Callable[[Array], Array]
    back: Callable[[Array, Array, Array], Array]


def _scale_piece(block: ScaleBlock, at: slice) -> _Piece:
    start, groups = block.start.numpy(), block.groups.numpy()
    count = int(groups.max()) + 1
    members = (groups[:, None] == np.arange(count)).astype(np.float64)

    def value(x: Array) -> Array:
        logs = x.reshape(len(x), *start.shape[:-2], count)
        held = np.concatenate([logs, np.zeros_like(logs[..., :1])], -1)  # group -1 is the last
        scale = np.exp(held[..., groups])
        return start * scale[..., :, None] * scale[..., None, :]

    def back(x: Array, value: Array, bar: Array) -> Array:
        by_element = ((bar + bar.swapaxes(-1, -2)) * value).sum(-1)
        return (by_element @ members).reshape(len(x), -1)

    return _Piece(block, at, value, back)


def _piece(block: Block | ScaleBlock, at: slice) -> _Piece:
    if isinstance(block, ScaleBlock):
        return _scale_piece(block, at)
    start, chosen = block.start.double().numpy(), np.flatnonzero(block.mask.numpy())
    shape: tuple[int, ...] = start.shape

    def scattered(x: Array, base: Array) -> Array:
        out = np.empty((len(x), base.size))
        out[:] = base.ravel()
        out[:, chosen] = x
        return out.reshape(len(x), *shape)

    def taken(x: Array) -> Array:
        return x.reshape(len(x), -1)[:, chosen]

    zeros = np.zeros_like(start)
    if block.name in PROBABILITIES:
        possible = start > 0

        def probabilities(x: Array) -> Array:
            logits = scattered(x, zeros)
            weights = np.exp(logits - logits.max(-1, keepdims=True)) * possible
            return weights / weights.sum(-1, keepdims=True)

        def back(x: Array, p: Array, bar: Array) -> Array:
            return taken(p * (bar - (p * bar).sum(-1, keepdims=True)))

        return _Piece(block, at, probabilities, back)
    if block.name in COVARIANCES:
        diagonal = np.arange(shape[-1])

        def root(x: Array) -> Array:
            out = scattered(x, zeros)
            out[..., diagonal, diagonal] = np.exp(out[..., diagonal, diagonal])
            return out

        def square(x: Array) -> Array:
            L = root(x)
            return L @ L.swapaxes(-1, -2)

        def square_back(x: Array, value: Array, bar: Array) -> Array:
            L = root(x)
            slope = (bar + bar.swapaxes(-1, -2)) @ L
            slope[..., diagonal, diagonal] *= L[..., diagonal, diagonal]
            return taken(slope)

        return _Piece(block, at, square, square_back)

    def plain(x: Array) -> Array:
        return scattered(x, start)

    def plain_back(x: Array, value: Array, bar: Array) -> Array:
        return taken(bar)

    return _Piece(block, at, plain, plain_back)


# Which array of the compiled recursion a parameter enters.
ENTERS = {
    **{name: k for k, name in enumerate(GIVEN)},
    **{f"{which}_{part}": GIVEN.index(f"{which}_offset") for which in WHICH for part in PARTS},
    "initial": GIVEN.index("log_weights"),
    "initial_mean": GIVEN.index("means"),
    "initial_covariance": GIVEN.index("covariances"),
}


_Found = tuple[Tensor, Tensor, list[Tensor | None]]


class _Arrays:
    """Coordinates to the arrays of the compiled recursion, and slopes back.

    `gradient` is `calls.gradient`, or the one of `modes_gradient` that stands in for it.
    """

    def __init__(
        self, problem: Problem, plan: Plan, given: list[Array], gradient: Callable[..., _Found]
    ) -> None:
        self.plan, self.given, self.slowly = plan, given, _by_autograd(problem)
        self.gradient = gradient
        self.model, self.first = problem.coordinates.model, problem.given
        self.pieces: dict[str, _Piece] = {}
        at = 0
        for block in problem.coordinates.blocks:
            self.pieces[block.name] = _piece(block, slice(at, at + block.size))
            at += block.size
        u = problem.inputs
        self.inputs = np.zeros((0, 0)) if u is None else u.double().numpy()
        self._kept: dict[int, tuple[Plan, list[Tensor], Tensor]] = {}
        self.stationary = "initial" not in self.model.parameters and "transition" in self.pieces

    @classmethod
    def of(cls, problem: Problem) -> _Arrays | None:
        """None where neither gradient is to be had, or a free parameter is not a constant."""
        model, u = problem.coordinates.model, problem.inputs
        if not problem.coordinates.constant or model.dtype != torch.float64 or model.diffuse:
            return None
        if u is not None and (u.ndim > 2 or not _plain_inputs(model)):
            return None
        with torch.no_grad():
            bank = GaussianBank(model, problem.observations, u)
            belief, alike = bank.start()
            total_only = problem.given == 0
            if takes(bank, belief):
                gradient = calls.gradient
            elif stateless(bank) and total_only and as_arrays(bank, belief):
                gradient = modes_gradient.gradient
            else:
                return None
            plan, given, _ = problem_of(bank, problem.scheme, belief, alike, total_only=total_only)
        return cls(problem, plan, [x.numpy() for x in given], gradient)

    def __call__(self, points: Array) -> Evaluation:
        S, B = len(points), self.plan.series
        with np.errstate(all="ignore"):
            values = {name: piece.value(points[:, piece.at]) for name, piece in self.pieces.items()}
            law = _stationary(values["transition"]) if self.stationary else None
            arrays = self._arrays(values, law)
            plan, tensors, seeds = self._tiled(S)
            tensors, wanted = list(tensors), [k in arrays for k in range(len(GIVEN))]
            for k, x in arrays.items():
                x = np.ascontiguousarray(x if B == 1 else np.repeat(x, B, 0))
                tensors[k] = functions.from_numpy(x)
            totals, digits, to = self.gradient(plan, tensors, [seeds], wanted)
            bars = {k: self._summed(to[k], S) for k in arrays}
            slopes = np.empty_like(points)
            for name, piece in self.pieces.items():
                bar = self._bar(name, values[name], bars, law)
                slopes[:, piece.at] = piece.back(points[:, piece.at], values[name], bar)
        found = (totals * seeds).numpy().reshape(S, -1).sum(-1)
        good = digits.numpy().reshape(S, B).all(-1) & np.isfinite(found)
        for k in np.flatnonzero(~good):  # by roots of covariances, if at all
            (found[k],), (slopes[k],) = self.slowly(points[k : k + 1])
        return Evaluation(found, slopes)

    def _tiled(self, S: int) -> tuple[Plan, list[Tensor], Tensor]:
        """The plan, what is given and seeds for S points; kept, since it is asked for often."""
        if S not in self._kept:
            B = self.plan.series
            each = [x if len(x) == 1 or S == 1 else np.concatenate([x] * S) for x in self.given]
            plan = replace(self.plan, series=S * B)
            seeds = torch.ones(S * B, 1 if plan.total_only else plan.steps, dtype=torch.float64)
            seeds[:, : self.first] = 0.0  # steps that are given
            self._kept[S] = plan, [functions.from_numpy(x) for x in each], seeds
        return self._kept[S]

    def _summed(self, x: Tensor | None, S: int) -> Array:
        """A slope by series, summed over the series of each point."""
        found = cast(Tensor, x).numpy()
        if self.plan.series == 1:
            return found
        return found.reshape(S, self.plan.series, *found.shape[1:]).sum(1)

    def _arrays(self, values: dict[str, Array], law: _Law | None) -> dict[int, Array]:
        """The arrays that free parameters change: ``(S, steps or 1, M, ...)``, or the start's."""
        out: dict[int, Array] = {}
        for name, x in values.items():
            k = ENTERS[name]
            if GIVEN[k].endswith("offset"):
                out[k] = self._offset(GIVEN[k].removesuffix("_offset"), values)
            elif name in PROBABILITIES:
                out[k] = np.where(x > 0, np.log(x), LOG_ZERO)[:, None]
            else:
                out[k] = self._modes(x, len(SHAPES[name]))[:, None]
        if law is not None:
            out[ENTERS["initial"]] = np.log(law.law)[:, None]
        return out

    def _modes(self, x: Array, event: int) -> Array:
        """``(S, M, ...)``; one that all modes share is repeated."""
        return x if x.ndim == event + 2 else np.repeat(x[:, None], self.plan.modes, 1)

    def _offset(self, which: str, values: dict[str, Array]) -> Array:
        """b + B u, ``(S, steps or 1, M, ...)``."""
        total = np.zeros(())
        for name, event in ((f"{which}_bias", 1), (f"{which}_input", 2)):
            fixed = self.model.parameters.get(name)
            if name in values or fixed is not None:
                x = values[name] if name in values else cast(Tensor, fixed).numpy()[None]
                x = self._modes(x, event)
                by_step = (x @ self.inputs.T).transpose(0, 3, 1, 2) if event == 2 else x[:, None]
                total = total + by_step
        return total

    def _bar(self, name: str, value: Array, bars: dict[int, Array], law: _Law | None) -> Array:
        """The slope in a parameter, from those in the arrays."""
        bar = bars[ENTERS[name]]
        if name in PROBABILITIES:
            bar = bar[:, 0] / np.where(value > 0, value, np.inf)
            if name == "transition" and law is not None:
                pulled = law.inverse @ (bars[ENTERS["initial"]][:, 0] / law.law)[..., None]
                bar = bar + law.law[..., None] * pulled.swapaxes(-1, -2)
            return bar
        by_input = name.endswith("_input")
        bar = bar.transpose(0, 2, 3, 1) @ self.inputs if by_input else bar.sum(1)
        return bar if bar.ndim == value.ndim else bar.sum(1)


def _plain_inputs(model: Any) -> bool:
    """Whether what is added to inputs' effects is the same at all steps and for all series."""
    names = [f"{which}_{part}" for which in WHICH for part in PARTS]
    held = {name: model.parameters.get(name) for name in names}
    return all(x is None or x.ndim <= len(SHAPES[name]) + 1 for name, x in held.items())


class _Law(NamedTuple):
    """The stationary law pi = 1' Z of a transition T, and Z = (I - T + 1 1')^-1: dpi = pi dT Z."""

    law: Array
    inverse: Array


def _stationary(transition: Array) -> _Law:
    """NaN where pi is not unique."""
    system = np.eye(transition.shape[-1]) - transition + 1
    try:
        inverse = cast(Array, np.linalg.inv(system))
    except np.linalg.LinAlgError:
        inverse = np.full_like(system, np.nan)
    return _Law(inverse.sum(-2), inverse)
