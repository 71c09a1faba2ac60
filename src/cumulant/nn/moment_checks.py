"""Input checks of `MomentAttention`: options, means, covariances and masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import broadcasts_to, require, whole
from cumulant.core.errors import InputError
from cumulant.core.precision import autocast_of, wide

__all__ = [
    "check_covariance",
    "check_mean",
    "check_result",
    "checked_rank",
    "joined_mask",
    "one_of",
]


def one_of(name: str, given: Any, names: tuple[str, ...]) -> str:
    """Check that `given` is one of the allowed names."""
    if not isinstance(given, str) or given not in names:
        told = ", ".join(repr(x) for x in names)
        raise InputError(f"MomentAttention: {name} must be one of {told}, not {given!r:.40}.")
    return given


def checked_rank(rank: Any, form: str, size: int) -> int | None:
    """Check the rank of the low-rank form; None for the other forms."""
    if form != "low_rank":
        if rank is not None:
            raise InputError(
                f"MomentAttention: rank belongs to covariance='low_rank', not to {form!r}; drop "
                "rank or change the form."
            )
        return None
    if rank is None:
        raise InputError(
            f"MomentAttention: covariance='low_rank' needs rank, the number of factor columns, "
            f"between 1 and embed_dim = {size}."
        )
    if whole("MomentAttention", "rank", rank, 1) > size:
        raise InputError(
            f"MomentAttention: rank must be at most embed_dim = {size}, not {rank}; "
            "covariance='dense' keeps all."
        )
    return int(rank)


def check_mean(mean: Any, weight: Tensor) -> None:
    """Check shape, dtype and finiteness."""
    size = weight.shape[-1]
    if not isinstance(mean, Tensor) or mean.ndim < 2 or mean.shape[-1] != size:
        came = tuple(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
        raise InputError(
            f"MomentAttention: mean must be a tensor (*batch, N, {size}), not {came}. Pass a "
            "single token as x[None]."
        )
    free = autocast_of(mean) is not None and mean.is_floating_point()
    if mean.dtype != weight.dtype and not free:
        raise InputError(
            f"MomentAttention: mean has dtype {mean.dtype}, but the layer has {weight.dtype}; "
            "convert one with .to(dtype)."
        )
    _check_finite("mean", mean)


def _check_finite(name: str, x: Tensor) -> None:
    require(
        x.detach().isfinite(),
        lambda: (
            f"MomentAttention: {name} must be finite, but holds "
            f"{'NaN' if bool(x.isnan().any()) else 'an infinity'}; replace missing values by 0 "
            "and mask those tokens with key_padding_mask."
        ),
    )


def check_result(found: tuple[Tensor, Tensor]) -> None:
    """Raise on overflow instead of returning non-finite numbers."""
    for x in found:
        require(
            x.detach().sum().isfinite() | x.detach().isfinite().all(),
            lambda: (
                "MomentAttention: the result is not finite: a value overflowed, or the weights "
                "hold NaN. Scale the inputs down, or use a wider dtype."
            ),
        )


def check_covariance(form: str, covariance: Any, mean: Tensor) -> None:
    """Check shape, sign, symmetry and correlations; eigenvalues would cost more than the rest."""
    more = {"diagonal": (), "dense": (mean.shape[-1],), "low_rank": ("any",)}[form]
    shape = tuple(covariance.shape) if isinstance(covariance, Tensor) else ()
    fits = shape == (*mean.shape, *(shape[-1:] if form == "low_rank" else more))
    if not fits or not covariance.is_floating_point() or covariance.device != mean.device:
        came = type(covariance).__name__
        if isinstance(covariance, Tensor):
            came = f"{shape} {covariance.dtype} on {covariance.device}"
        told = ", ".join(str(x) for x in (*mean.shape, *more))
        raise InputError(
            f"MomentAttention: a covariance in the {form} form must be a floating-point tensor "
            f"({told}) on {mean.device}, like the mean, but is {came}."
        )
    _check_finite("covariance", covariance)
    if form == "low_rank":
        return
    given = covariance.detach()
    variance = given if form == "diagonal" else given.diagonal(dim1=-2, dim2=-1)
    require(
        variance >= 0,
        lambda: (
            f"MomentAttention: variances must not be negative; the smallest is "
            f"{float(variance.min()):.3g}. Pass log-variances as x.exp()."
        ),
    )
    if form == "diagonal" or not given.numel():
        return
    given = wide(given)
    tolerance = min(1e3 * torch.finfo(covariance.dtype).eps, 0.02)
    size = given.abs().amax((-2, -1), keepdim=True)
    require(
        (given - given.mT).abs() <= tolerance * size,
        lambda: (
            f"MomentAttention: a covariance must be symmetric; entries differ from their "
            f"transposes by up to {float((given - given.mT).abs().max()):.3g}. Use (x + x.mT) / 2 "
            "if that is rounding."
        ),
    )
    deviation = given.diagonal(dim1=-2, dim2=-1).sqrt()
    require(
        given.abs() <= deviation[..., :, None] * deviation[..., None, :] + tolerance * size,
        lambda: (
            "MomentAttention: a covariance must be positive semi-definite, but one here has a "
            "correlation beyond 1; A @ A.mT always qualifies."
        ),
    )


def joined_mask(attn_mask: Any, padding: Any, mean: Tensor, heads: int) -> Tensor | None:
    """Combine the masks into one of at least three dimensions; True or finite = visible."""
    *batch, n, _ = mean.shape
    mask = None
    if attn_mask is not None:
        grid, fits = (*batch, heads, n, n), False
        if isinstance(attn_mask, Tensor) and attn_mask.device == mean.device:
            fits = attn_mask.dtype == torch.bool or attn_mask.is_floating_point()
            fits = fits and broadcasts_to(attn_mask.shape, grid)
        if not fits:
            came = type(attn_mask).__name__
            if isinstance(attn_mask, Tensor):
                came = f"{tuple(attn_mask.shape)} {attn_mask.dtype} on {attn_mask.device}"
            raise InputError(
                f"MomentAttention: attn_mask must be boolean (True = may attend) or added, and "
                f"broadcast to (*batch, heads, N, N) = {grid}, but is {came}; pass one mask per "
                "example as mask[:, None], padding as key_padding_mask."
            )
        mask = attn_mask[(None,) * (3 - attn_mask.ndim)]
        if mask.is_floating_point():
            mask = _lowered(mask)
    if padding is not None:
        shape = tuple(padding.shape) if isinstance(padding, Tensor) else None
        if shape != (*batch, n) or padding.dtype != torch.bool or padding.device != mean.device:
            came = f"{shape} {padding.dtype}" if shape is not None else type(padding).__name__
            raise InputError(
                f"MomentAttention: key_padding_mask must be boolean {(*batch, n)}, True at "
                f"padding, on {mean.device}, but is {came}."
            )
        hidden = padding[..., None, None, :]
        if mask is None:
            return ~hidden
        mask = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, -math.inf)
    return mask


def _lowered(mask: Tensor) -> Tensor:
    """Subtract each query's largest entry, so that the masks of two heads can be added."""
    require(
        mask.detach() < math.inf,
        lambda: "MomentAttention: attn_mask must be finite or -inf, but holds NaN or +inf.",
    )
    if not mask.shape[-1]:
        return mask
    top = mask.detach().amax(-1, keepdim=True)
    return mask - torch.where(top.isfinite(), top, 0.0)
