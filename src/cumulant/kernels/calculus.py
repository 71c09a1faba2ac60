"""The derivatives of attention as sums over tiles: tangent, gradient and curvature.

See docs/theory.md, T7, T12. Each is a :class:`Program`: given G, a function of one tile. Programs
differentiate into programs, so these three give every derivative; an engine may compute a whole
one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cumulant.kernels import formulas, fused
from cumulant.kernels.engines import compiled, fused_first, narrowed
from cumulant.kernels.formulas import INDEX, with_scale
from cumulant.kernels.streaming import ORDER, Options, grid_of
from cumulant.kernels.tiles import Arguments, Named, Program, Result, Shortcut, tile_sum

__all__ = ["pullback", "pushforward", "results_of", "tiling"]


# What a partial row must be given about the whole row.
_KNOWN = frozenset(("log_normalizer", "mean", "entropy", "score_mean", "known"))

# Most pairs per strip; strips thinner than 128 rows starve the matrix products.
_LARGEST_STRIP = 2**22


# Up to this |G|, partial rows are as precise in float32 as whole rows.
_SMALL_NORMALIZER = 16.0


def tiling(options: Options, arguments: Named) -> dict[str, Any]:
    """How a program is tiled: over whole rows wherever that is free or precision requires it.

    On whole rows every formula computes its own normalizer and means. A strip of rows is dense
    attention, equally precise in every derivative, and depends on no precomputed value. On partial
    rows (a ring, very many keys) G and the means are ordinary arguments, and the chain rule goes
    through them; they are rounded, which shows in float32 when G is large.
    """
    if options.ring is not None:
        return {"ring": options.ring}
    m, n = grid_of(arguments)
    many = min(m, 128) * n > _LARGEST_STRIP and arguments["query"].device.type == "cpu"
    if many and _parts_are_precise(arguments["log_normalizer"]):
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
        **tiling(options, arguments),
    )
    out = tile_sum(program, {**arguments, **{"tangent " + n: t for n, t in tangents.items()}})
    return [out[n] if n in out else torch.zeros_like(arguments[n]) for n in names]


def _asking(question: str, options: Options, kept: Named | None = None) -> Shortcut:
    """Tried before the tiles: known results, then the compiled engine, then torch's fused one.

    On CUDA torch's goes before the engine (``engines.fused_first``).
    """

    def run(program: Program, arguments: Named) -> Arguments | None:
        out = None
        if kept is not None:
            out = _kept_gradient(program, arguments)
            arguments = {n: x for n, x in arguments.items() if not n.startswith("kept ")}
        fuses = out is None and question == "gradient" and kept is None
        first = fuses and fused_first(arguments["query"].device)
        if first:
            out = _fused_backward(program, arguments, options=options)
        if out is None and (engine := compiled(arguments["query"].device)) is not None:
            ask = {"tangent": engine.tangent, "gradient": engine.gradient}
            answer = ask.get(question, engine.curvature)
            given = narrowed(engine, arguments, options.narrow)
            out = answer(program, given, scale=options.scale, rate=options.dropout)
        if out is None and fuses and not first:
            out = _fused_backward(program, arguments, options=options)
        return out

    return run


def _fused_backward(program: Program, arguments: Named, *, options: Options) -> Arguments | None:
    """The shortcut for the plain case: a cotangent of the mean alone, no gradient of the bias."""
    others = {"cotangent log_normalizer", "cotangent entropy"} & arguments.keys()
    if (
        others
        or "cotangent mean" not in arguments
        or any(r.name == "bias" for r in program.results)
    ):
        return None
    if any(arguments[r.name].shape != r.shape for r in program.results):
        return None  # a batch of cotangents for shared arguments
    whole = options.ring is None
    return fused.backward(arguments, options.scale, program.band, options.narrow, whole=whole)


def _kept_gradient(program: Program, arguments: Named) -> Arguments | None:
    """The gradients computed along with the value, if every query has the same cotangent."""
    seed = arguments["cotangent log_normalizer"]
    if seed.numel() == 0 or any(
        arguments["kept " + r.name].shape != r.shape for r in program.results
    ):
        return None
    one = seed[(slice(1),) * seed.ndim].reshape(1)
    if not _is_constant(seed):
        return None
    return {r.name: arguments["kept " + r.name] * one for r in program.results}


def _is_constant(x: Tensor) -> bool:
    """Whether all entries are equal: off the CPU only where one number is repeated in memory."""
    if all(size == 1 or step == 0 for size, step in zip(x.shape, x.stride(), strict=True)):
        return True
    return x.device.type == "cpu" and bool((x == x.reshape(-1)[:1]).all())


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
    over reverse because the Hessian of <g, f> is symmetric. It is a total derivative: it accounts
    for G and the mean depending on queries, keys and values, so those two get no gradient.
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
    """The gradients of these arguments, as results of a program."""
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

    `kept` holds the gradients of the sum of G over the queries, if already known.
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
        **tiling(options, arguments),
    )
    given = {"cotangent " + n: c for n, c in cotangents.items()}
    given |= {"kept " + n: x for n, x in (kept or {}).items()}
    return tile_sum(program, {**arguments, **given})
