"""Coordinates that whiten the support of a measure, for Newton's method on its link."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.typed import linalg

__all__ = ["Frame", "no_frame", "whitening"]


class Frame(NamedTuple):
    """Coordinates z, eta = W z, in which the unweighted support has identity covariance.

    `idle` directions stay fixed: the support is flat there, and W is zero on them. `span` projects
    onto the directions of the support, which gives the eta of smallest norm.
    """

    whiten: Tensor  # (*batch, d, d): W
    idle: Tensor  # (*batch, d)
    span: Tensor  # (*batch, d, d)
    narrow: Tensor  # (*batch, 1): the smallest eigenvalue of the correlations that is not idle

    @property
    def tails(self) -> tuple[int, ...]:
        """Number of non-batch dimensions of each tensor."""
        return 2, 1, 2, 1


def whitening(
    center: Tensor, covariance: Tensor, mean: Tensor, resolution: float
) -> tuple[Frame, Tensor]:
    """The frame of a measure, and which means lie off its affine span.

    Coordinates may be in different units, so rank is judged by correlations. `resolution` is the
    rounding error of the caller's numbers.
    """
    d, rounding = covariance.shape[-1], torch.finfo(covariance.dtype).eps
    unit = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0).sqrt()
    # A coordinate whose spread is within its own rounding error counts as constant.
    unit = torch.where(unit <= 4 * rounding * center[..., 0, :].abs(), 0.0, unit)
    inverse = torch.where(unit > 0, 1 / torch.where(unit > 0, unit, 1.0), 0.0)
    correlation = covariance * inverse[..., :, None] * inverse[..., None, :]
    values, axes = linalg.eigh(correlation)
    idle = values <= d * max(100 * rounding, (16 * resolution) ** 2)
    length = torch.where(idle, 1.0, values).sqrt()
    whiten = inverse[..., :, None] * axes * torch.where(idle, 0.0, 1 / length)[..., None, :]
    # The null space of the covariance: directions orthogonal to the support.
    blind = torch.where(unit > 0, inverse, 1.0)[..., :, None] * axes * idle[..., None, :]
    blind = blind / linalg.vector_norm(blind, dim=-2, keepdim=True).clamp_min(1e-300)
    eye = torch.eye(d, dtype=covariance.dtype, device=covariance.device)
    span = eye - blind @ linalg.pinv(blind, rtol=1e-10)
    away = mean - center
    off = linalg.vector_norm(away - away @ span, dim=-1)
    size = unit.amax(-1)[..., None] + linalg.vector_norm(away, dim=-1) + center.abs().amax(-1)
    narrow = torch.where(idle, torch.inf, values).amin(-1, keepdim=True)
    frame = Frame(whiten, idle, span, narrow)
    return frame, off > max(1e4 * rounding, 100 * resolution) * size


def no_frame(like: Tensor) -> Frame:
    """The identity, for eta of d statistics."""
    eye = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    return Frame(eye, eye[0] > 1, eye, eye[0, :1])
