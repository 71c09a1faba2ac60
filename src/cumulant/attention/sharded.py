"""`attend` where keys live on the ranks of a group: the single-process answer, any derivative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cumulant.attention.attended import Attended
from cumulant.attention.direct import Direct
from cumulant.attention.inputs import Call, Shard, prepare
from cumulant.attention.merging import Joined
from cumulant.core.eager import eager
from cumulant.core.errors import InputError
from cumulant.distributed.facts import Facts, describe, grad_mode
from cumulant.distributed.maps import gather_rows, spread
from cumulant.distributed.ranks import Ranks
from cumulant.distributed.sharded import Route, ShardedKeys, cheaper_route
from cumulant.kernels.merge import over_ranks
from cumulant.kernels.ring import Ring

__all__ = ["attend_sharded"]


@eager
def attend_sharded(
    query: Tensor, shard: ShardedKeys, options: dict[str, Any], value: Any = None
) -> Attended:
    """Attention over the keys of all ranks, for queries that all share or that each has its own."""
    keys, values, ranks = shard.keys, shard.values, shard.ranks
    values = keys if values is None else values

    def described() -> Facts:
        _check_values(value)
        return _facts(query, shard, options)

    if ranks.alone:
        _check_values(value)
        call = prepare("attend", query, keys, values, **options)
        return Attended(Direct(call, values_are_keys=shard.values is None), call.dtype)
    facts = ranks.agree("attend", described, differ=("rows", "mask"))
    rows, masks = facts["rows"], facts["mask"]
    if not shard.sharded_queries and len(set(rows)) > 1:
        raise InputError(
            f"attend: replicated queries must be the same on every rank, but there are {rows} of "
            'them; if each rank has its own, say ShardedKeys(..., queries="sharded").'
        )
    route = _route(query, shard, sum(rows), masked=max(masks) > 0) if shard.sharded_queries else ""
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

    masked = max(masks) or options["attn_mask"] is not None  # agreed: a mask or a causal bias
    call = ranks.checked("attend with attn_mask", make) if masked else make()
    if route == "ring":
        ring = Ring(ranks, shard.rows, sum(rows[: ranks.rank]))
        call = _from_origin(replace(call, options=replace(call.options, ring=ring)))
    whole: _Around | _Together
    if route == "ring":
        whole = _Around(call, values_are_keys=shard.values is None)
    else:
        own = Direct(call, values_are_keys=shard.values is None)
        parts = over_ranks(ranks, rows if route == "gather" else None)
        whole = _Together([own], parts, lifted=max(masks) > 1)
        whole.rows = rows[ranks.rank]
    whole.ranks = ranks
    return Attended(whole, call.dtype)


class _Met:
    """Fields are computed when asked for, so all ranks must ask for the same one."""

    ranks: Ranks

    def ready(self, name: str) -> None:
        parent: Any = super()
        self.ranks.checked(f"attend(...).{name}", lambda: parent.ready(name), lambda _: grad_mode())


class _Around(_Met, Direct):
    """Keys travel; the kernels' own sums go around the ring. Scores are seen from an origin."""

    @property
    def score_mean(self) -> Tensor:
        mean, lift = super().score_mean, self.lift
        return mean if lift is None else mean + lift


def _from_origin(call: Call) -> Call:
    """The same with keys that are seen from a typical one, which each rank takes from its own.

    In a ring rows are summed in parts that are told G, and G is rounded: that would show where the
    scores of a query share a large part. Any origin gives the same weights, so none is agreed upon.
    """
    key, query = call.arguments["key"].detach(), call.arguments["query"]
    if not key.shape[-2]:
        return call
    some = key[..., :: max(1, key.shape[-2] // 16), :]
    origin = some.nanmedian(-2, keepdim=True).values
    origin = origin.where(origin.isfinite(), 0.0)
    lift = call.options.scale * (query @ origin.mT)
    return replace(call, arguments={**call.arguments, "origin": origin}, lift=lift)


class _Together(_Met, Joined):
    """Every rank attends to its own keys, and sums over ranks join the results."""

    rows: int

    @property
    def shape(self) -> torch.Size:
        *batch, _, width = super().shape
        return torch.Size((*batch, self.rows, width))


def _check_values(value: Any) -> None:
    if value is not None:
        raise InputError("attend: sharded keys have their values: ShardedKeys(keys, values).")


def _facts(query: Any, shard: ShardedKeys, options: dict[str, Any]) -> Facts:
    """Check what can be checked without the others, and describe it."""
    scale, mask = options["scale"], options["attn_mask"]
    values = shard.keys if shard.values is None else shard.values
    few = dict(options, attn_mask=None)
    if isinstance(scale, Tensor) and scale.ndim > 1 and scale.shape[-2] == _rows(query):
        few["scale"] = _empty(scale)
    try:
        prepare("attend", _empty(query), _empty(shard.keys), _empty(values), **few)
    except InputError as error:
        shapes = f"query={tuple(query.shape)}, " if isinstance(query, Tensor) else ""
        found = str(error).partition(" Got ")[0]
        raise InputError(f"{found} Got attend({shapes}keys={tuple(shard.keys.shape)}).") from None
    if (now := shard.keys.shape[-2]) != (then := shard.rows[shard.ranks.rank]):
        raise InputError(
            f"attend: this rank had {then} keys when ShardedKeys was made and has {now} now; make "
            "it anew, on all ranks, when their number changes."
        )
    window = options["window"] or (None, None)
    left, right = ("open" if x is None else x for x in window)
    tensors = [x for x in (query, shard.keys, values, scale, mask) if isinstance(x, Tensor)]
    shape = scale.shape if isinstance(scale, Tensor) else torch.Size()
    number = float(scale) if isinstance(scale, int | float) else 0.0
    held = describe(keys=shard.keys, values=values)
    return {
        **describe(query=query),
        **{n: x for n, x in held.items() if n.startswith(("dtype", "whether"))},
        **grad_mode(),
        "whether autocast is on": torch.is_autocast_enabled(query.device.type),
        "whether it is causal": bool(options["is_causal"]),
        "whether heads are grouped": bool(options["enable_gqa"]),
        "the window to the left": left,
        "the window to the right": right,
        "the causal bias": _causal_bias(mask),
        "whether a scale is given": scale is not None,
        "the value of scale": number,
        **_scale_facts(scale),
        "batch of scale": tuple(shape[:-2] if shard.sharded_queries else shape),
        "features of scale": shape[-1] if shape else 1,
        "whether anything requires gradients": any(x.requires_grad for x in tensors),
        "mask": 0 if not _is_plain(mask) else 2 if mask.is_floating_point() else 1,
        "rows": query.shape[-2],
    }


def _scale_facts(scale: Any) -> Facts:
    """Of a tensor scale, what ranks must agree on; of a number nothing."""
    if not isinstance(scale, Tensor):
        return {"dtype of scale": "a number", "whether scale requires gradients": False}
    found = describe(scale=scale.reshape(1, -1))
    return {n: found[n] for n in ("dtype of scale", "whether scale requires gradients")}


def _is_plain(mask: Any) -> bool:
    return type(mask) in (Tensor, torch.nn.Parameter)


def _causal_bias(mask: Any) -> int:
    """Which of torch's causal biases it is, from 1 on; 0 if none."""
    if mask is None or _is_plain(mask):
        return 0
    return 1 + int(getattr(getattr(mask, "variant", None), "value", 0))


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
