"""Attention and its first gradient as custom torch operators, for graphs.

``torch.compile``, ``torch.export`` and ``make_fx`` see two opaque operators of known shapes, so the
graph does not break. The engine is chosen when an operator runs, not when it is traced: one graph
serves every engine, and tensors of an absent device can be traced.

Named arguments are passed as a comma-separated string of names and a list of tensors. Only the
value and the first gradient are operators; ``torch.func`` transforms break the graph (see
`traceable`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant.core.eager import tracing, transforms
from cumulant.core.precision import without_autocast
from cumulant.core.typed import forward_ad, functions, operator
from cumulant.kernels.calculus import pullback
from cumulant.kernels.streaming import ORDER, Options, forward
from cumulant.kernels.tiles import Band, Named

__all__ = ["attention", "traceable"]

_DIFFERENTIABLE = ("query", "key", "value", "bias")


def traceable(options: Options) -> bool:
    """Whether this call is being traced and the operators can represent it.

    Communication between ranks does not fit into a graph, and the operators have no tangents.
    """
    if not tracing() or options.ring is not None:
        return False
    return not transforms() and forward_ad._current_level < 0


def attention(options: Options, arguments: Named) -> tuple[Tensor, ...]:
    """(mean, G[, entropy]) by the operator: what `kernels.attention` computes, in a graph."""
    out = _attention(",".join(arguments), list(arguments.values()), *_flat(options))
    return out if options.entropy else out[:2]


_Flat = tuple[float, int | None, int | None, float, bool, torch.dtype | None]


def _flat(options: Options) -> _Flat:
    band = options.band
    return (
        *(options.scale, band.lower, band.upper, options.dropout, options.entropy),
        options.narrow,
    )


def _options(
    scale: float,
    lower: int | None,
    upper: int | None,
    dropout: float,
    entropy: bool,
    narrow: torch.dtype | None,
) -> Options:
    return Options(scale, Band(lower, upper), dropout, entropy, narrow=narrow)


def _named(names: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(names.split(","), tensors, strict=True))


@operator("cumulant::attention")
def _attention(
    names: str,
    tensors: list[Tensor],
    scale: float,
    lower: int | None,
    upper: int | None,
    dropout: float,
    entropy: bool,
    narrow: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _options(scale, lower, upper, dropout, entropy, narrow)
    with without_autocast(tensors[0]):
        out = [x.contiguous() for x in forward(options, _named(names, tensors))]
    return out[0], out[1], out[2] if entropy else out[1].new_empty(0)


@_attention.register_fake
def _(
    names: str,
    tensors: list[Tensor],
    scale: float,
    lower: int | None,
    upper: int | None,
    dropout: float,
    entropy: bool,
    narrow: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    given = _named(names, tensors)
    query, value = given["query"], given["value"]
    rows = (*functions.broadcast_shapes(*(x.shape[:-2] for x in tensors)), query.shape[-2])
    column = query.new_empty((*rows, 1))
    last = torch.empty_like(column) if entropy else query.new_empty(0)
    return query.new_empty((*rows, value.shape[-1])), column, last


@operator("cumulant::attention_gradient")
def _gradient(
    names: str,
    tensors: list[Tensor],
    seeded: str,
    seeds: list[Tensor],
    wanted: str,
    scale: float,
    lower: int | None,
    upper: int | None,
    dropout: float,
    entropy: bool,
    narrow: torch.dtype | None,
) -> list[Tensor]:
    options = _options(scale, lower, upper, dropout, entropy, narrow)
    given, cotangents = _named(names, tensors), _named(seeded, seeds)
    out = pullback(options, given, cotangents, tuple(wanted.split(",")))
    return [
        out[n].contiguous() if n in out else torch.zeros_like(given[n]) for n in wanted.split(",")
    ]


@_gradient.register_fake
def _(
    names: str,
    tensors: list[Tensor],
    seeded: str,
    seeds: list[Tensor],
    wanted: str,
    scale: float,
    lower: int | None,
    upper: int | None,
    dropout: float,
    entropy: bool,
    narrow: torch.dtype | None,
) -> list[Tensor]:
    given = _named(names, tensors)
    return [given[n].new_empty(given[n].shape) for n in wanted.split(",")]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.names, tensors, *ctx.options = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> Any:
    made = ORDER if ctx.options[-2] else ORDER[:2]
    names = (*ctx.names.split(","), *made)
    seeds = {n: g for n, g in zip(made, grads, strict=False) if g is not None}
    needed = [
        n
        for n, x in zip(names, ctx.needs_input_grad[1], strict=False)
        if x and n in _DIFFERENTIABLE
    ]
    out: dict[str, Tensor] = {}
    if seeds and needed:
        gradients = _gradient(
            ",".join(names),
            list(ctx.saved_tensors[: len(names)]),
            ",".join(seeds),
            list(seeds.values()),
            ",".join(needed),
            *ctx.options,
        )
        out = dict(zip(needed, gradients, strict=True))
    return None, [out.get(n) for n in ctx.names.split(",")], *(None for _ in ctx.options)


_attention.register_autograd(_backward, setup_context=_setup_context)
