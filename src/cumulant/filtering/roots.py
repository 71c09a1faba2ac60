"""Square roots of covariances, P = L L': for smoothing and vague starts (docs/theory.md, T25).

A variance of 1 beside one of 10^10 has six digits left in P and eleven in L, and L L' has no
negative eigenvalue, whatever L is. But where P is singular, L has no derivative although P has one.
So roots are constants on the tape, and derivatives go through P (`valued`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.autodiff import on_tape
from cumulant.core.checks import holds
from cumulant.core.typed import functions, linalg

__all__ = [
    "Frame",
    "Update",
    "collapsed",
    "frame_of",
    "quotient",
    "regular",
    "triangular",
    "update",
    "valued",
    "whitener",
]

# Chord steps on the tape: each makes one more order of a derivative exact.
CHORDS = 2

# Pivots of correlations above this, squared, lose less than half of the digits in an inverse.
REGULAR = 1e-4


class Frame(NamedTuple):
    """A covariance in coordinates of unit variance: x = root z, z = inverse x.

    Attributes:
        root: L with P = L L', ``(..., n, n)``; columns are zero past the rank.
        inverse: its pseudo-inverse; rows are zero past the rank.
        void: 1 for coordinates past the rank, else 0, ``(..., n)``.
        right: inverse A, if made from columns A, ``(..., n, k)``. Its rows are orthonormal.
    """

    root: Tensor
    inverse: Tensor
    void: Tensor
    right: Tensor | None = None


def _correlations(P: Tensor) -> tuple[Tensor, Tensor]:
    """A covariance in units of its standard deviations, and these, 1 for what is certain."""
    variances = P.diagonal(dim1=-2, dim2=-1)
    unit = torch.where(variances > 0, variances, 1.0).sqrt()[..., None]
    return P / unit / unit.mT, unit


def regular(covariance: Tensor, least: float) -> bool:
    """Whether no direction has less than this share of the variance of the coordinates.

    Coordinates that are certain do not count.
    """
    scaled, _ = _correlations(covariance)
    sure = (covariance.diagonal(dim1=-2, dim2=-1) <= 0).to(scaled.dtype)
    found, info = linalg.cholesky_ex(scaled + torch.diag_embed(sure))
    pivots = found.diagonal(dim1=-2, dim2=-1)
    return holds((info == 0) & (pivots.square() >= least).all(-1)) is not False


def frame_of(
    covariance: Tensor, columns: Tensor | None = None, unit: Tensor | None = None
) -> Frame:
    """The frame of a covariance P, or of P = A A' from its columns.

    Correlations far from singular are factored as they are. Else their eigenvectors are taken, of
    the columns if these are known, which keeps twice the digits. What rounding leaves of a
    singular matrix counts as zero.

    Args:
        covariance: P.
        columns: A, ``(..., n, k)``, k >= n.
        unit: standard deviations ``(..., n, 1)`` that A was computed from, and rounded to; its own
            by default.
    """
    P = covariance.detach()
    scaled, own = _correlations(P)
    variances, n = P.diagonal(dim1=-2, dim2=-1), P.shape[-1]
    found, info = linalg.cholesky_ex(scaled)
    pivots = found.diagonal(dim1=-2, dim2=-1)
    if holds((info == 0) & (pivots > REGULAR).all(-1)):
        eye = torch.eye(n, dtype=P.dtype, device=P.device)
        inverse = linalg.solve_triangular(found, eye, upper=False)
        inverse = inverse / own.mT
        right = None if columns is None else inverse @ columns.detach()
        return Frame(own * found, inverse, torch.zeros_like(variances), right)
    eps = 10 * max(n, 1) * torch.finfo(P.dtype).eps
    unit = own if unit is None or columns is None else unit
    right = None
    if columns is None:
        values, vectors = linalg.eigh(scaled)
        sizes, least = values.clamp_min(0.0).sqrt(), eps**0.5
    else:
        # The product inverse A would lose what the singular vectors keep.
        vectors, sizes, right = linalg.svd(columns.detach() / unit, full_matrices=False)
        least = 10 * eps
    void = sizes <= least
    root = unit * vectors * sizes.masked_fill(void, 0.0)[..., None, :]
    inverse = (1 / sizes.masked_fill(void, torch.inf))[..., None] * vectors.mT / unit.mT
    return Frame(root, inverse, void.to(P.dtype), right)


def triangular(columns: Tensor) -> Tensor:
    """L ``(..., n, n)`` with L L' = A A', for A ``(..., n, k)``, k >= n."""
    A = columns.detach()
    if not A.numel():
        return A[..., : A.shape[-2]]
    return linalg.qr(A.mT, mode="r").R.mT


def valued(value: Tensor, formula: Tensor) -> Tensor:
    """A value known to more digits than its formula gives, with the formula's derivatives."""
    return value + (formula - formula.detach()) if on_tape(formula) else value


class Update(NamedTuple):
    """An observation in roots.

    S^(1/2) for S = C P C' + R, P C' S^(-1/2)', and a root of the covariance after it.
    """

    spread: Tensor
    cross: Tensor
    root: Tensor


def update(matrix: Tensor, noise_root: Tensor, root: Tensor, seen: Tensor | None) -> Update:
    """Condition N(., L L') on y = C x + noise, from roots to roots by one orthogonal map.

    Args:
        matrix: C.
        noise_root: of R.
        root: L.
        seen: which elements of y say anything, ``(..., p)``, or None for all; one that says nothing
            counts as an independent element of variance 1.
    """
    lead = functions.broadcast_shapes(matrix.shape[:-2], root.shape[:-2], noise_root.shape[:-2])
    (p, n), C = matrix.shape[-2:], matrix.detach()
    top = [noise_root.expand(*lead, p, p), C @ root]
    if seen is not None:
        mask = seen.to(root.dtype)
        top = [mask[..., None] * x for x in top] + [torch.diag_embed(1 - mask).expand(*lead, p, p)]
    rows = torch.cat(top, -1)
    below = torch.nn.functional.pad(root.expand(*lead, n, n), (p, rows.shape[-1] - n - p))
    out = triangular(torch.cat([rows, below], -2))
    factor = out[..., :p, :p]
    # What rounding leaves of a singular S is no density.
    sizes = factor.diagonal(dim1=-2, dim2=-1).abs()
    none = sizes <= 100 * torch.finfo(root.dtype).eps * rows.square().sum(-1).sqrt()
    factor = torch.where(torch.diag_embed(none), torch.nan, factor)
    return Update(factor, out[..., p:, :p], out[..., p:, p:])


def collapsed(log_weights: Tensor, away: Tensor, columns: Tensor) -> Tensor:
    """A root of the covariance of a mixture, from roots of its members.

    Args:
        log_weights: ``(..., K)`` of K members.
        away: from the mean of the mixture to theirs, ``(..., K, n)``.
        columns: roots, ``(..., K, n, k)``, k >= n, up to broadcasting.
    """
    share = (log_weights.detach().log_softmax(-1) / 2).exp()[..., None, None]
    columns = columns.expand(*away.shape, -1)
    members = share * torch.cat([columns, away.detach()[..., None]], -1)
    return triangular(members.transpose(-3, -2).flatten(-2))


def whitener(covariance: Tensor, frame: Frame) -> Tensor:
    """X with X P X' = I on the range of P: the frame's inverse, on the tape.

    Its derivatives are exact along changes that keep the rank of P.
    """
    found, P = frame.inverse, covariance
    if not on_tape(P):
        return found
    start = found @ P.detach() @ found.mT
    for _ in range(CHORDS):
        found = found - 0.5 * (found @ P @ found.mT - start) @ found
    return found


def quotient(value: Tensor, numerator: Tensor, covariance: Tensor, frame: Frame) -> Tensor:
    """J with J P = numerator: its value, on the tape.

    Its derivatives are exact along changes that keep the rank of P.
    """
    found, P = value, covariance
    if not on_tape(numerator, P):
        return found
    back = frame.inverse.mT @ frame.inverse
    start, change = value @ P.detach(), numerator - numerator.detach()
    for _ in range(CHORDS):
        found = found + (change - (found @ P - start)) @ back
    return found
