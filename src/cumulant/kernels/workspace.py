"""Buffers reused from tile to tile.

A tile's arrays are a few megabytes, and fresh ones cost a page fault per 4 KiB every time: about
as much as the arithmetic. The tile functions therefore do their arithmetic through a `Workspace`,
whose buffers are reused across tiles and, on the CPU, across calls (each thread keeps at most
64 MB; the allocators of accelerators already do this).

Its operations are pure functions of their arguments with one licence: the *first* argument may be
overwritten, so it must not be used again unless the result is asked to be ``fresh``. Under
differentiation the licence is not taken (``Workspace(reuse=False)``), and the same tile function
is plain torch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from cumulant.core.typed import functions

_KEPT_BYTES = 64 * 2**20
_PADDING = 16
_kept = threading.local()


class Workspace:
    """Arithmetic for tile functions, into reused buffers where `reuse` is set."""

    def __init__(self, *, reuse: bool) -> None:
        self.reuses = reuse
        self._buffers: list[Tensor] = []
        self._views: dict[tuple[int, torch.Size], Tensor] = {}
        self._owned: set[int] = set()
        self._next = 0

    @classmethod
    @contextmanager
    def lease(cls, like: Tensor) -> Generator[Workspace]:
        """A workspace with this thread's buffers, which go back when the call is done."""
        work = cls(reuse=True)
        kept: dict[str, list[Tensor]] = _kept.__dict__
        kind = str(like.dtype).removeprefix("torch.")
        # Tensors made in inference mode, or fakes of a tracer, cannot serve ordinary calls.
        plain = like.device.type == "cpu" and type(like) in (Tensor, torch.nn.Parameter)
        if plain:
            work._buffers = kept.pop(kind, [])
        yield work
        if plain:
            room = _KEPT_BYTES
            keep: list[Tensor] = []
            for buffer in work._buffers:
                room -= buffer.nbytes
                if room < 0 or buffer.is_inference() or type(buffer) is not Tensor:
                    break
                keep.append(buffer)
            kept.clear()
            kept[kind] = keep

    def begin(self) -> None:
        """Release the buffers of the previous tile."""
        self._next = 0

    def _take(self, shape: torch.Size, like: Tensor) -> Tensor:
        slot = self._next
        self._next += 1
        view = self._views.get((slot, shape))
        if view is None:
            view = self._views[slot, shape] = self._allocate(slot, shape, like)
        return view

    def _allocate(self, slot: int, shape: torch.Size, like: Tensor) -> Tensor:
        # Rows a power of two apart share cache sets, which slows transposed products by a third.
        width = shape[-1] + (_PADDING if shape[-1] >= 256 else 0)
        size = math.prod(shape[:-1]) * width
        if slot == len(self._buffers):
            self._buffers.append(like.new_empty(size))
        if self._buffers[slot].numel() < size:
            self._owned.discard(self._buffers[slot].data_ptr())
            self._buffers[slot] = like.new_empty(size)
            self._views = {key: view for key, view in self._views.items() if key[0] != slot}
        buffer = self._buffers[slot]
        self._owned.add(buffer.data_ptr())
        return buffer[:size].view(*shape[:-1], width)[..., : shape[-1]]

    def _target(self, x: Tensor, *others: Tensor, fresh: bool = False) -> Tensor | None:
        """Where the result goes: into `x` if it is one of our buffers and large enough."""
        if not self.reuses:
            return None
        shape = x.shape
        for y in others:
            if any(mine < other for mine, other in zip(shape[::-1], y.shape[::-1], strict=False)):
                shape = functions.broadcast_shapes(shape, y.shape)
        return x if not fresh and x.shape == shape and self._owns(x) else self._take(shape, x)

    def _owns(self, x: Tensor) -> bool:
        return x.data_ptr() in self._owned

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """x @ y of equal batches, always into a new array."""
        if not self.reuses:
            return x @ y
        out = self._take(torch.Size((*x.shape[:-1], y.shape[-1])), x)
        return torch.matmul(x, y, out=out)

    def add_matmul(self, x: Tensor | None, y: Tensor, z: Tensor) -> Tensor:
        """x + y @ z, or y @ z where there is no x yet."""
        if x is None:
            return self.matmul(y, z)
        if not self.reuses or not self._owns(x):
            return x + y @ z
        batch = math.prod(x.shape[:-2])
        flat = (t.reshape(batch, *t.shape[-2:]) for t in (y, z))
        x.view(batch, *x.shape[-2:]).baddbmm_(*flat)
        return x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, out=self._target(x, y))

    def sub(self, x: Tensor, y: Tensor, *, fresh: bool = False) -> Tensor:
        return torch.sub(x, y, out=self._target(x, y, fresh=fresh))

    def mul(self, x: Tensor, y: Tensor, *, fresh: bool = False) -> Tensor:
        return torch.mul(x, y, out=self._target(x, y, fresh=fresh))

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """sum_j x_ij y_ij as a column."""
        out = torch.mul(x, y, out=self._target(x, y, fresh=True)).sum(-1, keepdim=True)
        self._next = max(0, self._next - 1)  # the products' buffer is free again
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return torch.mul(x, factor, out=self._target(x))

    def addcmul(self, x: Tensor, y: Tensor, z: Tensor, *, value: float = 1.0) -> Tensor:
        """x + value * y * z."""
        return torch.addcmul(x, y, z, value=value, out=self._target(x, y, z))

    def exp2(self, x: Tensor, *, fresh: bool = False) -> Tensor:
        return torch.exp2(x, out=self._target(x, fresh=fresh))

    def tanh(self, x: Tensor) -> Tensor:
        return torch.tanh(x, out=self._target(x))

    def clamp_min(self, x: Tensor, floor: float) -> Tensor:
        return torch.clamp(x, min=floor, out=self._target(x))

    def masked_fill(self, x: Tensor, where: Tensor, value: float) -> Tensor:
        target = self._target(x, where)
        if target is None:
            return x.masked_fill(where, value)
        return (target if target is x else target.copy_(x)).masked_fill_(where, value)
