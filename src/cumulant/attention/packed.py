"""`attend_packed`: sequences of different lengths, packed end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from cumulant.attention.attend import attend
from cumulant.attention.attended import Attended
from cumulant.attention.inputs import Window
from cumulant.attention.source import Source
from cumulant.core.errors import InputError
from cumulant.core.lazy import Lazy, kept
from cumulant.core.typed import tolist
from cumulant.kernels.search import Largest

__all__ = ["attend_packed"]


class Packed(Lazy):
    """The columns of several sequences, end to end."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts = parts
        self.over_ranks = any(x.over_ranks for x in parts)

    @property
    def shape(self) -> torch.Size:
        *batch, _, width = self._parts[0].shape
        return torch.Size((*batch, sum(x.shape[-2] for x in self._parts), width))

    @property
    def device(self) -> torch.device:
        return self._parts[0].device

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in self._parts)

    @property
    def keys(self) -> int:
        return sum(x.keys for x in self._parts)

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

    @kept
    def score_max(self) -> Tensor:
        return torch.cat([x.score_max for x in self._parts], -2)

    @kept
    def score_max_key(self) -> Tensor:
        return self._numbered([x.score_max_key for x in self._parts])

    def _numbered(self, keys: Sequence[Tensor]) -> Tensor:
        """Numbers in each sequence as numbers in all of them."""
        before = accumulate((x.keys for x in self._parts), initial=0)
        moved = [torch.where(x < 0, x, x + n) for x, n in zip(keys, before, strict=False)]
        return torch.cat(moved, -2)

    def largest(self, k: int) -> Largest:
        found = [x.largest(k) for x in self._parts]
        score = torch.cat([x.score for x in found], -2)
        return Largest(score, self._numbered([x.index for x in found]))

    def _shares(self, share: Tensor) -> Iterator[tuple[Source, Tensor]]:
        edges = accumulate((x.shape[-2] for x in self._parts), initial=0)
        cuts = [share[..., a:b, :] for a, b in pairwise(edges)]
        return zip(self._parts, cuts, strict=True)

    def received(self, share: Tensor) -> Tensor:
        return torch.cat([x.received(part) for x, part in self._shares(share)], -2)

    def seen(self, share: Tensor) -> Tensor:
        return torch.cat([x.seen(part) for x, part in self._shares(share)], -2)

    def tempered(self, alpha: float) -> Tensor:
        return torch.cat([x.tempered(alpha) for x in self._parts], -2)


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
    softcap: float | None = None,
    sink: float | Tensor | None = None,
    dropout_p: float = 0.0,
) -> Attended:
    """`attend` for sequences of different lengths packed end to end: none sees another's keys.

    Args:
        query: ``(*batch, total, d)``, heads in front of the length (move them there if you come
            from ``(total, heads, d)``); sequence n is ``query_offsets[n]:query_offsets[n + 1]``.
        key, value: likewise, cut by `key_offsets`, which default to `query_offsets`.
        query_offsets, key_offsets: cumulative lengths, integers from 0 to the total; a sequence
            may be empty.
        is_causal, scale, enable_gqa, window, softcap, sink, dropout_p: as in `attend`, for each
            sequence by itself; a `sink` of each query is packed like the queries.

    Returns:
        Attended: fields of all sequences, end to end.

    Raises:
        InputError: the offsets do not fit the lengths, or `attend` refuses the rest.

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
    sink_rows = _by_query(sink, query, key)
    parts = [
        attend(
            query[..., a:b, :],
            key[..., c:d, :],
            None if value is None else value[..., c:d, :],
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            window=window,
            softcap=softcap,
            sink=sink if sink_rows is None else sink_rows[..., a:b],
            dropout_p=dropout_p,
        )
        for (a, b), (c, d) in zip(pairwise(rows), pairwise(columns), strict=True)
    ]
    return Attended(Packed([part._source for part in parts]), parts[0]._dtype)


def _by_query(sink: float | Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The sink, if each query has its own; beside a batch, one dimension is that of the heads."""
    if not isinstance(sink, Tensor) or sink.ndim == 0 or query.shape[-2] == 1:
        return None
    of_heads = sink.ndim == 1 and max(query.ndim, key.ndim) > 2
    return None if of_heads or sink.shape[-1] != query.shape[-2] else sink


def _offsets(name: str, offsets: Tensor | Sequence[int], total: int) -> list[int]:
    given: object = tolist(offsets) if isinstance(offsets, Tensor) else offsets
    numbers: list[object] = list(given) if isinstance(given, list | tuple) else []
    whole = [x for x in numbers if isinstance(x, int)]
    rising = len(whole) == len(numbers) >= 2 and all(a <= b for a, b in pairwise(whole))
    if not rising or whole[0] != 0 or whole[-1] != total:
        raise InputError(
            f"{name} must be integers that rise from 0 to the packed length {total} (the "
            f"second-to-last dimension), one more than there are sequences; got {str(given)[:60]}."
        )
    return whole
