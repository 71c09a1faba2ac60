# What runs on the device is typed by Triton, not by Python; nor need Triton be installed.
# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""What every kernel does on one tile: scores, the direction's, dropout; as ``native/scores.hpp``.

A tensor is a :class:`View`: an address and strides, 0 where it broadcasts; what a call does not
have is ``None``, and the branches on it are decided when a kernel is compiled. Numbers are float32
whatever the inputs are. `z` is the measure, `b` the member of the batch, `i0` and `j0` the first
query and key of the tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from cumulant.kernels.triton.blocks import Blocks, padded

__all__ = [
    "Change",
    "Measure",
    "Moments",
    "Tile",
    "View",
    "column",
    "direction",
    "first_query",
    "kept",
    "key_rows",
    "keys_of",
    "lines",
    "nothing",
    "place",
    "product",
    "queries_of",
    "query_rows",
    "scores",
    "store_column",
    "store_rows",
    "tile_of",
]


class View(NamedTuple):
    """A tensor of three batch dimensions, rows and columns."""

    data: Any
    first: int
    second: int
    third: int
    row: int
    column: int


class Tile(NamedTuple):
    """What a kernel is compiled for.

    Features of queries and values, and the same padded to powers of two; queries and keys of a
    tile; how many features a product <q, k> takes at a time, since wide rows do not fit the
    registers; and how float32 is multiplied.
    """

    D: tl.constexpr
    E: tl.constexpr
    WIDE: tl.constexpr
    VALUES: tl.constexpr
    ROWS: tl.constexpr
    COLUMNS: tl.constexpr
    CHUNK: tl.constexpr
    PRECISION: tl.constexpr


def tile_of(b: Blocks, features: int, values: int) -> Tile:
    """The tile of these blocks for so many features of queries and of values."""
    wide, padded_values = padded(features), padded(values)
    sizes = (features, values, wide, padded_values, b.rows, b.columns, b.chunk, b.precision)
    return Tile(*(tl.constexpr(x) for x in sizes))


class Measure(NamedTuple):
    """The measure, as in ``attention.py``; a side of the band is ``None`` where it is open.

    `second` and `third` are sizes of the batch; with dropout a hash from `limit` on keeps a
    weight, times `lift`.
    """

    tile: Tile | None

    query: View | None
    key: View | None
    bias: View | None
    mask: View | None
    seed: View | None
    cap: View | None
    queries: int
    keys: int
    second: int
    third: int
    scale: float
    lower: int | None
    upper: int | None
    limit: int
    lift: float


class Change(NamedTuple):
    """What a derivative is told beside the measure.

    The values, G as a reference; a direction; cotangents; sums of whole rows: 1 / sum p, E[t],
    E[w], E[e].
    """

    value: View | None = None
    known: View | None = None
    along_query: View | None = None
    along_key: View | None = None
    along_value: View | None = None
    along_bias: View | None = None
    seed_mean: View | None = None
    seed_normalizer: View | None = None
    seed_entropy: View | None = None
    inverse: View | None = None
    tilt: View | None = None
    mid: View | None = None
    excess: View | None = None


class Moments(NamedTuple):
    """What the forward pass is asked for."""

    mean: View | None
    log_normalizer: View | None
    entropy: View | None
    score_mean: View | None
    score_variance: View | None
    score_max: View | None
    top: View | None


@triton.jit
def first_query(z):
    """(b, i0) of a program that takes one block of queries of one member."""
    number = tl.program_id(1).to(tl.int64)
    b = number // (z.second * z.third), number // z.third % z.second, number % z.third
    return b, tl.program_id(0) * z.tile.ROWS


@triton.jit
def place(x, b):
    """Where the part of one member begins."""
    return x.data + b[0] * x.first + b[1] * x.second + b[2] * x.third


@triton.jit
def load_rows(
    x, b, first, count, left, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """x[first + .][left + .], zeros past the last row and column."""
    r, c = tl.arange(0, ROWS)[:, None], left + tl.arange(0, COLUMNS)[None, :]
    at = place(x, b) + tl.cast(first, tl.int64) * x.row + (r * x.row + c * x.column)
    return tl.load(at, mask=(first + r < count) & (c < WIDTH), other=0.0)


@triton.jit
def query_rows(z, x, b, i0, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a tensor that has one for each query."""
    return load_rows(x, b, i0, z.queries, 0, WIDTH, z.tile.ROWS, PADDED)


@triton.jit
def key_rows(z, x, b, j0, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a tensor that has one for each key."""
    return load_rows(x, b, j0, z.keys, 0, WIDTH, z.tile.COLUMNS, PADDED)


@triton.jit
def store_rows(x, b, first, count, value, WIDTH: tl.constexpr):
    """x[first + .][.] = value, up to the last row and column."""
    r = tl.arange(0, value.shape[0])[:, None]
    c = tl.arange(0, value.shape[1])[None, :]
    at = place(x, b) + tl.cast(first, tl.int64) * x.row + (r * x.row + c * x.column)
    tl.store(at, value, mask=(first + r < count) & (c < WIDTH))


@triton.jit
def lines(z, i0, j0):
    """The numbers of the tile's queries, as a column, and of its keys, as a row."""
    return i0 + tl.arange(0, z.tile.ROWS)[:, None], j0 + tl.arange(0, z.tile.COLUMNS)[None, :]


@triton.jit
def column(z, x, b, i0):
    """One number per query; zeros if there is no such tensor."""
    i = i0 + tl.arange(0, z.tile.ROWS)
    out = tl.zeros([z.tile.ROWS], tl.float32)
    if x is not None:
        out = tl.load(place(x, b) + i * x.row, mask=i < z.queries, other=0.0).to(tl.float32)
    return out


@triton.jit
def store_column(z, x, b, i0, value):
    """One number per query, where somebody wants it."""
    if x is not None:
        i = i0 + tl.arange(0, z.tile.ROWS)
        tl.store(place(x, b) + i * x.row, value, mask=i < z.queries)


@triton.jit
def keys_of(z, i0):
    """The keys that some of these queries may meet, from a tile's beginning on."""
    start, stop = 0, z.keys
    if z.lower is not None:
        start = tl.maximum(0, i0 + z.lower) // z.tile.COLUMNS * z.tile.COLUMNS
    if z.upper is not None:
        stop = tl.minimum(z.keys, i0 + z.upper + z.tile.ROWS)
    return start, stop


@triton.jit
def queries_of(z, j0):
    """The queries that may meet some of these keys, from a tile's beginning on."""
    start, stop = 0, z.queries
    if z.upper is not None:
        start = tl.maximum(0, j0 - z.upper) // z.tile.ROWS * z.tile.ROWS
    if z.lower is not None:
        stop = tl.minimum(z.queries, j0 - z.lower + z.tile.COLUMNS)
    return start, stop


@triton.jit
def product(z, b, x, i0, y, j0, acc, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """acc + <x_i, y_j>: rows of queries with rows of keys, a chunk of features at a time.

    If one chunk is the whole row, the loop disappears and x is loaded once for all keys.
    """
    CHUNK: tl.constexpr = min(z.tile.CHUNK, PADDED)
    for left in range(0, PADDED, CHUNK):
        X = load_rows(x, b, i0, z.queries, left, WIDTH, z.tile.ROWS, CHUNK)
        Y = load_rows(y, b, j0, z.keys, left, WIDTH, z.tile.COLUMNS, CHUNK)
        acc = tl.dot(X, tl.trans(Y), acc, input_precision=z.tile.PRECISION)
    return acc


@triton.jit
def nothing(z):
    """Zeros for every pair of the tile."""
    return tl.zeros([z.tile.ROWS, z.tile.COLUMNS], tl.float32)


@triton.jit
def hyperbolic_tangent(x):
    """The series where the exponential would lose digits."""
    y = tl.abs(x)
    q = x * x
    near = x * (1 - q * (1 / 3 - q * (2 / 15 - q * (17 / 315))))
    far = 1 - 2 / (tl.exp(2 * y) + 1)
    return tl.where(y < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def scores(z, b, i0, j0):
    """(s, plain, slope): s = scale <q, k>, capped, plus the bias, -inf where a pair may not meet.

    `plain` are the scores before bias and masks, `slope` is the derivative of the cap.
    """
    plain = product(z, b, z.query, i0, z.key, j0, nothing(z), z.tile.D, z.tile.WIDE) * z.scale
    slope = 1.0
    if z.cap is not None:
        cap = tl.load(place(z.cap, b)).to(tl.float32)
        u = hyperbolic_tangent(plain / cap)
        plain, slope = u * cap, 1 - u * u
    i, j = lines(z, i0, j0)
    seen = (i < z.queries) & (j < z.keys)
    s = plain
    if z.bias is not None:
        x = load_pairs(z, z.bias, b, i0, j0).to(tl.float32)
        s = tl.where(x == -float("inf"), -float("inf"), s + x)  # -inf hides NaN as well
    if z.mask is not None:
        seen = seen & (load_pairs(z, z.mask, b, i0, j0) != 0)
    if z.upper is not None:
        seen = seen & (j - i <= z.upper)
    if z.lower is not None:
        seen = seen & (j - i >= z.lower)
    return tl.where(seen, s, -float("inf")), plain, slope


@triton.jit
def load_pairs(z, x, b, i0, j0):
    i, j = lines(z, i0, j0)
    at = place(x, b) + (i.to(tl.int64) * x.row + j.to(tl.int64) * x.column)
    return tl.load(at, mask=(i < z.queries) & (j < z.keys), other=0)


@triton.jit
def direction(z, b, a, i0, j0, slope):
    """t = <a_q, k> + <q, a_k>, bent by the cap, + a_b."""
    t = nothing(z)
    if a.along_query is not None:
        t = product(z, b, a.along_query, i0, z.key, j0, t, z.tile.D, z.tile.WIDE)
    if a.along_key is not None:
        t = product(z, b, z.query, i0, a.along_key, j0, t, z.tile.D, z.tile.WIDE)
    t = t * z.scale * slope
    if a.along_bias is not None:
        t += load_pairs(z, a.along_bias, b, i0, j0).to(tl.float32)
    return t


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(z, b, i0, j0):
    """1 / (1 - rate) where a weight survives, else 0: the hash of (seed, i, j) of dropout.py."""
    out = 1.0
    if z.seed is not None:
        i, j = lines(z, i0, j0)
        seed = mix(tl.load(place(z.seed, b)).to(tl.uint32, bitcast=True))
        row = mix(i.to(tl.uint32) ^ seed)
        key = mix(j.to(tl.uint32) ^ (mix(seed) ^ 0x5BD1E995)) * 0x2545F491
        number = mix(row ^ key).to(tl.int32, bitcast=True)
        out = tl.where(number.to(tl.int64) >= z.limit, z.lift, 0.0)
    return out
