"""Input checks of `info_nce`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cumulant.contrastive.positives import Positives
from cumulant.core.checks import broadcasts_to, finite, holds, numbers, require
from cumulant.core.errors import InputError
from cumulant.core.precision import HALF, widened
from cumulant.core.typed import linalg

_KINDS = (*HALF, torch.float32, torch.float64)

__all__ = ["excluded", "inverse_temperature", "is_self", "vectors", "weights"]


def is_self(exclude: Any) -> bool:
    """Whether each anchor is excluded from its own keys."""
    return isinstance(exclude, str) and exclude == "self"


def vectors(
    query: Any,
    key: Any,
    queue: Any,
    similarity: str,
    temperature: Any,
    *,
    empty: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """Anchors divided by temperature, keys and queue ready for scoring, and the caller's dtype.

    `empty` allows this rank to have no anchors or keys, since other ranks may have some.
    """
    if similarity not in ("cosine", "dot"):
        raise InputError(f"info_nce: similarity must be cosine or dot, not {similarity!r}.")
    given = {"query": query, "key": key}
    if queue is not None:
        given["queue"] = queue
    _check_kinds(given)
    _check_shapes(query, key, queue, empty=empty)
    kind = query.dtype
    for x in given.values():
        kind = torch.promote_types(kind, x.dtype)
    wide = widened(kind)
    out: list[Tensor] = []
    for name, x in given.items():
        y = finite("info_nce", name, numbers("info_nce", **{name: x.to(wide)})[0][name])
        scale = inverse_temperature(temperature, y) if name == "query" else 1.0
        if similarity == "cosine":
            y, norm = _norm(y)
            require(norm > 0, lambda name=name: _zero(name))
            scale = scale / norm
        out.append(y if isinstance(scale, float) and scale == 1.0 else y * scale)
    return out[0], out[1], out[2] if queue is not None else None, kind


def _check_kinds(given: dict[str, Any]) -> None:
    """Check for dense real tensors on one device with the same number of features."""
    query = given["query"]
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dtype not in _KINDS or x.layout != torch.strided:
            what = f"{x.dtype}, {x.layout}" if isinstance(x, Tensor) else type(x).__name__
            hint = " Pass its .keys." if hasattr(x, "keys") else ""
            raise InputError(f"info_nce: {name} must be a dense real tensor, not {what}.{hint}")
        if x.ndim < 2 or x.shape[-1] != query.shape[-1]:
            shapes = ", ".join(f"{n}={tuple(y.shape)}" for n, y in given.items())
            raise InputError(
                f"info_nce: query, key and queue must have shape (*batch, length, d), same d; got "
                f"{shapes}."
            )
        if x.device != query.device:
            raise InputError("info_nce: query, key and queue must be on the same device.")


def _check_shapes(query: Tensor, key: Tensor, queue: Tensor | None, *, empty: bool) -> None:
    if (0 in query.shape or 0 in key.shape) and not empty:
        raise InputError(
            f"info_nce: there must be anchors and keys; got query={tuple(query.shape)}, "
            f"key={tuple(key.shape)}."
        )
    if key.ndim > 2 and key.shape[:-2] != query.shape[:-2]:
        raise InputError(
            f"info_nce: keys must have the batch shape of the anchors, or none; got "
            f"{tuple(key.shape[:-2])} and {tuple(query.shape[:-2])}."
        )
    if queue is not None and queue.ndim != 2:
        raise InputError(f"info_nce: queue must have shape (Q, d), not {tuple(queue.shape)}.")


def _norm(y: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors and their norms; rescaled first where the squares would over- or underflow."""
    norm = linalg.vector_norm(y, dim=-1, keepdim=True)
    info = torch.finfo(y.dtype)
    tame = holds((norm < info.max**0.5) & (norm > info.tiny**0.5 / info.eps))
    if tame or (tame is None and y.device.type == "cpu"):
        return y, norm
    size = y.detach().abs().amax(-1, keepdim=True)
    y = y / size.masked_fill(size == 0, 1.0)
    return y, linalg.vector_norm(y, dim=-1, keepdim=True)


def _zero(name: str) -> str:
    return (
        f"info_nce: {name} holds a zero vector, which has no direction; remove it, or use "
        'similarity="dot".'
    )


def inverse_temperature(temperature: Any, like: Tensor) -> Tensor | float:
    """1/t for a number or a one-entry tensor."""
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1 or not temperature.is_floating_point():
            raise InputError(
                "info_nce: a tensor temperature must be real and have one entry; got "
                f"{temperature.dtype} of shape {tuple(temperature.shape)}."
            )
        value = temperature.reshape(()).to(like.device, like.dtype)
    else:
        try:
            if isinstance(temperature, bool | str):
                raise TypeError
            value = float(temperature)
        except (TypeError, ValueError, OverflowError):
            hint = " Call it: temperature=t()." if callable(temperature) else ""
            raise InputError(
                f"info_nce: temperature must be a number, not {type(temperature).__name__}.{hint}"
            ) from None
    good = torch.as_tensor(value, dtype=like.dtype)
    require(
        (good > 0) & good.isfinite() & (1 / good).isfinite(),
        lambda: f"info_nce: temperature must be positive and finite, not {float(value):g}.",
    )
    return 1 / value


def excluded(
    exclude: Any, positives: Positives, query: Tensor, key: Tensor, *, first: int = 0
) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """Excluded pairs, as tags or as a mask of the pairs that remain.

    Anchor i is key number `first` + i.
    """
    if exclude is None or (isinstance(exclude, Tensor) and exclude.shape[-1:] == (0,)):
        return None, None
    m, n = query.shape[-2], key.shape[-2]
    if not is_self(exclude) and not isinstance(exclude, Tensor):
        raise InputError(
            f'info_nce: exclude must be "self", key numbers or a boolean mask, not {exclude!r}.'
        )
    if isinstance(exclude, Tensor) and exclude.dtype == torch.bool:
        left_out = exclude.to(query.device)
        _shape("exclude", left_out, (*query.shape[:-2], m, n))
        left_out = left_out[(None,) * (query.ndim - left_out.ndim)]
        left_out = left_out.expand(*left_out.shape[:-2], m, n)
        overlap = positives.meets(left_out)
        tags, mask = None, ~left_out
    else:
        if isinstance(exclude, Tensor):
            if exclude.is_floating_point() or exclude.is_complex():
                raise InputError(f"info_nce: exclude must hold integers, not {exclude.dtype}.")
            index = exclude.to(query.device).long()
            index = index[:, None] if index.ndim == 1 else index
            _shape("exclude", index, (*query.shape[:-2], m, index.shape[-1] if index.ndim else 1))
            index = index.expand(*index.shape[:-2], m, index.shape[-1])
            require(
                (index >= -1) & (index < n),
                lambda: f"info_nce: exclude must lie between -1 (none) and {n - 1}.",
            )
        else:
            index = torch.arange(first, first + m, device=query.device)[:, None]
        overlap = positives.includes(index[(None,) * (query.ndim - index.ndim)]).any()
        own = torch.arange(n, device=query.device)[:, None].expand(n, index.shape[-1])
        tags, mask = (index, own), None
    require(
        ~overlap,
        lambda: (
            "info_nce: exclude removes a positive, which the loss needs. For augmented views use "
            "nt_xent, or name the positives with positives= or labels=."
        ),
    )
    return tags, mask


def _shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if not broadcasts_to(x.shape, shape) or x.ndim < 2:
        raise InputError(
            f"info_nce: {name} must have shape {shape}, or broadcast to it, but has "
            f"{tuple(x.shape)}."
        )


def weights(
    log_weights: Any, key: Tensor, queue: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Log-weights of the keys and the queue, as rows ``(*batch, 1, N)``."""
    if log_weights is None:
        return None, None
    if not isinstance(log_weights, Tensor) or not log_weights.is_floating_point():
        raise InputError("info_nce: log_weights must be a real tensor with one entry per key.")
    n, more = key.shape[-2], 0 if queue is None else queue.shape[-2]
    if log_weights.ndim < 1 or log_weights.shape[-1] not in (n, n + more):
        raise InputError(
            f"info_nce: log_weights must have {n} entries, one per key"
            + (f", or {n + more} with the queue" if more else "")
            + f", but have shape {tuple(log_weights.shape)}."
        )
    if not broadcasts_to(log_weights.shape[:-1], key.shape[:-2]):
        raise InputError(
            f"info_nce: log_weights must broadcast to the batch shape of the keys, "
            f"{tuple(key.shape[:-2])}; got {tuple(log_weights.shape[:-1])}."
        )
    rows = log_weights.to(key.device, key.dtype)[..., None, :]
    require(rows.isfinite(), lambda: "info_nce: log_weights must be finite; exclude= drops keys.")
    require(
        rows <= torch.finfo(rows.dtype).max / 2,
        lambda: f"info_nce: log_weights overflow {rows.dtype}; scale them down.",
    )
    return rows[..., :n], rows[..., n:] if rows.shape[-1] > n else None
