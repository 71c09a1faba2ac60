"""Statistics of rows of attention weights, from one pass over the scores.

A strip of queries against all keys holds whole rows of weights, so their normalizer, entropy,
variance, order and moments come from one set of scores (docs/theory.md, T7, T12, T21). Nothing here
has a derivative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.eager import eager
from cumulant.core.precision import widest
from cumulant.core.typed import functions, linalg
from cumulant.kernels import formulas
from cumulant.kernels.attention import Options
from cumulant.kernels.engines import compiled
from cumulant.kernels.formulas import INDEX, LOG2_E, row_sum, with_scale
from cumulant.kernels.search import Largest, best, on_tile
from cumulant.kernels.tiles import Arguments, Program, Result, Tile, evaluate

__all__ = ["dropped", "largest_root", "root_without_asking", "sort_rows", "summarize"]

_BLOCK = 32

# In double precision 12 steps leave a relative error below 2e-7 on the heads of MiniLM, the largest
# of 37,000.
LANCZOS_STEPS = 12

_POWER_STEPS = 8
_SQUARINGS = 40


@eager
@torch.no_grad()
def summarize(
    arguments: Mapping[str, Tensor],
    options: Options,
    *,
    order: bool = True,
    spectrum: bool = True,
    mass: float = 0.9,
    largest: int = 0,
) -> Arguments:
    """Statistics of every query's weights, each ``(*batch, M, 1)``.

    ``log_normalizer``, ``entropy``, ``score_variance``, ``visible`` (how many keys the query sees)
    and ``fisher_trace`` = tr Cov[k] always; with `order` also ``coverage`` (the fewest keys that
    hold `mass`), ``top`` (which key has the largest weight) and ``top_weight``; with `spectrum`
    ``leading``, the largest eigenvalue of Cov[k]. ``marks`` among the arguments names keys by their
    number, ``(*batch, M, c)``: their weights come back as ``marked`` (0 for a negative number).
    With `largest` also that many weights and their keys, ``largest`` and ``largest_key``, in
    descending order and of equal ones the first key; 0 and -1 where fewer are above 0.
    """
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    m, n = arguments["query"].shape[-2], arguments["key"].shape[-2]
    widths: dict[str, int] = dict.fromkeys(
        ("log_normalizer", "entropy", "score_variance", "visible", "fisher_trace"), 1
    )
    widths |= dict.fromkeys(("coverage", "top", "top_weight"), 1) if order else {}
    steps = min(LANCZOS_STEPS, arguments["key"].shape[-1])
    widths |= {"leading": 1} if spectrum else {}
    widths |= {"marked": arguments["marks"].shape[-1]} if "marks" in arguments else {}
    widths |= dict.fromkeys(("largest", "largest_key"), largest) if largest else {}
    # Moments about a typical key cancel less; hidden keys enter no sum.
    key = arguments["key"]
    arguments = {**arguments, "center": key.mean(-2, keepdim=True)}
    if (out := _compiled(arguments, options, widths, mass, steps)) is not None:
        return out
    if spectrum:
        del widths["leading"]
        widths["lanczos"] = 2 * steps
    function = partial(_summary, order=order, spectrum=spectrum, mass=mass, count=largest)
    program = Program(
        function=with_scale(function, options.scale),
        indices=INDEX,
        results=tuple(Result(name, "i", (*batch, m, c)) for name, c in widths.items()),
        grid=(m, n),
        band=options.band,
        whole_rows=True,
    )
    out = evaluate(program, arguments)
    # A strip of queries outside the band has no tile.
    out["log_normalizer"].masked_fill_(out["visible"] == 0, -math.inf)
    if largest:
        out["largest_key"].masked_fill_(out["visible"] == 0, -1)
    if spectrum:
        tridiagonal = out.pop("lanczos")
        some = torch.split(tridiagonal.reshape(-1, 2 * steps), 2**14)  # in double: not all at once
        root_of = largest_root if tridiagonal.device.type == "cpu" else root_without_asking
        roots = [root_of(x[..., :steps], x[..., steps:]) for x in some]
        out["leading"] = torch.cat(roots).reshape(*tridiagonal.shape[:-1], 1)
    return out


def _compiled(
    arguments: Arguments, options: Options, widths: Mapping[str, int], mass: float, steps: int
) -> Arguments | None:
    engine = compiled(arguments["query"].device)
    if engine is None or 0 in arguments["key"].shape:
        return None
    start = None
    if "leading" in widths:
        start = _start(arguments["key"] - arguments["center"]).unsqueeze(-2)
    return engine.statistics(
        arguments,
        widths,
        scale=options.scale,
        band=options.band,
        mass=mass,
        start=start,
        steps=steps,
    )


def _summary(
    tile: Tile, a: Arguments, *, order: bool, spectrum: bool, mass: float, count: int
) -> Arguments:
    work = tile.work
    s_mn = formulas.scores(tile, a)
    out: Arguments = {}
    hides = any(n in a for n in ("bias", "mask", "query_tag")) or not tile.band.open
    if hides:
        out["visible"] = row_sum(s_mn != -math.inf).to(s_mn.dtype)
    else:
        out["visible"] = s_mn.new_full((*s_mn.shape[:-1], 1), float(s_mn.shape[-1]))
    peak = s_mn.amax(-1, keepdim=True).masked_fill_(out["visible"] == 0, 0.0)
    top = _largest(s_mn)
    if order:
        out["top"] = (top + tile.columns.start).to(s_mn.dtype)
    l_mn = formulas.bounded(tile, a, work.sub(s_mn, peak))
    p_mn = work.exp2(l_mn, fresh=True)
    if hides:  # the floor of `bounded` is 2^-2000, which is zero already
        p_mn.masked_fill_(out["visible"] == 0, 0.0)
    total = row_sum(p_mn)
    inverse = total.reciprocal().masked_fill_(total == 0, 0.0)
    out["log_normalizer"] = (peak + total.log2()) / LOG2_E  # -inf for a row without keys
    heat = row_sum(work.mul(p_mn, l_mn, fresh=True)) * inverse
    log_total = total.masked_fill(total == 0, 1.0).log2()
    out["entropy"] = ((log_total - heat) / LOG2_E).clamp_min_(0.0)
    out["score_variance"] = _score_variance(tile, a, l_mn, heat, p_mn) * inverse
    if "marks" in a:
        index = a["marks"].long() - tile.columns.start
        here = (a["marks"] >= 0) & (index >= 0) & (index < len(tile.columns))
        marked = p_mn.gather(-1, index.clamp(0, len(tile.columns) - 1)) * inverse
        out["marked"] = marked.masked_fill_(~here, 0.0)
    if count:
        found = _most(p_mn, count)
        out["largest"] = found.score * inverse
        numbered = torch.where(found.index < 0, -1, found.index + tile.columns.start)
        out["largest_key"] = numbered.to(s_mn.dtype)
    # Moments about the key of the largest weight, which then has no part in them: where one key
    # holds nearly all the mass, nothing cancels.
    k_nd = a["key"] - a["center"]
    origin = k_nd.gather(-2, top.expand(*top.shape[:-1], k_nd.shape[-1]))
    p_mn = p_mn.scatter_(-1, top, 0.0)
    rest = row_sum(p_mn) * inverse
    sums = p_mn @ torch.cat([k_nd, row_sum(k_nd * k_nd)], -1) * inverse
    mean = sums[..., :-1] - rest * origin
    square = sums[..., -1:] - 2 * row_sum(sums[..., :-1] * origin) + rest * row_sum(origin * origin)
    out["fisher_trace"] = (square - row_sum(mean * mean)).clamp_min_(0.0)
    if spectrum:
        about = _About(origin, mean, inverse, out["fisher_trace"])
        out["lanczos"] = _lanczos(tile, p_mn, k_nd, about)
    if order:
        p_mn = p_mn.scatter_(-1, top, 1.0)
        if hides:
            p_mn.masked_fill_(total == 0, 0.0)
        out["top_weight"] = inverse  # the largest weight is 2^0 before normalization
        less = dropped(sort_rows(p_mn), total * (1 - mass))
        out["coverage"] = (s_mn.shape[-1] - less).masked_fill(total == 0, 0).to(s_mn.dtype)
    return out


def _most(p_mn: Tensor, count: int) -> Largest:
    """The `count` largest weights above 0."""
    found = best([on_tile(p_mn, min(count, p_mn.shape[-1]))], count)
    none = found.score <= 0
    return Largest(found.score.masked_fill(none, 0.0), found.index.masked_fill(none, -1))


def _score_variance(tile: Tile, a: Arguments, l_mn: Tensor, heat: Tensor, p_mn: Tensor) -> Tensor:
    """The sum of p (s - E[s])^2, where s is the score without the bias."""
    work = tile.work
    if "bias" in a:
        s_mn = formulas.capped(tile, a, work.matmul(a["query"] * LOG2_E, a["key"].mT), LOG2_E)
        mass = row_sum(p_mn).clamp_min_(torch.finfo(p_mn.dtype).tiny)
        l_mn = s_mn
        heat = row_sum(work.mul(p_mn, s_mn, fresh=True)) / mass
    t_mn = work.sub(l_mn, heat)
    return row_sum(work.mul(work.mul(t_mn, t_mn), p_mn)) / LOG2_E**2


class _About(NamedTuple):
    """Rows of moments: the key they are about, the mean from there, 1 / mass, tr Cov[k]."""

    origin: Tensor
    mean: Tensor
    inverse: Tensor
    trace: Tensor


def _start(k_nd: Tensor) -> Tensor:
    """A unit vector ``(..., d)`` near the leading direction of all keys.

    A small extra component keeps it from being orthogonal to the leading direction.
    """
    square = (k_nd.mT @ k_nd).nan_to_num(0.0, 0.0, 0.0)
    other = torch.cos(torch.arange(k_nd.shape[-1], device=k_nd.device) ** 2.0).to(k_nd.dtype)
    other = other / linalg.vector_norm(other)
    if k_nd.device.type == "cpu":
        start = linalg.eigh(square).eigenvectors[..., -1]
    else:  # the solver would stall the device: a few steps of the power method do
        start = other.expand(square.shape[:-1])
        for _ in range(_POWER_STEPS):
            start = (square @ start.unsqueeze(-1)).squeeze(-1)
            start = torch.nn.functional.normalize(start, dim=-1)
    start = start + 0.1 * other
    return start / linalg.vector_norm(start, dim=-1, keepdim=True)


def _lanczos(tile: Tile, p_mn: Tensor, k_nd: Tensor, about: _About) -> Tensor:
    """Lanczos' tridiagonal matrix for Cov[k] of every row: diagonal, then off-diagonal.

    A product Cov[k] u = E[x <x, u>] - E[x] <E[x], u>, x = k - origin, is two matrix products with
    the weights, so no covariance is formed.
    """
    v_md = _start(k_nd).unsqueeze(-2).expand_as(about.mean)
    t_mn = tile.work.matmul(v_md, k_nd.mT)
    previous, beside = torch.zeros_like(v_md), torch.zeros_like(about.inverse)
    rounding = 32 * torch.finfo(p_mn.dtype).eps * about.trace
    diagonal: list[Tensor] = []
    off: list[Tensor] = []
    for step in range(min(LANCZOS_STEPS, v_md.shape[-1])):
        if step:
            torch.matmul(v_md, k_nd.mT, out=t_mn)
        t_mn.sub_(row_sum(about.origin * v_md)).mul_(p_mn)
        w_md = (t_mn @ k_nd - row_sum(t_mn) * about.origin) * about.inverse
        w_md = w_md - about.mean * row_sum(about.mean * v_md) - beside * previous
        along = row_sum(w_md * v_md)
        w_md = w_md - along * v_md
        beside = linalg.vector_norm(w_md, dim=-1, keepdim=True)
        diagonal.append(along)
        off.append(beside)
        done = beside <= rounding
        previous, v_md = v_md, (w_md / beside.masked_fill(done, 1.0)).masked_fill(done, 0.0)
        off[-1] = beside = beside.masked_fill(done, 0.0)
    return torch.cat([*diagonal, *off], -1)


def largest_root(diagonal: Tensor, off: Tensor) -> Tensor:
    """The largest eigenvalue of symmetric tridiagonal matrices, ``(..., 1)`` from ``(..., s)``.

    Laguerre's method, which descends from any upper bound to the largest real root. The quotients
    delta_k = x - a_k - b_(k-1)^2 / delta_(k-1) of neighboring minors stay positive above it.
    """
    a, b = diagonal.double(), off.double()[..., :-1].abs()  # signs do not matter to the roots
    s = a.shape[-1]
    reach = torch.nn.functional.pad(b, (1, 0)) + torch.nn.functional.pad(b, (0, 1))
    top = (a + reach).amax(-1, keepdim=True)  # Gershgorin
    size = top.abs().clamp_min(torch.finfo(torch.float64).tiny)
    x = top + 1e-9 * size
    for _ in range(30):  # a few for a simple root, more for a double one
        delta = x - a[..., :1]
        above = delta > 0
        first, second = torch.ones_like(x), torch.zeros_like(x)
        one, two = 1 / delta, 1 / delta**2
        for k in range(1, s):
            square = b[..., k - 1 : k] ** 2
            second = square * (second / delta**2 - 2 * first**2 / delta**3)
            first = 1 + square * first / delta**2
            delta = x - a[..., k : k + 1] - square / delta
            above = above & (delta > 0)
            one = one + first / delta
            two = two + (first / delta) ** 2 - second / delta
        root = ((s - 1) * (s * two - one**2)).clamp_min(0.0).sqrt()
        step = s / (one + root)
        moving = above & (step > 1e-13 * size)  # by rounding below the root: it is found
        x = torch.where(moving, x - step, x)
        if not bool(moving.any()):
            break
    return x.clamp_min(0.0).to(diagonal.dtype)


def root_without_asking(diagonal: Tensor, off: Tensor) -> Tensor:
    """`largest_root` of positive semidefinite matrices, by squaring them; the host never waits.

    After n squarings the other roots count (their quotient to the largest)^(2^n): an error below
    2^-n of the largest root, however close they are.
    """
    kind = widest(diagonal)
    a, b = diagonal.to(kind), off.to(kind)[..., :-1]
    matrix = a.diag_embed() + b.diag_embed(1) + b.diag_embed(-1)
    power = matrix
    for _ in range(_SQUARINGS):
        largest = power.abs().amax((-2, -1), keepdim=True)
        power = power / largest.masked_fill(largest == 0, 1.0)
        power = power @ power
    trace = power.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    total = (matrix * power).sum((-2, -1)).unsqueeze(-1)
    root = total / trace.masked_fill(trace == 0, 1.0)
    return root.clamp_min(0.0).to(diagonal.dtype)


def _largest(s_mn: Tensor) -> Tensor:
    """Which key has the largest score, ``(..., m, 1)``; numpy's search is ten times faster."""
    if s_mn.device.type != "cpu":
        return s_mn.argmax(-1, keepdim=True)
    return functions.from_numpy(s_mn.numpy().argmax(-1)[..., None])


def sort_rows(x: Tensor) -> Tensor:
    """Rows in ascending order, in place if x is on the CPU: numpy's sort is vectorized."""
    if x.device.type != "cpu":
        return x.sort(-1).values
    x.numpy().sort(-1)  # threads gain nothing here
    return x


def dropped(rising: Tensor, limit: Tensor) -> Tensor:
    """How many of the smallest entries of each row sum to at most `limit`; at least one stays.

    With a small tolerance, so that one of ten equal weights counts as a tenth. In blocks: a running
    sum over all entries would cost as much as everything else here.
    """
    n = rising.shape[-1]
    limit = limit + 64 * torch.finfo(rising.dtype).eps * rising.sum(-1, keepdim=True)
    rest = n % _BLOCK
    head, body = rising[..., :rest], rising[..., rest:]
    count = (head.cumsum(-1) <= limit).sum(-1, keepdim=True)
    if body.shape[-1]:
        base = head.sum(-1, keepdim=True)
        blocks = torch.unflatten(body, -1, (-1, _BLOCK))
        sums = blocks.sum(-1).cumsum(-1) + base
        full = (sums <= limit).sum(-1, keepdim=True)
        at = full.clamp_max(blocks.shape[-2] - 1)
        before = torch.where(at > 0, sums.gather(-1, (at - 1).clamp_min(0)), base)
        index = at.unsqueeze(-1).expand(*at.shape, _BLOCK)
        inner = blocks.gather(-2, index).squeeze(-2).cumsum(-1) + before
        count = torch.where(
            base <= limit, rest + at * _BLOCK + (inner <= limit).sum(-1, keepdim=True), count
        )
    return count.clamp_max(n - 1)
