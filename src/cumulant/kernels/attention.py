"""Mean, log-normalizer and entropy of attention, differentiable to any order.

See docs/theory.md, T1, T7, T12.

Two autograd Functions carry attention: `_Attention` here, which knows G, and the sum over tiles of
``tiles.py``, which given G does everything else. The derivative of the first is the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.eager import eager
from cumulant.core.typed import Function, functions
from cumulant.kernels import formulas, fused
from cumulant.kernels.engines import compiled
from cumulant.kernels.formulas import INDEX, with_scale
from cumulant.kernels.streaming import EXTRAS, ORDER, Options, forward, grid_of
from cumulant.kernels.tiles import (
    Arguments,
    Named,
    Program,
    Result,
    Shortcut,
    TileFunction,
    batch_first,
    tile_sum,
)

__all__ = ["Moments", "Options", "attention", "expectation", "pullback", "pushforward"]


class Moments(NamedTuple):
    """E[v] ``(*batch, M, e)``, G and entropy ``(*batch, M, 1)``; entropy only where asked for.

    `extras` are score mean, variance and maximum by name, without derivative, where the engine made
    them with the entropy.
    """

    mean: Tensor
    log_normalizer: Tensor
    entropy: Tensor | None
    extras: Mapping[str, Tensor]


# What a part of a row has to be told about the whole.
_KNOWN = frozenset(("log_normalizer", "mean", "entropy", "score_mean", "known"))

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
    m, n = grid_of(arguments)
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
    names = ORDER[: 3 if options.entropy else 2]
    moving = names if tangents.keys() - {"value"} else ("mean",)
    program = Program(
        function=with_scale(partial(formulas.pushforward, rate=options.dropout), options.scale),
        indices={**INDEX, **{"tangent " + n: INDEX[n] for n in tangents}},
        results=tuple(Result(n, "i", tuple(arguments[n].shape)) for n in moving),
        grid=grid_of(arguments),
        band=options.band,
        run=_asking("tangent", options),
        pull=None if options.ring else partial(_reverse_over_forward, options=options),
        **_rows(options, arguments),
    )
    out = tile_sum(program, {**arguments, **{"tangent " + n: t for n, t in tangents.items()}})
    return [out[n] if n in out else torch.zeros_like(arguments[n]) for n in names]


def _asking(question: str, options: Options, kept: Named | None = None) -> Shortcut:
    """What is tried before the tiles: what is known already, the compiled engine, torch's own."""

    def run(program: Program, arguments: Named) -> Arguments | None:
        out = None
        if kept is not None:
            out = _kept_gradient(program, arguments)
            arguments = {n: x for n, x in arguments.items() if not n.startswith("kept ")}
        if out is None and (engine := compiled()) is not None:
            ask = {"tangent": engine.tangent, "gradient": engine.gradient}
            answer = ask.get(question, engine.curvature)
            out = answer(program, arguments, scale=options.scale, rate=options.dropout)
        if out is None and question == "gradient" and kept is None:
            out = _fused_backward(program, arguments, options=options)
        return out

    return run


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
        grid=grid_of(arguments),
        band=options.band,
        whole_rows=True,
        fixed=_KNOWN,
        run=_asking("curvature", options),
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
    seeds = _bare(ORDER, arguments, "cotangent")
    return _curvature(options, arguments, seeds, cotangents, results)


def _forward_over_reverse(
    program: Program, arguments: Named, tangents: Named, *, options: Options
) -> Arguments | None:
    """The Jacobian-vector product of the first gradient."""
    if "cotangent entropy" in arguments or "cap" in arguments:
        return None
    seeds = _bare(ORDER, arguments, "cotangent")
    directions = {n: tangents[n] for n in _PRIMAL if n in tangents}
    moved = _bare(ORDER, tangents, "cotangent")
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
        grid=grid_of(arguments),
        band=options.band,
        run=_asking("gradient", options, kept),
        # The shortcuts of second order need whole rows, which a ring never holds.
        pull=None if options.ring else partial(_reverse_over_reverse, options=options),
        push=None if options.ring else partial(_forward_over_reverse, options=options),
        **_rows(options, arguments),
    )
    given = {"cotangent " + n: c for n, c in cotangents.items()}
    given |= {"kept " + n: x for n, x in (kept or {}).items()}
    return tile_sum(program, {**arguments, **given})


class _Attention(Function):
    """(mean, G[, entropy]) of named arguments; derivatives are sums over tiles."""

    @staticmethod
    def forward(options: Options, names: tuple[str, ...], *tensors: Tensor) -> Any:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return tuple(forward(options, dict(zip(names, tensors, strict=True))))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        options, names, *tensors = inputs
        ctx.options, ctx.names, ctx.extras = options, names, len(output[3:])
        ctx.mark_non_differentiable(*output[3:])
        ctx.save_for_backward(*tensors, *output[:3])
        ctx.save_for_forward(*tensors, *output[:3])
        ctx.set_materialize_grads(False)

    @staticmethod
    def _saved(ctx: Any) -> Arguments:
        names = (*ctx.names, *ORDER[: 3 if ctx.options.entropy else 2])
        return dict(zip(names, ctx.saved_tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        cotangents = {n: g for n, g in zip(ORDER, grads[:3], strict=False) if g is not None}
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
        out = pushforward(ctx.options, _Attention._saved(ctx), tangents)
        return (*out, *(None,) * ctx.extras)

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
    extras: dict[str, Tensor] = {n: x for n, x in zip(EXTRAS, out[3:], strict=False)}  # noqa: C416
    return Moments(out[0], out[1], out[2] if options.entropy else None, extras)


@eager
def expectation(
    function: TileFunction,
    name: str,
    arguments: Mapping[str, Tensor],
    options: Options,
    *,
    width: int = 1,
    value: Tensor | None = None,
) -> Tensor:
    """A further row of `width` per query, given G: one of ``formulas``' functions over tiles.

    `value` is the result, where it is known already and only its derivatives are not.
    """
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    program = Program(
        function=with_scale(function, options.scale),
        indices={**INDEX, "known": "i"},
        results=(Result(name, "i", (*batch, arguments["query"].shape[-2], width)),),
        grid=grid_of(arguments),
        band=options.band,
        run=_known_value,
        **_rows(options, arguments),
    )
    if value is not None:
        arguments = {**arguments, "known": value}
    return tile_sum(program, arguments)[name]


def _known_value(program: Program, arguments: Named) -> Arguments | None:
    (result,) = program.results
    known = arguments.get("known")
    return (
        {result.name: known.clone()} if known is not None and known.shape == result.shape else None
    )
