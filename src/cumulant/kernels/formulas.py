"""The sums of attention and its derivatives on one tile: the mathematics, in torch.

Shape legend, per tile: ``q_md`` queries, ``k_nd`` keys, ``v_ne`` values, ``s_mn`` scores,
``p_mn`` weights p(j|i) = exp(s_ij - G_i), ``t_mn`` tangents of the scores; row quantities are
columns ``(m, 1)``. All carry the tile's batch in front. Formulas are docs/theory.md, T1, T7, T12.

Arithmetic on (m, n) arrays goes through ``tile.work``, which may overwrite its first argument.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cumulant.kernels.dropout import kept
from cumulant.kernels.tiles import Arguments, Product, Tile, TileFunction

LOG2_E = 1 / math.log(2)

# Below this exponent of two even float64 is exactly zero; a finite floor keeps 0 * log 0 at 0.
FLOOR = -2000.0

INDEX = {
    "query": "i",
    "key": "j",
    "value": "j",
    "bias": "ij",
    "mask": "ij",
    "query_tag": "i",
    "key_tag": "j",
    "seed": "",
    "log_normalizer": "i",
    "column_normalizer": "j",
    "mean": "i",
    "entropy": "i",
    "score_mean": "i",
    "broken": "j",
    "center": "",
    "origin": "",
    "cap": "",
    "marks": "i",
}


def with_scale(function: TileFunction, scale: float) -> TileFunction:
    """`function` of eta = scale * q instead of q.

    Everything depends on the queries through eta alone: tangents and second cotangents are scaled
    on the way in, gradients on the way out.
    """
    if scale == 1.0:
        return function

    def scaled(tile: Tile, a: Arguments) -> Arguments:
        tilted = {name: x * scale if name in _QUERIES else x for name, x in a.items()}
        out = function(tile, tilted)
        return {name: x * scale if name in _QUERIES else x for name, x in out.items()}

    return scaled


_QUERIES = ("query", "tangent query", "second query")


def scores(tile: Tile, a: Arguments, unit: float = LOG2_E) -> Tensor:
    """s_ij times the unit, -inf where a pair is masked.

    In units of log 2 because exp2 is faster than exp; the factor is applied to the queries.
    """
    s_mn = capped(tile, a, tile.work.matmul(a["query"] * unit, a["key"].mT), unit)
    if "bias" in a:
        s_mn = tile.work.add(s_mn, a["bias"] * unit)
    if "mask" in a:
        s_mn = tile.work.masked_fill(s_mn, ~a["mask"], -math.inf)
    if "query_tag" in a:
        s_mn = tile.work.masked_fill(s_mn, _same_tag(a), -math.inf)
    outside = tile.band.hidden(tile.rows, tile.columns, s_mn.device)
    return s_mn if outside is None else tile.work.masked_fill(s_mn, outside, -math.inf)


def capped(tile: Tile, a: Arguments, s_mn: Tensor, unit: float = 1.0) -> Tensor:
    """cap tanh(s / cap) where the scores are capped; `unit` is what s is measured in."""
    if "cap" not in a:
        return s_mn
    cap = a["cap"] * unit
    return tile.work.mul(tile.work.tanh(tile.work.mul(s_mn, cap.reciprocal())), cap)


def _uncapped(tile: Tile, a: Arguments, t_mn: Tensor) -> Tensor:
    """Tangents or cotangents of capped scores times the slope of the cap, 1 - tanh^2(s / cap)."""
    if "cap" not in a:
        return t_mn
    work = tile.work
    u_mn = work.tanh(work.matmul(a["query"] / a["cap"], a["key"].mT))
    return work.addcmul(t_mn, t_mn, work.mul(u_mn, u_mn), value=-1)


def _same_tag(a: Arguments) -> Tensor:
    """True where a query and a key carry the same number in some column of their tags."""
    query, key = a["query_tag"], a["key_tag"].mT
    same = query[..., :1] == key[..., :1, :]
    for c in range(1, query.shape[-1]):
        same = same | (query[..., c : c + 1] == key[..., c : c + 1, :])
    return same


def log_weights(tile: Tile, a: Arguments) -> Tensor:
    """log2 p(j|i): from G on partial rows, up to a constant per row on whole rows.

    A row without keys has G = -inf and weights 0.
    """
    if not tile.whole:
        shift = a["log_normalizer"].masked_fill(a["log_normalizer"] == -math.inf, 0.0)
        return tile.work.sub(scores(tile, a), shift * LOG2_E)
    s_mn = scores(tile, a, 1.0)  # log2(e) would round large scores once more
    shift = s_mn.detach().amax(-1, keepdim=True)
    l_mn = tile.work.sub(s_mn, shift.masked_fill(shift == -math.inf, 0.0))
    l_mn = tile.work.scale(l_mn, LOG2_E)
    return l_mn if tile.work.reuses else _balanced(tile, l_mn)


def _balanced(tile: Tile, l_mn: Tensor) -> Tensor:
    """log2 p minus its mean under p as a constant: the same weights, more precise derivatives.

    This removes the common part of a row's score tangents before they meet rounded numbers.
    """
    p_mn = l_mn.detach().exp2()
    p_mn = p_mn * inverse_mass(tile, p_mn)
    return l_mn - row_sum(p_mn * l_mn.masked_fill(p_mn == 0, 0.0))


def inverse_mass(tile: Tile, p_mn: Tensor) -> Tensor:
    """The factor that makes a row's weights sum to one: 1 over their sum on whole rows, else 1.

    G and the scores it came from are rounded, so all weights exp(s - G) of a row are off by a
    common factor of about 1 + eps |G|. Partial rows cannot correct that.
    """
    if not tile.whole:
        return p_mn.new_ones(1)
    mass = row_sum(p_mn)
    return mass.masked_fill(mass == 0, 1.0).reciprocal()


def weights(tile: Tile, a: Arguments) -> Tensor:
    """p(j|i)."""
    p_mn = tile.work.exp2(log_weights(tile, a))
    return tile.work.mul(p_mn, inverse_mass(tile, p_mn)) if tile.whole else p_mn


def centered(tile: Tile, p_mn: Tensor, x_mn: Tensor) -> tuple[Tensor, Tensor]:
    """x - E[x], and E[x], on whole rows."""
    mean = tile.work.dot(x_mn, p_mn)
    return tile.work.sub(x_mn, mean), mean


def dropped(tile: Tile, a: Arguments, rate: float, x_mn: Tensor) -> Tensor:
    """`x_mn` after dropout: kept entries over (1 - rate), as torch defines it."""
    if rate == 0.0:
        return x_mn
    keep = kept(a["seed"], tile.rows, tile.columns, rate).to(x_mn.dtype)
    return x_mn * (keep if rate == 1.0 else keep / (1 - rate))


def bounded(tile: Tile, a: Arguments, l_mn: Tensor) -> Tensor:
    """Logarithms kept finite where a key may have been removed: 0 * log 0 is 0."""
    removed = any(n in a for n in ("bias", "mask", "query_tag")) or not tile.band.open
    return tile.work.clamp_min(l_mn, FLOOR) if removed else l_mn


def row_sum(x_mn: Tensor) -> Tensor:
    """Sum over the keys, kept as a column."""
    return x_mn.sum(-1, keepdim=True)


def score_tangent(tile: Tile, a: Arguments, prefix: str) -> Tensor | None:
    """t_ij = <dq_i, k_j> + <q_i, dk_j> + dbias_ij, from whichever are present."""
    query, key, bias = (a.get(prefix + n) for n in ("query", "key", "bias"))
    t_mn = None if query is None else tile.work.matmul(query, a["key"].mT)
    if key is not None:
        t_mn = tile.work.add_matmul(t_mn, a["query"], key.mT)
    if t_mn is not None:
        t_mn = _uncapped(tile, a, t_mn)
    if bias is None:
        return t_mn
    return bias if t_mn is None else tile.work.add(t_mn, bias)


def pushforward(tile: Tile, a: Arguments, *, rate: float) -> Arguments:
    """Tangents of (mean, G, entropy) along score tangents t and value tangents dv.

    dG = E[t],   dE[v] = E[(t - E[t]) v] + E[dv],   dH = -E[(t - E[t]) log p]

    A partial row does not know E[t]; it subtracts its share of E[t] times (E[v], -H). Weights are
    normalized last, row by row, which is cheaper.
    """
    work = tile.work
    l_mn = log_weights(tile, a)
    p_mn = work.exp2(l_mn, fresh="entropy" in a)
    inverse = inverse_mass(tile, p_mn)
    out: Arguments = {}
    if "tangent value" in a:
        out["mean"] = work.matmul(dropped(tile, a, rate, p_mn), a["tangent value"])
    t_mn = score_tangent(tile, a, "tangent ")
    if t_mn is not None:
        pt_mn = work.mul(t_mn, p_mn)
        tilt = out["log_normalizer"] = row_sum(pt_mn) * inverse
        if tile.whole:
            pt_mn = work.addcmul(pt_mn, p_mn, tilt, value=-1)
        mean = work.add_matmul(out.get("mean"), dropped(tile, a, rate, pt_mn), a["value"])
        out["mean"] = mean if tile.whole else work.addcmul(mean, tilt, a["mean"], value=-1)
        if "entropy" in a:
            heat = row_sum(work.mul(bounded(tile, a, l_mn), pt_mn)) * inverse / LOG2_E
            out["entropy"] = -heat if tile.whole else -heat - tilt * a["entropy"]
    if "mean" in out:
        out["mean"] = work.mul(out["mean"], inverse)
    return out


def pullback(tile: Tile, a: Arguments, *, rate: float, wanted: tuple[str, ...]) -> Arguments:
    """Gradients of (mean, G, entropy) for their cotangents g, gG, gH.

    w_ij = <g_i, v_j> - gH_i log p_ij,   ds_ij = p_ij (w_ij - E[w]_i + gG_i)
    dq = ds k,   dk = ds' q,   dv = p' g,   dbias = ds

    A partial row is given the terms of E[w] = <g, mean> + gH H. Instead of the weights, their
    multipliers are normalized, row by row.
    """
    work = tile.work
    g, g_G, g_H = (a.get("cotangent " + n) for n in ("mean", "log_normalizer", "entropy"))
    l_mn = log_weights(tile, a)
    p_mn = work.exp2(l_mn, fresh=g_H is not None)
    inverse = inverse_mass(tile, p_mn)
    out: Arguments = {}
    ds_mn: Tensor | None = None
    level = inverse.new_zeros(1) if g_G is None else g_G  # gG - E[w]
    if g is not None:
        g = g * inverse
        ds_mn = dropped(tile, a, rate, work.matmul(g, a["value"].mT))
        if "value" in wanted:
            out["value"] = work.matmul(dropped(tile, a, rate, p_mn).mT, g)
        if not tile.whole:
            level = level - row_sum(g * a["mean"])
    if g_H is not None:
        heat = work.mul(bounded(tile, a, l_mn), g_H * inverse / -LOG2_E)
        ds_mn = heat if ds_mn is None else work.add(heat, ds_mn)
        if not tile.whole:
            level = level - g_H * a["entropy"]
    if ds_mn is not None:
        ds_mn = work.mul(ds_mn, p_mn)
        level = level - row_sum(ds_mn) if tile.whole else level
        ds_mn = work.addcmul(ds_mn, p_mn, level * inverse)
    elif g_G is not None:
        ds_mn = work.mul(p_mn, level * inverse)
    if ds_mn is not None:
        if "bias" in wanted:
            out["bias"] = ds_mn.clone() if "cap" in a else ds_mn
        ds_mn = _uncapped(tile, a, ds_mn)
        if "query" in wanted:
            out["query"] = work.matmul(ds_mn, a["key"])
        if "key" in wanted:
            out["key"] = work.matmul(ds_mn.mT, a["query"])
    return out


def double_pullback(tile: Tile, a: Arguments, *, rate: float, wanted: tuple[str, ...]) -> Arguments:
    """Gradient of <dq, a_q> + <dk, a_k> + <dv, a_v> + <dbias, a_b> through `pullback` (no gH).

    The tile spans all keys, so row sums close inside it. With t = <a_q, k> + <q, a_k> + a_b
    centred, t <- t - E[t], and u = <g, a_v>, w = <g, v> - E[<g, v>] + gG (products with g after
    dropout):

        e = w t + u,   x = p (e - E[e]),   ds = p w
        q: x k + ds a_k            k: x' q + ds' a_q            bias: x
        g: p (t v + a_v)           v: (p t)' g                  gG: E[t] before centring
    """
    p_mn = weights(tile, a)
    out: Arguments = {}
    w_mn: Tensor | None = None
    t_mn = score_tangent(tile, a, "second ")
    if t_mn is not None:
        t_mn, out["cotangent log_normalizer"] = centered(tile, p_mn, t_mn)
        w_mn = _advantage(tile, a, p_mn, rate)
    if "cotangent mean" in a:
        out |= _to_values(tile, a, p_mn, t_mn, rate=rate, wanted=wanted)
    e_mn = _second_tilt(tile, a, t_mn, w_mn, rate)
    if e_mn is None:
        return out
    e_mn, _ = centered(tile, p_mn, e_mn)
    x_mn = tile.work.mul(e_mn, p_mn)
    ds_mn = None if w_mn is None else tile.work.mul(p_mn, w_mn)
    return out | _to_scores(tile, a, x_mn, ds_mn, wanted)


def _advantage(tile: Tile, a: Arguments, p_mn: Tensor, rate: float) -> Tensor | None:
    """w = <g, v> - E[<g, v>] + gG."""
    g, g_G = a.get("cotangent mean"), a.get("cotangent log_normalizer")
    if g is None:
        return g_G
    w_mn = dropped(tile, a, rate, tile.work.matmul(g, a["value"].mT))
    w_mn, _ = centered(tile, p_mn, w_mn)
    return w_mn if g_G is None else tile.work.add(w_mn, g_G)


def _to_values(
    tile: Tile,
    a: Arguments,
    p_mn: Tensor,
    t_mn: Tensor | None,
    *,
    rate: float,
    wanted: tuple[str, ...],
) -> Arguments:
    """g: p (t v + a_v), v: (p t)' g."""
    work, out = tile.work, Arguments()
    g, a_v = a["cotangent mean"], a.get("second value")
    if a_v is not None and "cotangent mean" in wanted:
        out["cotangent mean"] = work.matmul(dropped(tile, a, rate, p_mn), a_v)
    if t_mn is not None:
        pt_mn = dropped(tile, a, rate, work.mul(t_mn, p_mn, fresh=True))
        if "value" in wanted:
            out["value"] = work.matmul(pt_mn.mT, g)
        if "cotangent mean" in wanted:
            moved = out.get("cotangent mean")
            out["cotangent mean"] = work.add_matmul(moved, pt_mn, a["value"])
    return out


def _second_tilt(
    tile: Tile, a: Arguments, t_mn: Tensor | None, w_mn: Tensor | None, rate: float
) -> Tensor | None:
    """e = w t + u; writes over t."""
    work, g, a_v = tile.work, a.get("cotangent mean"), a.get("second value")
    e_mn = None if t_mn is None or w_mn is None else work.mul(t_mn, w_mn)
    if a_v is None or g is None:
        return e_mn
    if rate == 0.0:
        return work.add_matmul(e_mn, g, a_v.mT)
    u_mn = dropped(tile, a, rate, work.matmul(g, a_v.mT))
    return u_mn if e_mn is None else work.add(u_mn, e_mn)


def _to_scores(
    tile: Tile, a: Arguments, x_mn: Tensor, ds_mn: Tensor | None, wanted: tuple[str, ...]
) -> Arguments:
    """q: x k + ds a_k, k: x' q + ds' a_q, bias: x."""
    work, out = tile.work, Arguments()
    if "bias" in wanted:
        out["bias"] = x_mn
    if "query" in wanted:
        out["query"] = work.matmul(x_mn, a["key"])
        if ds_mn is not None and "second key" in a:
            out["query"] = work.add_matmul(out["query"], ds_mn, a["second key"])
    if "key" in wanted:
        out["key"] = work.matmul(x_mn.mT, a["query"])
        if ds_mn is not None and "second query" in a:
            out["key"] = work.add_matmul(out["key"], ds_mn.mT, a["second query"])
    return out


def curvature(tile: Tile, a: Arguments, *, rate: float, wanted: tuple[str, ...]) -> Arguments:
    """`double_pullback`, plus `pullback` of varying cotangents; absent parts are zero."""
    out: Arguments = {}
    if any(name.startswith("second ") for name in a):
        out = double_pullback(tile, a, rate=rate, wanted=wanted)
    moved = {n.replace("moved", "cotangent", 1): x for n, x in a.items() if n.startswith("moved ")}
    if moved:
        fixed = {name: x for name, x in a.items() if not name.startswith("cotangent ")}
        for name, x in pullback(tile, {**fixed, **moved}, rate=rate, wanted=wanted).items():
            out[name] = tile.work.add(x, out[name]) if name in out else x
    return {name: out[name] if name in out else torch.zeros_like(a[name]) for name in wanted}


def score_mean(tile: Tile, a: Arguments) -> Arguments:
    """E[<q, k>]: the bias affects the weights but is not part of the score."""
    p_mn = weights(tile, a)
    s_mn = capped(tile, a, tile.work.matmul(a["query"], a["key"].mT))
    return {"score_mean": tile.work.dot(s_mn, p_mn)}


def score_variance(tile: Tile, a: Arguments) -> Arguments:
    """Var[<q, k>], centred before squaring so that nothing cancels."""
    work = tile.work
    if tile.whole and "bias" not in a:  # log p is the score but for a constant
        l_mn = log_weights(tile, a)
        p_mn = work.exp2(l_mn, fresh=True)
        p_mn = work.mul(p_mn, inverse_mass(tile, p_mn))
        s_mn = work.scale(bounded(tile, a, l_mn), 1 / LOG2_E)
    else:
        p_mn = weights(tile, a)
        s_mn = capped(tile, a, work.matmul(a["query"], a["key"].mT))
    s_mn = centered(tile, p_mn, s_mn)[0] if tile.whole else work.sub(s_mn, a["score_mean"])
    return {"score_variance": row_sum(work.mul(work.mul(p_mn, s_mn), s_mn))}


def moments(tile: Tile, a: Arguments) -> Arguments:
    """Sums of p times 1, k - c and the upper triangle of (k - c)(k - c)', about a center c.

    The mass is 1 up to the rounding of G; dividing by it removes that error.
    """
    k_nd = a["key"] - a["center"]
    d, p_mn = k_nd.shape[-1], weights(tile, a)
    ones = torch.ones_like(k_nd[..., :1])
    if p_mn.shape[-2] == 1:  # one row: cheaper than writing all products of pairs
        square = (k_nd * p_mn.mT).mT @ k_nd
        pairs = [square[..., i : i + 1, i:] for i in range(d)]
        return {"moments": torch.cat([p_mn @ torch.cat([ones, k_nd], -1), *pairs], -1)}
    pairs = [k_nd[..., i : i + 1] * k_nd[..., i:] for i in range(d)]
    return {"moments": p_mn @ torch.cat([ones, k_nd, *pairs], -1)}


def potential(
    tile: Tile, a: Arguments, *, shift: bool, wanted: tuple[str, ...]
) -> dict[str, Tensor | Product]:
    """G and the gradient of its sum over the queries, weighted by c, on a tile with all keys.

    ds = c p,   dq = ds k,   dk = ds' q,   dbias = ds, summed over the queries
    """
    work = tile.work
    s_mn = scores(tile, a)
    peak = s_mn.new_zeros(1)
    if shift:
        peak = s_mn.amax(-1, keepdim=True)
        peak.masked_fill_(peak == -math.inf, 0.0)
        s_mn = work.sub(s_mn, peak)
    p_mn = work.exp2(s_mn)
    mass = row_sum(p_mn)
    c_m = mass.reciprocal().masked_fill(mass == 0, 0.0)
    if "cotangent log_normalizer" in a:
        c_m = c_m * a["cotangent log_normalizer"]
    out: dict[str, Tensor | Product] = {}
    out["log_normalizer"] = (peak + mass.log2()) / LOG2_E  # -inf for a row without keys
    if "bias" in wanted:
        out["bias"] = c_m.mT @ p_mn
    p_mn = _uncapped(tile, a, p_mn)
    if "query" in wanted:
        out["query"] = work.mul(work.matmul(p_mn, a["key"]), c_m)
    if "key" in wanted:
        out["key"] = Product(p_mn.mT, a["query"] * c_m)
    return out


def score_total(tile: Tile, a: Arguments) -> Arguments:
    """sum_j w_ij s_ij for arbitrary weights w."""
    s_mn = capped(tile, a, tile.work.matmul(a["query"], a["key"].mT))
    return {"score_total": row_sum(tile.work.mul(s_mn, a["weights"]))}


def masses(tile: Tile, a: Arguments) -> Arguments:
    """Sums of exp(s) over the keys and over the queries; for scores known to be small."""
    e_mn = tile.work.exp2(scores(tile, a))
    return {"rows": row_sum(e_mn), "columns": e_mn.sum(-2, keepdim=True).mT}


def _both_weights(tile: Tile, a: Arguments) -> tuple[Tensor, Tensor]:
    """p(j|i) = exp(s_ij - G_i) over keys, and c(i|j) = exp(s_ij - H_j) over queries."""
    work = tile.work
    G, H = (
        x.masked_fill(x == -math.inf, 0.0) * LOG2_E
        for x in (a["log_normalizer"], a["column_normalizer"].mT)
    )
    s_mn = scores(tile, a)
    return work.exp2(work.sub(s_mn, G, fresh=True)), work.exp2(work.sub(s_mn, H))


def both_pullback(tile: Tile, a: Arguments) -> Arguments:
    """Gradients of (G, H) for their cotangents g, h: of G over keys and of H over queries.

    ds_ij = g_i p(j|i) + h_j c(i|j),   dq = ds k,   dk = ds' q
    """
    work = tile.work
    p_mn, c_mn = _both_weights(tile, a)
    ds_mn = work.mul(p_mn, a["cotangent log_normalizer"])
    ds_mn = work.addcmul(ds_mn, c_mn, a["cotangent column_normalizer"].mT)
    return {"query": work.matmul(ds_mn, a["key"]), "key": work.matmul(ds_mn.mT, a["query"])}


def both_pushforward(tile: Tile, a: Arguments) -> Arguments:
    """Tangents of (G, H) along score tangents t:  dG_i = sum_j p t,   dH_j = sum_i c t."""
    work = tile.work
    p_mn, c_mn = _both_weights(tile, a)
    t_mn = score_tangent(tile, a, "tangent ")
    if t_mn is None:
        raise RuntimeError("a tangent of neither queries nor keys")
    return {
        "log_normalizer": row_sum(work.mul(p_mn, t_mn)),
        "column_normalizer": work.mul(c_mn, t_mn).sum(-2, keepdim=True).mT,
    }
