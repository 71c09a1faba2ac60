"""A ring: keys that live on ranks pass by the queries of every rank, a shard at a time.

A sum over pairs (i, j) does not mind where the keys are when their turn comes. What is indexed by
queries stays; what is indexed by keys travels from rank to rank, and sums for keys travel with
them, a step behind, until both are home. Only shards are ever held, in any derivative.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.distributed.ranks import Ranks

__all__ = ["Block", "Ring"]


class Block(NamedTuple):
    """The keys of one rank: their arguments, how many they are, and how many come before them."""

    arguments: dict[str, Tensor]
    keys: int
    before: int


@dataclass(frozen=True)
class Ring:
    """So many keys on each rank, and so many queries on the ranks before this one."""

    ranks: Ranks
    rows: tuple[int, ...]
    queries_before: int

    def blocks(self, moving: Mapping[str, Tensor], origin: Tensor | None = None) -> Iterator[Block]:
        """Every rank's block in turn, own first; the next one travels while one is worked on.

        Keys are seen from `origin`, which each rank chooses for its own queries.
        """
        names, held = list(moving), list(moving.values())
        for step in range(self.ranks.size):
            owner = self._owner(step)
            last = step == self.ranks.size - 1
            coming = None if last else self.ranks.pass_on(held, self.rows[self._owner(step + 1)])
            before = sum(self.rows[:owner])
            block = dict(zip(names, held, strict=True))
            if origin is not None:
                block["key"] = block["key"] - origin
            yield Block(block, self.rows[owner], before)
            if coming is not None:
                held = coming()

    def _owner(self, step: int) -> int:
        return (self.ranks.rank - step) % self.ranks.size

    def follow(self, sums: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Pass sums of the keys at hand on, after their block; the last step brings own ones home.

        `sums` are those made in this step, for the keys that were at hand.
        """
        coming = self.ranks.pass_on(list(sums.values()), self.rows[self._owner(step + 1)])
        return dict(zip(sums, coming(), strict=True))

    def somewhere(self, here: bool) -> bool:
        """Whether it holds on any rank: then all must act alike."""
        flag = torch.tensor([float(here)], dtype=torch.float32)
        return bool(self.ranks.largest(flag.to(self.ranks.device)) > 0)
