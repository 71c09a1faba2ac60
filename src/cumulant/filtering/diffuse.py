"""A start of which nothing is known: the exact limit of infinite variance.

A message is N(m, P + k D) as k goes to infinity. An observation with variance F + k f, f > 0, fixes
one direction of the state and has density (2 pi f)^(-1/2) up to powers of k, which are the same for
every model and left out, as in Koopman (1997) and Durbin and Koopman. Elements of an observation
are taken one after another, which makes every f a number. As soon as D is zero, the message is
N(m, P), and the ordinary filter takes over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cumulant.core.checks import holds
from cumulant.core.errors import InputError
from cumulant.core.typed import linalg
from cumulant.filtering import moments
from cumulant.filtering.kalman import GaussianBank
from cumulant.filtering.moments import symmetric, times
from cumulant.filtering.recursion import Belief, Beliefs, Message, Run, Scheme, advance

__all__ = ["diffuse_steps"]

# Relative to its size at the start, what rounding leaves of D.
NOTHING = 1e-10
LOG_2PI = math.log(2 * math.pi)


class _DiffuseBank(GaussianBank):
    """One filter for each mode and history, on messages (m, P, D)."""

    def predict(self, message: Message, t: int | None) -> Message:
        mean, covariance, unknown = message
        step = self.affine("dynamics", t)
        moved, spread = moments.predict(step, mean, symmetric(covariance))
        half = times(step.matrix, unknown)
        return moved, spread, half @ step.matrix.mT

    def observe(self, message: Message, t: int | None) -> tuple[Message, Tensor]:
        emission = self.affine("emission", t)
        value, seen = self._rows[0 if t is None else t]
        value, seen = value[..., 0, 0, :], None if seen is None else seen[..., 0, 0, :]
        p = value.shape[-1]
        there = torch.ones_like(value, dtype=torch.bool) if seen is None else seen
        there = there[..., None, None, :]
        mean, known, unknown = message
        lead = mean.shape[:-1]
        matrix = emission.matrix.expand(*lead, p, mean.shape[-1])
        surprise = (value[..., None, None, :] - emission.offset).expand(*lead, p)
        matrix, surprise, noise, scale = _apart(matrix, surprise, emission.noise, there)
        total = (-scale).expand(lead)
        for a in range(p):
            one = _Element(matrix[..., a, :], surprise[..., a], noise[..., a])
            new, log_likelihood = one.condition(mean, known, unknown)
            here = there[..., a].expand(lead)
            mean = torch.where(here[..., None], new[0], mean)
            known = torch.where(here[..., None, None], new[1], known)
            unknown = torch.where(here[..., None, None], new[2], unknown)
            total = total + torch.where(here, log_likelihood, 0.0)
        return (mean, known, unknown), total

    def collapse(self, log_weights: Tensor, message: Message) -> Message:
        mean, covariance = moments.collapse(log_weights, *message[:2])
        zero = torch.zeros_like(message[0])
        return mean, covariance, moments.collapse(log_weights, zero, message[2])[1]


def _apart(
    matrix: Tensor, surprise: Tensor, noise: Tensor, there: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The observation in coordinates in which the noises of its elements are independent.

    Also the logarithm of the volume that a unit of these coordinates has.
    """
    variances = noise.diagonal(dim1=-2, dim2=-1)
    if holds(noise == torch.diag_embed(variances)):
        none = torch.zeros((), dtype=noise.dtype, device=noise.device)
        return matrix, surprise, variances.expand_as(surprise), none
    both = there[..., None] & there[..., None, :]
    eye = torch.eye(noise.shape[-1], dtype=noise.dtype, device=noise.device)
    root, info = linalg.cholesky_ex(torch.where(both, noise, eye))
    if holds(info == 0) is False:
        raise InputError(
            "filter: an infinite initial_covariance needs emission_noise that is diagonal or "
            "positive definite."
        )
    scale = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    root = root.expand(*surprise.shape, -1)
    matrix = linalg.solve_triangular(root, matrix, upper=False)
    surprise = torch.where(there, surprise, 0.0)[..., None]
    surprise = linalg.solve_triangular(root, surprise, upper=False)[..., 0]
    return matrix, surprise, torch.ones_like(surprise), scale


class _Element:
    """One number that was observed: c'x + N(0, r), less what does not depend on x."""

    def __init__(self, c: Tensor, value: Tensor, noise: Tensor) -> None:
        self.c, self.value, self.noise = c, value, noise

    def condition(self, mean: Tensor, P: Tensor, D: Tensor) -> tuple[Message, Tensor]:
        """The message after it, and its log-likelihood without powers of k."""
        c = self.c[..., None]
        K, L = P @ c, D @ c
        F, f = (c.mT @ K)[..., 0, 0] + self.noise, (c.mT @ L)[..., 0, 0]
        size = (self.c.square().sum(-1) * D.diagonal(dim1=-2, dim2=-1).amax(-1)).detach()
        fixes = f.detach() > NOTHING * size
        first = fixes.flatten(-2)[..., :1, None]
        if holds(fixes == first) is False:
            raise InputError(
                "filter: with an infinite initial_covariance, each observation must tell of the "
                "start in all modes or in none: give a finite initial_covariance."
            )
        f, usual = torch.where(fixes, f, 1.0), torch.where(fixes & (F.detach() <= 0), 1.0, F)
        v = self.value - (self.c * mean).sum(-1)
        known, vague = fixes[..., None], fixes[..., None, None]
        gain = torch.where(known, L[..., 0] / f[..., None], K[..., 0] / usual[..., None])
        g = gain[..., None]
        fixed = P + F[..., None, None] * g @ g.mT - K @ g.mT - g @ K.mT
        message = (
            mean + gain * v[..., None],
            torch.where(vague, fixed, P - g @ K.mT),
            torch.where(vague, D - g @ L.mT, D),
        )
        cost = usual.log() + v.square() / usual
        return message, -(LOG_2PI + torch.where(fixes, f.log(), cost)) / 2


def diffuse_steps(bank: GaussianBank, scheme: Scheme, alike: bool) -> Run:
    """The first steps, until the observations have determined the state.

    Beliefs before that have no mean and no covariance: they are NaN.
    """
    model = bank.model
    diffuse = _DiffuseBank(model, bank.observations, bank.inputs, bank.first)
    belief, _ = diffuse.start()
    mean, covariance = belief.message
    vague = covariance.diagonal(dim1=-2, dim2=-1).isinf()
    known = torch.where(vague[..., None] | vague[..., None, :], 0.0, covariance)
    start = torch.diag_embed(vague.to(covariance.dtype))
    belief = Belief(belief.log_weights, (mean, known, start))
    beliefs, totals, predicted = [belief], list[Tensor](), list[Tensor]()
    size = 1.0
    for t in range(bank.observations.shape[-2]):
        same = alike if t == 0 else scheme.memory == 1
        step = advance(diffuse, scheme, belief, t, alike=same)
        mean, known, unknown = step.belief.message
        size = max(size, float(unknown.detach().abs().max()))
        unknown = torch.where(unknown.detach().abs() <= NOTHING * size, 0.0, unknown)
        belief = Belief(step.belief.log_weights, (mean, known, unknown))
        beliefs.append(belief)
        totals.append(step.log_likelihood)
        predicted.append(step.log_predicted)
        if not bool(unknown.detach().any()):
            found = [*map(_nothing, beliefs[:-1]), Belief(belief.log_weights, (mean, known))]
            return Run(
                _as_beliefs(found), (torch.stack(totals, -1),), (torch.stack(predicted, -2),)
            )
    raise InputError(
        "filter: the observations do not determine the state, of which nothing is known at the "
        "start: give a finite initial_covariance, or more observations."
    )


def _nothing(belief: Belief) -> Belief:
    """Probabilities of the modes, and NaN for the state."""
    mean, covariance = belief.message[:2]
    nan = (torch.full_like(x.detach(), torch.nan) for x in (mean, covariance))
    return Belief(belief.log_weights, tuple(nan))


def _as_beliefs(beliefs: Sequence[Belief]) -> Beliefs:
    """Each belief as a piece of one step."""
    time = beliefs[0].log_weights.ndim - 2
    return Beliefs(
        [Belief(w.unsqueeze(time), tuple(x.unsqueeze(time) for x in m)) for w, m in beliefs]
    )
