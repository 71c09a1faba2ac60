"""Krylov spaces for a batch of operators known by their products with vectors.

Arnoldi's method gives GMRES and the spectral radius, Golub and Kahan's the largest singular value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.describing import described_fields
from cumulant.core.typed import linalg

__all__ = ["Krylov", "Spectrum", "Stretch", "gmres", "largest_singular_value", "leading_eigenvalue"]

# Maps (B, n) to (B, n), each row by its own matrix.
Operator = Callable[[Tensor], Tensor]


class Krylov:
    """An orthonormal basis of span(v, Av, A^2 v, ...), grown one vector at a time.

    A V_m = V_{m+1} H. A row whose space is exhausted gets zero vectors from then on, with which
    everything below stays right.
    """

    def __init__(self, operator: Operator, start: Tensor) -> None:
        self._operator = operator
        length = linalg.vector_norm(start, dim=-1, keepdim=True)
        self.basis = [start / length.where(length > 0, 1.0)]
        self._columns: list[Tensor] = []

    def grow(self) -> Tensor:
        """One more column of H; returns the norm of what was new in it, ``(B,)``."""
        column = _extend(self.basis, self._operator(self.basis[-1]))
        self._columns.append(column)
        return column[:, -1]

    @property
    def hessenberg(self) -> Tensor:
        """H ``(B, m + 1, m)``."""
        return _side_by_side(self._columns)


def _extend(basis: list[Tensor], w: Tensor) -> Tensor:
    """Append to an orthonormal basis what is new in w, or zero; w in the longer basis, ``(B, m)``.

    What is no more than rounding is not new.
    """
    scale = linalg.vector_norm(w, dim=-1)
    column = w.new_zeros(len(w), len(basis))
    if basis:
        V = torch.stack(basis, 1)
        for _ in range(2):  # once more, for orthogonality to rounding
            part = (V @ w[..., None])[..., 0]
            w = w - (part[:, None] @ V)[:, 0]
            column = column + part
    fresh = linalg.vector_norm(w, dim=-1)
    fresh = torch.where(fresh > 10 * torch.finfo(w.dtype).eps * scale, fresh, 0.0)
    basis.append(torch.where(fresh[:, None] > 0, w / fresh[:, None], 0.0))
    return torch.cat([column, fresh[:, None]], -1)


def _side_by_side(columns: list[Tensor]) -> Tensor:
    """Columns of growing length as one matrix, zeros below."""
    rows = columns[-1].shape[-1]
    return torch.stack([torch.nn.functional.pad(c, (0, rows - c.shape[-1])) for c in columns], -1)


class Solution(NamedTuple):
    """x with A x = b, the norm of what remains of b, and products used."""

    value: Tensor
    residual: Tensor
    products: int


def gmres(
    operator: Operator, b: Tensor, tolerance: Tensor, *, restart: int = 60, limit: int = 600
) -> Solution:
    """Solve A x = b, row by row, to a residual norm of at most `tolerance` ``(B,)``."""
    x = torch.zeros_like(b)
    residual = linalg.vector_norm(b, dim=-1)
    products, r = 0, b
    while products < limit and bool((residual > tolerance).any()):
        space = Krylov(operator, r)
        length = linalg.vector_norm(r, dim=-1)
        y = b.new_zeros(len(b), 0)
        for _ in range(min(restart, limit - products, b.shape[-1])):
            space.grow()
            products += 1
            H = space.hessenberg
            target = torch.zeros_like(H[..., 0])
            target[:, 0] = length
            y = least_squares(H, target)
            left = linalg.vector_norm(target - (H @ y[..., None])[..., 0], dim=-1)
            if bool((left <= tolerance).all()):
                break
        x = x + (y[:, None] @ torch.stack(space.basis[:-1], 1))[:, 0]
        r = b - operator(x)
        products += 1
        before, residual = residual, linalg.vector_norm(r, dim=-1)
        if not bool((residual < 0.9 * before)[residual > tolerance].any()):
            break  # a restart that brings nothing will bring nothing again
    return Solution(x, residual, products)


def least_squares(H: Tensor, target: Tensor) -> Tensor:
    """The shortest y with H y closest to the target; H may have zero columns."""
    U, s, Vh = linalg.svd(H, full_matrices=False)
    keep = s > 1e3 * torch.finfo(s.dtype).eps * s[:, :1]
    part = (U.mT @ target[..., None])[..., 0]
    return (Vh.mT @ torch.where(keep, part / s, 0.0)[..., None])[..., 0]


class Spectrum(NamedTuple):
    """The eigenvalue of largest modulus: that modulus, the (complex) eigenvalue, and the residual
    ||A v - lambda v|| of its unit vector, each ``(*batch,)``."""

    radius: Tensor
    eigenvalue: Tensor
    residual: Tensor

    __repr__ = described_fields


def leading_eigenvalue(operator: Operator, start: Tensor, *, tol: float, limit: int) -> Spectrum:
    """The eigenvalue of largest modulus from one Krylov space, grown until its residual is at most
    tol times the modulus. Complex pairs, as of rotations, are eigenvalues of H like any other."""
    space = Krylov(operator, start)
    size = min(limit, start.shape[-1])
    found = None
    for m in range(1, size + 1):
        fresh = space.grow()
        if m < size and m % 5 and bool((fresh > 0).any()):
            continue
        H = space.hessenberg
        values, vectors = linalg.eig(H[:, :-1])
        first = values.abs().argmax(-1, keepdim=True)
        last = vectors[:, -1].gather(-1, first)[:, 0].abs()
        value = values.gather(-1, first)[:, 0]
        found = Spectrum(value.abs(), value, last * H[:, -1, -1].abs())
        if bool((found.residual <= tol * found.radius).all()) or not bool((fresh > 0).any()):
            break
    if found is None:
        raise RuntimeError("an operator on a space without dimensions has no spectrum")
    return found


class Stretch(NamedTuple):
    """The largest singular value, ``(B,)`` in double precision: found from below, and a bound
    above; rounds taken."""

    value: Tensor
    upper: Tensor
    steps: int


# The chance, over random starts, that a singular value lies above the bound.
_MISSED = 1e-6


def largest_singular_value(
    push: Operator, pull: Operator, start: Tensor, *, tol: float, limit: int
) -> Stretch:
    """The norm of J from products with J and with its transpose, by Golub and Kahan's method.

    J V = U B and J'U = V B' + beta v e', with orthonormal U and V: the singular values of B are
    those of J on the space of V, so the largest comes from below. It stops when the bound above is
    at most 1 + tol times the value, or when the space is exhausted.

    Args:
        push, pull: ``(B, n)`` to ``(B, m)`` and back, each row by its own matrix.
        start: ``(B, n)``, random: a direction that it lacks is never found.
    """
    right: list[Tensor] = []
    left: list[Tensor] = []
    columns: list[Tensor] = []
    _extend(right, start)
    size = min(limit, start.shape[-1])
    log_moment = torch.zeros(len(start), dtype=torch.float64)
    value, upper = log_moment, log_moment
    steps = 0
    while steps < size and bool((upper > (1 + tol) * value).any() or steps == 0):
        for _ in range(min(5, size - steps)):
            columns.append(_precise(_extend(left, push(right[-1]))))
            beta = _precise(_extend(right, pull(left[-1]))[:, -1])
            log_moment = log_moment + columns[-1][:, -1].log() + beta.log()
            steps += 1
        found = linalg.svdvals(_side_by_side(columns))
        value, upper = found[:, 0], _upper(found, log_moment, start.shape[-1])
    return Stretch(value, upper, steps)


def _precise(x: Tensor) -> Tensor:
    """Few numbers, in double precision, which not every device has."""
    return x.cpu().double()


def _upper(found: Tensor, log_moment: Tensor, dimension: int) -> Tensor:
    """A bound above on the largest singular value, which holds with probability 1 - `_MISSED`.

    Let p be the monic polynomial whose roots are the squares of the values found. Lanczos' method
    has ||p(J'J) v|| = product of all alpha beta, so a singular value s with p(s^2) larger than that
    by 1 / c has at most c of the unit start v; a random v has less than c of a given direction with
    probability at most c sqrt(2 n / pi). (Van Dorsselaer, Hochstenbach and van der Vorst, 2000.)

    Args:
        found: all singular values of B, ``(B, k)``.
        log_moment: log of the product, ``(B,)``.
    """
    unit = found[:, :1].where(found[:, :1] > 0, 1.0)
    roots = (found / unit).square()
    k = found.shape[-1]
    wanted = log_moment - 2 * k * unit[:, 0].log()
    wanted = wanted + math.log((2 * dimension / math.pi) ** 0.5 / _MISSED)
    # p grows at least as (x - 1)^k above its largest root, in units of which x is.
    low, high = torch.zeros_like(wanted), (wanted / k).exp()
    for _ in range(60):
        middle = (low + high) / 2
        short = (middle[:, None] + 1 - roots).log().sum(-1) < wanted
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return unit[:, 0] * (1 + high).sqrt() * (found[:, 0] > 0)
