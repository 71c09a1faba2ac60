"""`fit`: maximum likelihood for switching models (docs/theory.md, T25)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from cumulant.core.checks import real, whole
from cumulant.core.errors import InputError
from cumulant.core.outcome import Code, Outcome
from cumulant.core.progress import ProgressCallback
from cumulant.core.randomness import generator_or
from cumulant.core.renamed import renamed
from cumulant.core.typed import functional, linalg
from cumulant.filtering.evidence import Evidence, FitReport, steps_given
from cumulant.filtering.frames import PandasLike, labels_of, parameter_frame
from cumulant.filtering.kalman import inputs_of
from cumulant.filtering.model import SwitchingLinearGaussian, gaussian_model
from cumulant.filtering.model_checks import series
from cumulant.filtering.objective import Problem, hessian
from cumulant.filtering.parameters import Free, coordinates
from cumulant.filtering.recursion import bounded, scheme_of
from cumulant.filtering.regimes import OrderBy, exchangeable, matched, rising, sorted_by
from cumulant.filtering.search import Limits, Point, em, lbfgs
from cumulant.filtering.structure import started

if TYPE_CHECKING:
    from cumulant.filtering.frames import DataFrame

__all__ = ["Fit", "fit"]

SEARCHES = {"lbfgs": lbfgs, "em": em}


@dataclass(frozen=True)
class Fit(FitReport):
    """A fitted model, and the series it was fitted to.

    Attributes:
        model: the model at the maximum.
        order: ``order[k]`` is the mode of the given model that mode k of the fitted one stands for,
            so a list of names follows as ``[names[i] for i in found.order]``.
        log_likelihood: of all series together.
        standard_errors: of each free parameter, zero for entries that did not move. None if they
            were not asked for or do not exist; `message` then says why.
        steps: iterations of the best start.
        status: how its search ended, as a diagnosis; ``found.converged`` for short.
        message: the same with this fit's own figures, and what became of the order of the modes.
        starts: the log-likelihood that each start reached.
        parameter_count: how many numbers were free.
        observation_count: how many numbers were observed.
        free: names of the free parameters.
        evidence: the observations and how they were filtered; ``found.posterior`` and
            ``found.smoothed`` are what the fitted model says about them.
    """

    model: SwitchingLinearGaussian
    order: tuple[int, ...]
    log_likelihood: float
    standard_errors: dict[str, Tensor] | None
    steps: int
    status: Outcome
    message: str
    starts: tuple[float, ...]
    parameter_count: int
    observation_count: int
    free: tuple[str, ...]
    evidence: Evidence

    def __repr__(self) -> str:
        kind = str(self.status).split(":")[0]
        return (
            f"Fit({self.model!r}, log_likelihood={self.log_likelihood:.6g}, "
            f"{self.parameter_count} parameters, {self.observation_count} observations, {kind})"
        )

    def _repr_html_(self) -> str:
        from cumulant.filtering.display import fit_html

        return fit_html(self)

    @property
    def converged(self) -> bool:
        """Whether the search reached a maximum."""
        return bool(self.status.converged)

    @property
    def agreed(self) -> int:
        """How many starts reached this maximum, up to 0.001 of the log-likelihood.

        One of many says that there may be a better one still.
        """
        return sum(value >= self.log_likelihood - 1e-3 for value in self.starts)

    @property
    def aic(self) -> float:
        """Akaike's criterion."""
        return 2 * self.parameter_count - 2 * self.log_likelihood

    @property
    def bic(self) -> float:
        """The Bayesian information criterion."""
        return self.parameter_count * math.log(self.observation_count) - 2 * self.log_likelihood

    def to_pandas(self) -> DataFrame:
        """Estimates and standard errors of the free parameters as a data frame.

        Rows are (parameter, entry), the entry as in ``model.parameters[parameter][entry]``.
        """
        free = {name: self.model.parameters[name].detach() for name in self.free}
        return parameter_frame(free, self.standard_errors)


@renamed(seed="generator")
def fit(
    model: SwitchingLinearGaussian,
    observations: Tensor | PandasLike,
    *,
    free: Free = None,
    method: Literal["lbfgs", "em"] = "lbfgs",
    collapse: str | int = "gpb2",
    starts: int = 1,
    spread: float = 0.5,
    generator: torch.Generator | None = None,
    max_steps: int = 200,
    tol: float = 1e-6,
    order_by: OrderBy = None,
    standard_errors: bool = True,
    lengths: Tensor | None = None,
    inputs: Tensor | None = None,
    progress: ProgressCallback | None = None,
    throw: bool = True,
) -> Fit:
    """The most likely parameters, by gradients through the filter or by EM.

    Args:
        model: where to start. Parameters without a mode dimension stay shared by the modes.
        observations: ``(*batch, T, p)``, several series of one model, or a pandas Series or
            DataFrame; NaN is missing.
        free: names of the parameters to learn, or a dict from names to True, to a mask of the
            entries that move or, for covariances, to ``"diagonal"`` or ``"dense"``. Default:
            transition, biases, inputs and nonsingular noises; `dynamics` and `emission` are
            structure unless named. Zeros in `transition` stay zero, diagonal noises diagonal. For
            covariances also an integer for each element, its group: Q = S Q_0 S with one scale for
            each group, -1 where it stays. A `ReadyModel` has its own default.
        method: ``"lbfgs"``, or ``"em"``: closed-form steps, robust far from the maximum but slow
            near it. EM is exact where the smoother is, and stops where its approximation stops
            gaining.
        collapse: as in `filter`.
        starts: number of starts: the first at the model, the others drawn around it.
        spread: standard deviation of these draws in unconstrained coordinates (logits, logarithms
            of scales).
        generator: source of the draws. By default they are the same in every call.
        max_steps: maximum number of iterations of each start.
        tol: stop where no coordinate changes the mean log-likelihood per observation faster than
            this (EM: where a step gains less).
        order_by: sort the modes in rising order of this: the name of a parameter, or a function
            from the model to M numbers. By default, the first free parameter that differs between
            modes, unless fixed parameters tell the modes apart. False keeps the order of the given
            model. Either way ``Fit.order`` says which mode became which.
        standard_errors: compute them, from the inverse Hessian and the delta method.
        lengths, inputs: as in `filter`.
        progress: called after each step; its value is the log-likelihood.
        throw: raise if the best start did not converge.

    Returns:
        `Fit`.

    Raises:
        InputError: input that does not fit together, or no start with a finite log-likelihood.
        ConvergenceError: the search did not reach a maximum, or was interrupted by Ctrl-C. The best
            fit so far is its ``result``, and what ``throw=False`` returns.

    >>> import torch, cumulant as cm
    >>> y = torch.tensor([0.1, -0.2, 0.0, 5.1, 4.9, 5.0, 5.2, 0.1, -0.1, 0.2])[:, None].double()
    >>> model = cm.filtering.SwitchingLinearGaussian(
    ...     transition=torch.full((2, 2), 0.5).double(), initial=torch.tensor([0.5, 0.5]),
    ...     dynamics=torch.zeros(2, 0, 0), dynamics_noise=torch.zeros(2, 0, 0),
    ...     emission=torch.zeros(2, 1, 0), emission_noise=torch.eye(1),
    ...     emission_bias=torch.tensor([[4.0], [1.0]]),
    ...     initial_mean=torch.zeros(0), initial_covariance=torch.zeros(0, 0))
    >>> found = cm.filtering.fit(model, y, collapse="gpb1")
    >>> found.model.emission_bias.flatten(), found.order
    (tensor([0.0167, 5.0500], dtype=torch.float64), (1, 0))
    """
    with torch.inference_mode(False), torch.enable_grad():
        limits = _limits(max_steps, tol, progress)
        if method not in SEARCHES:
            raise InputError(f"fit: method must be 'lbfgs' or 'em', not {method!r}.")
        starts = whole("fit", "starts", starts, 1)
        spread = real("fit", "spread", spread, least=0.0)
        draws = generator_or("fit", generator, 0)
        gaussian_model("fit", model)
        given, model = model, started(model, observations)
        problem = _problem(model, observations, free, collapse, lengths, inputs)
        if problem.given and method == "em":
            raise InputError(
                "fit: EM counts every observation, but this model takes the first "
                f"{problem.given} as given; method='lbfgs' fits it."
            )
        start = problem.coordinates.model
        if start.modes > 1 and order_by is not None and order_by is not False:
            rising(start, order_by)
        best, reached = _climb(problem, method, starts, spread, draws, limits)
        fitted, order, was, said = _arranged(problem, best, order_by)
        if model is not given:  # modes of a start that nobody gave have no order but the fit's
            was, said = tuple(range(model.modes)), []
        errors = None
        if standard_errors:
            errors = _standard_errors(problem, fitted, order)
            said.append(_about(errors, best.code))
        found = Fit(
            model.permute(was).unchecked({n: x.detach() for n, x in fitted.parameters.items()}),
            was,
            best.value,
            errors,
            best.steps,
            Outcome(torch.tensor(int(best.code))),
            "; ".join(filter(None, [best.message, *said])),
            tuple(reached),
            best.vector.numel(),
            problem.count,
            tuple(block.name for block in problem.coordinates.blocks),
            Evidence.of(problem, order, labels_of(observations)),
        )
    return found.status.check("fit", found, found.message) if throw else found


def _limits(max_steps: Any, tol: Any, progress: ProgressCallback | None) -> Limits:
    if progress is not None and not callable(progress):
        raise InputError(f"fit: progress must be a function, not {progress!r}.")
    return Limits(
        whole("fit", "max_steps", max_steps, 1), real("fit", "tol", tol, least=0.0), progress
    )


def _problem(
    model: SwitchingLinearGaussian,
    observations: Any,
    free: Free,
    collapse: Any,
    lengths: Any,
    inputs: Any,
) -> Problem:
    """The input, checked; tensors made in inference mode are copied, since autograd needs them."""
    y = series("fit", model, observations, lengths)
    y = y.clone() if y.is_inference() else y
    if 0 in y.shape:
        raise InputError("fit: there are no series to fit to.")
    u = inputs_of("fit", model, inputs, y.shape[-2], y)
    scheme = scheme_of("fit", collapse)
    n, batch = model.state_size, y.shape[:-2].numel()
    bounded(scheme, model.modes, batch * model.modes * (n + n * n), y.shape[-2])
    model = model.to(y.dtype)
    model = model.unchecked(
        {name: x.clone() for name, x in model.parameters.items() if x.is_inference()}
    )
    return Problem(y, u, scheme, coordinates(model, free), steps_given(model, y))


def _climb(
    problem: Problem,
    method: str,
    starts: int,
    spread: float,
    generator: torch.Generator,
    limits: Limits,
) -> tuple[Point, list[float]]:
    """The best of all starts, and what each of them reached."""
    begin = problem.coordinates.vector(problem.coordinates.model)
    points = [Point(begin)]
    for _ in range(starts - 1):
        beside = torch.randn(begin.shape, generator=generator).to(begin)
        points.append(Point(begin + spread * beside))
    SEARCHES[method](problem, points, limits)
    best = max(points, key=_sound)
    if not math.isfinite(best.value):
        raise InputError(
            f"fit: no start has a finite log-likelihood ({best.message}). Check the model with "
            "filter first."
        )
    for point in points:
        if point.code == Code.INTERRUPTED:
            best.ended(point.code, point.message)
    return best, [point.value for point in points]


def _sound(point: Point) -> tuple[bool, float]:
    """What makes an end better: a likelihood grows without bound where a variance goes to zero."""
    ran_off = point.code in (Code.STALLED, Code.NOT_FINITE)
    return math.isfinite(point.value) and not ran_off, point.value


def _arranged(
    problem: Problem, best: Point, order_by: OrderBy
) -> tuple[SwitchingLinearGaussian, list[int], tuple[int, ...], list[str]]:
    """The fitted model with its modes in order.

    Also the permutation that was applied to the coordinates, which given mode each mode stands for,
    and what to say about it.
    """
    found = problem.coordinates
    with torch.no_grad():
        fitted, start = found.at(best.vector), found.model
        order = was = list(range(start.modes))
        key: Any = sorted_by(found) if order_by is None else order_by
        if start.modes > 1 and exchangeable(found):
            was = matched(start, fitted, problem.observations, problem.inputs, problem.scheme)
        if key is False:
            order = [was.index(k) for k in order]
        elif start.modes > 1 and key is not None:
            order = rising(fitted, key)
        stands = tuple(was[k] for k in order)
        return fitted.permute(order), order, stands, _moves(stands, key)


def _moves(stands: Sequence[int], key: Any) -> list[str]:
    """Which mode became which, if any changed places."""
    if list(stands) == sorted(stands):
        return []
    by = f"rising order of {key}" if isinstance(key, str) else "the order of order_by"
    moves = ", ".join(f"mode {k} was mode {i}" for k, i in enumerate(stands) if k != i)
    return [f"modes are in {by}: {moves} of the given model"]


def _about(errors: dict[str, Tensor] | None, code: Code) -> str:
    """What to know about the standard errors."""
    if errors is None:
        return (
            "no standard errors: the Hessian is not negative definite, so the data do not identify "
            "some parameter, or it lies on the edge, as a variance near zero does"
        )
    if code != Code.CONVERGED:
        return "the standard errors are taken where the search stopped, short of a maximum"
    return ""


def _standard_errors(
    problem: Problem, model: SwitchingLinearGaussian, order: list[int]
) -> dict[str, Tensor] | None:
    """Square roots of the diagonal of J H^-1 J', J from coordinates to parameters."""
    try:
        found = problem.coordinates.moved(model, order)
        vector = found.vector(model)
    except (InputError, linalg.LinAlgError):  # a covariance has become singular
        return None
    information = -hessian(replace(problem, coordinates=found), vector)
    information = (information + information.mT) / 2
    root, info = linalg.cholesky_ex(information)
    if int(info) != 0 or not bool(information.isfinite().all()):
        return None
    out: dict[str, Tensor] = {}
    at = found.values(vector.detach())
    for name, value in at.items():

        def entries(v: Tensor, name: str = name) -> Tensor:
            return found.values(v)[name].reshape(-1)

        jacobian = functional.jacobian(entries, vector.detach())
        white = linalg.solve_triangular(root, jacobian.mT, upper=False)
        out[name] = white.square().sum(-2).sqrt().reshape(value.shape)
    return out
