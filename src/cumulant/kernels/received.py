"""Attention received by keys: sums over queries, where attention sums over keys.

The weight that key j receives is r_j = sum_i g_i p(j|i), for shares g_i of the queries. That is the
gradient of sum_i g_i E_i[v] in the value of key j, so the kernels already provide it, with every
derivative and on every engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.core.eager import eager
from cumulant.core.typed import functions
from cumulant.kernels import formulas
from cumulant.kernels.calculus import pullback
from cumulant.kernels.formulas import INDEX, row_sum
from cumulant.kernels.streaming import Options, grid_of
from cumulant.kernels.tiles import Arguments, Band, Named, Program, Result, Tile, tile_sum
from cumulant.kernels.visibility import within

__all__ = ["received", "visible"]


def received(arguments: Named, options: Options, normalizer: Tensor, share: Tensor) -> Tensor:
    """sum_i g_i p(j|i) ``(*batch, N, c)`` for shares g ``(*batch, M, c)`` of the queries.

    `arguments` are those of `attention` without ``value``; `normalizer` is their G.
    """
    shapes = (x.shape[:-2] for x in (*arguments.values(), share))
    size = (*functions.broadcast_shapes(*shapes), grid_of(arguments)[1], share.shape[-1])
    zero = share.new_zeros((1,) * share.ndim)
    # In values that are all 0 the mean is 0 too; the gradient does not depend on either.
    given = {
        **arguments,
        "value": zero.expand(size),
        "log_normalizer": normalizer,
        "mean": zero.expand(*normalizer.shape[:-1], size[-1]),
    }
    return _pulled(options, given, share)


@eager
def _pulled(options: Options, given: Named, share: Tensor) -> Tensor:
    return pullback(options, given, {"mean": share}, ("value",))["value"]


@eager
def visible(arguments: Named, options: Options, share: Tensor) -> tuple[Tensor, Tensor]:
    """The number of keys each query sees ``(*batch, M, 1)``, and the total share of the queries
    that see each key ``(*batch, N, c)``.
    """
    pairs = {n: x.detach() for n, x in arguments.items() if n in ("mask", "bias")}
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in (*arguments.values(), share)))
    m, n = grid_of(arguments)
    if not pairs and options.ring is None:
        keys, queries = _within(options.band, n, share)
        return keys.expand(*batch, m, 1), queries.expand(*batch, n, share.shape[-1])
    # Without features every score is 0, or -inf where a pair is masked.
    empty = {n: arguments[n].detach()[..., :0] for n in ("query", "key")}
    given = {**empty, **pairs, "share": share}
    program = Program(
        function=_visible,
        indices={**INDEX, "share": "i"},
        results=(
            Result("keys", "i", (*batch, m, 1)),
            Result("queries", "j", (*batch, n, share.shape[-1])),
        ),
        grid=(m, n),
        band=options.band,
        ring=options.ring,
    )
    out = tile_sum(program, given)
    return out["keys"], out["queries"]


def _within(band: Band, n: int, share: Tensor) -> tuple[Tensor, Tensor]:
    """`visible` for a band alone."""
    m = share.shape[-2]
    turned = Band(*(None if x is None else -x for x in (band.upper, band.lower)))
    return within(band, m, share.new_ones(n, 1)), within(turned, n, share)


def _visible(tile: Tile, a: Arguments) -> Arguments:
    seen = (formulas.scores(tile, a, 1.0) != -torch.inf).to(a["share"].dtype)
    return {"keys": row_sum(seen), "queries": tile.work.matmul(seen.mT, a["share"])}
