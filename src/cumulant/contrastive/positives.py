"""Which keys belong to an anchor, and their mean: the other half of the gradient (THEORY T24)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.errors import InputError
from cumulant.kernels.tiles import Arguments, Program, Result, Tile, tile_sum
from cumulant.measures.checks import require

__all__ = ["Positives", "positives_of"]


@dataclass(frozen=True)
class Positives:
    """Pairs (anchor, key) that belong together, in one of three forms, each linear in memory.

    index: ``(*batch, M, K)``, numbers of keys, -1 where an anchor has fewer;
    labels: ``((*batch, M), (*batch, N))``, pairs of equal labels, without (i, i) if `not_self`;
    mask: ``(*batch, M, N)``, True for a pair: as large as its maker made it.

    `rows` turns the index form around: so many keys are the anchors, and the entries of the index
    say which of them each query belongs to.
    """

    keys: int
    index: Tensor | None = None
    rows: int | None = None
    labels: tuple[Tensor, Tensor] | None = None
    not_self: bool = False
    mask: Tensor | None = None

    def center(self, key: Tensor) -> Tensor:
        """The mean of each anchor's positive keys, ``(*batch, M, d)``: SupCon's weighting."""
        if self.index is not None:
            return _gather(key, self.index) if self.rows is None else _spread(key, self)
        if self.labels is not None:
            return _class_mean(key, *self.labels, not_self=self.not_self)
        if self.mask is None:
            raise RuntimeError("no form of positives")
        return _mask_mean(key, self.mask)

    def reversed(self, keys: int) -> Positives:
        """The same pairs seen from `keys` keys."""
        if self.index is not None:
            return Positives(keys, index=self.index, rows=keys)
        if self.labels is not None:
            return Positives(keys, labels=(self.labels[1], self.labels[0]), not_self=self.not_self)
        return Positives(keys, mask=None if self.mask is None else self.mask.mT)

    def includes(self, index: Tensor) -> Tensor:
        """Whether key ``index[..., i, k]`` is a positive of anchor i; -1 never is."""
        there = index >= 0
        at = index.clamp_min(0)
        if self.index is not None:
            same = (self.index[..., None] == at[..., None, :]).any(-2)
        elif self.labels is not None:
            mine, theirs = self.labels
            batch = torch.broadcast_shapes(theirs.shape[:-1], at.shape[:-2])
            flat = at.expand(*batch, *at.shape[-2:]).flatten(-2)
            found = theirs.expand(*batch, -1).gather(-1, flat).unflatten(-1, at.shape[-2:])
            same = found == mine[..., None]
            if self.not_self:
                own = torch.arange(mine.shape[-1], device=at.device)[:, None]
                same = same & (at != own)
        elif self.mask is not None:
            batch = torch.broadcast_shapes(self.mask.shape[:-2], at.shape[:-2])
            mask = self.mask.expand(*batch, *self.mask.shape[-2:])
            same = mask.gather(-1, at.expand(*batch, *at.shape[-2:]))
        else:
            raise RuntimeError("no form of positives")
        return same & there

    def meets(self, mask: Tensor) -> Tensor:
        """Whether any positive pair is True in a mask ``(*batch, M, N)``."""
        if self.index is not None:
            batch = torch.broadcast_shapes(self.index.shape[:-2], mask.shape[:-2])
            at = self.index.expand(*batch, *self.index.shape[-2:])
            hit = mask.expand(*batch, *mask.shape[-2:]).gather(-1, at.clamp_min(0))
            return (hit & (at >= 0)).any()
        if self.labels is not None:
            pairs = self.labels[0][..., :, None] == self.labels[1][..., None, :]
            return (pairs & mask).any()
        if self.mask is None:
            raise RuntimeError("no form of positives")
        return (self.mask & mask).any()

    def tags(self) -> tuple[Tensor, Tensor] | None:
        """Numbers that anchors share with their positives alone; None for a mask."""
        if self.index is not None:
            width = self.index.shape[-1]
            own = torch.arange(self.keys, device=self.index.device)[:, None]
            return self.index, own.expand(self.keys, width)
        if self.labels is not None:
            return self.labels[0][..., None], self.labels[1][..., None]
        return None


def _gather(key: Tensor, index: Tensor) -> Tensor:
    batch = torch.broadcast_shapes(key.shape[:-2], index.shape[:-2])
    key = key.expand(*batch, *key.shape[-2:])
    there = index >= 0
    at = index.clamp_min(0).expand(*batch, *index.shape[-2:])
    flat = at.reshape(*batch, -1, 1).expand(*batch, -1, key.shape[-1])
    rows = key.gather(-2, flat).unflatten(-2, index.shape[-2:])
    if index.shape[-1] == 1:
        return rows[..., 0, :]
    rows = rows * there[..., None]
    return rows.sum(-2) / there.sum(-1, keepdim=True)


def _spread(query: Tensor, positives: Positives) -> Tensor:
    """For each key the mean of the queries that it is a positive of."""
    index, n = positives.index, positives.rows
    if index is None or n is None:
        raise RuntimeError("only the index form is turned around")
    batch = torch.broadcast_shapes(query.shape[:-2], index.shape[:-2])
    at = index.expand(*batch, *index.shape[-2:])
    there = (at >= 0)[..., None]
    rows = (query.expand(*batch, *query.shape[-2:])[..., None, :] * there).flatten(-3, -2)
    at = at.clamp_min(0).flatten(-2)[..., None]
    sums = rows.new_zeros(*batch, n, rows.shape[-1]).scatter_add(-2, at.expand_as(rows), rows)
    ones = there.flatten(-3, -2).to(rows.dtype)
    counts = ones.new_zeros(*batch, n, 1).scatter_add(-2, at, ones)
    require(
        counts > 0,
        lambda: _missing("info_nce: seen from the keys (symmetric)", (counts > 0)[..., 0]),
    )
    return sums / counts


def _class_mean(key: Tensor, anchors: Tensor, labels: Tensor, *, not_self: bool) -> Tensor:
    """Sums over classes, then one row for each anchor: linear however many share a label."""
    mine, theirs, m = anchors, labels, anchors.shape[-1]
    classes = int(torch.maximum(mine.max(), theirs.max())) + 1
    batch = torch.broadcast_shapes(key.shape[:-2], theirs.shape[:-1])
    key = key.expand(*batch, *key.shape[-2:])
    at = theirs.expand(*batch, -1)[..., None].expand(key.shape)
    sums = key.new_zeros(*batch, classes, key.shape[-1]).scatter_add(-2, at, key)
    ones = torch.ones_like(key[..., :1])
    counts = ones.new_zeros(*batch, classes, 1).scatter_add(-2, at[..., :1], ones)
    at = mine.expand(*batch, -1)[..., None]
    total = sums.gather(-2, at.expand(*batch, m, key.shape[-1]))
    count = counts.gather(-2, at)
    return (total - key) / (count - 1) if not_self else total / count


def _mask_mean(key: Tensor, mask: Tensor) -> Tensor:
    """The mean over the True entries of each row, tile by tile."""

    def function(_: Tile, a: Arguments) -> Arguments:
        return {"center": (a["mask"].to(a["key"].dtype) * a["weight"]) @ a["key"]}

    m, n = mask.shape[-2:]
    batch = torch.broadcast_shapes(key.shape[:-2], mask.shape[:-2])
    program = Program(
        function=function,
        indices={"mask": "ij", "key": "j", "weight": "i"},
        results=(Result("center", "i", (*batch, m, key.shape[-1])),),
        grid=(m, n),
    )
    weight = mask.sum(-1, keepdim=True).to(key.dtype).reciprocal()
    return tile_sum(program, {"mask": mask, "key": key, "weight": weight})["center"]


def positives_of(
    owner: str, given: Any, labels: Any, query: Tensor, key: Tensor, *, not_self: bool
) -> Positives:
    """Check what says which pairs belong together; every anchor needs one at least."""
    m, n = query.shape[-2], key.shape[-2]
    if given is not None and labels is not None:
        raise InputError(f"{owner}: positives and labels exclude each other; pass one of them.")
    if labels is not None:
        return _by_label(owner, labels, query, key, not_self=not_self)
    if given is None:
        if n < m:
            raise InputError(
                f"{owner}: without positives, key i belongs to anchor i, but there are {m} anchors "
                f"and {n} keys. Say which key belongs to which anchor with positives=."
            )
        return Positives(n, index=torch.arange(m, device=query.device)[:, None])
    if not isinstance(given, Tensor):
        given = torch.as_tensor(given)
    pairs = given.to(query.device)
    batch = query.shape[:-2]
    if pairs.dtype == torch.bool:
        _fits(owner, "positives", pairs, (*batch, m, n))
        mask = pairs[(None,) * (query.ndim - pairs.ndim)]
        require(mask.any(-1), lambda: _missing(owner, mask.any(-1)))
        return Positives(n, mask=mask)
    if pairs.is_floating_point() or pairs.is_complex():
        raise InputError(
            f"{owner}: positives must be whole numbers (of keys) or a boolean mask, not "
            f"{pairs.dtype}."
        )
    index = pairs.long()
    if index.ndim == len(batch) + 1 or index.ndim == 1:
        index = index[..., None]
    if index.ndim < 2 or index.shape[-2] != m:
        raise InputError(
            f"{owner}: positives must have one entry for each of the {m} anchors, "
            f"{(*batch, m)} or, for several, {(*batch, m, 'K')} with -1 where there are fewer, but "
            f"have shape {tuple(pairs.shape)}."
        )
    _fits(owner, "positives", index, (*batch, m, index.shape[-1]))
    require(
        (index >= -1) & (index < n),
        lambda: (
            f"{owner}: positives must lie between 0 and {n - 1}, the numbers of keys, but go from "
            f"{int(index.min())} to {int(index.max())}."
        ),
    )
    there = (index >= 0).any(-1)
    require(there, lambda: _missing(owner, there))
    if index.shape[-1] > 1:
        ordered = index.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        require(~twice, lambda: f"{owner}: positives name the same key twice for one anchor.")
        index = ordered.flip(-1)
    return Positives(n, index=index[(None,) * (query.ndim - index.ndim)])


def _by_label(owner: str, labels: Any, query: Tensor, key: Tensor, *, not_self: bool) -> Positives:
    both = labels if isinstance(labels, tuple | list) and len(labels) == 2 else (labels, labels)
    rows: list[Tensor] = []
    for x, points, name in zip(both, (query, key), ("anchor", "key"), strict=True):
        row = torch.as_tensor(x, device=query.device)
        if row.ndim < 1 or row.is_floating_point() or row.is_complex():
            raise InputError(f"{owner}: labels must be whole numbers, one for each {name}.")
        if row.shape[-1] != points.shape[-2]:
            raise InputError(
                f"{owner}: there are {points.shape[-2]} {name}s, but {row.shape[-1]} labels for "
                "them. Different sets take labels=(labels of anchors, labels of keys)."
            )
        _fits(owner, "labels", row, points.shape[:-1])
        rows.append(row.long()[(None,) * (points.ndim - 1 - row.ndim)])
    m = rows[0].shape[-1]
    batch = torch.broadcast_shapes(rows[0].shape[:-1], rows[1].shape[:-1])
    _, number = torch.unique(
        torch.cat([x.expand(*batch, -1) for x in rows], -1), return_inverse=True
    )
    mine, theirs = number[..., :m], number[..., m:]
    counts = number.new_zeros((*batch, int(number.max()) + 1))
    counts = counts.scatter_add(-1, theirs, torch.ones_like(theirs))
    there = counts.gather(-1, mine) > int(not_self)
    require(there, lambda: _missing(owner, there))
    return Positives(key.shape[-2], labels=(mine, theirs), not_self=not_self)


def _fits(owner: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    try:
        good = x.ndim <= len(shape) and torch.broadcast_shapes(x.shape, shape) == torch.Size(shape)
    except RuntimeError:
        good = False
    if not good or x.shape[-1] != shape[-1]:
        raise InputError(
            f"{owner}: {name} must have shape {shape}, or one that broadcasts to it, but have "
            f"{tuple(x.shape)}."
        )


def _missing(owner: str, there: Tensor) -> str:
    bad = (~there).reshape(-1).nonzero()[:, 0]
    some = ", ".join(str(int(i)) for i in bad[:5]) + (", ..." if len(bad) > 5 else "")
    return (
        f"{owner}: every anchor needs a positive key, but {len(bad)} have none (anchor {some}). "
        "Leave these anchors out of the call."
    )
