"""What pulls back where attention pushes apart: callables from clouds to clouds (T15).

Any callable that keeps the shape can stand in their place, ``torch.nn.LayerNorm(d)`` for instance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import holds, real, require
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.precision import wide
from cumulant.core.typed import linalg
from cumulant.dynamics.shape import size_of

__all__ = ["Contraction", "LayerNorm", "RMSNorm", "Sphere", "Whiten", "contract"]

Contraction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sphere:
    """x / ||x||: each point onto the unit sphere, as cosine similarity does.

    Its differential at x has singular values 1 / ||x|| and, along x, 0: it contracts outside the
    sphere only.

    >>> import torch, cumulant as cm
    >>> cm.dynamics.Sphere()(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return _unit(x, "Sphere", "at the origin")


@dataclass(frozen=True)
class RMSNorm:
    """gain * x / rms(x): each point onto the sphere of radius sqrt(d).

    Args:
        gain: a number or ``(d,)``; learned, if it requires a gradient.
    """

    gain: Tensor | float | None = None

    __repr__ = described_fields

    def __call__(self, x: Tensor) -> Tensor:
        y = _unit(x, "RMSNorm", "at the origin") * x.shape[-1] ** 0.5
        return _affine("RMSNorm", y, self.gain, None)


@dataclass(frozen=True)
class LayerNorm:
    """gain * (x - mean(x)) / std(x) + bias, over the coordinates of each point.

    Without gain its differential at x has singular values sqrt(d) / ||x - mean(x)|| and, along x
    and along (1, ..., 1), 0.

    Args:
        gain: a number or ``(d,)``; learned, if it requires a gradient.
        bias: likewise.
        epsilon: added to the variance; torch.nn.LayerNorm has 1e-5. With 0, a point whose
            coordinates are all equal is an error.

    >>> import torch, cumulant as cm
    >>> cm.dynamics.LayerNorm()(torch.tensor([[1.0, 3.0, 5.0, 7.0]]))
    tensor([[-1.3416, -0.4472,  0.4472,  1.3416]])
    """

    gain: Tensor | float | None = None
    bias: Tensor | float | None = None
    epsilon: float = 0.0

    __repr__ = described_fields

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] < 2:
            raise InputError("LayerNorm: points need at least two coordinates to have a variance.")
        epsilon = real("LayerNorm", "epsilon", self.epsilon, least=0.0)
        if epsilon > 0:
            y = x - x.mean(-1, keepdim=True)
            y = y / (y.square().mean(-1, keepdim=True) + epsilon).sqrt()
        else:
            z = x / _largest(x)
            y = z - z.mean(-1, keepdim=True)
            noise = 4 * torch.finfo(x.dtype).eps
            y = _unit(y, "LayerNorm", "with all coordinates equal", noise) * x.shape[-1] ** 0.5
        return _affine("LayerNorm", y, self.gain, self.bias)


@dataclass(frozen=True)
class Whiten:
    """S^(-1/2) (x - m), m and S mean and covariance of the cloud: an affine map of the whole.

    The symmetric root is taken, so the cloud is turned as little as possible. Affine maps keep
    Gaussians Gaussian, which the per-point contractions do not (T17).

    >>> import torch, cumulant as cm
    >>> x = cm.dynamics.Whiten()(torch.randn(100, 2, dtype=torch.float64) * 7 + 3)
    >>> torch.allclose(x.mT @ x / 100, torch.eye(2, dtype=torch.float64))
    True
    """

    def __call__(self, x: Tensor) -> Tensor:
        n, d = x.shape[-2:]
        if n <= d:
            raise InputError(f"Whiten: a cloud needs more points than dimensions, not {n} <= {d}.")
        y = wide(x) / size_of(x)
        away = y - y.mean(-2, keepdim=True)
        away = away / size_of(away)
        return (away @ inverse_root(away.mT @ away / n)).to(x.dtype)


def inverse_root(S: Tensor) -> Tensor:
    """S^(-1/2) of positive definite matrices, with derivatives of any order.

    The coupled Newton-Schulz iteration has only matrix products in it; an eigendecomposition would
    have no derivative where eigenvalues coincide, as they all do after whitening.
    """
    d = S.shape[-1]
    require(S.isfinite(), lambda: "Whiten: the points are not finite; the cloud has overflowed.")
    size = linalg.matrix_norm(S.detach(), keepdim=True)
    size = size.where(size > 0, 1.0)
    one = torch.eye(d, dtype=S.dtype, device=S.device)
    tolerance = 8 * d * torch.finfo(S.dtype).eps
    low = linalg.eigvalsh(S.detach() / size)[..., 0]
    require(
        low > tolerance,
        lambda: (
            "Whiten: the cloud is flat; its covariance is singular to working precision. Points "
            "that collapse cannot be whitened: use another contraction, or more distinct points."
        ),
    )
    root, inverse = S / size, one.expand_as(S)
    for _ in range(100):  # each round lifts the smallest eigenvalue of the product 2.25-fold
        product = inverse @ root
        half = (3 * one - product) / 2
        root, inverse = root @ half, half @ inverse
        if holds((product.detach() - one).abs() < 1e-4):
            break
    for _ in range(2):  # the error is squared; derivatives follow one round behind
        half = (3 * one - inverse @ root) / 2
        root, inverse = root @ half, half @ inverse
    return inverse / size.sqrt()


def _largest(x: Tensor) -> Tensor:
    """The largest coordinate of each point: lengths are taken in units of it."""
    size = x.detach().abs().amax(-1, keepdim=True)
    return size.where(size > 0, 1.0)


def _unit(x: Tensor, owner: str, where: str, noise: float = 0.0) -> Tensor:
    """x / |x|, without overflow; an error where |x| is no more than noise."""
    size = x.detach().abs().amax(-1, keepdim=True)
    require(
        size.isfinite(),
        lambda: f"{owner}: the points are not finite; the cloud has overflowed.",
    )
    require(
        size > noise,
        lambda: (
            f"{owner}: {int((size <= noise).sum())} of {size.numel()} points lie {where}, where "
            "the contraction is undefined; move them a little."
        ),
    )
    y = x / size
    return y / linalg.vector_norm(y, dim=-1, keepdim=True)


def _affine(owner: str, y: Tensor, gain: Any, bias: Any) -> Tensor:
    for name, given in (("gain", gain), ("bias", bias)):
        if given is None:
            continue
        x = given if isinstance(given, Tensor) else torch.as_tensor(given, dtype=y.dtype)
        if x.ndim and x.shape[-1] not in (1, y.shape[-1]):
            raise InputError(
                f"{owner}: {name} must have {y.shape[-1]} entries, one for each coordinate of the "
                f"points, but has shape {tuple(x.shape)}."
            )
        y = y * x if name == "gain" else y + x
    return y


def contract(contraction: Contraction | None, x: Tensor) -> Tensor:
    """The contraction of a cloud, if there is one, with its shape checked."""
    if contraction is None:
        return x
    try:
        y = contraction(x)
    except InputError:
        raise
    except RuntimeError as error:
        raise InputError(
            f"contraction {contraction} does not fit points of shape {tuple(x.shape)}: {error}"
        ) from error
    if not isinstance(y, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"contraction {contraction} must return a tensor, but returned {type(y).__name__}."
        )
    if y.shape != x.shape:
        raise InputError(
            f"contraction {contraction} must keep the shape {tuple(x.shape)} of the points, but "
            f"made it {tuple(y.shape)}."
        )
    return y
