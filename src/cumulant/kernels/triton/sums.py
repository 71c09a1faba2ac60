# What runs on the device is typed by Triton, not by Python; nor need Triton be installed.
# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
"""The kernels: sums over keys for a block of queries, or over queries for a block of keys.

Shape legend of a tile: K, AK (COLUMNS, d) keys and their direction, V, AV (COLUMNS, e) values and
theirs, g (ROWS, e) the cotangent of the mean; s, p, t, w (ROWS, COLUMNS). Formulas: docs/theory.md,
T12; ``native/forward.hpp`` and ``native/derivatives.hpp`` have them in C++.

A derivative is told each row's G, which is rounded; `rows` sums p = exp(s - G) again, and
everything after it divides by that sum, so that G is a mere reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cumulant.kernels.triton.tile import (
    column,
    direction,
    first_query,
    kept,
    key_rows,
    keys_of,
    lines,
    nothing,
    place,
    product,
    queries_of,
    query_rows,
    scores,
    store_column,
    store_rows,
)

__all__ = ["forward", "means", "rows", "to_bias", "to_keys", "to_queries"]


@triton.jit
def forward(z, value, to):
    """Mean, G, entropy; mean, variance, maximum of the score and its key, in one pass over keys."""
    b, i0 = first_query(z)
    ROWS: tl.constexpr = z.tile.ROWS
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    heat = tl.zeros([ROWS], tl.float32)  # sum p (s - peak)
    center = tl.zeros([ROWS], tl.float32)  # mean of the plain score so far
    spread = tl.zeros([ROWS], tl.float32)  # sum p (score - center)^2
    where = tl.full([ROWS], -1.0, tl.float32)
    acc = tl.zeros([ROWS, z.tile.VALUES], tl.float32)
    start, stop = keys_of(z, i0)
    for j0 in range(start, stop, z.tile.COLUMNS):
        s, plain, _ = scores(z, b, i0, j0)
        largest = tl.max(s, 1)
        if to.top is not None:
            _, j = lines(z, i0, j0)
            first = tl.min(tl.where(s == largest[:, None], j, 2147483647), 1)
            where = tl.where(largest > peak, first.to(tl.float32), where)
        new = tl.maximum(peak, largest)
        safe = tl.where(new == -float("inf"), 0.0, new)
        # Bounded, so that 0 times it is 0: masks of -1e38 are far below what comes after them.
        shift = tl.where(peak == -float("inf"), 0.0, tl.maximum(peak - safe, -1000.0))
        r = tl.where(peak == -float("inf"), 0.0, tl.exp(shift))
        log = s - safe[:, None]
        p = tl.exp(log)
        part = tl.sum(p, 1)
        if to.entropy is not None:
            heat = r * (heat + shift * mass) + tl.sum(tl.where(p > 0, p * log, 0.0), 1)
        old = r * mass
        mass = old + part
        if to.score_variance is not None:  # centered in the tile, joined with those so far (Chan)
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
            V = key_rows(z, value, b, j0, z.tile.E, z.tile.VALUES)
            weights = (p * kept(z, b, i0, j0)).to(V.dtype)
            acc = tl.dot(weights, V, acc * r[:, None], input_precision=z.tile.PRECISION)
        peak = new
    full = tl.where(mass == 0, 1.0, mass)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    if value is not None:
        store_rows(to.mean, b, i0, z.queries, acc / full[:, None], z.tile.E)
    level = tl.where(mass == 0, -float("inf"), base + tl.log(full))
    store_column(z, to.log_normalizer, b, i0, level)
    if to.entropy is not None:
        h = tl.log(full) - heat / full
        store_column(z, to.entropy, b, i0, tl.where(h < 0, 0.0, h))
    store_column(z, to.score_mean, b, i0, center)
    store_column(z, to.score_variance, b, i0, spread / full)
    store_column(z, to.score_max, b, i0, tl.where(mass == mass, peak, mass))
    store_column(z, to.top, b, i0, where)


@triton.jit
def weights(z, b, a, i0, s):
    """(p, log p), not yet divided by the row's sum."""
    level = column(z, a.known, b, i0)
    log = s - tl.where(level == -float("inf"), 0.0, level)[:, None]
    return tl.exp(log), log


@triton.jit
def weighed(z, b, a, i0, j0, keep, p, log):
    """w = <g, v> - gH log p."""
    w = nothing(z)
    if a.seed_mean is not None:
        w = product(z, b, a.seed_mean, i0, a.value, j0, w, z.tile.E, z.tile.VALUES) * keep
    if a.seed_entropy is not None:
        w -= column(z, a.seed_entropy, b, i0)[:, None] * tl.where(p > 0, log, 0.0)
    return w


@triton.jit
def lifted(z, b, a, i0, j0, keep):
    """u = <g, a_v>."""
    u = nothing(z)
    if a.along_value is not None and a.seed_mean is not None:
        u = product(z, b, a.seed_mean, i0, a.along_value, j0, u, z.tile.E, z.tile.VALUES) * keep
    return u


@triton.jit
def rows(z, a, inverse, tilt, mid):
    """What has to be known of whole rows: 1 / sum p, E[t], E[w]."""
    b, i0 = first_query(z)
    mass = tl.zeros([z.tile.ROWS], tl.float32)
    first = tl.zeros([z.tile.ROWS], tl.float32)
    second = tl.zeros([z.tile.ROWS], tl.float32)
    start, stop = keys_of(z, i0)
    for j0 in range(start, stop, z.tile.COLUMNS):
        s, _, slope = scores(z, b, i0, j0)
        p, log = weights(z, b, a, i0, s)
        mass += tl.sum(p, 1)
        if tilt is not None:
            first += tl.sum(p * direction(z, b, a, i0, j0, slope), 1)
        if mid is not None:
            second += tl.sum(p * weighed(z, b, a, i0, j0, kept(z, b, i0, j0), p, log), 1)
    over = tl.where(mass == 0, 0.0, 1 / tl.where(mass == 0, 1.0, mass))
    store_column(z, inverse, b, i0, over)
    store_column(z, tilt, b, i0, first * over)
    store_column(z, mid, b, i0, second * over)


@triton.jit
def means(z, a, mean, entropy, excess):
    """dE[v] = E[(t - E[t]) v] + E[dv],   dH = -E[(t - E[t]) log p],   and E[e] of `pair`."""
    b, i0 = first_query(z)
    over, down = column(z, a.inverse, b, i0), column(z, a.tilt, b, i0)
    up = column(z, a.seed_normalizer, b, i0) - column(z, a.mid, b, i0)
    acc = tl.zeros([z.tile.ROWS, z.tile.VALUES], tl.float32)
    hot = tl.zeros([z.tile.ROWS], tl.float32)
    more = tl.zeros([z.tile.ROWS], tl.float32)
    start, stop = keys_of(z, i0)
    for j0 in range(start, stop, z.tile.COLUMNS):
        s, _, slope = scores(z, b, i0, j0)
        p, log = weights(z, b, a, i0, s)
        p = p * over[:, None]
        keep = kept(z, b, i0, j0)
        if a.tilt is not None:
            t = direction(z, b, a, i0, j0, slope) - down[:, None]
            if mean is not None and a.value is not None:
                V = key_rows(z, a.value, b, j0, z.tile.E, z.tile.VALUES)
                pt = (p * t * keep).to(V.dtype)
                acc = tl.dot(pt, V, acc, input_precision=z.tile.PRECISION)
            if entropy is not None:
                hot += tl.sum(tl.where(p > 0, p * t * log, 0.0), 1)
            if excess is not None:
                w = weighed(z, b, a, i0, j0, keep, p, log) + up[:, None]
                more += tl.sum(p * w * t, 1)
        if a.along_value is not None:
            if mean is not None:
                AV = key_rows(z, a.along_value, b, j0, z.tile.E, z.tile.VALUES)
                pk = (p * keep).to(AV.dtype)
                acc = tl.dot(pk, AV, acc, input_precision=z.tile.PRECISION)
            if excess is not None:
                more += tl.sum(p * lifted(z, b, a, i0, j0, keep), 1)
    if mean is not None:
        store_rows(mean, b, i0, z.queries, acc, z.tile.E)
    store_column(z, entropy, b, i0, -hot)
    store_column(z, excess, b, i0, more)


@triton.jit
def pair(z, b, a, i0, j0):
    """What a tile adds to sums: (x, y, v, slope).

    The gradient: w = <g, v> - gH log p,   x = p (w - E[w] + gG),   v = p.
    The curvature, the gradient of <a, gradient>: t = <a_q, k> + <q, a_k> + a_b and w centered,
    w <- w + gG, u = <g, a_v>:   e = w t + u,   x = p (e - E[e]),   y = p w,   v = p t.
    """
    s, _, slope = scores(z, b, i0, j0)
    p, log = weights(z, b, a, i0, s)
    p = p * column(z, a.inverse, b, i0)[:, None]
    keep = kept(z, b, i0, j0)
    up = column(z, a.seed_normalizer, b, i0) - column(z, a.mid, b, i0)
    w = weighed(z, b, a, i0, j0, keep, p, log) + up[:, None]
    y = p * w
    x, v = y, p * keep
    if a.excess is not None:
        t = nothing(z)
        if a.tilt is not None:
            t = direction(z, b, a, i0, j0, slope) - column(z, a.tilt, b, i0)[:, None]
        e = w * t + lifted(z, b, a, i0, j0, keep)
        x, v = p * (e - column(z, a.excess, b, i0)[:, None]), p * t * keep
    return x, y, v, slope


@triton.jit
def to_queries(z, a, to_query):
    """q: x k + y a_k."""
    b, i0 = first_query(z)
    acc = tl.zeros([z.tile.ROWS, z.tile.WIDE], tl.float32)
    start, stop = keys_of(z, i0)
    for j0 in range(start, stop, z.tile.COLUMNS):
        x, y, _, slope = pair(z, b, a, i0, j0)
        K = key_rows(z, z.key, b, j0, z.tile.D, z.tile.WIDE)
        acc = tl.dot((x * slope).to(K.dtype), K, acc, input_precision=z.tile.PRECISION)
        if a.along_key is not None:
            AK = key_rows(z, a.along_key, b, j0, z.tile.D, z.tile.WIDE)
            acc = tl.dot(y.to(K.dtype), AK, acc, input_precision=z.tile.PRECISION)
    store_rows(to_query, b, i0, z.queries, acc * z.scale, z.tile.D)


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
def to_keys(z, a, n, to_key, to_value):
    """k: x' q + y' a_q,   v: v' g, over the queries of all members that share keys."""
    j0 = tl.program_id(0) * z.tile.COLUMNS
    keys = tl.zeros([z.tile.COLUMNS, z.tile.WIDE], tl.float32)
    values = tl.zeros([z.tile.COLUMNS, z.tile.VALUES], tl.float32)
    start, stop = queries_of(z, j0)
    for s in range(n[3] * n[4] * n[5]):
        b = shared_member(n, tl.program_id(1), s)
        for i0 in range(start, stop, z.tile.ROWS):
            x, y, v, slope = pair(z, b, a, i0, j0)
            if to_key is not None:
                Q = query_rows(z, z.query, b, i0, z.tile.D, z.tile.WIDE)
                bent = tl.trans((x * slope).to(Q.dtype))
                keys = tl.dot(bent, Q, keys, input_precision=z.tile.PRECISION)
                if a.along_query is not None:
                    AQ = query_rows(z, a.along_query, b, i0, z.tile.D, z.tile.WIDE)
                    moved = tl.trans(y.to(Q.dtype))
                    keys = tl.dot(moved, AQ, keys, input_precision=z.tile.PRECISION)
            if to_value is not None:
                g = query_rows(z, a.seed_mean, b, i0, z.tile.E, z.tile.VALUES)
                given = tl.trans(v.to(g.dtype))
                values = tl.dot(given, g, values, input_precision=z.tile.PRECISION)
    b = shared_member(n, tl.program_id(1), 0)
    if to_key is not None:
        store_rows(to_key, b, j0, z.keys, keys * z.scale, z.tile.D)
    if to_value is not None:
        store_rows(to_value, b, j0, z.keys, values, z.tile.E)


@triton.jit
def to_bias(z, a, n, to, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr):
    """bias: x, summed along what the bias was broadcast along."""
    first, unit = tl.program_id(0) * z.tile.ROWS, tl.program_id(1)
    start, stop = (first, first + 1) if BY_QUERY else (0, z.queries)
    left = tl.program_id(2) * z.tile.COLUMNS
    acc = nothing(z)
    for s in range(n[3] * n[4] * n[5]):
        b = shared_member(n, unit, s)
        for i0 in range(start, stop, z.tile.ROWS):
            low, high = keys_of(z, i0)
            if BY_KEY:
                low, high = tl.maximum(low, left), tl.minimum(high, left + 1)
            for j0 in range(low, high, z.tile.COLUMNS):
                x, _, _, _ = pair(z, b, a, i0, j0)
                acc += x
    i, j = lines(z, first, left)
    at = place(to, shared_member(n, unit, 0))
    if BY_QUERY and BY_KEY:
        where = i.to(tl.int64) * to.row + j * to.column
        tl.store(at + where, acc, mask=(i < z.queries) & (j < z.keys))
    elif BY_QUERY:
        i = first + tl.arange(0, z.tile.ROWS)
        tl.store(at + i * to.row, tl.sum(acc, 1), mask=i < z.queries)
    elif BY_KEY:
        j = left + tl.arange(0, z.tile.COLUMNS)
        tl.store(at + j * to.column, tl.sum(acc, 0), mask=j < z.keys)
    else:
        tl.store(at, tl.sum(tl.sum(acc, 1), 0))
