"""Mean, log-normalizer and entropy of attention, differentiable to any order.

See docs/theory.md, T1, T7, T12.

Attention rests on two autograd Functions: `_Attention` here, which computes G, and the sum over
tiles of ``tiles.py``, which does everything else given G. The derivative of the first is the
second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from cumulant.core.calling import Function
from cumulant.core.eager import eager
from cumulant.core.precision import without_autocast
from cumulant.core.typed import functions
from cumulant.kernels import operators
from cumulant.kernels.calculus import pullback, pushforward, tiling
from cumulant.kernels.formulas import INDEX, with_scale
from cumulant.kernels.streaming import EXTRAS, ORDER, Options, forward, grid_of
from cumulant.kernels.tiles import (
    Arguments,
    Named,
    Program,
    Result,
    TileFunction,
    batch_first,
    tile_sum,
)

__all__ = ["Moments", "Options", "attention", "expectation"]


class Moments(NamedTuple):
    """E[v] ``(*batch, M, e)``, G and entropy ``(*batch, M, 1)``; entropy only on request.

    `extras` are score mean, variance and maximum by name, without derivative, if the engine
    computed them along with the entropy.
    """

    mean: Tensor
    log_normalizer: Tensor
    entropy: Tensor | None
    extras: Mapping[str, Tensor]


class _Attention(Function):
    """(mean, G[, entropy]) of named arguments; derivatives are sums over tiles."""

    @staticmethod
    def forward(options: Options, names: tuple[str, ...], *tensors: Tensor) -> Any:
        with without_autocast(tensors[0]):
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


_apply = eager(_Attention.apply)


def attention(arguments: Mapping[str, Tensor], options: Options = Options()) -> Moments:
    """E[v], G and entropy under p(j|i) = exp(scale <q_i, k_j> + bias_ij - G_i).

    Arguments are named tensors of equal rank with broadcastable batches: ``query``, ``key``,
    ``value``, and optionally ``bias`` (additive, differentiable), ``mask`` (boolean, True = may
    attend), ``cap`` (scores become cap tanh(score / cap) before the bias), ``seed`` (int32, with
    dropout).
    """
    if operators.traceable(options):
        out = operators.attention(options, arguments)
    else:
        out = _apply(options, tuple(arguments), *arguments.values())
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
    """Another row of `width` per query, given G: a function of ``formulas`` summed over tiles.

    `value` is the result if it is already known and only its derivatives are needed.
    """
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    program = Program(
        function=with_scale(function, options.scale),
        indices={**INDEX, "known": "i"},
        results=(Result(name, "i", (*batch, arguments["query"].shape[-2], width)),),
        grid=grid_of(arguments),
        band=options.band,
        run=_known_value,
        **tiling(options, arguments),
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
