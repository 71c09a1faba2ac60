"""`attend` where keys live on the ranks of a group: the single-process answer, any derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from cumulant.attention.attended import Attended
from cumulant.attention.direct import Direct
from cumulant.attention.given import Given, Keywords, Shard
from cumulant.attention.inputs import Call, prepare, sink_logits
from cumulant.attention.merging import Joined
from cumulant.attention.sinks import attended, with_sink
from cumulant.core.eager import eager
from cumulant.core.errors import InputError
from cumulant.core.precision import autocast_of, widened
from cumulant.distributed.facts import Fact, Facts, describe, grad_mode
from cumulant.distributed.maps import gather_rows, spread
from cumulant.distributed.ranks import Ranks
from cumulant.distributed.sharded import Route, ShardedKeys, cheaper_route
from cumulant.kernels.merge import Parts, over_ranks
from cumulant.kernels.ring import Ring

__all__ = ["attend_sharded"]


@eager
def attend_sharded(
    query: Tensor, shard: ShardedKeys, value: Tensor | None = None, **keywords: Unpack[Keywords]
) -> Attended:
    """Attention over the keys of all ranks, for queries that all share or that each has its own."""
    keys, values, ranks = shard.keys, shard.values, shard.ranks
    values = keys if values is None else values

    def described() -> Facts:
        _check(value, keywords)
        return _facts(query, shard, keywords)

    if ranks.alone:
        _check(value, keywords)
        call = prepare("attend", query, keys, values, **keywords)
        return attended(call, values_are_keys=shard.values is None)
    facts = ranks.agree("attend", described, differ=("rows", "mask"))
    rows, masks = facts["rows"], facts["mask"]
    if not shard.sharded_queries and len(set(rows)) > 1:
        raise InputError(
            f"attend: replicated queries must be the same on every rank, but there are {rows} of "
            'them; if each rank has its own, say ShardedKeys(..., queries="sharded").'
        )
    masked = max(masks) > 0
    route = _route(query, shard, sum(rows), masked=masked) if shard.sharded_queries else ""
    where = Shard(shard.before, len(shard), sum(rows) if shard.sharded_queries else rows[0])
    given = Given("attend", query, keys, values, **keywords)  # with this rank's own queries
    keywords = {**keywords, "sink": None}  # joined last, once for all ranks
    scale = keywords.get("scale")
    if route == "ring":
        where = replace(where, before=0)
    elif route == "gather":
        if isinstance(scale, Tensor):  # it may differ from query to query, and goes with them
            keywords["scale"] = gather_rows(_by_row(scale, query), ranks, rows)
        query = gather_rows(query, ranks, rows)
    else:
        query = spread(query, ranks)
        if isinstance(scale, Tensor):
            keywords["scale"] = spread(scale, ranks)

    def make() -> Call:
        return prepare("attend", query, keys, values, shard=where, **keywords)

    checked = masked or keywords.get("attn_mask") is not None  # or a causal bias, as agreed
    call = ranks.checked("attend with attn_mask", make) if checked else make()
    whole: _Around | _Together
    if route == "ring":
        ring = Ring(ranks, shard.rows, sum(rows[: ranks.rank]))
        call = _from_origin(replace(call, options=replace(call.options, ring=ring)))
        whole = _Around(call, ranks, values_are_keys=shard.values is None)
    else:
        own = Direct(call, values_are_keys=shard.values is None)
        parts = over_ranks(ranks, rows if route == "gather" else None)
        whole = _Together(own, shard, parts, lifted=max(masks) > 1, rows=rows[ranks.rank])
    if given.sink is None:
        return Attended(whole, call.dtype)
    compute = call.arguments["query"].dtype
    logits = sink_logits(given, tuple(whole.shape[:-1]), compute)
    return Attended(with_sink(whole, logits, keys.shape[-1]), call.dtype)


def _meet(ranks: Ranks, name: str, ready: Callable[[str], None]) -> None:
    """Fields are computed on first access, so all ranks must ask for the same one."""
    ranks.checked(f"attend(...).{name}", lambda: ready(name), lambda _: grad_mode())


class _Around(Direct):
    """Keys travel; the kernels' own sums go around the ring. Scores are seen from an origin."""

    over_ranks = True

    def __init__(self, call: Call, ranks: Ranks, *, values_are_keys: bool) -> None:
        super().__init__(call, values_are_keys=values_are_keys)
        self._ranks = ranks

    def ready(self, name: str) -> None:
        _meet(self._ranks, name, super().ready)

    @property
    def score_mean(self) -> Tensor:
        mean, lift = super().score_mean, self.lift
        return mean if lift is None else mean + lift


def _from_origin(call: Call) -> Call:
    """The same call with keys relative to a typical one, which each rank takes from its own.

    In a ring, rows are summed in parts that are told G, and G is rounded: that would show where the
    scores of a query share a large part. Any origin gives the same weights, so ranks need not agree
    on one; but a softcap is a function of the scores themselves, and bounds them anyway.
    """
    key, query = call.arguments["key"].detach(), call.arguments["query"]
    if not key.shape[-2] or "cap" in call.arguments:
        return call
    some = key[..., :: max(1, key.shape[-2] // 16), :]
    origin = some.nanmedian(-2, keepdim=True).values
    origin = origin.where(origin.isfinite(), 0.0)
    lift = call.options.scale * (query @ origin.mT)
    return replace(call, arguments={**call.arguments, "origin": origin}, lift=lift)


class _Together(Joined):
    """Every rank attends to its own keys, and sums over ranks join the results."""

    def __init__(
        self, own: Direct, shard: ShardedKeys, parts: Parts, *, lifted: bool, rows: int
    ) -> None:
        super().__init__([own], parts, lifted=lifted)
        self.over_ranks = True
        self._ranks = shard.ranks
        self._rows = rows
        self._first = shard.before
        self._keys = len(shard)

    @property
    def shape(self) -> torch.Size:
        *batch, _, width = super().shape
        return torch.Size((*batch, self._rows, width))

    @property
    def keys(self) -> int:
        return self._keys

    def ready(self, name: str) -> None:
        _meet(self._ranks, name, super().ready)


def _check(value: object, keywords: Keywords) -> None:
    if value is not None:
        raise InputError("attend: sharded keys have their values: ShardedKeys(keys, values).")
    if keywords.get("dropout_p"):
        raise InputError(
            "attend: dropout_p does not go with sharded keys; apply dropout to the result instead."
        )


def _facts(query: Tensor, shard: ShardedKeys, keywords: Keywords) -> Facts:
    """Check what can be checked without the others, and describe it."""
    values = shard.keys if shard.values is None else shard.values
    _check_alone(query, shard, values, keywords)
    scale, mask, sink = keywords.get("scale"), keywords.get("attn_mask"), keywords.get("sink")
    left, right = ("open" if x is None else x for x in keywords.get("window") or (None, None))
    given_tensors = (query, shard.keys, values, scale, mask, sink)
    tensors = [x for x in given_tensors if isinstance(x, Tensor)]
    shape = scale.shape if isinstance(scale, Tensor) else torch.Size()
    number = float(scale) if isinstance(scale, int | float) else 0.0
    held = describe(keys=shard.keys, values=values)
    return {
        **describe(query=query),
        **{n: x for n, x in held.items() if n.startswith(("dtype", "whether"))},
        **grad_mode(),
        "whether autocast is on": autocast_of(query) is not None,
        "whether it is causal": bool(keywords.get("is_causal")),
        "whether heads are grouped": bool(keywords.get("enable_gqa")),
        "the window to the left": left,
        "the window to the right": right,
        "the causal bias": _causal_bias(mask),
        "whether a scale is given": scale is not None,
        "the value of scale": number,
        **_scale_facts(scale),
        "batch of scale": tuple(shape[:-2] if shard.sharded_queries else shape),
        "features of scale": shape[-1] if shape else 1,
        "the softcap": float(keywords.get("softcap") or 0.0),
        "the sink": _sink_fact(sink, sharded=shard.sharded_queries),
        "whether anything requires gradients": any(x.requires_grad for x in tensors),
        "mask": _mask_fact(mask),
        "rows": query.shape[-2],
    }


def _check_alone(query: Tensor, shard: ShardedKeys, values: Tensor, keywords: Keywords) -> None:
    """The call without its keys: whatever is wrong with it shows before anything is sent."""
    scale, sink = keywords.get("scale"), keywords.get("sink")
    few: Keywords = {**keywords, "attn_mask": None, "sink": None}
    if isinstance(scale, Tensor) and scale.ndim > 1 and scale.shape[-2] == _rows(query):
        few["scale"] = _empty(scale)
    try:
        call = prepare("attend", _empty(query), _empty(shard.keys), _empty(values), **few)
        if sink is not None:
            given = Given("attend", query, shard.keys, values, sink=sink)
            sink_logits(given, (*Direct(call).shape[:-2], query.shape[-2]), call.dtype)
    except InputError as error:
        shapes = f"query={tuple(query.shape)}, " if isinstance(query, Tensor) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
        found = str(error).partition(" Got ")[0]
        raise InputError(f"{found} Got attend({shapes}keys={tuple(shard.keys.shape)}).") from None
    if (now := shard.keys.shape[-2]) != (then := shard.rows[shard.ranks.rank]):
        raise InputError(
            f"attend: this rank had {then} keys when ShardedKeys was made and has {now} now; make "
            "a new one, on all ranks, when their number changes."
        )


def _mask_fact(mask: Tensor | None) -> int:
    """2 for numbers to add, 1 for a boolean mask, 0 for none, which a causal bias counts as."""
    if mask is None or not _is_plain(mask):
        return 0
    return 2 if mask.is_floating_point() else 1


def _sink_fact(sink: float | Tensor | None, *, sharded: bool) -> Fact:
    """What ranks must agree on: a number; of a tensor its shape, or its rank if queries differ."""
    if not isinstance(sink, Tensor):
        return "none" if sink is None else float(sink)
    shape = (sink.ndim,) if sharded else tuple(sink.shape)
    return (int(sink.requires_grad), *shape)


def _scale_facts(scale: float | Tensor | None) -> Facts:
    """Of a tensor scale, what ranks must agree on; of a number nothing."""
    if not isinstance(scale, Tensor):
        return {"dtype of scale": "a number", "whether scale requires gradients": False}
    found = describe(scale=scale.reshape(1, -1))
    return {n: found[n] for n in ("dtype of scale", "whether scale requires gradients")}


def _is_plain(mask: Tensor) -> bool:
    return type(mask) in (Tensor, torch.nn.Parameter)


def _causal_bias(mask: Tensor | None) -> int:
    """Which of torch's causal biases it is, counted from 1; 0 for none."""
    if mask is None or _is_plain(mask):
        return 0
    return 1 + int(getattr(getattr(mask, "variant", None), "value", 0))


def _rows(query: Tensor) -> int:
    return query.shape[-2] if isinstance(query, Tensor) and query.ndim > 1 else -1  # pyright: ignore[reportUnnecessaryIsInstance]


def _by_row(scale: Tensor, query: Tensor) -> Tensor:
    """A scale with a row for each query, as precise as they are computed."""
    shape = (*scale.shape[:-2], query.shape[-2], scale.shape[-1] if scale.ndim else 1)
    return scale.to(widened(query.dtype)).expand(shape)


def _empty(x: Tensor) -> Tensor:
    """The same without its rows."""
    return x[..., :0, :] if isinstance(x, Tensor) and x.ndim > 1 else x  # pyright: ignore[reportUnnecessaryIsInstance]


def _route(query: Tensor, shard: ShardedKeys, queries: int, *, masked: bool) -> Route:
    """A mask stays with its keys, so the queries come to it; else whatever sends less."""
    if masked and shard.route == "ring":
        raise InputError(
            "attend: attn_mask does not go with route='ring', where keys travel: use is_causal or "
            "window, or another route."
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
