"""Mean, log-normalizer and entropy of attention, differentiable to any order.

See docs/theory.md, T1, T7, T12.

Two autograd Functions carry the library: `_Attention` here, which knows G, and the sum over tiles
of ``tiles.py``, which given G does everything else. The derivative of the first is the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.eager import eager
from cumulant.kernels import formulas, fused
from cumulant.kernels.formulas import INDEX, with_scale
from cumulant.kernels.merge import Pool
from cumulant.kernels.ring import Ring
from cumulant.kernels.tiles import (
    Arguments,
    Band,
    Named,
    Program,
    Result,
    Tile,
    TileFunction,
    batch_first,
    has_nan,
    removes_keys,
    tile_sum,
    walk,
)
from cumulant.kernels.workspace import Workspace

__all__ = ["Moments", "Options", "attention", "expectation", "pullback", "pushforward"]

_FORWARD_ORDER = ("mean", "log_normalizer", "entropy")


@dataclass(frozen=True)
class Options:
    """What is fixed about a call: scale, which pairs may meet, dropout, entropy or not.

    With a `ring`, keys and values are those of this rank, and attention is over those of all.
    """

    scale: float = 1.0
    band: Band = Band()
    dropout: float = 0.0
    entropy: bool = False
    ring: Ring | None = None


class Moments(NamedTuple):
    """E[v] ``(*batch, M, e)``, G and entropy ``(*batch, M, 1)``; entropy only where asked for."""

    mean: Tensor
    log_normalizer: Tensor
    entropy: Tensor | None


class _Sums(NamedTuple):
    """Unnormalized sums over some keys, relative to e^peak."""

    peak: Tensor
    mass: Tensor  # sum of p
    weighted: Tensor  # sum of p v
    heat: Tensor | None  # sum of p log2 p, where the entropy is wanted


def _on_tile(tile: Tile, a: Arguments, options: Options, shift: bool) -> _Sums:
    """The sums of one tile; `shift` takes each row's maximum as its peak."""
    work = tile.work
    s_mn = formulas.scores(tile, a, 1.0 if shift else formulas.LOG2_E)
    peak = s_mn.new_zeros(1)
    if shift:
        peak = s_mn.amax(-1, keepdim=True)
        peak.masked_fill_(peak == -math.inf, 0.0)
        s_mn = work.scale(work.sub(s_mn, peak), formulas.LOG2_E)
    p_mn = work.exp2(s_mn, fresh=options.entropy)
    weighted = formulas.dropped(tile, a, options.dropout, p_mn) @ a["value"]
    if "broken" in a:  # values that are not finite reach the rows that give them weight
        weighted.masked_fill_((p_mn > 0).to(weighted.dtype) @ a["broken"] > 0, math.nan)
    mass, heat = formulas.row_sum(p_mn), None
    if options.entropy:
        heat = formulas.row_sum(work.mul(formulas.bounded(tile, a, s_mn), p_mn))
    return _Sums(peak, mass, weighted, heat)


def _add(first: _Sums, second: _Sums) -> _Sums:
    """Sums relative to the same peak simply add."""
    heat = None
    if first.heat is not None and second.heat is not None:
        heat = first.heat.add_(second.heat)
    mass, weighted = first.mass.add_(second.mass), first.weighted.add_(second.weighted)
    return _Sums(first.peak, mass, weighted, heat)


def _normalize(sums: _Sums) -> list[Tensor]:
    """(mean, G, entropy) from the sums."""
    mass = sums.mass.masked_fill(sums.mass == 0, 1.0)
    log_mass = mass.log2()
    normalizer = sums.peak + log_mass / formulas.LOG2_E
    out = [sums.weighted.div_(mass), normalizer.masked_fill_(sums.mass == 0, -math.inf)]
    if sums.heat is not None:
        out.append(((log_mass - sums.heat / mass) / formulas.LOG2_E).clamp_min_(0.0))
    return out


def _grid(arguments: Named) -> tuple[int, int]:
    return arguments["query"].shape[-2], arguments["key"].shape[-2]


def scores_are_small(options: Options, arguments: Named) -> bool:
    """Whether every |score| is below 32 log 2 by Cauchy-Schwarz: no maximum need be subtracted."""
    if "bias" in arguments:
        return False
    if 0 in (arguments["query"].numel(), arguments["key"].numel()):
        return True
    longest = (torch.linalg.vector_norm(arguments[n], dim=-1).amax() for n in ("query", "key"))
    return abs(options.scale) * math.prod(float(x) for x in longest) * formulas.LOG2_E < 32


def _stream(options: Options, arguments: Named) -> list[Tensor]:
    """(mean, G, entropy), merging tiles of keys one after another."""
    query, value = arguments["query"], arguments["value"]
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    m, n = _grid(arguments)
    # With a band some rows may have no tile; otherwise every row is written below.
    unwritten = not options.band.open or n == 0
    make = query.new_zeros if unwritten else query.new_empty
    mean, entropy = make((*batch, m, value.shape[-1])), make((*batch, m, 1))
    normalizer = query.new_full((*batch, m, 1), -math.inf)
    results = [mean, normalizer, entropy][: 3 if options.entropy else 2]
    if 0 in (*batch, m, n):
        return results
    shift = not scores_are_small(options, arguments)
    with Workspace.lease(query) as work:
        for where, tiles in walk(arguments, INDEX, (m, n), options.band, work):
            pending: _Sums | None = None
            done: list[Tensor] | None = None
            for tile, cut in tiles:
                cut["query"] = cut["query"] * options.scale
                sums = _on_tile(tile, cut, options, shift)
                if shift:
                    part = _normalize(sums)
                    done = part if done is None else _merge(done, part)
                else:
                    pending = sums if pending is None else _add(pending, sums)
            if pending is not None:
                done = _normalize(pending)
            if done is not None:
                for result, x in zip(results, done, strict=True):
                    result[where] = x
    return results


def _merge(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    pool = Pool([first[1], second[1]])
    if len(first) == 2:
        (mean,) = pool.means([first[0], second[0]])
        return [mean, pool.log_normalizer()]
    mean, surprise = pool.means([first[0], second[0]], pool.surprises([first[2], second[2]]))
    return [mean, pool.log_normalizer(), pool.entropy(surprise)]


def _guarded(arguments: Named) -> Arguments:
    """The same call arranged so that no NaN or infinity meets a weight of exactly zero."""
    out = dict(arguments)
    value = arguments["value"]
    finite = value.isfinite()
    out["value"] = value.masked_fill(~finite, 0.0)
    out["broken"] = (~finite).to(value.dtype)
    if "bias" in arguments:
        seen = arguments["bias"] != -math.inf
        out["mask"] = arguments["mask"] & seen if "mask" in arguments else seen
    return out


def _around(options: Options, ring: Ring, arguments: Named) -> list[Tensor]:
    """The same over the keys of all ranks, block by block."""
    still = {n: x for n, x in arguments.items() if "j" not in INDEX[n]}
    out: list[Tensor] | None = None
    moving = {n: x for n, x in arguments.items() if n not in still}
    for block in ring.blocks(moving, still.get("origin")):
        band = options.band.shifted(block.before - ring.queries_before)
        here = replace(options, band=band, ring=None)
        part = _forward(here, {**still, **block.arguments})
        out = part if out is None else _merge(out, part)
    return out or []


def _forward(options: Options, arguments: Named) -> list[Tensor]:
    if options.ring is not None:
        return _around(options, options.ring, arguments)
    done = None if options.entropy else fused.forward(arguments, options.scale, options.band)
    out = _stream(options, arguments) if done is None else list(done)
    if removes_keys(arguments, options.band) and has_nan(out):
        # A hidden key that holds NaN must not reach a row as 0 * NaN: sort it out exactly.
        out = _stream(options, _guarded(arguments))
    return out


# What a part of a row has to be told about the whole.
_KNOWN = frozenset(("log_normalizer", "mean", "entropy", "score_mean"))

# So many pairs are the most for one strip; thinner ones than 128 rows starve the matrix products.
_LARGEST_STRIP = 2**22

# Up to this |G| parts of rows are as precise in float32 as whole ones.
_SMALL_NORMALIZER = 16.0


def _rows(options: Options, arguments: Named) -> dict[str, Any]:
    """How a program is tiled: over whole rows, wherever that costs nothing or precision needs it.

    On whole rows every formula makes its own normalizer and means. A strip of rows is attention
    written out densely, as precise as that in every derivative, and depends on nothing it is told.
    In parts of rows (a ring, very many keys) G and the means are arguments like others, and the
    chain rule goes through them; they are rounded, which in float32 shows where G is large.
    """
    if options.ring is not None:
        return {"ring": options.ring}
    m, n = _grid(arguments)
    if min(m, 128) * n > _LARGEST_STRIP and _parts_are_precise(arguments["log_normalizer"]):
        return {}
    return {"whole_rows": True, "fixed": _KNOWN}


def _parts_are_precise(normalizer: Tensor) -> bool:
    if normalizer.dtype != torch.float32:
        return True
    try:
        large = (normalizer.abs() > _SMALL_NORMALIZER) & (normalizer != -math.inf)
        return not bool(large.any())
    except RuntimeError:  # inside vmap the question has no single answer
        return False


def pushforward(options: Options, arguments: Named, tangents: Named) -> list[Tensor]:
    """Tangents of (mean, G, entropy), all in the tile function: torch disables forward mode around
    plain operations here, so only Functions keep the tangents of outer levels.
    """
    names = _FORWARD_ORDER[: 3 if options.entropy else 2]
    moving = names if tangents.keys() - {"value"} else ("mean",)
    program = Program(
        function=with_scale(partial(formulas.pushforward, rate=options.dropout), options.scale),
        indices={**INDEX, **{"tangent " + n: INDEX[n] for n in tangents}},
        results=tuple(Result(n, "i", tuple(arguments[n].shape)) for n in moving),
        grid=_grid(arguments),
        band=options.band,
        pull=None if options.ring else partial(_reverse_over_forward, options=options),
        **_rows(options, arguments),
    )
    out = tile_sum(program, {**arguments, **{"tangent " + n: t for n, t in tangents.items()}})
    return [out[n] if n in out else torch.zeros_like(arguments[n]) for n in names]


def _fused_backward(program: Program, arguments: Named, *, options: Options) -> Arguments | None:
    """The shortcut for the plain case: only the mean has a cotangent, the bias wants none."""
    others = {"cotangent log_normalizer", "cotangent entropy"} & arguments.keys()
    if (
        others
        or "cotangent mean" not in arguments
        or any(r.name == "bias" for r in program.results)
    ):
        return None
    if any(arguments[r.name].shape != r.shape for r in program.results):
        return None  # a batch of cotangents for shared arguments
    return fused.backward(arguments, options.scale, program.band, whole=options.ring is None)


def _kept_gradient(program: Program, arguments: Named) -> Arguments | None:
    """The gradients made with the value, if every query has the same cotangent."""
    seed = arguments["cotangent log_normalizer"]
    if seed.numel() == 0 or any(
        arguments["kept " + r.name].shape != r.shape for r in program.results
    ):
        return None
    one = seed.reshape(-1)[:1]
    if not bool((seed == one).all()):
        return None
    return {r.name: arguments["kept " + r.name] * one for r in program.results}


def _curvature(
    options: Options,
    arguments: Named,
    cotangents: Named,
    directions: Named,
    results: tuple[Result, ...],
    *,
    moved: Named | None = None,
) -> Arguments:
    """The gradient of <cotangents, J directions> in one pass over whole rows, plus J' moved.

    J is the Jacobian of (mean, G). Every second derivative of attention is this one program:
    reverse over reverse by definition, reverse over forward because <g, J t> is its value, forward
    over reverse because the Hessian of <g, f> is symmetric. It is a total derivative: that G and
    the mean depend on queries, keys and values is in it, so those two get no gradient.
    """
    given = {n: x for n, x in arguments.items() if n in INDEX and n != "entropy"}
    indices = dict(INDEX)
    for prefix, named in (
        ("cotangent", cotangents),
        ("second", directions),
        ("moved", moved or {}),
    ):
        for name, x in named.items():
            given[f"{prefix} {name}"] = x
            indices[f"{prefix} {name}"] = INDEX[name]
    wanted = tuple(r.name for r in results)
    function = partial(formulas.curvature, rate=options.dropout, wanted=wanted)
    program = Program(
        function=with_scale(function, options.scale),
        indices=indices,
        results=results,
        grid=_grid(arguments),
        band=options.band,
        whole_rows=True,
        fixed=_KNOWN,
    )
    return tile_sum(program, given)


_PRIMAL = ("query", "key", "value", "bias")
_COTANGENTS = ("cotangent mean", "cotangent log_normalizer")


def results_of(arguments: Named, names: Iterable[str]) -> tuple[Result, ...]:
    index = {**INDEX, **dict.fromkeys(_COTANGENTS, "i")}
    return tuple(Result(n, index[n], tuple(arguments[n].shape)) for n in names)


def _bare(names: Iterable[str], arguments: Named, prefix: str) -> Arguments:
    """The arguments called "prefix name", by their bare names."""
    return {n: arguments[f"{prefix} {n}"] for n in names if f"{prefix} {n}" in arguments}


def _reverse_over_reverse(
    _: Program, arguments: Named, cotangents: Named, needed: Sequence[str], *, options: Options
) -> Arguments | None:
    """The vector-Jacobian product of the first gradient."""
    if "cotangent entropy" in arguments or "cap" in arguments:
        return None
    results = results_of(arguments, [n for n in needed if n in (*_PRIMAL, *_COTANGENTS)])
    if not results:
        return {}
    seeds = _bare(_FORWARD_ORDER, arguments, "cotangent")
    return _curvature(options, arguments, seeds, cotangents, results)


def _forward_over_reverse(
    program: Program, arguments: Named, tangents: Named, *, options: Options
) -> Arguments | None:
    """The Jacobian-vector product of the first gradient."""
    if "cotangent entropy" in arguments or "cap" in arguments:
        return None
    seeds = _bare(_FORWARD_ORDER, arguments, "cotangent")
    directions = {n: tangents[n] for n in _PRIMAL if n in tangents}
    moved = _bare(_FORWARD_ORDER, tangents, "cotangent")
    return _curvature(options, arguments, seeds, directions, program.results, moved=moved)


def _reverse_over_forward(
    _: Program, arguments: Named, cotangents: Named, needed: Sequence[str], *, options: Options
) -> Arguments | None:
    """The vector-Jacobian product of the first tangent."""
    if "entropy" in cotangents or "cap" in arguments:
        return None
    out: Arguments = {}
    primal = [n for n in needed if n in _PRIMAL]
    if primal:
        directions = _bare(_PRIMAL, arguments, "tangent")
        results = results_of(arguments, primal)
        out.update(_curvature(options, arguments, cotangents, directions, results))
    moving = tuple(n for n in _PRIMAL if f"tangent {n}" in needed)
    if moving:  # the tangent is linear in its direction
        given = {n: x for n, x in arguments.items() if n in INDEX}
        shapes = {n: tuple(arguments[f"tangent {n}"].shape) for n in moving}
        pulled = pullback(options, given, cotangents, moving, shapes)
        out.update({f"tangent {n}": x for n, x in pulled.items()})
    return out


def pullback(
    options: Options,
    arguments: Named,
    cotangents: Named,
    wanted: tuple[str, ...],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    kept: Named | None = None,
) -> Arguments:
    """Gradients of (mean, G, entropy) in the wanted arguments, of their shapes or of these.

    `kept` holds the gradients of the sum of G over the queries, where they are known already.
    """
    if "mean" not in cotangents:
        wanted = tuple(n for n in wanted if n != "value")
    if not wanted:
        return {}
    function = partial(formulas.pullback, rate=options.dropout, wanted=wanted)
    program = Program(
        function=with_scale(function, options.scale),
        indices={
            **INDEX,
            **{"cotangent " + n: "i" for n in cotangents},
            **{"kept " + n: INDEX[n] for n in kept or {}},
        },
        results=tuple(
            Result(n, INDEX[n], (shapes or {}).get(n, tuple(arguments[n].shape))) for n in wanted
        ),
        grid=_grid(arguments),
        band=options.band,
        run=partial(_fused_backward, options=options) if kept is None else _kept_gradient,
        # The shortcuts of second order need whole rows, which a ring never holds.
        pull=None if options.ring else partial(_reverse_over_reverse, options=options),
        push=None if options.ring else partial(_forward_over_reverse, options=options),
        **_rows(options, arguments),
    )
    given = {"cotangent " + n: c for n, c in cotangents.items()}
    given |= {"kept " + n: x for n, x in (kept or {}).items()}
    return tile_sum(program, {**arguments, **given})


class _Attention(torch.autograd.Function):
    """(mean, G[, entropy]) of named arguments; derivatives are sums over tiles."""

    @staticmethod
    def forward(options: Options, names: tuple[str, ...], *tensors: Tensor) -> Any:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return tuple(_forward(options, dict(zip(names, tensors, strict=True))))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        options, names, *tensors = inputs
        ctx.options, ctx.names = options, names
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def _saved(ctx: Any) -> Arguments:
        names = (*ctx.names, *_FORWARD_ORDER[: 3 if ctx.options.entropy else 2])
        return dict(zip(names, ctx.saved_tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        cotangents = {n: g for n, g in zip(_FORWARD_ORDER, grads, strict=False) if g is not None}
        wanted = tuple(
            name
            for name, needed in zip(ctx.names, ctx.needs_input_grad[2:], strict=True)
            if needed and name in ("query", "key", "value", "bias")
        )
        if not cotangents or not wanted:
            return (None,) * (2 + len(ctx.names))
        out = pullback(ctx.options, _Attention._saved(ctx), cotangents, wanted)
        return None, None, *(out.get(name) for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        tangents = {n: t for n, t in zip(ctx.names, grads[2:], strict=True) if t is not None}
        return tuple(pushforward(ctx.options, _Attention._saved(ctx), tangents))

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any,
        in_dims: tuple[int | None, ...],
        options: Options,
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Any:
        out = _Attention.apply(options, names, *batch_first(tensors, in_dims[2:]))
        return out, (0,) * len(out)


@eager
def attention(arguments: Mapping[str, Tensor], options: Options = Options()) -> Moments:
    """E[v], G and entropy under p(j|i) = exp(scale <q_i, k_j> + bias_ij - G_i).

    Arguments are named tensors of equal rank with broadcastable batches: ``query``, ``key``,
    ``value``, and optionally ``bias`` (additive, differentiable), ``mask`` (boolean, True = may
    attend), ``cap`` (scores become cap tanh(score / cap) before the bias), ``seed`` (int32, with
    dropout).
    """
    out = _Attention.apply(options, tuple(arguments), *arguments.values())
    return Moments(out[0], out[1], out[2] if options.entropy else None)


@eager
def expectation(
    function: TileFunction,
    name: str,
    arguments: Mapping[str, Tensor],
    options: Options,
    *,
    width: int = 1,
) -> Tensor:
    """A further row of `width` per query, given G: one of ``formulas``' functions over tiles."""
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    program = Program(
        function=with_scale(function, options.scale),
        indices=INDEX,
        results=(Result(name, "i", (*batch, arguments["query"].shape[-2], width)),),
        grid=_grid(arguments),
        band=options.band,
        **_rows(options, arguments),
    )
    return tile_sum(program, arguments)[name]
