"""`fit`: maximum likelihood for switching models (docs/theory.md, T25)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cumulant.core.checks import generator_of, real, whole
from cumulant.core.errors import InputError
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.filtering.checks import series
from cumulant.filtering.em import expectation_maximization, supported
from cumulant.filtering.filters import log_likelihood
from cumulant.filtering.gaussian import inputs_of
from cumulant.filtering.model import SHAPES, gaussian_model
from cumulant.filtering.parameters import Coordinates, coordinates
from cumulant.filtering.recursion import Scheme, bounded, scheme_of

__all__ = ["Fit", "fit"]

# Regimes are told apart by the first of these that is free and differs between modes.
ORDER = (
    *("emission_bias", "dynamics_bias", "emission_noise", "dynamics_noise"),
    *("emission_input", "dynamics", "emission", "dynamics_input"),
)


@dataclass(frozen=True)
class Fit:
    """A fitted model.

    Attributes:
        model: at the maximum, modes in order.
        log_likelihood: of all series together.
        standard_errors: of each free parameter, entries that did not move zero; None if they were
            not asked for or do not exist, and then `message` says why.
        steps: iterations.
        converged: whether the optimizer came to rest.
        message: what happened.
        starts: the log-likelihood that each start reached.
        parameter_count: how many numbers were free.
    """

    model: Any
    log_likelihood: float
    standard_errors: dict[str, Tensor] | None
    steps: int
    converged: bool
    message: str
    starts: tuple[float, ...]
    parameter_count: int
    observation_count: int

    @property
    def aic(self) -> float:
        """Akaike's criterion."""
        return 2 * self.parameter_count - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        """The Bayesian information criterion."""
        return self.parameter_count * math.log(self.observation_count) - 2 * self.log_likelihood


@dataclass(frozen=True)
class _Problem:
    """Observations and how to look at them."""

    observations: Tensor
    inputs: Tensor | None
    scheme: Scheme

    def value(self, model: Any) -> Tensor:
        return log_likelihood(model, self.observations, self.inputs, self.scheme).sum()


@dataclass
class _Best:
    """The best point so far; what is kept if the user interrupts."""

    vector: Tensor
    value: float = -math.inf
    steps: int = 0
    message: str = ""
    converged: bool = False


def fit(
    model: Any,
    observations: Tensor,
    *,
    free: Any = None,
    method: Literal["lbfgs", "em"] = "lbfgs",
    collapse: str | int = "gpb2",
    starts: int = 1,
    spread: float = 0.5,
    seed: int = 0,
    max_steps: int = 200,
    tol: float = 1e-6,
    order_by: Any = None,
    standard_errors: bool = True,
    lengths: Tensor | None = None,
    inputs: Tensor | None = None,
    progress: ProgressCallback | None = None,
) -> Fit:
    """The most likely parameters, by gradients through the filter or by EM.

    Args:
        model: where to start. Parameters without a mode dimension stay shared by the modes.
        observations: ``(*batch, T, p)``, several series of one model; NaN is missing.
        free: names of the parameters to learn, or a dict from names to True, a mask of the entries
            that move, or for covariances ``"diagonal"`` or ``"dense"``. Left out: transition,
            biases, inputs and those noises that are not singular; `dynamics` and `emission` are
            structure unless named. Zeros of `transition` stay zero, diagonal noises diagonal.
        method: ``"lbfgs"``, or ``"em"``: closed steps, robust far from the maximum, slow near it;
            exact where the smoother is, and stopped where its approximation no longer gains.
        collapse: as in `filter`.
        starts: how many starts, the first where the model is, the others beside it.
        spread: how far beside, in unconstrained coordinates (logits, logarithms of scales).
        max_steps: iterations of each start.
        tol: stop where no coordinate changes the mean log-likelihood per observation faster than
            this (EM: where a step gains less).
        order_by: a parameter's name or a function of the model that gives M numbers: modes come
            back in rising order of it. Left out: the first free parameter that differs, unless
            parameters that are not free tell the modes apart. False keeps the order.
        standard_errors: from the inverse Hessian of the log-likelihood, by the delta method.
        lengths, inputs: as in `filter`.
        progress: called after each step; its value is the log-likelihood.

    Returns:
        `Fit`. Interrupted from the keyboard, the best so far, with `converged` false.

    >>> import torch, cumulant as cm
    >>> y = torch.tensor([0.1, -0.2, 0.0, 5.1, 4.9, 5.0, 5.2, 0.1, -0.1, 0.2])[:, None].double()
    >>> model = cm.filtering.SwitchingLinearGaussian(
    ...     transition=torch.full((2, 2), 0.5).double(), initial=torch.tensor([0.5, 0.5]),
    ...     dynamics=torch.zeros(2, 0, 0), dynamics_noise=torch.zeros(2, 0, 0),
    ...     emission=torch.zeros(2, 1, 0), emission_noise=torch.eye(1),
    ...     emission_bias=torch.tensor([[4.0], [1.0]]),
    ...     initial_mean=torch.zeros(0), initial_covariance=torch.zeros(0, 0))
    >>> cm.filtering.fit(model, y, collapse="gpb1").model.emission_bias.flatten()
    tensor([0.0167, 5.0500], dtype=torch.float64)
    """
    with torch.inference_mode(False), torch.enable_grad():
        return _fit(
            model,
            observations,
            free,
            _Plan(method, collapse, starts, spread, seed, max_steps, tol, order_by),
            standard_errors,
            (lengths, inputs),
            progress,
        )


@dataclass(frozen=True)
class _Plan:
    """How to search."""

    method: Any
    collapse: Any
    starts: Any
    spread: Any
    seed: Any
    max_steps: Any
    tol: Any
    order_by: Any


def _fit(
    model: Any,
    observations: Any,
    free: Any,
    plan: _Plan,
    standard_errors: bool,
    more: tuple[Any, Any],
    progress: ProgressCallback | None,
) -> Fit:
    method, order_by, (lengths, inputs) = plan.method, plan.order_by, more
    if method not in ("lbfgs", "em"):
        raise InputError(f"fit: method must be 'lbfgs' or 'em', not {method!r}.")
    gaussian_model("fit", model)
    tol = real("fit", "tol", plan.tol, least=0.0)
    spread = real("fit", "spread", plan.spread, least=0.0)
    starts = whole("fit", "starts", plan.starts, 1)
    max_steps = whole("fit", "max_steps", plan.max_steps, 1)
    if progress is not None and not callable(progress):
        raise InputError(f"fit: progress must be a function, not {progress!r}.")
    y = series("fit", model, observations, lengths)
    y = y.clone() if y.is_inference() else y
    problem = _Problem(
        y, inputs_of("fit", model, inputs, y.shape[-2], y), scheme_of("fit", plan.collapse)
    )
    n, batch = model.state_dimension, y.shape[:-2].numel()
    bounded(problem.scheme, model.modes, batch * model.modes * (n + n * n), y.shape[-2])
    model = model.to(y.dtype)
    model = model.unchecked(
        {name: x.clone() for name, x in model.parameters.items() if x.is_inference()}
    )
    found = coordinates(model, free)
    _order(found, model, order_by)
    if 0 in y.shape:
        raise InputError("fit: there are no series to fit to.")
    begin = found.vector(model)
    generator = generator_of("fit", plan.seed)
    best, reached, run = _Best(begin), list[float](), _Best(begin)
    for s in range(starts):
        beside = torch.randn(begin.shape, generator=generator).to(begin) if s else 0.0
        run = _Best(begin + spread * beside)
        search = _lbfgs if method == "lbfgs" else _em
        search(problem, found, run, max_steps, tol, progress)
        reached.append(run.value)
        if run.value > best.value:
            best = run
        if run.message == INTERRUPTED:
            best.message, best.converged = INTERRUPTED, False
            break
    if not math.isfinite(best.value):
        raise InputError(
            f"fit: no start has a finite log-likelihood ({run.message or 'none was found'}). "
            "Check the model with filter first."
        )
    with torch.no_grad():
        fitted = found.at(best.vector)
        order = _order(found, fitted, order_by)
        fitted = fitted.permute(order)
    errors, message = None, best.message
    if standard_errors:
        errors = _standard_errors(problem, found, fitted, order)
        if errors is not None and not best.converged:
            message += (
                "; the standard errors are taken where the search stopped, short of a maximum"
            )
        if errors is None:
            message += (
                "; no standard errors: the Hessian is not negative definite, so some parameters "
                "are not identified by these data or lie on the edge, as a variance near zero does"
            )
    return Fit(
        model._again({n: x.detach() for n, x in fitted.parameters.items()}),
        best.value,
        errors,
        best.steps,
        best.converged,
        message,
        tuple(reached),
        begin.numel(),
        int((~y.isnan()).sum()),
    )


INTERRUPTED = "interrupted: the best so far"


def _lbfgs(
    problem: _Problem,
    found: Coordinates,
    best: _Best,
    max_steps: int,
    tol: float,
    progress: ProgressCallback | None,
) -> None:
    """torch's L-BFGS on the mean log-likelihood per observation.

    scipy's is as good, but its BLAS threads and torch's get in each other's way: four times slower
    on two cores.
    """
    like, count = best.vector, max(int((~problem.observations.isnan()).sum()), 1)
    point = like.double().clone().requires_grad_()
    search = torch.optim.LBFGS(
        [point],
        max_iter=max_steps,
        max_eval=4 * max_steps,
        tolerance_grad=tol,
        tolerance_change=1e-13,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    steepest = math.inf

    def loss() -> float:
        nonlocal steepest
        if (done := search.state[point].get("n_iter", 0)) > best.steps:
            best.steps = done
            if progress is not None:
                progress(Progress(done, None, "fitting", best.value))
        vector = point.detach().to(like).requires_grad_()
        try:
            value = problem.value(found.at(vector))
            (slope,) = torch.autograd.grad(value, vector)
            size = float(value.detach())
            if not (math.isfinite(size) and bool(slope.isfinite().all())):
                raise InputError("the log-likelihood or its gradient is not finite")
        except InputError as error:  # no density there: a wall for the line search
            best.message = str(error)
            point.grad = torch.zeros_like(point)
            return 1e10
        point.grad = -slope.double() / count
        if size > best.value:
            best.vector, best.value = vector.detach(), size
            steepest = float(point.grad.abs().max())
        return -size / count

    try:
        search.step(loss)
    except KeyboardInterrupt:
        best.message = INTERRUPTED
        return
    best.steps = search.state[point].get("n_iter", 0)
    # Ended by itself with next to no slope, the search ran out of digits, not of slope.
    enough = 1e-5 if like.dtype == torch.float64 else 1e-3
    best.converged = steepest <= (max(tol, enough) if best.steps < max_steps else tol)
    if math.isfinite(best.value):
        rest = "max_steps reached"
        if best.steps < max_steps:
            rest = (
                f"the search found nothing better, with a slope of {steepest:.2g} per observation "
                "left: a variance may go to zero, or digits run out"
            )
        if best.converged:
            rest = "no slope is left to follow"
        best.message = "the gradient is within tol" if steepest <= tol else rest


def _em(
    problem: _Problem,
    found: Coordinates,
    best: _Best,
    max_steps: int,
    tol: float,
    progress: ProgressCallback | None,
) -> None:
    model, count = found.at(best.vector), max(int((~problem.observations.isnan()).sum()), 1)
    names = {b.name: b.mask for b in found.blocks}
    supported(model, names)
    try:
        for _ in range(max_steps):
            with torch.no_grad():
                value, following = expectation_maximization(
                    model, problem.observations, problem.inputs, problem.scheme, names
                )
            gain = value - best.value
            if value > best.value:
                best.vector, best.value = found.vector(model), value
            if gain <= tol * count:
                best.converged = gain >= 0
                best.message = "a step gained less than tol"
                if gain < 0:
                    best.message = "stopped: a step lost, as the smoother is an approximation"
                return
            model = following
            best.steps += 1
            if progress is not None:
                progress(Progress(best.steps, None, "fitting", best.value))
        best.message = "max_steps reached"
    except KeyboardInterrupt:
        best.message = INTERRUPTED
    except (InputError, torch.linalg.LinAlgError):
        best.message = "stopped: a variance goes to zero, or a mode is never visited"


def _order(found: Coordinates, model: Any, order_by: Any) -> list[int]:
    """Which mode comes first, second, ..."""
    as_is = list(range(model.modes))
    if order_by is False or model.modes == 1:
        return as_is
    if order_by is None:
        order_by = _telling(found, model)
        if order_by is None:
            return as_is
    if callable(order_by):
        key: Any = order_by(model)
    elif isinstance(order_by, str) and order_by in SHAPES and order_by in model.parameters:
        key = _size(model, order_by)
    else:
        raise InputError(
            f"fit: order_by must be a function of the model, False, or one of "
            f"{', '.join(n for n in SHAPES if n in model.parameters)}, not {order_by!r}."
        )
    try:
        key = torch.as_tensor(key)
    except (TypeError, ValueError, RuntimeError):
        key = torch.zeros(())
    if key.shape != (model.modes,):
        raise InputError(
            f"fit: order_by must give one number for each of the {model.modes} modes; it gave "
            f"shape {tuple(key.shape)}."
        )
    return key.argsort(stable=True).tolist()


def _size(model: Any, name: str) -> Tensor:
    """A number for each mode: the trace of a matrix, the sum of a vector."""
    x = model.steps_of(name) if name in model.parameters else None
    if x is None:
        raise InputError(f"fit: the model has no {name} to order its modes by.")
    x = x.diagonal(dim1=-2, dim2=-1).sum(-1) if len(SHAPES[name]) == 2 else x.sum(-1)
    return x.reshape(-1, model.modes).mean(0)


def _telling(found: Coordinates, model: Any) -> str | None:
    """The parameter that tells the modes apart, if the fixed ones do not."""
    if getattr(model, "functions", None):
        return None
    free = {b.name for b in found.blocks}
    for name in SHAPES:
        x = model.parameters.get(name)
        if name in free or x is None or x.ndim == len(SHAPES[name]):
            continue
        modes = x.movedim(-len(SHAPES[name]) - 1, 0)
        if not bool((modes == modes[:1]).all()):
            return None
    for name in ORDER:
        if name in free and model.parameters[name].ndim > len(SHAPES[name]):
            return name
    return None


def _standard_errors(
    problem: _Problem, found: Coordinates, model: Any, order: list[int]
) -> dict[str, Tensor] | None:
    """Square roots of the diagonal of J H^-1 J', J from coordinates to parameters."""
    try:
        found = found.moved(model, order)
        vector = found.vector(model).requires_grad_()
    except (InputError, torch.linalg.LinAlgError):  # a covariance has become singular
        return None
    (slope,) = torch.autograd.grad(problem.value(found.at(vector)), vector, create_graph=True)
    rows = [torch.autograd.grad(s, vector, retain_graph=True)[0] for s in slope]
    information = -torch.stack(rows)
    information = (information + information.mT) / 2
    root, info = torch.linalg.cholesky_ex(information)
    if int(info) != 0 or not bool(information.isfinite().all()):
        return None
    out: dict[str, Tensor] = {}
    at = found.values(vector.detach())
    for name, value in at.items():

        def entries(v: Tensor, name: str = name) -> Tensor:
            return found.values(v)[name].reshape(-1)

        jacobian: Any = torch.autograd.functional.jacobian(entries, vector.detach())
        white = torch.linalg.solve_triangular(root, jacobian.mT, upper=False)
        out[name] = white.square().sum(-2).sqrt().reshape(value.shape)
    return out
