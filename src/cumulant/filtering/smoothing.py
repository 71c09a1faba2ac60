"""`smooth`: modes and states given the whole series, backward over the filter's beliefs (T25).

What the future says about a state, given the mode, is what turned the filter's message about it
into the smoothed one: N(m, P) into N(m + P r, P - P N P) for some r and N. The same r and N, as a
factor, are applied to the message of each pair of successive modes *before* the filter collapsed
it, which gives the pair its own later state and its own weight; a step of Rauch, Tung and Striebel
leads back, and pairs collapse over the later mode. This is the backward pass of expectation
propagation (Minka 2001; Zoeter and Heskes 2005). Kim's smoother gives all pairs with the same later
mode the same later state, and loses its way where the dynamics have little noise. Where the filter
has collapsed nothing, the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.errors import InputError
from cumulant.filtering import moments
from cumulant.filtering.gaussian import GaussianBank
from cumulant.filtering.model import gaussian_model
from cumulant.filtering.moments import symmetric, times
from cumulant.filtering.posterior import (
    Posterior,
    gaussian_posterior,
    over_time,
    stacked,
    step_of,
    whole,
)
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
    """What a backward step needs that does not depend on the future; pairs (history, next mode).

    Given the pair and the observations up to t + 1: its weight among those that the filter
    collapsed, log-weights of the pairs; means of x_t and of x_{t+1} before the observation; the
    gain J and what of x_t's covariance it leaves; mean and covariance of x_{t+1}. Then what the
    filter made of x_{t+1}, and its inverse.
    """

    log_conditional: Tensor
    mean: Tensor
    predicted: Tensor
    gain: Tensor
    left: Tensor
    after_mean: Tensor
    after_covariance: Tensor
    filtered_mean: Tensor
    filtered_covariance: Tensor
    precision: Tensor


@dataclass(frozen=True, repr=False, eq=False)
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

    def __repr__(self) -> str:
        batch = tuple(self.beliefs[-1].log_weights.shape[:-2])
        return f"Smoothed(batch={batch}, steps={len(self.pairs)})"

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
    """Modes and states given the whole series (T25).

    For one mode, the smoother of Rauch, Tung and Striebel; with several, exact wherever the filter
    has not collapsed anything (GPB(k) for T <= k), and for models without a state.

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
        raise InputError(
            "smooth: the posterior does not begin at the first step: it is a forecast, or has "
            "forgotten its past (latest()). Smooth the whole one."
        )
    beliefs, pairs = [post.beliefs[-1]], list[Tensor]()
    for pair, belief in backward(post):
        pairs.append(pair.log_weights)
        beliefs.append(belief)
    return Smoothed(tuple(beliefs[::-1]), tuple(pairs[::-1]))


def _same(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or first.parameters.keys() != second.parameters.keys():
        return False
    own = ("functions", "method")
    if any(getattr(first, k, None) != getattr(second, k, None) for k in own):
        return False
    return all(torch.equal(x, second.parameters[n]) for n, x in first.parameters.items())


def backward(post: Posterior) -> Iterator[tuple[Pair, Belief]]:
    """From the last step to the first: the smoothed pairs (t, t + 1) and the belief at t."""
    belief = post.beliefs[-1]
    for t, gains in _prepared(post):
        pair = _pair(gains, belief)
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


def _pair(gains: _Gains, later: Belief) -> Pair:
    """One step back, given what is known of the later state for each of its modes."""
    kept = later.log_weights.shape[-2]
    old = gains.log_conditional.shape[-2] // kept
    lead = later.log_weights.ndim - 2

    def repeat(x: Tensor) -> Tensor:
        """For each pair: the oldest mode of a history does not matter for the later state."""
        wide = x.unsqueeze(lead).expand(*x.shape[:lead], old, *x.shape[lead:])
        return wide.flatten(lead, lead + 1)

    if old == 1:  # nothing was collapsed: the later state is the pair's own
        log_weight, (mean, covariance) = torch.zeros_like(gains.log_conditional), later.message
    else:
        log_weight, mean, covariance = _informed(gains, later, repeat)
    log_weight = (gains.log_conditional + log_weight).unflatten(-2, (old, kept))
    log_weight = log_weight - log_weight.logsumexp(-3, keepdim=True)
    before = gains.mean + (gains.gain @ (mean - gains.predicted)[..., None])[..., 0]
    half = gains.gain @ covariance
    spread = symmetric(gains.left + half @ gains.gain.mT)
    weights = repeat(later.log_weights) + log_weight.flatten(-3, -2)
    return Pair(weights, (before, spread), (mean, covariance), half.mT)


def _informed(
    gains: _Gains, later: Belief, repeat: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What the future makes of each pair's later state: log-weight, mean, covariance.

    From N(m, P) to N(m + P r, P - P N P) the future is a factor exp(quadratic). On N(m', P') it
    has, with A = I + N (P' - P), N' = A^-1 N and r' = A^-1 (r - N (m' - m)), the result
    N(m' + P' r', P' - P' N' P') and the mass, relative to that on N(m, P),
    -log det A / 2 + r'(P' - P) A^-1 r / 2 + d' A^-1 r - d' N' d / 2 with d = m' - m.
    """
    mean, covariance = later.message
    P, inverse = gains.filtered_covariance, gains.precision
    r = inverse @ (mean - gains.filtered_mean)[..., None]
    N, widened = (repeat(x) for x in _information(inverse, P, covariance))
    r = repeat(r)
    own = gains.after_covariance
    d = (gains.after_mean - repeat(gains.filtered_mean))[..., None]
    more = own - repeat(P)
    eye = moments.identity(own.shape[-1], own.dtype, own.device)
    factor = eye + N @ more
    sign, size = torch.linalg.slogdet(factor.detach())
    fine = (sign > 0) & size.isfinite()
    factor = torch.where(fine[..., None, None], factor, eye)
    back = torch.linalg.inv_ex(factor).inverse
    N_own, r_own = symmetric(back @ N), back @ r
    exponent = r.mT @ more @ r_own / 2 + r_own.mT @ d - d.mT @ N_own @ d / 2
    log_weight = exponent[..., 0, 0] - torch.linalg.slogdet(factor).logabsdet / 2
    found = gains.after_mean + (own @ (r_own - N_own @ d))[..., 0]
    spread = symmetric(own - own @ N_own @ own + widened)
    # A factor that was taken from a collapsed message may be too strong for a pair: then the pair
    # takes over the later state as it is.
    unit = own.detach().diagonal(dim1=-2, dim2=-1)
    unit = torch.where(unit > 0, unit, 1.0).sqrt()
    scaled = spread.detach() / unit[..., :, None] / unit[..., None, :]
    slack = 1e3 * torch.finfo(own.dtype).eps
    fine = fine & (torch.linalg.cholesky_ex(scaled + slack * eye).info == 0)
    fine = fine & scaled.isfinite().all(-1).all(-1) & log_weight.detach().isfinite()
    return (
        torch.where(fine, log_weight, 0.0),
        torch.where(fine[..., None], found, repeat(mean)),
        torch.where(fine[..., None, None], spread, repeat(covariance)),
    )


def _information(inverse: Tensor, P: Tensor, smoothed: Tensor) -> tuple[Tensor, Tensor]:
    """N = P^-1 (P - smoothed) P^-1 as far as it is positive, and P (its rest) P.

    Where modes disagree about a state, the future leaves it wider than it was. Such a factor would
    grow without bound on messages that are wider still; so the widening is carried over as it is.
    """
    N = symmetric(inverse @ (P - smoothed) @ inverse)
    if not N.shape[-1]:
        return N, N
    # With P^-1 = K K', the eigenvalues of K'(P - smoothed) K say what was gained, or lost.
    root = torch.linalg.cholesky_ex(inverse).L
    lost = root @ _below_zero(symmetric(root.mT @ (P - smoothed) @ root)) @ root.mT
    return N - lost, -(P @ lost @ P)


def _below_zero(x: Tensor) -> Tensor:
    """The negative part of a symmetric matrix, f(V diag(e) V') = V diag(min(e, 0)) V'.

    torch's derivative of eigenvectors is infinite where eigenvalues coincide; that of f is not: it
    multiplies V' dx V by the divided differences of min(e, 0).
    """
    values, V = torch.linalg.eigh(x.detach().nan_to_num(0.0, 0.0, 0.0))
    below = values.clamp_max(0.0)
    gap = values[..., :, None] - values[..., None, :]
    rise = below[..., :, None] - below[..., None, :]
    same = gap.abs() <= 1e-12 * (1 + values.abs().amax(-1)[..., None, None])
    slope = torch.where(
        same, (values < 0).to(x.dtype)[..., None], rise / torch.where(same, 1.0, gap)
    )
    change = slope * (V.mT @ (x - x.detach()) @ V)
    return V @ (torch.diag_embed(below) + change) @ V.mT


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
        (piece,), (following,) = stacked(beliefs[begin:t]), stacked(beliefs[begin + 1 : t + 1])
        gains = _gains(step_of(post.bank, begin, t), piece, following)
        lead = len(shape) - 2
        steps = zip(*(x.unbind(lead) for x in gains), strict=True)
        each = [_Gains(*step) for step in steps]
        for s in reversed(range(begin, t)):
            yield s, each[s - begin]
        t = begin


def _gains(bank: GaussianBank, belief: Belief, following: Belief) -> _Gains:
    joint, waiting = branch(bank, belief, None)
    step = bank.linear("dynamics", waiting, None)
    message = moments.predict(step, *waiting)
    after, log_likelihood = bank.observe(message, None)
    grouped = (joint + log_likelihood).unflatten(-2, (-1, following.log_weights.shape[-2]))
    log_conditional = (grouped - grouped.logsumexp(-3, keepdim=True)).flatten(-3, -2)
    mean, covariance = waiting
    # J = P W' (W P W' + Q)^-1
    half = times(step.matrix, covariance)
    (white,), root, _ = moments.whiten(_regular(symmetric(message[1])), half)
    gain = moments.unwhiten(root, white).mT
    eye = moments.identity(mean.shape[-1], mean.dtype, mean.device)
    keep = eye - times(step.matrix.mT, gain.mT).mT
    left = keep @ covariance @ keep.mT + gain @ times(step.noise, gain.mT)
    means, covariances = following.message
    # Used twice on differences that are zero up to rounding where a covariance is singular.
    slack = torch.finfo(mean.dtype).eps ** 0.55
    inverse = torch.linalg.inv_ex(_regular(symmetric(covariances), slack)).inverse
    precision = symmetric(inverse)
    return _Gains(
        log_conditional,
        mean.expand(message[0].shape),
        message[0],
        gain,
        left,
        after[0],
        after[1],
        means,
        covariances,
        precision,
    )


def _regular(covariance: Tensor, slack: float | None = None) -> Tensor:
    """A covariance with a trace of noise, so that its inverse is a pseudo-inverse if singular.

    What it is applied to lies in the range of the covariance.
    """
    variances = covariance.detach().diagonal(dim1=-2, dim2=-1)
    if slack is None:
        slack = 10 * covariance.shape[-1] * torch.finfo(covariance.dtype).eps
    return covariance + torch.diag_embed(torch.where(variances > 0, slack * variances, 1.0))
