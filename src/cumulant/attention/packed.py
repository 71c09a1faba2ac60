"""`attend_packed`: sequences of different lengths, packed end to end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cumulant.attention.attend import attend
from cumulant.attention.attended import Attended, Source
from cumulant.attention.inputs import Window
from cumulant.core.errors import InputError
from cumulant.core.lazy import Lazy, kept

__all__ = ["attend_packed"]


class Packed(Lazy):
    """The columns of several sequences, end to end."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts = parts

    @property
    def shape(self) -> torch.Size:
        *batch, _, width = self._parts[0].shape
        return torch.Size((*batch, sum(x.shape[-2] for x in self._parts), width))

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in self._parts)

    def ready(self, name: str) -> None:
        """Ask each of the sequences."""
        for part in self._parts:
            part.ready(name)

    @kept
    def mean(self) -> Tensor:
        return torch.cat([x.mean for x in self._parts], -2)

    @kept
    def lowered(self) -> Tensor:
        return torch.cat([x.lowered for x in self._parts], -2)

    @kept
    def lift(self) -> Tensor | None:
        found = [(x.lift, x.lowered) for x in self._parts]
        if all(lift is None for lift, _ in found):
            return None
        return torch.cat([torch.zeros_like(G) if x is None else x for x, G in found], -2)

    @kept
    def key_mean(self) -> Tensor:
        return torch.cat([x.key_mean for x in self._parts], -2)

    @kept
    def entropy(self) -> Tensor:
        return torch.cat([x.entropy for x in self._parts], -2)

    @kept
    def score_mean(self) -> Tensor:
        return torch.cat([x.score_mean for x in self._parts], -2)

    @kept
    def score_variance(self) -> Tensor:
        return torch.cat([x.score_variance for x in self._parts], -2)

    @kept
    def value_moments(self) -> Tensor:
        return torch.cat([x.value_moments for x in self._parts], -2)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    query_offsets: Tensor | Sequence[int],
    key_offsets: Tensor | Sequence[int] | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    window: Window | None = None,
) -> Attended:
    """`attend` for sequences of different lengths packed end to end: none sees another's keys.

    Args:
        query: ``(*batch, total, d)``, heads in front of the length (move them there if you come
            from ``(total, heads, d)``); sequence n is ``query_offsets[n]:query_offsets[n + 1]``.
        key, value: likewise, cut by `key_offsets` (the same as `query_offsets` if left out).
        query_offsets, key_offsets: cumulative lengths, whole numbers from 0 to the total; a
            sequence may be empty.
        is_causal, scale, enable_gqa, window: as in `attend`, for each sequence by itself.

    Returns:
        Attended: fields of all sequences, end to end.

    Raises:
        InputError: offsets that do not fit the lengths, or what `attend` refuses.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(7, 4)
    >>> a = cm.attend_packed(x, x, query_offsets=[0, 3, 7])
    >>> torch.allclose(a.mean[:3], cm.attend(x[:3], x[:3]).mean)
    True
    """
    for label, x in (("query", query), ("key", key), ("value", key if value is None else value)):
        if not isinstance(x, Tensor) or x.ndim < 2 or x.is_nested:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"attend_packed: {label} must be a tensor (..., total length, features)."
            )
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise InputError(
            f"attend_packed: key and value must have the same packed length, but have "
            f"{key.shape[-2]} and {value.shape[-2]}."
        )
    rows = _offsets("query_offsets", query_offsets, query.shape[-2])
    columns = rows
    if key_offsets is not None or key.shape[-2] != query.shape[-2]:
        given = query_offsets if key_offsets is None else key_offsets
        columns = _offsets("key_offsets", given, key.shape[-2])
    if len(rows) != len(columns):
        raise InputError(
            f"query_offsets and key_offsets must name the same number of sequences, but they name "
            f"{len(rows) - 1} and {len(columns) - 1}."
        )
    parts = [
        attend(
            query[..., a:b, :],
            key[..., c:d, :],
            None if value is None else value[..., c:d, :],
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            window=window,
        )
        for (a, b), (c, d) in zip(pairwise(rows), pairwise(columns), strict=True)
    ]

    return Attended(Packed([part._source for part in parts]), parts[0]._dtype)


def _offsets(name: str, offsets: Tensor | Sequence[int], total: int) -> list[int]:
    given: Any = offsets.tolist() if isinstance(offsets, Tensor) else offsets
    numbers: list[Any] = list(given) if isinstance(given, list | tuple) else []
    whole = all(isinstance(x, int) for x in numbers)
    rising = whole and all(a <= b for a, b in pairwise(numbers))
    if len(numbers) < 2 or not rising or numbers[0] != 0 or numbers[-1] != total:
        raise InputError(
            f"{name} must be whole numbers that rise from 0 to the packed length {total} (the "
            f"second last dimension), one more than there are sequences; got {str(given)[:60]}."
        )
    return numbers
