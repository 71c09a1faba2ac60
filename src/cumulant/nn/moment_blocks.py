"""Covariance of the multi-head attention output, in three forms (docs/theory.md, T28).

Shapes: b batch, H heads, M queries, N keys, d features per head, E = H d. Everything runs on the
streaming kernel; no M x N array is formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from cumulant.attention import attend
from cumulant.attention.attended import Attended
from cumulant.core.lazy import Lazy, kept
from cumulant.core.typed import functions, linalg

__all__ = ["Heads", "Maps", "dense", "diagonal", "low_rank"]

Rows = Callable[[int], Tensor]
_BUDGET = 2**22  # entries of the covariances that are dense at one time, in the low-rank form


@dataclass(frozen=True)
class Heads(Lazy):
    """Queries, keys and value means ``(*b, H, length, d)``, and the mask.

    The mask is None or has at least three dimensions, including heads; `start` is the position of
    the first query in the sequence.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    causal: bool = False
    start: int = 0

    @property
    def count(self) -> int:
        return self.query.shape[-3]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1])

    def to(self, dtype: torch.dtype) -> Heads:
        """Convert to `dtype`, additive mask included."""
        mask = self.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        q, k, v = (x.to(dtype) for x in (self.query, self.key, self.value))
        return replace(self, query=q, key=k, value=v, mask=mask)

    def at(self, first: int, last: int) -> Heads:
        """A slice of the queries with all of the keys."""
        mask = self.mask
        if mask is not None and mask.shape[-2] != 1:
            mask = mask[..., first:last, :]
        query = self.query[..., first:last, :]
        return replace(self, query=query, mask=mask, start=self.start + first)

    def chunks(self) -> list[tuple[int, int]]:
        """Ranges of queries whose dense covariances fit the budget."""
        *batch, heads, length, size = self.query.shape
        step = max(1, _BUDGET // max(1, math.prod(batch) * (heads * size) ** 2))
        return [(a, min(a + step, length)) for a in range(0, length, step)] or [(0, 0)]

    def read(self, values: Tensor, heads: slice = slice(None)) -> Attended:
        """Attention of these heads to values ``(*b, heads, N, any)``."""
        query, key = (x[..., heads, :, :] for x in (self.query, self.key))
        return self._attend(query, key, values, self._mask_of(heads))

    def read_together(self, first: slice, second: slice, values: Tensor) -> Tensor:
        """sum_i p^h(i) p^g(i) values_i, ``(*b, heads, M, any)``, for pairs of heads h and g.

        The product of two softmaxes is a scaled softmax of the summed scores: p^h p^g =
        softmax(s^h + s^g) exp(G_(h+g) - G_h - G_g). So this is attention with the queries and keys
        of both heads concatenated, times one factor per query.
        """
        query, key = (
            torch.cat(functions.broadcast_tensors(x[..., first, :, :], x[..., second, :, :]), -1)
            for x in (self.query, self.key)
        )
        mask, beside = self._mask_of(first), self._mask_of(second)
        if mask is not None and beside is not None:
            mask = mask & beside if mask.dtype == torch.bool else mask + beside
        a, G = self._attend(query, key, values, mask), self.log_normalizer
        exponent = a.log_normalizer - G[..., first, :] - G[..., second, :]
        # No key visible to both heads: G is -inf, and the sum is empty.
        log_share = torch.where(a.log_normalizer > -math.inf, exponent, -math.inf)
        return log_share.exp()[..., None] * a.mean

    @kept
    def log_normalizer(self) -> Tensor:
        """G per head and query, ``(*b, H, M)``."""
        return self.read(self.key[..., :0]).log_normalizer

    @kept
    def own_weight(self) -> Tensor:
        """p^h(j|j), each token's attention to itself, repeated over the features of its head:
        ``(*b, M, E)``."""
        m = self.query.shape[-2]
        key = self.key[..., self.start : self.start + m, :]
        score, seen = self.scale * (self.query * key).sum(-1), self.log_normalizer > -math.inf
        if self.mask is not None:
            n = self.key.shape[-2]
            grid = self.mask.expand(*self.mask.shape[:-2], m, n)
            diagonal = grid.diagonal(self.start, -2, -1)
            if self.mask.dtype == torch.bool:
                seen = seen & diagonal
            else:
                seen, score = seen & (diagonal > -math.inf), score + diagonal
        weight = torch.where(seen, score - self.log_normalizer, -math.inf).exp()
        return weight.mT.repeat_interleave(self.query.shape[-1], -1)

    def _mask_of(self, heads: slice) -> Tensor | None:
        if self.mask is None or self.mask.shape[-3] == 1:
            return self.mask
        return self.mask[..., heads, :, :]

    def _attend(self, query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None) -> Attended:
        window = (None, self.start) if self.causal else None
        return attend(query, key, values, attn_mask=mask, scale=self.scale, window=window)


@dataclass(frozen=True)
class Maps:
    """Value map and output map ``(E, E)``, the noise Q between them ``(E,)``, and the reading."""

    inward: Tensor
    outward: Tensor
    noise: Tensor
    mixture: bool


def diagonal(heads: Heads, maps: Maps, variance: Tensor | None, *, residual: bool) -> Tensor:
    """Variances ``(*b, M, E)`` of the output, or of token plus output, from the tokens'."""
    carried = None
    if variance is not None:
        carried = variance @ maps.inward.square().mT
        carried = torch.unflatten(carried, -1, (heads.count, -1)).transpose(-3, -2)
    joined = maps.noise.expand(*heads.query.shape[:-3], heads.query.shape[-2], -1)
    found = _mixed_variance(heads, carried) if maps.mixture else _averaged_variance(heads, carried)
    if found is not None:
        joined = joined + found.transpose(-3, -2).flatten(-2)
    out = joined @ maps.outward.square().mT
    if residual and variance is not None:
        shared = variance * (heads.own_weight @ (maps.outward * maps.inward.mT).mT)
        out = (variance + out + 2 * shared).clamp_min(0.0)
    return out


def dense(heads: Heads, maps: Maps, covariance: Tensor | None, *, residual: bool) -> Tensor:
    """Covariances ``(*b, M, E, E)`` of the output, or of token plus output, from the tokens'."""
    if covariance is None:
        return _behind_output(heads, maps, None, None)
    size = heads.query.shape[-1]
    own = _symmetric(covariance)
    carried = _symmetric(maps.inward @ own @ maps.inward.mT)

    def rows(h: int) -> Tensor:
        return carried[..., h * size : (h + 1) * size, h * size :]

    return _behind_output(heads, maps, rows, own if residual else None)


def low_rank(
    heads: Heads, maps: Maps, factor: Tensor | None, *, residual: bool, rank: int
) -> Tensor:
    """Factors ``(*b, M, E, rank)`` of the covariances of the output, or of token plus output."""
    size, rows = heads.query.shape[-1], None
    if factor is not None:
        carried = maps.inward @ factor

        def products(h: int) -> Tensor:
            return carried[..., h * size : (h + 1) * size, :] @ carried[..., h * size :, :].mT

        # Autograd would keep the products of every chunk, so compute them once.
        rows = cache(products) if torch.is_grad_enabled() else products
    parts: list[Tensor] = []
    for first, last in heads.chunks():
        own = None
        if residual and factor is not None:
            some = factor[..., first:last, :, :]
            own = some @ some.mT
        parts.append(_truncated(_behind_output(heads.at(first, last), maps, rows, own), rank))
    return torch.cat(parts, -3)


def _behind_output(heads: Heads, maps: Maps, rows: Rows | None, own: Tensor | None) -> Tensor:
    """Covariances ``(*b, M, E, E)`` after the output map; of token plus output if the tokens' `own`
    covariances are given."""
    joint = _joint(heads, rows, mixture=maps.mixture) + torch.diag_embed(maps.noise)
    out = maps.outward @ joint @ maps.outward.mT
    if own is not None:
        shared = (own @ maps.inward.mT * heads.own_weight[..., None, :]) @ maps.outward.mT
        out = own + out + 2 * shared
    return _symmetric(out)


def _symmetric(x: Tensor) -> Tensor:
    """Average with the transpose: exactly symmetric."""
    return (x + x.mT) / 2


def _mixed_variance(heads: Heads, carried: Tensor | None) -> Tensor:
    """sum_i p_i (carried_i + (m_i - m)^2), ``(*b, H, M, d)``."""
    # E[v^2] - E[v]^2 cancels least relative to a typical value; the caller doubles the precision.
    value = heads.value - heads.value.detach().mean(-2, keepdim=True)
    square = value.square() if carried is None else value.square() + carried
    first, second = heads.read(torch.cat([value, square], -1)).mean.chunk(2, -1)
    return (second - first.square()).clamp_min(0.0)


def _averaged_variance(heads: Heads, carried: Tensor | None) -> Tensor | None:
    """sum_i p_i^2 carried_i, ``(*b, H, M, d)``."""
    if carried is None:
        return None
    return heads.read_together(slice(None), slice(None), carried)


def _joint(heads: Heads, rows: Rows | None, *, mixture: bool) -> Tensor:
    """Covariance of the concatenated head outputs, ``(*b, M, E, E)``.

    ``rows(h)`` gives the covariances carried by the values, ``(*b, N, d, (H - h) d)``: those of
    head h with itself and with every later head.
    """
    count, size = heads.count, heads.query.shape[-1]
    shape = (*heads.query.shape[:-3], heads.query.shape[-2], size, size)
    table: list[list[Tensor]] = [[] for _ in range(count)]
    for h in range(count):
        carried = None
        if rows is not None:  # (*b, N, d, heads, d) to (*b, heads, N, d, d)
            carried = torch.unflatten(rows(h), -1, (count - h, size)).movedim(-2, -4)
        if mixture:
            own = None if carried is None else carried[..., 0, :, :, :]
            table[h].append(_mixed(heads, h, own))
        g = len(table[h])
        if carried is None:
            table[h] += [heads.query.new_zeros(shape)] * (count - g)
        elif g < count:
            values = carried[..., g - h :, :, :, :].flatten(-2)
            read = torch.unflatten(
                heads.read_together(slice(h, h + 1), slice(g, None), values), -1, (size, size)
            )
            table[h] += read.unbind(-4)
        for g in range(h + 1, count):
            table[g].append(table[h][g].mT)
    return torch.cat([torch.cat(row, -1) for row in table], -2)


def _mixed(heads: Heads, h: int, carried: Tensor | None) -> Tensor:
    """sum_i p_i (carried_i + (m_i - m)(m_i - m)') of one head, ``(*b, M, d, d)``.

    Attention reads the upper triangle only; the lower one mirrors it.
    """
    size = heads.query.shape[-1]
    i, j = torch.triu_indices(size, size, device=heads.query.device)
    m = heads.value[..., h, :, :] - heads.value[..., h, :, :].detach().mean(-2, keepdim=True)
    square = m[..., i] * m[..., j]
    if carried is not None:
        square = square + carried[..., i, j]
    value = torch.cat([m, square], -1).unsqueeze(-3)
    read = heads.read(value, slice(h, h + 1)).mean.squeeze(-3)
    first, second = torch.split(read, [size, len(i)], -1)
    half = second - first[..., i] * first[..., j]
    half = torch.where(i == j, half.clamp_min(0.0), half)
    place = torch.empty(size, size, dtype=torch.long, device=i.device)
    place[i, j] = place[j, i] = torch.arange(len(i), device=i.device)
    return half[..., place]


def _truncated(covariance: Tensor, rank: int) -> Tensor:
    """The F ``(..., E, rank)`` with F F' closest to the covariance; largest direction first.

    A perturbation far below the precision of the result separates eigenvalues that coincide at
    zero, where the derivative of the eigenvectors would be 0/0. Directions without variance are
    exactly zero.
    """
    size = covariance.shape[-1]
    finest = 500 * torch.finfo(covariance.dtype).eps
    scale = covariance.detach().diagonal(dim1=-2, dim2=-1).sum(-1)[..., None] + 1e-30
    steps = torch.arange(size, dtype=covariance.dtype, device=covariance.device) / size
    tilted = covariance + torch.diag_embed(finest * scale * steps)
    # Let the layer report non-finite values, not the eigenvalue routine.
    values, vectors = linalg.eigh(tilted.nan_to_num(0.0, 0.0, 0.0))
    values = torch.where(covariance.sum((-2, -1)).isfinite()[..., None], values, torch.nan)
    values, vectors = values[..., -rank:].flip(-1), vectors[..., -rank:].flip(-1)
    kept = ~(values <= 10 * finest * scale)
    return vectors * torch.where(kept, values, 1.0).sqrt()[..., None, :] * kept[..., None, :]
