"""The keys with the largest scores of every query."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.core.eager import eager
from cumulant.core.typed import functions
from cumulant.kernels import formulas
from cumulant.kernels.attention import Options
from cumulant.kernels.engines import compiled
from cumulant.kernels.formulas import INDEX
from cumulant.kernels.tiles import walk
from cumulant.kernels.workspace import Workspace

__all__ = ["Largest", "largest"]


@dataclass(frozen=True)
class Largest:
    """Scores in falling order and their keys ``(*batch, M, k)``; -inf and -1 where keys run out."""

    score: Tensor
    index: Tensor


@eager
@torch.no_grad()
def largest(arguments: Mapping[str, Tensor], options: Options = Options(), k: int = 1) -> Largest:
    """The `k` keys of the largest scores, bias included, for every query; without derivative."""
    if k == 1 and (engine := compiled()) is not None:
        given = {n: x for n, x in arguments.items() if n not in ("value", "seed")}
        fields = ("score_max", "top")
        done = engine.forward(
            given, scale=options.scale, band=options.band, rate=0.0, fields=fields
        )
        if done is not None:
            return Largest(done["score_max"], done["top"].long())
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    query, key = arguments["query"], arguments["key"]
    m, n = query.shape[-2], key.shape[-2]
    score = query.new_full((*batch, m, k), -math.inf)
    index = torch.full((*batch, m, k), -1, device=query.device)
    with Workspace.lease(query) as work:
        for where, tiles in walk(arguments, INDEX, (m, n), options.band, work):
            best = Largest(score[where], index[where])
            for tile, cut in tiles:
                cut["query"] = cut["query"] * options.scale
                s_mn = formulas.scores(tile, cut)
                top = s_mn.max(-1, keepdim=True) if k == 1 else s_mn.topk(min(k, len(tile.columns)))
                best = _best(best, Largest(top.values, top.indices + tile.columns.start), k)
            score[where], index[where] = best.score, best.index
    return Largest(score / formulas.LOG2_E, index.masked_fill(score == -math.inf, -1))


def _best(first: Largest, second: Largest, k: int) -> Largest:
    score = torch.cat([first.score, second.score], -1)
    top = score.topk(k)
    index = torch.cat([first.index, second.index], -1)
    return Largest(top.values, index.gather(-1, top.indices))
