"""A call of `linear_cross_entropy`: checked, and flattened to rows against classes."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import holds, real, require
from cumulant.core.errors import InputError
from cumulant.core.precision import HALF, widened
from cumulant.distributed.facts import Facts, describe, grad_mode
from cumulant.distributed.maps import spread
from cumulant.distributed.ranks import Ranks

__all__ = ["Problem", "VocabularyCall"]

_OWNER = "linear_cross_entropy"
_KINDS = (*HALF, torch.float32, torch.float64)
_IGNORED = -100


@dataclass(frozen=True)
class Problem:
    """Rows against classes: ``query`` (*K, M, d), ``key`` (*K, C, d), C the classes of this rank.

    K is there only where each row has several losses, with classes of their own.
    """

    query: Tensor
    key: Tensor
    bias: Tensor | None  # (*K, 1, C)
    cap: Tensor | None
    index: Tensor  # (*K, M), the targets as numbers of this rank's classes
    here: Tensor | None  # (*K, M), whether the target is one of them; None where all are
    soft: Tensor | None  # (*K, M, C), probabilities instead of an index
    counted: Tensor  # (*K, M), 1 for rows that count, 0 for others
    weight: Tensor | None  # (C,)
    classes: int  # of all ranks
    ranks: Ranks

    def scores(self) -> dict[str, Tensor]:
        """What the kernels call the scores."""
        out = {"query": self.query, "key": self.key}
        if self.bias is not None:
            out["bias"] = self.bias
        if self.cap is not None:
            out["cap"] = self.cap.expand((1,) * self.key.ndim)
        return out


@dataclass(frozen=True)
class VocabularyCall:
    """The arguments of `linear_cross_entropy` as they came."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    weight: Tensor | None
    reduction: str
    ignore_index: int | None
    label_smoothing: float
    softcap: float | None
    z_loss: float

    @property
    def kind(self) -> torch.dtype:
        """The dtype of the result."""
        kind = torch.promote_types(self.input.dtype, self.linear_weight.dtype)
        return (
            kind if self.linear_bias is None else torch.promote_types(kind, self.linear_bias.dtype)
        )

    def problem(self, ranks: Ranks) -> Problem:
        """Check the call on every rank and bring it into the form of `Problem`."""

        def facts() -> Facts:
            self._check()
            x, W = self._rows(self.input), self.linear_weight.flatten(0, -2)
            return {
                **describe(input=x, linear_weight=W),
                **grad_mode(),
                "the number of rows": len(x),
                "the shape of a row's losses": tuple(self.linear_weight.shape[1:-1]),
                "reduction": self.reduction,
                "label_smoothing": float(self.label_smoothing),
                "softcap": -1.0 if self.softcap is None else float(self.softcap),
                "z_loss": float(self.z_loss),
                "whether targets are probabilities": self._soft(),
                "whether linear_bias is given": self.linear_bias is not None,
                "whether weight is given": self.weight is not None,
                "the sum of the targets": 0 if self._soft() else _total(self.target),
                "classes": self.linear_weight.shape[0],
            }

        counts = ranks.agree(_OWNER, facts, differ=("classes",))["classes"]
        if not sum(counts):
            raise InputError(f"{_OWNER}: linear_weight must have a class at least.")
        return self._problem(ranks, sum(counts[: ranks.rank]), sum(counts))

    def shaped(self, rows: Tensor) -> Tensor:
        """Rows ``(*K, M)`` in the shape of the targets and the dtype of the result."""
        lead, more = self.input.shape[:-1], self.linear_weight.shape[1:-1]
        out = rows.T.reshape(*lead, *more) if more else rows.reshape(lead)
        return out.to(self.kind)

    def _rows(self, x: Tensor) -> Tensor:
        """``(*batch, n)`` as ``(N, n)``."""
        return x.reshape(math.prod(self.input.shape[:-1]), x.shape[-1])

    def _soft(self) -> bool:
        shape = (*self.input.shape[:-1], *self.linear_weight.shape[:-1])
        return self.target.shape == shape and self.target.is_floating_point()

    def _problem(self, ranks: Ranks, before: int, classes: int) -> Problem:
        wide = widened(self.kind)
        W, b, more = self.linear_weight.to(wide), self.linear_bias, self.linear_weight.ndim > 2
        b = None if b is None else b.to(wide)
        query = spread(self._rows(self.input).to(wide), ranks)
        key = W.flatten(1, -2).movedim(1, 0) if more else W
        if b is not None:
            b = (b.flatten(1).T if more else b)[..., None, :]
        query = query[None] if more else query
        cap = None if self.softcap is None else query.new_full((), float(self.softcap))
        if b is not None and cap is not None:  # the kernels add a bias after the cap
            query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
            key, b = torch.cat([key, b.mT], -1), None
        shape = (*key.shape[:-2], query.shape[-2])
        counted, index = (
            query.new_ones(()).expand(shape),
            torch.zeros(shape, dtype=torch.long, device=query.device),
        )
        here = soft = None
        if self._soft():
            soft = self.target.to(wide)
            soft = soft.flatten(2).movedim(-1, 0) if more else self._rows(soft)
        else:
            y = self.target.long()
            y = y.reshape(len(y), -1).T if more else y.reshape(-1)
            counts = y != (_IGNORED if self.ignore_index is None else self.ignore_index)
            _in_range(y, counts, classes)
            index = torch.where(counts, y, 0) - before
            if not ranks.alone:
                here = (index >= 0) & (index < key.shape[-2])
                index = torch.where(here, index, 0)
            counted = counts.to(wide)
        weight = None if self.weight is None else self.weight.detach().to(wide)
        return Problem(*(query, key, b, cap, index, here, soft, counted, weight, classes, ranks))

    def _check(self) -> None:
        _tensors(self.input, self.linear_weight, self.target, self.linear_bias, self.weight)
        x, W, y, b, w = (
            *(self.input, self.linear_weight, self.target, self.linear_bias, self.weight),
        )
        if x.ndim < 1 or W.ndim < 2 or x.shape[-1] != W.shape[-1]:
            raise InputError(
                f"{_OWNER}: input must have shape (*batch, features) and linear_weight (classes, "
                f"features), but have {tuple(x.shape)} and {tuple(W.shape)}."
            )
        if W.ndim > 2 and x.ndim != 2:
            raise InputError(
                f"{_OWNER}: linear_weight {tuple(W.shape)} asks for several losses of a row, which "
                f"takes an input (N, features), not {tuple(x.shape)}."
            )
        if b is not None and b.shape != W.shape[:-1]:
            raise InputError(
                f"{_OWNER}: linear_bias must have shape {tuple(W.shape[:-1])}, one entry for each "
                f"class, but has {tuple(b.shape)}."
            )
        if w is not None and w.shape != W.shape[:1]:
            raise InputError(
                f"{_OWNER}: weight must have shape {tuple(W.shape[:1])}, one entry for each class, "
                f"but has {tuple(w.shape)}. (linear_weight is the matrix, weight is per class.)"
            )
        if w is not None and w.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{_OWNER}: weight is a constant, as in torch; detach it. A learned weight of each "
                'row goes on the losses of reduction="none".'
            )
        if not self._soft():
            _class_numbers(y, (*x.shape[:-1], *W.shape[1:-1]), (*x.shape[:-1], *W.shape[:-1]))
        elif self.ignore_index is not None:
            raise InputError(
                f"{_OWNER}: ignore_index has no meaning where targets are probabilities; give "
                "these rows zeros."
            )
        if self.reduction not in ("mean", "sum", "none"):
            raise InputError(
                f"{_OWNER}: reduction must be mean, sum or none, not {self.reduction!r}."
            )
        _options(self)


def _options(call: VocabularyCall) -> None:
    real(_OWNER, "label_smoothing", call.label_smoothing, least=0.0, most=1.0)
    real(_OWNER, "z_loss", call.z_loss, least=0.0)
    if call.softcap is not None:
        real(_OWNER, "softcap", call.softcap, least=0.0, open_at_least=True)
    if call.ignore_index is not None:
        try:
            operator.index(call.ignore_index)
        except TypeError:
            raise InputError(
                f"{_OWNER}: ignore_index must be an integer or None, not {call.ignore_index!r}."
            ) from None


def _tensors(x: Any, W: Any, y: Any, b: Any, w: Any) -> None:
    real_ones = {"input": x, "linear_weight": W, "linear_bias": b, "weight": w}
    for name, tensor in real_ones.items():
        if tensor is None and name in ("linear_bias", "weight"):
            continue
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype not in _KINDS
            or tensor.layout != torch.strided
        ):
            what = type(tensor).__name__
            if isinstance(tensor, Tensor):
                what = f"{tensor.dtype}, {tensor.layout}"
            hint = " Pass its .weight." if isinstance(tensor, torch.nn.Module) else ""
            raise InputError(f"{_OWNER}: {name} must be a dense real tensor, not {what}.{hint}")
    if not isinstance(y, Tensor):
        raise InputError(f"{_OWNER}: target must be a tensor, not {type(y).__name__}.")
    given = {**real_ones, "target": y}
    if len({t.device for t in given.values() if t is not None}) > 1:
        places = ", ".join(f"{n} on {t.device}" for n, t in given.items() if t is not None)
        raise InputError(f"{_OWNER}: all tensors must be on one device, but got {places}.")


def _class_numbers(y: Tensor, shape: tuple[int, ...], soft: tuple[int, ...]) -> None:
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.shape != shape:
        raise InputError(
            f"{_OWNER}: target must be integers of shape {shape}, the class of each row, or "
            f"probabilities of shape {soft}, but is {y.dtype} of shape {tuple(y.shape)}."
        )


def _in_range(y: Tensor, counts: Tensor, classes: int) -> None:
    def told() -> str:
        bad = y[counts & ((y < 0) | (y >= classes))]
        return (
            f"{_OWNER}: target must lie between 0 and {classes - 1}, or be ignore_index, but "
            f"{len(bad)} do not, the first being {int(bad[0])}."
        )

    require(~counts | ((y >= 0) & (y < classes)), told)


def _total(y: Tensor) -> int:
    """Ranks with other targets than the rest would get a loss of nothing in particular."""
    total = y.sum()
    return int(total) if holds(total == total) is not None else 0
