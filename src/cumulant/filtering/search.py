"""Two searches for the most likely parameters: quasi-Newton steps, and EM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.outcome import Code
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.core.typed import functions, linalg
from cumulant.filtering.em import expectation_maximization, supported
from cumulant.filtering.model import COVARIANCES
from cumulant.filtering.objective import Array, Problem, objective_of
from cumulant.filtering.quasi_newton import minimize

__all__ = ["Limits", "Point", "em", "lbfgs"]


@dataclass(frozen=True)
class Limits:
    """When a search ends, and whom it tells about each step."""

    max_steps: int
    tol: float
    progress: ProgressCallback | None = None


@dataclass
class Point:
    """The best point of a search so far, and how the search ended; kept on an interrupt."""

    vector: Tensor
    value: float = -math.inf
    steps: int = 0
    code: Code = Code.UNFINISHED
    message: str = "max_steps reached"
    told: int = 0

    def ended(self, code: Code, message: str) -> None:
        """Record the end of the search."""
        self.code, self.message = code, message


INTERRUPTED = "interrupted: this is the best so far"
# A variance below this share of where it started has vanished.
VANISHED = 1e-10


def lbfgs(problem: Problem, starts: Sequence[Point], limits: Limits) -> None:
    """Quasi-Newton steps on the mean log-likelihood per observation, all starts side by side."""
    count, evaluate = max(problem.count, 1), objective_of(problem)
    climbs = [_Climb(point, limits) for point in starts]
    try:
        while active := [c for c in climbs if c.asks is not None]:
            asked = [cast(Array, c.asks) for c in active]
            values, slopes = evaluate(np.concatenate(asked))
            at = 0
            for climb, points in zip(active, asked, strict=True):
                part = slice(at, at := at + len(points))
                climb.told(values[part], slopes[part], count)
            _report(climbs, limits.progress)
    except KeyboardInterrupt:
        for climb in climbs:
            climb.best.ended(Code.INTERRUPTED, INTERRUPTED)
        return
    for climb in climbs:
        climb.close(limits)
        if climb.best.code != Code.CONVERGED and (name := _vanishing(problem, climb.best)):
            climb.best.ended(
                Code.STALLED,
                f"{name} goes to zero and the likelihood grows without bound, as where a mode "
                "explains a few observations exactly: keep it fixed, or share it between modes",
            )


def _vanishing(problem: Problem, best: Point) -> str | None:
    """The name of a variance that has all but vanished on the way."""
    for name, x in problem.coordinates.values(best.vector).items():
        if name in COVARIANCES:
            before = problem.coordinates.model.parameters[name].diagonal(dim1=-2, dim2=-1)
            if bool((x.diagonal(dim1=-2, dim2=-1) < VANISHED * before).any()):
                return name
    return None


class _Climb:
    """One search, and the best point it has seen."""

    def __init__(self, best: Point, limits: Limits) -> None:
        self.best, self.like = best, best.vector
        self.steps = [0]
        start = best.vector.double().cpu().numpy()
        self._search = minimize(start, limits.tol, limits.max_steps, self.steps)
        self.asks: Array | None = next(self._search)
        self.steepest = math.inf

    def told(self, values: Array, slopes: Array, count: int) -> None:
        """Log-likelihoods and slopes at the points asked for; the first is the search's own."""
        value, slope = float(values[0]), slopes[0]
        if not (math.isfinite(value) and math.isfinite(float(slope @ slope))):
            self.best.ended(Code.NOT_FINITE, "the log-likelihood or its gradient is not finite")
            values[0] = -math.inf
        elif value > self.best.value:
            self.best.vector = functions.from_numpy(cast(Array, self.asks)[0]).to(self.like)
            self.best.value = value
            self.steepest = float(abs(slope).max()) / count
        try:
            self.asks = self._search.send((-values / count, -slopes / count))
        except StopIteration:
            self.asks = None
        self.best.steps = self.steps[0]

    def close(self, limits: Limits) -> None:
        """How it ended."""
        if math.isfinite(self.best.value):
            by_itself = self.best.steps < limits.max_steps
            self.best.ended(*_verdict(self.steepest, self.like.dtype, by_itself, limits.tol))


def _report(climbs: Sequence[_Climb], progress: ProgressCallback | None) -> None:
    """One call for each step of the search that is furthest."""
    done = max(c.best.steps for c in climbs)
    told = max(c.best.told for c in climbs)
    if progress is not None and done > told:
        for c in climbs:
            c.best.told = done
        progress(Progress(done, None, "fitting", max(c.best.value for c in climbs)))


def _verdict(steepest: float, dtype: torch.dtype, by_itself: bool, tol: float) -> tuple[Code, str]:
    """How the search ended, from the largest slope per observation that is left."""
    if steepest <= tol:
        return Code.CONVERGED, "the gradient is within tol"
    if not by_itself:
        return Code.UNFINISHED, "max_steps reached"
    # A search that stops by itself with next to no slope ran out of digits, not of slope.
    if steepest <= (1e-5 if dtype == torch.float64 else 1e-3):
        return Code.CONVERGED, "the gradient is zero up to rounding"
    return Code.STALLED, (
        f"the line search found nothing better, although a slope of {steepest:.2g} per observation "
        "is left: a variance may be going to zero, or precision has run out"
    )


def em(problem: Problem, starts: Sequence[Point], limits: Limits) -> None:
    """Expectation-maximization from one start after another."""
    for best in starts:
        _em(problem, best, limits)
        if best.code == Code.INTERRUPTED:
            return


def _em(problem: Problem, best: Point, limits: Limits) -> None:
    """Step by step, until a step gains less than the tolerance."""
    found = problem.coordinates
    model, least = found.at(best.vector), limits.tol * max(problem.count, 1)
    names = {b.name: b.mask for b in found.blocks}
    supported(model, names)
    try:
        for _ in range(limits.max_steps):
            with torch.no_grad():
                value, following = expectation_maximization(
                    model, problem.observations, problem.inputs, problem.scheme, names
                )
            gain = value - best.value
            if gain > 0:
                best.vector, best.value = found.vector(model), value
            if gain < 0:
                said = "the last step lost likelihood, because the smoother is an approximation"
                best.ended(Code.STALLED, said)
                return
            if gain <= least:
                best.ended(Code.CONVERGED, "the last step gained less than tol")
                return
            model = following
            best.steps += 1
            if limits.progress is not None:
                limits.progress(Progress(best.steps, None, "fitting", best.value))
    except KeyboardInterrupt:
        best.ended(Code.INTERRUPTED, INTERRUPTED)
    except (InputError, linalg.LinAlgError):
        best.ended(Code.NOT_FINITE, "a variance goes to zero, or a mode is never visited")
