"""(mean, G, entropy): by the compiled engine, by torch's fused operator, or over tiles of keys.

In tiles the sums of one strip of queries are merged by the monoid of ``merge.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.typed import functions, linalg
from cumulant.kernels import formulas, fused
from cumulant.kernels.engines import compiled, fused_first, narrowed
from cumulant.kernels.formulas import INDEX
from cumulant.kernels.merge import Pool
from cumulant.kernels.ring import Ring
from cumulant.kernels.tiles import Arguments, Band, Named, Tile, has_nan, removes_keys, walk
from cumulant.kernels.visibility import marks_seen
from cumulant.kernels.workspace import Workspace

__all__ = ["EXTRAS", "ORDER", "Options", "forward", "grid_of", "scores_are_small"]

# What `forward` returns; the entropy only on request.
ORDER = ("mean", "log_normalizer", "entropy")


@dataclass(frozen=True)
class Options:
    """The fixed options of a call: scale, visible pairs, dropout, whether to compute entropy.

    `narrow` is the half precision that the caller's numbers came in, if they did. With a `ring`,
    keys and values are this rank's, and attention is over those of all ranks.
    """

    scale: float = 1.0
    band: Band = Band()
    dropout: float = 0.0
    entropy: bool = False
    ring: Ring | None = None
    narrow: torch.dtype | None = None


class _Sums(NamedTuple):
    """Unnormalized sums over some keys, relative to e^peak."""

    peak: Tensor
    mass: Tensor  # sum of p
    weighted: Tensor  # sum of p v
    heat: Tensor | None  # sum of p log2 p, where the entropy is wanted


def _on_tile(tile: Tile, a: Arguments, options: Options, shift: bool) -> _Sums:
    """The sums of one tile; `shift` takes each row's maximum as its peak."""
    work = tile.work
    s_mn = formulas.scores(tile, a, 1.0 if shift else formulas.LOG2_E)
    peak = s_mn.new_zeros(1)
    if shift:
        peak = s_mn.amax(-1, keepdim=True)
        peak.masked_fill_(peak == -math.inf, 0.0)
        s_mn = work.scale(work.sub(s_mn, peak), formulas.LOG2_E)
    p_mn = work.exp2(s_mn, fresh=options.entropy)
    weighted = formulas.dropped(tile, a, options.dropout, p_mn) @ a["value"]
    if "broken" in a:  # values that are not finite reach the rows that give them weight
        weighted.masked_fill_((p_mn > 0).to(weighted.dtype) @ a["broken"] > 0, math.nan)
    mass, heat = formulas.row_sum(p_mn), None
    if options.entropy:
        heat = formulas.row_sum(work.mul(formulas.bounded(tile, a, s_mn), p_mn))
    return _Sums(peak, mass, weighted, heat)


def _add(first: _Sums, second: _Sums) -> _Sums:
    """Sums relative to the same peak simply add."""
    heat = None
    if first.heat is not None and second.heat is not None:
        heat = first.heat.add_(second.heat)
    mass, weighted = first.mass.add_(second.mass), first.weighted.add_(second.weighted)
    return _Sums(first.peak, mass, weighted, heat)


def _normalize(sums: _Sums) -> list[Tensor]:
    """(mean, G, entropy) from the sums."""
    mass = sums.mass.masked_fill(sums.mass == 0, 1.0)
    log_mass = mass.log2()
    normalizer = sums.peak + log_mass / formulas.LOG2_E
    out = [sums.weighted.div_(mass), normalizer.masked_fill_(sums.mass == 0, -math.inf)]
    if sums.heat is not None:
        out.append(((log_mass - sums.heat / mass) / formulas.LOG2_E).clamp_min_(0.0))
    return out


def grid_of(arguments: Named) -> tuple[int, int]:
    """(queries, keys)."""
    return arguments["query"].shape[-2], arguments["key"].shape[-2]


def scores_are_small(options: Options, arguments: Named) -> bool:
    """Whether every |score| is below 32 log 2 by Cauchy-Schwarz, so no maximum is subtracted.

    Off the CPU the answer would cost more than the maximum.
    """
    if "bias" in arguments or arguments["query"].device.type != "cpu":
        return False
    if 0 in (arguments["query"].numel(), arguments["key"].numel()):
        return True
    longest = (linalg.vector_norm(arguments[n], dim=-1).amax() for n in ("query", "key"))
    return abs(options.scale) * math.prod(float(x) for x in longest) * formulas.LOG2_E < 32


def _stream(options: Options, arguments: Named) -> list[Tensor]:
    """(mean, G, entropy), merging tiles of keys one after another."""
    query, value = arguments["query"], arguments["value"]
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    m, n = grid_of(arguments)
    # With a band some rows may have no tile; otherwise every row is written below.
    unwritten = not options.band.open or n == 0
    make = query.new_zeros if unwritten else query.new_empty
    mean, entropy = make((*batch, m, value.shape[-1])), make((*batch, m, 1))
    normalizer = query.new_full((*batch, m, 1), -math.inf)
    results = [mean, normalizer, entropy][: 3 if options.entropy else 2]
    if 0 in (*batch, m, n):
        return results
    shift = not scores_are_small(options, arguments)
    with Workspace.lease(query) as work:
        for where, tiles in walk(arguments, INDEX, (m, n), options.band, work):
            pending: _Sums | None = None
            done: list[Tensor] | None = None
            for tile, cut in tiles:
                cut["query"] = cut["query"] * options.scale
                sums = _on_tile(tile, cut, options, shift)
                if shift:
                    part = _normalize(sums)
                    done = part if done is None else _merge(done, part)
                else:
                    pending = sums if pending is None else _add(pending, sums)
            if pending is not None:
                done = _normalize(pending)
            if done is not None:
                for result, x in zip(results, done, strict=True):
                    result[where] = x
    return results


def _merge(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    pool = Pool([first[1], second[1]])
    if len(first) == 2:
        (mean,) = pool.means([first[0], second[0]])
        return [mean, pool.log_normalizer()]
    mean, surprise = pool.means([first[0], second[0]], pool.surprises([first[2], second[2]]))
    return [mean, pool.log_normalizer(), pool.entropy(surprise)]


def _guarded(arguments: Named) -> Arguments:
    """The same call arranged so that no NaN or infinity meets a weight of exactly zero."""
    out = dict(arguments)
    value = arguments["value"]
    finite = value.isfinite()
    out["value"] = value.masked_fill(~finite, 0.0)
    out["broken"] = (~finite).to(value.dtype)
    if "bias" in arguments:
        seen = arguments["bias"] != -math.inf
        out["mask"] = arguments["mask"] & seen if "mask" in arguments else seen
    return out


def _around(options: Options, ring: Ring, arguments: Named) -> list[Tensor]:
    """The same over the keys of all ranks, block by block."""
    still = {n: x for n, x in arguments.items() if "j" not in INDEX[n]}
    out: list[Tensor] | None = None
    moving = {n: x for n, x in arguments.items() if n not in still}
    for block in ring.blocks(moving, still.pop("origin", None)):
        band = options.band.shifted(block.before - ring.queries_before)
        here = replace(options, band=band, ring=None)
        part = forward(here, {**still, **block.arguments})[: 3 if options.entropy else 2]
        out = part if out is None else _merge(out, part)
    return out or []


# What the compiled engine computes in the same pass as the entropy, at almost no cost.
EXTRAS = ("score_mean", "score_variance", "score_max")


def _compiled_forward(options: Options, arguments: Named) -> Sequence[Tensor] | None:
    if (engine := compiled(arguments["query"].device)) is None:
        return None
    fields = ("entropy", *EXTRAS) if options.entropy else ()
    done = engine.forward(
        narrowed(engine, arguments, options.narrow),
        scale=options.scale,
        band=options.band,
        rate=options.dropout,
        fields=fields,
    )
    return None if done is None else [done[n] for n in (*ORDER[:2], *fields)]


def forward(options: Options, arguments: Named) -> list[Tensor]:
    """(mean, G[, entropy[, *EXTRAS]]) of named arguments, without derivative."""
    if options.ring is not None:
        return _around(options, options.ring, arguments)
    hides = removes_keys(arguments, options.band)
    if hides and arguments["query"].device.type != "cpu":
        return _shielded(options, arguments)
    out = _computed(options, arguments)
    if hides and has_nan(out):
        # A hidden key that holds NaN must not reach a row as 0 * NaN: sort it out exactly.
        out = _stream(options, _guarded(arguments))
    return out


def _computed(options: Options, arguments: Named) -> list[Tensor]:
    """By the first engine that supports the call."""

    def by_fused() -> Sequence[Tensor] | None:
        if options.entropy:
            return None
        return fused.forward(arguments, options.scale, options.band, options.narrow)

    first = fused_first(arguments["query"].device)
    out = by_fused() if first else None
    if out is None:
        out = _compiled_forward(options, arguments)
    if out is None and not first:
        out = by_fused()
    return _stream(options, arguments) if out is None else list(out)


def _shielded(options: Options, arguments: Named) -> list[Tensor]:
    """`forward` without asking the device whether anything is NaN.

    Keys and values that are not finite are replaced by zeros, and rows that see one become NaN: all
    results of a key, the mean of a value.
    """
    bad = {n: ~arguments[n].isfinite().all(-1, keepdim=True) for n in ("key", "value")}
    clean = {n: x.masked_fill(bad[n], 0.0) if n in bad else x for n, x in arguments.items()}
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in bad.values()))
    marks = torch.cat([x.expand(*batch, *x.shape[-2:]) for x in bad.values()], -1)
    seen = marks_seen(arguments, options.band, marks.to(arguments["query"].dtype)) > 0
    key = seen[..., :1]
    mean, *rest = _computed(options, clean)
    spoiled = mean.masked_fill(seen.any(-1, keepdim=True), math.nan)
    return [spoiled, *(x.masked_fill(key, math.nan) for x in rest)]
