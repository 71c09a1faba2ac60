"""Which engine computes: the compiled one where it takes the call, torch's operations otherwise.

An engine answers a small set of questions on plain tensors, without autograd: forward sums,
tangent, gradient, curvature, row statistics, the potential with its gradient. The autograd
Functions above do not know which one ran. ``None`` is the answer to a call that an engine does not
take; the torch tiles take everything.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.kernels.native import answers
from cumulant.kernels.native.library import Missing, library
from cumulant.kernels.tiles import Arguments, Band, Named, Program

__all__ = ["Engine", "Status", "compiled", "engine", "engines"]


class Engine(Protocol):
    """The questions. Arguments are named as in ``attention.py``; ``None`` means: not taken."""

    def forward(
        self, arguments: Named, *, scale: float, band: Band, rate: float, fields: tuple[str, ...]
    ) -> Arguments | None: ...

    def tangent(
        self, program: Program, arguments: Named, *, scale: float, rate: float
    ) -> Arguments | None: ...

    def gradient(
        self, program: Program, arguments: Named, *, scale: float, rate: float
    ) -> Arguments | None: ...

    def curvature(
        self, program: Program, arguments: Named, *, scale: float, rate: float
    ) -> Arguments | None: ...

    def statistics(
        self,
        arguments: Named,
        widths: Mapping[str, int],
        *,
        scale: float,
        band: Band,
        mass: float,
        start: Tensor | None,
        steps: int,
    ) -> Arguments | None: ...

    def potential(
        self, arguments: Named, shapes: Mapping[str, tuple[int, ...]]
    ) -> Arguments | None: ...


@dataclass(frozen=True)
class Status:
    """Whether an engine can run here, why (not), and the processor's instructions it uses."""

    available: bool
    why: str
    instruction_set: str | None


_asked: ContextVar[str | None] = ContextVar("engine", default=None)


def engines() -> dict[str, Status]:
    """Every engine by its name.

    >>> engines()["torch"].available
    True
    """
    capability = torch.backends.cpu.get_cpu_capability()
    tiles = Status(True, "torch's own operations; takes every call", capability)
    try:
        native = Status(True, "compiled, float32 and float64", library().instruction_set)
    except Missing as error:
        native = Status(False, str(error), None)
    return {"torch": tiles, "native": native}


@contextmanager
def engine(name: str) -> Generator[None]:
    """Within this context, in this thread or task, one engine computes: for tests and bisecting.

    Without it the fastest one that takes a call does. What "native" does not take (derivatives from
    the third order on, other devices) goes to the torch tiles here too.

    Args:
        name: "torch" or "native".

    Raises:
        InputError: there is no such engine, or it cannot run here; the message says why.

    >>> import torch, cumulant as cm
    >>> x = torch.randn(5, 8)
    >>> with cm.engine("torch"):
    ...     cm.attend(x, x).entropy.shape
    torch.Size([5])
    """
    known = engines()
    if name not in known:
        raise InputError(f"engine must be one of {', '.join(known)}, not {name!r}.")
    if not known[name].available:
        raise InputError(f"The engine {name!r} cannot run here: {known[name].why}.")
    token = _asked.set(name)
    try:
        yield
    finally:
        _asked.reset(token)


def compiled() -> Engine | None:
    """The compiled engine, where there is one and nobody asked for another.

    It reads and writes memory behind torch's back. Where a mode watches torch's operations, to
    record them or to count FLOPs, torch's own engine computes.
    """
    if _asked.get() not in (None, "native") or torch._C._len_torch_dispatch_stack():
        return None
    try:
        library()
    except Missing:
        return None
    return cast(Engine, answers)
