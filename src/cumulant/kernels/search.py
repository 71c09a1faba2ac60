"""The keys with the largest scores of every query, and how many weights hold most of the mass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cumulant.core.eager import eager
from cumulant.kernels import formulas
from cumulant.kernels.attention import Options
from cumulant.kernels.formulas import INDEX, with_scale
from cumulant.kernels.rows import dropped, sort_rows
from cumulant.kernels.tiles import Arguments, Program, Result, Tile, evaluate, walk
from cumulant.kernels.workspace import Workspace

__all__ = ["Largest", "coverage", "largest"]


@dataclass(frozen=True)
class Largest:
    """Scores in falling order and their keys ``(*batch, M, k)``; -inf and -1 where keys run out."""

    score: Tensor
    index: Tensor


@eager
@torch.no_grad()
def largest(arguments: Mapping[str, Tensor], options: Options = Options(), k: int = 1) -> Largest:
    """The `k` keys of the largest scores, bias included, for every query; without derivative."""
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
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


@eager
@torch.no_grad()
def coverage(
    arguments: Mapping[str, Tensor], options: Options, mass: float
) -> tuple[Tensor, Tensor]:
    """The fewest keys whose weights sum to `mass`, and how many keys a query sees.

    Both ``(*batch, M, 1)``; needs ``log_normalizer`` among the arguments.
    """
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    m, n = arguments["query"].shape[-2], arguments["key"].shape[-2]
    program = Program(
        function=with_scale(partial(_coverage, mass=mass), options.scale),
        indices=INDEX,
        results=tuple(Result(x, "i", (*batch, m, 1)) for x in ("coverage", "visible")),
        grid=(m, n),
        band=options.band,
        whole_rows=True,
    )
    out = evaluate(program, arguments)
    return out["coverage"].long(), out["visible"].long()


def _coverage(tile: Tile, a: Arguments, *, mass: float) -> Arguments:
    """How many of the largest weights it takes to hold `mass` of the whole (T21), on whole rows."""
    l_mn = formulas.log_weights(tile, a)
    visible = formulas.row_sum(l_mn > -math.inf).to(l_mn.dtype)
    p_mn = sort_rows(tile.work.exp2(l_mn))
    total = formulas.row_sum(p_mn)
    count = p_mn.shape[-1] - dropped(p_mn, total * (1 - mass))
    return {"coverage": count.masked_fill(total == 0, 0).to(p_mn.dtype), "visible": visible}
