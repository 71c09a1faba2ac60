"""The largest weights of the texts that are shown, as pairs of a key and its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import torch

from cumulant.core.typed import tolist
from cumulant.lens.recorder import Recorder
from cumulant.lens.statistics import Top

__all__ = ["Pairs", "top_pairs"]


def top_pairs(recorder: Recorder, texts: int, layers: int) -> list[Any]:
    """[text][layer][head][token] -> pairs (key, weight), for the first texts."""
    out: list[Any] = []
    for text in range(texts):
        rows: list[Any] = []
        for layer in range(layers):
            top = recorder.top.get((text, layer))
            if top is None:
                rows.append([])
                continue
            rows.append(Pairs(top))
        out.append(rows)
    return out


class Pairs(Sequence[Any]):
    """The largest weights of a layer as [head][token] -> pairs (key, weight), made when asked for.

    Lists of lists of pairs take longer to make than the weights to compute.
    """

    def __init__(self, top: Top) -> None:
        self._key, self._weight = top.key, torch.round(top.weight.double(), decimals=5)

    def __len__(self) -> int:
        return len(self._key)

    @overload
    def __getitem__(self, head: int) -> list[Any]: ...
    @overload
    def __getitem__(self, head: slice) -> list[list[Any]]: ...
    def __getitem__(self, head: int | slice) -> Any:
        if isinstance(head, slice):
            return [self[h] for h in range(*head.indices(len(self)))]
        rows = zip(tolist(self._key[head]), tolist(self._weight[head]), strict=True)
        return [
            [[j, w] for j, w in zip(keys, weights, strict=True) if w > 0] for keys, weights in rows
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pairs | list) and list(self) == list(cast(list[Any], other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]
