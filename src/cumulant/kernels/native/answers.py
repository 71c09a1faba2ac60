"""The questions of ``engines.py`` answered in C++: tensors go in as addresses and strides.

Every function returns ``None`` where the library does not take the call.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, reduce

import torch
from torch import Tensor

from cumulant.kernels.native.library import Kernel, library
from cumulant.kernels.tiles import Arguments, Band, Named, Program

__all__ = ["curvature", "forward", "gradient", "potential", "statistics", "takes_half", "tangent"]

takes_half = False

# The numbers are those of `Slot` in problem.hpp.
_SLOTS = {
    name: number
    for number, name in enumerate(
        (
            *("query", "key", "value", "bias", "mask", "query_tag", "key_tag", "seed", "cap"),
            *("along query", "along key", "along value", "along bias"),
            *("cotangent mean", "cotangent log_normalizer", "cotangent entropy"),
            *("marks", "start"),
            *("mean", "log_normalizer", "entropy", "score_mean", "score_variance"),
            *("score_max", "top"),
            *("to query", "to key", "to value", "to bias"),
            *("to cotangent mean", "to cotangent log_normalizer"),
            *("visible", "coverage", "top_weight", "fisher_trace", "leading", "marked"),
            *("received", "center", "largest", "largest_key"),
        )
    )
}
_MEASURE = frozenset(_SLOTS) & {
    *("query", "key", "value", "bias", "mask", "query_tag", "key_tag", "seed", "cap"),
}
_KINDS = {torch.float32: "f32", torch.float64: "f64"}
_PLAIN = (Tensor, torch.nn.Parameter)
_MOST_BATCH = 8
_KEPT = 5  # weights of a row that `largest` has, as KEPT in problem.hpp
_MOST_KEYS = 2**17  # of rows that are kept whole
_OPEN = 2**60


@cache
def _kernel(name: str) -> Kernel:
    return library().kernel(name)


def _plain(x: Tensor) -> Tensor:
    """Zeros that autograd makes without storage, and lazy signs, become numbers."""
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype)
    return x.resolve_neg()


def _taken(arguments: Named) -> Arguments | None:
    """The arguments with storage of their own, or ``None`` if some cannot be read from C++."""
    query = arguments["query"]
    if query.dtype not in _KINDS or query.ndim - 2 > _MOST_BATCH:
        return None
    out: Arguments = {}
    for name, x in arguments.items():
        if type(x) not in _PLAIN or x.device.type != "cpu" or x.layout != torch.strided:
            return None
        if x.numel() == 0 and x.shape[-1] != 0:
            return None
        if name in ("query_tag", "key_tag"):
            if x.is_floating_point():
                return None
            x = x.to(torch.int64)
        elif name not in ("mask", "seed") and x.dtype != query.dtype:
            return None
        out[name] = _plain(x)
    empty = query.shape[-1] == 0 or 0 in arguments["key"].shape
    return None if empty or query.shape[-2] == 0 else out


def _ask(
    kernel: str,
    arguments: Named,
    results: Named,
    batch: tuple[int, ...],
    *,
    scale: float,
    band: Band,
    rate: float = 0.0,
    steps: int = 0,
) -> None:
    """Run a kernel on tensors of equal rank, named by their slots; it writes the results."""
    query, key = arguments["query"], arguments["key"]
    value, tag = arguments.get("value"), arguments.get("query_tag", arguments.get("marks"))
    words = [
        len(batch),
        query.shape[-2],
        key.shape[-2],
        query.shape[-1],
        steps if value is None else value.shape[-1],
        0 if tag is None else tag.shape[-1],
        -_OPEN if band.lower is None else max(-_OPEN, band.lower),
        _OPEN if band.upper is None else min(_OPEN, band.upper),
        torch.get_num_threads(),
        len(arguments) + len(results),
        *batch,
    ]
    for group in (arguments, results):
        for name, x in group.items():
            words += (_SLOTS[name], x.data_ptr())
            words += [0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    packed = array("q", words)
    run = _kernel(f"{kernel}_{_KINDS[query.dtype]}")
    if run(packed.buffer_info()[0], scale, rate):
        raise MemoryError(f"the compiled engine ran out of memory in {kernel}")


def _batch(arguments: Named, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The batch that shapes of equal rank broadcast to; torch's own function takes 40 us."""
    every = (*(x.shape[:-2] for x in arguments.values()), *shapes)
    return tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*every, strict=True))


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """In memory as `like`, if it has the shape: heads that are views of (batch, length, width) lead
    to results that become one again without a copy.
    """
    if like.shape == shape and like.stride(-1) == 1:
        return torch.empty_like(like)
    return like.new_empty(shape)


def forward(
    arguments: Named, *, scale: float, band: Band, rate: float, fields: tuple[str, ...]
) -> Arguments | None:
    """Mean and G, and of entropy, score mean, variance, maximum and its key those in `fields`."""
    if arguments.keys() - _MEASURE or (a := _taken(arguments)) is None:
        return None
    batch, query = _batch(a), a["query"]
    if 0 in batch:
        return None
    out = {n: query.new_empty((*batch, query.shape[-2], 1)) for n in ("log_normalizer", *fields)}
    if "value" in a:
        out["mean"] = _empty((*batch, query.shape[-2], a["value"].shape[-1]), query)
    _ask("forward", a, out, batch, scale=scale, band=band, rate=rate)
    return out


def _program(program: Program, arguments: Named, renamed: Mapping[str, str]) -> Arguments | None:
    """The arguments of a program over whole rows by their slots; G and means are not needed."""
    if not program.whole_rows or program.grid[1] > _MOST_KEYS:
        return None
    given = {
        renamed.get(n, n): x
        for n, x in arguments.items()
        if n not in ("log_normalizer", "mean", "entropy")
    }
    return None if given.keys() - _SLOTS.keys() else _taken(given)


_ALONG = ("query", "key", "value", "bias")


def tangent(program: Program, arguments: Named, *, scale: float, rate: float) -> Arguments | None:
    """Tangents of (mean, G, entropy)."""
    a = _program(program, arguments, {f"tangent {n}": f"along {n}" for n in _ALONG})
    if a is None:
        return None
    batch = _batch(a)
    if any(r.shape[:-2] != batch for r in program.results):
        return None
    out = {r.name: a["query"].new_empty(r.shape) for r in program.results}
    _ask("tangent", a, out, batch, scale=scale, band=program.band, rate=rate)
    return out


def _gradients(
    kernel: str, program: Program, a: Named, *, scale: float, rate: float
) -> Arguments | None:
    """Run a kernel whose results are gradients: per query in full, per key summed as they come."""
    shapes = [r.shape[:-2] for r in program.results]
    batch = _batch(a, *shapes)
    if 0 in batch:
        return None
    out: Arguments = {}
    for r in program.results:
        like = a.get(r.name, a["query"])
        if "j" in r.index:
            out[f"to {r.name}"] = _empty(r.shape, like).zero_()
        else:
            out[f"to {r.name}"] = _empty((*batch, *r.shape[-2:]), like)
    _ask(kernel, a, out, batch, scale=scale, band=program.band, rate=rate)
    return {r.name: out[f"to {r.name}"].sum_to_size(r.shape) for r in program.results}


def gradient(program: Program, arguments: Named, *, scale: float, rate: float) -> Arguments | None:
    """Gradients of (mean, G, entropy) for their cotangents."""
    a = _program(program, arguments, {})
    return None if a is None else _gradients("gradient", program, a, scale=scale, rate=rate)


def curvature(program: Program, arguments: Named, *, scale: float, rate: float) -> Arguments | None:
    """The gradient of <cotangents, J directions>, plus J' moved."""
    if "cap" in arguments:
        return None
    moved = {n.replace("moved", "cotangent", 1): x for n, x in arguments.items() if "moved" in n}
    rest = {n: x for n, x in arguments.items() if "moved" not in n}
    a = _program(program, rest, {f"second {n}": f"along {n}" for n in _ALONG})
    if a is None:
        return None
    parts: list[Arguments | None] = []
    if any(n.startswith("along ") for n in a):
        parts.append(_gradients("curvature", program, a, scale=scale, rate=rate))
    if moved:
        primal = tuple(r for r in program.results if r.name in _ALONG)
        still = {n: x for n, x in a.items() if n in _MEASURE}
        given = _taken({**still, **moved})
        here = replace(program, results=primal)
        parts.append(given and _gradients("gradient", here, given, scale=scale, rate=rate))
    return _total(program, parts, a["query"])


def _total(program: Program, parts: list[Arguments | None], like: Tensor) -> Arguments | None:
    """The sum of results, zeros where no part has one; ``None`` if a part was not taken."""
    made = [part for part in parts if part is not None]
    if len(made) < len(parts):
        return None
    found = {r.name: [part[r.name] for part in made if r.name in part] for r in program.results}
    return {
        r.name: reduce(torch.add, found[r.name]) if found[r.name] else like.new_zeros(r.shape)
        for r in program.results
    }


def potential(arguments: Named, shapes: Mapping[str, tuple[int, ...]]) -> Arguments | None:
    """G, and the gradient of its sum over the queries, weighted where they have cotangents."""
    seed = "cotangent log_normalizer"
    if arguments.keys() - _MEASURE - {seed} or (a := _taken(arguments)) is None:
        return None
    batch, query = _batch(a), a["query"]
    if 0 in batch or a["key"].shape[-2] > _MOST_KEYS:
        return None
    rows = (*batch, query.shape[-2])
    if seed not in a:
        a[seed] = query.new_ones(1).expand(*rows, 1)
    out = {"log_normalizer": query.new_empty((*rows, 1))}
    out |= {f"to {n}": query.new_zeros(shapes[n]) for n in ("key", "bias") if n in shapes}
    if "query" in shapes:
        out["to query"] = query.new_empty((*rows, query.shape[-1]))
    _ask("gradient", a, out, batch, scale=1.0, band=Band())
    return {n: out[n if n in out else f"to {n}"].sum_to_size(s) for n, s in shapes.items()}


def statistics(
    arguments: Named,
    widths: Mapping[str, int],
    *,
    scale: float,
    band: Band,
    mass: float,
    start: Tensor | None,
    steps: int,
) -> Arguments | None:
    """Statistics of whole rows, each of its width; ``center`` are the keys from which moments are.

    If ``leading`` is asked for, Lanczos' method takes so many steps from `start`,
    ``(*batch, 1, d)``.
    """
    names = _MEASURE | {"marks", "center"}
    if {"value", "seed", "query_tag"} & arguments.keys() or arguments.keys() - names:
        return None
    if widths.get("largest", _KEPT) != _KEPT:
        return None
    key, center = arguments["key"], arguments["center"]
    centered = key.new_empty((*key.shape[:-1], key.shape[-1] + 1))  # keys, and their squares beside
    moved = torch.sub(key, center, out=centered[..., :-1])
    torch.sum(moved.square(), -1, out=centered[..., -1])
    given = {**arguments, "center": centered}
    if start is not None:
        given["start"] = start
    if (a := _taken(given)) is None or key.shape[-2] > _MOST_KEYS:
        return None
    batch, query = _batch(a), a["query"]
    if 0 in batch:
        return None
    out = {n: query.new_empty((*batch, query.shape[-2], width)) for n, width in widths.items()}
    _ask("statistics", a, out, batch, scale=scale, band=band, rate=mass, steps=steps)
    return out
