"""Covariances that a fit may only rescale: Q = S Q_0 S with one scale for each group of elements.

A covariance with a structure of its own, singular or dense, keeps that structure: a trend whose
slope alone has noise, a seasonal with one variance for all of its states, a velocity and the
position it drives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import tolist

__all__ = ["ScaleBlock", "scale_block"]


@dataclass(frozen=True)
class ScaleBlock:
    """A covariance ``(..., n, n)`` whose groups of elements move by one scale each.

    ``groups`` ``(n,)`` numbers the group of each element, -1 where it stays. The coordinates are
    the logarithms of the scales; ``mask`` marks one diagonal entry for each of them. Each mode has
    its scales, the same at all times.
    """

    name: str
    start: Tensor
    groups: Tensor
    mask: Tensor

    @property
    def size(self) -> int:
        """How many scales there are."""
        return int(self.mask.sum())

    @property
    def constant(self) -> bool:
        """Whether the covariance is the same at all steps and for all series."""
        return self.start.ndim <= 3

    @property
    def moving(self) -> Tensor:
        """The entries of the covariance that change."""
        free = self.groups >= 0
        return (free[:, None] | free[None, :]) & (self.start != 0)

    def moved(self, parameter: Tensor, order: Tensor) -> ScaleBlock:
        """The block around another value, whose modes are in another order."""
        return scale_block(self.name, parameter, self.groups)

    def vector(self, value: Tensor) -> Tensor:
        """The logarithms of the scales of a value."""
        return 0.5 * (value[self.mask] / self.start[self.mask]).log()

    def value(self, vector: Tensor) -> Tensor:
        """The covariance at coordinates ``(*points, size)``."""
        count = int(self.groups.max()) + 1
        logs = vector.reshape(*vector.shape[:-1], *_shared(self.start), count)
        held = torch.cat([logs, torch.zeros_like(logs[..., :1])], -1)  # group -1 is the last
        scale = held.index_select(-1, self.groups % (count + 1)).exp()
        return self.start * scale[..., :, None] * scale[..., None, :]


def _shared(start: Tensor) -> list[int]:
    """The dimensions before the matrix: the modes, and ones for time and series."""
    lead = list(start.shape[:-2])
    return [1] * (len(lead) - 1) + lead[-1:]


def scale_block(name: str, start: Tensor, groups: Tensor) -> ScaleBlock:
    """The block of a covariance that starts here; see `ScaleBlock` for `groups`."""
    n = start.shape[-1]
    numbers: set[int] = set(tolist(groups.reshape(-1)))
    known = sorted(numbers - {-1})
    if groups.shape != (n,) or known != list(range(len(known))) or not known:
        raise InputError(
            f"fit: free[{name!r}] must number the groups of its {n} elements 0, 1, ..., with -1 "
            f"where they stay, not {tolist(groups)}."
        )
    mask = torch.zeros_like(start, dtype=torch.bool)
    variances = start.diagonal(dim1=-2, dim2=-1)
    for group in known:
        able = (groups == group) & (variances > 0).reshape(-1, n).all(0)
        if not bool(able.any()):
            raise InputError(
                f"fit: {name} has no variance in group {group} that a scale could change; start "
                "with a positive one."
            )
        at = int(able.nonzero()[0])
        mask.reshape(-1, *start.shape[-3:])[0, ..., at, at] = True
    # Coordinates are read off the mask row by row, so groups must stand in that order.
    order = mask.reshape(-1, n, n)[0].diagonal().nonzero()
    firsts = [int(order[k]) for k in range(len(known))]
    renumbered = torch.full_like(groups, -1)
    for k, at in enumerate(firsts):
        renumbered[groups == groups[at]] = k
    return ScaleBlock(name, start, renumbered, mask)
