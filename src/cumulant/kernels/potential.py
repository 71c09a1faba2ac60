"""The log-normalizer alone, over keys or over both sides at once, for contrastive losses (T24).

`log_normalizer` computes the gradient in the same pass as the value. A tile that spans all keys
knows its weights exactly, so p k and p' q can be summed while the scores are available, without
recomputing them: three matrix products instead of four. This fits a loss that sums or averages
over queries, where every query has the same cotangent; for any other cotangent the gradient is
recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cumulant.core.eager import eager
from cumulant.core.precision import without_autocast
from cumulant.core.typed import Function, functions
from cumulant.kernels import formulas
from cumulant.kernels.attention import Options, attention
from cumulant.kernels.calculus import pullback, pushforward, results_of
from cumulant.kernels.engines import compiled
from cumulant.kernels.formulas import INDEX
from cumulant.kernels.streaming import scores_are_small
from cumulant.kernels.tiles import (
    Arguments,
    Named,
    Program,
    Result,
    batch_first,
    evaluate,
    tile_sum,
)

__all__ = ["MOST_KEYS", "Both", "both_normalizers", "log_normalizer", "potential"]

# Beyond this many keys a strip of whole rows is too thin for the matrix products.
MOST_KEYS = 2**18
_AREA = 2**21


@eager
def log_normalizer(arguments: Mapping[str, Tensor]) -> Tensor:
    """G of every query, ``(*batch, M, 1)``; arguments as for `attention`, without ``value``."""
    moving = torch.is_grad_enabled() and any(arguments[n].requires_grad for n in ("query", "key"))
    learned = "bias" in arguments and arguments["bias"].requires_grad
    if not moving or learned or arguments["key"].shape[-2] > MOST_KEYS:
        value = arguments["key"][..., :0]
        return attention({**arguments, "value": value}, Options()).log_normalizer
    return _Potential.apply(tuple(arguments), *arguments.values())[0]


def _grid(arguments: Named) -> tuple[int, int]:
    return arguments["query"].shape[-2], arguments["key"].shape[-2]


def _batch(arguments: Named) -> torch.Size:
    return functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))


def _compiled_potential(program: Program, arguments: Named) -> Arguments | None:
    if (engine := compiled(arguments["query"].device)) is None:
        return None
    return engine.potential(arguments, {r.name: r.shape for r in program.results})


def potential(arguments: Named, wanted: tuple[str, ...]) -> Arguments:
    """``log_normalizer`` and the gradient of its sum over the queries, without derivative.

    Queries count with weights ``cotangent log_normalizer``, if given. A bias that needs a gradient
    must be one row for all queries.
    """
    m, _ = _grid(arguments)
    shift = not scores_are_small(Options(), arguments)
    program = Program(
        function=partial(formulas.potential, shift=shift, wanted=wanted),
        indices={**INDEX, "cotangent log_normalizer": "i"},
        results=(
            Result("log_normalizer", "i", (*_batch(arguments), m, 1)),
            *results_of(arguments, wanted),
        ),
        grid=_grid(arguments),
        area=_AREA,
        whole_rows=True,
        run=_compiled_potential,
    )
    with without_autocast(arguments["query"]):
        return evaluate(program, arguments)


class _Potential(Function):
    """G, and the gradient of its sum, kept for the backward pass."""

    @staticmethod
    def forward(names: tuple[str, ...], *tensors: Tensor) -> Any:
        out = potential(dict(zip(names, tensors, strict=True)), ("query", "key"))
        return out["log_normalizer"], out["query"], out["key"]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        names, *tensors = inputs
        ctx.names = names
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def _saved(ctx: Any) -> tuple[Arguments, Arguments]:
        *tensors, G, query, key = ctx.saved_tensors
        arguments = dict(zip(ctx.names, tensors, strict=True))
        value = arguments["key"][..., :0]
        mean = arguments["query"][..., :0].expand(*G.shape[:-1], 0)
        given = {**arguments, "value": value, "mean": mean, "log_normalizer": G}
        return given, {"query": query, "key": key}

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        wanted = tuple(
            name
            for name, needed in zip(ctx.names, ctx.needs_input_grad[1:], strict=True)
            if needed and name in ("query", "key")
        )
        if grads[0] is None or not wanted:
            return (None,) * (1 + len(ctx.names))
        given, kept = _Potential._saved(ctx)
        out = pullback(Options(), given, {"log_normalizer": grads[0]}, wanted, kept=kept)
        return None, *(out.get(name) for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        tangents = {n: t for n, t in zip(ctx.names, grads[1:], strict=True) if t is not None}
        given, _ = _Potential._saved(ctx)
        _, tangent = pushforward(Options(), given, tangents)
        return tangent, None, None

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[int | None, ...], names: tuple[str, ...], *tensors: Tensor
    ) -> Any:
        moved = batch_first(tensors, in_dims[1:])
        # The kept gradients carry the whole batch, so that each of its members has its own.
        moved = [
            x.expand(info.batch_size, *x.shape[1:]) if n in ("query", "key") else x
            for n, x in zip(names, moved, strict=True)
        ]
        out = _Potential.apply(names, *moved)
        return out, (0, 0, 0)


class Both(NamedTuple):
    """G over the keys of every query ``(*batch, M, 1)``, H over the queries of every key."""

    rows: Tensor
    columns: Tensor


@eager
def both_normalizers(arguments: Mapping[str, Tensor]) -> Both:
    """G_i = log sum_j exp(s_ij) and H_j = log sum_i exp(s_ij), from the same scores."""
    return Both(*_Both.apply(tuple(arguments), *arguments.values()))


def _swapped(arguments: Named) -> Arguments:
    """The same pairs with the roles of queries and keys exchanged."""
    other = {"query": "key", "key": "query", "query_tag": "key_tag", "key_tag": "query_tag"}
    return {other.get(n, n): x.mT if n == "mask" else x for n, x in arguments.items()}


def _normalizers(arguments: Named) -> tuple[Tensor, Tensor]:
    m, n = _grid(arguments)
    batch = _batch(arguments)
    if scores_are_small(Options(), arguments):
        program = Program(
            function=formulas.masses,
            indices=INDEX,
            results=(Result("rows", "i", (*batch, m, 1)), Result("columns", "j", (*batch, n, 1))),
            grid=(m, n),
        )
        out = evaluate(program, arguments)
        return out["rows"].log(), out["columns"].log()
    sides = (arguments, _swapped(arguments))
    given = ({**x, "value": x["key"][..., :0]} for x in sides)
    first, second = (attention(x, Options()).log_normalizer for x in given)
    return first, second


_SIDES = {"log_normalizer": "i", "column_normalizer": "j"}


class _Both(Function):
    """(G, H); derivatives are sums over tiles, of any order by the general rule."""

    @staticmethod
    def forward(names: tuple[str, ...], *tensors: Tensor) -> Any:
        with without_autocast(tensors[0]):
            return _normalizers(dict(zip(names, tensors, strict=True)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        names, *tensors = inputs
        ctx.names = (*names, *_SIDES)
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def _program(ctx: Any) -> tuple[Arguments, Program]:
        given = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        return given, Program(formulas.both_pullback, INDEX, (), _grid(given))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given, program = _Both._program(ctx)
        if all(g is None for g in grads):
            return (None,) * (len(ctx.names) - 1)
        seeds = {
            f"cotangent {n}": torch.zeros_like(given[n]) if g is None else g
            for n, g in zip(_SIDES, grads, strict=True)
        }
        program = replace(
            program,
            indices={**INDEX, **{f"cotangent {n}": index for n, index in _SIDES.items()}},
            results=results_of(given, ("query", "key")),
        )
        out = tile_sum(program, {**given, **seeds})
        return None, *(out.get(name) for name in ctx.names[:-2])

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        given, program = _Both._program(ctx)
        tangents = {
            f"tangent {n}": t for n, t in zip(ctx.names, grads[1:], strict=False) if t is not None
        }
        program = replace(
            program,
            function=formulas.both_pushforward,
            indices={**INDEX, "tangent query": "i", "tangent key": "j"},
            results=tuple(Result(n, i, tuple(given[n].shape)) for n, i in _SIDES.items()),
        )
        out = tile_sum(program, {**given, **tangents})
        return tuple(out[n] for n in _SIDES)

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[int | None, ...], names: tuple[str, ...], *tensors: Tensor
    ) -> Any:
        out = _Both.apply(names, *batch_first(tensors, in_dims[1:]))
        return out, (0, 0)
