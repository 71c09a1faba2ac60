"""Inference in a random walk of contexts by mean field (docs/theory.md, T38)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.core.checks import finite, numbers, real, require
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.dynamics.fixed_point import FixedPoint, fixed_point
from cumulant.measures.measure import Measure
from cumulant.measures.sphere import VonMisesFisher

__all__ = ["WalkMeanField", "walk_mean_field"]


@dataclass(frozen=True)
class WalkMeanField:
    """A solution of the mean-field equations of a walk.

    Attributes:
        context: E[c_t], ``(T, d)``, of length at most 1.
        word: E[v_w] of a word not seen at each place, ``(T, d)``: attention over the vocabulary.
        natural_parameter: eta_t of each context, ``(T, d)``.
        free_energy: at least -log Z, and stationary here.
        second_order: what the free energy lacks to second order in the couplings, >= 0 (Plefka
            1982): where it is not small, neither are the errors of mean field.
        solution: the `FixedPoint` it came from, with its status.
    """

    context: Tensor
    word: Tensor
    natural_parameter: Tensor
    free_energy: Tensor
    second_order: Tensor
    solution: FixedPoint

    __repr__ = described_fields


def walk_mean_field(
    vocabulary: Measure,
    seen: Tensor,
    *,
    stiffness: float,
    unseen: Tensor | float = 0.0,
    start: Tensor | None = None,
    solver: str = "damped",
    tol: float | None = None,
    max_steps: int = 10_000,
    damping: float = 0.5,
    throw: bool = True,
) -> WalkMeanField:
    """Contexts on a sphere, inferred from the words they emit: attention and normalization (T38).

    The law of contexts c_1, ..., c_T on the unit sphere and of words w is proportional to
    exp(stiffness sum_t <c_t, c_(t+1)> + sum <v_w, c_t>), the last sum over all words, each with
    its context. Its naive mean-field equations alternate::

        word_t = grad G_vocabulary(context_t)                       (attention, query context_t)
        eta_t = stiffness (context_(t-1) + context_(t+1)) + seen_t + unseen_t word_t
        context_t = A_d(|eta_t|) eta_t / |eta_t|                    (the sphere's own grad G)

    Args:
        vocabulary: the words as a measure with u(x) = x, such as ``Empirical(vectors)``.
        seen: sum of the vectors of the words seen at each context, ``(T, d)``; zero where none was.
        stiffness: how strongly neighboring contexts agree: 0 not at all; a step of the walk has
            the mean square (d - 1) / stiffness if that is small.
        unseen: how many words of each context were not seen, ``(T,)`` or one number.
        start: contexts ``(T, d)`` to start from; by default those that the seen words alone give,
            plus a little in fixed pseudo-random directions.
        solver, tol, max_steps, damping, throw: see `fixed_point`.

    Returns:
        `WalkMeanField`; its context is differentiable in ``seen`` and the vocabulary.

    Raises:
        InputError: shapes do not fit, or ``stiffness`` or ``unseen`` is negative.

    A word seen in the middle of three places says what the others are about:

    >>> import torch, cumulant as cm
    >>> v = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0]], dtype=torch.float64)
    >>> seen = torch.stack([0 * v[0], v[0], 0 * v[0]])
    >>> cm.dynamics.walk_mean_field(cm.Empirical(v), seen, stiffness=1.0).context[:, 0]
    tensor([0.3663, 0.7881, 0.3663], dtype=torch.float64)
    """
    field, many = _checked("walk_mean_field", vocabulary, seen, unseen)
    kappa = real("walk_mean_field", "stiffness", stiffness, least=0.0)
    count, d = field.shape
    sphere = VonMisesFisher(torch.eye(d, dtype=field.dtype, device=field.device)[0], 0.0)

    def tilt(m: Tensor) -> Tensor:
        return kappa * _beside(m) + field + many * vocabulary.mean(m).to(field.dtype)

    if start is None:
        generator = torch.Generator().manual_seed(0)
        push = torch.randn(count, d, dtype=torch.float64, generator=generator).to(field)
        start = sphere.mean(field + 0.1 * push).detach()
    elif tuple(start.shape) != (count, d):
        raise InputError(
            f"walk_mean_field: start must have shape ({count}, {d}), but has {tuple(start.shape)}."
        )
    solution = fixed_point(
        lambda m: sphere.mean(tilt(m)).to(field.dtype),
        start.to(field.dtype),
        solver=solver,
        tol=tol,
        max_steps=max_steps,
        damping=damping,
        throw=throw,
    )
    m = solution.value
    eta, word = tilt(m), vocabulary.mean(m)
    free = (
        sphere.relative_entropy(eta).sum()
        + (many[:, 0] * vocabulary.relative_entropy(m)).sum()
        - kappa * (m[1:] * m[:-1]).sum()
        - ((field + many * word) * m).sum()
    )
    spread, choice = sphere.covariance(eta), vocabulary.covariance(m)
    second = 0.5 * kappa**2 * (spread[1:] * spread[:-1]).sum()
    second = second + 0.5 * (many[:, 0] * (spread * choice).sum((-2, -1))).sum()
    return WalkMeanField(m, word, eta, free, second, solution)


def _beside(m: Tensor) -> Tensor:
    """The sum of both neighbors ``(T, d)``; ends have one."""
    none = torch.zeros_like(m[:1])
    return torch.cat([none, m[:-1]]) + torch.cat([m[1:], none])


def _checked(
    call: str, vocabulary: Measure, seen: Tensor, unseen: Tensor | float
) -> tuple[Tensor, Tensor]:
    """What was seen ``(T, d)`` and how much was not ``(T, 1)``, in one precision."""
    d = vocabulary.dimension
    got, _ = numbers(call, seen=seen, unseen=unseen)
    kind = torch.promote_types(got["seen"].dtype, vocabulary.dtype)
    field = finite(call, "seen", got["seen"].to(kind))
    if field.ndim != 2 or field.shape[1] != d or not len(field):
        raise InputError(
            f"{call}: seen must have shape (T, {d}), the vocabulary's dimension, but has "
            f"{tuple(field.shape)}."
        )
    if vocabulary.batch_shape:
        raise InputError(f"{call}: the vocabulary must be one measure, not a batch of them.")
    many = finite(call, "unseen", got["unseen"].to(kind))
    if many.shape not in ((), (len(field),)):
        raise InputError(
            f"{call}: unseen must be a number or have shape ({len(field)},), but has "
            f"{tuple(many.shape)}."
        )
    require(many >= 0, lambda: f"{call}: unseen counts words, so it must be >= 0.")
    return field, many.expand(len(field))[:, None]
