"""Ring attention: the keys of each rank pass the queries of every rank, a shard at a time.

A sum over pairs (i, j) can visit the keys in any order. Tensors indexed by queries stay; tensors
indexed by keys travel from rank to rank, and their sums follow one step behind until both are back
home. No rank ever holds more than shards, in any derivative.
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
    """The keys of one rank: their arguments, their number, and the number of keys before them."""

    arguments: dict[str, Tensor]
    keys: int
    before: int


@dataclass(frozen=True)
class Ring:
    """The number of keys on each rank, and of queries on the ranks before this one."""

    ranks: Ranks
    rows: tuple[int, ...]
    queries_before: int

    def blocks(self, moving: Mapping[str, Tensor], origin: Tensor | None = None) -> Iterator[Block]:
        """Every rank's block in turn, own first; the next one is in transit during the computation.

        Keys are relative to `origin`, which each rank chooses for its own queries.
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
        """Pass on the sums of the current keys behind their block; the last step returns our own.

        `sums` are the sums of this step, for its keys.
        """
        coming = self.ranks.pass_on(list(sums.values()), self.rows[self._owner(step + 1)])
        return dict(zip(sums, coming(), strict=True))

    def somewhere(self, here: bool) -> bool:
        """Whether it holds on any rank, in which case all must act alike."""
        flag = torch.tensor([float(here)], dtype=torch.float32)
        return bool(self.ranks.largest(flag.to(self.ranks.device)) > 0)
