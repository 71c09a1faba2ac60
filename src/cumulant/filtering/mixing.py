"""Which transitions a matrix of mixing probabilities can stand for (docs/theory.md, T27)."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.chains import stationary_law
from cumulant.core.checks import holds, numbers, require
from cumulant.core.describing import described_fields
from cumulant.core.errors import ConvergenceError, InputError
from cumulant.core.typed import functions

__all__ = ["InducedTransition", "transition_from_mixing"]


class InducedTransition(NamedTuple):
    """A transition T for mixing probabilities A, and the modes before and after it.

    ============== ================== ==========================================================
    field          shape              what it is
    ============== ================== ==========================================================
    ``transition`` ``(*batch, N, N)`` T_ij = A_ij c_j / pi_i; rows sum to one where consistent
    ``current``    ``(*batch, N)``    pi, probabilities of the modes before the step
    ``following``  ``(*batch, N)``    c, those after it
    ``residual``   ``(*batch,)``      max ``|A c - pi|``
    ============== ================== ==========================================================
    """

    transition: Tensor
    current: Tensor
    following: Tensor
    residual: Tensor

    __repr__ = described_fields

    @property
    def consistent(self) -> Tensor:
        """Whether T induces A: the residual is rounding."""
        rounding = 1e3 * torch.finfo(self.residual.dtype).eps
        return self.residual <= rounding * self.current.amax(-1)


def transition_from_mixing(mixing: Tensor, marginal: Tensor | None = None) -> InducedTransition:
    """The transition T of a Markov chain with mixing probabilities A[i, j] = p(i|j) (T27).

    By Bayes' rule A_ij c_j = pi_i T_ij, and rows of T sum to one iff A c = pi, c >= 0. The
    stationary pi = c = A c always exists; for symmetric scores pi_j is proportional to e^G_j, and
    T is the transpose of A.

    Args:
        mixing: A, ``(*batch, N, N)``, columns sum to one: attention weights [query, key] go in
            transposed.
        marginal: pi, ``(*batch, N)``, for which the c >= 0 with A c closest to it is found. By
            default c = pi is the average over time of the chain A from a uniform start.

    Returns:
        InducedTransition, without gradients; ``consistent`` says whether T induces A. Rows of T
        with pi_i = 0 are never used and are set to uniform.

    Raises:
        InputError: entries that are not probabilities.

    >>> import torch
    >>> from cumulant.filtering import transition_from_mixing
    >>> A = torch.tensor([[0.9, 0.8], [0.1, 0.2]])
    >>> [bool(transition_from_mixing(A, pi).consistent) for pi in (None, torch.ones(2) / 2)]
    [True, False]
    """
    me = "transition_from_mixing"
    got, _ = numbers(me, mixing=mixing, **({} if marginal is None else {"marginal": marginal}))
    given = got["mixing"].detach().double()
    if given.ndim < 2 or given.shape[-1] != given.shape[-2] or given.shape[-1] < 1:
        raise InputError(f"{me}: mixing must be square, (*batch, N, N), not {tuple(given.shape)}.")
    A = _probabilities(me, "columns of mixing (attention weights go in transposed)", given.mT).mT
    n, kind = A.shape[-1], got["mixing"].dtype
    if marginal is None:
        pi = c = stationary_law(A.mT).law
    else:
        pi = got["marginal"].detach().double()
        if pi.shape != A.shape[:-1] and pi.shape != (n,):
            raise InputError(
                f"{me}: marginal must hold one probability for each mode, shape ({n},) or "
                f"{tuple(A.shape[:-1])}, not {tuple(pi.shape)}."
            )
        if holds(pi >= 0) is None or holds(A >= 0) is None:
            raise InputError(f"{me}: with a marginal it cannot run inside vmap; pass a batch.")
        pi = _probabilities(me, "marginal", pi).expand(A.shape[:-1])
        c = _nonnegative(A, pi)
    joint = A * c[..., None, :]
    T = torch.where(pi[..., None] > 0, joint / pi[..., None], 1 / n)
    residual = (joint.sum(-1) - pi).abs().amax(-1)
    return InducedTransition(T.to(kind), pi.to(kind), c.to(kind), residual.to(kind))


def _probabilities(me: str, name: str, p: Tensor) -> Tensor:
    """p with rounding, down to that of bfloat16, divided out."""
    sums = p.sum(-1)
    require(
        (p >= 0).all(-1) & ((sums - 1).abs() <= 1e-2),
        lambda: (
            f"{me}: {name} must be probabilities that sum to one; the sums go from "
            f"{float(sums.min()):.6g} to {float(sums.max()):.6g}, the least entry is "
            f"{float(p.min()):.6g}."
        ),
    )
    return p / sums[..., None]


def _nonnegative(A: Tensor, pi: Tensor) -> Tensor:
    """The c >= 0 that minimizes |A c - pi|."""
    nnls: Any = import_module("scipy.optimize").nnls
    n = A.shape[-1]
    pairs = zip(A.reshape(-1, n, n).cpu().numpy(), pi.reshape(-1, n).cpu().numpy(), strict=True)
    try:
        found = [functions.from_numpy(nnls(a, p)[0]) for a, p in pairs]
    except RuntimeError as error:
        raise ConvergenceError(f"transition_from_mixing: no c was found: {error}.") from None
    return torch.stack(found).reshape(pi.shape).to(A) if found else torch.zeros_like(pi)
