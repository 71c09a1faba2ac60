"""`Received`: what keys have received so far, added up over the steps of a stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.attention.attended import Attended
from cumulant.core.checks import broadcasts_to
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError

__all__ = ["Received"]


@dataclass(frozen=True)
class Received:
    """The weight that each key has received from queries that came one after the other.

    `merge` joins results over *different keys* for the same queries; this adds results of
    *different queries* over the same keys. Keys may have been appended in between, as in decoding:
    sums are lined up at the first key, and a key that came later has received nothing before.

    Attributes:
        total: ``(*batch, N)``, the weight received.
        count: ``(*batch, N)``, how many queries saw the key.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(5, 8)
    >>> first = cm.Received.of(cm.attend(x[:4], x[:4], is_causal=True))
    >>> both = first + cm.Received.of(cm.attend(x[4:], x))  # one more token, which sees all five
    >>> torch.allclose(both.total, cm.attend(x, x, is_causal=True).received())
    True
    >>> both.count
    tensor([5., 4., 3., 2., 1.])
    """

    total: Tensor
    count: Tensor

    __repr__ = described_fields

    def __post_init__(self) -> None:
        if not broadcasts_to(self.count.shape, self.total.shape):
            raise InputError(
                f"Received: count must broadcast to total, {tuple(self.total.shape)}, but has "
                f"shape {tuple(self.count.shape)}."
            )

    @classmethod
    def of(cls, attended: Attended, queries: Tensor | slice | None = None) -> Received:
        """What the keys of one result receive from all its queries, or from some."""
        return cls(attended.received(queries), attended.seen_by(queries))

    @property
    def mean(self) -> Tensor:
        """The mean weight over the queries that saw the key; 0 if none did."""
        return self.total / self.count.masked_fill(self.count == 0, 1.0)

    def __add__(self, later: Received) -> Received:
        ours, theirs = self.total.shape, later.total.shape
        if ours[:-1] != theirs[:-1]:
            raise InputError(
                "Received: sums of one batch and number of heads can be added, not "
                f"{tuple(ours)} and {tuple(theirs)}."
            )
        keys = max(ours[-1], theirs[-1])
        return Received(
            _grown(self.total, keys) + _grown(later.total, keys),
            _grown(self.count, keys) + _grown(later.count, keys),
        )

    def keep(self, keys: Tensor) -> Received:
        """The sums of some keys, in the order of ``keys`` ``(*batch, n)``: what eviction leaves.

        >>> import torch, cumulant as cm
        >>> cm.Received(torch.tensor([3.0, 1.0, 2.0]), torch.ones(3)).keep(torch.tensor([0, 2]))
        Received(total=tensor([3., 2.]), count=tensor([1., 1.]))
        """
        index = keys.expand(*self.total.shape[:-1], keys.shape[-1])
        count = self.count.expand(self.total.shape)
        return Received(self.total.gather(-1, index), count.gather(-1, index))


def _grown(x: Tensor, keys: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, keys - x.shape[-1]))
