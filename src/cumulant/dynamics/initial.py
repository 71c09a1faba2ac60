"""Named clouds to start a simulation from."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.core.randomness import checked_generator
from cumulant.core.renamed import renamed
from cumulant.core.typed import linalg

__all__ = ["STARTS", "initial_cloud"]

Random = torch.Generator | None


def _gaussian(n: int, d: int, generator: Random) -> Tensor:
    """Independent standard normal points."""
    return torch.randn(n, d, dtype=torch.float64, generator=generator)


def _ring(n: int, d: int, generator: Random) -> Tensor:
    """Equally spaced on the unit circle of the first two coordinates."""
    if d < 2:
        raise InputError("initial_cloud: a ring needs dimension 2 at least.")
    angle = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    out = torch.zeros(n, d, dtype=torch.float64)
    out[:, 0], out[:, 1] = angle.cos(), angle.sin()
    return out


def _sphere(n: int, d: int, generator: Random) -> Tensor:
    """Independent and uniform on the unit sphere."""
    return torch.nn.functional.normalize(_gaussian(n, d, generator), dim=-1)


def _clusters(n: int, d: int, generator: Random) -> Tensor:
    """Four centers on the unit sphere, points within about 0.1 of them."""
    centers = _sphere(4, d, generator)
    return centers[torch.arange(n) % 4] + 0.1 / math.sqrt(d) * _gaussian(n, d, generator)


def _orthonormal(n: int, d: int, generator: Random) -> Tensor:
    """The first n unit vectors of a random orthonormal basis: all angles equal."""
    if n > d:
        raise InputError(f"initial_cloud: at most d = {d} vectors can be orthonormal, but N = {n}.")
    return linalg.qr(_gaussian(d, n, generator)).Q.mT.contiguous()


STARTS: dict[str, Callable[[int, int, Random], Tensor]] = {
    "gaussian": _gaussian,
    "ring": _ring,
    "sphere": _sphere,
    "clusters": _clusters,
    "orthonormal": _orthonormal,
}


@renamed(seed="generator")
def initial_cloud(
    name: str,
    n: int,
    d: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A cloud ``(n, d)`` to start from: gaussian, ring, sphere, clusters or orthonormal.

    Args:
        name: which one.
        n, d: number of points, dimension.
        generator: of the random ones; torch's own by default.
        dtype: torch's default floating-point type by default.

    Raises:
        InputError: an unknown name, or sizes it cannot have.

    >>> import cumulant as cm
    >>> cm.dynamics.initial_cloud("ring", 4, 2).round(decimals=3) + 0.0
    tensor([[ 1.,  0.],
            [ 0.,  1.],
            [-1.,  0.],
            [ 0., -1.]])
    """
    if name not in STARTS:
        raise InputError(f"initial_cloud: the names are {', '.join(STARTS)}, not {name!r}.")
    whole("initial_cloud", "N", n, 1)
    whole("initial_cloud", "d", d, 1)
    if dtype is not None and not dtype.is_floating_point:
        raise InputError(f"initial_cloud: dtype must be floating-point, not {dtype}.")
    checked_generator("initial_cloud", generator)
    return STARTS[name](n, d, generator).to(dtype or torch.get_default_dtype())
