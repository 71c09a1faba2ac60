# What runs on the device is typed by Triton, not by Python; nor need Triton be installed.
# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""What every kernel does on one tile: scores, the direction's, dropout; as ``native/scores.hpp``.

A tensor is a :class:`View`: an address and strides, 0 where it broadcasts; what a call does not
have is ``None``, and the branches on it are decided when a kernel is compiled. Numbers are float32
whatever the inputs are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

__all__ = [
    "Change",
    "Measure",
    "View",
    "column",
    "direction",
    "kept",
    "keys_of",
    "load_rows",
    "member",
    "place",
    "queries_of",
    "scores",
    "store_column",
    "store_rows",
]


class View(NamedTuple):
    """A tensor of three batch dimensions, rows and columns."""

    data: Any
    first: int
    second: int
    third: int
    row: int
    column: int


class Measure(NamedTuple):
    """The measure, as in ``attention.py``; a side of the band is ``None`` where it is open.

    `second` and `third` are sizes of the batch; with dropout a hash from `limit` on keeps a
    weight, times `lift`.
    """

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


@triton.jit
def member(z, number):
    """The indices of one member of the batch."""
    number = number.to(tl.int64)
    return number // (z.second * z.third), number // z.third % z.second, number % z.third


@triton.jit
def place(x, b):
    """Where the part of one member begins."""
    return x.data + b[0] * x.first + b[1] * x.second + b[2] * x.third


@triton.jit
def load_rows(x, b, first, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x[first + .][.], zeros past the last row and column."""
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = place(x, b) + tl.cast(first, tl.int64) * x.row + (r * x.row + c * x.column)
    return tl.load(at, mask=(first + r < count) & (c < WIDTH), other=0.0)


@triton.jit
def store_rows(x, b, first, count, value, WIDTH: tl.constexpr):
    """x[first + .][.] = value, up to the last row and column."""
    r = tl.arange(0, value.shape[0])[:, None]
    c = tl.arange(0, value.shape[1])[None, :]
    at = place(x, b) + tl.cast(first, tl.int64) * x.row + (r * x.row + c * x.column)
    tl.store(at, value, mask=(first + r < count) & (c < WIDTH))


@triton.jit
def column(x, b, i, count):
    """One number per query; zeros if there is no such tensor."""
    out = tl.zeros_like(i).to(tl.float32)
    if x is not None:
        out = tl.load(place(x, b) + i * x.row, mask=i < count, other=0.0).to(tl.float32)
    return out


@triton.jit
def store_column(x, b, i, count, value):
    """One number per query, where somebody wants it."""
    if x is not None:
        tl.store(place(x, b) + i * x.row, value, mask=i < count)


@triton.jit
def keys_of(z, i0, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The keys that some of these queries may meet, from a tile's beginning on."""
    start, stop = 0, z.keys
    if z.lower is not None:
        start = tl.maximum(0, i0 + z.lower) // COLUMNS * COLUMNS
    if z.upper is not None:
        stop = tl.minimum(z.keys, i0 + ROWS + z.upper)
    return start, stop


@triton.jit
def queries_of(z, j0, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The queries that may meet some of these keys, from a tile's beginning on."""
    start, stop = 0, z.queries
    if z.upper is not None:
        start = tl.maximum(0, j0 - z.upper) // ROWS * ROWS
    if z.lower is not None:
        stop = tl.minimum(z.queries, j0 + COLUMNS - z.lower)
    return start, stop


@triton.jit
def hyperbolic_tangent(x):
    """The series where the exponential would lose digits."""
    y = tl.abs(x)
    q = x * x
    near = x * (1 - q * (1 / 3 - q * (2 / 15 - q * (17 / 315))))
    far = 1 - 2 / (tl.exp(2 * y) + 1)
    return tl.where(y < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def scores(z, b, Q, K, i, j, PRECISION: tl.constexpr):
    """(s, plain, slope): s = scale <q, k>, capped, plus the bias, -inf where a pair may not meet.

    `plain` are the scores before bias and masks, `slope` is the derivative of the cap.
    """
    plain = tl.dot(Q, tl.trans(K), input_precision=PRECISION) * z.scale
    slope = 1.0
    if z.cap is not None:
        cap = tl.load(place(z.cap, b)).to(tl.float32)
        u = hyperbolic_tangent(plain / cap)
        plain, slope = u * cap, 1 - u * u
    seen = (i[:, None] < z.queries) & (j[None, :] < z.keys)
    s = plain
    if z.bias is not None:
        x = load_pairs(z.bias, b, i, j, seen).to(tl.float32)
        s = tl.where(x == -float("inf"), -float("inf"), s + x)  # -inf hides NaN as well
    if z.mask is not None:
        seen = seen & (load_pairs(z.mask, b, i, j, seen) != 0)
    if z.upper is not None:
        seen = seen & (j[None, :] - i[:, None] <= z.upper)
    if z.lower is not None:
        seen = seen & (j[None, :] - i[:, None] >= z.lower)
    return tl.where(seen, s, -float("inf")), plain, slope


@triton.jit
def load_pairs(x, b, i, j, seen):
    at = place(x, b) + (i[:, None].to(tl.int64) * x.row + j[None, :].to(tl.int64) * x.column)
    return tl.load(at, mask=seen, other=0)


@triton.jit
def direction(z, b, Q, K, AQ, AK, along_bias, slope, i, j, PRECISION: tl.constexpr):
    """t = <dq, k> + <q, dk>, bent by the cap, + dbias."""
    t = tl.zeros([Q.shape[0], K.shape[0]], tl.float32)
    if AQ is not None:
        t = tl.dot(AQ, tl.trans(K), t, input_precision=PRECISION)
    if AK is not None:
        t = tl.dot(Q, tl.trans(AK), t, input_precision=PRECISION)
    t = t * z.scale * slope
    if along_bias is not None:
        seen = (i[:, None] < z.queries) & (j[None, :] < z.keys)
        t += load_pairs(along_bias, b, i, j, seen).to(tl.float32)
    return t


@triton.jit
def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(z, b, i, j):
    """1 / (1 - rate) where a weight survives, else 0: the hash of (seed, i, j) of dropout.py."""
    out = 1.0
    if z.seed is not None:
        seed = mix(tl.load(place(z.seed, b)).to(tl.uint32, bitcast=True))
        row = mix(i.to(tl.uint32) ^ seed)
        key = mix(j.to(tl.uint32) ^ (mix(seed) ^ 0x5BD1E995)) * 0x2545F491
        number = mix(row[:, None] ^ key[None, :]).to(tl.int32, bitcast=True)
        out = tl.where(number.to(tl.int64) >= z.limit, z.lift, 0.0)
    return out
