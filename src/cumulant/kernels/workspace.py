"""Buffers that one tile after another reuses.

A tile's arrays are a few megabytes, and fresh ones cost a page fault per 4 KiB every time: about
as much as the arithmetic. The tile functions therefore do their arithmetic through a `Workspace`,
whose buffers serve one tile after another and, on the CPU, one call after another (each thread
keeps at most 64 MB; accelerators have allocators of their own that do this).

Its operations are pure functions of their arguments with one licence: the *first* argument may be
overwritten, so it must not be used again. Under differentiation the licence is not taken
(``Workspace(reuse=False)``), and the same tile function is plain torch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

_KEPT_BYTES = 64 * 2**20
_kept = threading.local()


class Workspace:
    """Arithmetic for tile functions, into reused buffers where `reuse` is set."""

    def __init__(self, *, reuse: bool) -> None:
        self._reuse = reuse
        self._buffers: list[Tensor] = []
        self._next = 0

    @classmethod
    @contextmanager
    def lease(cls, like: Tensor) -> Generator[Workspace]:
        """A workspace with this thread's buffers, which go back when the call is done."""
        work = cls(reuse=True)
        kept: dict[str, list[Tensor]] = _kept.__dict__
        kind = str(like.dtype)
        on_cpu = like.device.type == "cpu"
        if on_cpu:
            work._buffers = kept.pop(kind, [])
        yield work
        if on_cpu:
            room = _KEPT_BYTES
            keep: list[Tensor] = []
            for buffer in work._buffers:
                room -= buffer.nbytes
                if room < 0:
                    break
                keep.append(buffer)
            kept.clear()
            kept[kind] = keep

    def begin(self) -> None:
        """Forget the arrays of the previous tile; their buffers are free again."""
        self._next = 0

    def _take(self, shape: torch.Size, like: Tensor) -> Tensor:
        size = math.prod(shape)
        if self._next == len(self._buffers):
            self._buffers.append(like.new_empty(size))
        if self._buffers[self._next].numel() < size:
            self._buffers[self._next] = like.new_empty(size)
        buffer = self._buffers[self._next]
        self._next += 1
        return buffer[:size].view(shape)

    def _target(self, x: Tensor, *others: Tensor) -> Tensor | None:
        """Where the result goes: over `x` if it is one of our buffers and large enough."""
        if not self._reuse:
            return None
        shape = torch.broadcast_shapes(x.shape, *(y.shape for y in others))
        ours = any(x.data_ptr() == b.data_ptr() for b in self._buffers)
        return x if ours and x.shape == shape else self._take(shape, x)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """x @ y, always into a new array."""
        if not self._reuse:
            return x @ y
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        out = self._take(torch.Size((*batch, x.shape[-2], y.shape[-1])), x)
        return torch.matmul(x, y, out=out)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, out=self._target(x, y))

    def sub(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sub(x, y, out=self._target(x, y))

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.mul(x, y, out=self._target(x, y))

    def addcmul(self, x: Tensor, y: Tensor, z: Tensor, *, value: float = 1.0) -> Tensor:
        """x + value * y * z."""
        return torch.addcmul(x, y, z, value=value, out=self._target(x, y, z))

    def exp2(self, x: Tensor) -> Tensor:
        return torch.exp2(x, out=self._target(x))

    def copy(self, x: Tensor) -> Tensor:
        """`x` in an array of its own, so that the original can still be used."""
        return self._take(x.shape, x).copy_(x) if self._reuse else x

    def clamp_min(self, x: Tensor, floor: float) -> Tensor:
        return torch.clamp(x, min=floor, out=self._target(x))

    def masked_fill(self, x: Tensor, where: Tensor, value: float) -> Tensor:
        target = self._target(x, where)
        if target is None:
            return x.masked_fill(where, value)
        return (target if target is x else target.copy_(x)).masked_fill_(where, value)
