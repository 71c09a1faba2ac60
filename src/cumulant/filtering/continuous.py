"""Continuous-time dynamics at unequal intervals: one linear-Gaussian step for each of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulant.core.checks import finite, numbers, real, require
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.typed import functions, linalg
from cumulant.filtering.frames import is_pandas
from cumulant.filtering.model_checks import semi_definite, sized

__all__ = ["Discretized", "discretize", "intervals"]


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


# Nanoseconds of each unit.
UNITS = {"seconds": 1e9, "minutes": 6e10, "hours": 3.6e12, "days": 8.64e13, "weeks": 6.048e14}


def intervals(times: object, unit: str = "days", *, first: float = 0.0) -> Tensor:
    """The time before each observation since the one before it, from time stamps.

    Args:
        times: a pandas index of dates, a Series or DataFrame with such an index, or numpy dates;
            numbers are times in any unit, and are taken as they are.
        unit: ``"seconds"``, ``"minutes"``, ``"hours"``, ``"days"`` or ``"weeks"``.
        first: the time from the start of the model to the first observation. With 0, the initial
            mean and covariance hold at the first observation.

    Returns:
        ``(T,)``, for `discretize` or ``step=`` of a ready model.

    Raises:
        InputError: times that fall, are missing, or are neither dates nor numbers.

    >>> import numpy as np, cumulant as cm
    >>> dates = np.array(["2024-01-01", "2024-01-02", "2024-01-09"], dtype="datetime64[D]")
    >>> cm.filtering.intervals(dates)
    tensor([0., 1., 7.], dtype=torch.float64)
    """
    if unit not in UNITS:
        raise InputError(f"intervals: unit must be one of {', '.join(UNITS)}, not {unit!r}.")
    index: Any = times.index if is_pandas(times) else times
    index = index.to_timestamp() if hasattr(index, "to_timestamp") else index
    index = index.tz_convert(None) if getattr(index, "tz", None) is not None else index
    try:
        array: NDArray[Any] = np.asarray(index)
        dates = array.dtype.kind == "M"
        missing = bool(np.isnat(array).any()) if dates else False
        exact = array.astype("datetime64[ns]").astype(np.int64) if dates else array
        stamps = exact / UNITS[unit] if dates else exact.astype(np.float64)
        steps = np.diff(exact).astype(np.float64) / (UNITS[unit] if dates else 1.0)
    except (TypeError, ValueError):
        raise InputError(
            "intervals: times must be dates or numbers; pandas.to_datetime reads text."
        ) from None
    if stamps.ndim != 1 or not len(stamps) or missing or not np.isfinite(stamps).all():
        raise InputError("intervals: times must be one or more dates or numbers, none missing.")
    falls = np.flatnonzero(steps < 0)
    if len(falls):
        k = int(falls[0])
        raise InputError(
            f"intervals: times must rise, but {index[k + 1]} follows {index[k]}: sort them first."
        )
    begin = real("intervals", "first", first, least=0.0)
    return functions.from_numpy(np.concatenate([[begin], steps]))
