"""`filter` and `update`: beliefs from observations (THEORY T25)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cumulant.errors import InputError
from cumulant.filtering.checks import series
from cumulant.filtering.gaussian import GaussianBank, inputs_of
from cumulant.filtering.modes import chain, stateless
from cumulant.filtering.posterior import Posterior
from cumulant.filtering.recursion import Belief, Scheme, advance, scheme_of

__all__ = ["filter", "log_likelihood", "run", "update"]


def filter(
    model: Any,
    observations: Tensor,
    *,
    collapse: str | int = "gpb2",
    lengths: Tensor | None = None,
    inputs: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Posterior:
    """What the observations say about modes and states, step by step (T25).

    All schemes are exact as long as they have not collapsed anything: GPB(k) up to T = k.

    Args:
        model: a `SwitchingLinearGaussian` or `SwitchingNonlinear`.
        observations: ``(*batch, T, p)``; NaN is missing, element by element.
        collapse: ``"gpb2"``, ``"gpb1"``, ``"imm"``, k for GPB(k), which keeps M^(k-1) Gaussians, or
            ``"exact"``, which keeps all M^T.
        lengths: where series are shorter than T, how long each is, ``(*batch,)``.
        inputs: u, ``(*batch, T, m)``, if the model takes them.
        progress: called with the number of steps done and T.

    Returns:
        A `Posterior`; differentiable in every parameter of the model and the observations.

    >>> import torch, cumulant as cm
    >>> one = torch.ones(2, 1, 1)
    >>> model = cm.filtering.SwitchingLinearGaussian(
    ...     transition=torch.tensor([[0.9, 0.1], [0.2, 0.8]]), initial=torch.tensor([0.5, 0.5]),
    ...     dynamics=one, dynamics_noise=one * torch.tensor([0.1, 2.0])[:, None, None],
    ...     emission=one, emission_noise=one,
    ...     initial_mean=torch.zeros(1), initial_covariance=torch.eye(1))
    >>> post = cm.filtering.filter(model, torch.tensor([[0.1], [3.0], [torch.nan], [7.0]]))
    >>> post.mean.shape, bool(post.mode_probabilities[-1, 1] > 0.6)
    (torch.Size([4, 1]), True)
    """
    scheme = scheme_of("filter", collapse)
    y = series("filter", model, observations, lengths)
    u = inputs_of("filter", model, inputs, y.shape[-2], y)
    bank = GaussianBank(model, y, u)
    belief, alike = bank.start()
    return run(bank, scheme, belief, alike=alike, progress=progress)


def run(
    bank: GaussianBank,
    scheme: Scheme,
    belief: Belief,
    *,
    alike: bool,
    progress: Callable[[int, int], None] | None = None,
) -> Posterior:
    """Step after step of the bank's observations, from a belief on."""
    if stateless(bank):
        return _run_chain(bank, scheme, belief)
    T = bank.observations.shape[-2]
    beliefs, totals, predicted = [belief], list[Tensor](), list[Tensor]()
    for t in range(T):
        step = advance(bank, scheme, beliefs[-1], t, alike=alike and t == 0)
        beliefs.append(step.belief)
        totals.append(step.log_likelihood)
        predicted.append(step.log_predicted)
        if progress is not None:
            progress(t + 1, T)
    _whole_numbers(torch.stack(totals, -1), bank.first)
    return _posterior(bank, scheme, beliefs, totals, predicted)


def _run_chain(bank: GaussianBank, scheme: Scheme, start: Belief) -> Posterior:
    """The same for a model without a state, all steps at once."""
    found = chain(bank, start)
    total = found.log_joint.logsumexp(-1)
    weights = (found.log_joint - total[..., None]).to(bank.observations.dtype)[..., None, :]
    totals = total.diff(dim=-1, prepend=torch.zeros_like(total[..., :1]))
    _whole_numbers(totals, bank.first)
    beliefs = [start]
    beliefs += [Belief(w, start.message) for w in weights.unbind(-3)]
    steps = totals.to(bank.observations.dtype).unbind(-1)
    return _posterior(bank, scheme, beliefs, steps, found.log_predicted.unbind(-2))


def log_likelihood(
    model: Any, observations: Tensor, inputs: Tensor | None, scheme: Scheme
) -> Tensor:
    """log p(observations), ``(*batch,)``, of input that has been checked."""
    bank = GaussianBank(model, observations, inputs)
    belief, alike = bank.start()
    if stateless(bank):
        return chain(bank, belief).log_joint[..., -1, :].logsumexp(-1)
    return run(bank, scheme, belief, alike=alike).log_likelihood


def _posterior(
    bank: GaussianBank,
    scheme: Scheme,
    beliefs: Sequence[Belief],
    totals: Sequence[Tensor],
    predicted: Sequence[Tensor],
) -> Posterior:
    inputs = None if bank.inputs is None else (bank.inputs,)
    return Posterior(
        bank.model,
        scheme,
        (bank.observations,),
        inputs,
        tuple(beliefs),
        tuple(totals),
        tuple(predicted),
        bank.first,
    )


def _whole_numbers(totals: Tensor, first: int) -> None:
    """Raise where a likelihood is not a number."""
    bad = ~totals.detach().isfinite()
    if not bool(bad.any()):
        return
    at = bad.flatten(0, -2).any(0) if bad.ndim > 1 else bad
    raise InputError(
        f"filter: the observation of step {first + int(at.nonzero()[0])} (counted from 0) has no "
        "density: the predicted covariance of the observations is singular, or numbers overflow. "
        "With emission_noise R singular, the state must be uncertain where R is zero."
    )


def update(post: Posterior, y: Tensor, *, inputs: Tensor | None = None) -> Posterior:
    """Go on from a posterior by one observation; equal to filtering all at once.

    Args:
        post: from `filter` or `update`.
        y: the next observation, ``(*batch, p)``; NaN is missing.
        inputs: u, ``(*batch, m)``, if the model takes them.

    Returns:
        The posterior over all steps so far; ``post.latest()`` forgets the past, for endless use.
    """
    model = post.model
    value = torch.as_tensor(y, dtype=post.observations[0].dtype, device=model.device)
    want = (*post.observations[0].shape[:-2], model.observation_dimension)
    if tuple(value.shape) != want:
        raise InputError(
            f"update: y must be the next observation of each series, shape {want}, not "
            f"{tuple(value.shape)}."
        )
    if bool(value.isinf().any()):
        raise InputError("update: y holds an infinity; NaN marks what is missing.")
    u = None
    if inputs is not None or model.input_dimension:
        given = None if inputs is None else torch.as_tensor(inputs)[..., None, :]
        u = inputs_of("update", model, given, 1, value)
    bank = GaussianBank(model, value[..., None, :], u, first=post.first + post.steps)
    more = run(bank, post.scheme, post.beliefs[-1], alike=False)
    return replace(
        post,
        observations=post.observations + more.observations,
        inputs=None if u is None else (post.inputs or ()) + (u,),
        beliefs=post.beliefs + more.beliefs[1:],
        step_totals=post.step_totals + more.step_totals,
        log_predicted=post.log_predicted + more.log_predicted,
    )
