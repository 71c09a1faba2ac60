"""Continuous-time dynamics at unequal intervals: one linear-Gaussian step for each of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.checks import finite, numbers, require
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.typed import functions, linalg
from cumulant.filtering.model_checks import semi_definite, sized

__all__ = ["Discretized", "discretize"]


class Discretized(NamedTuple):
    """The steps of `SwitchingLinearGaussian`: ``(T, n, n)``, or ``(T, M, n, n)`` for M modes.

    ``dynamics_bias`` is ``(T, n)`` or ``(T, M, n)``, and zero without a constant drift.
    """

    dynamics: Tensor
    dynamics_noise: Tensor
    dynamics_bias: Tensor

    __repr__ = described_fields


def discretize(
    drift: Tensor, diffusion: Tensor, intervals: Tensor, *, bias: Tensor | None = None
) -> Discretized:
    """Exact steps of dx = (F x + b) dt + dW, Cov(dW) = D dt, over each interval.

    With E = exp([[-F, D], [0, F']] dt) in blocks (Van Loan 1978), W = E_22', Q = W E_12, and the
    bias is the integral of exp(F s) b over the interval.

    Args:
        drift: F, ``(n, n)`` or one for each mode, ``(M, n, n)``.
        diffusion: D, positive semi-definite, ``(n, n)`` or ``(M, n, n)``.
        intervals: time before each observation since the one before it, ``(T,)``; the first is
            since time 0, where ``initial_mean`` and ``initial_covariance`` hold. Zero leaves the
            state as it is.
        bias: b, ``(n,)`` or ``(M, n)``.

    Returns:
        `Discretized`; differentiable.

    Raises:
        InputError: shapes that do not agree, negative intervals, D that is no covariance.

    >>> import torch, cumulant as cm
    >>> step = cm.filtering.discretize(torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
    ...     torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 2.0]))
    >>> step.dynamics[1], step.dynamics_noise[0]
    (tensor([[1., 2.],
            [0., 1.]]), tensor([[0.3333, 0.5000],
            [0.5000, 1.0000]]))
    """
    me = "discretize"
    given = {"drift": drift, "diffusion": diffusion, "intervals": intervals}
    got, _ = numbers(me, **given, **({} if bias is None else {"bias": bias}))
    for name, x in got.items():
        finite(me, name, x)
    shapes = got["drift"].shape, got["diffusion"].shape
    n, dt = sized(me, "drift", got["drift"], 2)[-1], got["intervals"]
    b = got.get("bias", got["drift"].new_zeros(n))
    if any(shape[-2:] != (n, n) for shape in shapes) or b.shape[-1:] != (n,):
        raise InputError(
            f"{me}: drift must be (n, n) or (M, n, n), diffusion alike and bias (n,) or (M, n); "
            f"they are {tuple(shapes[0])}, {tuple(shapes[1])} and {tuple(b.shape)}."
        )
    if dt.ndim != 1:
        raise InputError(f"{me}: intervals must have shape (T,), not {tuple(dt.shape)}.")
    require(dt >= 0, lambda: f"{me}: intervals must not be negative; the least is {dt.min():.6g}.")
    semi_definite(me, "diffusion", got["diffusion"])
    lead = functions.broadcast_shapes(*(shape[:-2] for shape in shapes), b.shape[:-1])
    F, D = got["drift"].expand(*lead, n, n), got["diffusion"].expand(*lead, n, n)
    noise = torch.cat([torch.cat([-F, D], -1), torch.cat([torch.zeros_like(F), F.mT], -1)], -2)
    # [[F, b], [0, 0]]: its exponential holds W and the integral of exp(F s) b.
    affine = torch.cat([F, b.expand(*lead, n)[..., None]], -1)
    affine = torch.cat([affine, torch.zeros_like(affine[..., :1, :])], -2)
    steps = dt.reshape(-1, *[1] * (len(lead) + 2))
    forward = linalg.matrix_exp(affine * steps)
    W = forward[..., :n, :n]
    Q = W @ linalg.matrix_exp(noise * steps)[..., :n, n:]
    return Discretized(W, (Q + Q.mT) / 2, forward[..., :n, n])
