"""The questions of ``engines.py`` answered by Triton: tensors go in as addresses and strides.

Every function returns ``None`` where the kernels do not take the call. Results are float32, also
for half-precision inputs. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from cumulant.kernels.tiles import Arguments, Band, Named, Program
from cumulant.kernels.triton import sums
from cumulant.kernels.triton.blocks import Blocks
from cumulant.kernels.triton.recording import choose
from cumulant.kernels.triton.tile import Change, Measure, Moments, View, tile_of

__all__ = ["curvature", "forward", "gradient", "potential", "statistics", "takes_half", "tangent"]

takes_half = True
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)
_WIDEST = 256
_MOST_PAIRS = 2**31 - 2**16  # queries and keys are counted in int32
_MOST_MEMBERS = 65_535  # of the second and third dimension of a launch
_MOST_ROWS = 64  # of a tile
_FARTHEST = 2**31  # offsets inside a tile are counted in int32
_MEASURE = ("query", "key", "value", "bias", "mask", "seed", "cap")
_VALUES = ("value", "along value", "cotangent mean")
_VECTORS = ("query", "key", "along query", "along key", *_VALUES)  # of one dtype
_PAIRS = ("bias", "mask", "seed", "cap")
_COLUMNS = ("log_normalizer", "cotangent log_normalizer", "cotangent entropy")


def _taken(arguments: Named) -> Arguments | None:
    """The arguments with storage of their own, or ``None`` if the kernels cannot read some."""
    query, key = arguments["query"], arguments["key"]
    widths = [x.shape[-1] for n, x in arguments.items() if n in ("query", "key", "value")]
    if query.dtype not in _DTYPES or not all(w <= _WIDEST for w in widths):
        return None
    if max(query.shape[-2], key.shape[-2]) > _MOST_PAIRS:
        return None
    out: Arguments = {}
    for name, x in arguments.items():
        if name in _VALUES and x.shape[-1] == 0:
            continue  # nobody asks for a mean
        if type(x) not in _PLAIN or x.device != query.device or x.layout != torch.strided:
            return None
        if x.numel() == 0 or (name in _VECTORS and x.dtype != query.dtype):
            return None
        if _reach(name, x) >= _FARTHEST:
            return None
        zeros = x._is_zerotensor()
        out[name] = (
            torch.zeros(x.shape, dtype=x.dtype, device=x.device) if zeros else x.resolve_neg()
        )
    return out


def _reach(name: str, x: Tensor) -> int:
    """The farthest offset that kernels count in int32; those of pairs are int64."""
    if name.split(" ")[-1] in _PAIRS:
        return 0
    rows = x.shape[-2] if name in _COLUMNS else min(x.shape[-2], _MOST_ROWS)
    return (rows - 1) * x.stride(-2) + (x.shape[-1] - 1) * x.stride(-1)


def _batch(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip(*(x.shape[:-2] for x in tensors), strict=True))


def launch(
    kernel: str, grid: tuple[int, ...], given: Sequence[object], *, warps: int, stages: int
) -> None:
    """Run a kernel of ``sums.py`` on the GPU of its tensors; Triton would take the current one."""
    with _current(cast(Measure, given[0])):
        getattr(sums, kernel)[grid](*given, num_warps=warps, num_stages=stages)


def _current(z: Measure) -> AbstractContextManager[object]:
    device = cast(View, z.query).data.device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Call:
    """Tensors that broadcast to one batch of at most three dimensions, and where they lie."""

    def __init__(self, arguments: Named, results: Named, kernels: Sequence[str]) -> None:
        self.tensors = {n: x for n, x in {**arguments, **results}.items() if x.numel()}
        every = list(self.tensors.values())
        batch = _batch(every)
        strides = [
            [0 if n == 1 else s for n, s in zip(x.shape[:-2], x.stride(), strict=False)]
            for x in every
        ]
        sizes: list[int] = []
        kept: list[list[int]] = [[] for _ in every]
        for d, size in enumerate(batch):
            if size == 1:
                continue
            if sizes and all(k[-1] == s[d] * size for k, s in zip(kept, strides, strict=True)):
                sizes[-1] *= size  # the dimension before and this one are one
                for k, s in zip(kept, strides, strict=True):
                    k[-1] = s[d]
            else:
                sizes.append(size)
                for k, s in zip(kept, strides, strict=True):
                    k.append(s[d])
        missing = 3 - len(sizes)
        blocks = {n: self._blocks(n) for n in kernels}
        bias = blocks.get("to_bias")
        across = 0 if bias is None else -(-results["to bias"].shape[-1] // bias.columns)
        counts = max(math.prod(sizes), across)
        self.fits = None not in blocks.values() and missing >= 0 and counts <= _MOST_MEMBERS
        self.sizes = (*(1,) * missing, *sizes)
        self._strides = {n: (*(0,) * missing, *k) for n, k in zip(self.tensors, kept, strict=True)}

    def view(self, name: str) -> View | None:
        x = self.tensors.get(name)
        if x is None:
            return None
        last = (0 if n == 1 else s for n, s in zip(x.shape[-2:], x.stride()[-2:], strict=True))
        return View(x, *self._strides[name], *last)

    def measure(self, scale: float, band: Band, rate: float) -> Measure:
        m, n = self.tensors["query"].shape[-2], self.tensors["key"].shape[-2]
        return Measure(
            tile=None,
            query=self.view("query"),
            key=self.view("key"),
            bias=self.view("bias"),
            mask=self.view("mask"),
            seed=self.view("seed"),
            cap=self.view("cap"),
            queries=m,
            keys=n,
            second=self.sizes[1],
            third=self.sizes[2],
            scale=float(scale),
            lower=None if band.lower is None else max(-m - n, band.lower),
            upper=None if band.upper is None else min(m + n, band.upper),
            limit=int((rate - 0.5) * 2**32),
            lift=1 / (1 - rate) if rate < 1 else 1.0,
        )

    def _widths(self) -> tuple[int, int]:
        value = self.tensors.get("value")
        return self.tensors["query"].shape[-1], 16 if value is None else value.shape[-1]

    def _blocks(self, kernel: str) -> Blocks | None:
        query, pairs = self.tensors["query"], not self.tensors.keys().isdisjoint(_PAIRS)
        return choose(kernel, max(self._widths()), query.dtype, query.device, pairs=pairs)

    def blocks(self, kernel: str) -> Blocks:
        if (found := self._blocks(kernel)) is None:
            raise LookupError(f"no tile was found for {kernel}, which the call did not name")
        return found

    def _launch(
        self, kernel: str, b: Blocks, grid: tuple[int, ...], z: Measure, *given: object
    ) -> None:
        z = z._replace(tile=tile_of(b, *self._widths()))
        launch(kernel, grid, (z, *given), warps=b.warps, stages=b.stages)

    def by_rows(self, kernel: str, z: Measure, *given: object) -> None:
        """Run a kernel for every block of queries of every member."""
        b = self.blocks(kernel)
        self._launch(kernel, b, (-(-z.queries // b.rows), math.prod(self.sizes)), z, *given)

    def by_units(
        self,
        kernel: str,
        z: Measure,
        change: Change,
        results: Mapping[str, View | None],
        *more: bool,
    ) -> None:
        """Run a kernel for every unit of members: those that share all its results."""
        b = self.blocks(kernel)
        strides = [self._strides[n] for n, x in results.items() if x is not None]
        own = [n if any(s[d] for s in strides) else 1 for d, n in enumerate(self.sizes)]
        n = (*own, *(size // u for size, u in zip(self.sizes, own, strict=True)))
        rows, columns = -(-z.queries // b.rows), -(-z.keys // b.columns)
        grid = (columns, math.prod(own))
        if more:  # the bias: blocks of queries and of keys, unless it has them in common
            by_query, by_key = more
            grid = (rows if by_query else 1, math.prod(own), columns if by_key else 1)
        self._launch(kernel, b, grid, z, change, n, *results.values(), *more)


def forward(
    arguments: Named, *, scale: float, band: Band, rate: float, fields: tuple[str, ...]
) -> Arguments | None:
    """Mean and G, and of entropy, score mean, variance, maximum and its key those in `fields`."""
    if arguments.keys() - set(_MEASURE) or (a := _taken(arguments)) is None:
        return None
    rows = (*_batch(list(a.values())), a["query"].shape[-2])
    out = {n: _new(a, (*rows, 1)) for n in ("log_normalizer", *fields)}
    if {"score_mean", "score_variance"} & out.keys():
        out |= {n: _new(a, (*rows, 1)) for n in ("score_mean", "score_variance")}
    if "value" in arguments:
        out["mean"] = _new(a, (*rows, arguments["value"].shape[-1]))
    call = _Call(a, {f"result {n}": x for n, x in out.items()}, ("forward",))
    if not call.fits:
        return None
    to = Moments(**{n: call.view(f"result {n}") for n in Moments._fields})
    call.by_rows("forward", call.measure(scale, band, rate), call.view("value"), to)
    return out


def _new(a: Named, shape: tuple[int, ...]) -> Tensor:
    return a["query"].new_empty(shape, dtype=torch.float32)


_ALONG = ("query", "key", "value", "bias")


def _program(program: Program, arguments: Named, prefix: str) -> Arguments | None:
    """The arguments of a program over whole rows; directions as "along name"."""
    given = {
        n.replace(prefix, "along", 1) if n.startswith(f"{prefix} ") else n: x
        for n, x in arguments.items()
        if n not in ("mean", "entropy")
    }
    names = {*_MEASURE, *_COLUMNS, "cotangent mean", *(f"along {n}" for n in _ALONG)}
    if not program.whole_rows or "log_normalizer" not in given or given.keys() - names:
        return None
    return _taken(given)


def _change(call: _Call) -> Change:
    """What is told beside the measure."""
    views = {f"along_{n}": call.view(f"along {n}") for n in _ALONG}
    views |= {n: call.view(f"row {n}") for n in ("inverse", "tilt", "mid", "excess")}
    return Change(
        value=call.view("value"),
        known=call.view("log_normalizer"),
        seed_mean=call.view("cotangent mean"),
        seed_normalizer=call.view("cotangent log_normalizer"),
        seed_entropy=call.view("cotangent entropy"),
        **views,
    )


def _moves(a: Named) -> bool:
    return any(f"along {n}" in a for n in ("query", "key", "bias"))


def _sums(a: Named, batch: tuple[int, ...], names: Sequence[str]) -> Arguments:
    return {f"row {n}": _new(a, (*batch, a["query"].shape[-2], 1)) for n in names}


def _rows(call: _Call, z: Measure) -> None:
    """The sums of whole rows, written where `call` has them."""
    blank = {"inverse": None, "tilt": None, "mid": None, "excess": None}
    made = (call.view(f"row {n}") for n in ("inverse", "tilt", "mid"))
    call.by_rows("rows", z, _change(call)._replace(**blank), *made)


def tangent(program: Program, arguments: Named, *, scale: float, rate: float) -> Arguments | None:
    """Tangents of (mean, G, entropy)."""
    a = _program(program, arguments, "tangent")
    if a is None:
        return None
    batch = _batch(list(a.values()))
    if any(r.shape[:-2] != batch for r in program.results):
        return None
    out = {r.name: _new(a, r.shape) for r in program.results}
    made = _sums(a, batch, ("inverse", "tilt") if _moves(a) else ("inverse",))
    results = {f"result {n}": x for n, x in out.items()}
    call = _Call({**a, **made}, results, ("rows", "means"))
    if not call.fits:
        return None
    z = call.measure(scale, program.band, rate)
    _rows(call, z)
    views = (call.view(f"result {n}") for n in ("mean", "entropy"))
    call.by_rows("means", z, _change(call), *views, None)
    if "log_normalizer" in out:
        out["log_normalizer"] = made["row tilt"] if _moves(a) else out["log_normalizer"].zero_()
    return out


def _blank(a: Named, program: Program, batch: tuple[int, ...]) -> Arguments:
    """Room for the results: per query in full; keys and values are summed for the same units."""
    shapes = {r.name: r.shape[:-2] for r in program.results}
    keys = [shapes[n] for n in ("key", "value") if n in shapes]
    units = tuple(map(max, *keys)) if len(keys) == 2 else (*keys, ())[0]
    room = {"key": units, "value": units, "bias": shapes.get("bias", ())}
    return {
        f"to {r.name}": _new(a, (*room.get(r.name, batch), *r.shape[-2:])) for r in program.results
    }


def _kernels(out: Named) -> list[str]:
    """Those that `_pull` runs for these results."""
    by = {
        "to query": "to_queries",
        "to key": "to_keys",
        "to value": "to_keys",
        "to bias": "to_bias",
    }
    return [by[n] for n in out if n in by]


def _pull(call: _Call, z: Measure, out: Named) -> None:
    """Gradients in queries, keys, values and bias, once the sums of rows are known."""
    change = _change(call)
    if "to query" in call.tensors:
        call.by_rows("to_queries", z, change, call.view("to query"))
    keys = {n: call.view(n) for n in ("to key", "to value")}
    if any(keys.values()):
        call.by_units("to_keys", z, change, keys)
    if "to bias" in call.tensors:
        by_query, by_key = (n > 1 for n in out["to bias"].shape[-2:])
        bias = {"to bias": call.view("to bias")}
        call.by_units("to_bias", z, change, bias, by_query, by_key)


def _summed(program: Program, out: Named) -> Arguments:
    return {r.name: out[f"to {r.name}"].sum_to_size(r.shape) for r in program.results}


def gradient(program: Program, arguments: Named, *, scale: float, rate: float) -> Arguments | None:
    """Gradients of (mean, G, entropy) for their cotangents."""
    a = _program(program, arguments, "tangent")
    if a is None:
        return None
    return _gradient(a, program, scale=scale, rate=rate)


def _full(a: Named, program: Program) -> tuple[int, ...]:
    every = [*(x.shape[:-2] for x in a.values()), *(r.shape[:-2] for r in program.results)]
    return tuple(max(sizes) for sizes in zip(*every, strict=True))


def _gradient(a: Named, program: Program, *, scale: float, rate: float) -> Arguments | None:
    batch = _full(a, program)
    weighs = "cotangent mean" in a or "cotangent entropy" in a
    made = _sums(a, batch, ("inverse", "mid") if weighs else ("inverse",))
    out = _blank(a, program, batch)
    call = _Call({**a, **made}, out, ("rows", *_kernels(out)))
    if not call.fits:
        return None
    z = call.measure(scale, program.band, rate)
    _rows(call, z)
    _pull(call, z, out)
    return _summed(program, out)


def curvature(program: Program, arguments: Named, *, scale: float, rate: float) -> Arguments | None:
    """The gradient of <cotangents, J directions>, plus J' moved."""
    moved = {n.replace("moved", "cotangent", 1): x for n, x in arguments.items() if "moved" in n}
    rest = {n: x for n, x in arguments.items() if "moved" not in n}
    if "cap" in rest or (a := _program(program, rest, "second")) is None:
        return None
    parts: list[Arguments | None] = []
    if any(n.startswith("along ") for n in a):
        parts.append(_curvature(a, program, scale=scale, rate=rate))
    if moved:
        results = tuple(r for r in program.results if r.name in _ALONG)
        still = {n: a[n] for n in a if n in (*_MEASURE, "log_normalizer")}
        given = _taken({**still, **moved})
        here = replace(program, results=results)
        parts.append(given and _gradient(given, here, scale=scale, rate=rate))
    if any(part is None for part in parts):
        return None
    out = {r.name: _new(a, r.shape).zero_() for r in program.results}
    for part in parts:
        for name, x in (part or {}).items():
            out[name] += x
    return out


def _curvature(a: Named, program: Program, *, scale: float, rate: float) -> Arguments | None:
    batch, moves = _full(a, program), _moves(a)
    sums_of = ("inverse", "tilt", "mid", "excess") if moves else ("inverse", "mid", "excess")
    if "cotangent mean" not in a:
        sums_of = tuple(n for n in sums_of if n != "mid")
    made = _sums(a, batch, sums_of)
    out = _blank(a, program, batch)
    call = _Call({**a, **made}, out, ("rows", "means", *_kernels(out)))
    if not call.fits:
        return None
    z = call.measure(scale, program.band, rate)
    _rows(call, z)
    change = _change(call)
    given = (call.view("to cotangent mean"), None, change.excess)
    call.by_rows("means", z, change._replace(excess=None), *given)
    _pull(call, z, out)
    if "to cotangent log_normalizer" in out:
        level = made["row tilt"] if moves else out["to cotangent log_normalizer"].zero_()
        out["to cotangent log_normalizer"] = level
    if "to value" in out and "cotangent mean" not in a:
        out["to value"].zero_()
    return _summed(program, out)


def potential(arguments: Named, shapes: Mapping[str, tuple[int, ...]]) -> Arguments | None:
    """Not taken: losses go to the torch tiles."""
    return None


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
    """Not taken: row statistics go to the torch tiles."""
    return None
