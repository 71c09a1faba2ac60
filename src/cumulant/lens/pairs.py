"""The largest weights of the texts that are shown, as pairs of a key and its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import torch

from cumulant.core.typed import functions, tolist
from cumulant.lens.recorder import Recorder
from cumulant.lens.statistics import Top
from cumulant.lens.tables import pandas

if TYPE_CHECKING:
    from cumulant.lens.tables import DataFrame

__all__ = ["Pairs", "pairs_of", "top_pairs", "top_table"]

# Decimals of a weight.
DECIMALS = 5


class Pairs(Sequence[Any]):
    """The largest weights of a layer as [head][token] -> pairs (key, weight), made when asked for.

    Lists of lists of pairs take longer to make than the weights to compute.
    """

    def __init__(self, top: Top) -> None:
        self.key, self.weight = top.key, torch.round(top.weight.double(), decimals=DECIMALS)

    def __len__(self) -> int:
        return len(self.key)

    @overload
    def __getitem__(self, head: int) -> list[Any]: ...
    @overload
    def __getitem__(self, head: slice) -> list[list[Any]]: ...
    def __getitem__(self, head: int | slice) -> Any:
        if isinstance(head, slice):
            return [self[h] for h in range(*head.indices(len(self)))]
        rows = zip(tolist(self.key[head]), tolist(self.weight[head]), strict=True)
        return [
            [[j, w] for j, w in zip(keys, weights, strict=True) if w > 0] for keys, weights in rows
        ]

    def flat(self, head: int, tokens: int, decimals: int) -> list[list[Any]]:
        """Key, weight, key, weight, ... of each of the first tokens."""
        key, weight = self.key[head, :tokens], self.weight[head, :tokens]
        counts: list[int] = tolist((weight > 0).sum(-1))
        keys, weights = tolist(key), tolist(torch.round(weight, decimals=decimals))
        out: list[list[Any]] = []
        for count, js, ws in zip(counts, keys, weights, strict=True):
            row = [0] * (2 * count)
            row[::2], row[1::2] = js[:count], ws[:count]
            out.append(row)
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pairs | list) and list(self) == list(cast(list[Any], other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def top_pairs(recorder: Recorder, texts: int, layers: int) -> list[Any]:
    """[text][layer][head][token] -> pairs (key, weight), for the first texts."""
    return _listed({where: Pairs(top) for where, top in recorder.top.items()}, texts, layers)


def _listed(known: dict[tuple[int, int], Pairs], texts: int, layers: int) -> list[Any]:
    return [[known.get((i, n), list[Any]()) for n in range(layers)] for i in range(texts)]


def top_table(top: Sequence[Any]) -> DataFrame:
    """One row per (input, layer, head, token, rank), without weights that are 0."""
    parts: list[dict[str, Any]] = []
    for text, layers in enumerate(top):
        for layer, pairs in enumerate(layers):
            if not isinstance(pairs, Pairs):  # nothing is kept of very long texts
                continue
            weight: Any = pairs.weight.numpy()
            head, token, rank = np.nonzero(weight > 0)
            where = {"input": np.full(len(head), text), "layer": np.full(len(head), layer)}
            where |= {"head": head, "token": token, "rank": rank + 1}
            key: Any = pairs.key.numpy()
            found = {"key": key[head, token, rank], "weight": weight[head, token, rank]}
            parts.append({**{n: x.astype("int32") for n, x in where.items()}, **found})
    columns = {n: np.concatenate([x[n] for x in parts]) for n in (parts[0] if parts else ())}
    return pandas().DataFrame(columns)


def pairs_of(table: DataFrame | None, texts: int, layers: int) -> list[Any]:
    """What `top_table` was made from; None is a table without rows."""
    known: dict[tuple[int, int], Pairs] = {}
    groups: Any = () if table is None else cast(Any, table).groupby(["input", "layer"])
    for (text, layer), rows in groups:
        place: tuple[Any, ...] = tuple(rows[n].to_numpy() for n in ("head", "token", "rank"))
        place = (*place[:2], place[2] - 1)
        shape = [int(x.max()) + 1 for x in place]
        key, weight = np.full(shape, -1), np.zeros(shape)
        key[place], weight[place] = rows["key"].to_numpy(), rows["weight"].to_numpy()
        tensors = (functions.from_numpy(x) for x in (key, weight))
        known[int(text), int(layer)] = Pairs(Top(*tensors))
    return _listed(known, texts, layers)
