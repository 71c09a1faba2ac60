"""The smoother's pass: backward over the filter's beliefs, in square roots (T25).

What the future says about a state, given the mode, is what turned the filter's message about it
into the smoothed one: N(m, P) into N(m + P r, P - P N P) for some r and N. The same r and N, as a
factor, are applied to the message of each pair of successive modes *before* the filter collapsed
it, which gives the pair its own later state and its own weight; a step of Rauch, Tung and Striebel
leads back, and pairs collapse over the later mode. This is the backward pass of expectation
propagation (Minka 2001; Zoeter and Heskes 2005). Kim's smoother gives all pairs with the same later
mode the same later state, and loses its way where the dynamics have little noise. Where the filter
has collapsed nothing, the result is exact.

Covariances are sums of squares of roots (`roots.py`), and gains are pseudo-inverses, so singular
noises, known states and vague starts need no special care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.autodiff import on_tape
from cumulant.core.typed import linalg
from cumulant.filtering import moments
from cumulant.filtering.kalman import GaussianBank
from cumulant.filtering.moments import symmetric, times
from cumulant.filtering.posterior import Posterior, alike, stacked, step_of
from cumulant.filtering.recursion import Belief, branch
from cumulant.filtering.roots import (
    collapsed,
    frame_of,
    quotient,
    triangular,
    update,
    valued,
    whitener,
)

__all__ = ["Pair", "backward"]

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
    collapsed; means of x_t and of x_{t+1} before the observation; the gain J, what of x_t's
    covariance it leaves, and a root of that. Then the later state of each pair, if the filter
    collapsed any.
    """

    log_conditional: Tensor
    mean: Tensor
    predicted: Tensor
    gain: Tensor
    left: Tensor
    left_root: Tensor
    after: tuple[Tensor, ...]


class _After(NamedTuple):
    """x_{t+1} after its observation: of each pair, and as the filter collapsed them.

    Means, covariances and roots; the map X to coordinates in which the collapsed message has unit
    covariance, and which of them are void because it is singular.
    """

    mean: Tensor
    covariance: Tensor
    root: Tensor
    filtered_mean: Tensor
    filtered_covariance: Tensor
    filtered_root: Tensor
    whitener: Tensor
    void: Tensor


class _Split(NamedTuple):
    """What the future says, in coordinates of unit covariance; roots are constants.

    N, the part of I - smoothed that is positive; a root of N (I - N); one of the part that is
    negative.
    """

    information: Tensor
    noise_root: Tensor
    wider_root: Tensor


def backward(post: Posterior) -> Iterator[tuple[Pair, Belief]]:
    """From the last step to the first: the smoothed pairs (t, t + 1) and the belief at t."""
    weights, message = post.beliefs[-1]
    belief = Belief(weights, message[:2])
    covariance = symmetric(belief.message[1])
    root = message[2] if len(message) > 2 else frame_of(covariance).root
    for t, gains in _prepared(post):
        pair, columns = _pair(gains, belief, root)
        lead, shape = pair.log_weights.ndim - 2, post.beliefs[t].log_weights.shape[-2:]
        across = tuple(x.transpose(lead, lead + 1) for x in pair.before)
        mean, covariance = moments.collapse(pair.log_weights.mT, *across)
        away = pair.before[0] - mean.transpose(lead, lead + 1)
        root = torch.unflatten(collapsed(pair.log_weights, away, columns), lead, shape)
        belief = Belief(
            torch.unflatten(pair.log_weights.logsumexp(-1), -1, shape),
            (
                torch.unflatten(mean.squeeze(lead), lead, shape),
                symmetric(torch.unflatten(covariance.squeeze(lead), lead, shape)),
            ),
        )
        yield pair, belief


def _pair(gains: _Gains, later: Belief, root: Tensor) -> tuple[Pair, Tensor]:
    """One step back, given what is known of the later state for each of its modes.

    Args:
        gains: of this step.
        later: the smoothed belief at t + 1.
        root: of its covariances.

    Returns:
        The pair, and roots ``(..., n, columns)`` of the covariances of its earlier state.
    """
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
        after = _After(*gains.after)
        log_weight, mean, covariance, root = _informed(after, later.message, root, repeat)
    log_weight = torch.unflatten(gains.log_conditional + log_weight, -2, (old, kept))
    log_weight = log_weight - log_weight.logsumexp(-3, keepdim=True)
    J = gains.gain
    before = gains.mean + (J @ (mean - gains.predicted)[..., None])[..., 0]
    half = J @ covariance
    columns = torch.cat([gains.left_root, J.detach() @ root], -1)
    spread = columns @ columns.mT
    if on_tape(half):
        spread = valued(spread, gains.left + half @ J.mT)
    weights = repeat(later.log_weights) + log_weight.flatten(-3, -2)
    return Pair(weights, (before, spread), (mean, covariance), half.mT), columns


def _informed(
    after: _After, smoothed: tuple[Tensor, ...], root: Tensor, repeat: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the future makes of each pair's later state: log-weight, mean, covariance, a root of it.

    In coordinates z in which the filter's message is N(0, I), let the smoothed one be N(s, I - N).
    Then the future is the factor exp(s'z) times the likelihood of seeing N^(1/2) s, which is
    N^(1/2) z with noise of covariance I - N. On a pair's message N(d, S) the first makes it
    N(d + S s, S); the second is a Kalman update with the gain S A^-1 N^(1/2), A = I + N (S - I), in
    Joseph's form. With u = d + S s - s, the mass relative to that on N(0, I) is
    exp(s'(S - I) s / 2 + s'd - u' A^-1 N u / 2) / sqrt(det A).
    """
    s = repeat(after.whitener @ (smoothed[0] - after.filtered_mean)[..., None])
    future = _Split(*map(repeat, _split(after.whitener, smoothed[1], root, after.void)))
    X, own = repeat(after.whitener), after.covariance
    N = future.information
    unit = torch.diag_embed(1 - repeat(after.void))
    half = X.detach() @ after.root
    S = valued(half @ half.mT, X @ own @ X.mT if on_tape(X, own) else half)
    d = X @ (after.mean - repeat(after.filtered_mean))[..., None]
    eye = moments.identity(own.shape[-1], own.dtype, own.device)
    A = eye + N @ (S - unit)
    found = linalg.inv_ex(A)
    sign, size = linalg.slogdet(A)
    fine = (found.info == 0) & (sign > 0) & size.isfinite()
    back = torch.where(fine[..., None, None], found.inverse, eye)
    N_own = symmetric(back @ N)
    u = d + S @ s - s
    exponent = s.mT @ ((S - unit) @ s / 2 + d) - u.mT @ N_own @ u / 2
    log_weight = exponent[..., 0, 0] - torch.where(fine, size, 0.0) / 2
    out = own @ X.mT
    mean = after.mean + (out @ (s - N_own @ u))[..., 0]
    keep, gain = eye - out @ N_own @ X, out @ back
    scale = repeat(after.filtered_root)
    parts = keep.detach() @ after.root, gain.detach() @ future.noise_root, scale @ future.wider_root
    columns = torch.cat([x.expand(*keep.shape[:-1], -1) for x in parts], -1)

    covariance = columns @ columns.mT
    if on_tape(keep, gain, own):
        wide = repeat(after.filtered_covariance) @ X.mT
        wider = N - unit + X @ repeat(smoothed[1]) @ X.mT
        seen = keep @ own @ keep.mT + gain @ (N - N @ N) @ gain.mT
        covariance = valued(covariance, seen + wide @ wider @ wide.mT)
    # Where the pair is certain of what the future contradicts, it has no weight of its own.
    fine = fine & log_weight.detach().isfinite()
    taken = torch.nn.functional.pad(repeat(root), (0, columns.shape[-1] - root.shape[-1]))
    return (
        torch.where(fine, log_weight, 0.0),
        torch.where(fine[..., None], mean, repeat(smoothed[0])),
        torch.where(fine[..., None, None], covariance, repeat(smoothed[1])),
        torch.where(fine[..., None, None], columns, taken),
    )


def _split(X: Tensor, smoothed: Tensor, root: Tensor, void: Tensor) -> _Split:
    """I - X smoothed X' as N, its positive part, and what is negative.

    Where modes disagree about a state, the future leaves it wider than it was. Such a factor would
    grow without bound on messages that are wider still; so the widening is carried over as it is.
    """
    # Void coordinates count as unchanged.
    V, sizes, _ = linalg.svd(
        torch.cat([X.detach() @ root, torch.diag_embed(void)], -1), full_matrices=False
    )
    rest = sizes.square()
    values = 1 - rest
    gained, lost = values.clamp_min(0.0), (-values).clamp_min(0.0)

    taped = on_tape(X, smoothed)
    change = _positive(values, V, -(X @ smoothed @ X.mT)) if taped else V
    N = valued((V * gained[..., None, :]) @ V.mT, change)
    noise = gained * rest.clamp_max(1.0)
    return _Split(N, V * noise.sqrt()[..., None, :], V * lost.sqrt()[..., None, :])


def _positive(values: Tensor, V: Tensor, x: Tensor) -> Tensor:
    """A map with the derivative of f(V diag(e) V') = V diag(max(e, 0)) V', by divided differences.

    torch's derivative of eigenvectors is infinite where eigenvalues coincide; this is not.
    """
    gained = values.clamp_min(0.0)
    gap = values[..., :, None] - values[..., None, :]
    rise = gained[..., :, None] - gained[..., None, :]
    same = gap.abs() <= 1e-12 * (1 + values.abs().amax(-1)[..., None, None])
    slope = torch.where(
        same, (values > 0).to(gap.dtype)[..., None], rise / torch.where(same, 1.0, gap)
    )
    return V @ (slope * (V.mT @ x @ V)) @ V.mT


def _prepared(post: Posterior) -> Iterator[tuple[int, _Gains]]:
    """The gains of all steps, last first, prepared many at a time."""
    beliefs = post.beliefs
    unit = _largest(beliefs)
    t = post.steps
    while t > 0:
        shape = beliefs[t - 1].log_weights.shape
        n = post.model.state_size
        room = max(MOST_NUMBERS // max(shape.numel() * shape[-1] * n * n, 1), 1)
        begin: int = max(t - room, 0)
        while not alike(beliefs[begin], beliefs[t - 1]) or not alike(
            beliefs[begin + 1], beliefs[t]
        ):
            begin += 1
        (piece,), (following,) = stacked(beliefs[begin:t]), stacked(beliefs[begin + 1 : t + 1])
        gains = _gains(step_of(post.bank, begin, t), piece, following, unit)
        lead = len(shape) - 2
        each = [x.unbind(lead) for x in gains[:-1]]
        after = [x.unbind(lead) for x in gains.after]
        for s in reversed(range(t - begin)):
            yield begin + s, _Gains(*(x[s] for x in each), after=tuple(x[s] for x in after))
        t = begin


def _largest(beliefs: Sequence[Belief]) -> Tensor:
    """The largest standard deviation of each coordinate over time, ``(*batch, 1, 1, 1, n, 1)``."""
    each = [b.message[1].detach().diagonal(dim1=-2, dim2=-1).amax((-3, -2)) for b in beliefs]
    largest = torch.stack(each).amax(0)
    return torch.where(largest > 0, largest, 1.0).sqrt()[..., None, None, None, :, None]


def _gains(bank: GaussianBank, belief: Belief, following: Belief, unit: Tensor) -> _Gains:
    joint, waiting = branch(bank, belief, None)
    mean, P = waiting[0], symmetric(waiting[1])
    rooted = len(waiting) > 2
    step = bank.linear("dynamics", (mean, P), None)
    message = moments.predict(step, mean, P)
    # x_{t+1} = W L z + Q^(1/2) w; J = P W' (W P W' + Q)^+ is L times what x_{t+1} tells of z.
    root, noise = frame_of(P, *waiting[2:], unit=unit).root, frame_of(step.noise).root
    lead = message[1].shape[:-2]
    n = mean.shape[-1]
    moved = times(step.matrix.detach(), root).expand(*lead, n, n)
    both = torch.cat([moved, noise.expand(*lead, n, n)], -1)
    later = frame_of(symmetric(message[1]), both, unit if rooted else None)
    assert later.right is not None
    value = root @ later.right[..., :n].mT @ later.inverse
    J = quotient(value, times(step.matrix, P).mT, message[1], later)
    eye = moments.identity(n, mean.dtype, mean.device)
    keep = eye - times(step.matrix.mT, J.mT).mT
    left_root = triangular(torch.cat([keep.detach() @ root, J.detach() @ noise], -1))
    left = left_root @ left_root.mT
    if on_tape(keep, J, step.noise):
        left = valued(left, keep @ P @ keep.mT + J @ times(step.noise, J.mT))
    emission = bank.linear("emission", message, None)
    seen = update(emission.matrix, frame_of(emission.noise).root, later.root, bank.seen)
    observed = moments.observe(emission, *message, bank.value, bank.seen, seen)
    grouped = joint + observed.log_likelihood
    grouped = torch.unflatten(grouped, -2, (-1, following.log_weights.shape[-2]))
    log_conditional = (grouped - grouped.logsumexp(-3, keepdim=True)).flatten(-3, -2)
    after: tuple[Tensor, ...] = ()
    if log_conditional.shape[-2] > following.log_weights.shape[-2]:
        means, covariances = following.message[0], symmetric(following.message[1])
        frame = frame_of(covariances, *following.message[2:], unit=unit)
        after = _After(
            *(observed.mean, symmetric(observed.covariance), seen.root),
            *(means, covariances, frame.root, whitener(covariances, frame), frame.void),
        )
    everywhere = mean.expand(message[0].shape)
    return _Gains(log_conditional, everywhere, message[0], J, left, left_root, after)
