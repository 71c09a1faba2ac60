"""`smooth`: modes and states given the whole series, backward over the filter's beliefs (T25).

For each history g that the filter kept and each next mode j, the state is smoothed as by Rauch,
Tung and Striebel; the weights of the histories given (j, y_1..T) are taken as those given
(j, y_1..t+1), which the filter knows. That is Kim's smoother with one more observation in the
weights: exact for one mode, for models without a state, for exact enumeration, and with GPB(k) for
T <= k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.errors import InputError
from cumulant.filtering import moments
from cumulant.filtering.gaussian import GaussianBank
from cumulant.filtering.model import gaussian_model, gaussian_posterior
from cumulant.filtering.moments import symmetric, times
from cumulant.filtering.posterior import Posterior, over_time, stacked, step_of, whole
from cumulant.filtering.recursion import Belief, branch

__all__ = ["Pair", "Smoothed", "backward", "smooth"]

# Steps are prepared together as long as their covariances hold no more numbers than this.
MOST_NUMBERS = 1 << 22


class Pair(NamedTuple):
    """States at t and t + 1, for each history and mode at t and each mode at t + 1.

    Log-weights ``(*batch, G M, M)`` of the pairs given all observations; means and covariances of
    x_t, of x_{t+1}, and the covariance of x_{t+1} with x_t.
    """

    log_weights: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    cross: Tensor


class _Gains(NamedTuple):
    """What the backward step needs that does not depend on the future, time as a dimension."""

    log_conditional: Tensor
    mean: Tensor
    predicted: Tensor
    gain: Tensor
    left: Tensor
    log_weights: Tensor
    after_mean: Tensor
    after_covariance: Tensor


@dataclass(frozen=True)
class Smoothed:
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

    beliefs: tuple[Belief, ...]
    pairs: tuple[Tensor, ...]

    @cached_property
    def mode_probabilities(self) -> Tensor:
        return over_time(self.beliefs[1:], lambda b: b.log_weights.logsumexp(-2).exp())

    @cached_property
    def transition_probabilities(self) -> Tensor:
        M = self.beliefs[0].log_weights.shape[-1]
        each = [w.unflatten(-2, (-1, M)).logsumexp(-3).exp() for w in self.pairs]
        return torch.stack(each, -3)

    @cached_property
    def mean(self) -> Tensor:
        return over_time(self.beliefs[1:], lambda b: whole(b)[0])

    @cached_property
    def covariance(self) -> Tensor:
        return over_time(self.beliefs[1:], lambda b: whole(b)[1])

    @cached_property
    def mode_means(self) -> Tensor:
        return over_time(
            self.beliefs[1:], lambda b: moments.collapse(b.log_weights, *b.message)[0].squeeze(-3)
        )

    @cached_property
    def mode_covariances(self) -> Tensor:
        return symmetric(
            over_time(
                self.beliefs[1:],
                lambda b: moments.collapse(b.log_weights, *b.message)[1].squeeze(-4),
            )
        )

    @property
    def initial_mode_probabilities(self) -> Tensor:
        return self.beliefs[0].log_weights.logsumexp(-2).exp()

    @property
    def initial_mean(self) -> Tensor:
        return whole(self.beliefs[0])[0]

    @property
    def initial_covariance(self) -> Tensor:
        return whole(self.beliefs[0])[1]


def smooth(model: Any, post: Posterior) -> Smoothed:
    """Modes and states given the whole series (Kim; Rauch, Tung and Striebel for one mode).

    Args:
        model: that made `post`.
        post: from `filter` or `update`.

    >>> import torch, cumulant as cm
    >>> one = torch.ones(1, 1, 1)
    >>> model = cm.filtering.SwitchingLinearGaussian(
    ...     transition=torch.ones(1, 1), initial=torch.ones(1), dynamics=one, dynamics_noise=one,
    ...     emission=one, emission_noise=one, initial_mean=torch.zeros(1),
    ...     initial_covariance=torch.zeros(1, 1))
    >>> post = cm.filtering.filter(model, torch.tensor([[torch.nan], [3.0]]))
    >>> cm.filtering.smooth(model, post).mean
    tensor([[1.0000],
            [2.0000]])
    """
    gaussian_model("smooth", model)
    gaussian_posterior("smooth", post)
    if model is not post.model and not _same(model, post.model):
        raise InputError("smooth: the posterior was made by another model; filter with this one.")
    if post.first > 0:
        raise InputError("smooth: the posterior has forgotten its past (latest()); keep it whole.")
    beliefs, pairs = [post.beliefs[-1]], list[Tensor]()
    for pair, belief in backward(post):
        pairs.append(pair.log_weights)
        beliefs.append(belief)
    return Smoothed(tuple(beliefs[::-1]), tuple(pairs[::-1]))


def _same(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or first.parameters.keys() != second.parameters.keys():
        return False
    return all(torch.equal(x, second.parameters[n]) for n, x in first.parameters.items())


def backward(post: Posterior) -> Iterator[tuple[Pair, Belief]]:
    """From the last step to the first: the smoothed pairs (t, t + 1) and the belief at t."""
    belief = post.beliefs[-1]
    last = _last_seen(post)
    for t, gains in _prepared(post):
        pair = _pair(gains, belief)
        ends = last <= t if post.scheme.knows_pairs else last < t
        if bool(ends.any()):
            pair = _ended(gains, pair, ends)
        lead, shape = pair.log_weights.ndim - 2, post.beliefs[t].log_weights.shape[-2:]
        across = tuple(x.transpose(lead, lead + 1) for x in pair.before)
        mean, covariance = moments.collapse(pair.log_weights.mT, *across)
        belief = Belief(
            pair.log_weights.logsumexp(-1).unflatten(-1, shape),
            (
                mean.squeeze(lead).unflatten(lead, shape),
                symmetric(covariance.squeeze(lead).unflatten(lead, shape)),
            ),
        )
        yield pair, belief


def _last_seen(post: Posterior) -> Tensor:
    """The last step of each series that shows anything, ``(*batch,)``."""
    batch = post.beliefs[-1].log_weights.shape[:-2]
    at = torch.full(batch, post.steps - 1)
    if post.bank.seen is not None:
        shown = post.bank.seen.any(-1)[..., 0, 0].to("cpu", torch.long)
        at = (shown * torch.arange(1, post.steps + 1)).amax(-1).expand(batch) - 1
    return at


def _ended(gains: _Gains, pair: Pair, ends: Tensor) -> Pair:
    """Where nothing is seen later, the filter knows each pair by itself, before it collapses."""
    after = gains.after_mean, gains.after_covariance
    own = _pair(
        gains._replace(log_conditional=torch.zeros_like(gains.log_weights)),
        Belief(gains.log_weights, after),
    )
    if bool(ends.all()):
        return own
    ends = ends.to(gains.mean.device)

    def choose(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(ends.reshape(*ends.shape, *(1,) * (x.ndim - ends.ndim)), x, y)

    return Pair(
        choose(own.log_weights, pair.log_weights),
        (choose(own.before[0], pair.before[0]), choose(own.before[1], pair.before[1])),
        (choose(own.after[0], pair.after[0]), choose(own.after[1], pair.after[1])),
        choose(own.cross, pair.cross),
    )


def _pair(gains: _Gains, later: Belief) -> Pair:
    """One step back: RTS for each pair, given what is known of the later state."""
    kept = later.log_weights.shape[-2]
    old = gains.log_conditional.shape[-2] // kept
    lead = later.log_weights.ndim - 2

    def repeat(x: Tensor) -> Tensor:
        """The later message of each pair: the oldest mode of a history does not matter for it."""
        wide = x.unsqueeze(lead).expand(*x.shape[:lead], old, *x.shape[lead:])
        return wide.flatten(lead, lead + 1)

    after_mean, after_covariance = (repeat(x) for x in later.message)
    mean = gains.mean + (gains.gain @ (after_mean - gains.predicted)[..., None])[..., 0]
    half = gains.gain @ after_covariance
    covariance = symmetric(gains.left + half @ gains.gain.mT)
    weights = repeat(later.log_weights) + gains.log_conditional
    return Pair(weights, (mean, covariance), (after_mean, after_covariance), half.mT)


def _prepared(post: Posterior) -> Iterator[tuple[int, _Gains]]:
    """The gains of all steps, last first, prepared many at a time."""
    beliefs = post.beliefs
    t = post.steps
    while t > 0:
        shape = beliefs[t - 1].log_weights.shape
        n = post.model.state_dimension
        room = max(MOST_NUMBERS // max(shape.numel() * shape[-1] * n * n, 1), 1)
        begin = max(t - room, 0)
        while beliefs[begin].log_weights.shape != shape or (
            beliefs[begin + 1].log_weights.shape != beliefs[t].log_weights.shape
        ):
            begin += 1
        (piece,) = stacked(beliefs[begin:t])
        kept = beliefs[t].log_weights.shape[-2]
        gains = _gains(step_of(post.bank, begin, t), piece, kept)
        lead = len(shape) - 2
        steps = zip(*(x.unbind(lead) for x in gains), strict=True)
        each = [_Gains(*step) for step in steps]
        for s in reversed(range(begin, t)):
            yield s, each[s - begin]
        t = begin


def _gains(bank: GaussianBank, belief: Belief, kept: int) -> _Gains:
    joint, waiting = branch(bank, belief, None)
    step = bank.linear("dynamics", waiting, None)
    message = moments.predict(step, *waiting)
    after, log_likelihood = bank.observe(message, None)
    weights = joint + log_likelihood
    weights = weights - weights.flatten(-2).logsumexp(-1)[..., None, None]
    grouped = weights.unflatten(-2, (-1, kept))
    log_conditional = (grouped - grouped.logsumexp(-3, keepdim=True)).flatten(-3, -2)
    mean, covariance = waiting
    predicted = symmetric(message[1])
    # J = P W' (W P W' + Q)^-1, through a pseudo-inverse where the prediction is singular: the
    # range of W P lies in that of the prediction, so a trace of noise does it.
    variances = predicted.detach().diagonal(dim1=-2, dim2=-1)
    slack = 10 * mean.shape[-1] * torch.finfo(mean.dtype).eps
    noise = torch.where(variances > 0, slack * variances, 1.0)
    half = times(step.matrix, covariance)
    (white,), root, _ = moments.whiten(predicted + torch.diag_embed(noise), half)
    gain = moments.unwhiten(root, white).mT
    eye = moments.identity(mean.shape[-1], mean.dtype, mean.device)
    keep = eye - times(step.matrix.mT, gain.mT).mT
    left = keep @ covariance @ keep.mT + gain @ times(step.noise, gain.mT)
    full = message[0].shape
    return _Gains(log_conditional, mean.expand(full), message[0], gain, left, weights, *after)
