"""`attend` where keys live on the ranks of a group: the single-process answer, any derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cumulant.attention.attend import Attended, Fields, finished, joined
from cumulant.attention.inputs import Call, Shard, prepare
from cumulant.distributed.maps import gather_rows, spread
from cumulant.distributed.ranks import as_fact, describe, packed
from cumulant.distributed.sharded import Route, ShardedKeys, cheaper_route
from cumulant.errors import InputError
from cumulant.kernels.merge import over_ranks
from cumulant.kernels.ring import Ring

__all__ = ["attend_sharded"]


def attend_sharded(query: Tensor, shard: ShardedKeys, options: dict[str, Any]) -> Attended:
    """Attention over the keys of all ranks, for queries that all share or that each has its own."""
    keys, values, ranks = shard.keys, shard.values, shard.ranks
    values = keys if values is None else values
    if ranks.alone:
        call = prepare("attend", query, keys, values, **options)
        return Attended(Fields(call, values_are_keys=shard.values is None))
    facts = ranks.agree("attend", lambda: _facts(query, shard, options), differ=("rows", "mask"))
    rows, masks = facts["rows"], facts["mask"]
    if not shard.sharded_queries and len(set(rows)) > 1:
        raise InputError(
            f"attend: replicated queries must be the same on every rank, but there are {rows} of "
            'them; if each rank has its own, say ShardedKeys(..., queries="sharded").'
        )
    route = _route(query, shard, sum(rows), masked=max(masks) > 1) if shard.sharded_queries else ""
    where = Shard(shard.before, len(shard), sum(rows) if shard.sharded_queries else rows[0])
    if route == "ring":
        where = replace(where, before=0)
    elif route == "gather":
        scale = options["scale"]
        if isinstance(scale, Tensor):  # it may differ from query to query, and goes with them
            options = {**options, "scale": gather_rows(_by_row(scale, query), ranks, rows)}
        query = gather_rows(query, ranks, rows)
    else:
        query = spread(query, ranks)
        if isinstance(options["scale"], Tensor):
            options = {**options, "scale": spread(options["scale"], ranks)}

    def make() -> Call:
        return prepare("attend", query, keys, values, shard=where, **options)

    call = ranks.checked("attend with attn_mask", make) if max(masks) else make()
    if route == "ring":
        ring = Ring(ranks, shard.rows, sum(rows[: ranks.rank]))
        call = replace(call, options=replace(call.options, ring=ring))
        fields = Fields(call, values_are_keys=shard.values is None)
        whole = fields.column
    else:
        fields = Fields(call, values_are_keys=shard.values is None)
        parts = over_ranks(ranks, rows if route == "gather" else None)
        whole = joined([fields.column], parts)
    return Attended(_asked_together(shard, call, whole))


def _asked_together(
    shard: ShardedKeys, call: Call, whole: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """Fields are computed when asked for, so all ranks must ask for the same one."""

    def compute(name: str) -> Tensor:
        shard.ranks.agree(f"attend(...).{name}", dict)
        return finished(call, name, whole(name))

    return compute


def _facts(query: Any, shard: ShardedKeys, options: dict[str, Any]) -> dict[str, int]:
    """Check what can be checked without the others, and describe it."""
    scale, mask = options["scale"], options["attn_mask"]
    values = shard.keys if shard.values is None else shard.values
    few = dict(options, attn_mask=None)
    if isinstance(scale, Tensor) and scale.ndim > 1 and scale.shape[-2] == _rows(query):
        few["scale"] = _empty(scale)
    prepare("attend", _empty(query), _empty(shard.keys), _empty(values), **few)
    window = options["window"] or (None, None)
    left, right = (-1 if x is None else x for x in window)
    plain = type(mask) in (Tensor, torch.nn.Parameter)
    tensors = [x for x in (query, shard.keys, values, scale, mask) if isinstance(x, Tensor)]
    scale_shape = scale.shape if isinstance(scale, Tensor) else torch.Size()
    return {
        **describe(query=query),
        "whether gradients are computed": int(torch.is_grad_enabled()),
        "whether it is causal": int(options["is_causal"]),
        "whether heads are grouped": int(options["enable_gqa"]),
        "the window to the left": left,
        "the window to the right": right,
        "scale": as_fact(float(scale)) if isinstance(scale, int | float) else int(scale is None),
        "batch of scale": packed(scale_shape[:-2] if shard.sharded_queries else scale_shape),
        "features of scale": scale_shape[-1] if scale_shape else 1,
        "whether scale requires gradients": int(isinstance(scale, Tensor) and scale.requires_grad),
        "whether anything requires gradients": int(any(x.requires_grad for x in tensors)),
        "mask": 0 if mask is None else 2 if plain else 1,
        "rows": query.shape[-2],
    }


def _rows(query: Any) -> int:
    return query.shape[-2] if isinstance(query, Tensor) and query.ndim > 1 else -1


def _by_row(scale: Tensor, query: Tensor) -> Tensor:
    """A scale with a row for each query, as precise as they are computed."""
    shape = (*scale.shape[:-2], query.shape[-2], scale.shape[-1] if scale.ndim else 1)
    return scale.to(torch.promote_types(query.dtype, torch.float32)).expand(shape)


def _empty(x: Any) -> Any:
    """The same without its rows."""
    return x[..., :0, :] if isinstance(x, Tensor) and x.ndim > 1 else x


def _route(query: Tensor, shard: ShardedKeys, queries: int, *, masked: bool) -> Route:
    """A mask stays with its keys, so the queries come to it; else whatever sends less."""
    if masked and shard.route == "ring":
        raise InputError(
            "attend: attn_mask cannot go with route='ring', where keys travel; use is_causal or "
            "window, or leave the route open."
        )
    if masked:
        return "gather"
    values = shard.keys if shard.values is None else shard.values
    wanted = any(x.requires_grad for x in (query, shard.keys, values))
    gradients = torch.is_grad_enabled() and wanted
    if shard.route is not None:
        return shard.route
    sizes = queries, len(shard), query.shape[-1], values.shape[-1]
    return cheaper_route(*sizes, ranks=shard.ranks.size, gradients=gradients)
