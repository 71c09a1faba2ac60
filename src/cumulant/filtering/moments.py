"""Gaussian messages: the linear step, the observation, and the collapse of a mixture.

See docs/theory.md, T25.

Messages are means ``(*batch, G, M, n)`` and covariances ``(*batch, G, M, n, n)``: G histories by M
current modes. Covariances are sums of squares, and symmetric up to rounding until they are shown.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.autodiff import on_tape
from cumulant.core.typed import linalg
from cumulant.filtering.roots import Update, valued
from cumulant.measures.gaussian import LOG_2PI

__all__ = ["Affine", "Observed", "agreed", "collapse", "observe", "predict", "symmetric"]

# From so many matrices on, one large product beats a loop over small ones.
MANY = 256
# (64 eps)^2: what rounding leaves of a variance that an exact observation takes away is less than
# this share of it. Numbers that differ by less than AGREEMENT, relative to what they were computed
# from, differ by rounding. Both as in native/.
ROUNDING, AGREEMENT = 2.0e-28, 1e-13


class Affine(NamedTuple):
    """y = matrix x + offset + N(0, noise), one for each mode: ``(..., M, a, b)`` and so on."""

    matrix: Tensor
    offset: Tensor
    noise: Tensor


class Observed(NamedTuple):
    """The message after an observation, and the log-likelihood of it."""

    mean: Tensor
    covariance: Tensor
    log_likelihood: Tensor


def symmetric(x: Tensor) -> Tensor:
    """The symmetric part."""
    return (x + x.mT).mul_(0.5)


def identity(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The identity matrix."""
    return torch.eye(n, dtype=dtype, device=device)


def times(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix @ x for matrices ``(..., M, a, b)`` and x ``(..., G, M or 1, b, c)``.

    Where one set of matrices meets many x, each mode is one large product; where it meets one, the
    product is done without the cost of broadcasting.
    """
    if matrix.ndim == 3 and x.ndim > 3:
        count = x.shape[:-3].numel()
        if count == 1 and x.shape[-3] == matrix.shape[0]:
            out = torch.bmm(matrix, x.reshape(x.shape[-3:]))
            return out.reshape(*x.shape[:-2], *out.shape[-2:])
        if count >= MANY:
            if x.shape[-3] == 1:
                return torch.einsum("jab,...bc->...jac", matrix, x[..., 0, :, :])
            return torch.einsum("jab,...jbc->...jac", matrix, x)
    return matrix @ x


def plus(base: Tensor, sign: int, first: Tensor, second: Tensor) -> Tensor:
    """base + sign first @ second; in one pass where there are many."""
    lead = first.shape[:-2]
    if lead.numel() < MANY:
        return base + first @ second if sign > 0 else base - first @ second

    def flat(x: Tensor) -> Tensor:
        return x.expand(*lead, *x.shape[-2:]).reshape(lead.numel(), *x.shape[-2:])

    out = torch.baddbmm(flat(base), flat(first), flat(second), alpha=sign)
    return out.reshape(*lead, *out.shape[-2:])


def _through(step: Affine, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W m + b, W P and W P W' + Q, the last symmetric up to rounding."""
    if mean.shape[:-1].numel() >= MANY:
        moved, half = times(step.matrix, mean[..., None])[..., 0], step.matrix @ covariance
    else:  # one call less
        both = times(step.matrix, torch.cat([covariance, mean[..., None]], -1))
        moved, half = both[..., -1], both[..., :-1]
    return moved + step.offset, half, times(step.matrix, half.mT) + step.noise


def predict(step: Affine, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """W m + b and W P W' + Q, for each mode.

    Where many messages wait for the same small matrices, W P W' is one product of the table of all
    P with the Kronecker squares of W.
    """
    M, a, n = step.matrix.shape[-3:]
    if step.matrix.ndim == 3 and mean.shape[-2] == 1 and n <= 6 and mean.shape[:-2].numel() >= MANY:
        W = step.matrix
        square = torch.einsum("jab,jcd->jacbd", W, W).reshape(M * a * a, n * n)
        moved = torch.unflatten(mean[..., 0, :] @ W.reshape(M * a, n).mT, -1, (M, a)) + step.offset
        table = covariance[..., 0, :, :].reshape(mean.shape[:-2].numel(), n * n)
        if step.noise.ndim == 3:
            spread = torch.addmm(step.noise.reshape(-1), table, square.mT)
            return moved, spread.reshape(*mean.shape[:-2], M, a, a)
        spread = (table @ square.mT).reshape(*mean.shape[:-2], M, a, a)
        return moved, spread + step.noise
    mean, _, covariance = _through(step, mean, covariance)
    return mean, covariance


def whiten(covariance: Tensor, *columns: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """With covariance = L L': L^-1 of each array of columns, the parts to undo it, log det L.

    log det L is NaN where the matrix is not positive definite. Small matrices in large numbers are
    factored entry by entry, all at once.
    """
    p = covariance.shape[-1]
    if p == 1 or (1 < p <= 4 and covariance.shape[:-2].numel() >= MANY):
        return _whiten_entries(covariance, columns)
    root, info = linalg.cholesky_ex(covariance)
    white = linalg.solve_triangular(root, torch.cat(columns, -1), upper=False)
    log_root = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    log_root = torch.where(info == 0, log_root, torch.nan)
    return list(torch.split(white, [c.shape[-1] for c in columns], -1)), [root], log_root


def _whiten_entries(
    covariance: Tensor, columns: tuple[Tensor, ...]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    p = covariance.shape[-1]
    root: list[list[Tensor]] = []
    for a in range(p):
        row: list[Tensor] = []
        for b in range(a + 1):
            rest = covariance[..., a, b]
            for c in range(b):
                rest = rest - row[c] * (row[c] if b == a else root[b][c])
            row.append(rest.sqrt() if b == a else rest / root[b][b])
        root.append(row)
    out: list[Tensor] = []
    for x in columns:
        rows: list[Tensor] = []
        for a in range(p):
            rest = x[..., a, :]
            for b in range(a):
                rest = rest - root[a][b][..., None] * rows[b]
            rows.append(rest / root[a][a][..., None])
        out.append(torch.stack(rows, -2))
    log_root = root[0][0].log()
    for a in range(1, p):
        log_root = log_root + root[a][a].log()
    # A zero on the diagonal is a failure as well as a negative number under the root.
    log_root = torch.where(log_root > -torch.inf, log_root, torch.nan)
    return out, [x for row in root for x in row], log_root


def unwhiten(root: list[Tensor], white: Tensor) -> Tensor:
    """L'^-1 white, with L as `whiten` left it."""
    if len(root) == 1 and root[0].ndim == white.ndim:
        return linalg.solve_triangular(root[0].mT, white, upper=True)
    p = white.shape[-2]
    rows: list[Tensor] = []
    for a in reversed(range(p)):
        rest = white[..., a, :]
        for b in range(a + 1, p):
            rest = rest - root[b * (b + 1) // 2 + a][..., None] * rows[p - 1 - b]
        rows.append(rest / root[a * (a + 1) // 2 + a][..., None])
    return torch.stack(rows[::-1], -2)


def observe(
    emission: Affine,
    mean: Tensor,
    covariance: Tensor,
    value: Tensor,
    seen: Tensor | None,
    known: Update | None = None,
    *,
    exact: bool = False,
) -> Observed:
    """Condition on value = C x + d + noise; elements not `seen` say nothing.

    The covariance is Joseph's (I - K C) P (I - K C)' + K R K', which stays positive semi-definite
    under rounding.

    Args:
        emission: C, d, R.
        mean, covariance: the predicted message.
        value: ``(*batch, 1, 1, p)``.
        seen: ``(*batch, 1, 1, p)``, or None if all were.
        known: the same in roots, which have more digits.
        exact: some elements have no noise. What they leave certain gets variance zero, instead of
            what rounding makes of it.
    """
    expected, cross, spread = _through(emission, mean, covariance)
    surprise = value - expected
    count: Tensor | int = value.shape[-1]
    if seen is not None:
        # A missing element becomes an independent one of variance 1 that came as expected.
        mask = seen.to(value.dtype)
        surprise = torch.where(seen, surprise, 0.0)
        cross = cross * mask[..., None]
        spread = spread * (mask[..., None] * mask[..., None, :]) + torch.diag_embed(1 - mask)
        count = mask.sum(-1)
    matrix, noise, scale = emission.matrix, emission.noise, None
    if known is not None:

        def turn(x: Tensor) -> Tensor:
            return linalg.solve_triangular(known.spread, x, upper=False)

        # The observation in units of S^(1/2): S is I, and its derivatives are those of the formula.
        surprise = turn(surprise[..., None])[..., 0]
        unit = identity(spread.shape[-1], mean.dtype, mean.device).expand_as(known.spread)
        cross = valued(known.cross.mT, turn(cross) if on_tape(cross) else cross)
        spread = valued(unit, turn(turn(spread).mT) if on_tape(spread) else spread)
        lead = known.spread.shape[:-2]
        matrix = turn(matrix.expand(*lead, -1, -1))
        noise = turn(turn(noise.expand(*lead, -1, -1)).mT)
        scale = known.spread.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    (half, white), factor, log_root = whiten(spread, cross, surprise[..., None])
    log_likelihood = -(white.square().sum((-2, -1)) + count * LOG_2PI) / 2 - log_root
    if scale is not None:
        log_likelihood = log_likelihood - scale
    gain = unwhiten(factor, half).mT
    mean = mean + (half.mT @ white)[..., 0]
    eye = identity(mean.shape[-1], mean.dtype, mean.device)
    keep = plus(eye, -1, gain, matrix)
    kept = plus(keep @ covariance @ keep.mT, 1, gain, times(noise, gain.mT))
    if known is not None:
        kept = valued(known.root @ known.root.mT, kept)
    elif exact:
        noisy = (gain @ noise * gain).sum(-1).detach()
        left, before = (x.detach().diagonal(dim1=-2, dim2=-1) for x in (kept, covariance))
        certain = (noisy == 0) & (left <= ROUNDING * before)
        none = certain[..., None] | certain[..., None, :]
        # As a function of the noise it is not zero everywhere: the derivative stays.
        kept = torch.where(none, valued(torch.zeros_like(kept).detach(), kept), kept)
    return Observed(mean, kept, log_likelihood)


def agreed(mean: Tensor, covariance: Tensor, predicted: Tensor, spread: Tensor) -> Tensor:
    """Means with what all branches know exactly, and alike but for rounding, the same in every bit.

    Branches are compared with the first history of the same mode, then with the first of all.

    Args:
        mean, covariance: after the observation, ``(*batch, G, M, n)`` and ``(*batch, G, M, n, n)``.
        predicted, spread: the same before it.
    """
    certain = covariance.detach().diagonal(dim1=-2, dim2=-1) == 0
    size = mean.detach().abs() + predicted.detach().abs()
    size = AGREEMENT * (size + spread.detach().diagonal(dim1=-2, dim2=-1).abs().sqrt())
    for first in (mean[..., :1, :, :], mean[..., :1, :1, :]):
        known = certain[..., :1, : first.shape[-2], :] & certain
        near = known & ((mean - first).detach().abs() <= size)
        mean = torch.where(near, valued(first.detach().expand_as(mean), mean), mean)
    return mean


def collapse(
    log_weights: Tensor, mean: Tensor, covariance: Tensor, *, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """The M-projection of mixtures over histories onto one Gaussian for each mode (T11).

    m = sum p_g m_g, P = sum p_g (P_g + (m_g - m)(m_g - m)').

    Args:
        log_weights: ``(*batch, G, M)``.
        mean, covariance: ``(*batch, G, M or 1, n)`` and ``(*batch, G, M or 1, n, n)``.
        exact: where means are equal, their mean is the same in every bit.

    Returns:
        Means ``(*batch, 1, M, n)`` and covariances, symmetric up to rounding.
    """
    p = log_weights.softmax(-2)
    n = mean.shape[-1]
    if mean.shape[-2] == 1:  # the same Gaussians for each mode, weighted differently
        middle = p.mT @ mean[..., 0, :]
        within = p.mT @ covariance[..., 0, :, :].flatten(-2)
        within = torch.unflatten(within, -1, (n, n))
    else:
        middle = (p[..., None] * mean).sum(-3)
        within = (p[..., None, None] * covariance).sum(-4)
    if exact:
        same = (mean == mean[..., :1, :, :]).all(-3)
        first = mean[..., 0, :, :].detach().expand_as(middle)
        middle = torch.where(same, valued(first, middle), middle)
    away = (mean - middle[..., None, :, :]).movedim(-3, -2)  # (*batch, M, G, n)
    between = (away * p.mT[..., None]).mT @ away
    return middle[..., None, :, :], (within + between)[..., None, :, :, :]
