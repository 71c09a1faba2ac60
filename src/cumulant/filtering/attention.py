"""Attention as a step of the IMM filter, and the transitions it can stand for (THEORY T27)."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.attention.inputs import Call, prepare
from cumulant.errors import ConvergenceError, InputError
from cumulant.filtering import moments
from cumulant.filtering.checks import semi_definite
from cumulant.filtering.moments import Affine
from cumulant.filtering.recursion import LOG_ZERO, Belief, Message, branch
from cumulant.measures.checks import finite, holds, numbers, real, require, whole

__all__ = [
    "AttentionBank",
    "AttentionMessages",
    "InducedTransition",
    "attention_as_imm",
    "sinkhorn",
    "sinkhorn_attention",
    "transition_from_mixing",
]


class AttentionMessages(NamedTuple):
    """Tokens after attention, ``(*batch, [heads,] N, d_v)``; ``mixing[i, j]`` = p(i|j), query j."""

    mean: Tensor
    covariance: Tensor
    mixing: Tensor


class AttentionBank:
    """The bank of an IMM whose modes are tokens: all move alike, and nothing is observed."""

    def __init__(self, log_transition: Tensor, sees: Tensor, step: Affine) -> None:
        self._log_transition, self._sees, self._step = log_transition, sees, step

    def log_transition(self, t: int | None) -> Tensor:
        return self._log_transition

    def predict(self, message: Message, t: int | None) -> Message:
        return moments.predict(self._step, *message)

    def observe(self, message: Message, t: int | None) -> tuple[Message, Tensor]:
        return message, message[0].new_zeros(message[0].shape[:-1])

    def collapse(self, log_weights: Tensor, message: Message) -> Message:
        mean, covariance = moments.collapse(log_weights, *message)
        sees = self._sees[..., None, :, None]
        return torch.where(sees, mean, 0.0), torch.where(sees[..., None], covariance, 0.0)


def attention_as_imm(
    hidden: Tensor,
    covariance: Tensor | None = None,
    *,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    noise: Tensor | float | None = None,
) -> AttentionMessages:
    """One step of the IMM filter without observation whose mean is softmax attention (T27, T28).

    Modes are tokens with messages N(H_i, S_i). For each next mode j the IMM mixes them with
    p(i|j) = softmax over i of scale <W_q H_j, W_k H_i> + mask, collapses, and moves the result by
    x -> W_v x + N(0, Q): with m_i = W_v H_i and m = sum_i p(i|j) m_i, the mean is m and the
    covariance sum_i p(i|j) (W_v S_i W_v' + Q + (m_i - m)(m_i - m)').

    What differs from the IMM is that the switching depends on the states. What the draft calls the
    transition P(j|i) (eq. 12) is p(i|j), the mixing probability. The step runs on the transition
    T_ij = p(i|j) / sum_j p(i|j) and modes pi_i = mean_j p(i|j), so that all next modes are equally
    likely. It needs memory N^2 E; `cumulant.nn.MomentAttention` is for use in models.

    Args:
        hidden: H, ``(*batch, N, E)``.
        covariance: S, ``(*batch, N, E, E)``; zero if left out.
        query_weight, key_weight: ``(d, E)`` as in ``nn.Linear``, or ``(heads, d, E)``.
        value_weight: ``(d_v, E)`` or ``(heads, d_v, E)``.
        scale: 1/sqrt(d) if left out.
        attn_mask: boolean (True = may attend) or added; broadcasts to ``(*batch, [heads,] N, N)``,
            [query, key]. A query that sees nothing has mean 0, covariance Q and no mixing.
        is_causal: query j sees tokens i <= j; not with `attn_mask`.
        noise: Q, ``([heads,] d_v, d_v)``, or a number q for q I; zero if left out.

    Raises:
        InputError: shapes that do not fit together, or a covariance that is none.

    >>> import torch, torch.nn.functional as F
    >>> from cumulant.filtering.attention import attention_as_imm
    >>> x, (q, k, v) = torch.randn(5, 8), torch.randn(3, 8, 8)
    >>> out = attention_as_imm(x, query_weight=q, key_weight=k, value_weight=v)
    >>> attention = F.scaled_dot_product_attention(x @ q.mT, x @ k.mT, x @ v.mT)
    >>> torch.allclose(out.mean, attention, atol=1e-4), out.covariance.shape
    (True, torch.Size([5, 8, 8]))
    """
    me = "attention_as_imm"
    given = {"hidden": hidden, "query_weight": query_weight, "key_weight": key_weight}
    given |= {"value_weight": value_weight, "covariance": covariance, "noise": noise}
    given = {name: x for name, x in given.items() if x is not None}
    got, _ = numbers(me, **given)
    H, S, Q, W = _messages(me, got)
    if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(H.dtype)
    scale = None if scale is None else real(me, "scale", scale)
    query, key, value = (H @ w.mT for w in W)
    call = prepare(me, query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    scores, seen = _scores(me, call)
    bank, belief, log_mixing = _imm(scores, seen, (H, S), Affine(W[2], H.new_zeros(()), Q))
    # As `recursion.advance` does for the IMM, less the observation.
    mean, spread = bank.predict(bank.collapse(*branch(bank, belief, None)), None)
    out = mean.squeeze(-3), moments.symmetric(spread.squeeze(-4)), log_mixing.exp()
    kind = torch.float16
    for x in given.values():
        kind = torch.promote_types(kind, x.dtype) if isinstance(x, Tensor) else kind
    return AttentionMessages(*(x.to(kind) for x in out))


def _messages(me: str, got: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """H, S, Q and the weights; H and S with a dimension for the heads where there are."""
    for name, x in got.items():
        finite(me, name, x)
    H, W = got["hidden"], [got[f"{name}_weight"] for name in ("query", "key", "value")]
    flat = any(w.ndim not in (2, 3) or w.shape[-1:] != H.shape[-1:] for w in W)
    if H.ndim < 2 or flat or W[0].shape != W[1].shape or W[0].shape[:-2] != W[2].shape[:-2]:
        told = ", ".join(f"{name} {tuple(x.shape)}" for name, x in got.items())
        raise InputError(
            f"{me}: expected hidden (*batch, N, E), query_weight and key_weight (d, E) and "
            f"value_weight (d_v, E), the last three with heads in front or without; got {told}. "
            "Weights of x @ w go in as w.mT."
        )
    (*heads, d), E = W[2].shape[:-1], H.shape[-1]
    S = got.get("covariance", H.new_zeros(()).expand(*H.shape, E))
    if S.shape != (*H.shape, E):
        raise InputError(
            f"{me}: covariance must hold one matrix for each token, shape {(*H.shape, E)}, not "
            f"{tuple(S.shape)}; variances go in as torch.diag_embed(x)."
        )
    Q = got.get("noise", H.new_zeros(()))
    Q = Q if Q.ndim else Q * torch.eye(d, dtype=H.dtype, device=H.device)
    if tuple(Q.shape) not in ((d, d), (*heads, d, d)):
        raise InputError(
            f"{me}: noise must be a number, {(d, d)} or {('heads', d, d)}, as value_weight has "
            f"them, not {tuple(Q.shape)}; variances go in as torch.diag_embed(x)."
        )
    semi_definite(me, "covariance", S)
    semi_definite(me, "noise", Q)
    return (H.unsqueeze(-3), S.unsqueeze(-4), Q, W) if heads else (H, S, Q, W)


def _scores(me: str, call: Call) -> tuple[Tensor, Tensor]:
    """scale <q, k> + bias ``(..., queries, keys)``, and where a query may see a key."""
    scores = call.options.scale * (call.arguments["query"] @ call.arguments["key"].mT)
    bias, mask = call.arguments.get("bias"), call.arguments.get("mask")
    if bias is not None:
        scores, mask = scores + bias, bias > -math.inf
    require(
        scores.detach() < math.inf,
        lambda: f"{me}: scores overflow or are NaN: look at attn_mask, or take a smaller scale.",
    )
    seen = torch.ones_like(scores, dtype=torch.bool)
    rows, columns = (range(n) for n in scores.shape[-2:])
    hidden = call.options.band.hidden(rows, columns, scores.device)
    seen = seen if mask is None else seen & mask
    return scores, seen if hidden is None else seen & ~hidden


def _imm(
    scores: Tensor, seen: Tensor, message: Message, step: Affine
) -> tuple[AttentionBank, Belief, Tensor]:
    """Modes, messages and transition of the step, and log p(i|j) ``(..., tokens i, queries j)``."""
    sees = seen.any(-1)
    # Biases were lowered, so that what is hidden lies far below what is seen.
    log_mixing = scores.masked_fill(~seen, LOG_ZERO).log_softmax(-1)
    log_mixing = log_mixing.masked_fill(~seen, LOG_ZERO).mT
    joint = log_mixing - sees.sum(-1).clamp_min(1).log()[..., None, None]
    step = Affine(
        step.matrix[..., None, None, :, :], step.offset, step.noise[..., None, None, :, :]
    )
    bank = AttentionBank(joint.log_softmax(-1).unsqueeze(-3), sees, step)
    mean, covariance = message
    message = mean.unsqueeze(-3), covariance.unsqueeze(-4)
    return bank, Belief(joint.logsumexp(-1).unsqueeze(-2), message), log_mixing


class InducedTransition(NamedTuple):
    """A transition T for mixing probabilities A, and the modes before and after it.

    ============== ================== ==========================================================
    field          shape              what it is
    ============== ================== ==========================================================
    ``transition`` ``(*batch, N, N)`` T_ij = A_ij c_j / pi_i; rows sum to one where consistent
    ``current``    ``(*batch, N)``    pi, probabilities of the modes before the step
    ``following``  ``(*batch, N)``    c, those after it
    ``residual``   ``(*batch,)``      max |A c - pi|
    ============== ================== ==========================================================
    """

    transition: Tensor
    current: Tensor
    following: Tensor
    residual: Tensor

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
        marginal: pi, ``(*batch, N)``, for which the c >= 0 with A c closest to it is found. If left
            out, c = pi is the average over time of the chain A from a uniform start.

    Returns:
        InducedTransition, without gradients; ask it whether it is ``consistent``. Rows of T with
        pi_i = 0 are never used and are set uniform.

    Raises:
        InputError: what should be probabilities is none.

    >>> import torch
    >>> from cumulant.filtering.attention import transition_from_mixing
    >>> A = torch.tensor([[0.9, 0.8], [0.1, 0.2]])
    >>> [bool(transition_from_mixing(A, pi).consistent) for pi in (None, torch.ones(2) / 2)]
    [True, False]
    """
    me = "transition_from_mixing"
    got, _ = numbers(me, mixing=mixing, **({} if marginal is None else {"marginal": marginal}))
    kind, A = got["mixing"].dtype, got["mixing"].detach().double()
    if A.ndim < 2 or A.shape[-1] != A.shape[-2] or A.shape[-1] < 1:
        raise InputError(f"{me}: mixing must be square, (*batch, N, N), not {tuple(A.shape)}.")
    _probabilities(me, "columns of mixing (attention weights go in transposed)", A.mT, kind)
    n = A.shape[-1]
    if marginal is None:
        pi = c = _stationary(A)
    else:
        pi = got["marginal"].detach().double()
        if pi.shape != A.shape[:-1] and pi.shape != (n,):
            raise InputError(
                f"{me}: marginal must hold one probability for each mode, shape ({n},) or "
                f"{tuple(A.shape[:-1])}, not {tuple(pi.shape)}."
            )
        _probabilities(me, "marginal", pi, kind)
        pi = pi.expand(A.shape[:-1])
        c = _nonnegative(A, pi)
    joint = A * c[..., None, :]
    T = torch.where(pi[..., None] > 0, joint / pi[..., None], 1 / n)
    residual = (joint.sum(-1) - pi).abs().amax(-1)
    return InducedTransition(T.to(kind), pi.to(kind), c.to(kind), residual.to(kind))


def _probabilities(me: str, name: str, p: Tensor, kind: torch.dtype) -> None:
    sums = p.sum(-1)
    require(
        (p >= 0).all(-1) & ((sums - 1).abs() <= (1e-5 if kind == torch.float64 else 1e-3)),
        lambda: (
            f"{me}: {name} must be probabilities that sum to one; the sums go from "
            f"{float(sums.min()):.6g} to {float(sums.max()):.6g}, the least entry is "
            f"{float(p.min()):.6g}."
        ),
    )


def _stationary(A: Tensor) -> Tensor:
    """The average over t of A^t u, u uniform.

    (A + I) / 2 has the same limit and no periods; squaring goes 2^64 steps, in which what is
    transient vanishes. Nothing is subtracted, so that small entries are as accurate as large ones.
    """
    n = A.shape[-1]
    power = (A / A.sum(-2, keepdim=True) + torch.eye(n, dtype=A.dtype, device=A.device)) / 2
    for _ in range(64):
        last, power = power, power @ power
        power = power / power.sum(-2, keepdim=True)
        if holds((power - last).abs() <= 16 * n * torch.finfo(A.dtype).eps * last):
            break
    return power.mean(-1)


def _nonnegative(A: Tensor, pi: Tensor) -> Tensor:
    """The c >= 0 that minimizes |A c - pi|."""
    nnls: Any = import_module("scipy.optimize").nnls
    n = A.shape[-1]
    pairs = zip(A.reshape(-1, n, n).cpu().numpy(), pi.reshape(-1, n).cpu().numpy(), strict=True)
    try:
        found = [torch.from_numpy(nnls(a, p)[0]) for a, p in pairs]
    except RuntimeError as error:
        raise ConvergenceError(f"transition_from_mixing: no c was found: {error}.") from None
    return torch.stack(found).reshape(pi.shape).to(A) if found else torch.zeros_like(pi)


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
    >>> from cumulant.filtering.attention import sinkhorn
    >>> sinkhorn(torch.tensor([[4.0, 1.0], [1.0, 1.0]]).log())
    tensor([[0.6667, 0.3333],
            [0.3333, 0.6667]])
    """
    return _sinkhorn("sinkhorn", scores, tol, max_steps)


def _sinkhorn(me: str, scores: Any, tol: Any, max_steps: Any) -> Tensor:
    got, _ = numbers(me, scores=scores)
    kind, S = got["scores"].dtype, got["scores"].double()
    tol, max_steps = real(me, "tol", tol, least=0.0), whole(me, "max_steps", max_steps, 1)
    if S.ndim < 2 or S.shape[-1] != S.shape[-2]:
        raise InputError(
            f"{me}: scores must be square, (*batch, N, N), not {tuple(S.shape)}: a doubly "
            "stochastic matrix has as many rows as columns, as many queries as keys."
        )
    if not S.numel():
        return got["scores"]
    fixed = S.detach()
    require(fixed < math.inf, lambda: f"{me}: scores must be finite or -inf, not +inf.")
    require(
        (fixed > -math.inf).any(-1) & (fixed > -math.inf).any(-2),
        lambda: f"{me}: a row or column of scores is -inf: nothing there can sum to one.",
    )
    f = g = torch.zeros_like(fixed[..., :1])
    for _ in range(max_steps):
        f = -(fixed + g.mT).logsumexp(-1, keepdim=True)
        g = -(fixed + f).logsumexp(-2, keepdim=True).mT
        missing = ((fixed + f + g.mT).exp().sum(-1) - 1).abs()
        if holds(missing <= tol):
            break
    else:
        if holds(missing <= tol) is False:
            raise ConvergenceError(
                f"{me}: after {max_steps} steps a row still misses one by "
                f"{float(missing.max()):.3g} (tol {tol:.3g}). Likely causes: scores far apart (take "
                "a smaller scale, or more max_steps), or -inf where no doubly stochastic matrix has "
                "all the other entries (a causal mask leaves only the identity).",
                (fixed + f + g.mT).exp().to(kind),
            )
    # From the solution, a Newton step is exact to first order in a change of the scores, two to
    # third order.
    for _ in range(2):
        f, g = _newton(S, f, g)
    return (S + f + g.mT).exp().to(kind)


def _newton(S: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """One step to rows and columns P = exp(S + f + g') that sum to one; f and g are columns."""
    P = (S + f + g.mT).exp()
    rows, columns = P.sum(-1, keepdim=True), P.sum(-2)[..., None]
    # What is added to f may be taken off g in each block of P: hence the pseudoinverse.
    schur = torch.diag_embed(columns[..., 0]) - P.mT @ (P / rows)
    change = torch.linalg.pinv(schur, hermitian=True) @ (1 - columns + P.mT @ (1 - 1 / rows))
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
    >>> from cumulant.filtering.attention import sinkhorn_attention
    >>> q, k, v = torch.randn(3, 6, 4, dtype=torch.float64)
    >>> torch.allclose(sinkhorn_attention(q, k, v).mean(0), v.mean(0))
    True
    """
    me = "sinkhorn_attention"
    call = prepare(me, query, key, value, attn_mask=attn_mask, scale=scale)
    scores, seen = _scores(me, call)
    weights = _sinkhorn(me, scores.masked_fill(~seen, -math.inf), tol, max_steps)
    return (weights @ call.arguments["value"]).to(call.dtype)
