"""Natural parameters through a model's modes: the bank of a conjugate family (docs/theory.md, T26).

Messages are theta, ``(*batch, G, M, d)``: G histories by M current modes. A mode's map moves them,
an observation adds t(y), and a mixture is projected by matching the family's own statistics.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import require
from cumulant.core.errors import InputError
from cumulant.core.lazy import kept
from cumulant.core.outcome import Code
from cumulant.filtering.kalman import log_probability
from cumulant.filtering.posterior import Filtered, flat, over_time
from cumulant.filtering.recursion import Belief, Message
from cumulant.measures.conjugate import _message
from cumulant.measures.family import ExponentialFamily
from cumulant.measures.gaussian import LOG_2PI, Gaussian, MeanCovarianceGaussian
from cumulant.measures.measure import Measure
from cumulant.measures.newton import wide

__all__ = ["ConjugateBank", "ConjugatePosterior", "observed", "projected"]


def observed(owner: str, prior: Any, likelihood: Any, y: Tensor) -> tuple[Tensor, Tensor]:
    """t(y) ``(..., d)`` and log b(y) ``(...,)`` of rows ``(..., p)``; zero where y is missing.

    The likelihood is exp<t(y), u(x)> b(y) in the prior's statistics u (T11).
    """
    try:
        if isinstance(prior, MeanCovarianceGaussian) and isinstance(likelihood, Gaussian):
            return _observed_gaussian(prior, likelihood, y)
        missing = y.isnan()
        gone = missing.all(-1)
        require(
            gone | ~missing.any(-1),
            lambda: "posterior: a one-hot observation must be missing completely or not at all.",
        )
        vectors = y.shape[-1] > 1
        typical = torch.arange(y.shape[-1], device=y.device) < vectors  # 0, or the first category
        value = torch.where(missing, typical.to(y.dtype), y)
        shift, log_base = _message(prior, likelihood, value[..., None, :] if vectors else value)
    except InputError as error:
        raise InputError(f"{owner}: {str(error).partition(': ')[2]}") from None
    return shift.masked_fill(gone[..., None], 0.0), log_base.masked_fill(gone, 0.0)


def _observed_gaussian(
    prior: MeanCovarianceGaussian, noise: Gaussian, y: Tensor
) -> tuple[Tensor, Tensor]:
    missing, noise = y.isnan(), noise._to(y.dtype)
    if not bool(missing.any()) or y.shape[-1] != noise.dimension:
        return _message(prior, noise, y[..., None, :])
    # A missing element becomes an independent one of variance 1 that came as expected.
    seen = (~missing).to(y.dtype)
    kept = noise._dense() * (seen[..., None] * seen[..., None, :]) + torch.diag_embed(1 - seen)
    law = Gaussian(noise.loc.expand_as(y), kept)
    shift, log_base = _message(prior, law, torch.where(missing, noise.loc, y)[..., None, :])
    return shift * prior.statistic(seen), log_base + (1 - seen).sum(-1) * LOG_2PI / 2


def projected(family: Any, log_weights: Tensor, theta: Tensor) -> Tensor:
    """The M-projection of mixtures over histories (T11): E[u] of the mixture, and its link.

    Log-weights ``(*batch, G, M)`` and theta ``(*batch, G, M or 1, d)`` give ``(*batch, 1, M, d)``.
    """
    if log_weights.shape[-2] == 1:
        return theta.expand(*log_weights.shape, -1)
    share = log_weights.softmax(-2)[..., None]
    mean = (share * family._gradient(theta)).sum(-3, keepdim=True)
    rows = mean.flatten(0, -2)
    code = family._hull(rows)
    good = (code == Code.CONVERGED)[..., None]
    found = family._inverse(torch.where(good, rows, family._interior(rows)))
    code = torch.where(good[..., 0], found.status.code, code)
    require(
        code == Code.CONVERGED,
        lambda: (
            f"filter: no {type(family).__name__} has the expected statistics of a mixture: numbers "
            "overflow, or a law is too narrow for its natural parameters. For a Gaussian, take "
            "SwitchingLinearGaussian."
        ),
    )
    return found.value.reshape(mean.shape)


class ConjugateBank:
    """A conjugate filter for each mode and history, in double precision, on ``(*batch, T, p)``."""

    def __init__(self, model: Any, observations: Tensor) -> None:
        self.model, self.observations = model, observations
        self.family, y, _ = wide(model.prior, observations)
        laws = model.likelihoods
        # A likelihood that all modes share is read once.
        laws = laws[:1] if all(law is laws[0] for law in laws) else laws
        parts = [observed("filter", self.family, law, y) for law in laws]
        self._shift = torch.stack([t for t, _ in parts], -2).unsqueeze(-3)
        self._log_base = torch.stack([b for _, b in parts], -1).unsqueeze(-2)
        self._log_transition = log_probability(model.transition.to(y.dtype))

    def start(self) -> tuple[Belief, bool]:
        """The belief at time 0, and whether all modes begin with the same message."""
        theta = self.family._theta.squeeze(-2)
        shape = (*self.observations.shape[:-2], 1, self.model.modes)
        logs = log_probability(self.model.initial.to(theta.dtype))
        return Belief(logs.expand(shape), (theta.expand(*shape, -1),)), theta.ndim == 1

    def log_transition(self, t: int | None) -> Tensor:
        return self._log_transition

    def predict(self, message: Message, t: int | None) -> Message:
        columns = message[0].expand(*message[0].shape[:-2], self.model.modes, -1).unbind(-2)
        moved = [
            theta if map is None else map._move(self.family, theta)
            for map, theta in zip(self.model.dynamics, columns, strict=True)
        ]
        return (torch.stack(moved, -2),)

    def observe(self, message: Message, t: int | None) -> tuple[Message, Tensor]:
        (theta,) = message
        shift, log_base = self._shift, self._log_base
        if t is not None:
            shift, log_base = shift.select(-4, t), log_base.select(-3, t)
        log_likelihood = self.family._increment(theta, shift.expand_as(theta)) + log_base
        return (theta + shift,), log_likelihood

    def collapse(self, log_weights: Tensor, message: Message) -> Message:
        return (projected(self.family, log_weights, message[0]),)


@dataclass(frozen=True, repr=False, eq=False)
class ConjugatePosterior(Filtered):
    """Modes and states given the observations so far; fields are computed when asked for.

    ================================ ====================== =======================================
    field                            shape                  what it is
    ================================ ====================== =======================================
    ``log_likelihood``               ``(*batch,)``          log p(y_1, ..., y_T)
    ``step_log_likelihood``          ``(*batch, T)``        log p(y_t | y_1, ..., y_{t-1})
    ``mode_probabilities``           ``(*batch, T, M)``     P(A_t | y_1, ..., y_t)
    ``predicted_mode_probabilities`` ``(*batch, T, M)``     P(A_t | y_1, ..., y_{t-1})
    ``mean``, ``covariance``         ``(*batch, T, n)``     of x_t given y_1, ..., y_t
    ``mode_means``,                  ``(*batch, T, M, n)``  of x_t given A_t as well
    ``mode_covariances``
    ``mode_measures``                batch (\\*batch, T, M)  its law given A_t, in the family
    ``measure(t)``                   batch (\\*batch,)       the member closest to the law of x_t
    ================================ ====================== =======================================

    Covariances have one more dimension. Means and covariances are those of the mixture; a measure
    matches its expected statistics, so that its variance may be another (T26).
    """

    @kept
    def moments(self) -> Sequence[Belief]:
        """The beliefs after each step, with mean and covariance of the state for messages."""
        prior: ExponentialFamily = self.model.prior
        members = [type(prior).from_natural(b.message[0]) for b in self.beliefs[1:]]
        weights = [b.log_weights for b in self.beliefs[1:]]
        return [Belief(w, member.moments()) for w, member in zip(weights, members, strict=True)]

    @kept
    def mode_measures(self) -> Measure:
        """The M-projected law of x_t given A_t, of batch shape ``(*batch, T, M)``."""
        prior: ExponentialFamily = self.model.prior
        theta = over_time(
            self.beliefs[1:], lambda b: projected(prior, b.log_weights, b.message[0]).squeeze(-3)
        )
        return type(prior).from_natural(theta)._to(self.observations[0].dtype)

    def measure(self, t: int = -1) -> Measure:
        """The M-projected law of x_t, batch shape ``(*batch,)``; by default of the last step."""
        try:
            t = operator.index(t)
        except TypeError:
            raise InputError(f"measure: t must be an integer, not {t!r}.") from None
        if not -self.steps <= t < self.steps:
            raise InputError(f"measure: t must be one of the {self.steps} steps, not {t}.")
        log_weights, (theta,) = flat(self.beliefs[1:][t])
        prior: ExponentialFamily = self.model.prior
        theta = projected(prior, log_weights, theta)[..., 0, 0, :]
        return type(prior).from_natural(theta)._to(self.observations[0].dtype)
