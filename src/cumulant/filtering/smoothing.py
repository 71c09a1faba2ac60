"""`smooth`: modes and states given the whole series (T25)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.lazy import Lazy, kept
from cumulant.filtering import moments
from cumulant.filtering.backward import backward
from cumulant.filtering.frames import Labels, ModeNames, frame, state_columns
from cumulant.filtering.model import SwitchingLinearGaussian, gaussian_model
from cumulant.filtering.moments import symmetric
from cumulant.filtering.posterior import Posterior, gaussian_posterior, over_time, whole
from cumulant.filtering.recursion import Belief, Beliefs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cumulant.filtering.frames import DataFrame

__all__ = ["Smoothed", "smooth"]

# Where the variance of the start is infinite, the smoother takes so many times the largest one that
# the filter has found.
VAGUE = 1e8


@dataclass(frozen=True, repr=False, eq=False)
class Smoothed(Lazy):
    """Modes and states given all observations; fields are computed when asked for.

    =============================== ======================== ====================================
    field                           shape                    what it is
    =============================== ======================== ====================================
    ``mode_probabilities``          ``(*batch, T, M)``       P(A_t | y_1, ..., y_T)
    ``transition_probabilities``    ``(*batch, T, M, M)``    P(A_{t-1} = i, A_t = j | all)
    ``mean``, ``covariance``        ``(*batch, T, n)``       of x_t
    ``mode_means``,                 ``(*batch, T, M, n)``    of x_t given A_t as well
    ``mode_covariances``
    ``initial_mode_probabilities``  ``(*batch, M)``          at time 0, and of the state there:
    ``initial_mean``,               ``(*batch, n)``
    ``initial_covariance``
    =============================== ======================== ====================================
    """

    beliefs: Sequence[Belief]
    pairs: tuple[Tensor, ...]
    dtype: torch.dtype
    labels: Labels | None = None
    names: ModeNames = None

    def to_pandas(self, names: ModeNames = None) -> DataFrame:
        """Modes and states of each step as a data frame, under the index of the observations.

        Args:
            names: of the modes, or of modes and states as `read_model` returns them. A
                `ReadyModel` has its own.
        """
        names = self.names if names is None else names
        found = state_columns(names, self.mode_probabilities, self.mean, self.covariance)
        return frame("to_pandas", found, self.labels, len(self.pairs))

    def plot(
        self,
        what: str = "regimes",
        path: str | os.PathLike[str] | None = None,
        *,
        names: ModeNames = None,
    ) -> Figure:
        """Draw the probabilities of the regimes, or the states with 95 % bands, of one series.

        Args:
            what: ``"regimes"`` or ``"states"``.
            path: file to write, its format by suffix.
            names: of the modes, or of modes and states. A `ReadyModel` has its own.
        """
        from cumulant.filtering.plots import plot_smoothed

        return plot_smoothed(self, what, path, names=names)

    def __repr__(self) -> str:
        batch = tuple(self.beliefs[-1].log_weights.shape[:-2])
        return f"Smoothed(batch={batch}, steps={len(self.pairs)})"

    def _repr_html_(self) -> str:
        from cumulant.filtering.display import smoothed_html

        return smoothed_html(self)

    def _each(self, function: Callable[[Belief], Tensor]) -> Tensor:
        return over_time(self.beliefs[1:], function).to(self.dtype)

    @kept
    def mode_probabilities(self) -> Tensor:
        return self._each(lambda b: b.log_weights.logsumexp(-2).exp())

    @kept
    def transition_probabilities(self) -> Tensor:
        M = self.beliefs[0].log_weights.shape[-1]
        each = [torch.unflatten(w, -2, (-1, M)).logsumexp(-3).exp() for w in self.pairs]
        return torch.stack(each, -3).to(self.dtype)

    @kept
    def mean(self) -> Tensor:
        return self._each(lambda b: whole(b)[0])

    @kept
    def covariance(self) -> Tensor:
        return self._each(lambda b: whole(b)[1])

    @kept
    def mode_means(self) -> Tensor:
        return self._each(lambda b: moments.collapse(b.log_weights, *b.message)[0].squeeze(-3))

    @kept
    def mode_covariances(self) -> Tensor:
        return symmetric(
            self._each(lambda b: moments.collapse(b.log_weights, *b.message)[1].squeeze(-4))
        )

    @property
    def initial_mode_probabilities(self) -> Tensor:
        return self.beliefs[0].log_weights.logsumexp(-2).exp().to(self.dtype)

    @property
    def initial_mean(self) -> Tensor:
        return whole(self.beliefs[0])[0].to(self.dtype)

    @property
    def initial_covariance(self) -> Tensor:
        return whole(self.beliefs[0])[1].to(self.dtype)


def smooth(model: SwitchingLinearGaussian, post: Posterior) -> Smoothed:
    """Modes and states given the whole series (T25).

    For one mode, the smoother of Rauch, Tung and Striebel; with several, exact wherever the filter
    has not collapsed anything (GPB(k) for T <= k), and for models without a state. An infinite
    variance at the start counts as 10^8 times the largest that the filter has found.

    Args:
        model: the model that made `post`.
        post: from `filter` or `update`.

    >>> import torch, cumulant as cm
    >>> one = torch.ones(1, 1, 1)
    >>> model = cm.filtering.SwitchingLinearGaussian(
    ...     transition=torch.ones(1, 1), initial=torch.ones(1), dynamics=one, dynamics_noise=one,
    ...     emission=one, emission_noise=one, initial_mean=torch.zeros(1),
    ...     initial_covariance=torch.zeros(1, 1))
    >>> post = cm.filtering.filter(model, torch.tensor([[torch.nan], [3.0]]))
    >>> cm.filtering.smooth(model, post).mean
    tensor([[1.],
            [2.]])
    """
    gaussian_model("smooth", model)
    gaussian_posterior("smooth", post)
    if model is not post.model and not _same(model, post.model):
        raise InputError("smooth: the posterior was made by another model; filter with this one.")
    if post.first > 0:
        raise InputError(
            "smooth: the posterior does not begin at the first step: it is a forecast, or has "
            "forgotten its past (latest()). Smooth the whole posterior."
        )
    if model.diffuse:
        labels = post.labels
        model, post = _with_variance(model, post)
        post = post if labels is None else post.labeled(labels)
    log_weights, message = post.beliefs[-1]
    dtype, names = post.observations[0].dtype, getattr(model, "names", None)
    if isinstance(post.beliefs, Beliefs) and post.beliefs.smoothed is not None:
        known = post.beliefs.smoothed()
        if known is not None:
            return Smoothed(*known, dtype, post.labels, names)
    beliefs, pairs = [Belief(log_weights, message[:2])], list[Tensor]()
    for pair, belief in backward(post):
        pairs.append(pair.log_weights)
        beliefs.append(belief)
    return Smoothed(tuple(beliefs[::-1]), tuple(pairs[::-1]), dtype, post.labels, names)


def _with_variance(
    model: SwitchingLinearGaussian, post: Posterior
) -> tuple[SwitchingLinearGaussian, Posterior]:
    """The same with a large variance in place of an infinite one."""
    from cumulant.filtering.filters import filter

    there = post.covariance.detach().diagonal(dim1=-2, dim2=-1)
    size = VAGUE * float(torch.where(there.isfinite(), there, 0.0).max().clamp_min(1.0))
    start = model.parameters["initial_covariance"]
    model = model.replace(initial_covariance=torch.where(start.isinf(), size, start))
    inputs = None if post.inputs is None else torch.cat(post.inputs, -2)
    y = torch.cat(post.observations, -2)
    return model, filter(model, y, collapse=post.scheme.name, inputs=inputs)


def _same(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or first.parameters.keys() != second.parameters.keys():
        return False
    own = ("functions", "method")
    if any(getattr(first, k, None) != getattr(second, k, None) for k in own):
        return False
    return all(torch.equal(x, second.parameters[n]) for n, x in first.parameters.items())
