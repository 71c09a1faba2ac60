"""Who trains together: this process alone, or the ranks of a group with their anchors and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from cumulant.core.checks import require
from cumulant.core.errors import InputError
from cumulant.distributed.facts import Facts, describe
from cumulant.distributed.maps import gather_rows, total
from cumulant.distributed.ranks import Ranks

__all__ = ["ContrastiveGroup", "Reduce", "nothing"]

_T = TypeVar("_T")
_Pair = TypeVar("_Pair", bound=tuple[Any, ...])


class ContrastiveGroup:
    """The ranks of a contrastive loss; without a group, a group of one.

    Every anchor meets the keys of all ranks, so the keys are gathered and their gradients added up
    on the way back. That sends as much as bringing the anchors to the keys would, and leaves each
    rank whole rows of scores, whose gradient is made in the same pass as the loss.
    """

    def __init__(self, group: Any) -> None:
        self.ranks = Ranks.solo() if group is None else Ranks(group)
        self.shared = not self.ranks.alone
        self.rows: tuple[int, ...] = ()
        self.anchors = 0

    def enter(
        self, what: str, prepare: Callable[[], _Pair], facts: Callable[[], Facts] = dict
    ) -> _Pair:
        """Check this rank's anchors and keys, the first two, and learn how many others have."""
        made: list[_Pair] = []

        def check() -> Facts:
            made.append(prepare())
            q, k = made[0][:2]
            counts = {"anchors": q.shape[-2], "keys": k.shape[-2]}
            return {**describe(anchors=q, keys=k), **facts(), **counts}

        found = self.ranks.agree(what, check, differ=("anchors", "keys"))
        self.rows, self.anchors = tuple(found["keys"]), sum(found["anchors"])
        if not self.anchors or not sum(self.rows):
            raise InputError("info_nce: at least one rank must have anchors and keys.")
        return made[0]

    @property
    def own(self) -> slice:
        """Which of all keys are this rank's."""
        start = sum(self.rows[: self.ranks.rank])
        return slice(start, start + self.rows[self.ranks.rank])

    def checked(self, make: Callable[[], _T]) -> _T:
        """What `make` returns; if it raises on one rank, all stop."""
        return self.ranks.checked("info_nce", make)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all keys, from those of this rank's."""
        return gather_rows(x, self.ranks, self.rows)


@dataclass(frozen=True)
class Reduce:
    """From the losses of this rank's anchors to what the caller asked for."""

    group: ContrastiveGroup
    reduction: str
    kind: torch.dtype

    def __call__(self, loss: Tensor) -> Tensor:
        kind = self.kind
        if self.reduction == "none":
            out = loss
        elif not self.group.shared:
            # As a sum, whose gradient repeats one number in memory; that of a mean does not.
            out = loss.sum() / loss.numel() if self.reduction == "mean" else loss.sum()
        else:
            out = total(loss.sum(), self.group.ranks)
            if self.reduction == "mean":
                out = out / (math.prod(loss.shape[:-1]) * self.group.anchors)
        out = out.to(kind)

        def check() -> None:
            require(
                out.isfinite(),
                lambda: (
                    f"info_nce: the loss left the range of {kind}: the scores, inner products over "
                    "the temperature plus log-weights, are too large, or so is a sum. Scale them "
                    "down, or use a wider dtype."
                ),
            )

        # What is reduced is the same on every rank, and all of them refuse it or none.
        self.group.checked(check) if self.reduction == "none" else check()
        return out


def nothing(query: Tensor, key: Tensor) -> Tensor:
    """The log of a sum over no anchors for each key, which still knows of anchors and keys.

    A rank without anchors must take part in the backward pass like the others.
    """
    return (key * 0.0).sum(-1, keepdim=True) + query.sum() - math.inf
