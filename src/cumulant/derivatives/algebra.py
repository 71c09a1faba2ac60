"""torch's linear algebra where its forward mode cannot be differentiated, and the chunked loss.

torch's forward-mode rules for solve, det, slogdet and householder_product treat a saved
factorization as a constant, that for cholesky_inverse has its factors in the wrong order, and the
chunked linear_cross_entropy has none, so its tangent is 0. Under forward mode or ``torch.func``
these are formulas made of operators whose derivatives are right; elsewhere they are torch's own
(but for cholesky_inverse and householder_product, whose reverse modes have faults too).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.core.autodiff import transformed
from cumulant.core.typed import linalg

__all__ = [
    "cholesky_inverse",
    "det",
    "householder_product",
    "linear_cross_entropy",
    "logdet",
    "slogdet",
    "solve",
]

# torch's own, which `differentiable` replaces under these names.
_solve, _det, _slogdet = linalg.solve, linalg.det, linalg.slogdet
_logdet, _cholesky_inverse = torch.logdet, torch.cholesky_inverse
_householder_product = linalg.householder_product
_linear_cross_entropy: Any = getattr(F, "linear_cross_entropy", None)  # from torch 2.13 on


class _SignAndLog(NamedTuple):
    sign: Tensor
    logabsdet: Tensor


def _as_torch(a: Any, options: dict[str, Any], *, recorded: bool = False) -> bool:
    """Whether torch's own will do; with `recorded`, only if no gradient is recorded."""
    if not isinstance(a, Tensor) or options.get("out") is not None:
        return True
    return not (transformed() or recorded)


def _recorded(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def solve(a: Tensor, b: Tensor, *, left: bool = True, **options: Any) -> Tensor:
    """``torch.linalg.solve`` with every derivative right: A X = B by the LU factors of A.

    >>> import torch, cumulant as cm
    >>> a, b = torch.tensor([[2.0, 1.0], [0.5, -1.0]]), torch.tensor([[1.0], [3.0]])
    >>> cm.check_derivatives(cm.derivatives.solve, (a, b)).ok
    True
    """
    if _as_torch(a, options):
        return _solve(a, b, left=left, **options)
    _solve(a, b, left=left)  # which says what does not fit
    factors, pivots = linalg.lu_factor(a)
    if b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]):  # vectors, as torch says
        return linalg.lu_solve(factors, pivots, b.unsqueeze(-1), left=left).squeeze(-1)
    return linalg.lu_solve(factors, pivots, b, left=left)


def _diagonal(a: Tensor) -> tuple[Tensor, Tensor]:
    """(the diagonal of U, the sign of the permutation) of A = P L U; a singular A is refused."""
    factors, pivots = linalg.lu_factor(a)
    swapped = pivots != torch.arange(1, a.shape[-1] + 1, device=a.device)
    return factors.diagonal(dim1=-2, dim2=-1), 1 - 2 * (swapped.sum(-1) % 2)


def det(a: Tensor, **options: Any) -> Tensor:
    """``torch.linalg.det`` with every derivative right: the product of the pivots of A.

    A singular A is an error: torch's derivatives there are 0, which is wrong.
    """
    if _as_torch(a, options):
        return _det(a, **options)
    pivots, sign = _diagonal(a)
    return sign * pivots.prod(-1)


def slogdet(a: Tensor, **options: Any) -> Any:
    """``torch.linalg.slogdet`` with every derivative right: sums of logarithms of the pivots."""
    if _as_torch(a, options) or a.is_complex():
        return _slogdet(a, **options)
    pivots, sign = _diagonal(a)
    return _SignAndLog(sign * pivots.sign().prod(-1), pivots.abs().log().sum(-1))


def logdet(a: Tensor) -> Tensor:
    """``torch.logdet`` with every derivative right; NaN if the determinant is negative."""
    if _as_torch(a, {}) or a.is_complex():
        return _logdet(a)
    sign, logarithm = slogdet(a)
    return torch.where(sign < 0, torch.nan, logarithm)


def cholesky_inverse(input: Tensor, upper: bool = False, **options: Any) -> Tensor:
    """``torch.cholesky_inverse`` with every derivative right: W' W with W = L^-1.

    It depends on one triangle alone; torch's gradient is not 0 in the other.
    """
    if _as_torch(input, options, recorded=_recorded(input)):
        return _cholesky_inverse(input, upper=upper, **options)
    one = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
    factor = input.triu() if upper else input.tril()
    w = linalg.solve_triangular(factor, one.expand_as(factor), upper=upper)
    return w @ w.mH if upper else w.mH @ w


def householder_product(input: Tensor, tau: Tensor, **options: Any) -> Tensor:
    """``torch.linalg.householder_product`` with every derivative right: H_1 ... H_k, one by one."""
    if _as_torch(input, options, recorded=_recorded(input, tau)):
        return _householder_product(input, tau, **options)
    _householder_product(input, tau)  # which says what does not fit
    one = torch.eye(*input.shape[-2:], dtype=input.dtype, device=input.device)
    vectors, out = input.tril(-1) + one, one.expand_as(input)
    for i in reversed(range(tau.shape[-1])):
        v = vectors[..., i, None]
        out = out - tau[..., i, None, None] * v @ (v.mH @ out)
    return out


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, options: Any = None, **others: Any
) -> Tensor:
    """``torch.nn.functional.linear_cross_entropy`` with a tangent, in chunks or not.

    Chunks save memory as long as only a first gradient is taken. Under forward mode and
    ``torch.func`` the logits are computed as a whole, as with ``options=None``.
    """
    if transformed():
        options = None
    return _linear_cross_entropy(input, linear_weight, target, options=options, **others)
