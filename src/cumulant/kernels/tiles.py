"""Sums over tiles of a query-by-key grid, closed under differentiation.

Given the log-normalizer G, everything attention computes is a sum over pairs (i, j) of a query
and a key with p_ij = exp(s_ij - G_i): expectations sum over j, gradients of the keys sum over i,
gradients of a shared bias sum over whatever the bias was broadcast along. Such a sum can be taken
tile by tile, so no M x N array is ever stored. And the derivative of a sum over tiles is the sum
over tiles of the derivative: differentiating a :class:`Program` gives another program. That one
rule is why every derivative, of any order, forward or reverse, needs memory linear in M + N.

Shape legend: every tensor here is ``(*batch, rows, columns)`` with the same number of batch
dimensions; a size-1 dimension broadcasts. The *index* of a tensor says which dimensions run over
queries and keys:

    "i"   (*batch, M, features)      one row per query
    "j"   (*batch, N, features)      one row per key
    "ij"  (*batch, M or 1, N or 1)   one entry per pair
    ""    (*batch, 1, 1)             one entry per measure
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cumulant.core.calling import Function
from cumulant.core.eager import eager
from cumulant.core.errors import InputError
from cumulant.core.precision import without_autocast
from cumulant.core.typed import functions, functorch
from cumulant.kernels.band import Band
from cumulant.kernels.ring import Ring
from cumulant.kernels.workspace import Workspace

__all__ = ["Band", "Program", "Tile", "evaluate", "iterate", "tile_sum", "walk"]

Named = Mapping[str, Tensor]
Arguments = dict[str, Tensor]

_LEGACY = (
    "torch.autograd.grad(..., is_grads_batched=True) and jacobian(..., vectorize=True) use an "
    "older vmap, which custom functions do not support; use torch.func.vmap, jacrev or jacfwd."
)


@dataclass(frozen=True)
class Tile:
    """The position of a tile: a slice of the batch, a range of queries, a range of keys.

    `whole` means that the range holds every key that these queries see.
    """

    batch: tuple[slice, ...]
    rows: range
    columns: range
    band: Band
    work: Workspace
    whole: bool = False

    def slices(self, index: str, tensor: Tensor) -> tuple[slice, ...]:
        """The part of `tensor` that this tile touches; broadcast dimensions stay whole."""
        rows = slice(self.rows.start, self.rows.stop) if "i" in index else _WHOLE
        columns = slice(self.columns.start, self.columns.stop) if "j" in index else _WHOLE
        last = (rows, columns) if index == "ij" else (columns if index == "j" else rows, _WHOLE)
        return tuple(
            [
                _WHOLE if size == 1 else part
                for part, size in zip((*self.batch, *last), tensor.shape, strict=True)
            ]
        )

    def cut(self, index: str, tensor: Tensor) -> Tensor:
        """The tile's part of `tensor`, with the batch expanded to the tile's own.

        Expanding makes every contribution carry the tile's full batch, so that summing it down
        to the shape of a broadcast argument counts each member of the batch once.
        """
        part = tensor[self.slices(index, tensor)]
        batch = tuple([piece.stop - piece.start for piece in self.batch])
        return part if part.shape[:-2] == batch else part.expand(*batch, *part.shape[-2:])


_WHOLE = slice(None)


class Product(NamedTuple):
    """A contribution left @ right that need not be materialized before it is added."""

    left: Tensor
    right: Tensor

    def add_to(self, target: Tensor) -> None:
        batch = self.left.shape[:-2]
        if target.shape[:-2] == batch and target.is_contiguous():
            left, right = (x.reshape(math.prod(batch), *x.shape[-2:]) for x in self)
            target.view(math.prod(batch), *target.shape[-2:]).baddbmm_(left, right)
        else:
            target += (self.left @ self.right).sum_to_size(target.shape)


TileFunction = Callable[[Tile, Arguments], Arguments]
AddingFunction = Callable[[Tile, Arguments], Mapping[str, Tensor | Product]]
Shortcut = Callable[["Program", Named], Arguments | None]


@dataclass(frozen=True)
class Result:
    """A result of a program: its name, its index and its full shape."""

    name: str
    index: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A function of one tile, and how its arguments and results are indexed.

    `function` maps the tile's arguments to contributions, already summed over the tile's own
    queries (index "j"), keys ("i") or neither ("ij"), in operations that torch.func differentiates.
    `whole_rows` asks for tiles that span all keys. `fixed` names arguments that change only the
    rounding, such as a shift of a row's scores: they have no derivative. `run`, `pull` and `push`
    are shortcuts for the value, the vector-Jacobian and the Jacobian-vector product; they return
    ``None`` when they do not apply. With a `ring` the keys are this rank's, the sum is over all.
    """

    function: AddingFunction
    indices: Mapping[str, str]
    results: tuple[Result, ...]
    grid: tuple[int, int]
    band: Band = Band()
    area: int = 2**20
    whole_rows: bool = False
    fixed: frozenset[str] = frozenset()
    run: Shortcut | None = None
    pull: Callable[[Program, Named, Named, Sequence[str]], Arguments | None] | None = None
    push: Callable[[Program, Named, Named], Arguments | None] | None = None
    ring: Ring | None = None


# Longest side of a tile in keys, where there are queries enough to fill it.
SIDE = 1024

# On a GPU a tile costs its launches and no cache: so many times the pairs.
_LARGER = 16


def _pieces(size: int, length: int) -> list[range]:
    """Split `size` into nearly equal ranges no longer than `length`."""
    count = max(1, -(-size // max(1, length)))
    edges = [size * n // count for n in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def iterate(
    batch: Sequence[int], grid: tuple[int, int], area: int, *, whole_rows: bool = False
) -> Iterator[tuple[tuple[slice, ...], range, list[range]]]:
    """Yield (batch slices, query range, key ranges) that cover the grid.

    A tile holds about `area` pairs and is close to square, which keeps the first matrix product
    efficient on CPUs; many small grids of a batch share one tile.
    """
    m, n = grid
    columns = [range(n)] if whole_rows else _pieces(n, max(SIDE, area // max(1, m)))
    height = max(1, area // max(1, len(columns[0])))
    if whole_rows:  # fewer rows starve the matrix products; four areas are the limit
        height = max(height, min(160, 4 * area // max(1, n)))
    rows = _pieces(m, height)
    room = max(1, area // max(1, len(rows[0]) * len(columns[0])))
    cuts: list[list[range]] = []
    for size in reversed(batch):
        cuts.append(_pieces(size, room))
        room = max(1, room // max(1, size))
    for parts in itertools.product(*reversed(cuts)):
        slices = tuple(slice(p.start, p.stop) for p in parts)
        for piece in rows:
            yield slices, piece, columns


def walk(
    arguments: Named,
    indices: Mapping[str, str],
    grid: tuple[int, int],
    band: Band,
    work: Workspace,
    *,
    area: int = 2**20,
    whole_rows: bool = False,
) -> Iterator[tuple[tuple[slice, ...], Iterator[tuple[Tile, Arguments]]]]:
    """For each strip of queries its place, and its tiles with the arguments cut to them."""
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    if 0 in (*batch, *grid):
        return
    if next(iter(arguments.values())).device.type != "cpu":
        area *= _LARGER

    def tiles(
        slices: tuple[slice, ...], rows: range, columns: list[range]
    ) -> Iterator[tuple[Tile, Arguments]]:
        for piece in [band.reach(rows, grid[1])] if whole_rows else columns:
            if piece and not band.excludes(rows, piece):
                tile = Tile(slices, rows, piece, band, work, whole_rows)
                work.begin()
                yield tile, {name: tile.cut(indices[name], x) for name, x in arguments.items()}

    for slices, rows, columns in iterate(batch, grid, area, whole_rows=whole_rows):
        yield (*slices, slice(rows.start, rows.stop)), tiles(slices, rows, columns)


def evaluate(program: Program, arguments: Named) -> Arguments:
    """Add up the program's contributions over all tiles (no gradient is recorded)."""
    if program.ring is not None:
        return _around(program, program.ring, arguments)
    done = program.run(program, arguments) if program.run else None
    if done is not None:
        return done
    some = next(x for x in arguments.values() if x.is_floating_point())
    totals = {r.name: some.new_zeros(r.shape) for r in program.results}
    where = arguments, program.indices, program.grid, program.band
    with Workspace.lease(some) as work:
        for _, tiles in walk(*where, work, area=program.area, whole_rows=program.whole_rows):
            for tile, cut in tiles:
                parts = program.function(tile, cut)
                for result in program.results:
                    total = totals[result.name]
                    target = total[tile.slices(result.index, total)]
                    part: Tensor | Product = parts[result.name]
                    if isinstance(part, Product):
                        part.add_to(target)
                        continue
                    target += part if part.shape == target.shape else part.sum_to_size(target.shape)
    return totals


def _around(program: Program, ring: Ring, arguments: Named) -> Arguments:
    """The sum with keys spread over ranks: block by block, key sums following their block."""
    moves = {name: "j" in program.indices[name] for name in arguments}
    still = {name: x for name, x in arguments.items() if not moves[name]}
    totals: Arguments = {}
    behind: Arguments = {}
    moving = {name: x for name, x in arguments.items() if moves[name]}
    blocks = ring.blocks(moving, still.get("origin"))
    for step, block in enumerate(blocks):
        here = replace(
            program,
            ring=None,
            grid=(program.grid[0], block.keys),
            band=program.band.shifted(block.before - ring.queries_before),
            results=tuple(
                replace(r, shape=(*r.shape[:-2], block.keys, r.shape[-1])) if "j" in r.index else r
                for r in program.results
            ),
        )
        made = evaluate(here, {**still, **block.arguments})
        for result in program.results:
            if "j" not in result.index:
                old = totals.get(result.name)
                totals[result.name] = made[result.name] if old is None else old + made[result.name]
        sums = {r.name: made[r.name] for r in program.results if "j" in r.index}
        if sums:
            behind = ring.follow({n: x + behind[n] if step else x for n, x in sums.items()}, step)
    return totals | behind


def _vjp(
    function: Callable[..., tuple[Tensor, ...]], *primals: Tensor
) -> tuple[tuple[Tensor, ...], Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]:
    return cast(Any, torch.func.vjp(function, *primals))


def _fresh(prefix: str, names: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """New names for `names`, so that derivatives of derivatives never share an argument."""
    used = set(taken)
    out: dict[str, str] = {}
    for name in names:
        new = f"{prefix} {name}"
        while new in used:
            new += "'"
        out[name] = new
        used.add(new)
    return out


def _pullback(
    program: Program, arguments: Named, cotangents: Named, wanted: Sequence[str]
) -> Arguments:
    """The vector-Jacobian product of a sum over tiles: again a sum over tiles."""
    names = _fresh("cotangent", cotangents, arguments)

    def function(tile: Tile, given: Arguments) -> Arguments:
        tile = replace(tile, work=Workspace(reuse=False))
        fixed = {name: given[name] for name in arguments if name not in wanted}

        def partial(*values: Tensor) -> tuple[Tensor, ...]:
            out = program.function(tile, fixed | dict(zip(wanted, values, strict=True)))
            return tuple(cast(Tensor, out[name]) for name in cotangents)

        value, pull = _vjp(partial, *(given[name] for name in wanted))
        seeds = tuple(given[names[n]].expand_as(v) for n, v in zip(cotangents, value, strict=True))
        return dict(zip(wanted, pull(seeds), strict=True))

    index_of = {r.name: r.index for r in program.results}
    pulled = replace(
        program,
        function=function,
        indices={**program.indices, **{names[n]: index_of[n] for n in cotangents}},
        results=tuple(Result(n, program.indices[n], tuple(arguments[n].shape)) for n in wanted),
        area=min(program.area, 2**18),
        run=None,
        pull=None,
        push=None,
    )
    return tile_sum(pulled, {**arguments, **{names[n]: c for n, c in cotangents.items()}})


def _pushforward(program: Program, arguments: Named, tangents: Named) -> Arguments:
    """The Jacobian-vector product of a sum over tiles: again a sum over tiles.

    The tile's Jacobian is transposed twice instead of using forward mode, because torch allows
    only one level of plain dual numbers and the caller may already be inside it.
    """
    names = _fresh("tangent", tangents, arguments)
    outputs = [r.name for r in program.results]

    def function(tile: Tile, given: Arguments) -> Arguments:
        tile = replace(tile, work=Workspace(reuse=False))
        fixed = {name: given[name] for name in arguments if name not in tangents}

        def partial(*values: Tensor) -> tuple[Tensor, ...]:
            out = program.function(tile, fixed | dict(zip(tangents, values, strict=True)))
            return tuple(cast(Tensor, out[name]) for name in outputs)

        value, pull = _vjp(partial, *(given[name] for name in tangents))
        zeros = tuple(torch.zeros_like(v) for v in value)
        _, push = _vjp(lambda *seeds: pull(seeds), *zeros)
        pushed = push(tuple(given[names[name]] for name in tangents))
        return dict(zip(outputs, pushed, strict=True))

    pushed = replace(
        program,
        function=function,
        indices={**program.indices, **{names[n]: program.indices[n] for n in tangents}},
        area=min(program.area, 2**18),
        run=None,
        pull=None,
        push=None,
    )
    return tile_sum(pushed, {**arguments, **{names[n]: t for n, t in tangents.items()}})


class _TileSum(Function):
    """``tile_sum`` as an autograd Function whose derivatives are again ``tile_sum``."""

    @staticmethod
    def forward(program: Program, names: tuple[str, ...], *tensors: Tensor) -> Any:
        if any(map(functorch.is_legacy_batchedtensor, tensors)):  # torch may crash on what follows
            raise InputError(_LEGACY)
        arguments = dict(zip(names, tensors, strict=True))
        with without_autocast(tensors[0]):
            hides = removes_keys(arguments, program.band)
            if hides and tensors[0].device.type != "cpu":  # asking first would stall the device
                arguments, hides = _without_garbage(program, arguments), False
            out = evaluate(program, arguments)
            if hides:
                spoiled = has_nan(out.values())
                if program.ring.somewhere(spoiled) if program.ring else spoiled:
                    cleaned = _without_garbage(program, arguments)
                    out = evaluate(replace(program, run=None), cleaned)
        return tuple(out[r.name] for r in program.results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        program, names, *tensors = inputs
        ctx.program, ctx.names = program, names
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        program: Program = ctx.program
        arguments = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        cotangents = {
            r.name: g for r, g in zip(program.results, grads, strict=True) if g is not None
        }
        wanted = [
            name
            for name, needed in zip(ctx.names, ctx.needs_input_grad[2:], strict=True)
            if needed and name not in program.fixed and arguments[name].is_floating_point()
        ]
        if not cotangents or not wanted:
            return (None,) * (2 + len(ctx.names))
        out = program.pull(program, arguments, cotangents, wanted) if program.pull else None
        if out is None:
            out = _pullback(program, arguments, cotangents, wanted)
        return None, None, *(out.get(name) for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        program: Program = ctx.program
        arguments = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        given = zip(ctx.names, grads[2:], strict=True)
        tangents = {n: t for n, t in given if t is not None and n not in program.fixed}
        out = program.push(program, arguments, tangents) if program.push else None
        if out is None:
            out = _pushforward(program, arguments, tangents)
        return tuple(out[r.name] for r in program.results)

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any,
        in_dims: tuple[int | None, ...],
        program: Program,
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> Any:
        lifted = replace(
            program,
            results=tuple(replace(r, shape=(info.batch_size, *r.shape)) for r in program.results),
        )
        moved = batch_first(tensors, in_dims[2:])
        out = _TileSum.apply(lifted, names, *moved)
        return out, (0,) * len(out)


def removes_keys(arguments: Named, band: Band) -> bool:
    """Whether some key may be hidden from some query."""
    return any(n in arguments for n in ("mask", "bias", "query_tag")) or not band.open


def has_nan(tensors: Iterable[Tensor]) -> bool:
    """Whether any entry is NaN, from a sum in one pass."""
    return any(math.isnan(x.sum()) for x in tensors)


def _without_garbage(program: Program, arguments: Named) -> Arguments:
    """Zeros where a key or a value is NaN or infinite, in it and in its tangents and cotangents.

    A hidden key has weight zero, and 0 * NaN would corrupt sums that it does not belong to. For a
    query that does see such a key NaN still propagates: its G or mean is already NaN.
    """

    def cleaned(name: str, x: Tensor) -> Tensor:
        source = arguments.get("value" if "value" in name else "key")
        if program.indices[name] != "j" or source is None or x.shape[-1] != source.shape[-1]:
            return x  # not a row of key or value: a tag, a column's normalizer
        return torch.where(source.isfinite(), x, 0.0)

    return {name: cleaned(name, x) for name, x in arguments.items()}


def batch_first(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Give every tensor a new leading batch dimension: its vmapped one, or size 1."""
    return [
        x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, dims, strict=True)
    ]


@eager
def tile_sum(program: Program, arguments: Named) -> Arguments:
    """Sum a program over all tiles: differentiable to any order, memory linear in M + N."""
    out = _TileSum.apply(program, tuple(arguments), *arguments.values())
    return {r.name: x for r, x in zip(program.results, out, strict=True)}
