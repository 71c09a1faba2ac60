"""The builder of an attention call: from what people pass to what the kernels take.

Everything that shapes attention enters here and nowhere else: masks, bias, window, scale, softcap,
sink, grouped heads, dropout, precision. `prepare` is a sequence of steps; each checks what it needs
and raises an error that restates the call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.attention.given import Given, Keywords, Shard, Window, shown
from cumulant.attention.masks import lowered, pair_arguments, pairs_of
from cumulant.core.checks import broadcasts_to, common_shape
from cumulant.core.errors import InputError
from cumulant.core.precision import HALF, widened
from cumulant.core.typed import functions
from cumulant.kernels.attention import Options
from cumulant.kernels.tiles import Band

__all__ = ["Call", "Keywords", "Shard", "Window", "prepare", "sink_logits"]


class Groups(NamedTuple):
    """Grouped heads: each of `keys` key heads serves `size` query heads.

    To the kernels they are two batch dimensions, (key head, member of its group), along the second
    of which keys and values broadcast.
    """

    keys: int
    size: int

    def split(self, name: str, x: Tensor) -> Tensor:
        if name in ("key", "value") or x.shape[-3] == 1:
            return x.unsqueeze(-3)
        return torch.unflatten(x, -3, self)


@dataclass(frozen=True)
class Call:
    """A checked call: the kernels' arguments and options, and the way back.

    A tensor scale has been multiplied into the queries, grouped heads are an extra batch dimension,
    half precision has become float32 (and half again for an engine that computes in it).

    Attributes:
        arguments: named tensors of equal rank, as `kernels.attention` takes them.
        options: what is fixed about the call.
        dtype: of the vectors that the caller gets.
        lift: ``(*batch, M, 1)`` in the kernels' form: what was taken off the bias of each query, to
            be added to its log-normalizer; None if nothing was.
        sink: logits ``(*batch, M, 1)`` in the caller's form, sizes 1 where they repeat, or None.
            The kernels do not know them: a sink is one more set of keys, joined by `sinks.py`.
        groups: of grouped heads, or None.
    """

    arguments: dict[str, Tensor]
    options: Options
    dtype: torch.dtype
    lift: Tensor | None = None
    sink: Tensor | None = None
    groups: Groups | None = None

    def finish(self, x: Tensor) -> Tensor:
        """A row quantity of the kernels in the caller's shape: grouped heads become one axis."""
        return x if self.groups is None else x.flatten(-4, -3)

    def without_dropout(self) -> Call:
        """The same call with all its weights."""
        kept = {n: x for n, x in self.arguments.items() if n != "seed"}
        return replace(self, arguments=kept, options=replace(self.options, dropout=0.0))

    def sink_as_key(self) -> Call:
        """The same call with its sink as key 0: at zero, with value 0 and the logit as its bias.

        For readers of single weights. A sink of each query takes a bias of M x N here.
        """
        if self.sink is None:
            return self
        arguments, band = dict(self.arguments), self.options.band
        m, n = arguments["query"].shape[-2], arguments["key"].shape[-2]
        if band.lower is not None:  # late queries see the sink too: no band says that
            hidden = band.hidden(range(m), range(n), self.sink.device)
            if hidden is not None:
                seen = (~hidden)[(None,) * (arguments["query"].ndim - 2)]
                arguments["mask"] = seen & arguments.get("mask", seen)
            band = Band()
        elif band.upper is not None:
            band = Band(upper=band.upper + 1)
        logit = self.sink if self.groups is None else self.groups.split("sink", self.sink)
        logit = logit if self.lift is None else logit - self.lift
        rest = arguments.get("bias", logit.new_zeros(()).expand(*logit.shape[:-1], n))
        rows = functions.broadcast_shapes(logit.shape[:-1], rest.shape[:-1])
        arguments["bias"] = torch.cat([logit.expand(*rows, 1), rest.expand(*rows, n)], -1)
        if (mask := arguments.get("mask")) is not None:
            arguments["mask"] = F.pad(mask.expand(*mask.shape[:-1], n), (1, 0), value=True)
        for name in ("key", "value"):
            arguments[name] = F.pad(arguments[name], (0, 0, 1, 0))
        return replace(
            self, arguments=arguments, options=replace(self.options, band=band), sink=None
        )


def prepare(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shard: Shard | None = None,
    **keywords: Unpack[Keywords],
) -> Call:
    """Check a call of the public function `name` and put it into the kernels' form."""
    given = Given(name, query, key, value, **keywords)
    _check_tensors(given)
    _check_numbers(given)
    groups = _groups(given) if given.enable_gqa else None
    pairs = pairs_of(given, shard)
    dtype = given.autocast or query.dtype
    compute = widened(dtype)
    arguments, scale = _scaled(given, _converted(given, compute))
    arguments = _of_one_rank(arguments)
    batch = _batch(given, arguments, groups)
    arguments |= pair_arguments(given, pairs, (*batch, query.shape[-2], key.shape[-2]), compute)
    if groups is not None:
        arguments = {n: groups.split(n, x) for n, x in arguments.items()}
    lift: Tensor | None = None
    if "bias" in arguments:
        arguments["bias"], lift = lowered(arguments["bias"])
    if given.softcap is not None:
        rank = arguments["query"].ndim
        arguments["cap"] = arguments["query"].new_full((1,) * rank, float(given.softcap))
    if given.dropout_p > 0.0:
        arguments["seed"] = _seed(arguments)
    sink = None
    if given.sink is not None:
        sink = sink_logits(given, (*batch, query.shape[-2]), compute)
    # A tensor scale has made other queries than the caller's, which half precision may not hold.
    narrow = dtype if dtype in HALF and not isinstance(given.scale, Tensor) else None
    options = Options(scale, pairs.band, given.dropout_p, narrow=narrow)
    return Call(arguments, options, dtype, lift, sink, groups)


def _check_tensors(given: Given) -> None:
    tensors = {"query": given.query, "key": given.key, "value": given.value}
    for label, x in tensors.items():
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(x).__name__
            hint = " Only attend takes sharded keys." if kind == "ShardedKeys" else ""
            raise given.fail(f"{label} must be a torch.Tensor, not {kind}.{hint}")
        if x.is_nested:
            raise InputError(
                f"{given.name} does not take nested tensors ({label} is one): use attend_packed "
                "with offsets, or scaled_dot_product_attention for the mean alone."
            )
        if x.ndim < 2:
            raise given.fail(
                f"{label} must have shape (..., length, features): add dimensions with x[None]."
            )
        if not x.is_floating_point():
            raise given.fail(f"{label} must be real and floating point: convert it with .float().")
    if given.autocast is None and len({x.dtype for x in tensors.values()}) > 1:
        raise given.fail("query, key and value must have one dtype: convert them with .to(dtype).")
    if len({x.device for x in tensors.values()}) > 1:
        raise given.fail("query, key and value must be on one device: move them with .to(device).")
    if given.query.shape[-1] != given.key.shape[-1]:
        raise given.fail("query and key must have the same number of features (last dimension).")
    if given.key.shape[-2] != given.value.shape[-2]:
        raise given.fail("key and value must have the same length (second-to-last dimension).")


def _check_numbers(given: Given) -> None:
    rate, cap = given.dropout_p, given.softcap
    if not isinstance(rate, int | float) or not 0.0 <= rate <= 1.0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise given.fail(f"dropout_p must lie in [0, 1], not {rate!r}.")
    if cap is None:
        return
    number = isinstance(cap, int | float) and not isinstance(cap, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not number or not 0.0 < cap < math.inf:
        raise given.fail(f"softcap must be a finite number > 0, or None, not {cap!r}.")


def _groups(given: Given) -> Groups:
    if min(given.query.ndim, given.key.ndim, given.value.ndim) < 3:
        raise given.fail("enable_gqa needs a head dimension: shape (..., heads, length, features).")
    heads, key_heads, value_heads = (x.shape[-3] for x in (given.query, given.key, given.value))
    if key_heads != value_heads or key_heads == 0 or heads % key_heads:
        raise given.fail(
            f"With enable_gqa the {heads} query heads must be a multiple of the key and value "
            f"heads, which must agree (got {key_heads} and {value_heads})."
        )
    return Groups(key_heads, heads // key_heads)


def _converted(given: Given, compute: torch.dtype) -> dict[str, Tensor]:
    """Queries, keys and values in the precision to compute in."""
    key = given.key.to(compute)
    value = key if given.value is given.key else given.value.to(compute)  # one copy for both
    return {"query": given.query.to(compute), "key": key, "value": value}


def _scaled(given: Given, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """A tensor scale goes into the queries; a number is the kernels' option."""
    scale, query = given.scale, given.query
    if scale is None:
        return tensors, 1 / math.sqrt(query.shape[-1] or 1)
    if not isinstance(scale, Tensor):
        if not isinstance(scale, int | float) or not math.isfinite(scale):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise given.fail(f"scale must be a finite number or a tensor, not {scale!r}.")
        return tensors, float(scale)
    if not scale.is_floating_point() or scale.device != query.device:
        raise given.fail("A tensor scale must be real and on the device of the query.")
    if not broadcasts_to(scale.shape, query.shape):
        raise given.fail(
            f"A tensor scale must broadcast to the query; it has shape {tuple(scale.shape)}."
        )
    scaled = tensors["query"] * scale.to(tensors["query"].dtype)
    return {**tensors, "query": scaled}, 1.0


def _of_one_rank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    rank = max(x.ndim for x in tensors.values())
    return {n: x if x.ndim == rank else x[(None,) * (rank - x.ndim)] for n, x in tensors.items()}


def _batch(given: Given, tensors: dict[str, Tensor], groups: Groups | None) -> tuple[int, ...]:
    """The batch of the result, query heads included."""
    inner = 2 if groups is None else 3
    batch = common_shape(*(x.shape[:-inner] for x in tensors.values()))
    if batch is None:
        raise given.fail(
            "Batch and head dimensions must broadcast (grouped heads: enable_gqa=True)."
        )
    return tuple(batch) if groups is None else (*batch, given.query.shape[-3])


def _seed(arguments: dict[str, Tensor]) -> Tensor:
    """A seed for each measure of the batch, from torch's own generator as torch's dropout."""
    batch = functions.broadcast_shapes(*(x.shape[:-2] for x in arguments.values()))
    device = arguments["query"].device
    return torch.randint(-(2**31), 2**31, (*batch, 1, 1), dtype=torch.int32, device=device)


def sink_logits(given: Given, rows: tuple[int, ...], compute: torch.dtype) -> Tensor:
    """The sink of a call as ``(*batch, M, 1)``, sizes 1 where it repeats; `rows` = ``(*batch, M)``.

    Beside a batch, a sink of one dimension has one logit for each head.
    """
    sink = given.sink
    if isinstance(sink, int | float) and not isinstance(sink, bool):
        sink = torch.full((), float(sink), dtype=compute, device=given.query.device)
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        raise given.fail(f"sink must be a number or a real tensor, not {shown('sink', sink)[5:]}.")
    if sink.device != given.query.device:
        raise given.fail("sink must be on the device of the query: move it with .to(query.device).")
    logits = sink.to(compute)
    if sink.ndim == 1 and len(rows) > 1:
        logits = logits[:, None]
    if not broadcasts_to(logits.shape, rows):
        heads = f"one logit for each of {rows[-2]} heads, or " if len(rows) > 1 else ""
        raise given.fail(f"sink must be {heads}a tensor that broadcasts to {rows} (*batch, M).")
    return logits.reshape(*(1,) * (len(rows) - logits.ndim), *logits.shape, 1)
