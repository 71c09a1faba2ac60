"""`Posterior`: what a filter knows after each observation, and before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.lazy import Lazy, kept
from cumulant.filtering import moments
from cumulant.filtering.frames import Labels, ModeNames, frame, moment_columns, state_columns
from cumulant.filtering.kalman import GaussianBank
from cumulant.filtering.model import gaussian_model
from cumulant.filtering.recursion import Belief, Beliefs, Run, Scheme, branch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cumulant.filtering.frames import DataFrame
    from cumulant.filtering.smoothing import Smoothed

__all__ = [
    "Filtered",
    "Posterior",
    "alike",
    "gaussian_posterior",
    "joined",
    "over_time",
    "stacked",
    "step_of",
    "uniform",
    "whole",
]


def alike(first: Belief, second: Belief) -> bool:
    """Whether two beliefs have as many histories, and messages of the same kind."""
    same = first.log_weights.shape == second.log_weights.shape
    return same and len(first.message) == len(second.message)


def stacked(beliefs: Sequence[Belief]) -> list[Belief]:
    """Beliefs with time as the last batch dimension; in one piece if all are of one size."""
    if isinstance(beliefs, Beliefs):
        return list(beliefs.pieces)
    if uniform(beliefs):
        lead = beliefs[0].log_weights.ndim - 2
        parts = zip(*(b.message for b in beliefs), strict=True)
        message = tuple(torch.stack(list(x), lead) for x in parts)
        return [Belief(torch.stack([b.log_weights for b in beliefs], lead), message)]
    return [piece for b in beliefs for piece in stacked([b])]


def uniform(beliefs: Sequence[Belief]) -> bool:
    """Whether all beliefs have as many histories, and messages of the same kind."""
    if isinstance(beliefs, Beliefs) and len(beliefs.pieces) == 1:
        return True
    return all(alike(b, beliefs[0]) for b in beliefs)


def over_time(beliefs: Sequence[Belief], function: Callable[[Belief], Tensor]) -> Tensor:
    """A function of each belief, ``(*batch, T, ...)``."""
    pieces = [function(b) for b in stacked(beliefs)]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces, beliefs[0].log_weights.ndim - 2)


def joined(first: Sequence[Belief], second: Sequence[Belief]) -> Sequence[Belief]:
    """Beliefs, then later ones."""
    if isinstance(first, Beliefs) and isinstance(second, Beliefs):
        return first + second
    return (*first, *second)


def _joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)


def _symmetric_once(beliefs: Sequence[Belief], covariance: Tensor) -> Tensor:
    """Symmetric in every bit, as those of the compiled recursion are already."""
    done = isinstance(beliefs, Beliefs) and beliefs[0].log_weights.shape[-2] == 1
    return covariance if done else moments.symmetric(covariance)


def whole(belief: Belief) -> tuple[Tensor, Tensor]:
    """Mean and covariance over all components."""
    weights, message = flat(belief)
    mean, covariance = moments.collapse(weights, *message[:2])
    return mean[..., 0, 0, :], moments.symmetric(covariance[..., 0, 0, :, :])


def step_of(bank: GaussianBank, begin: int, end: int) -> GaussianBank:
    """The bank over a part of its steps."""
    if (begin, end) == (0, bank.observations.shape[-2]):
        return bank
    inputs = None if bank.inputs is None else bank.inputs[..., begin:end, :]
    y = bank.observations[..., begin:end, :]
    return GaussianBank(bank.model, y, inputs, first=bank.first + begin)


def flat(belief: Belief) -> Belief:
    """Histories and modes as one list of components, of a single mode."""
    weights, message = belief
    at = weights.ndim - 2
    return Belief(
        weights.flatten(-2)[..., None],
        tuple(x.flatten(at, at + 1).unsqueeze(at + 1) for x in message),
    )


def _only(x: Tensor, histories: int, otherwise: Callable[[Tensor], Tensor]) -> Tensor:
    """x of the only history, or what is made of several."""
    return x.squeeze(histories) if x.shape[histories] == 1 else otherwise(x)


def _given(belief: Belief) -> tuple[Tensor, Tensor, Tensor]:
    return belief.log_weights, belief.message[0], belief.message[1]


@dataclass(frozen=True, eq=False)
class Filtered(Lazy):
    """What every posterior has: beliefs about modes and states after each step."""

    model: Any
    scheme: Scheme
    observations: tuple[Tensor, ...]
    beliefs: Sequence[Belief]
    step_totals: tuple[Tensor, ...]
    log_predicted: tuple[Tensor, ...]
    labels: Labels | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        batch = tuple(self.beliefs[-1].log_weights.shape[:-2])
        return (
            f"{type(self).__name__}({self.model!r}, collapse={self.scheme.name!r}, batch={batch}, "
            f"steps={self.steps})"
        )

    def _repr_html_(self) -> str:
        from cumulant.filtering.display import posterior_html

        return posterior_html(self)

    @property
    def steps(self) -> int:
        """T."""
        return sum(x.shape[-1] for x in self.step_totals)

    def followed(self, run: Run, observations: Tensor) -> Self:
        """The posterior with more steps behind it."""
        return replace(
            self,
            observations=(*self.observations, observations),
            beliefs=joined(self.beliefs, run.beliefs[1:]),
            step_totals=self.step_totals + run.step_totals,
            log_predicted=self.log_predicted + run.log_predicted,
        )

    def latest(self) -> Self:
        """The posterior of the last step alone: what `update` needs, without the past."""
        return replace(
            self,
            observations=(self.observations[-1][..., -1:, :],),
            beliefs=self.beliefs[-2:],
            step_totals=(self.step_totals[-1][..., -1:],),
            log_predicted=(self.log_predicted[-1][..., -1:, :],),
            labels=None if self.labels is None else self.labels.last(),
        )

    def labeled(self, labels: Labels | None) -> Self:
        """The posterior under an index and names of columns."""
        return replace(self, labels=labels)

    def to_pandas(self, names: ModeNames = None) -> DataFrame:
        """Modes, states and log-likelihood of each step as a data frame, under its own index.

        Args:
            names: of the modes, or of modes and states as `read_model` returns them. A
                `ReadyModel` has its own.
        """
        names = getattr(self.model, "names", None) if names is None else names
        found = self._columns(names) | {"log_likelihood": self.step_log_likelihood}
        return frame("to_pandas", found, self.labels, self.steps)

    def _columns(self, names: ModeNames) -> dict[str, Tensor]:
        return state_columns(names, self.mode_probabilities, self.mean, self.covariance)

    @kept
    def moments(self) -> Sequence[Belief]:
        """The beliefs after each step, with mean and covariance of the state for messages."""
        return self.beliefs[1:]

    def _each(self, function: Callable[[Belief], Tensor]) -> Tensor:
        return self._given(over_time(self.moments, function))

    def _given(self, x: Tensor) -> Tensor:
        """In the precision of the observations and the model."""
        return x.to(self.observations[0].dtype)

    @kept
    def log_likelihood(self) -> Tensor:
        return self.step_log_likelihood.sum(-1)

    @kept
    def step_log_likelihood(self) -> Tensor:
        return self._given(_joined(self.step_totals, -1))

    @kept
    def mode_probabilities(self) -> Tensor:
        return self._each(lambda b: _only(b.log_weights, -2, lambda w: w.logsumexp(-2)).exp())

    @kept
    def predicted_mode_probabilities(self) -> Tensor:
        return self._given(_joined(self.log_predicted, -2).exp())

    @kept
    def mode_means(self) -> Tensor:
        return self._each(
            lambda b: _only(b.message[0], -3, lambda _: moments.collapse(*_given(b))[0].squeeze(-3))
        )

    @kept
    def mode_covariances(self) -> Tensor:
        return _symmetric_once(
            self.moments,
            self._each(
                lambda b: _only(
                    b.message[1], -4, lambda _: moments.collapse(*_given(b))[1].squeeze(-4)
                )
            ),
        )

    @kept
    def mean(self) -> Tensor:
        return self._each(lambda b: whole(b)[0])

    @kept
    def covariance(self) -> Tensor:
        return self._each(lambda b: whole(b)[1])


@dataclass(frozen=True, repr=False, eq=False)
class Posterior(Filtered):
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
    ``predicted_mean``,              ``(*batch, T, n)``     of x_t given y_1, ..., y_{t-1}
    ``predicted_covariance``
    ``observation_mean``,            ``(*batch, T, p)``     of y_t given y_1, ..., y_{t-1}
    ``observation_covariance``
    ================================ ====================== =======================================

    Covariances have one more dimension, and the spread between modes is inside them. Past the
    length of a series, everything is a forecast. ``past`` is what a forecast was made from.
    """

    inputs: tuple[Tensor, ...] | None = None
    first: int = 0
    past: Posterior | None = field(default=None, kw_only=True)

    def _columns(self, names: ModeNames) -> dict[str, Tensor]:
        mean, covariance = self.observation_mean, self.observation_covariance
        columns: Sequence[str] = [f"observation {k + 1}" for k in range(mean.shape[-1])]
        columns = columns if self.labels is None else self.labels.columns
        predicted = [f"{name} predicted" for name in columns]
        return super()._columns(names) | moment_columns(predicted, mean, covariance)

    def plot(
        self,
        what: str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        smoothed: Smoothed | None = None,
        names: ModeNames = None,
    ) -> Figure:
        """Draw the regimes, the states, a forecast or the residuals of one series.

        Args:
            what: ``"regimes"`` (the series, shaded by its regimes, and their probabilities),
                ``"states"`` (with 95 % bands), ``"diagnostics"`` (standardized one-step residuals,
                their quantiles and autocorrelations) or, of what `forecast` returned,
                ``"forecast"`` (a fan).
            path: file to write, its format by suffix.
            smoothed: from `smooth`; regimes and states are then given all observations.
            names: of the modes, or of modes and states. A `ReadyModel` has its own.
        """
        from cumulant.filtering.plots import plot

        return plot(self, what, path, smoothed=smoothed, names=names)

    @kept
    def bank(self) -> GaussianBank:
        """The filters over all steps at once."""
        inputs = None if self.inputs is None else torch.cat(self.inputs, -2)
        return GaussianBank(self.model, torch.cat(self.observations, -2), inputs, self.first)

    def latest(self) -> Self:
        """The posterior of the last step alone: what `update` needs, without the past."""
        inputs = None if self.inputs is None else (self.inputs[-1][..., -1:, :],)
        return replace(super().latest(), inputs=inputs, first=self.first + self.steps - 1)

    @kept
    def _banks(self) -> list[GaussianBank]:
        """The filters over all steps, or piece by piece where beliefs grow."""
        begin, out = 0, list[GaussianBank]()
        for piece in stacked(self.beliefs[:-1]):
            end = begin + piece.log_weights.shape[-3]
            out.append(step_of(self.bank, begin, end))
            begin = end
        return out

    @kept
    def _predicted(self) -> list[Belief]:
        """Every history moved by every mode, before the observation."""
        out: list[Belief] = []
        for bank, belief in zip(self._banks, stacked(self.beliefs[:-1]), strict=True):
            joint, waiting = branch(bank, belief, None)
            out.append(Belief(joint, bank.predict(waiting[:2], None)))
        return out

    @kept
    def predicted_observations(self) -> list[Belief]:
        """The mixture of Gaussians that each observation was expected from, in pieces over time."""
        out: list[Belief] = []
        for bank, (joint, message) in zip(self._banks, self._predicted, strict=True):
            moved = moments.predict(bank.linear("emission", message, None), *message)
            out.append(Belief(joint, moved))
        return out

    def _from_predicted(self, part: int, observed: bool) -> Tensor:
        if self._summary is not None:
            what = "observation" if observed else "predicted"
            return self._summary[f"{what}_{('mean', 'covariance')[part]}"]
        found = self.predicted_observations if observed else self._predicted
        pieces = [whole(belief)[part] for belief in found]
        return self._given(torch.cat(pieces, self.beliefs[0].log_weights.ndim - 2))

    @kept
    def _summary(self) -> dict[str, Tensor] | None:
        """Moments over all modes and histories, if the compiled recursion made the beliefs."""
        source = self.beliefs.moments if isinstance(self.beliefs, Beliefs) else None
        return None if source is None else {n: self._given(x) for n, x in source().items()}

    @kept
    def mean(self) -> Tensor:
        return self._each(lambda b: whole(b)[0]) if self._summary is None else self._summary["mean"]

    @kept
    def covariance(self) -> Tensor:
        if self._summary is not None:
            return self._summary["covariance"]
        return self._each(lambda b: whole(b)[1])

    @kept
    def predicted_mean(self) -> Tensor:
        return self._from_predicted(0, observed=False)

    @kept
    def predicted_covariance(self) -> Tensor:
        return self._from_predicted(1, observed=False)

    @kept
    def observation_mean(self) -> Tensor:
        return self._from_predicted(0, observed=True)

    @kept
    def observation_covariance(self) -> Tensor:
        return self._from_predicted(1, observed=True)


def gaussian_posterior(owner: str, post: Any) -> None:
    """Raise unless this is what `filter` says about a model with Gaussian messages."""
    if isinstance(post, Filtered):
        gaussian_model(owner, post.model)
    if not isinstance(post, Posterior):
        hint = (
            "; give its .posterior"
            if isinstance(getattr(post, "posterior", None), Posterior)
            else ""
        )
        raise InputError(
            f"{owner}: expected what filter or update returned, not {type(post).__name__}{hint}."
        )
