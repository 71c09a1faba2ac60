"""Attention that is doubly stochastic: it always comes from a transition (docs/theory.md, T27)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant.attention.inputs import prepare
from cumulant.core.checks import holds, numbers, real, require, whole
from cumulant.core.errors import ConvergenceError, InputError
from cumulant.filtering.attention_imm import scores_of

__all__ = ["sinkhorn", "sinkhorn_attention"]


NEWTON_EVERY = 25


def sinkhorn(scores: Tensor, *, tol: float = 1e-9, max_steps: int = 1000) -> Tensor:
    """The doubly stochastic matrix exp(scores_ij + f_i + g_j): rows and columns sum to one (T27).

    Sinkhorn's iteration in the log domain and in double precision. Derivatives are those of the
    limit, not of the iteration, through third order, and keep nothing of its steps.

    Args:
        scores: ``(*batch, N, N)``. Entries may be -inf if every other one lies on a permutation
            without them; a causal mask leaves only the identity, and does not converge.
        tol: by how much a row may miss one.
        max_steps: at most so many times are rows and columns normalized.

    Raises:
        InputError: scores that are not square or not numbers, a row or column of -inf.
        ConvergenceError: `tol` was not reached; ``result`` is the matrix so far.

    >>> import torch
    >>> from cumulant.filtering import sinkhorn
    >>> sinkhorn(torch.tensor([[4.0, 1.0], [1.0, 1.0]]).log())
    tensor([[0.6667, 0.3333],
            [0.3333, 0.6667]])
    """
    return _sinkhorn("sinkhorn", scores, tol, max_steps)


def _sinkhorn(me: str, scores: Any, tol: Any, max_steps: Any) -> Tensor:
    got, _ = numbers(me, scores=scores)
    S = got["scores"].double()
    real_input = isinstance(scores, Tensor) and scores.is_floating_point()
    kind = scores.dtype if real_input else got["scores"].dtype
    tol, max_steps = real(me, "tol", tol, least=0.0), whole(me, "max_steps", max_steps, 1)
    if S.ndim < 2 or S.shape[-1] != S.shape[-2]:
        raise InputError(
            f"{me}: scores must be square, (*batch, N, N), not {tuple(S.shape)}: a doubly "
            "stochastic matrix has as many rows as columns, as many queries as keys."
        )
    if not S.numel():
        return S.to(kind)
    fixed = S.detach()
    require(fixed < math.inf, lambda: f"{me}: scores must be finite or -inf, not +inf.")
    require(
        (fixed > -math.inf).any(-1) & (fixed > -math.inf).any(-2),
        lambda: f"{me}: a row or column of scores is -inf: nothing there can sum to one.",
    )
    f = g = torch.zeros_like(fixed[..., :1])
    missing = _missing(fixed, f, g)
    for step in range(max_steps):
        f = -(fixed + g.mT).logsumexp(-1, keepdim=True)
        g = -(fixed + f).logsumexp(-2, keepdim=True).mT
        missing = _missing(fixed, f, g)
        if holds(missing <= tol):
            break
        if step % NEWTON_EVERY == NEWTON_EVERY - 1:
            # Where blocks hardly touch, normalizing crawls; Newton's step jumps, if it helps.
            jump = _newton(fixed, f, g)
            closer = _missing(fixed, *jump).amax(-1) < missing.amax(-1)
            f, g = (
                torch.where(closer[..., None, None], *x) for x in zip(jump, (f, g), strict=True)
            )
    if holds(missing <= tol) is False:
        raise ConvergenceError(
            f"{me}: after {max_steps} steps a row still misses one by {float(missing.max()):.3g} "
            f"(tol {tol:.3g}). Likely causes: scores far apart (take a smaller scale, or more "
            "max_steps), or -inf where no doubly stochastic matrix has all the other entries (a "
            "causal mask leaves only the identity).",
            (fixed + f + g.mT).exp().to(kind),
        )
    # From the solution, a Newton step is exact to first order in a change of the scores, two to
    # third order.
    for _ in range(2):
        f, g = _newton(S, f, g)
    return (S + f + g.mT).exp().to(kind)


def _missing(S: Tensor, f: Tensor, g: Tensor) -> Tensor:
    """By how much each row and, after it, each column misses one."""
    P = (S + f + g.mT).exp()
    return torch.cat([P.sum(-1), P.sum(-2)], -1).sub(1).abs()


def _newton(S: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One step to rows and columns P = exp(S + f + g') that sum to one; f and g are columns."""
    P = (S + f + g.mT).exp()
    rows, columns = P.sum(-1, keepdim=True), P.sum(-2)[..., None]
    # What is added to f may be taken off g in each block of P: hence the pseudoinverse.
    schur = torch.diag_embed(columns[..., 0]) - P.mT @ (P / rows)
    gap = 1 - columns + P.mT @ (1 - 1 / rows)
    change = torch.linalg.pinv(schur, rtol=1e-13, hermitian=True) @ gap
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
    """Attention with doubly stochastic weights: each token is also seen once in all (T27).

    It is the mixing of a transition with uniform modes before and after, which softmax attention in
    general is not: the transpose of the weights is that transition. See `sinkhorn`.

    Args:
        query, key: ``(*batch, N, d)``, as many queries as keys.
        value: ``(*batch, N, e)``.
        scale: number, or tensor that broadcasts to the query; 1/sqrt(d) if left out.
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
    weights = _sinkhorn(me, scores.masked_fill(~seen, -math.inf), tol, max_steps)
    return (weights @ call.arguments["value"]).to(call.dtype)
