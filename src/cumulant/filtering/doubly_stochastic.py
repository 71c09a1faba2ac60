"""Attention that is doubly stochastic: it always comes from a transition (docs/theory.md, T27)."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from cumulant.attention.inputs import prepare
from cumulant.core.checks import holds, numbers, real, require, whole
from cumulant.core.errors import InputError
from cumulant.core.outcome import Outcome, Solution
from cumulant.core.typed import linalg
from cumulant.filtering.attention_imm import scores_of

__all__ = ["sinkhorn", "sinkhorn_attention"]


NEWTON_EVERY = 25


@overload
def sinkhorn(
    scores: Tensor, *, tol: float = 1e-9, max_steps: int = 1000, throw: Literal[True] = True
) -> Tensor: ...


@overload
def sinkhorn(
    scores: Tensor, *, tol: float = 1e-9, max_steps: int = 1000, throw: Literal[False]
) -> Solution: ...


def sinkhorn(
    scores: Tensor, *, tol: float = 1e-9, max_steps: int = 1000, throw: bool = True
) -> Tensor | Solution:
    """The doubly stochastic matrix exp(scores_ij + f_i + g_j): rows and columns sum to one (T27).

    Sinkhorn's iteration in the log domain and in double precision. Derivatives are those of the
    limit, not of the iteration; they hold through third order and store none of its steps.

    Args:
        scores: ``(*batch, N, N)``. Entries may be -inf if every other entry lies on a permutation
            that avoids them. A causal mask leaves only the identity, and does not converge.
        tol: how far the sum of a row or column may be from one.
        max_steps: maximum number of times that rows and columns are normalized.
        throw: False returns a `Solution`, the matrices so far and the `Outcome` of each, instead
            of raising.

    Raises:
        InputError: scores that are not square or not numbers, or a row or column of -inf.
        ConvergenceError: `tol` was not reached; ``result`` is what ``throw=False`` returns.

    >>> import torch
    >>> from cumulant.filtering import sinkhorn
    >>> sinkhorn(torch.tensor([[4.0, 1.0], [1.0, 1.0]]).log())
    tensor([[0.6667, 0.3333],
            [0.3333, 0.6667]])
    """
    return _sinkhorn("sinkhorn", scores, tol, max_steps, throw)


def _sinkhorn(me: str, scores: Any, tol: Any, max_steps: Any, throw: bool) -> Any:
    S, kind = _square(me, scores)
    tol, max_steps = real(me, "tol", tol, least=0.0), whole(me, "max_steps", max_steps, 1)
    f, g, missing = _balanced(S.detach(), tol, max_steps)
    status = Outcome.of(missing <= tol)
    # From the solution, a Newton step is exact to first order in a change of the scores, two to
    # third order.
    for _ in range(2):
        good = status.converged[..., None, None]
        f, g = (torch.where(good, *x) for x in zip(_newton(S, f, g), (f, g), strict=True))
    found = Solution((S + f + g.mT).exp().to(kind), status)
    if not throw:
        return found
    if holds(status.converged) is False:
        return status.check(me, found, _note(missing, tol)).value
    return status.check(me, found).value


def _note(missing: Tensor, tol: float) -> str:
    return (
        f"the sum of a row or column is off by {float(missing.max()):.3g}, tol is {tol:.3g}; "
        "scores far apart need a smaller scale or more steps, and with -inf there may be no such "
        "matrix: a causal mask leaves only the identity"
    )


def _square(me: str, scores: Any) -> tuple[Tensor, torch.dtype]:
    """The scores in double precision, checked, and the dtype of the result."""
    got, _ = numbers(me, scores=scores)
    S = got["scores"].double()
    if S.ndim < 2 or S.shape[-1] != S.shape[-2]:
        raise InputError(
            f"{me}: scores must be square, (*batch, N, N), not {tuple(S.shape)}: a doubly "
            "stochastic matrix has as many rows as columns, as many queries as keys."
        )
    fixed = S.detach()
    require(fixed < math.inf, lambda: f"{me}: scores must be finite or -inf, not +inf.")
    require(
        (fixed > -math.inf).any(-1) & (fixed > -math.inf).any(-2),
        lambda: f"{me}: a row or column of scores is -inf: nothing there can sum to one.",
    )
    real_input = isinstance(scores, Tensor) and scores.is_floating_point()
    return S, scores.dtype if real_input else got["scores"].dtype


def _balanced(S: Tensor, tol: float, max_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """f and g ``(*batch, N, 1)`` of each matrix, and by how much its sums miss one, ``(*batch,)``.

    Where blocks hardly touch, normalizing crawls; now and then Newton's step jumps, if it helps.
    """
    f = g = torch.zeros_like(S[..., :1])
    missing = _missing(S, f, g)
    if not S.numel():
        return f, g, missing
    for step in range(max_steps):
        f = -(S + g.mT).logsumexp(-1, keepdim=True)
        g = -(S + f).logsumexp(-2, keepdim=True).mT
        missing = _missing(S, f, g)
        if holds(missing <= tol):
            break
        if step % NEWTON_EVERY == NEWTON_EVERY - 1:
            jump = _newton(S, f, g)
            closer = (_missing(S, *jump) < missing)[..., None, None]
            f, g = (torch.where(closer, *x) for x in zip(jump, (f, g), strict=True))
    return f, g, missing


def _missing(S: Tensor, f: Tensor, g: Tensor) -> Tensor:
    """By how much the sums of each matrix's rows and columns miss one at most."""
    P = (S + f + g.mT).exp()
    sums = torch.cat([P.sum(-1), P.sum(-2)], -1)
    return sums.sub(1).abs().amax(-1) if P.numel() else P.new_zeros(P.shape[:-2])


def _newton(S: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One step to rows and columns P = exp(S + f + g') that sum to one; f and g are columns."""
    P = (S + f + g.mT).exp()
    rows, columns = P.sum(-1, keepdim=True), P.sum(-2)[..., None]
    # What is added to f may be taken off g in each block of P: hence the pseudoinverse.
    schur = torch.diag_embed(columns[..., 0]) - P.mT @ (P / rows)
    gap = 1 - columns + P.mT @ (1 - 1 / rows)
    change = linalg.pinv(schur, rtol=1e-13, hermitian=True) @ gap
    return f - (rows - 1 + P @ change) / rows, g + change


def sinkhorn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | Tensor | None = None,
    attn_mask: Tensor | None = None,
    tol: float = 1e-9,
    max_steps: int = 1000,
) -> Tensor:
    """Attention with doubly stochastic weights: each token also receives weight one (T27).

    Unlike softmax attention in general, it is the mixing of a transition with uniform modes before
    and after; the transpose of the weights is that transition. See `sinkhorn`.

    Args:
        query, key: ``(*batch, N, d)``, as many queries as keys.
        value: ``(*batch, N, e)``.
        scale: number, or tensor that broadcasts to the query; 1/sqrt(d) by default.
        attn_mask: boolean (True = may attend) or added; broadcasts to ``(*batch, N, N)``.
        tol, max_steps: as in `sinkhorn`.

    Raises:
        InputError: what `attend` or `sinkhorn` refuses.
        ConvergenceError: as in `sinkhorn`.

    >>> import torch
    >>> from cumulant.filtering import sinkhorn_attention
    >>> q, k, v = torch.randn(3, 6, 4, dtype=torch.float64)
    >>> torch.allclose(sinkhorn_attention(q, k, v).mean(0), v.mean(0))
    True
    """
    me = "sinkhorn_attention"
    call = prepare(me, query, key, value, attn_mask=attn_mask, scale=scale)
    scores, seen = scores_of(me, call)
    weights = _sinkhorn(me, scores.masked_fill(~seen, -math.inf), tol, max_steps, throw=True)
    return (weights @ call.arguments["value"]).to(call.dtype)
