"""`attend`: everything attention knows about a query, each field differentiable to any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cumulant.attention.inputs import Call, Window, prepare
from cumulant.attention.joining import joined
from cumulant.distributed.maps import total
from cumulant.distributed.sharded import ShardedKeys
from cumulant.errors import InputError
from cumulant.kernels import formulas
from cumulant.kernels.attention import Moments, attention, expectation

__all__ = ["Attended", "Fields", "attend", "attend_packed", "finished", "merge"]


class Attended:
    """The tilted measure over keys, one per query: fields are computed when asked for, and kept.

    With p(j|i) = exp(scale <q_i, k_j> + bias_ij - G_i) (THEORY T1, T7, T12):

    ================== ================== =========================================================
    field              shape              what it is
    ================== ================== =========================================================
    ``mean``           ``(*batch, M, e)`` E[v], the attention output
    ``log_normalizer`` ``(*batch, M)``    G, the log-sum-exp of the scores
    ``key_mean``       ``(*batch, M, d)`` E[k], the gradient of G in scale * q
    ``entropy``        ``(*batch, M)``    Shannon entropy of the weights, in nats
    ``score_mean``     ``(*batch, M)``    E of scale <q, k>, without the bias
    ``score_variance`` ``(*batch, M)``    Var of scale <q, k>: the heat capacity
    ``value_variance`` ``(*batch, M, e)`` the diagonal of Cov[v]
    ================== ================== =========================================================

    A query that sees no key has G = -inf and zeros elsewhere. For half-precision input, vectors
    come back in that precision and the scalars in float32. Because fields wait until they are
    asked for, leave the inputs unchanged until then; a field first asked for under
    ``torch.no_grad`` has no gradient.
    """

    def __init__(self, compute: Callable[[str], Tensor]) -> None:
        self._compute = compute

    def __repr__(self) -> str:
        known = [f"{n}={tuple(x.shape)}" for n, x in vars(self).items() if isinstance(x, Tensor)]
        return f"Attended({', '.join(known) or 'nothing computed yet'})"

    @cached_property
    def mean(self) -> Tensor:
        return self._compute("mean")

    @cached_property
    def log_normalizer(self) -> Tensor:
        return self._compute("log_normalizer")

    @cached_property
    def key_mean(self) -> Tensor:
        return self._compute("key_mean")

    @cached_property
    def entropy(self) -> Tensor:
        return self._compute("entropy")

    @cached_property
    def score_mean(self) -> Tensor:
        return self._compute("score_mean")

    @cached_property
    def score_variance(self) -> Tensor:
        return self._compute("score_variance")

    @cached_property
    def value_variance(self) -> Tensor:
        return self._compute("value_variance")


_VECTORS = ("mean", "key_mean", "value_variance")
_FIELDS = (*_VECTORS, "log_normalizer", "entropy", "score_mean", "score_variance")


class Fields:
    """The fields of `Attended`, from queries, keys and values."""

    def __init__(self, call: Call, *, values_are_keys: bool) -> None:
        self._call = call
        self._values_are_keys = values_are_keys
        self._versions = self._seen()
        self._done: Moments | None = None

    def _seen(self) -> list[int]:
        """How often each input has been changed in place."""
        inputs = self._call.arguments.values()
        return [0 if x.is_inference() else x._version for x in inputs]

    def __call__(self, name: str) -> Tensor:
        """One field in the caller's shape and precision."""
        return finished(self._call, name, self.column(name))

    def check(self, name: str) -> None:
        """Refuse a field of inputs that have changed since."""
        if self._seen() != self._versions:
            raise InputError(
                f"{name} is computed when it is asked for, but an input was changed in place since "
                "attend was called: ask for the fields first, or clone the input."
            )

    def column(self, name: str) -> Tensor:
        """One field as the kernels have it, ``(*batch, M, features)``.

        Beside the public ones: ``lowered``, the log-normalizer without ``lift``, what was taken off
        the bias; ``value_moments``, mean and variance of the values and ``lowered`` side by side,
        in double precision where there is one.
        """
        self.check(name)
        return getattr(self, name)()

    def _moments(self) -> Moments:
        if self._done is None:
            self._done = attention(self._call.arguments, self._call.options)
        return self._done

    def mean(self) -> Tensor:
        return self._moments().mean

    def log_normalizer(self) -> Tensor:
        normalizer = self.lowered()
        return normalizer if self._call.lift is None else normalizer + self._call.lift

    def lowered(self) -> Tensor:
        return self._moments().log_normalizer

    def lift(self) -> Tensor:
        G = self.lowered()
        return torch.zeros_like(G) if self._call.lift is None else self._call.lift.expand_as(G)

    def key_mean(self) -> Tensor:
        if self._values_are_keys:
            return self.mean()
        arguments = {**self._call.arguments, "value": self._call.arguments["key"]}
        mean = attention(arguments, self._call.options).mean
        batch = torch.broadcast_shapes(mean.shape[:-2], self._call.arguments["value"].shape[:-2])
        return mean.expand(*batch, *mean.shape[-2:])

    def entropy(self) -> Tensor:
        options = replace(self._call.options, entropy=True)
        arguments = self._call.arguments
        if self._done is None:  # mean, G and entropy in one pass
            done = self._done = attention(arguments, options)
        else:
            done = attention({**arguments, "value": arguments["value"][..., :0]}, options)
        if done.entropy is None:
            raise RuntimeError("the kernel was asked for the entropy and did not return it")
        return done.entropy

    @cached_property
    def _with_normalizer(self) -> dict[str, Tensor]:
        arguments = {n: x for n, x in self._call.arguments.items() if n != "value"}
        return {**arguments, "log_normalizer": self._moments().log_normalizer}

    @cached_property
    def _score_mean(self) -> Tensor:
        options = self._call.options
        return expectation(formulas.score_mean, "score_mean", self._with_normalizer, options)

    def score_mean(self) -> Tensor:
        return self._score_mean

    def score_variance(self) -> Tensor:
        arguments = {**self._with_normalizer, "score_mean": self._score_mean}
        options = self._call.options
        return expectation(formulas.score_variance, "score_variance", arguments, options)

    def value_variance(self) -> Tensor:
        mean = self.mean()
        width = mean.shape[-1]
        variance = self.value_moments()[..., width : 2 * width]
        return variance.to(mean.dtype).masked_fill(~mean.isfinite(), math.nan)

    def value_moments(self) -> Tensor:
        # E[v^2] - E[v]^2 cancels where a row is peaked: double precision, and values relative to
        # a typical output. Values that are not finite count where they made the mean NaN.
        arguments, mean = self._call.arguments, self.mean()
        wide = torch.float32 if mean.device.type == "mps" else torch.float64
        value = arguments["value"].to(wide)
        center = _typical(mean.to(wide), value)
        if (ring := self._call.options.ring) is not None:  # values meet queries of other ranks
            center = center + value.new_zeros(*value.shape[:-2], 1, value.shape[-1])
            center = total(center, ring.ranks) / ring.ranks.size
        value = torch.where(value.isfinite(), value, 0.0) - center
        features = value.shape[-1]
        given = {n: x.to(wide) if x.is_floating_point() else x for n, x in arguments.items()}
        given["value"] = torch.cat([value, value * value], -1)
        both, normalizer, _ = attention(given, self._call.options)
        variance = (both[..., features:] - both[..., :features] ** 2).clamp_min(0.0)
        return torch.cat([both[..., :features] + center, variance, normalizer], -1)


def finished(call: Call, name: str, column: Tensor) -> Tensor:
    """A field in the caller's shape and precision."""
    out = call.finish(column)
    if name == "value_moments":
        return out
    return out.to(call.dtype) if name in _VECTORS else out.squeeze(-1)


def _typical(mean: Tensor, value: Tensor) -> Tensor:
    """The median over queries of E[v], in the batch of the values; a constant."""
    center = mean.detach()
    for dim in range(center.ndim - 1):
        if center.shape[dim] and (value.shape[dim] == 1 or dim == center.ndim - 2):
            center = center.nanmedian(dim, keepdim=True).values
    return center.nan_to_num(0.0, 0.0, 0.0) if center.shape[-2] == 1 else center.new_zeros(1)


def attend(
    query: Tensor,
    key: Tensor | ShardedKeys,
    value: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    window: Window | None = None,
) -> Attended:
    """Attention with its calculus: G, mean, entropy, variances, every derivative (THEORY T1, T12).

    p(j|i) = exp(scale <q_i, k_j> + bias_ij - G_i): a measure over keys tilted by the query.

    Args:
        query: ``(*batch, M, d)``.
        key: ``(*batch, N, d)``, or `cumulant.distributed.ShardedKeys`, which have the values.
        value: ``(*batch, N, e)``; the keys themselves if left out, so that ``mean`` is the
            gradient of G in scale * query.
        attn_mask: boolean (True = may attend; the opposite of ``key_padding_mask``) or added to
            the scores (differentiable); broadcasts to ``(*batch, M, N)``, so padding ``(B, N)``
            goes in as ``mask[:, None, None, :]`` beside heads. Or a causal bias from
            ``torch.nn.attention.bias``: ``causal_lower_right(M, N)`` aligns to the last key. With
            sharded keys ``(*batch, M, n)``: the queries of all ranks against this rank's keys.
        is_causal: query i sees keys j <= i (torch's top-left alignment); not with `attn_mask`.
        scale: number, or tensor that broadcasts to the query, such as ``(heads, 1, 1)``
            (differentiable); 1/sqrt(d) if left out.
        enable_gqa: dimension -3 holds heads, and key heads serve groups of query heads.
        window: (left, right): keys at most so far behind and ahead of the diagonal j = i (or of the
            causal bias' own diagonal); None is open. Combines with any mask: (None, 0) is causal.

    Returns:
        Attended: its fields are computed when asked for. Ask for ``entropy`` first to have it,
        ``mean`` and ``log_normalizer`` in one pass.

    Raises:
        InputError: the shapes, dtypes or devices do not fit; the message restates the call.
        GroupError: another rank has died, or is in another call.

    >>> import torch, cumulant as cm
    >>> key = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> a = cm.attend(torch.zeros(1, 2), key)
    >>> a.mean, a.log_normalizer.exp(), a.entropy.exp()
    (tensor([[0.5000, 0.5000]]), tensor([2.]), tensor([2.]))
    """
    options: dict[str, Any] = {
        "attn_mask": attn_mask,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "window": window,
    }
    if isinstance(key, ShardedKeys):
        from cumulant.attention.sharded import attend_sharded

        return attend_sharded(query, key, options, value)
    call = prepare("attend", query, key, key if value is None else value, **options)
    return Attended(Fields(call, values_are_keys=value is None))


def merge(first: Attended, second: Attended) -> Attended:
    """Join results of the same queries over two disjoint key sets, exactly (THEORY T1, T7).

    A key lies in the first set with probability e^(G_1 - G), G = log(e^G_1 + e^G_2); means mix,
    entropies add by the chain rule, variances by the law of total variance. A KV-cache in chunks,
    shards of keys and streaming are all this.

    Args:
        first, second: results of `attend` for the same queries; no key may be in both.

    Returns:
        Attended: as if all keys had been attended at once, each field joined when asked for.

    Raises:
        InputError: the two are not results for the same queries, or their values differ in width.

    >>> import torch, cumulant as cm
    >>> q, k, v = torch.randn(4, 8), torch.randn(10, 8), torch.randn(10, 3)
    >>> parts = cm.merge(cm.attend(q, k[:6], v[:6]), cm.attend(q, k[6:], v[6:]))
    >>> whole = cm.attend(q, k, v)
    >>> torch.allclose(parts.mean, whole.mean, atol=1e-6)
    True
    >>> torch.allclose(parts.entropy, whole.entropy, atol=1e-6)
    True
    """
    for part in (first, second):
        if not isinstance(part, Attended):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"merge joins two results of attend, not a {type(part).__name__}.")
    one, two = first.log_normalizer.shape, second.log_normalizer.shape
    if one != two:
        raise InputError(
            "merge joins results of the same queries over different keys; their log-normalizers "
            f"must have one shape, but these have {tuple(one)} and {tuple(two)}."
        )
    kinds = first.log_normalizer.dtype, second.log_normalizer.dtype
    if kinds[0] != kinds[1]:
        raise InputError(f"merge joins results of one dtype, not of {kinds[0]} and {kinds[1]}.")
    both = first, second
    pool = joined([lambda name, x=x: _column(name, x) for x in both])

    def compute(name: str) -> Tensor:
        if name in _FIELDS:
            a, b = (getattr(x, name) for x in both)
            if a.shape != b.shape:
                raise InputError(
                    f"merge: {name} has shape {tuple(a.shape)} in one result and {tuple(b.shape)} "
                    "in the other; attend both with values of one width."
                )
        out = pool(name)
        if name in _VECTORS:
            return out.to(getattr(first, name).dtype)
        return out if name == "value_moments" else out[..., 0]

    return Attended(compute)


def _column(name: str, x: Attended) -> Tensor:
    """A field of a result as a column; also those that are not public."""
    out = getattr(x, name) if name in _FIELDS else x._compute(name)
    return out if name in (*_VECTORS, "value_moments") else out[..., None]


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

    def compute(name: str) -> Tensor:
        out = torch.cat([_column(name, part) for part in parts], -2)
        return out if name in (*_VECTORS, "value_moments") else out[..., 0]

    return Attended(compute)


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
