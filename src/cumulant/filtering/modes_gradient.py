"""Models without a state, n = 0: log-likelihood and gradient by forward and backward, in numpy.

What `native.calls.gradient` does in C++, for where there is no compiled library: autograd over a
product of small matrices takes several times as long. As in `modes`, the likelihood is
w E_1 ... E_T 1 with E_t[i, j] = P(j | i) p(y_t | j), here by a tree of products. Its derivative in
log E_t[i, j] is P(i before step t, j after it | all observations), from the way back down the tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cumulant.core.typed import functions
from cumulant.filtering.native.calls import GIVEN, Arrays, Plan

__all__ = ["gradient"]

Array = NDArray[np.float64]

# Products of scaled matrices below this may have lost what underflowed: left to the logarithms.
LEAST = 1e-10
# Covariances with less than half of the digits left are left to their roots.
MOST_CONDITION = 1e8


class _Seen(NamedTuple):
    """log p(y_t | j), ``(B, T, M)``, and what its derivatives need."""

    log_likelihood: Array
    inverse: Array
    weighed: Array
    good: NDArray[np.bool_]


def gradient(
    plan: Plan, given: Sequence[Tensor], seeds: Arrays, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The totals, `digits`, and the gradient of the totals in each wanted array, by series.

    Arguments and answers are those of `calls.gradient`, for a plan of totals; seeds are ones.
    """
    x = {name: array.numpy() for name, array in zip(GIVEN, given, strict=True)}
    B, T, M = plan.series, plan.steps, plan.modes
    seen = _observed(x)
    size = seen.log_likelihood.max(-1, keepdims=True)
    factors = np.exp(x["transition"] + (seen.log_likelihood - size)[..., None, :])
    factors = np.broadcast_to(factors, (B, T, M, M))
    totals, pairs, good = _forward_backward(np.exp(x["log_weights"][:, 0]), factors)
    totals = totals + size[..., 0].sum(-1)
    after = pairs.sum(-2)
    slope = after[..., None] * seen.weighed
    outer = seen.weighed[..., :, None] * slope[..., None, :]
    found = {
        "transition": pairs,
        "emission_offset": slope,
        "emission_noise": (outer - after[..., None, None] * seen.inverse) / 2,
        "log_weights": pairs[:, :1].sum(-1),
    }
    to = [
        functions.from_numpy(_like(found[name], x[name])) if need else None
        for name, need in zip(GIVEN, wanted, strict=True)
    ]
    digits = np.where(good & seen.good, 1.0, 0.0)
    return functions.from_numpy(totals[:, None]), functions.from_numpy(digits), to


def _observed(x: dict[str, Array]) -> _Seen:
    """Elements that are missing get the variance 1 of nobody and the error 0."""
    y, noise = x["values"], x["emission_noise"]
    there = ~np.isnan(y)
    count = np.where(there, 1.0, 0.0).sum(-1)[..., None]
    error = np.where(there, y, 0.0)[..., None, :] - x["emission_offset"]
    both = None
    if not there.all():
        error = error * there[..., None, :]
        both = (there[..., :, None] & there[..., None, :])[:, :, None]
        noise = np.where(both, noise, np.eye(noise.shape[-1]))
    try:
        inverse = cast(Array, np.linalg.inv(noise))
    except np.linalg.LinAlgError:
        inverse = np.full_like(noise, np.nan)
    sign, log_det = np.linalg.slogdet(noise)
    condition = abs(noise).max((-2, -1)) * abs(inverse).max((-2, -1))
    fine = (sign > 0) & (condition < MOST_CONDITION)
    weighed = (inverse @ error[..., None])[..., 0]
    value = -((error * weighed).sum(-1) + log_det + count * math.log(2 * math.pi)) / 2
    return _Seen(value, inverse if both is None else inverse * both, weighed, fine.all((-2, -1)))


def _forward_backward(first: Array, factors: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """log(w E_1 ... E_T 1), its derivatives in log E_t, and whether nothing underflowed.

    Args:
        first: w, ``(B, M)``.
        factors: E, ``(B, T, M, M)``.
    """
    B, T, M = factors.shape[:3]
    one = np.tile(np.eye(M), (B, 1, 1, 1))
    levels: list[tuple[Array, Array, Array]] = []  # neighbors, and the sizes of their products
    product = factors
    while product.shape[1] > 1:
        if product.shape[1] % 2:
            product = np.concatenate([product, one], 1)
        left, right = product[:, ::2], product[:, 1::2]
        product = left @ right
        sizes = product.max((-2, -1), keepdims=True)
        product /= sizes
        levels.append((left, right, sizes))
    last = (first[:, None] @ product[:, 0]).sum((-2, -1))
    slopes = np.repeat((first / last[:, None])[:, None, :, None], M, -1)
    for left, right, sizes in reversed(levels):
        above = slopes[:, : left.shape[1]] / sizes
        slopes = np.empty((B, 2 * left.shape[1], M, M))
        np.matmul(above, right.swapaxes(-1, -2), out=slopes[:, ::2])
        np.matmul(left.swapaxes(-1, -2), above, out=slopes[:, 1::2])
    every = np.concatenate([last[:, None], *(sizes[..., 0, 0] for *_, sizes in levels)], 1)
    return np.log(every).sum(-1), slopes[:, :T] * factors, every.min(-1) >= LEAST


def _like(found: Array, given: Array) -> Array:
    """Summed over the steps that share a parameter."""
    return found.sum(1, keepdims=True) if given.shape[1] == 1 else found
