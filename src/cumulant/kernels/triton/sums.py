# What runs on the device is typed by Triton, not by Python; nor need Triton be installed.
# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""The kernels: sums over keys for a block of queries, or over queries for a block of keys.

Shape legend of a tile: Q, AQ (ROWS, d) queries and their direction, g (ROWS, e) the cotangent of
the mean; K, AK (COLUMNS, d), V, AV (COLUMNS, e); s, p, t, w (ROWS, COLUMNS). Formulas: docs/
theory.md, T12; ``native/forward.hpp`` and ``native/derivatives.hpp`` have them in C++.

A derivative is told each row's G, which is rounded; `rows` sums p = exp(s - G) again, and
everything after it divides by that sum, so that G is a mere reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cumulant.kernels.triton.tile import (
    column,
    direction,
    kept,
    keys_of,
    load_rows,
    member,
    place,
    queries_of,
    scores,
    store_column,
    store_rows,
)

__all__ = ["forward", "means", "rows", "to_bias", "to_keys", "to_queries"]


@triton.jit
def forward(
    z,
    value,
    mean,
    log_normalizer,
    entropy,
    score_mean,
    score_variance,
    score_max,
    top,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Mean, G, entropy; mean, variance, maximum of the score and its key, in one pass over keys."""
    i0 = tl.program_id(0) * ROWS
    b = member(z, tl.program_id(1))
    i = i0 + tl.arange(0, ROWS)
    Q = load_rows(z.query, b, i0, z.queries, D, ROWS, WIDE)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    heat = tl.zeros([ROWS], tl.float32)  # sum p (s - peak)
    center = tl.zeros([ROWS], tl.float32)  # mean of the plain score so far
    spread = tl.zeros([ROWS], tl.float32)  # sum p (score - center)^2
    where = tl.full([ROWS], -1.0, tl.float32)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    start, stop = keys_of(z, i0, ROWS, COLUMNS)
    for j0 in range(start, stop, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        K = load_rows(z.key, b, j0, z.keys, D, COLUMNS, WIDE)
        s, plain, _ = scores(z, b, Q, K, i, j, PRECISION)
        largest = tl.max(s, 1)
        if top is not None:
            first = tl.min(tl.where(s == largest[:, None], j[None, :], 2147483647), 1)
            where = tl.where(largest > peak, first.to(tl.float32), where)
        new = tl.maximum(peak, largest)
        safe = tl.where(new == -float("inf"), 0.0, new)
        shift = tl.where(peak == -float("inf"), 0.0, peak - safe)
        r = tl.where(peak == -float("inf"), 0.0, tl.exp(shift))
        log = s - safe[:, None]
        p = tl.exp(log)
        part = tl.sum(p, 1)
        if entropy is not None:
            heat = r * (heat + shift * mass) + tl.sum(tl.where(p > 0, p * log, 0.0), 1)
        old = r * mass
        mass = old + part
        if score_variance is not None:  # centered in the tile, joined with those so far (Chan)
            some = tl.where(part > 0, part, 1.0)
            mid = tl.sum(tl.where(p > 0, p * plain, 0.0), 1) / some
            off = tl.where(p > 0, plain - mid[:, None], 0.0)
            rest = tl.sum(p * off, 1) / some
            gap = mid + rest - center
            share = tl.where(mass > 0, part / tl.where(mass > 0, mass, 1.0), 0.0)
            center += gap * share
            square = tl.sum(p * off * off, 1) - rest * rest * part
            spread = r * spread + square + gap * gap * share * old
        if value is not None:
            V = load_rows(value, b, j0, z.keys, E, COLUMNS, VALUES)
            weights = (p * kept(z, b, i, j)).to(V.dtype)
            acc = tl.dot(weights, V, acc * r[:, None], input_precision=PRECISION)
        peak = new
    full = tl.where(mass == 0, 1.0, mass)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    if value is not None:
        store_rows(mean, b, i0, z.queries, acc / full[:, None], E)
    level = tl.where(mass == 0, -float("inf"), base + tl.log(full))
    store_column(log_normalizer, b, i, z.queries, level)
    if entropy is not None:
        h = tl.log(full) - heat / full
        store_column(entropy, b, i, z.queries, tl.where(h < 0, 0.0, h))
    store_column(score_mean, b, i, z.queries, center)
    store_column(score_variance, b, i, z.queries, spread / full)
    store_column(score_max, b, i, z.queries, tl.where(mass == mass, peak, mass))
    store_column(top, b, i, z.queries, where)


@triton.jit
def weights(known, s, b, i, count):
    """(p, log p), not yet divided by the row's sum."""
    level = column(known, b, i, count)
    log = s - tl.where(level == -float("inf"), 0.0, level)[:, None]
    return tl.exp(log), log


@triton.jit
def weighed(z, b, g, V, cool, keep, p, log, i, PRECISION: tl.constexpr):
    """w = <g, v> - gH log p."""
    w = tl.zeros_like(p)
    if g is not None:
        w = tl.dot(g, tl.trans(V), input_precision=PRECISION) * keep
    if cool is not None:
        w -= column(cool, b, i, z.queries)[:, None] * tl.where(p > 0, log, 0.0)
    return w


@triton.jit
def optional_rows(x, b, first, count, WIDTH: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    out = None
    if x is not None:
        out = load_rows(x, b, first, count, WIDTH, N, C)
    return out


@triton.jit
def rows(
    z,
    a,
    inverse,
    tilt,
    mid,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What has to be known of whole rows: 1 / sum p, E[t], E[w]."""
    i0 = tl.program_id(0) * ROWS
    b = member(z, tl.program_id(1))
    i = i0 + tl.arange(0, ROWS)
    Q = load_rows(z.query, b, i0, z.queries, D, ROWS, WIDE)
    AQ = optional_rows(a.along_query, b, i0, z.queries, D, ROWS, WIDE)
    g = optional_rows(a.seed_mean, b, i0, z.queries, E, ROWS, VALUES)
    mass = tl.zeros([ROWS], tl.float32)
    first = tl.zeros([ROWS], tl.float32)
    second = tl.zeros([ROWS], tl.float32)
    start, stop = keys_of(z, i0, ROWS, COLUMNS)
    for j0 in range(start, stop, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        K = load_rows(z.key, b, j0, z.keys, D, COLUMNS, WIDE)
        s, _, slope = scores(z, b, Q, K, i, j, PRECISION)
        p, log = weights(a.known, s, b, i, z.queries)
        mass += tl.sum(p, 1)
        if tilt is not None:
            AK = optional_rows(a.along_key, b, j0, z.keys, D, COLUMNS, WIDE)
            t = direction(z, b, Q, K, AQ, AK, a.along_bias, slope, i, j, PRECISION)
            first += tl.sum(p * t, 1)
        if mid is not None:
            V = None
            if a.seed_mean is not None:
                V = load_rows(a.value, b, j0, z.keys, E, COLUMNS, VALUES)
            keep = kept(z, b, i, j)
            w = weighed(z, b, g, V, a.seed_entropy, keep, p, log, i, PRECISION)
            second += tl.sum(p * w, 1)
    over = tl.where(mass == 0, 0.0, 1 / tl.where(mass == 0, 1.0, mass))
    store_column(inverse, b, i, z.queries, over)
    store_column(tilt, b, i, z.queries, first * over)
    store_column(mid, b, i, z.queries, second * over)


@triton.jit
def means(
    z,
    a,
    mean,
    entropy,
    excess,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dE[v] = E[(t - E[t]) v] + E[dv],   dH = -E[(t - E[t]) log p],   and E[e] of `pair`."""
    i0 = tl.program_id(0) * ROWS
    b = member(z, tl.program_id(1))
    i = i0 + tl.arange(0, ROWS)
    Q = load_rows(z.query, b, i0, z.queries, D, ROWS, WIDE)
    AQ = optional_rows(a.along_query, b, i0, z.queries, D, ROWS, WIDE)
    g = optional_rows(a.seed_mean, b, i0, z.queries, E, ROWS, VALUES)
    over, down = column(a.inverse, b, i, z.queries), column(a.tilt, b, i, z.queries)
    up = column(a.seed_normalizer, b, i, z.queries) - column(a.mid, b, i, z.queries)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    hot = tl.zeros([ROWS], tl.float32)
    more = tl.zeros([ROWS], tl.float32)
    start, stop = keys_of(z, i0, ROWS, COLUMNS)
    for j0 in range(start, stop, COLUMNS):
        j = j0 + tl.arange(0, COLUMNS)
        K = load_rows(z.key, b, j0, z.keys, D, COLUMNS, WIDE)
        s, _, slope = scores(z, b, Q, K, i, j, PRECISION)
        p, log = weights(a.known, s, b, i, z.queries)
        p = p * over[:, None]
        keep = kept(z, b, i, j)
        V = optional_rows(a.value, b, j0, z.keys, E, COLUMNS, VALUES)
        AV = optional_rows(a.along_value, b, j0, z.keys, E, COLUMNS, VALUES)
        if a.tilt is not None:
            AK = optional_rows(a.along_key, b, j0, z.keys, D, COLUMNS, WIDE)
            t = direction(z, b, Q, K, AQ, AK, a.along_bias, slope, i, j, PRECISION) - down[:, None]
            if a.value is not None:
                acc = tl.dot((p * t * keep).to(V.dtype), V, acc, input_precision=PRECISION)
            if entropy is not None:
                hot += tl.sum(tl.where(p > 0, p * t * log, 0.0), 1)
            if excess is not None:
                w = weighed(z, b, g, V, None, keep, p, log, i, PRECISION) + up[:, None]
                more += tl.sum(p * w * t, 1)
        if a.along_value is not None:
            acc = tl.dot((p * keep).to(V.dtype), AV, acc, input_precision=PRECISION)
            if excess is not None and a.seed_mean is not None:
                u = tl.dot(g, tl.trans(AV), input_precision=PRECISION) * keep
                more += tl.sum(p * u, 1)
    if mean is not None:
        store_rows(mean, b, i0, z.queries, acc, E)
    store_column(entropy, b, i, z.queries, -hot)
    store_column(excess, b, i, z.queries, more)


@triton.jit
def pair(
    z,
    b,
    a,
    Q,
    K,
    AQ,
    AK,
    g,
    i0,
    j0,
    E: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a tile adds to sums: (x, y, v, slope).

    The gradient: w = <g, v> - gH log p,   x = p (w - E[w] + gG),   v = p.
    The curvature, the gradient of <a, gradient>: t = <a_q, k> + <q, a_k> + a_b and w centered,
    w <- w + gG, u = <g, a_v>:   e = w t + u,   x = p (e - E[e]),   y = p w,   v = p t.
    """
    i, j = i0 + tl.arange(0, ROWS), j0 + tl.arange(0, COLUMNS)
    V = None
    if a.seed_mean is not None:
        V = load_rows(a.value, b, j0, z.keys, E, COLUMNS, VALUES)
    s, _, slope = scores(z, b, Q, K, i, j, PRECISION)
    p, log = weights(a.known, s, b, i, z.queries)
    p = p * column(a.inverse, b, i, z.queries)[:, None]
    keep = kept(z, b, i, j)
    up = column(a.seed_normalizer, b, i, z.queries) - column(a.mid, b, i, z.queries)
    w = weighed(z, b, g, V, a.seed_entropy, keep, p, log, i, PRECISION) + up[:, None]
    y = p * w
    x, v = y, p * keep
    if a.excess is not None:
        t = tl.zeros_like(p)
        if a.tilt is not None:
            t = direction(z, b, Q, K, AQ, AK, a.along_bias, slope, i, j, PRECISION)
            t -= column(a.tilt, b, i, z.queries)[:, None]
        e = w * t
        if a.along_value is not None and a.seed_mean is not None:
            AV = load_rows(a.along_value, b, j0, z.keys, E, COLUMNS, VALUES)
            e += tl.dot(g, tl.trans(AV), input_precision=PRECISION) * keep
        x, v = p * (e - column(a.excess, b, i, z.queries)[:, None]), p * t * keep
    return x, y, v, slope


@triton.jit
def to_queries(
    z,
    a,
    to_query,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q: x k + y a_k."""
    i0 = tl.program_id(0) * ROWS
    b = member(z, tl.program_id(1))
    Q = load_rows(z.query, b, i0, z.queries, D, ROWS, WIDE)
    AQ = optional_rows(a.along_query, b, i0, z.queries, D, ROWS, WIDE)
    g = optional_rows(a.seed_mean, b, i0, z.queries, E, ROWS, VALUES)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    start, stop = keys_of(z, i0, ROWS, COLUMNS)
    for j0 in range(start, stop, COLUMNS):
        K = load_rows(z.key, b, j0, z.keys, D, COLUMNS, WIDE)
        AK = optional_rows(a.along_key, b, j0, z.keys, D, COLUMNS, WIDE)
        x, y, _, slope = pair(z, b, a, Q, K, AQ, AK, g, i0, j0, E, VALUES, ROWS, COLUMNS, PRECISION)
        acc = tl.dot((x * slope).to(K.dtype), K, acc, input_precision=PRECISION)
        if AK is not None:
            acc = tl.dot(y.to(K.dtype), AK, acc, input_precision=PRECISION)
    store_rows(to_query, b, i0, z.queries, acc * z.scale, D)


@triton.jit
def shared_member(n, unit, s):
    """The member of the batch with these numbers along its own and its shared dimensions.

    `n` are the sizes of the unit's dimensions, then those that the unit shares.
    """
    unit = unit.to(tl.int64)
    return (
        unit // (n[1] * n[2]) + s // (n[4] * n[5]),
        unit // n[2] % n[1] + s // n[5] % n[4],
        unit % n[2] + s % n[5],
    )


@triton.jit
def to_keys(
    z,
    a,
    n,
    to_key,
    to_value,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """k: x' q + y' a_q,   v: v' g, over the queries of all members that share keys."""
    j0 = tl.program_id(0) * COLUMNS
    keys = tl.zeros([COLUMNS, WIDE], tl.float32)
    values = tl.zeros([COLUMNS, VALUES], tl.float32)
    start, stop = queries_of(z, j0, ROWS, COLUMNS)
    for s in range(n[3] * n[4] * n[5]):
        b = shared_member(n, tl.program_id(1), s)
        K = load_rows(z.key, b, j0, z.keys, D, COLUMNS, WIDE)
        AK = optional_rows(a.along_key, b, j0, z.keys, D, COLUMNS, WIDE)
        for i0 in range(start, stop, ROWS):
            Q = load_rows(z.query, b, i0, z.queries, D, ROWS, WIDE)
            AQ = optional_rows(a.along_query, b, i0, z.queries, D, ROWS, WIDE)
            g = optional_rows(a.seed_mean, b, i0, z.queries, E, ROWS, VALUES)
            x, y, v, slope = pair(
                z, b, a, Q, K, AQ, AK, g, i0, j0, E, VALUES, ROWS, COLUMNS, PRECISION
            )
            if to_key is not None:
                bent = tl.trans((x * slope).to(Q.dtype))
                keys = tl.dot(bent, Q, keys, input_precision=PRECISION)
                if AQ is not None:
                    moved = tl.trans(y.to(Q.dtype))
                    keys = tl.dot(moved, AQ, keys, input_precision=PRECISION)
            if to_value is not None:
                values = tl.dot(tl.trans(v.to(Q.dtype)), g, values, input_precision=PRECISION)
    b = shared_member(n, tl.program_id(1), 0)
    if to_key is not None:
        store_rows(to_key, b, j0, z.keys, keys * z.scale, D)
    if to_value is not None:
        store_rows(to_value, b, j0, z.keys, values, E)


@triton.jit
def to_bias(
    z,
    a,
    n,
    to,
    BY_QUERY: tl.constexpr,
    BY_KEY: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """bias: x, summed along what the bias was broadcast along."""
    first, unit = tl.program_id(0) * ROWS, tl.program_id(1)
    start, stop = (first, first + 1) if BY_QUERY else (0, z.queries)
    left = tl.program_id(2) * COLUMNS
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for s in range(n[3] * n[4] * n[5]):
        b = shared_member(n, unit, s)
        for i0 in range(start, stop, ROWS):
            Q = load_rows(z.query, b, i0, z.queries, D, ROWS, WIDE)
            AQ = optional_rows(a.along_query, b, i0, z.queries, D, ROWS, WIDE)
            g = optional_rows(a.seed_mean, b, i0, z.queries, E, ROWS, VALUES)
            low, high = keys_of(z, i0, ROWS, COLUMNS)
            if BY_KEY:
                low, high = tl.maximum(low, left), tl.minimum(high, left + 1)
            for j0 in range(low, high, COLUMNS):
                K = load_rows(z.key, b, j0, z.keys, D, COLUMNS, WIDE)
                AK = optional_rows(a.along_key, b, j0, z.keys, D, COLUMNS, WIDE)
                x, _, _, _ = pair(
                    z, b, a, Q, K, AQ, AK, g, i0, j0, E, VALUES, ROWS, COLUMNS, PRECISION
                )
                acc += x
    i, j = first + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    at = place(to, shared_member(n, unit, 0))
    if BY_QUERY and BY_KEY:
        where = i[:, None].to(tl.int64) * to.row + j[None, :] * to.column
        tl.store(at + where, acc, mask=(i[:, None] < z.queries) & (j[None, :] < z.keys))
    elif BY_QUERY:
        tl.store(at + i * to.row, tl.sum(acc, 1), mask=i < z.queries)
    elif BY_KEY:
        tl.store(at + j * to.column, tl.sum(acc, 0), mask=j < z.keys)
    else:
        tl.store(at, tl.sum(tl.sum(acc, 1), 0))
