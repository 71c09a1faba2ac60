"""Sums over keys weighted by any function of the score, and their associative form (T36).

Attention with another kernel than exp is sum_j f(s_ij) v_j, perhaps divided by sum_j f(s_ij): a sum
over tiles like every other (`tiles.py`), so it streams in memory linear in M + N and has every
derivative. If the kernel is a product of features, f(s_ij) = <a(q_i), a(k_j)>, the sums associate:
keys and values are summed first, in time linear in the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from cumulant.core.errors import InputError
from cumulant.core.typed import functions
from cumulant.kernels.band import Band
from cumulant.kernels.tiles import Arguments, Program, Result, Tile, tile_sum

__all__ = ["associative_sums", "weighted_sums"]

_CHUNK = 64


def weighted_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Callable[[Tensor], Tensor],
    *,
    is_causal: bool = False,
) -> Tensor:
    """sum_j f(<q_i, k_j>) v_j for any elementwise f, in memory linear in M + N.

    Args:
        query: ``(*batch, M, d)``, already scaled.
        key: ``(*batch, N, d)``.
        value: ``(*batch, N, e)``.
        weight: f; elementwise, made of operations that torch differentiates.
        is_causal: query i sees keys j <= i.

    Raises:
        InputError: f is not elementwise.

    >>> import torch
    >>> q, k, v = (torch.randn(2, 5, 3) for _ in range(3))
    >>> streamed = weighted_sums(q, k, v, torch.relu)
    >>> torch.allclose(streamed, (q @ k.mT).relu() @ v, atol=1e-6)
    True
    """

    def function(tile: Tile, given: Arguments) -> Arguments:
        scores = given["query"] @ given["key"].mT
        weights = weight(scores)
        if getattr(weights, "shape", None) != scores.shape:
            raise InputError(
                "the kernel must map each score to a weight, but of scores "
                f"{tuple(scores.shape)} it made {_described(weights)}."
            )
        hidden = tile.band.hidden(tile.rows, tile.columns, weights.device)
        if hidden is not None:
            weights = weights.masked_fill(hidden, 0.0)
        return {"sum": weights @ given["value"]}

    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
    program = Program(
        function=function,
        indices={"query": "i", "key": "j", "value": "j"},
        results=(Result("sum", "i", (*batch, query.shape[-2], value.shape[-1])),),
        grid=(query.shape[-2], key.shape[-2]),
        band=Band(upper=0) if is_causal else Band(),
    )
    dims = len(batch)
    given = {"query": query, "key": key, "value": value}
    lifted = {n: x.reshape((1,) * (dims + 2 - x.ndim) + x.shape) for n, x in given.items()}
    total = tile_sum(program, lifted)["sum"]
    return total + _spoiled(key, value, query.shape[-2]) if is_causal else total


def associative_sums(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """sum_j <a_i, b_j> v_j, in time and memory linear in the length.

    Causal sums are taken in chunks: the sums of all earlier chunks, plus the pairs inside a chunk.

    Args:
        query, key: features a ``(*batch, M, f)`` and b ``(*batch, N, f)``; causal needs M = N.
        value: ``(*batch, N, e)``.
        is_causal: query i sees keys j <= i.
    """
    if not is_causal:
        return query @ (key.mT @ value)
    length = query.shape[-2]
    spare = -length % _CHUNK
    clean = (x.masked_fill(~x.isfinite(), 0.0) for x in (key, value))  # 0 * NaN, of later keys
    q, k, v = (torch.unflatten(pad(x, (0, 0, 0, spare)), -2, (-1, _CHUNK)) for x in (query, *clean))
    states = pad(k.mT @ v, (0, 0, 0, 0, 1, 0))  # the first chunk has none before it
    before = states.cumsum(-3)[..., :-1, :, :]
    inside = torch.tril(q @ k.mT) @ v
    sums = (q @ before + inside).flatten(-3, -2)[..., :length, :]
    return sums + _spoiled(key, value, length)


def _spoiled(key: Tensor, value: Tensor, queries: int) -> Tensor:
    """NaN for causal queries ``(*batch, M, 1)`` that see a key or value that is not finite, else 0.

    Sums with hidden keys replace such rows by zeros, for the sake of queries that do not see them.
    """
    bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    seen = pad(bad.long(), (0, queries - bad.shape[-1])).cumsum(-1) > 0
    return torch.where(seen[..., None], math.nan, 0.0).to(value.dtype)


def _described(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
