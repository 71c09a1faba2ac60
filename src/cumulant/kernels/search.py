"""The keys with the largest scores of every query, and the scores of given keys.

The choice of keys has no derivative; their scores do. The score of key j is a sum over pairs in
which only (i, j) counts, so its derivatives of any order are sums over tiles like all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cumulant.core.eager import eager
from cumulant.core.typed import Function, functions
from cumulant.kernels import formulas
from cumulant.kernels.attention import Options
from cumulant.kernels.engines import compiled, narrowed
from cumulant.kernels.formulas import INDEX, with_scale
from cumulant.kernels.streaming import grid_of
from cumulant.kernels.tiles import (
    Arguments,
    Named,
    Program,
    Result,
    Tile,
    batch_first,
    has_nan,
    tile_sum,
    walk,
)
from cumulant.kernels.workspace import Workspace

__all__ = ["Largest", "best", "largest", "on_tile", "scores_of"]


@dataclass(frozen=True)
class Largest:
    """Scores in descending order and their keys ``(*batch, M, k)``, padded with -inf and -1.

    Ties go to the smaller key index.
    """

    score: Tensor
    index: Tensor


@eager
def largest(arguments: Mapping[str, Tensor], options: Options = Options(), k: int = 1) -> Largest:
    """The `k` keys with the largest scores, bias included, per query; without derivative."""
    given = {n: x.detach() for n, x in arguments.items() if n not in ("value", "seed")}
    return Largest(*_Search.apply(replace(options, dropout=0.0), k, tuple(given), *given.values()))


class _Search(Function):
    """`largest` of named arguments: a Function so that vmap finds plain tensors inside."""

    @staticmethod
    def forward(options: Options, k: int, names: tuple[str, ...], *tensors: Tensor) -> Any:
        found = _largest(dict(zip(names, tensors, strict=True)), options, k)
        return found.score, found.index

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        return None, None

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any,
        in_dims: tuple[int | None, ...],
        options: Options,
        k: int,
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Any:
        return _Search.apply(options, k, names, *batch_first(tensors, in_dims[3:])), (0, 0)


def _largest(arguments: Named, options: Options, k: int) -> Largest:
    if options.ring is not None:
        return _around(arguments, options, k)
    asks = "bias" in arguments and arguments["query"].device.type == "cpu"
    if "bias" in arguments and not asks:  # asking below would stall the device
        arguments = _bias_as_mask(arguments)
    found = _compiled(arguments, options) if k == 1 else None
    if found is None:
        found = _over_tiles(arguments, options, k)
    if asks and has_nan([found.score]):
        found = _over_tiles(_bias_as_mask(arguments), options, k)
    return found


def _bias_as_mask(arguments: Named) -> Named:
    """A key that a bias of -inf hides may hold NaN, and NaN - inf is NaN: a mask is exact."""
    seen = arguments["bias"] != -math.inf
    return {**arguments, "mask": arguments["mask"] & seen if "mask" in arguments else seen}


def _around(arguments: Named, options: Options, k: int) -> Largest:
    """The same over the keys of all ranks, block by block."""
    if (ring := options.ring) is None:
        raise RuntimeError("no ring to go around")
    still = {n: x for n, x in arguments.items() if "j" not in INDEX[n]}
    moving = {n: x for n, x in arguments.items() if n not in still}
    found: list[Largest] = []
    for block in ring.blocks(moving, still.pop("origin", None)):
        band = options.band.shifted(block.before - ring.queries_before)
        here = replace(options, band=band, ring=None)
        part = _largest({**still, **block.arguments}, here, k)
        numbered = torch.where(part.index < 0, part.index, part.index + block.before)
        found = [best([*found, Largest(part.score, numbered)], k)]
    return found[0]


def _compiled(arguments: Named, options: Options) -> Largest | None:
    numbers = 1 / torch.finfo(arguments["query"].dtype).eps  # the engine's keys are such numbers
    engine = compiled(arguments["query"].device)
    if engine is None or arguments["key"].shape[-2] > numbers:
        return None
    given, fields = narrowed(engine, arguments, options.narrow), ("score_max", "top")
    done = engine.forward(given, scale=options.scale, band=options.band, rate=0.0, fields=fields)
    return None if done is None else Largest(done["score_max"], done["top"].long())


def _over_tiles(arguments: Named, options: Options, k: int) -> Largest:
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    query = arguments["query"]
    m, n = grid_of(arguments)
    score = query.new_full((*batch, m, k), -math.inf)
    index = torch.full((*batch, m, k), -1, device=query.device)
    with Workspace.lease(query) as work:
        for where, tiles in walk(arguments, INDEX, (m, n), options.band, work):
            found = Largest(score[where], index[where])
            for tile, cut in tiles:
                cut["query"] = cut["query"] * options.scale
                top = on_tile(formulas.scores(tile, cut, 1.0), min(k, len(tile.columns)))
                numbered = Largest(top.score, top.index + tile.columns.start)
                whole = len(tile.columns) == n and numbered.score.shape[-1] == k
                found = numbered if whole else best([found, numbered], k)
            score[where], index[where] = found.score, found.index
    return Largest(score, index.masked_fill(score == -math.inf, -1))


def on_tile(s_mn: Tensor, k: int) -> Largest:
    """The `k` largest of every row; ties go to the first."""
    if k == 1:
        return Largest(*s_mn.max(-1, keepdim=True))
    if s_mn.device.type == "cpu":
        top = s_mn.topk(min(k + 1, s_mn.shape[-1]))
        one, next_one = top.values[..., :-1], top.values[..., 1:]
        if not bool(((one == next_one) & (one > -math.inf)).any()):
            return Largest(top.values[..., :k], top.indices[..., :k])
    # topk takes any of those that are equal, in any order
    order = s_mn.sort(dim=-1, descending=True, stable=True)
    return Largest(order.values[..., :k], order.indices[..., :k])


def best(found: list[Largest], k: int) -> Largest:
    """The `k` best of several, ties to the smaller key; padded with -1 and -inf."""
    score = torch.cat([x.score for x in found], -1)
    index = torch.cat([x.index for x in found], -1)
    if (short := k - score.shape[-1]) > 0:
        score = torch.nn.functional.pad(score, (0, short), value=-math.inf)
        index = torch.nn.functional.pad(index, (0, short), value=-1)
    index, order = index.sort(-1)
    score = score.gather(-1, order)
    order = score.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return Largest(score.gather(-1, order), index.gather(-1, order))


@eager
def scores_of(arguments: Mapping[str, Tensor], options: Options, found: Largest) -> Tensor:
    """The scores of the keys found, differentiable to any order; -inf for key -1."""
    arguments = {n: x for n, x in arguments.items() if n not in ("value", "seed")}
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    m, n = grid_of(arguments)
    first = 0 if (ring := options.ring) is None else sum(ring.rows[: ring.ranks.rank])
    number = torch.arange(first, first + n, device=found.index.device)
    number = number.reshape(*(1,) * len(batch), n, 1)
    program = Program(
        function=with_scale(_marked, options.scale),
        indices={**INDEX, "known": "i", "number": "j"},
        results=(Result("score", "i", (*batch, m, found.index.shape[-1])),),
        grid=(m, n),
        band=options.band,
        fixed=frozenset(("known", "marks", "number")),
        run=None if options.ring else _known_value,  # of one block it is not the value
        ring=options.ring,
    )
    given = {"marks": found.index, "number": number, "known": found.score}
    score = tile_sum(program, {**arguments, **given})["score"]
    # A row that sees NaN has no largest score, though the sums over tiles leave such keys out.
    score = torch.where(found.score.isnan(), found.score, score)
    return score.masked_fill(found.index < 0, -math.inf)


def _known_value(program: Program, arguments: Named) -> Arguments | None:
    (result,), known = program.results, arguments["known"]
    return {result.name: known.clone()} if known.shape == result.shape else None


def _marked(tile: Tile, a: Arguments) -> Arguments:
    """The scores of the marked keys that lie in this tile, 0 for the others."""
    s_mn = formulas.scores(tile, a, 1.0)
    place = a["marks"] - a["number"][..., :1, :]
    here = (a["marks"] >= 0) & (place >= 0) & (place < s_mn.shape[-1])
    found = s_mn.gather(-1, place.clamp(0, s_mn.shape[-1] - 1))
    return {"score": found.masked_fill(~here, 0.0)}
