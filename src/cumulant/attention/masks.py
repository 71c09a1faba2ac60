"""Which pairs of an attention call may meet, and what is added to their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cumulant.attention.given import Given, Shard, Window
from cumulant.core.checks import broadcasts_to, holds_at_once
from cumulant.kernels.tiles import Band

__all__ = ["Pairs", "lowered", "pair_arguments", "pairs_of"]


class Pairs(NamedTuple):
    """A band of pairs, a mask (True = may meet) and what is added to the scores.

    `sharded` says that mask and bias have the columns of one rank.
    """

    band: Band
    mask: Tensor | None
    bias: Tensor | None
    sharded: bool


def pairs_of(given: Given, shard: Shard | None) -> Pairs:
    """Sort what a call says about pairs: causal and windows are a band, the rest are tensors."""
    m, n = given.query.shape[-2], given.key.shape[-2]
    before = 0
    if shard is not None:
        m, n, before = shard.queries, shard.keys, shard.before
    band, mask = _band(given, m, n)
    bias = given.bias
    if mask is not None and not isinstance(mask, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise given.fail(f"attn_mask must be a tensor, not {type(mask).__name__}.")
    if mask is not None and mask.is_floating_point():
        if bias is not None:
            raise given.fail("With bias, attn_mask must be boolean: add the two if both are added.")
        mask, bias = None, mask
    return Pairs(band.shifted(before), mask, bias, shard is not None)


def _band(given: Given, m: int, n: int) -> tuple[Band, Tensor | None]:
    """The band of pairs that may meet, and the mask that remains beside it."""
    diagonal, causal, mask = 0, given.is_causal, given.attn_mask
    if mask is not None and causal:
        raise given.fail(
            "is_causal=True and attn_mask exclude each other: put both into the mask, or pass the "
            "mask to attend with window=(None, 0)."
        )
    if mask is not None and type(mask) not in (Tensor, torch.nn.Parameter):
        from torch.nn.attention.bias import CausalBias, CausalVariant  # takes a second to import

        if isinstance(mask, CausalBias):
            if (mask.seq_len_q, mask.seq_len_kv) != (m, n):
                raise given.fail(
                    f"The causal bias was made for lengths ({mask.seq_len_q}, {mask.seq_len_kv}), "
                    f"but the call has ({m}, {n})."
                )
            diagonal = n - m if mask.variant == CausalVariant.LOWER_RIGHT else 0
            causal, mask = True, None
    left, right = (None, None) if given.window is None else _sides(given)
    if causal:
        right = 0
    lower = None if left is None else diagonal - left
    upper = None if right is None else diagonal + right
    return Band(lower, upper), mask


def _sides(given: Given) -> Window:
    window: Any = given.window
    sides: tuple[Any, ...] = ()
    if isinstance(window, tuple | list):
        sides = tuple(cast(Sequence[Any], window))
    if len(sides) != 2 or not all(x is None or (isinstance(x, int) and x >= 0) for x in sides):
        raise given.fail(
            "window must be (left, right), each an integer >= 0, or None for no limit: (3, 0) sees "
            "three keys back and none ahead."
        )
    return sides[0], sides[1]


def pair_arguments(
    given: Given, pairs: Pairs, grid: tuple[int, ...], compute: torch.dtype
) -> dict[str, Tensor]:
    """Mask and bias as kernel arguments; `grid` is ``(*batch, M, N)``."""
    out: dict[str, Tensor] = {}
    if pairs.mask is not None:
        if pairs.mask.dtype != torch.bool:
            raise given.fail(
                "attn_mask must be boolean (True = may attend) or floating point (added)."
            )
        out["mask"] = _fitting(given, "attn_mask", pairs.mask, pairs, grid)
    if pairs.bias is not None:
        label = "attn_mask" if given.bias is None else "bias"
        bias = _fitting(given, label, pairs.bias, pairs, grid)
        _check_dtype(given, label, bias, compute)
        out["bias"] = bias.to(compute)
    return out


def _check_dtype(given: Given, label: str, bias: Tensor, compute: torch.dtype) -> None:
    converts = given.autocast is not None or bias.dtype in (given.query.dtype, compute)
    if not (bias.is_floating_point() and converts):
        raise given.fail(f"A floating-point {label} must have the dtype of the query.")


def _fitting(given: Given, label: str, x: Tensor, pairs: Pairs, grid: tuple[int, ...]) -> Tensor:
    """`x` with all dimensions of the grid."""
    if x.device != given.query.device:
        raise given.fail(
            f"{label} must be on the device of the query: move it with .to(query.device)."
        )
    if not broadcasts_to(x.shape, grid):
        raise given.fail(
            f"{label} must broadcast to {grid} (..., query length, key length); a padding mask "
            "(batch, keys) of a call with heads goes in as mask[:, None, None, :]."
            + (" With sharded keys it has the columns of this rank." if pairs.sharded else "")
        )
    return x.reshape(*(1,) * (len(grid) - x.ndim), *x.shape)


def lowered(bias: Tensor) -> tuple[Tensor, Tensor | None]:
    """Take a large common part off each query's bias: weights stay, and G keeps its digits.

    Masks made of the most negative number give a fully padded row such a bias. Added to it, the
    scores would be rounded away, and the weights exp(s - G) would no longer sum to one.
    """
    if bias.shape[-1] == 0:
        return bias, None
    top = bias.detach().amax(-1, keepdim=True)
    huge = top.isfinite() & (top.abs() > 64)
    if holds_at_once(~huge):
        return bias, None
    lift = torch.where(huge, top, 0.0)
    return bias - lift, lift
