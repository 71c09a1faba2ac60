"""`filter` and `update`: beliefs from observations (docs/theory.md, T25)."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.progress import Progress, ProgressCallback
from cumulant.filtering.compiled import run_compiled, takes, total_compiled
from cumulant.filtering.conjugate import (
    SwitchingConjugate,
    filter_conjugate,
    update_conjugate,
)
from cumulant.filtering.diffuse import diffuse_steps
from cumulant.filtering.frames import PandasLike, labels_of
from cumulant.filtering.kalman import GaussianBank, inputs_of
from cumulant.filtering.model import SwitchingLinearGaussian, gaussian_model
from cumulant.filtering.model_checks import next_row, proper_start, real_numbers, series
from cumulant.filtering.modes import chain, log_total, stateless
from cumulant.filtering.natural import ConjugatePosterior
from cumulant.filtering.posterior import Posterior, gaussian_posterior, joined, step_of
from cumulant.filtering.recursion import Belief, Run, Scheme, fits, scheme_of, steps

__all__ = ["filter", "log_likelihood", "run", "update"]


@overload
def filter(
    model: SwitchingConjugate,
    observations: Tensor | PandasLike,
    *,
    collapse: str | int = "gpb2",
    lengths: Tensor | None = None,
    progress: ProgressCallback | None = None,
) -> ConjugatePosterior: ...


@overload
def filter(
    model: SwitchingLinearGaussian,
    observations: Tensor | PandasLike,
    *,
    collapse: str | int = "gpb2",
    lengths: Tensor | None = None,
    inputs: Tensor | None = None,
    progress: ProgressCallback | None = None,
) -> Posterior: ...


def filter(
    model: SwitchingLinearGaussian | SwitchingConjugate,
    observations: Tensor | PandasLike,
    *,
    collapse: str | int = "gpb2",
    lengths: Tensor | None = None,
    inputs: Tensor | None = None,
    progress: ProgressCallback | None = None,
) -> Posterior | ConjugatePosterior:
    """What the observations say about modes and states, step by step (T25).

    Every scheme is exact until it collapses something: GPB(k) up to T = k, or T = k - 1 if modes
    start with different states.

    Args:
        model: a `SwitchingLinearGaussian`, `SwitchingNonlinear` or `SwitchingConjugate`.
        observations: ``(*batch, T, p)``; NaN is missing, element by element. A pandas Series or
            DataFrame is one series, and its index is kept for ``to_pandas()``.
        collapse: ``"gpb2"``, ``"gpb1"``, ``"imm"``, k for GPB(k), which keeps M^(k-1) Gaussians, or
            ``"exact"``, which keeps all M^T.
        lengths: length of each series, ``(*batch,)``, if some are shorter than T.
        inputs: u, ``(*batch, T, m)``, if the model takes them.
        progress: called after each step, or once where the compiled recursion takes all of them.

    Returns:
        A `Posterior`, or for a `SwitchingConjugate` a `ConjugatePosterior`; differentiable in the
        observations and every parameter of the model.

    Raises:
        InputError: input that does not fit the model, or an observation without a density.

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
    if isinstance(model, SwitchingConjugate):
        if inputs is not None:
            raise InputError("filter: SwitchingConjugate takes no inputs.")
        return filter_conjugate(model, observations, collapse, lengths, progress)
    gaussian_model("filter", model)
    scheme = scheme_of("filter", collapse)
    y = series("filter", model, observations, lengths)
    u = inputs_of("filter", model, inputs, y.shape[-2], y)
    bank = GaussianBank(model, y, u)
    belief, alike = bank.start()
    found = run(bank, scheme, belief, alike=alike, progress=progress)
    labels = labels_of(observations)
    return found if labels is None else replace(found, labels=labels)


def run(
    bank: GaussianBank,
    scheme: Scheme,
    belief: Belief,
    *,
    alike: bool,
    progress: ProgressCallback | None = None,
) -> Posterior:
    """All steps of a bank, from a belief on."""
    count = bank.observations.shape[-2]
    if bank.first == 0 and bank.model.diffuse:
        return _from_nothing(bank, scheme, alike, progress)
    start = bank.plain(belief)
    fits(scheme, belief, count)
    if takes(bank, start):
        found = run_compiled(bank, scheme, start, alike=alike)
    elif stateless(bank):
        found = chain(bank, belief)
    else:
        found = None
    if found is not None:
        if progress is not None:
            progress(Progress(count, count))
    else:

        def all_steps(start: Belief) -> Run:
            return steps(
                bank, scheme, start, count, alike=alike, first=bank.first, progress=progress
            )

        try:
            found = all_steps(start)
        except InputError:  # perhaps for want of digits; if not, roots say the same
            found = None
        if found is None or bank.loses_digits(found.beliefs):
            found = all_steps(bank.rooted(belief))
    inputs = None if bank.inputs is None else (bank.inputs,)
    return Posterior(
        bank.model, scheme, (bank.observations,), *found, inputs=inputs, first=bank.first
    )


def _from_nothing(
    bank: GaussianBank, scheme: Scheme, alike: bool, progress: ProgressCallback | None
) -> Posterior:
    """All steps from a start of which nothing is known."""
    if getattr(bank.model, "functions", None):
        proper_start("filter", bank.model)
    found = diffuse_steps(bank, scheme, alike)
    begun, count = len(found.beliefs) - 1, bank.observations.shape[-2]
    inputs = None if bank.inputs is None else (bank.inputs,)
    post = Posterior(bank.model, scheme, (bank.observations,), *found, inputs=inputs)
    if begun == count:
        return post
    rest = step_of(bank, begun, count)
    same = scheme.memory == 1
    more = run(rest, scheme, found.beliefs[-1], alike=same, progress=progress)
    return replace(
        post,
        beliefs=joined(found.beliefs, more.beliefs[1:]),
        step_totals=(*found.step_totals, *more.step_totals),
        log_predicted=(*found.log_predicted, *more.log_predicted),
    )


def log_likelihood(
    model: SwitchingLinearGaussian,
    observations: Tensor,
    inputs: Tensor | None,
    scheme: Scheme,
    *,
    alike: bool | None = None,
) -> Tensor:
    """log p(observations), ``(*batch,)``, of input that has been checked.

    `alike` says whether all modes begin with the same message; by default, the model does.
    """
    bank = GaussianBank(model, observations, inputs)
    belief, same = bank.start()
    alike = same if alike is None else alike
    if model.diffuse:
        return run(bank, scheme, belief, alike=alike).log_likelihood
    if takes(bank, belief):
        fits(scheme, belief, observations.shape[-2])
        found = total_compiled(bank, scheme, belief, alike=alike)
        if found is not None:
            return found
    if stateless(bank):
        return log_total(bank, belief)
    return run(bank, scheme, belief, alike=alike).log_likelihood


@overload
def update(post: ConjugatePosterior, y: Tensor | PandasLike) -> ConjugatePosterior: ...


@overload
def update(
    post: Posterior, y: Tensor | PandasLike, *, inputs: Tensor | None = None
) -> Posterior: ...


def update(
    post: Posterior | ConjugatePosterior, y: Tensor | PandasLike, *, inputs: Tensor | None = None
) -> Posterior | ConjugatePosterior:
    """Extend a posterior by one observation; the same as filtering all of them at once.

    Args:
        post: from `filter` or `update`.
        y: the next observation, ``(*batch, p)``; NaN is missing. The name of a row of a DataFrame
            becomes its label.
        inputs: u, ``(*batch, m)``, if the model takes them.

    Returns:
        The posterior over all steps so far. ``post.latest()`` drops the past, so that memory does
        not grow.
    """
    if isinstance(post, ConjugatePosterior):
        if inputs is not None:
            raise InputError("update: SwitchingConjugate takes no inputs.")
        return update_conjugate(post, y)
    gaussian_posterior("update", post)
    model = post.model
    past = post.observations[0]
    value = next_row("update", y, past, (*past.shape[:-2], model.observation_size))
    u = None
    if inputs is not None or model.input_size:
        given = None
        if inputs is not None:
            given = real_numbers("update", "inputs", inputs, value.dtype, value.device)
            want = (*value.shape[:-1], model.input_size)
            if tuple(given.shape) != want:
                raise InputError(
                    f"update: inputs must have shape {want}, not {tuple(given.shape)}."
                )
            given = given[..., None, :]
        u = inputs_of("update", model, given, 1, value)
    bank = GaussianBank(model, value[..., None, :], u, first=post.first + post.steps)
    more = run(bank, post.scheme, post.beliefs[-1], alike=post.scheme.memory == 1)
    found = Run(more.beliefs, more.step_totals, more.log_predicted)
    all_inputs = () if u is None else (*(post.inputs or ()), u)
    labels = None if post.labels is None else post.labels.extended(y)
    post = post.followed(found, bank.observations)
    return replace(post, inputs=all_inputs or None, labels=labels)
