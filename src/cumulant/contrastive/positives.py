"""Which keys belong to an anchor, and their mean: the other half of the gradient.

See docs/theory.md, T24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cumulant.core.checks import broadcasts_to, require
from cumulant.core.errors import InputError
from cumulant.core.typed import functions
from cumulant.kernels.tiles import Arguments, Program, Result, Tile, tile_sum

__all__ = ["Aligned", "Labeled", "Listed", "Masked", "Positives", "label_rows", "positives_of"]


# What every form of positives can do:
#   center(key)      the mean of each anchor's positive keys, (*batch, M, d): SupCon's weighting
#   reversed()       the same pairs with keys for anchors; every key must have one
#   includes(index)  whether key index[..., i, k] is a positive of anchor i; -1 never is
#   meets(mask)      whether any positive pair is True in a mask (*batch, M, N)
#   count()          how many positives each anchor has
#   tags(device)     numbers that anchors share with their positives alone (not of a mask)


def _expand(x: Tensor, batch: torch.Size, kept: int) -> Tensor:
    return x.expand(*batch, *x.shape[x.ndim - kept :])


@dataclass(frozen=True)
class Aligned:
    """Key `first` + i belongs to anchor i, of so many anchors and keys."""

    anchors: int
    keys: int
    first: int = 0

    def _own(self) -> slice:
        return slice(self.first, self.first + self.anchors)

    def center(self, key: Tensor) -> Tensor:
        return key[..., self._own(), :]

    def count(self, device: torch.device) -> Tensor:
        return torch.ones(self.anchors, device=device)

    def reversed(self) -> Aligned:
        return Aligned(self.keys, self.anchors)

    def includes(self, index: Tensor) -> Tensor:
        own = torch.arange(self.keys, device=index.device)[self._own()]
        return index == own[:, None]

    def meets(self, mask: Tensor) -> Tensor:
        whole = mask.expand(*mask.shape[:-2], self.anchors, self.keys)
        return whole.diagonal(self.first, dim1=-2, dim2=-1).any()

    def tags(self, device: torch.device) -> tuple[Tensor, Tensor]:
        own = torch.arange(self.keys, device=device)[:, None]
        return own[self._own()], own


@dataclass(frozen=True)
class Listed:
    """By number: ``index`` ``(*batch, M, K)`` of `keys` keys, -1 where an anchor has fewer."""

    index: Tensor
    keys: int

    def center(self, key: Tensor) -> Tensor:
        batch = functions.broadcast_shapes(key.shape[:-2], self.index.shape[:-2])
        there = self.index >= 0
        at = _expand(self.index.clamp_min(0), batch, 2).flatten(-2)[..., None]
        rows = _expand(key, batch, 2).gather(-2, at.expand(*batch, -1, key.shape[-1]))
        rows = torch.unflatten(rows, -2, self.index.shape[-2:])
        if self.index.shape[-1] == 1:
            return rows[..., 0, :]
        return (rows * there[..., None]).sum(-2) / there.sum(-1, keepdim=True)

    def count(self, device: torch.device) -> Tensor:
        return (self.index >= 0).sum(-1)

    def reversed(self) -> Listed:
        return _Claimed(self.index, self.keys)

    def includes(self, index: Tensor) -> Tensor:
        same = self.index[..., None] == index[..., None, :]
        return same.any(-2) & (index >= 0)

    def meets(self, mask: Tensor) -> Tensor:
        batch = functions.broadcast_shapes(self.index.shape[:-2], mask.shape[:-2])
        at = _expand(self.index, batch, 2)
        return (_expand(mask, batch, 2).gather(-1, at.clamp_min(0)) & (at >= 0)).any()

    def tags(self, device: torch.device) -> tuple[Tensor, Tensor]:
        own = torch.arange(self.keys, device=device)[:, None]
        return self.index, own.expand(self.keys, self.index.shape[-1])


@dataclass(frozen=True)
class _Claimed(Listed):
    """`Listed` from the other side: the keys are the anchors, and the index says whose each is."""

    def center(self, key: Tensor) -> Tensor:
        batch = functions.broadcast_shapes(key.shape[:-2], self.index.shape[:-2])
        at = _expand(self.index, batch, 2)
        there = (at >= 0)[..., None]
        rows = (_expand(key, batch, 2)[..., None, :] * there).flatten(-3, -2)
        at = at.clamp_min(0).flatten(-2)[..., None]
        sums = rows.new_zeros(*batch, self.keys, rows.shape[-1])
        sums = sums.scatter_add(-2, at.expand_as(rows), rows)
        ones = there.flatten(-3, -2).to(rows.dtype)
        counts = ones.new_zeros(*batch, self.keys, 1).scatter_add(-2, at, ones)
        _all_have(_OTHER_SIDE, counts[..., 0] > 0, "key")
        return sums / counts


@dataclass(frozen=True)
class Labeled:
    """By label: numbers from 0 on of the anchors ``(*batch, M)`` and of the keys ``(*batch, N)``.

    `not_self` leaves the pairs (i, first + i) out.
    """

    anchors: Tensor
    keys: Tensor
    not_self: bool
    first: int = 0

    def center(self, key: Tensor) -> Tensor:
        """Sums over classes, then one row for each anchor: linear however many share a label."""
        # A key is taken off its class again if it is the anchor: in double precision.
        kind = key.dtype
        if self.not_self and key.device.type != "mps":
            key = key.double()
        batch = functions.broadcast_shapes(key.shape[:-2], self.keys.shape[:-1])
        key = _expand(key, batch, 2)
        classes = self._classes()
        at = _expand(self.keys, batch, 1)[..., None]
        sums = key.new_zeros(*batch, classes, key.shape[-1])
        sums = sums.scatter_add(-2, at.expand(key.shape), key)
        ones = torch.ones_like(key[..., :1])
        counts = ones.new_zeros(*batch, classes, 1).scatter_add(-2, at, ones)
        mine = _expand(self.anchors, batch, 1)[..., None]
        total = sums.gather(-2, mine.expand(*mine.shape[:-1], key.shape[-1]))
        count = counts.gather(-2, mine)
        if self.not_self:
            own = _expand(self._own(), batch, 1)[..., None]
            total = total - own * key[..., self.first : self.first + own.shape[-2], :]
            count = count - own.to(count.dtype)
        return (total / count).to(kind)

    def _own(self) -> Tensor:
        """Which anchors are, as keys, of their own class."""
        return self.anchors == self.keys[..., self.first : self.first + self.anchors.shape[-1]]

    def reversed(self) -> Labeled:
        other = Labeled(self.keys, self.anchors, self.not_self)
        _all_have(_OTHER_SIDE, other.present(), "key")
        return other

    def present(self) -> Tensor:
        """Which anchors have a positive."""
        return self.count(self.keys.device) > 0

    def _classes(self) -> int:
        """How many labels there are, or a bound where asking would stall a device."""
        if self.keys.device.type != "cpu":
            return self.anchors.shape[-1] + self.keys.shape[-1]
        return int(torch.maximum(self.anchors.max(), self.keys.max())) + 1

    def count(self, device: torch.device) -> Tensor:
        counts = self.keys.new_zeros((*self.keys.shape[:-1], self._classes()))
        counts = counts.scatter_add(-1, self.keys, torch.ones_like(self.keys))
        others = counts.gather(-1, self.anchors)
        return others - self._own().long() if self.not_self else others

    def includes(self, index: Tensor) -> Tensor:
        batch = functions.broadcast_shapes(self.keys.shape[:-1], index.shape[:-2])
        at = _expand(index.clamp_min(0), batch, 2)
        found = torch.unflatten(
            _expand(self.keys, batch, 1).gather(-1, at.flatten(-2)), -1, at.shape[-2:]
        )
        same = (found == self.anchors[..., None]) & (index >= 0)
        if self.not_self:
            own = torch.arange(at.shape[-2], device=at.device)[:, None] + self.first
            same = same & (at != own)
        return same

    def meets(self, mask: Tensor) -> Tensor:
        return ((self.anchors[..., :, None] == self.keys[..., None, :]) & mask).any()

    def tags(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.anchors[..., None], self.keys[..., None]


@dataclass(frozen=True)
class Masked:
    """By mask: ``(*batch, M, N)``, True for a pair; as large as its maker made it."""

    mask: Tensor

    def center(self, key: Tensor) -> Tensor:
        """The mean over the True entries of each row, tile by tile."""

        def function(_: Tile, a: Arguments) -> Arguments:
            return {"center": (a["mask"].to(a["key"].dtype) * a["weight"]) @ a["key"]}

        m, n = self.mask.shape[-2:]
        batch = functions.broadcast_shapes(key.shape[:-2], self.mask.shape[:-2])
        program = Program(
            function=function,
            indices={"mask": "ij", "key": "j", "weight": "i"},
            results=(Result("center", "i", (*batch, m, key.shape[-1])),),
            grid=(m, n),
        )
        weight = self.mask.sum(-1, keepdim=True).to(key.dtype).reciprocal()
        key = key[(None,) * (self.mask.ndim - key.ndim)]
        return tile_sum(program, {"mask": self.mask, "key": key, "weight": weight})["center"]

    def count(self, device: torch.device) -> Tensor:
        return self.mask.sum(-1)

    def reversed(self) -> Masked:
        _all_have(_OTHER_SIDE, self.mask.any(-2), "key")
        return Masked(self.mask.mT)

    def includes(self, index: Tensor) -> Tensor:
        batch = functions.broadcast_shapes(self.mask.shape[:-2], index.shape[:-2])
        at = _expand(index, batch, 2)
        return _expand(self.mask, batch, 2).gather(-1, at.clamp_min(0)) & (at >= 0)

    def meets(self, mask: Tensor) -> Tensor:
        return (self.mask & mask).any()


Positives = Aligned | Listed | Labeled | Masked

_OTHER_SIDE = "info_nce: seen from the keys (symmetric)"


def positives_of(
    owner: str,
    given: Any,
    labels: Any,
    query: Tensor,
    key: Tensor,
    *,
    not_self: bool,
    own: slice | None = None,
) -> Positives:
    """Check what says which pairs belong together; every anchor needs one at least.

    `own` are the keys that came with the anchors, among those of all ranks.
    """
    m, n = query.shape[-2], key.shape[-2]
    own = own or slice(0, n)
    first, mine = own.start, own.stop - own.start
    if not_self and mine < m:
        raise InputError(
            f'{owner}: exclude="self" excludes key i for anchor i, but there are {m} anchors and '
            f"{mine} keys; pass key indices to exclude instead."
        )
    if given is not None and labels is not None:
        raise InputError(f"{owner}: pass either positives or labels, not both.")
    if labels is not None:
        return _by_label(owner, labels, query, key, not_self=not_self, first=first)
    if given is None:
        if mine < m:
            raise InputError(
                f"{owner}: by default, key i is the positive of anchor i, but there are {m} "
                f"anchors and {mine} keys. Pass positives= to assign keys to anchors."
            )
        return Aligned(m, n, first)
    pairs = _tensor(owner, "positives", given).to(query.device)
    batch = query.shape[:-2]
    if pairs.dtype == torch.bool:
        _fits(owner, "positives", pairs, (*batch, m, n))
        mask = pairs[(None,) * (query.ndim - pairs.ndim)]
        mask = mask.expand(*mask.shape[:-2], m, n)
        _all_have(owner, mask.any(-1))
        return Masked(mask)
    if pairs.is_floating_point() or pairs.is_complex():
        raise InputError(
            f"{owner}: positives must be integers (key indices) or a boolean mask, not "
            f"{pairs.dtype}."
        )
    index = pairs.long()
    if index.ndim == len(batch) + 1 or index.ndim == 1:
        index = index[..., None]
    if index.ndim < 2 or index.shape[-2] != m:
        raise InputError(
            f"{owner}: positives must have one entry for each of the {m} anchors, "
            f"{(*batch, m)} or, for several, {(*batch, m, 'K')} padded with -1, but "
            f"have shape {tuple(pairs.shape)}."
        )
    _fits(owner, "positives", index, (*batch, m, index.shape[-1]))
    require(
        (index >= -1) & (index < n),
        lambda: (
            f"{owner}: positives must lie between 0 and {n - 1}, the numbers of keys (or be -1 for "
            f"none), but go from {int(index.min())} to {int(index.max())}."
        ),
    )
    _all_have(owner, (index >= 0).any(-1))
    if index.shape[-1] > 1:
        ordered = index.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        require(~twice, lambda: f"{owner}: positives name the same key twice for one anchor.")
        index = ordered.flip(-1)
    return Listed(index[(None,) * (query.ndim - index.ndim)], n)


def label_rows(owner: str, labels: Any, query: Tensor, key: Tensor) -> list[Tensor]:
    """Labels of anchors and of keys as whole numbers ``(*batch, M)`` and ``(*batch, N)``."""
    both: tuple[Any, ...] = (labels, labels)
    if isinstance(labels, tuple):
        both = cast(tuple[Any, ...], labels)
    if len(both) != 2:
        raise InputError(
            f"{owner}: labels are one tensor, or (labels of anchors, labels of keys), not a tuple "
            f"of {len(both)}."
        )
    rows: list[Tensor] = []
    for x, points, name in zip(both, (query, key), ("anchor", "key"), strict=True):
        row = _tensor(owner, "labels", x).to(query.device)
        if row.ndim < 1 or row.is_floating_point() or row.is_complex():
            raise InputError(f"{owner}: labels must be integers, one for each {name}.")
        if row.shape[-1] != points.shape[-2]:
            raise InputError(
                f"{owner}: there are {points.shape[-2]} {name}s, but {row.shape[-1]} labels for "
                "them. For different sets, pass labels=(labels of anchors, labels of keys)."
            )
        _fits(owner, "labels", row, points.shape[:-1])
        rows.append(row.long()[(None,) * (points.ndim - 1 - row.ndim)])
    return rows


def _by_label(
    owner: str, labels: Any, query: Tensor, key: Tensor, *, not_self: bool, first: int
) -> Positives:
    rows = label_rows(owner, labels, query, key)
    m = rows[0].shape[-1]
    batch = functions.broadcast_shapes(rows[0].shape[:-1], rows[1].shape[:-1])
    number = _ranked(torch.cat([x.expand(*batch, -1) for x in rows], -1))
    found = Labeled(number[..., :m], number[..., m:], not_self, first)
    _all_have(owner, found.present())
    return found


def _tensor(owner: str, name: str, given: Any) -> Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"{owner}: {name} must be a tensor, or numbers that make one, not {given!r:.60}."
        ) from None


def _ranked(labels: Tensor) -> Tensor:
    """Equal labels of a row as equal numbers from 0 on, fewer than the row is long."""
    ordered, order = labels.sort(-1)
    steps = (ordered[..., 1:] != ordered[..., :-1]).long().cumsum(-1)
    return torch.zeros_like(labels).scatter(-1, order, torch.nn.functional.pad(steps, (1, 0)))


def _fits(owner: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if not broadcasts_to(x.shape, shape) or x.shape[-1] != shape[-1]:
        raise InputError(
            f"{owner}: {name} must have shape {shape}, or one that broadcasts to it, but have "
            f"{tuple(x.shape)}."
        )


def _all_have(owner: str, there: Tensor, what: str = "anchor") -> None:
    """Every anchor has a positive, or an error says which have none."""

    def missing() -> str:
        bad = (~there).reshape(-1).nonzero()[:, 0]
        some = ", ".join(str(int(i)) for i in bad[:5]) + (", ..." if len(bad) > 5 else "")
        return (
            f"{owner}: every {what} needs a positive, but {len(bad)} have none ({what} {some}). "
            "Leave these out of the call."
        )

    require(there, missing)
