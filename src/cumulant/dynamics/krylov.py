"""Arnoldi's method for a batch of operators known by their products with vectors: GMRES and the
spectral radius."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Krylov", "Spectrum", "gmres", "leading_eigenvalue"]

# Maps (B, n) to (B, n), each row by its own matrix.
Operator = Callable[[Tensor], Tensor]


class Krylov:
    """An orthonormal basis of span(v, Av, A^2 v, ...), grown one vector at a time.

    A V_m = V_{m+1} H. A row whose space is exhausted gets zero vectors from then on, with which
    everything below stays right.
    """

    def __init__(self, operator: Operator, start: Tensor) -> None:
        self._operator = operator
        length = torch.linalg.vector_norm(start, dim=-1, keepdim=True)
        self.basis = [start / length.where(length > 0, 1.0)]
        self._columns: list[Tensor] = []

    def grow(self) -> Tensor:
        """One more column of H; returns the norm of what was new in it, ``(B,)``."""
        w = self._operator(self.basis[-1])
        scale = torch.linalg.vector_norm(w, dim=-1)
        V = torch.stack(self.basis, 1)
        column = w.new_zeros(*V.shape[:2])
        for _ in range(2):  # once more, for orthogonality to rounding
            part = (V @ w[..., None])[..., 0]
            w = w - (part[:, None] @ V)[:, 0]
            column = column + part
        fresh = torch.linalg.vector_norm(w, dim=-1)
        fresh = torch.where(fresh > 10 * torch.finfo(w.dtype).eps * scale, fresh, 0.0)
        self.basis.append(torch.where(fresh[:, None] > 0, w / fresh[:, None], 0.0))
        self._columns.append(torch.cat([column, fresh[:, None]], -1))
        return fresh

    @property
    def hessenberg(self) -> Tensor:
        """H ``(B, m + 1, m)``."""
        m = len(self._columns)
        return torch.stack(
            [torch.nn.functional.pad(c, (0, m + 1 - c.shape[-1])) for c in self._columns], -1
        )


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
    residual = torch.linalg.vector_norm(b, dim=-1)
    products, r = 0, b
    while products < limit and bool((residual > tolerance).any()):
        space = Krylov(operator, r)
        length = torch.linalg.vector_norm(r, dim=-1)
        y = b.new_zeros(len(b), 0)
        for _ in range(min(restart, limit - products, b.shape[-1])):
            space.grow()
            products += 1
            H = space.hessenberg
            target = torch.zeros_like(H[..., 0])
            target[:, 0] = length
            y = least_squares(H, target)
            left = torch.linalg.vector_norm(target - (H @ y[..., None])[..., 0], dim=-1)
            if bool((left <= tolerance).all()):
                break
        x = x + (y[:, None] @ torch.stack(space.basis[:-1], 1))[:, 0]
        r = b - operator(x)
        products += 1
        before, residual = residual, torch.linalg.vector_norm(r, dim=-1)
        if not bool((residual < 0.9 * before)[residual > tolerance].any()):
            break  # a restart that brings nothing will bring nothing again
    return Solution(x, residual, products)


def least_squares(H: Tensor, target: Tensor) -> Tensor:
    """The shortest y with H y closest to the target; H may have zero columns."""
    U, s, Vh = torch.linalg.svd(H, full_matrices=False)
    keep = s > 1e3 * torch.finfo(s.dtype).eps * s[:, :1]
    part = (U.mT @ target[..., None])[..., 0]
    return (Vh.mT @ torch.where(keep, part / s, 0.0)[..., None])[..., 0]


class Spectrum(NamedTuple):
    """The eigenvalue of largest modulus: that modulus, the (complex) eigenvalue, and the residual
    ||A v - lambda v|| of its unit vector, each ``(*batch,)``."""

    radius: Tensor
    eigenvalue: Tensor
    residual: Tensor


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
        values, vectors = torch.linalg.eig(H[:, :-1])
        first = values.abs().argmax(-1, keepdim=True)
        last = vectors[:, -1].gather(-1, first)[:, 0].abs()
        value = values.gather(-1, first)[:, 0]
        found = Spectrum(value.abs(), value, last * H[:, -1, -1].abs())
        if bool((found.residual <= tol * found.radius).all()) or not bool((fresh > 0).any()):
            break
    if found is None:
        raise RuntimeError("an operator on a space without dimensions has no spectrum")
    return found
