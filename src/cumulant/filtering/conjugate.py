"""Switching models over conjugate families: GPB and IMM in natural parameters.

See docs/theory.md, T26.

The recursion is that of the Gaussian filters; only the messages differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from cumulant.core.checks import numbers
from cumulant.core.errors import InputError
from cumulant.core.progress import ProgressCallback
from cumulant.filtering.frames import PandasLike, labels_of
from cumulant.filtering.kalman import stationary
from cumulant.filtering.maps import Map, image_size, member_of, tensors_of
from cumulant.filtering.model_checks import (
    initial_probabilities,
    next_row,
    one_class,
    real_numbers,
    series,
    stochastic,
)
from cumulant.filtering.natural import ConjugateBank, ConjugatePosterior, observed
from cumulant.filtering.recursion import scheme_of, steps
from cumulant.measures.gaussian import Gaussian
from cumulant.measures.measure import Measure
from cumulant.measures.positive import Gamma
from cumulant.measures.project import FROM_TORCH
from cumulant.measures.simplex import Beta

__all__ = ["ConjugatePosterior", "SwitchingConjugate", "filter_conjugate", "update_conjugate"]

Likelihood = Measure | type


class SwitchingConjugate:
    """Modes A_t, states x_t of an exponential family, and observations conjugate to it (T26).

    P(A_t = j | A_{t-1} = i) = transition[i, j]; in mode j, x_t is the image of x_{t-1} under
    dynamics[j], and y_t given x_t has the law likelihood[j]. Time 0 is one transition before the
    first observation.

    ============ ========================== ================================== =====================
    prior        likelihood                 dynamics, besides None and `Renew` observations
    ============ ========================== ================================== =====================
    `Gamma`      `Poisson`, `Exponential`   `Scale`                            ``(*batch, T)``
    `Beta`       `Bernoulli`                `Flip`                             ``(*batch, T)``
    `Dirichlet`  `Categorical`              `Permute`                          ``(*batch, T, K)``
    `Gaussian`   ``Gaussian(zeros, R)``     `Linear`                           ``(*batch, T, k)``
    ============ ========================== ================================== =====================

    Categories are one-hot. NaN is missing; for a Gaussian, element by element. For large means with
    small variances use `SwitchingLinearGaussian`, the same filter in moments: natural parameters
    lose digits to cancellation there.

    Args:
        transition: ``(M, M)``, rows sum to one.
        initial: probabilities of the modes at time 0, ``(M,)``; by default the stationary
            law of `transition`.
        prior: the law of the state at time 0, of batch shape ``()``, or ``(M,)`` for one per mode.
        likelihood: a class, or the law of the noise; or a list of M of these.
        dynamics: a map, or a list of M; None leaves the state unchanged.

    Raises:
        InputError: a likelihood that is not conjugate to the prior, or a map under which its family
            is not closed.

    >>> import torch, cumulant as cm
    >>> from cumulant.filtering.conjugate import SwitchingConjugate, filter_conjugate
    >>> from cumulant.filtering.maps import Renew
    >>> rate = cm.Gamma(1.0, 0.5)
    >>> model = SwitchingConjugate(
    ...     transition=torch.tensor([[0.9, 0.1], [0.9, 0.1]]), initial=torch.tensor([1.0, 0.0]),
    ...     prior=rate, likelihood=cm.Poisson, dynamics=[None, Renew(rate)])
    >>> post = filter_conjugate(model, torch.tensor([2, 3, 1, 12]))
    >>> bool(post.mode_probabilities[-1, 1] > 0.8)
    True
    """

    def __init__(
        self,
        *,
        transition: Tensor,
        initial: Tensor | None = None,
        prior: Measure,
        likelihood: Likelihood | Sequence[Likelihood],
        dynamics: Map | Sequence[Map | None] | None = None,
    ) -> None:
        owner = "SwitchingConjugate"
        member = self.prior = member_of(owner, prior)
        if initial is None:
            got, _ = numbers(owner, transition=transition)
            stochastic(owner, got["transition"])
            one_class(owner, got["transition"])
            initial = stationary(got["transition"])
        given: dict[str, Any] = {"transition": transition, "initial": initial}
        given |= tensors_of("prior", member)
        for name, x in (("dynamics", dynamics), ("likelihood", likelihood)):
            for j, part in enumerate(x if isinstance(x, list | tuple) else [x]):
                given |= tensors_of(f"{name} {j}", part)
        got, weak = numbers(owner, **given)
        self.transition, self.initial = got["transition"], got["initial"]
        self.dtype = torch.get_default_dtype() if weak else self.transition.dtype
        self.device = self.transition.device
        M = self.modes = stochastic(owner, self.transition)
        initial_probabilities(owner, self.initial, M)
        if self.transition.ndim != 2 or self.initial.ndim != 1:
            raise InputError(
                f"{owner}: transition must be (M, M) and initial (M,), but they are "
                f"{tuple(self.transition.shape)} and {tuple(self.initial.shape)}."
            )
        if tuple(member.batch_shape) not in ((), (M,)):
            raise InputError(
                f"{owner}: prior must have batch shape () or ({M},), one for each mode, not "
                f"{tuple(member.batch_shape)}."
            )
        self.observation_size = p = member._event_size()
        self.scalar = isinstance(member, Gamma | Beta)
        self.dynamics = _for_modes(owner, "dynamics", dynamics, M)
        self.likelihoods = [
            FROM_TORCH.get(x, x) if isinstance(x, type) else x
            for x in _for_modes(owner, "likelihood", likelihood, M)
        ]
        for j, map in enumerate(self.dynamics):
            size = image_size(f"{owner}: dynamics of mode {j}", member, map)
            if size != p or (map is not None and map._batch):
                what = f"maps {p} numbers to {size}" if size != p else "is a batch of maps"
                raise InputError(
                    f"{owner}: dynamics of mode {j}, {type(map).__name__}, {what}, but every mode "
                    "needs one map that keeps the dimension of the state."
                )
        typical = torch.full((1, p), torch.nan, dtype=torch.float64, device=self.device)
        for law in self.likelihoods:
            if isinstance(law, Gaussian) and law.batch_shape:
                raise InputError(f"{owner}: give the noise laws of the modes as a list.")
            observed(owner, member, law, typical)

    def __repr__(self) -> str:
        kind = type(self.prior).__name__
        size = self.observation_size
        return f"SwitchingConjugate({kind}, modes={self.modes}, state_size={size})"


def _for_modes(owner: str, name: str, given: Any, modes: int) -> list[Any]:
    several = isinstance(given, list | tuple)
    out = list(cast(Sequence[Any], given)) if several else [given] * modes
    if len(out) != modes:
        raise InputError(f"{owner}: {name} has {len(out)} entries for {modes} modes (transition).")
    return out


def filter_conjugate(
    model: SwitchingConjugate,
    observations: Tensor | PandasLike,
    collapse: str | int = "gpb2",
    lengths: Tensor | None = None,
    progress: ProgressCallback | None = None,
) -> ConjugatePosterior:
    """What the observations say about modes and states, step by step (T26).

    log p(y | theta) = A(theta + t(y)) - A(theta) + log b(y), and the posterior is theta + t(y).

    Args:
        model: the model.
        observations: ``(*batch, T)`` numbers or ``(*batch, T, p)`` vectors; NaN is missing.
        collapse: as for `filter`.
        lengths: length of each series, ``(*batch,)``, if some are shorter than T.
        progress: called after each step.

    Returns:
        A `ConjugatePosterior`; differentiable in the parameters of the model.

    Raises:
        InputError: observations outside the support of the likelihood.
    """
    scheme = scheme_of("filter", collapse)
    y: Any = observations
    labels = labels_of(observations)
    if model.scalar:
        y = y.iloc[:, 0] if labels is not None and y.shape[1:] == (1,) else y
        y = real_numbers("filter", "observations", y, model.dtype, model.device)
        if y.ndim < 1 or y.shape[-1] < 1:
            raise InputError(
                f"filter: observations must have shape (*batch, T), T >= 1, not {tuple(y.shape)}."
            )
        y = y[..., None]
    bank = ConjugateBank(model, series("filter", model, y, lengths))
    belief, alike = bank.start()
    count = bank.observations.shape[-2]
    found = steps(bank, scheme, belief, count, alike=alike, progress=progress)
    return ConjugatePosterior(model, scheme, (bank.observations,), *found, labels=labels)


def update_conjugate(post: ConjugatePosterior, y: Tensor | PandasLike) -> ConjugatePosterior:
    """Extend a posterior by one observation; the same as filtering all of them at once.

    Args:
        post: from `filter_conjugate` or `update_conjugate`.
        y: the next observation, ``(*batch,)`` or ``(*batch, p)``; NaN is missing.
    """
    past, model = post.observations[0], post.model
    shape = past.shape[:-2] if model.scalar else (*past.shape[:-2], model.observation_size)
    value = next_row("update", y, past, tuple(shape))
    value = value[..., None] if model.scalar else value
    bank = ConjugateBank(model, value[..., None, :])
    found = steps(bank, post.scheme, post.beliefs[-1], 1, alike=post.scheme.memory == 1)
    labels = None if post.labels is None else post.labels.extended(y)
    return replace(post.followed(found, bank.observations), labels=labels)
