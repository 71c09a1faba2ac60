"""`rollout`: attention through all layers, as products that never form an N x N matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cumulant.attention.attended import Attended
from cumulant.core.checks import real
from cumulant.core.errors import InputError

__all__ = ["rollout"]


def rollout(
    layers: Sequence[Attended], tokens: int | Sequence[int] | Tensor, *, residual: float = 0.5
) -> Tensor:
    """How much each input token contributes to some output tokens (Abnar & Zuidema, 2020).

    With A_l the weights of layer l averaged over its heads and r = `residual`,

        R = (r I + (1 - r) A_L) ... (r I + (1 - r) A_1),

    of which the rows of `tokens` are returned. A product of rows with A_l is what keys `receive`,
    so memory is linear in N, and the result is differentiable to any order. Rows sum to 1 unless
    there are sinks, whose share is lost.

    Args:
        layers: results of self-attention from the first layer to the last, fields of shape
            ``(*batch, heads, N)``, or ``(N,)`` for one head.
        tokens: the output tokens: an index or several, or rows of weights ``(rows, N)`` or
            ``(*batch, rows, N)``.
        residual: the share of the residual connection; 0 is the plain product of the weights.

    Returns:
        Tensor: ``(*batch, rows, N)``; for a single index ``(*batch, N)``.

    Raises:
        InputError: there are no layers, they differ in shape, a layer does not have as many keys as
            queries, or tokens do not fit.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(2, 4, 6, 8)  # batch, heads, tokens, features
    >>> layers = [cm.attend(x, x, is_causal=True) for _ in range(3)]
    >>> last = cm.rollout(layers, -1)  # how much each token adds to the last output
    >>> torch.allclose(last.sum(-1), torch.ones(2))
    True
    """
    share = real("rollout", "residual", residual, least=0.0, most=1.0)
    if not layers:
        raise InputError("rollout: give the result of at least one layer.")
    shapes = {tuple(x._source.shape[:-1]) for x in layers}
    if len(shapes) > 1:
        raise InputError(f"rollout: all layers must have one shape, not {sorted(shapes)}.")
    (shape,) = shapes
    some = layers[-1].log_normalizer
    rows = _rows(tokens, shape, some)
    for layer in reversed(layers):
        rows = share * rows + (1 - share) * _through(layer, rows, heads=len(shape) > 1)
    out = rows.mT
    return out.squeeze(-2) if isinstance(tokens, int) else out


def _through(layer: Attended, rows: Tensor, *, heads: bool) -> Tensor:
    """Rows ``(*batch, N, c)`` times the mean of the heads' weights."""
    source = layer._source
    source.ready("received")
    given = rows.unsqueeze(-3) if heads else rows
    given = given.expand(*source.shape[:-1], rows.shape[-1])
    out = source.received(given.to(source.lowered.dtype))
    if out.shape[-2] != rows.shape[-2]:
        raise InputError(
            f"rollout: self-attention has as many keys as queries, but a layer has {out.shape[-2]} "
            f"keys and {rows.shape[-2]} queries here."
        )
    return out.mean(-3) if heads else out


def _rows(tokens: int | Sequence[int] | Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The rows to begin with as columns, ``(*batch, N, c)``."""
    n, batch = shape[-1], shape[:-2]
    given = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, device=like.device)
    if given.is_floating_point():
        if given.ndim < 2 or given.shape[-1] != n or given.ndim - 2 > len(batch):
            raise InputError(
                f"rollout: rows of weights must have shape (rows, {n}) or (*batch, rows, {n}), not "
                f"{tuple(given.shape)}."
            )
        return given.to(like.dtype).expand(*batch, *given.shape[-2:]).mT
    index = given.reshape(-1)
    integers = not given.dtype.is_complex and given.dtype != torch.bool and given.ndim < 2
    if not integers or bool(((index < -n) | (index >= n)).any()):
        raise InputError(
            f"rollout: tokens must be indices from {-n} to {n - 1}, or rows of weights, not "
            f"{tokens if not isinstance(tokens, Tensor) else tuple(tokens.shape)}."
        )
    one_hot = torch.nn.functional.one_hot(index % n, n).to(like)
    return one_hot.expand(*batch, *one_hot.shape).mT
