"""Two searches for the most likely parameters: L-BFGS through the filter, and EM."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.outcome import Code
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.core.typed import linalg, take_step
from cumulant.filtering.em import expectation_maximization, supported
from cumulant.filtering.filters import log_likelihood
from cumulant.filtering.model import SwitchingLinearGaussian
from cumulant.filtering.parameters import Coordinates
from cumulant.filtering.recursion import Scheme

__all__ = ["Limits", "Point", "Problem", "em", "lbfgs"]


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
        """The log-likelihood at these coordinates."""
        return self.of(self.coordinates.at(vector))

    def of(self, model: SwitchingLinearGaussian) -> Tensor:
        """The log-likelihood of a model."""
        total = log_likelihood(model, self.observations, self.inputs, self.scheme).sum()
        if not self.given:
            return total
        y = self.observations[..., : self.given, :]
        u = None if self.inputs is None else self.inputs[..., : self.given, :]
        return total - log_likelihood(model, y, u, self.scheme).sum()

    @property
    def count(self) -> int:
        """How many numbers were observed after those that are given."""
        return int((~self.observations[..., self.given :, :].isnan()).sum())


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

    def ended(self, code: Code, message: str) -> None:
        """Record the end of the search."""
        self.code, self.message = code, message


INTERRUPTED = "interrupted: this is the best so far"


def lbfgs(problem: Problem, best: Point, limits: Limits) -> None:
    """torch's L-BFGS on the mean log-likelihood per observation.

    scipy's is as good, but its BLAS threads and torch's get in each other's way: four times slower
    on two cores.
    """
    like, count = best.vector, max(problem.count, 1)
    point = like.double().clone().requires_grad_()
    search = torch.optim.LBFGS(
        [point],
        max_iter=limits.max_steps,
        max_eval=4 * limits.max_steps,
        tolerance_grad=limits.tol,
        tolerance_change=1e-13,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    steepest = math.inf

    def loss() -> float:
        nonlocal steepest
        if (done := search.state[point].get("n_iter", 0)) > best.steps:
            best.steps = done
            if limits.progress is not None:
                limits.progress(Progress(done, None, "fitting", best.value))
        vector = point.detach().to(like).requires_grad_()
        try:
            value = problem.at(vector)
            (slope,) = torch.autograd.grad(value, vector)
            size = float(value.detach())
            if not (math.isfinite(size) and bool(slope.isfinite().all())):
                raise InputError("the log-likelihood or its gradient is not finite")
        except InputError as error:  # no density there: a wall for the line search
            best.ended(Code.NOT_FINITE, str(error))
            point.grad = torch.zeros_like(point)
            return 1e10
        point.grad = -slope.double() / count
        if size > best.value:
            best.vector, best.value = vector.detach(), size
            steepest = float(point.grad.abs().max())
        return -size / count

    try:
        take_step(search, loss)
    except KeyboardInterrupt:
        best.ended(Code.INTERRUPTED, INTERRUPTED)
        return
    best.steps = search.state[point].get("n_iter", 0)
    if math.isfinite(best.value):
        best.ended(*_verdict(steepest, like.dtype, best.steps < limits.max_steps, limits.tol))


def _verdict(steepest: float, dtype: torch.dtype, by_itself: bool, tol: float) -> tuple[Code, str]:
    """How L-BFGS ended, from the largest slope per observation that is left."""
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


def em(problem: Problem, best: Point, limits: Limits) -> None:
    """Expectation-maximization, step by step, until a step gains less than the tolerance."""
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
